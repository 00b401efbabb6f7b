#!/usr/bin/env bash
# Install the OpenCL drivers and offline compilers that CI tests with (Debian or Ubuntu, as root), and make a
# folder for each driver to point OCL_ICD_VENDORS to: FOLDER/pocl, FOLDER/rusticl, and FOLDER/none without any.
set -euo pipefail
folder=${1:?usage: tools/drivers.sh FOLDER}

export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq --yes --no-install-recommends \
    pocl-opencl-icd mesa-opencl-icd oclgrind clang-15 rocm-device-libs intel-opencl-icd

mkdir -p "$folder/none"
for driver in pocl rusticl; do
    mkdir -p "$folder/$driver"
    cp "/etc/OpenCL/vendors/$driver.icd" "$folder/$driver"
done

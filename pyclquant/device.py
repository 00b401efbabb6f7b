"""Finding devices, choosing one, and what a device carries: queue, capabilities, kernels."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import pyopencl as cl

from pyclquant import icd, probe, quirks, tuned
from pyclquant.capabilities import Capabilities, Verdict
from pyclquant.errors import NoDeviceError
from pyclquant.program import CL_DIR, Programs
from pyclquant.variants import Plan, S, Variant, select

ENVIRONMENT = "PYCLQUANT_DEVICE"
"""Environment variable with the selector that `Device.pick()` uses when it is given none."""

WHAT_TO_INSTALL = (
    "install a driver: pip install 'pyclquant[pocl]' (any Linux x86-64, no root) or 'pyclquant[intel-cpu]'; "
    "Debian/Ubuntu: apt-get install pocl-opencl-icd, or your GPU vendor's OpenCL package"
)


@dataclass(frozen=True)
class Found:
    """A device as enumerated. platform_index, device_index: its place among all of them, from 0."""

    platform_index: int
    device_index: int
    device: cl.Device = field(repr=False)
    reported: dict[str, Any] = field(repr=False)

    @property
    def label(self) -> str:
        """`0:0 platform / device`, unique and readable."""
        r = self.reported
        return f"{self.platform_index}:{self.device_index} {r['platform_name']} / {r['name']}"


@dataclass(frozen=True)
class Discovery:
    """All devices in the order of platforms, and what was left out and why."""

    found: tuple[Found, ...]
    notes: tuple[str, ...]


def ask(query: Callable[[], Any]) -> Any:
    """The value of a query, None when the driver refuses it: one wrong query must not reject a device."""
    try:
        return query()
    except (cl.Error, AttributeError, ValueError, UnicodeDecodeError):
        return None


def flags(names: Any, value: int | None) -> list[str] | None:
    """Names of the bits that are set in `value`."""
    if value is None:
        return None
    return sorted(n for n in dir(names) if n.isupper() and isinstance(getattr(names, n), int) and value & getattr(names, n))


def sub_group_sizes(device: Any) -> list[int]:
    """CL_DEVICE_SUB_GROUP_SIZES_INTEL (0x4108), which pyopencl has no name for."""
    return [int(n) for n in device.get_info(0x4108)]


def compute_capability(device: Any) -> str:
    """NVIDIA's, such as 9.0."""
    return f"{device.compute_capability_major_nv}.{device.compute_capability_minor_nv}"


def report(device: cl.Device) -> dict[str, Any]:
    """What the driver says of a device, with the keys of `tests/devices/*.json`. Unknown is None."""
    bits = ask(lambda: device.type) or 0
    types = cl.device_type
    kind = "cpu" if bits & types.CPU else "gpu" if bits & types.GPU else "accelerator"
    local_type = ask(lambda: device.local_mem_type)
    return {
        "name": str(ask(lambda: device.name)).strip(),
        "platform_name": str(ask(lambda: device.platform.name)).strip(),
        "platform_version": str(ask(lambda: device.platform.version)).strip(),
        "vendor": str(ask(lambda: device.vendor)).strip(),
        "driver_version": str(ask(lambda: device.driver_version)).strip(),
        "device_version": str(ask(lambda: device.version)).strip(),
        "opencl_c_version": str(ask(lambda: device.opencl_c_version)).strip(),
        "device_type": kind,
        "max_compute_units": ask(lambda: device.max_compute_units),
        "max_clock_mhz": ask(lambda: device.max_clock_frequency),
        "max_work_group_size": ask(lambda: device.max_work_group_size),
        "max_work_item_sizes": ask(lambda: list(device.max_work_item_sizes)),
        "preferred_work_group_size_multiple": ask(lambda: device.preferred_work_group_size_multiple),
        "sub_group_sizes": ask(lambda: sub_group_sizes(device)),
        "warp_or_wavefront": ask(lambda: device.warp_size_nv) or ask(lambda: device.wavefront_width_amd),
        "local_mem_size": ask(lambda: device.local_mem_size),
        "global_mem_size": ask(lambda: device.global_mem_size),
        "max_mem_alloc_size": ask(lambda: device.max_mem_alloc_size),
        "mem_base_addr_align_bits": ask(lambda: device.mem_base_addr_align),
        "global_mem_cacheline": ask(lambda: device.global_mem_cacheline_size),
        "native_vector_width": {"float": ask(lambda: device.native_vector_width_float)},
        "single_fp_config": flags(cl.device_fp_config, ask(lambda: device.single_fp_config)),
        "half_fp_config": flags(cl.device_fp_config, ask(lambda: device.half_fp_config)),
        "extensions": sorted(str(ask(lambda: device.extensions) or "").split()),
        "extra": {
            "device_profile": ask(lambda: device.profile),
            "address_bits": ask(lambda: device.address_bits),
            "local_mem_type": {1: "Local", 2: "Global"}.get(local_type),
            "host_unified_memory": ask(lambda: bool(device.host_unified_memory)),
            "compute_capability": ask(lambda: compute_capability(device)),
        },
    }


def discover(fresh: bool = False) -> Discovery:
    """All devices of all platforms. Drivers that crash or hang are left out, platforms without a device
    are noted. fresh: check the drivers again instead of using the verdict on disk.
    """
    prepared = icd.prepare(fresh)
    notes = [f"driver left out: {why}" for why in prepared.broken.values()]
    found: list[Found] = []
    try:
        platforms = cl.get_platforms()
    except cl.Error:
        platforms = []
    for p, platform in enumerate(platforms):
        why = "it lists none"
        try:
            devices = platform.get_devices()
        except cl.Error as error:
            devices, why = [], str(error)
        found += [Found(p, d, device, report(device)) for d, device in enumerate(devices)]
        if not devices:
            notes.append(f"platform {p} ({platform.name}): no device ({why})")
    return Discovery(tuple(found), tuple(notes))


def preference(found: Found) -> tuple[int, int, int]:
    """Sort key of `Device.pick()`: GPUs with their own memory, other GPUs, accelerators, CPUs; then the
    larger memory; then the order of enumeration.
    """
    r = found.reported
    own_memory = not r["extra"]["host_unified_memory"]
    kind = {"gpu": 0 if own_memory else 1, "accelerator": 2}.get(r["device_type"], 3)
    return kind, -int(r["global_mem_size"] or 0) if kind < 3 else 0, found.platform_index


def matches(found: Found, selector: str) -> bool:
    """Whether a selector means this device: `P:D` is its place; `gpu`, `cpu` or `accelerator` its type;
    anything else must occur in its platform, name, vendor or driver, whatever the case.
    """
    s = selector.strip().lower()
    if s.replace(":", "", 1).isdigit() and ":" in s:
        return s == f"{found.platform_index}:{found.device_index}"
    r = found.reported
    if s in ("gpu", "cpu", "accelerator"):
        return bool(r["device_type"] == s)
    words = " ".join(str(r[k]) for k in ("platform_name", "platform_version", "name", "vendor", "driver_version"))
    return s in words.lower()


def verdict_key(reported: dict[str, Any]) -> str:
    """Name of the file that keeps a device's verdicts: changes with platform, device, driver, this
    package's version, its kernels and how they are launched.
    """
    sources = hashlib.sha256()
    for path in (*sorted(CL_DIR.glob("*.[ch]*")), tuned.SHIPPED):
        sources.update(path.read_bytes())
    keys = ("platform_name", "platform_version", "name", "vendor", "driver_version", "device_version", "max_compute_units")
    row = [version("pyclquant"), sources.hexdigest(), sorted(probe.FEATURES), *(reported[k] for k in keys)]
    return hashlib.sha256(json.dumps(row).encode()).hexdigest()[:24]


def capabilities(found: Found, fresh: bool = False) -> Capabilities:
    """What works on a device: from the disk, or by probing it in child processes and keeping the verdicts."""
    path = icd.cache_dir() / "probe" / f"{verdict_key(found.reported)}.json"
    works: dict[str, Verdict] | None = None
    if not fresh:
        try:
            works = {name: Verdict.of(row) for name, row in json.loads(path.read_text())["works"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            works = None
    if works is None:
        works = probe.run(found.platform_index, found.device_index, found.reported)
        icd.write_cache(path, {"device": found.label, "works": {n: v.json() for n, v in works.items()}})
    return Capabilities(found.reported, quirks.apply(found.reported, works), tuned.user_layers(found.reported))


class Device:
    """A device in use: context, queue, capabilities and built kernels. Safe to share between threads.

    context, queue: pyopencl's.  capabilities: see `pyclquant.capabilities`.  programs: built kernels.
    """

    def __init__(self, queue: cl.CommandQueue, caps: Capabilities) -> None:
        self.queue = queue
        self.context: cl.Context = queue.context
        self.capabilities = caps
        self.programs = Programs(queue)
        self._plans: dict[object, Plan] = {}

    def plan(self, table: tuple[Variant[S], ...], shape: S, force: str | None = None) -> Plan:
        """`variants.select` for this device, remembered. Raises UnsupportedDeviceError."""
        key = (table[0].answer, shape, force)
        if key not in self._plans:
            self._plans[key] = select(table, self.capabilities, shape, force)
        return self._plans[key]

    @property
    def name(self) -> str:
        """`platform / device (driver)`."""
        r = self.capabilities.reported
        return f"{r['platform_name']} / {r['name']} ({r['driver_version']})"

    def __repr__(self) -> str:
        return f"<pyclquant.Device {self.name}>"

    @staticmethod
    def pick(selector: str | None = None, *, fresh: bool = False, profiling: bool = False) -> Device:
        """The best device that matches a selector, probed.

        Order: GPUs with their own memory, other GPUs, accelerators, CPUs; then the larger memory; then
        the order of the platforms. Devices on which no kernel runs are passed over.
        selector: see `matches`; None takes the environment variable PYCLQUANT_DEVICE, or any device.
        fresh: probe again instead of using the verdicts on disk.  profiling: of the queue.
        Raises NoDeviceError.
        """
        selector = selector if selector is not None else os.environ.get(ENVIRONMENT) or None
        discovery = discover(fresh)
        failed = []
        for found in sorted(candidates(discovery, selector), key=preference):
            caps = capabilities(found, fresh)
            reason = caps.missing("base")
            if reason is None:
                try:
                    # The name keeps the context alive: with Intel's CPU runtime 2026.2 a queue does not.
                    context = cl.Context([found.device])
                    if profiling:
                        queue = cl.CommandQueue(context, properties=cl.command_queue_properties.PROFILING_ENABLE)
                    else:
                        queue = cl.CommandQueue(context)
                    return Device(queue, caps)
                except cl.Error as error:
                    reason = f"no queue ({error})"
            failed.append(f"{found.label}: {reason}")
        raise NoDeviceError(f"device: expected one that runs a kernel, got {'; '.join(failed)}; {WHAT_TO_INSTALL}")

    @staticmethod
    def from_queue(queue: cl.CommandQueue, *, fresh: bool = False) -> Device:
        """The device of a pyopencl queue; arrays of the queue's context can be passed as they are.

        Raises NoDeviceError when the queue's device is none of those enumerated.
        """
        for found in discover(fresh).found:
            if found.device == queue.device:
                return Device(queue, capabilities(found, fresh))
        raise NoDeviceError(f"queue: expected a device of this machine's platforms, got {queue.device.name}")


def candidates(discovery: Discovery, selector: str | None) -> list[Found]:
    """The devices that a selector means, all for None. Raises NoDeviceError with what was found and searched."""
    searched = f"searched OCL_ICD_VENDORS={os.environ.get('OCL_ICD_VENDORS') or '/etc/OpenCL/vendors'} and pyopencl's own drivers"
    notes = "".join(f"; {note}" for note in discovery.notes)
    if not discovery.found:
        raise NoDeviceError(f"device: expected an OpenCL device, found none; {searched}{notes}; {WHAT_TO_INSTALL}")
    chosen = [f for f in discovery.found if selector is None or matches(f, selector)]
    if not chosen:
        have = "; ".join(f.label for f in discovery.found)
        raise NoDeviceError(f"device: expected one that matches {selector!r}, found {have}{notes}")
    return chosen

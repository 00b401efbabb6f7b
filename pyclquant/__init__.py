"""Portable OpenCL quantizers for LLM inference. See README.md."""

from importlib.metadata import version

from pyclquant import checkpoint, convert, files, kv, testing, w8a8
from pyclquant.device import Device
from pyclquant.errors import (
    BuildError,
    ContextError,
    DTypeError,
    FileError,
    NoDeviceError,
    PyclquantError,
    ShapeError,
    TunedError,
    UnsupportedDeviceError,
)
from pyclquant.kv import Quantized

__version__ = version("pyclquant")

__all__ = [
    "BuildError",
    "ContextError",
    "DTypeError",
    "Device",
    "FileError",
    "NoDeviceError",
    "PyclquantError",
    "Quantized",
    "ShapeError",
    "TunedError",
    "UnsupportedDeviceError",
    "__version__",
    "checkpoint",
    "convert",
    "files",
    "kv",
    "testing",
    "w8a8",
]

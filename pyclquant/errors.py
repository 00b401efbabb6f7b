"""What can go wrong, as types. Every message has the form *name: expected X (meaning), got Y*."""


class PyclquantError(Exception):
    """Base of all errors that pyclquant raises on purpose."""


class ShapeError(PyclquantError, ValueError):
    """A shape, size, stride or numeric parameter is not what the operation takes."""


class DTypeError(PyclquantError, TypeError):
    """An element type or a format name is not what the operation takes."""


class ContextError(PyclquantError, ValueError):
    """An array or a queue belongs to another OpenCL context than the device in use."""


class FileError(PyclquantError, ValueError):
    """A file cannot be read as tensors, or cannot be written."""


class TunedError(PyclquantError, ValueError):
    """A file of launch parameters holds what no kernel takes; the message names file and key."""


class NoDeviceError(PyclquantError, RuntimeError):
    """No OpenCL device matches; the message tells what was searched and what to install."""


class UnsupportedDeviceError(PyclquantError, RuntimeError):
    """The device runs no variant, or not the forced one; the message holds the reason of each."""


class BuildError(PyclquantError, RuntimeError):
    """A kernel did not build; the message holds file, device, driver, options and the log."""

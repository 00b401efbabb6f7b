"""Arrays as the operations take them: checked before anything is enqueued, then as kernel arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyopencl as cl
import pyopencl.array as cla

from pyclquant.device import Device
from pyclquant.errors import ContextError, DTypeError, ShapeError

HostArray = np.ndarray[Any, Any]
AnyArray = HostArray | cla.Array


def check_array(dev: Device, a: object, name: str) -> AnyArray:
    """`a` as an array that a kernel can take: NumPy or pyopencl, native byte order, C-contiguous, this context.

    Raises DTypeError, ShapeError or ContextError.
    """
    if not isinstance(a, np.ndarray | cla.Array):
        raise DTypeError(f"{name}: expected a numpy.ndarray or a pyopencl.array.Array, got {type(a).__name__}")
    if not a.dtype.isnative:
        raise DTypeError(f"{name}: expected native byte order, got dtype {a.dtype.str}")
    if not a.flags.c_contiguous:
        raise ShapeError(f"{name}: expected a C-contiguous array, got shape {a.shape} with strides {a.strides}")
    if isinstance(a, cla.Array) and a.context != dev.context:
        raise ContextError(f"{name}: expected an array of this device's context ({dev.name}), got one of another context")
    return a


def check_device_array(dev: Device, a: object, name: str) -> cla.Array:
    """`check_array` for an array that must be on the device, because it is written to."""
    array = check_array(dev, a, name)
    if not isinstance(array, cla.Array):
        raise DTypeError(f"{name}: expected a pyopencl.array.Array, got {type(array).__name__}")
    return array


def check_matrix(dev: Device, a: object, name: str, pitch: int = 1) -> AnyArray:
    """`a` as a matrix [M, K] whose rows are contiguous but may lie apart: NumPy or pyopencl, native byte order, this context.

    pitch: on the device, offset and row pitch must be multiples of so many elements. A row pitch below K is refused, as are
    negative ones. Raises DTypeError, ShapeError or ContextError.
    """
    if not isinstance(a, np.ndarray | cla.Array) or a.ndim != 2:
        if isinstance(a, np.ndarray | cla.Array):
            raise ShapeError(f"{name}: expected a matrix [M, K], got shape {tuple(a.shape)}")
        raise DTypeError(f"{name}: expected a numpy.ndarray or a pyopencl.array.Array, got {type(a).__name__}")
    if isinstance(a, np.ndarray) or a.size == 0:
        check_array(dev, np.empty((0, 0), a.dtype), name)
        return a
    if a.context != dev.context:
        raise ContextError(f"{name}: expected an array of this device's context ({dev.name}), got one of another context")
    (rows, columns), itemsize = a.shape, a.dtype.itemsize
    ld = a.strides[0] // itemsize if rows > 1 else columns
    if a.strides[1] != itemsize and columns > 1:
        raise ShapeError(f"{name}: expected contiguous rows, got shape {tuple(a.shape)} with strides {a.strides}")
    if ld < columns or (rows > 1 and a.strides[0] % itemsize):
        raise ShapeError(f"{name}: expected a row pitch of at least {columns} elements, got strides {a.strides}")
    if ld % pitch:
        raise ShapeError(f"{name}: expected a row pitch that is a multiple of {pitch} elements, got {ld}")
    if a.offset % (pitch * itemsize):
        raise ShapeError(f"{name}: expected an offset that is a multiple of {pitch} elements, got {a.offset / itemsize:g}")
    return a


def expect(a: AnyArray, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Raises ShapeError or DTypeError unless `a` has this shape and dtype."""
    if tuple(a.shape) != tuple(shape):
        raise ShapeError(f"{name}: expected shape {tuple(shape)}, got {tuple(a.shape)}")
    if a.dtype != dtype:
        raise DTypeError(f"{name}: expected {dtype}, got {a.dtype}")


def on_device(dev: Device, a: AnyArray, name: str) -> cla.Array:
    """`a` itself when it is on this device, else a copy of the NumPy array there. Raises like `check_array`."""
    array = check_array(dev, a, name)
    return array if isinstance(array, cla.Array) else cla.to_device(dev.queue, array)


def on_host(a: AnyArray) -> HostArray:
    """`a` as a NumPy array; waits for the device."""
    if not isinstance(a, cla.Array):
        return a
    if a.size == 0:  # pyopencl cannot read an empty array of an ml_dtypes type
        return np.empty(a.shape, a.dtype)
    host: HostArray = a.get()
    return host


def kernel_arguments(*arrays: cla.Array) -> list[Any]:
    """For each array its buffer and its offset in elements."""
    return [argument for a in arrays for argument in (a.base_data, np.uint64(a.offset // a.dtype.itemsize))]


def alignment(*arrays: tuple[cla.Array, int]) -> int:
    """The largest power of two, up to 2^20, that divides the offsets of all arrays, counted in elements.

    arrays: each with the elements that one of its items holds (2 for packed int4). 1 for an array in
    memory that the user allocated: OpenCL does not align that.
    """
    common = 1 << 20
    for a, elements in arrays:
        buffer: Any = a.base_data
        if buffer.flags & cl.mem_flags.USE_HOST_PTR:
            return 1
        common |= a.offset // a.dtype.itemsize * elements
    return common & -common

"""Quantize K/V tensors to FP8, INT8 or INT4 on the device, and bring them back.

Source: the kernels of the seed `kv_cache_quant.wgsl`, mended; `pyclquant.reference` is the specification.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyopencl as cl
import pyopencl.array as cla

from pyclquant.device import Device
from pyclquant.errors import ContextError, DTypeError, ShapeError
from pyclquant.formats import (
    EPS,
    FLOAT_DTYPES,
    FLOAT_MACROS,
    Format,
    Layout,
    check_eps,
    float_dtype,
    get_format,
    resolve_granularity,
)
from pyclquant.variants import KV, Blocks, Plan, select

HostArray = np.ndarray[Any, Any]
AnyArray = HostArray | cla.Array
Events = Sequence[cl.Event] | None

PER_TENSOR_BLOCK = 4096
"""Elements that a team takes at a time when there is one scale for all."""


@dataclass(frozen=True)
class Quantized:
    """A quantized tensor: on the device as `quantize` returns it, on the host after `get()`.

    format, granularity, group_size: as given to `quantize` (group_size None unless per_group)
    shape: of the tensor that was quantized, [..., head_dim]
    codes: [..., head_dim] of the format's dtype; int4 [..., ceil(head_dim / 2)] uint8, even index low nibble
    scales: float32 or float16, one a block: per_tensor [1], per_token [tokens], per_head [..., 1 a row],
        per_group [..., ceil(head_dim / group_size)]; a value is code * scale (+ min)
    mins: int4 only, like scales
    """

    format: str
    granularity: str
    group_size: int | None
    shape: tuple[int, ...]
    codes: AnyArray
    scales: AnyArray
    mins: AnyArray | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and mins together."""
        return int(self.codes.nbytes + self.scales.nbytes + (self.mins.nbytes if self.mins is not None else 0))

    @property
    def events(self) -> list[cl.Event]:
        """Events that must be done before the arrays may be read; empty on the host."""
        return list(self.codes.events) if isinstance(self.codes, cla.Array) else []

    def get(self) -> Quantized:
        """The same with NumPy arrays; waits for the device."""

        def host(a: AnyArray) -> HostArray:
            return a.get() if isinstance(a, cla.Array) else a

        return replace(
            self, codes=host(self.codes), scales=host(self.scales), mins=None if self.mins is None else host(self.mins)
        )

    def to_device(self, dev: Device) -> Quantized:
        """The same with arrays on `dev`. Raises ContextError when they are on a device of another context."""

        def there(a: AnyArray, name: str) -> cla.Array:
            return on_device(dev, a, name)

        return replace(
            self,
            codes=there(self.codes, "codes"),
            scales=there(self.scales, "scales"),
            mins=None if self.mins is None else there(self.mins, "mins"),
        )


def quantize(
    dev: Device,
    x: AnyArray,
    format: str | Format,
    *,
    granularity: str | None = None,
    group_size: int | None = None,
    scale_dtype: str = "float32",
    eps: float = EPS,
    out: Quantized | None = None,
    wait_for: Events = None,
    force: str | None = None,
) -> Quantized:
    """Quantize x [..., head_dim] on the device. Returns at once; the result's arrays carry the event.

    x: float32, float16 or bfloat16, C-contiguous, NumPy or pyopencl.array (slices with an offset too);
        any leading axes, [tokens, heads, head_dim] for per_token. A float32 or bfloat16 subnormal counts as 0.
    format: fp8_e4m3fn, fp8_e5m2, int8, int4
    granularity: per_tensor, per_token, per_head (default), per_group (default and only choice of int4)
    group_size: elements of a group, for per_group (default 64); even for int4; the last group of a row may be shorter
    scale_dtype: float32, or float16 (clamped to [2^-14, 65504], codes follow the rounded scale)
    eps: floor of a scale of fp8 and int8
    out: what an earlier call of the same shapes returned, to be overwritten
    wait_for: events to wait for, beside those that x carries
    force: name of a variant, for tests and timing

    Raises DTypeError, ShapeError, ContextError before anything is enqueued; UnsupportedDeviceError,
    BuildError when the device cannot do it. Source: `pyclquant.reference.quantize`.
    """
    fmt = get_format(format)
    x_dtype = float_dtype(check_array(dev, x, "x").dtype, "x")
    scale_name = float_dtype(scale_dtype, "scale_dtype", ("float32", "float16"))
    eps = check_eps(eps)
    granularity = resolve_granularity(fmt, granularity)
    layout = Layout.of(x.shape, fmt, granularity, group_size)
    check_sizes(layout)
    result = Quantized(fmt.name, granularity, layout.block if granularity == "per_group" else None, tuple(x.shape), x, x)
    if granularity == "per_group" and group_size is not None:
        result = replace(result, group_size=int(group_size))
    result = with_arrays(dev, result, layout, fmt, scale_name, out)
    if layout.blocks == 0:
        return fill_empty(dev, result, eps, fmt, wait_for)

    source = on_device(dev, x, "x")
    per_tensor = granularity == "per_tensor"
    dim, block, blocks_per_row, blocks = kernel_blocks(layout, fmt, per_tensor)
    codes, scales, mins = result.codes, result.scales, result.mins
    shape = Blocks(dim, block, blocks, source.dtype.itemsize, fmt.pack, alignment(fmt, source, codes))
    plan = select(KV, dev.capabilities, shape, force)
    macros = {
        "FORMAT": fmt.macro,
        "SCALE_TYPE": FLOAT_MACROS[scale_name],
        "X_TYPE": FLOAT_MACROS[x_dtype],
        "PER_TENSOR": int(per_tensor),
    }
    events = [*(wait_for or ()), *source.events, *(out.events if out else ())]
    counts = [np.uint64(blocks), np.uint64(dim), np.uint32(block), np.uint32(blocks_per_row)]
    amax: list[Any] = []
    if per_tensor:
        largest = cla.empty(dev.queue, 1, np.int32)
        events = [cl.enqueue_fill_buffer(dev.queue, largest.base_data, np.int32(0), 0, 4, wait_for=events)]
        amax = [largest.base_data]
        arguments = [*buffer(source), *amax, *counts]
        events = [launch(dev, "kv_quantize.cl", "kv_quantize_amax", plan, macros, arguments, events, blocks)]
    arrays = [source, codes, scales] + ([mins] if mins is not None else [])
    arguments = [a for array in arrays for a in buffer(array)] + amax + counts
    event = launch(dev, "kv_quantize.cl", "kv_quantize", plan, macros, arguments, events, blocks, [np.float32(eps)])
    for array in arrays[1:]:
        array.add_event(event)
    return result


def dequantize(
    dev: Device,
    q: Quantized,
    dtype: str = "float32",
    *,
    out: cla.Array | None = None,
    wait_for: Events = None,
    force: str | None = None,
) -> cla.Array:
    """The values [*q.shape] of a quantized tensor, on the device: code * scale (+ min), rounded once to dtype.

    q: on this device or on the host.  dtype: float32, float16 or bfloat16.
    out: C-contiguous array of q.shape and dtype to write to, slices with an offset too.
    wait_for, force: as in `quantize`.  The result carries the event.

    Raises DTypeError, ShapeError, ContextError before anything is enqueued; UnsupportedDeviceError,
    BuildError when the device cannot do it. Source: `pyclquant.reference.dequantize`.
    """
    fmt = get_format(q.format)
    dtype_name = float_dtype(dtype)
    granularity = resolve_granularity(fmt, q.granularity)
    layout = Layout.of(q.shape, fmt, granularity, q.group_size)
    check_sizes(layout)
    scale_name = float_dtype(q.scales.dtype, "scales", ("float32", "float16"))
    check_quantized(dev, q, layout, fmt, scale_name)
    if out is not None:
        check_array(dev, out, "out", cla.Array)
        expect(out, "out", q.shape, FLOAT_DTYPES[dtype_name])
    y = out if out is not None else cla.empty(dev.queue, q.shape, FLOAT_DTYPES[dtype_name])
    if layout.blocks == 0:
        return y

    there = q.to_device(dev)
    codes, scales, mins = there.codes, there.scales, there.mins
    per_tensor = granularity == "per_tensor"
    dim, block, blocks_per_row, blocks = kernel_blocks(layout, fmt, per_tensor)
    plan = select(KV, dev.capabilities, Blocks(dim, block, blocks, y.dtype.itemsize, fmt.pack, alignment(fmt, y, codes)), force)
    macros = {
        "FORMAT": fmt.macro,
        "SCALE_TYPE": FLOAT_MACROS[scale_name],
        "X_TYPE": FLOAT_MACROS[dtype_name],
        "PER_TENSOR": int(per_tensor),
    }
    arrays = [y, codes, scales] + ([mins] if mins is not None else [])
    events = [*(wait_for or ()), *(e for array in arrays for e in array.events)]
    counts = [np.uint64(blocks), np.uint64(dim), np.uint32(block), np.uint32(blocks_per_row)]
    arguments = [a for array in arrays for a in buffer(array)] + counts
    y.add_event(launch(dev, "kv_dequantize.cl", "kv_dequantize", plan, macros, arguments, events, blocks))
    return y


def plan_for(dev: Device, shape: tuple[int, ...], dtype: str, format: str | Format, granularity: str | None = None,
             group_size: int | None = None, force: str | None = None) -> Plan:  # fmt: skip
    """The launch that `quantize` and `dequantize` take for a tensor without offset; raises like them."""
    fmt = get_format(format)
    granularity = resolve_granularity(fmt, granularity)
    dim, block, _, blocks = kernel_blocks(Layout.of(shape, fmt, granularity, group_size), fmt, granularity == "per_tensor")
    return select(KV, dev.capabilities, Blocks(dim, block, blocks, FLOAT_DTYPES[float_dtype(dtype)].itemsize, fmt.pack), force)


# ---- checks ----


def check_array(dev: Device, a: object, name: str, kind: Any = (np.ndarray, cla.Array)) -> AnyArray:
    """`a` as an array that a kernel can take; raises DTypeError, ShapeError or ContextError."""
    if not isinstance(a, kind):
        want = "a pyopencl.array.Array" if kind is cla.Array else "a numpy.ndarray or a pyopencl.array.Array"
        raise DTypeError(f"{name}: expected {want}, got {type(a).__name__}")
    array: AnyArray = a
    if not array.dtype.isnative:
        raise DTypeError(f"{name}: expected native byte order, got dtype {array.dtype.str}")
    if not array.flags.c_contiguous:
        raise ShapeError(f"{name}: expected a C-contiguous array, got shape {array.shape} with strides {array.strides}")
    if isinstance(array, cla.Array) and array.context != dev.context:
        raise ContextError(f"{name}: expected an array of this device's context ({dev.name}), got one of another context")
    return array


def expect(a: AnyArray, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Raises ShapeError or DTypeError unless `a` has this shape and dtype."""
    if tuple(a.shape) != tuple(shape):
        raise ShapeError(f"{name}: expected shape {tuple(shape)}, got {tuple(a.shape)}")
    if a.dtype != dtype:
        raise DTypeError(f"{name}: expected {dtype}, got {a.dtype}")


def check_sizes(layout: Layout) -> None:
    """A block must be countable in 31 bits, unless it is the whole tensor."""
    if layout.block >= 2**31 and layout.rows > 1:
        raise ShapeError(f"x: expected fewer than 2**31 elements a block, got {layout.block}")


def check_quantized(dev: Device, q: Quantized, layout: Layout, fmt: Format, scale_name: str) -> None:
    """Raises unless the arrays of `q` are what its format, granularity and shape say."""
    for a, name in ((q.codes, "codes"), (q.scales, "scales"), (q.mins, "mins")):
        if name == "mins" and not fmt.asymmetric:
            if a is not None:
                raise ShapeError(f"mins: expected None for {fmt.name}, got an array of shape {tuple(a.shape)}")
            continue
        array = check_array(dev, a, name)
        if name == "codes":
            expect(array, name, layout.codes_shape, fmt.codes_dtype)
        else:
            expect(array, name, layout.scales_shape, FLOAT_DTYPES[scale_name])


# ---- arrays and launches ----


def on_device(dev: Device, a: AnyArray, name: str) -> cla.Array:
    """`a` itself when it is on this device, else a copy of the NumPy array there."""
    check_array(dev, a, name)
    return a if isinstance(a, cla.Array) else cla.to_device(dev.queue, a)


def with_arrays(dev: Device, result: Quantized, layout: Layout, fmt: Format, scale_name: str, out: Quantized | None) -> Quantized:
    """`result` with the arrays of `out`, checked, or with new ones."""
    stored = FLOAT_DTYPES[scale_name]
    if out is None:
        return replace(
            result,
            codes=cla.empty(dev.queue, layout.codes_shape, fmt.codes_dtype),
            scales=cla.empty(dev.queue, layout.scales_shape, stored),
            mins=cla.empty(dev.queue, layout.scales_shape, stored) if fmt.asymmetric else None,
        )
    if not isinstance(out, Quantized):
        raise DTypeError(f"out: expected a Quantized, got {type(out).__name__}")
    for what in ("format", "granularity", "group_size", "shape"):
        if getattr(out, what) != getattr(result, what):
            raise ShapeError(f"out: expected {what} {getattr(result, what)}, got {getattr(out, what)}")
    for a, name in ((out.codes, "out.codes"), (out.scales, "out.scales"), (out.mins, "out.mins")):
        if a is not None:
            check_array(dev, a, name, cla.Array)
    check_quantized(dev, out, layout, fmt, scale_name)
    return replace(result, codes=out.codes, scales=out.scales, mins=out.mins)


def fill_empty(dev: Device, result: Quantized, eps: float, fmt: Format, wait_for: Events) -> Quantized:
    """A tensor without elements launches nothing; scales that exist all the same are those of no finite element."""
    if result.scales.size:
        scale = np.float32(0 if fmt.asymmetric else eps)
        if result.scales.dtype == np.float16:
            scale = max(scale, np.float32(2.0**-14))
        result.scales.fill(scale.astype(result.scales.dtype), wait_for=list(wait_for or ()))
    return result


def kernel_blocks(layout: Layout, fmt: Format, per_tensor: bool) -> tuple[int, int, int, int]:
    """dim, block, blocks_per_row and blocks as the kernels take them.

    Blocks that fill their rows exactly are passed as rows of their own: that spares the kernel a division.
    """
    if per_tensor:
        block = min(layout.dim, PER_TENSOR_BLOCK)
        blocks_per_row = -(-layout.dim // block) if block else 0
        return layout.dim, block, blocks_per_row, layout.rows * blocks_per_row
    if layout.block and layout.dim % layout.block == 0 and layout.block % fmt.pack == 0:
        return layout.block, layout.block, 1, layout.blocks
    return layout.dim, layout.block, layout.blocks_per_row, layout.blocks


def buffer(a: cla.Array) -> list[Any]:
    """Kernel arguments of an array: its buffer and its offset in elements."""
    return [a.base_data, np.uint64(a.offset // a.dtype.itemsize)]


def alignment(fmt: Format, floats: cla.Array, codes: cla.Array) -> int:
    """The largest power of two, up to 2^20, that divides the element offsets of both."""
    offsets = floats.offset // floats.dtype.itemsize | codes.offset * fmt.pack | 1 << 20
    return int(offsets & -offsets)


def launch(
    dev: Device,
    file: str,
    name: str,
    plan: Plan,
    macros: dict[str, str | int],
    arguments: list[Any],
    wait_for: list[cl.Event],
    blocks: int,
    more: Sequence[Any] = (),
) -> cl.Event:
    """Enqueue a kernel over blocks: `arguments`, then blocks_per_team, then `more`.

    The work-group shrinks until the built kernel takes it.
    """
    with dev.programs.lock:
        while True:
            kernel = dev.programs.kernel(file, name, {**macros, **plan.defines()}, plan.options)
            limit = kernel.get_work_group_info(cl.kernel_work_group_info.WORK_GROUP_SIZE, dev.queue.device)
            if plan.wg <= limit or plan.wg == 1:
                break
            wg = plan.wg // 2
            plan = replace(plan, wg=wg, lanes=min(plan.lanes, wg))
        kernel.set_args(*arguments, np.uint32(plan.blocks_per_team), *more)
        return cl.enqueue_nd_range_kernel(dev.queue, kernel, (plan.global_size(blocks),), (plan.wg,), wait_for=wait_for)

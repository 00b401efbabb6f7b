"""Quantize K/V tensors to FP8, INT8 or INT4 on the device, and bring them back.

Source: the kernels of the seed `kv_cache_quant.wgsl`, mended; `pyclquant.reference` is the specification.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyopencl as cl
import pyopencl.array as cla

from pyclquant.arrays import (
    AnyArray,
    alignment,
    check_array,
    check_device_array,
    expect,
    kernel_arguments,
    on_device,
    on_host,
)
from pyclquant.device import Device
from pyclquant.errors import DTypeError, ShapeError
from pyclquant.formats import (
    DEFAULT_GROUP_SIZE,
    EPS,
    FLOAT_DTYPES,
    FLOAT_MACROS,
    SCALE_DTYPES,
    Format,
    Layout,
    check_eps,
    float_dtype,
    get_format,
    resolve_granularity,
)
from pyclquant.program import Launch
from pyclquant.variants import KV, Blocks, Macros, Plan

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
        mins = None if self.mins is None else on_host(self.mins)
        return replace(self, codes=on_host(self.codes), scales=on_host(self.scales), mins=mins)

    def to_device(self, dev: Device) -> Quantized:
        """The same with arrays on `dev`. Raises ContextError when they are on a device of another context."""
        mins = None if self.mins is None else on_device(dev, self.mins, "mins")
        return replace(self, codes=on_device(dev, self.codes, "codes"), scales=on_device(dev, self.scales, "scales"), mins=mins)

    def device_arrays(self) -> list[cla.Array]:
        """codes, scales and mins, those that there are, which must be on a device."""
        arrays = [a for a in (self.codes, self.scales, self.mins) if isinstance(a, cla.Array)]
        assert len(arrays) == (2 if self.mins is None else 3), "to_device() comes before"
        return arrays


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
    scale_name = float_dtype(scale_dtype, "scale_dtype", SCALE_DTYPES)
    eps = check_eps(eps)
    granularity = resolve_granularity(fmt, granularity)
    layout = Layout.of(x.shape, fmt, granularity, group_size)
    check_sizes(layout)
    result = Quantized(fmt.name, granularity, group_of(granularity, group_size), tuple(x.shape), x, x)
    result = with_arrays(dev, result, layout, fmt, scale_name, out)
    if layout.blocks == 0:
        return fill_empty(result, eps, fmt, wait_for)

    source = on_device(dev, x, "x")
    written = result.device_arrays()
    view = BlockView.of(layout, fmt, granularity)
    plan = dev.plan(KV, view.blocks_of(source, written[0]), force)
    macros = view.macros(x_dtype, scale_name)
    events = [*(wait_for or ()), *source.events, *(e for a in written for e in a.events)]
    amax = []
    if view.per_tensor:
        amax = [cl.Buffer(dev.context, cl.mem_flags.READ_WRITE, 4)]
        events = [cl.enqueue_fill_buffer(dev.queue, amax[0], np.uint32(0), 0, 4, wait_for=events)]
        arguments = [*kernel_arguments(source), *amax, *view.counts(plan)]
        launch = Launch("kv_quantize.cl", "kv_quantize_amax", plan, macros, arguments, view.blocks)
        events = [dev.programs.launch(launch, events)]
    arguments = [*kernel_arguments(source, *written), *amax, *view.counts(plan), np.float32(eps)]
    event = dev.programs.launch(Launch("kv_quantize.cl", "kv_quantize", plan, macros, arguments, view.blocks), events)
    for array in written:
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
    scale_name = float_dtype(q.scales.dtype, "scales", SCALE_DTYPES)
    check_quantized(dev, q, layout, fmt, scale_name)
    if out is not None:
        expect(check_device_array(dev, out, "out"), "out", q.shape, FLOAT_DTYPES[dtype_name])
    y = out if out is not None else cla.empty(dev.queue, q.shape, FLOAT_DTYPES[dtype_name])
    if layout.blocks == 0:
        return y

    read = q.to_device(dev).device_arrays()
    view = BlockView.of(layout, fmt, granularity)
    plan = dev.plan(KV, view.blocks_of(y, read[0], restore=True), force)
    macros = view.macros(dtype_name, scale_name)
    events = [*(wait_for or ()), *(e for a in (y, *read) for e in a.events)]
    arguments = [*kernel_arguments(y, *read), *view.counts(plan)]
    launch = Launch("kv_dequantize.cl", "kv_dequantize", plan, macros, arguments, view.blocks)
    y.add_event(dev.programs.launch(launch, events))
    return y


def plan_for(
    dev: Device,
    shape: tuple[int, ...],
    dtype: str,
    format: str | Format,
    granularity: str | None = None,
    group_size: int | None = None,
    *,
    restore: bool = False,
    force: str | None = None,
) -> Plan:
    """The launch that `quantize` (restore: `dequantize`) takes for a tensor without offset; raises like them."""
    fmt = get_format(format)
    view = BlockView.of(Layout.of(shape, fmt, granularity, group_size), fmt, resolve_granularity(fmt, granularity))
    blocks = Blocks(view.dim, view.block, view.blocks, FLOAT_DTYPES[float_dtype(dtype)].itemsize, fmt.pack, restore=restore)
    return dev.plan(KV, blocks, force)


# ---- checks ----


def group_of(granularity: str, group_size: int | None) -> int | None:
    """The group size that a result remembers."""
    if granularity != "per_group":
        return None
    return DEFAULT_GROUP_SIZE if group_size is None else int(group_size)


def check_sizes(layout: Layout) -> None:
    """A block must be countable in 31 bits, unless it is the whole tensor."""
    if layout.block >= 2**31 and layout.rows > 1:
        raise ShapeError(f"x: expected fewer than 2**31 elements a block, got {layout.block}")


def check_quantized(dev: Device, q: Quantized, layout: Layout, fmt: Format, scale_name: str) -> None:
    """Raises unless the arrays of `q` are what its format, granularity and shape say."""
    expect(check_array(dev, q.codes, "codes"), "codes", layout.codes_shape, fmt.codes_dtype)
    expect(check_array(dev, q.scales, "scales"), "scales", layout.scales_shape, FLOAT_DTYPES[scale_name])
    if fmt.asymmetric:
        expect(check_array(dev, q.mins, "mins"), "mins", layout.scales_shape, FLOAT_DTYPES[scale_name])
    elif q.mins is not None:
        raise ShapeError(f"mins: expected None for {fmt.name}, got an array of shape {tuple(q.mins.shape)}")


# ---- arrays and blocks ----


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
    check_quantized(dev, out, layout, fmt, scale_name)
    for a, name in ((out.codes, "out.codes"), (out.scales, "out.scales"), (out.mins, "out.mins")):
        if a is not None:
            check_device_array(dev, a, name)
    return replace(result, codes=out.codes, scales=out.scales, mins=out.mins)


def fill_empty(result: Quantized, eps: float, fmt: Format, wait_for: Events) -> Quantized:
    """A tensor without elements launches nothing; scales that exist all the same are those of no finite element."""
    for event in wait_for or ():
        event.wait()
    for a in result.device_arrays()[1:]:
        scale = np.float32(0 if fmt.asymmetric else eps)
        if a.dtype == np.float16 and not fmt.asymmetric:
            scale = max(scale, np.float32(2.0**-14))
        if a.size:
            a.fill(scale.astype(a.dtype))
    return result


@dataclass(frozen=True)
class BlockView:
    """A tensor as the kernels see it: rows of `dim` elements, cut into blocks; see `cl/kv_quantize.cl`."""

    fmt: Format
    per_tensor: bool
    dim: int
    block: int
    blocks_per_row: int
    blocks: int

    @staticmethod
    def of(layout: Layout, fmt: Format, granularity: str) -> BlockView:
        """Blocks that fill their rows exactly become rows of their own: that spares the kernel a division.

        With one scale for all, the blocks are pieces that a team takes at a time.
        """
        if granularity == "per_tensor":
            block = min(layout.dim, PER_TENSOR_BLOCK)
            blocks_per_row = -(-layout.dim // block) if block else 0
            return BlockView(fmt, True, layout.dim, block, blocks_per_row, layout.rows * blocks_per_row)
        if layout.block and layout.dim % layout.block == 0 and layout.block % fmt.pack == 0:
            return BlockView(fmt, False, layout.block, layout.block, 1, layout.blocks)
        return BlockView(fmt, False, layout.dim, layout.block, layout.blocks_per_row, layout.blocks)

    def blocks_of(self, floats: cla.Array, codes: cla.Array, *, restore: bool = False) -> Blocks:
        """What the choice of a variant needs to know."""
        align = alignment((floats, 1), (codes, self.fmt.pack))
        return Blocks(self.dim, self.block, self.blocks, floats.dtype.itemsize, self.fmt.pack, align, restore)

    def counts(self, plan: Plan) -> list[np.generic]:
        """Kernel arguments: blocks, dim, block, blocks_per_row, blocks_per_team."""
        wide, narrow = np.uint64, np.uint32
        return [wide(self.blocks), wide(self.dim), narrow(self.block), narrow(self.blocks_per_row), narrow(plan.blocks_per_team)]

    def macros(self, float_name: str, scale_name: str) -> Macros:
        """Macros of the build that follow from the arrays."""
        return {
            "FORMAT": self.fmt.macro,
            "SCALE_TYPE": FLOAT_MACROS[scale_name],
            "X_TYPE": FLOAT_MACROS[float_name],
            "PER_TENSOR": int(self.per_tensor),
        }

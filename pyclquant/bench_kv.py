"""The K/V quantizers for the bench."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pyopencl as cl
import pyopencl.array as cla

from pyclquant import kv, reference
from pyclquant.bench_peers import Peer, Torch, numpy_peer, torch_beside
from pyclquant.bench_work import Array, Spec, Work, check_memory, repeated, repeated_on_device, sample, spoil
from pyclquant.device import Device
from pyclquant.floor import Enqueue, buffer_sets, copying, reading, span
from pyclquant.formats import FLOAT_DTYPES, FORMATS, Format
from pyclquant.testing import bits, mismatch

TILE = 8191
"""Rows of random data; they repeat to the end. A prime, so that a row read from a wrong place shows."""

OPERATIONS = {False: (4, 2), True: (5, 3)}
"""Of an element, to quantize and back: |x|, max, x / scale, round, and convert, · scale; asymmetric formats: min, max,
x − min, / scale, round, and convert, · scale, + min."""


def tile_mismatch(got: Array, tile: Array, what: str) -> str | None:
    """As `mismatch(got, repeated(tile, len(got)))`, without making the latter."""
    for start in range(0, len(got), len(tile)):
        piece = got[start : start + len(tile)]
        want = tile[: len(piece)]
        same = piece.dtype == want.dtype and np.array_equal(bits(piece), bits(want))  # which looks for no NaN: seconds
        wrong = None if same else mismatch(piece, want, f"{what}[{start}:]")
        if wrong:
            return wrong
    return None


def quantize_event(dev: Device, x: cla.Array, out: kv.Quantized, force: str | None = None) -> Any:
    """Enqueue a quantization of x like `out` into `out`; its event, for `seconds_of`.

    One scale for the tensor takes several commands, and `kv.quantize` tells of the last alone.
    """

    def enqueue(wait_for: list[cl.Event] | None = None) -> cl.Event:
        blocks: dict[str, Any] = {"granularity": out.granularity, "group_size": out.group_size}
        return kv.quantize(dev, x, out.format, out=out, force=force, wait_for=wait_for, **blocks).events[-1]

    several = out.granularity == "per_tensor" and not dev.capabilities.is_cpu
    return span(dev, enqueue) if several else enqueue()


def kv_works(dev: Device, spec: Spec) -> list[Work]:
    """Quantize and dequantize for each format. Raises ShapeError, DTypeError, UnsupportedDeviceError like `kv.quantize`."""
    rows = spec.shape[0]
    check_memory(dev, int(np.prod(spec.shape, dtype=object)) * FLOAT_DTYPES[spec.dtype].itemsize, "tensor")
    per_row = int(np.prod(spec.shape[1:-1], dtype=np.int64))
    tile = sample((min(rows, max(1, TILE // per_row)), *spec.shape[1:]), spec.dtype)
    plans = {
        (f, force): kv.plan_for(dev, spec.shape, spec.dtype, f, force=force, **spec.blocks(FORMATS[f]))
        for f in spec.formats
        for force in spec.variants
    }
    elements = math.prod(spec.shape)
    sets = buffer_sets(dev, elements * (tile.itemsize + 1))
    xs = [repeated_on_device(dev, tile, rows) for _ in range(sets)]
    ys = [cla.empty_like(xs[0]) for _ in range(sets)]
    torch = torch_beside(dev)
    tensors = cache(lambda: torch.repeated(tile, rows, sets) if torch else [])
    works = []
    for name in spec.formats:
        peers = kv_peers(spec, FORMATS[name], tile, torch, tensors)
        for force in spec.variants:
            works += kv_format_works(dev, spec, FORMATS[name], plans[name, force].variant, force, tile, xs, ys, peers)
    return works


def kv_peers(
    spec: Spec, fmt: Format, tile: Array, torch: Torch | None, tensors: Callable[[], list[Any]]
) -> tuple[tuple[Peer, ...], tuple[Peer, ...]]:
    """Of quantize and of dequantize. tensors: torch's, made when they are first wanted."""
    how = spec.blocks(fmt)
    rows = spec.shape[0]
    x = cache(lambda: repeated(tile, rows))
    part = reference.quantize(tile, fmt, **how)
    share = len(tile) / rows

    def back(q: tuple[Array, Array, Array | None], shape: tuple[int, ...]) -> object:
        return reference.dequantize(*q, fmt, shape, dtype=spec.dtype, **how)

    @cache
    def quantized() -> tuple[Array, Array, Array | None]:
        codes, scales, mins = part
        scales = scales if how["granularity"] == "per_tensor" else repeated(scales, rows)
        return repeated(codes, rows), scales, None if mins is None else repeated(mins, rows)

    there = [
        numpy_peer(lambda: reference.quantize(tile, fmt, **how), share, lambda: partial(reference.quantize, x(), fmt, **how))
    ]
    and_back = [numpy_peer(lambda: back(part, tile.shape), share, lambda: partial(back, quantized(), spec.shape))]
    if torch:
        block = {"per_tensor": math.prod(spec.shape), "per_token": math.prod(spec.shape[1:])}.get(how["granularity"])
        quantize, dequantize = torch.kv_peers(fmt, block or how["group_size"] or spec.shape[-1], spec, tensors)
        there.append(quantize)
        and_back.append(dequantize)
    return tuple(there), tuple(and_back)


def kv_format_works(
    dev: Device,
    spec: Spec,
    fmt: Format,
    variant: str,
    force: str | None,
    tile: Array,
    xs: Sequence[cla.Array],
    ys: Sequence[cla.Array],
    peers: tuple[tuple[Peer, ...], tuple[Peer, ...]],
) -> list[Work]:
    """Quantize and dequantize of one format over rotated buffers: xs [*shape] to codes, codes to ys."""
    how = spec.blocks(fmt)
    sets = len(xs)
    qs = [kv.quantize(dev, x, fmt, force=force, **how) for x in xs]
    codes, scales, mins = reference.quantize(tile, fmt, **how)
    values = reference.dequantize(codes, scales, mins, fmt, tile.shape, dtype=spec.dtype, **how)
    moved = xs[0].nbytes + xs[0].size
    floors = (copying(moved), reading(moved // 2))

    def quantize(i: int) -> Any:
        return quantize_event(dev, xs[i % sets], qs[i % sets], force)

    def dequantize(i: int) -> Any:
        return kv.dequantize(dev, qs[i % sets], spec.dtype, out=ys[i % sets], force=force).events[-1]

    def check_quantize() -> str | None:
        for a in (qs[0].codes, qs[0].scales):
            spoil(dev, a)
        quantize_event(dev, xs[0], qs[0], force)
        got = qs[0].get()
        for part, want in (("codes", codes), ("scales", scales), ("mins", mins)):
            a = getattr(got, part)
            wrong = tile_mismatch(a, want, part) if want is not None else None
            if wrong:
                return wrong
        return None

    def check_dequantize() -> str | None:
        spoil(dev, ys[0])
        dequantize(0)
        return tile_mismatch(ys[0].get(), values, "values")

    def work(op: str, enqueue: Enqueue, check: Callable[[], str | None], back: bool) -> Work:
        operations = OPERATIONS[fmt.asymmetric][back] * xs[0].size
        nbytes = xs[0].nbytes + qs[0].nbytes
        return Work(op, fmt.name, variant, spec.shape, nbytes, operations, enqueue, check, floors, peers[back])

    return [
        work("kv_quantize", quantize, check_quantize, False),
        work("kv_dequantize", dequantize, check_dequantize, True),
    ]

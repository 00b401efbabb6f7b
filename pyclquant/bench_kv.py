"""The K/V quantizers for the bench."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyopencl as cl
import pyopencl.array as cla

from pyclquant import kv, reference
from pyclquant.bench_work import Array, Spec, Work, check_memory, repeated, sample
from pyclquant.device import Device
from pyclquant.floor import Enqueue, buffer_sets, copying, reading, span
from pyclquant.formats import FLOAT_DTYPES, FORMATS, Format
from pyclquant.testing import mismatch

TILE = 8191
"""Rows of random data; they repeat to the end. A prime, so that a row read from a wrong place shows."""


def tile_mismatch(got: Array, tile: Array, what: str) -> str | None:
    """As `mismatch(got, repeated(tile, len(got)))`, without making the latter."""
    for start in range(0, len(got), len(tile)):
        piece = got[start : start + len(tile)]
        wrong = mismatch(piece, tile[: len(piece)], f"{what}[{start}:]")
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
    plans = [kv.plan_for(dev, spec.shape, spec.dtype, f, force=spec.variant, **spec.blocks(FORMATS[f])) for f in spec.formats]
    x = repeated(tile, rows)
    sets = buffer_sets(dev, x.nbytes + x.size)
    xs = [cla.to_device(dev.queue, x) for _ in range(sets)]
    ys = [cla.empty_like(xs[0]) for _ in range(sets)]
    works = []
    for name, plan in zip(spec.formats, plans, strict=True):
        works += kv_format_works(dev, spec, FORMATS[name], plan.variant, tile, xs, ys)
    return works


def kv_format_works(
    dev: Device, spec: Spec, fmt: Format, variant: str, tile: Array, xs: Sequence[cla.Array], ys: Sequence[cla.Array]
) -> list[Work]:
    """Quantize and dequantize of one format over rotated buffers: xs [*shape] to codes, codes to ys."""
    how = spec.blocks(fmt)
    sets = len(xs)
    qs = [kv.quantize(dev, x, fmt, force=spec.variant, **how) for x in xs]
    codes, scales, mins = reference.quantize(tile, fmt, **how)
    values = reference.dequantize(codes, scales, mins, fmt, tile.shape, dtype=spec.dtype, **how)
    moved = xs[0].nbytes + xs[0].size
    floors = (copying(moved), reading(moved // 2))

    def quantize(i: int) -> Any:
        return quantize_event(dev, xs[i % sets], qs[i % sets], spec.variant)

    def dequantize(i: int) -> Any:
        return kv.dequantize(dev, qs[i % sets], spec.dtype, out=ys[i % sets], force=spec.variant).events[-1]

    def check_quantize() -> str | None:
        got = qs[0].get()
        for part, want in (("codes", codes), ("scales", scales), ("mins", mins)):
            a = getattr(got, part)
            wrong = tile_mismatch(a, want, part) if want is not None else None
            if wrong:
                return wrong
        return None

    def check_dequantize() -> str | None:
        dequantize(0)
        return tile_mismatch(ys[0].get(), values, "values")

    def work(op: str, enqueue: Enqueue, check: Callable[[], str | None], in_numpy: Callable[[], object]) -> Work:
        nbytes = xs[0].nbytes + qs[0].nbytes
        share = len(tile) / spec.shape[0]
        return Work(op, fmt.name, variant, spec.shape, nbytes, enqueue, check, floors, in_numpy, share)

    return [
        work("kv_quantize", quantize, check_quantize, lambda: reference.quantize(tile, fmt, **how)),
        work(
            "kv_dequantize",
            dequantize,
            check_dequantize,
            lambda: reference.dequantize(codes, scales, mins, fmt, tile.shape, dtype=spec.dtype, **how),
        ),
    ]

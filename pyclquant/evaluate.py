"""What a format does to given tensors: their size, their error and the time it takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyopencl.array as cla

from pyclquant import kv
from pyclquant.arrays import on_host
from pyclquant.bench_kv import quantize_event
from pyclquant.bench_work import block_options
from pyclquant.device import Device
from pyclquant.floor import seconds_of
from pyclquant.formats import FORMATS

Array = np.ndarray[Any, Any]

SECONDS = 0.05
"""Time for the repeats of one measurement."""

CHUNK = 1 << 21
"""Elements whose errors are looked at together: float64 copies of a whole cache would not fit."""

EDGES = np.linspace(-4, 1, 41)
"""Of the bins of |error| / RMS, as powers of ten; what is smaller or larger counts in the outermost."""


@dataclass(frozen=True)
class Errors:
    """Of the elements that were finite. sqnr_db: inf when nothing changed, NaN when there is nothing to compare.

    max_abs_err: the largest.  exact: how many did not change.  histogram: how many of the others lie in each bin of
    EDGES, by log10(|error| / RMS of the tensor).
    """

    sqnr_db: float
    max_abs_err: float
    exact: int
    histogram: Array

    @staticmethod
    def of(x: Array, y: Array) -> Errors:
        """Of y against x, both of one shape."""
        flat_x, flat_y = x.reshape(-1), y.reshape(-1)
        pieces = [slice(start, start + CHUNK) for start in range(0, x.size, CHUNK)]

        def finite(piece: slice) -> tuple[Array, Array]:
            a = flat_x[piece].astype(np.float64)
            keep = np.isfinite(a)
            return a[keep], np.abs(flat_y[piece].astype(np.float64)[keep] - a[keep])

        signal = noise = largest = 0.0
        count = exact = 0
        for piece in pieces:
            a, error = finite(piece)
            signal += float(a @ a)
            noise += float(error @ error)
            largest = max(largest, float(error.max(initial=0.0)))
            count += a.size
        histogram = np.zeros(EDGES.size - 1, np.int64)
        rms = math.sqrt(signal / count) if signal else 1.0
        for piece in pieces:
            error = finite(piece)[1]
            exact += int((error == 0).sum())
            histogram += np.histogram(np.clip(np.log10(error[error > 0] / rms), EDGES[0], EDGES[-1]), EDGES)[0]
        if signal and 0 < noise < math.inf:
            sqnr = 10 * math.log10(signal / noise)
        else:
            sqnr = math.nan if not count else math.inf if noise == 0 else -math.inf
        return Errors(sqnr, largest, exact, histogram)


@dataclass(frozen=True)
class Row:
    """One tensor in one format. bytes_out: codes, scales and mins.  Times: None for a tensor without elements."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    format: str
    granularity: str
    group_size: int | None
    bytes_in: int
    bytes_out: int
    errors: Errors
    variant: str
    quantize_us: float | None
    dequantize_us: float | None

    @property
    def gb_s(self) -> float | None:
        """Bytes read and written by quantizing, in 1e9 a second."""
        return (self.bytes_in + self.bytes_out) / self.quantize_us * 1e-3 if self.quantize_us else None


def measured(dev: Device, x: cla.Array, q: kv.Quantized, y: cla.Array) -> tuple[float, float]:
    """Microseconds of quantizing x to q and of dequantizing q to y, all on the device and written again."""

    def quantize(_: int) -> Any:
        return quantize_event(dev, x, q)

    def dequantize(_: int) -> Any:
        return kv.dequantize(dev, q, y.dtype.name, out=y).events[-1]

    return seconds_of(dev, quantize, SECONDS) * 1e6, seconds_of(dev, dequantize, SECONDS) * 1e6


def evaluate(
    dev: Device, name: str, x: Array, formats: tuple[str, ...], granularity: str | None, group_size: int
) -> Iterator[tuple[Row, kv.Quantized]]:
    """Quantize x [..., head_dim] to each format and bring it back in its own dtype, which is what the errors are of.

    granularity, group_size: see `bench.block_options`.  Times are medians over device arrays.
    Raises ShapeError, DTypeError, UnsupportedDeviceError, BuildError as `kv.quantize`.
    """
    source = cla.to_device(dev.queue, x)
    dtype = x.dtype.name
    for format in formats:
        how = block_options(FORMATS[format], granularity, group_size)
        q = kv.quantize(dev, source, format, **how)
        back = kv.dequantize(dev, q, dtype)
        times = measured(dev, source, q, back) if x.size else (None, None)
        variant = kv.plan_for(dev, x.shape, dtype, format, **how).variant
        errors = Errors.of(x, on_host(back))
        yield Row(name, x.shape, dtype, format, q.granularity, q.group_size, x.nbytes, q.nbytes, errors, variant, *times), q

"""Comparison helpers and the bench timer, for our tests and for those of other kernels."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]


def bits(a: Array) -> Array:
    """The same bytes as unsigned integers of the same size, shape kept."""
    a = np.ascontiguousarray(a)
    return a.view(np.dtype(f"u{a.dtype.itemsize}")).reshape(a.shape)


def is_nan(a: Array) -> Array:
    """Where a is NaN; nowhere for integers. Knows the ml_dtypes."""
    if a.dtype.kind in "iub":
        return np.zeros(a.shape, bool)
    return np.isnan(a.astype(np.float32))


def mismatch(got: Array, want: Array, what: str = "result") -> str | None:
    """None when both have the same dtype, shape and bytes, any NaN equal to any NaN; else the first difference."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return f"{what}: expected {want.dtype} {want.shape}, got {got.dtype} {got.shape}"
    differs = (bits(got) != bits(want)) & ~(is_nan(got) & is_nan(want))
    if not differs.any():
        return None
    where = tuple(int(i) for i in np.argwhere(differs)[0])
    g, w = got[where], want[where]
    return (
        f"{what}: expected {w!r} (0x{int(bits(want)[where]):x}), got {g!r} (0x{int(bits(got)[where]):x}) "
        f"at {where}, {int(differs.sum())} of {differs.size} differ"
    )


SUM_ERROR = 8.0
"""How many times 2^-24 of the sum of its terms' magnitudes a float32 sum of few products may be off. See `product_mismatch`.

Random terms are off by one or two; equal ones of one sign, whose roundings all go one way, by more, and the more the longer the
chains of additions are: one more for every 512 columns.
"""


def half_ulp(exact: Array, dtype: np.dtype[Any]) -> Array:
    """Half the distance of neighbouring values of a float dtype around each of float64 exact."""
    bits_kept, smallest = {"float32": (24, -149), "bfloat16": (8, -133), "float16": (11, -24)}[dtype.name]
    exponent = np.frexp(np.asarray(exact, np.float64))[1]
    return np.asarray(np.exp2(np.maximum(exponent - bits_kept, smallest) - 1.0))


def product_mismatch(got: Array, exact: Array, magnitude: Array, k: int = 0, what: str = "result") -> str | None:
    """None when got, rounded from float32 sums of products, is as near to float64 exact as such sums are; else the worst.

    |got - exact| <= half an ulp of got's dtype + (SUM_ERROR + k / 512) 2^-24 magnitude; magnitude: the sum of the absolute
    terms, k: their number. Each element counts: a mean over all would pass a row of zeros in a thousand. NaN must meet NaN.
    What is too large for got's dtype must be Inf or the largest value.
    """
    if got.shape != exact.shape:
        return f"{what}: expected shape {exact.shape}, got {got.shape}"
    if got.size == 0:
        return None
    largest = float(ml_dtypes.finfo(got.dtype).max)  # type: ignore[no-untyped-call]
    wide, exact = (np.clip(a.astype(np.float64), -largest, largest) for a in (got, exact))
    with np.errstate(invalid="ignore"):
        excess = np.abs(wide - exact) - half_ulp(exact, got.dtype) - (SUM_ERROR + k / 512) * 2.0**-24 * magnitude
    excess = np.where(np.isnan(exact), np.where(np.isnan(wide), -1.0, np.inf), np.where(np.isnan(wide), np.inf, excess))
    if (excess <= 0).all():
        return None
    where = tuple(int(i) for i in np.unravel_index(np.argmax(excess), excess.shape))
    return (
        f"{what}: expected {exact[where]:.9g} (terms of {magnitude[where]:.3g} in all), got {wide[where]:.9g} at {where}, "
        f"{int((excess > 0).sum())} of {excess.size} out of bounds"
    )


def relative_rms(got: Array, exact: Array) -> float:
    """Root mean square of the error over that of exact."""
    error = got.astype(np.float64) - exact
    return float(np.sqrt(np.mean(error**2) / np.mean(exact**2)))


def cosine(got: Array, exact: Array) -> float:
    """Cosine of the angle between the two, as vectors."""
    a, b = got.astype(np.float64).ravel(), exact.ravel()
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def sqnr_db(x: Array, y: Array) -> float:
    """Signal-to-quantization-noise ratio of y against x in dB over x's finite elements; inf when equal."""
    x64, y64 = (np.asarray(a).astype(np.float64) for a in (x, y))
    finite = np.isfinite(x64)
    signal = float(np.sum(x64[finite] ** 2))
    noise = float(np.sum((x64[finite] - y64[finite]) ** 2))
    if noise == 0.0:
        return float("inf")
    return 10.0 * float(np.log10(signal / noise)) if signal > 0.0 else float("-inf")


def median_seconds(run: Callable[[int], object], seconds: float = 0.5, least: int = 5, most: int = 200) -> float:
    """Median wall time in seconds of `run(i)`, i counting up so that it can rotate its buffers.

    `run` must wait for its work. One call warms up; then calls go on for `seconds`, at least `least`
    and at most `most` of them.
    """
    run(0)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < least or (time.perf_counter() < end and len(times) < most):
        start = time.perf_counter()
        run(len(times) + 1)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def median_device_seconds(enqueue: Callable[[int], Any], seconds: float = 0.5, least: int = 5, most: int = 200) -> float:
    """Median of the time that a device spends on the events of `enqueue(i)`, in seconds.

    enqueue returns one event or a list of events that run one after the other; its queue must have
    profiling enabled.
    """

    def device_time(i: int) -> float:
        events = enqueue(i)
        events = events if isinstance(events, list) else [events]
        for event in events:
            event.wait()
        return float(sum(event.profile.end - event.profile.start for event in events)) * 1e-9

    device_time(0)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < least or (time.perf_counter() < end and len(times) < most):
        times.append(device_time(len(times) + 1))
    return statistics.median(times)

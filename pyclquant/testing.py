"""Comparison helpers and the bench timer, for our tests and for those of other kernels."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

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

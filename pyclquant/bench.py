"""How fast the operations are on a device: against its own plain read and copy in the same run, and against NumPy.

Correctness first: an operation whose bytes differ from the reference gets no speed. Then everything is timed in
rounds that take turns, so that a machine whose speed drifts drifts for all alike.

A new operation is a function (Device, Spec) -> list of Work and a row of `OPS`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pyopencl as cl
import pyopencl.array as cla

from pyclquant import kv, reference
from pyclquant.capabilities import Capabilities
from pyclquant.device import Device
from pyclquant.errors import ShapeError
from pyclquant.floor import Enqueue, Floors, Progress, buffer_sets, seconds_of, span
from pyclquant.formats import DEFAULT_GROUP_SIZE, FLOAT_DTYPES, FORMATS, Format
from pyclquant.testing import mismatch

Array = np.ndarray[Any, Any]
READ, COPY = "read floor", "copy floor"

ROUNDS = 5
TILE = 8191
"""Rows of random data; they repeat to the end. A prime, so that a row read from a wrong place shows."""


@dataclass(frozen=True)
class Spec:
    """What to measure. shape: [rows, dim] or [tokens, heads, dim].  dtype: of the float side.

    granularity: None is per_head; int4 is per_group whatever it says.  group_size: for per_group.
    variant: forced, or None.
    """

    shape: tuple[int, ...]
    formats: tuple[str, ...] = tuple(FORMATS)
    dtype: str = "bfloat16"
    granularity: str | None = None
    group_size: int = DEFAULT_GROUP_SIZE
    variant: str | None = None

    def blocks(self, fmt: Format) -> dict[str, Any]:
        """Keywords granularity and group_size of a format."""
        return block_options(fmt, self.granularity, self.group_size)


@dataclass(frozen=True)
class Work:
    """One operation on one format, ready to run. nbytes: read and written by a run.

    check: None, or the first difference from the reference.  reference: the same in NumPy, on `reference_share` of the rows.
    """

    op: str
    format: str
    variant: str
    shape: tuple[int, ...]
    nbytes: int
    enqueue: Enqueue
    check: Callable[[], str | None]
    reference: Callable[[], object]
    reference_share: float

    @property
    def name(self) -> str:
        """Operation and format."""
        return f"{self.op} {self.format}"


@dataclass(frozen=True)
class Result:
    """A row of the report. detail: the first wrong byte.  gb_s: 1e9 bytes read and written in a second.

    of_floor: gb_s over the copy floor's.  reference_us: of NumPy.  All figures are None when the result was
    wrong, reference_us also when it was not asked for.
    """

    op: str
    format: str
    variant: str
    shape: tuple[int, ...]
    correct: bool
    detail: str
    median_us: float | None = None
    gb_s: float | None = None
    of_floor: float | None = None
    reference_us: float | None = None


@dataclass(frozen=True)
class Floor:
    """The fastest plain kernel. gb_s counts bytes read and written; how: the form that won."""

    gb_s: float
    how: str


@dataclass(frozen=True)
class Report:
    """All of one run; read and copy are None when nothing was right and so nothing timed."""

    device: str
    read: Floor | None
    copy: Floor | None
    results: tuple[Result, ...]

    @property
    def correct(self) -> bool:
        """Whether every result was."""
        return all(r.correct for r in self.results)


def block_options(fmt: Format, granularity: str | None, group_size: int) -> dict[str, Any]:
    """Keywords granularity and group_size for `kv` and `reference`: what a choice for several formats means for one."""
    granularity = "per_group" if fmt.asymmetric else granularity or "per_head"
    return {"granularity": granularity, "group_size": group_size if granularity == "per_group" else None}


def default_shape(caps: Capabilities) -> tuple[int, int]:
    """Rows and dim that keep a device busy for milliseconds."""
    return (262_144, 128) if caps.is_cpu else (1_048_576, 128)


# ---- operations ----


def tile_of(spec: Spec, rows: int) -> Array:
    """Random rows [tile, ...] of the spec's dtype that are repeated to fill its shape: normal, with a few outliers."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((rows, *spec.shape[1:]), dtype=np.float32)
    x[rng.random(x.shape, dtype=np.float32) < 0.001] *= 20
    return x.astype(FLOAT_DTYPES[spec.dtype])


def repeated(tile: Array, rows: int) -> Array:
    """`tile` repeated along the first axis up to `rows`."""
    return np.concatenate([tile] * (rows // len(tile)) + [tile[: rows % len(tile)]])


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
    nbytes = int(np.prod(spec.shape, dtype=object)) * FLOAT_DTYPES[spec.dtype].itemsize
    memory = int(dev.capabilities.reported.get("global_mem_size") or 0)
    if memory and nbytes > memory // 16:
        raise ShapeError(f"shape: expected a tensor of at most {memory // 16} bytes (1/16 of the memory), got {nbytes} bytes")
    per_row = int(np.prod(spec.shape[1:-1], dtype=np.int64))
    tile = tile_of(spec, min(rows, max(1, TILE // per_row)))
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
        return Work(op, fmt.name, variant, spec.shape, nbytes, enqueue, check, in_numpy, share)

    return [
        work("kv_quantize", quantize, check_quantize, lambda: reference.quantize(tile, fmt, **how)),
        work(
            "kv_dequantize",
            dequantize,
            check_dequantize,
            lambda: reference.dequantize(codes, scales, mins, fmt, tile.shape, dtype=spec.dtype, **how),
        ),
    ]


OPS: dict[str, Callable[[Device, Spec], list[Work]]] = {"kv": kv_works}
"""Every operation family by its name on the command line."""


# ---- the whole run ----


def reference_seconds(work: Work) -> float:
    """Seconds of the NumPy reference for all rows: median of three on its share of them, scaled."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        work.reference()
        times.append(time.perf_counter() - start)
    return statistics.median(times) / work.reference_share


def medians(dev: Device, timed: Mapping[str, Enqueue], seconds: float, progress: Progress) -> dict[str, float]:
    """Median seconds of each, over ROUNDS in which all take turns; `seconds` for each in all."""
    times: dict[str, list[float]] = {name: [] for name in timed}
    for n, (name, enqueue) in product(range(ROUNDS), timed.items()):
        progress(f"round {n + 1} of {ROUNDS}: {name}")
        times[name].append(seconds_of(dev, enqueue, seconds / ROUNDS))
    return {name: statistics.median(values) for name, values in times.items()}


def run(
    dev: Device,
    spec: Spec,
    ops: Sequence[str] = tuple(OPS),
    seconds: float = 1.0,
    with_reference: bool = True,
    progress: Progress = lambda _: None,
) -> Report:
    """Measure operations of OPS. seconds: for each of them and each floor.  progress: called with the name of each step.

    `dev` must have a profiling queue unless it is a CPU. Raises what the operations raise, and
    UnsupportedDeviceError when no floor kernel gives right bytes.
    """
    works: list[Work] = []
    for op in ops:
        progress(f"preparing {op}")
        works += OPS[op](dev, spec)
    results = []
    for work in works:
        progress(f"checking {work.name}")
        wrong = work.check()
        results.append(Result(work.op, work.format, work.variant, work.shape, correct=wrong is None, detail=wrong or ""))
    right = {work.name: work for work, result in zip(works, results, strict=True) if result.correct}
    if not right:
        return Report(dev.name, None, None, tuple(results))

    floors = Floors(dev, max(work.nbytes for work in right.values()) // 2)
    read, copy = floors.fastest(False, progress), floors.fastest(True, progress)
    timed = {READ: read.enqueue, COPY: copy.enqueue} | {name: work.enqueue for name, work in right.items()}
    median = medians(dev, timed, seconds, progress)
    read_gb_s, copy_gb_s = (c.nbytes / median[name] * 1e-9 for name, c in ((READ, read), (COPY, copy)))
    for n, work in enumerate(works):
        if work.name in right:
            progress(f"NumPy {work.name}")
            gb_s = work.nbytes / median[work.name] * 1e-9
            results[n] = replace(
                results[n],
                median_us=median[work.name] * 1e6,
                gb_s=gb_s,
                of_floor=gb_s / copy_gb_s,
                reference_us=reference_seconds(work) * 1e6 if with_reference else None,
            )
    return Report(dev.name, Floor(read_gb_s, str(read.candidate)), Floor(copy_gb_s, str(copy.candidate)), tuple(results))

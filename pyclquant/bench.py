"""How fast the operations are on a device: against its own plain read and copy in the same run, and against NumPy.

Correctness first: an operation whose result is not the reference's gets no speed. Then everything is timed in
rounds that take turns, so that a machine whose speed drifts drifts for all alike.

A new operation is a function (Device, Spec) -> list of Work and a row of `OPS`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from pyclquant.bench_kv import kv_works
from pyclquant.bench_w8a8 import act_works, gemv_works, proj_works
from pyclquant.bench_work import Spec, Timer, Work
from pyclquant.capabilities import Capabilities
from pyclquant.device import Device
from pyclquant.floor import COPY, PIECE, Contender, Floors, Plain, Progress, seconds_of
from pyclquant.variants import ACT, GEMV, KV

ROUNDS = 5

OPS: dict[str, Callable[[Device, Spec], list[Work]]] = {
    "kv": kv_works,
    "act_quant": act_works,
    "gemv": gemv_works,
    "proj": proj_works,
}
"""Every operation family by its name on the command line."""

VARIANTS = {op: tuple(v.name for v in table) for op, table in (("kv", KV), ("act_quant", ACT), ("gemv", GEMV), ("proj", GEMV))}
"""What can be forced in each family; of a projection, the variant of its GEMV."""


@dataclass(frozen=True)
class Result:
    """A row of the report. detail: the first wrong byte, or the worst sum.  gb_s: 1e9 bytes read and written in a second.

    op, format, variant, shape, rows: of its `Work`.  floor: what it is compared with, "read" or "copy".
    of_floor: gb_s over that floor's, see `share`.  reference_us, torch_us: of NumPy, of torch.  host_us: of each kind of call.
    All figures are None when the result was wrong; the last three also when there are none or they were not asked for.
    """

    op: str
    format: str
    variant: str
    shape: tuple[int, ...]
    rows: int | None
    floor: str
    correct: bool
    detail: str
    median_us: float | None = None
    gb_s: float | None = None
    of_floor: float | None = None
    reference_us: float | None = None
    torch_us: float | None = None
    host_us: dict[str, float] | None = None


@dataclass(frozen=True)
class Floor:
    """The fastest plain kernel. kind: read or copy.  nbytes: read and written by a run.  how: the form that won."""

    kind: str
    nbytes: int
    median_us: float
    gb_s: float
    how: str


@dataclass(frozen=True)
class Report:
    """All of one run; without floors when nothing was right and so nothing timed."""

    device: str
    floors: tuple[Floor, ...]
    results: tuple[Result, ...]

    @property
    def correct(self) -> bool:
        """Whether every result was."""
        return all(r.correct for r in self.results)


def default_shape(caps: Capabilities) -> tuple[int, int]:
    """Rows and dim of a K/V tensor that keep a device busy for milliseconds."""
    return (262_144, 128) if caps.is_cpu else (1_048_576, 128)


def reference_seconds(in_numpy: Callable[[], object], part: float) -> float:
    """Seconds of the NumPy reference for all of the output: median of three on a part of it, scaled."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        in_numpy()
        times.append(time.perf_counter() - start)
    return statistics.median(times) / part


def share(work: Work, seconds: float, floor: Floor) -> float:
    """Its speed over the floor's. What moves less than the smallest floor is as fast as that when it takes as long."""
    return max(work.nbytes, min(floor.nbytes, 2 * PIECE)) / seconds * 1e-9 / floor.gb_s


def medians(timed: Mapping[str, Timer], seconds: float, progress: Progress) -> dict[str, float]:
    """Median seconds of each, over ROUNDS in which all take turns; `seconds` for each in all."""
    times: dict[str, list[float]] = {name: [] for name in timed}
    for n, (name, timer) in product(range(ROUNDS), timed.items()):
        progress(f"round {n + 1} of {ROUNDS}: {name}")
        times[name].append(timer(seconds / ROUNDS))
    return {name: statistics.median(values) for name, values in times.items()}


def fastest_floors(dev: Device, works: Sequence[Work], progress: Progress) -> dict[Plain, Contender]:
    """The winner of each floor that is asked for. Raises UnsupportedDeviceError."""
    buffers: dict[int, Floors] = {}
    found = {}
    for plain in dict.fromkeys(plain for work in works for plain in work.floors):
        if plain.nbytes not in buffers:
            buffers[plain.nbytes] = Floors(dev, plain.nbytes)
        found[plain] = buffers[plain.nbytes].fastest(plain.kind == COPY, progress)
    return found


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
        floor = work.floors[0].kind
        results.append(
            Result(work.op, work.format, work.variant, work.shape, work.rows, floor, correct=wrong is None, detail=wrong or "")
        )
    right = [work for work, result in zip(works, results, strict=True) if result.correct]
    plain = fastest_floors(dev, right, progress)
    timed: dict[str, Timer] = {p.name: partial(seconds_of, dev, c.enqueue) for p, c in plain.items()}
    timed |= {work.name: partial(seconds_of, dev, work.enqueue) for work in right}
    timed |= {f"torch {work.name}": work.torch for work in right if work.torch}
    median = medians(timed, seconds, progress)
    floors = {}
    for p, c in plain.items():
        floors[p] = Floor(p.kind, c.nbytes, median[p.name] * 1e6, c.nbytes / median[p.name] * 1e-9, str(c.candidate))
    for n, work in enumerate(works):
        if results[n].correct:
            progress(f"NumPy and the host: {work.name}")
            gb_s = work.nbytes / median[work.name] * 1e-9
            numpy = reference_seconds(work.reference, work.reference_share) if work.reference and with_reference else None
            host = work.host(seconds / 2) if work.host else None
            results[n] = replace(
                results[n],
                median_us=median[work.name] * 1e6,
                gb_s=gb_s,
                of_floor=share(work, median[work.name], floors[work.floors[0]]),
                reference_us=numpy * 1e6 if numpy else None,
                torch_us=median[f"torch {work.name}"] * 1e6 if work.torch else None,
                host_us={call: s * 1e6 for call, s in host.items()} if host else None,
            )
    return Report(dev.name, tuple(floors.values()), tuple(results))

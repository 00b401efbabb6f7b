"""How fast the operations are on a device: against its own plain read and copy, against NumPy, and against torch.

Correctness first: an operation whose result is not the reference's gets no speed. Then everything is timed in
rounds that take turns, so that a machine whose speed drifts drifts for all alike.

A new operation is a function (Device, Spec) -> list of Work and a row of `OPS`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from pyclquant.bench_kv import kv_works
from pyclquant.bench_peers import NotTimedError, Peer, Timer
from pyclquant.bench_w8a8 import act_works, gemv_works, proj_works
from pyclquant.bench_work import Spec, Work
from pyclquant.capabilities import Capabilities
from pyclquant.device import Device
from pyclquant.floor import COPY, PIECE, Contender, Floors, Plain, Progress, fastest_arithmetic, nothing, seconds_of
from pyclquant.growth import Line, halved
from pyclquant.variants import ACT, GEMV, KV
from pyclquant.w8a8 import CHUNK

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

PRODUCTS = ("gemv", "proj")
"""Families bound by arithmetic when there are many rows."""

Job = tuple[str, Spec]
"""A key of OPS, and what to measure of it."""


@dataclass(frozen=True)
class Beside:
    """What another library took for the same. note: how it was run, or why it has no time."""

    name: str
    median_us: float | None
    note: str = ""


@dataclass(frozen=True)
class Result:
    """A row of the report. detail: the first wrong byte, or the worst sum.  gb_s: 1e9 bytes read and written in a second.

    op, format, variant, shape, rows, nbytes, operations: of its `Work`.  floor: what it is compared with, "read" or "copy".
    of_floor: gb_s over that floor's, see `share`.  floor_us: the time that the floor would take.  peers: NumPy's and torch's.
    host_us: of each kind of call; None when there are none.
    When the result was wrong all figures are None, and there are no peers.
    """

    op: str
    format: str
    variant: str
    shape: tuple[int, ...]
    rows: int | None
    nbytes: int
    operations: int
    floor: str
    correct: bool
    detail: str
    median_us: float | None = None
    gb_s: float | None = None
    of_floor: float | None = None
    floor_us: float | None = None
    peers: tuple[Beside, ...] = ()
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
class Growth:
    """A line through the times of one operation at several sizes, see `growth.Line`. rows: None for K/V.

    worst: the largest deviation from the line, a part of its value, at worst_nbytes.
    """

    op: str
    format: str
    variant: str
    rows: int | None
    line: Line

    @property
    def name(self) -> str:
        """What the points have in common."""
        return " ".join(str(v) for v in (self.op, self.format, self.variant) if v) + (f" M={self.rows}" if self.rows else "")


@dataclass(frozen=True)
class Report:
    """All of one run; without floors when nothing was right and so nothing timed.

    launch_us: an empty kernel's time.  gops: 1e9 operations a second of the fastest kernel of float32 multiply-adds, measured
    when there are products.
    """

    device: str
    floors: tuple[Floor, ...]
    results: tuple[Result, ...]
    launch_us: float | None = None
    gops: float | None = None

    @property
    def correct(self) -> bool:
        """Whether every result was."""
        return all(r.correct for r in self.results)

    @property
    def growth(self) -> tuple[Growth, ...]:
        """A line for every operation that was measured at three sizes or more."""
        series: dict[tuple[str, str, str, int | None], list[tuple[int, float]]] = {}
        for r in self.results:
            if r.median_us is not None:
                series.setdefault((r.op, r.format, r.variant, r.rows), []).append((r.nbytes, r.median_us * 1e-6))
        lines = ((key, Line.through(points)) for key, points in series.items())
        return tuple(Growth(*key, line) for key, line in lines if line)


def default_shape(caps: Capabilities) -> tuple[int, int]:
    """Rows and dim of a K/V tensor that keep a device busy for milliseconds."""
    return (262_144, 128) if caps.is_cpu else (1_048_576, 128)


def specs(op: str, spec: Spec, shapes: Sequence[tuple[int, ...]], sweep: bool) -> list[Spec]:
    """`spec` for each shape of an operation of OPS; with `sweep` also for smaller ones, in rising order."""
    found: dict[Spec, None] = {}
    for shape in shapes:
        if op == "kv":
            rows = halved(shape[0], max(1, shape[0] // 256), factor=4) if sweep else shape[:1]
            found |= {replace(spec, shape=(n, *shape[1:])): None for n in rows}
        elif op == "act_quant":
            columns = halved(shape[-1], 1024, CHUNK) if sweep else shape[-1:]
            found |= {replace(spec, weight=(shape[0], k)): None for k in columns}
        else:
            rows = halved(shape[0], 256) if sweep else shape[:1]
            found |= {replace(spec, weight=(n, shape[-1])): None for n in rows}
    return list(found)


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


def ready(peer: Peer) -> tuple[str, Timer | None]:
    """How a peer runs and its timer, or why it cannot and None."""
    try:
        return peer.prepare()
    except NotTimedError as error:
        return str(error), None
    except Exception as error:  # whatever another library raises is no reason to lose our figures
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", None


def run(
    dev: Device,
    jobs: Sequence[Job],
    seconds: float = 1.0,
    with_peers: bool = True,
    progress: Progress = lambda _: None,
) -> Report:
    """Measure operations of OPS. seconds: for each of them and each floor.  progress: called with the name of each step.

    `dev` must have a profiling queue unless it is a CPU. Raises what the operations raise, and
    UnsupportedDeviceError when no floor kernel gives right bytes.
    """
    works: list[Work] = []
    for op, spec in jobs:
        progress(f"preparing {op}")
        works += OPS[op](dev, spec)
    results = []
    for work in works:
        progress(f"checking {work.name}")
        wrong = work.check()
        what = (work.op, work.format, work.variant, work.shape, work.rows, work.nbytes, work.operations)
        results.append(Result(*what, work.floors[0].kind, correct=wrong is None, detail=wrong or ""))
    right = [work for work, result in zip(works, results, strict=True) if result.correct]
    if not right:
        return Report(dev.name, (), tuple(results))
    plain = fastest_floors(dev, right, progress)
    timed: dict[str, Timer] = {p.name: partial(seconds_of, dev, c.enqueue) for p, c in plain.items()}
    timed["launch"] = partial(seconds_of, dev, nothing(dev))
    adds = fastest_arithmetic(dev, progress) if any(work.op in PRODUCTS for work in right) else None
    if adds:
        timed["multiply-adds"] = partial(seconds_of, dev, adds.enqueue)
    timed |= {work.name: partial(seconds_of, dev, work.enqueue) for work in right}
    names = {peer: f"{peer.name}: {work.name}" for work in reversed(right) for peer in work.peers if with_peers}
    notes = {}
    for peer, name in names.items():
        if peer.takes_turns:
            progress(f"preparing {name}")
            notes[peer], timer = ready(peer)
            timed |= {name: timer} if timer else {}
    median = medians(timed, seconds, progress)
    for peer, name in names.items():
        if not peer.takes_turns:
            progress(name)
            notes[peer], timer = ready(peer)
            median |= {name: timer(seconds)} if timer else {}
    beside = {peer: Beside(peer.name, microseconds(median.get(name)), notes[peer]) for peer, name in names.items()}
    floors = {}
    for p, c in plain.items():
        floors[p] = Floor(p.kind, c.nbytes, median[p.name] * 1e6, c.nbytes / median[p.name] * 1e-9, str(c.candidate))
    for n, work in enumerate(works):
        if results[n].correct:
            progress(f"the host: {work.name}")
            took = median[work.name]
            of_floor = share(work, took, floors[work.floors[0]])
            host = work.host(seconds / 2) if work.host else None
            results[n] = replace(
                results[n],
                median_us=took * 1e6,
                gb_s=work.nbytes / took * 1e-9,
                of_floor=of_floor,
                floor_us=took * of_floor * 1e6,
                peers=tuple(beside[peer] for peer in work.peers if with_peers),
                host_us={call: s * 1e6 for call, s in host.items()} if host else None,
            )
    gops = adds.operations / median["multiply-adds"] * 1e-9 if adds else None
    return Report(dev.name, tuple(floors.values()), tuple(results), median["launch"] * 1e6, gops)


def microseconds(seconds: float | None) -> float | None:
    """None stays None."""
    return None if seconds is None else seconds * 1e6

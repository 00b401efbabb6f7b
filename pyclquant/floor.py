"""How fast a device is by itself: its plain read and copy, timed as every kernel here is timed.

Several forms of the kernels of cl/bench.cl compete; the fastest that moves the right bytes is the floor. GPUs are
timed by profiling events, CPU drivers by wall time from enqueue to finish. Buffers rotate beyond the caches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyopencl as cl
import pyopencl.array as cla

from pyclquant.capabilities import Capabilities
from pyclquant.device import Device
from pyclquant.errors import BuildError, UnsupportedDeviceError
from pyclquant.testing import median_device_seconds, median_seconds, mismatch

Progress = Callable[[str], None]
Enqueue = Callable[[int], Any]
"""Enqueues run number i and returns its event; i counts up so that buffers can be rotated."""

SEARCH_SECONDS = 0.06
"""Time for each of two looks at each of the FINALISTS; a sixth of it for a first look at each candidate."""

FINALISTS = 6
"""Candidates that are looked at again."""

MEGABYTE = 1 << 20

READ, COPY = "read", "copy"

PIECE = 16 << 10
"""Buffers are so many bytes, or a multiple."""


@dataclass(frozen=True)
class Plain:
    """A floor that something is compared with: the fastest READ or COPY of buffers of so many bytes."""

    kind: str
    nbytes: int

    @property
    def name(self) -> str:
        """For progress and messages."""
        return f"{self.kind} floor of {self.nbytes} bytes"


def reading(nbytes: int) -> Plain:
    """The floor of what reads nbytes, in whole pieces."""
    return Plain(READ, max(PIECE, nbytes // PIECE * PIECE))


def copying(nbytes: int) -> Plain:
    """The floor of what reads and writes nbytes in all, in whole pieces."""
    return Plain(COPY, max(PIECE, nbytes // 2 // PIECE * PIECE))


def seconds_of(dev: Device, enqueue: Enqueue, seconds: float, most: int = 200) -> float:
    """Median seconds of a run: on a GPU of the kernel, on a CPU driver from enqueue to finish.

    A GPU's queue must have profiling enabled. Raises UnsupportedDeviceError when its events tell no time.
    """
    if not dev.capabilities.is_cpu:
        found = median_device_seconds(enqueue, seconds, most=most)
        if found < 5e-9:
            raise UnsupportedDeviceError(f"events: expected the time that a kernel takes, got {found * 1e9:g} ns on {dev.name}")
        return found

    def finished(i: int) -> None:
        enqueue(i)
        dev.queue.finish()

    return median_seconds(finished, seconds, most=most)


def nothing(dev: Device) -> Enqueue:
    """Runs an empty kernel of one work-group: what a launch costs by itself."""
    built = dev.programs.kernel("bench.cl", "bench_nothing", {"WG": 1})

    def launch(_: int) -> cl.Event:
        with dev.programs.lock:
            return built(dev.queue, (1,), (1,))

    return launch


STEPS = 8192
"""Of bench_multiply_add: milliseconds on a CPU, a part of one on a GPU."""


@dataclass(frozen=True)
class Arithmetic:
    """A kernel of float32 multiply-adds ready to run. operations: of a run, two each.  check: None, or what it got wrong."""

    how: str
    operations: int
    enqueue: Enqueue
    check: Callable[[], str | None]


def multiplied_and_added(wg: int, vec: int, unroll: int, steps: int) -> np.ndarray[Any, Any]:
    """Sums [wg] of a work-group of bench_multiply_add with a = b = 1, exact in float32."""
    return np.asarray([vec * sum(item + u + steps for u in range(unroll)) for item in range(wg)], np.float32)


def arithmetic(dev: Device, wg: int, vec: int, unroll: int, fma: int) -> Arithmetic:
    """One form of it, with work-items for all of the device. Raises BuildError."""
    built = dev.programs.kernel("bench.cl", "bench_multiply_add", {"WG": wg, "VEC": vec, "UNROLL": unroll, "FMA": fma})
    groups = max(1, int(dev.capabilities.reported.get("max_compute_units") or 1) * (16 if wg == 1 else 2048 // wg))
    sums = cla.empty(dev.queue, groups * wg, np.float32)
    arguments: list[Any] = [sums.base_data, np.float32(1), np.float32(1), np.uint32(STEPS)]

    def enqueue(_: int) -> cl.Event:
        with dev.programs.lock:
            return built(dev.queue, (groups * wg,), (wg,), *arguments)

    def check() -> str | None:
        enqueue(0)
        return mismatch(sums.get(), np.tile(multiplied_and_added(wg, vec, unroll, STEPS), groups), "bench_multiply_add")

    how = f"{unroll} chains of {vec} floats a work-item, {wg} a work-group, {'fma()' if fma else 'a * b + c'}"
    return Arithmetic(how, 2 * STEPS * unroll * vec * groups * wg, enqueue, check)


def fastest_arithmetic(dev: Device, progress: Progress) -> Arithmetic | None:
    """The form with the most operations a second; None when none builds and gives right sums."""
    caps = dev.capabilities
    vecs = [n for n in (4, 8, 16) if caps.ok(f"vector{n}")] or [4]
    side_by_side = (min(256, 1 << (caps.max_work_group_size.bit_length() - 1)), 4, 4)
    forms = [*((1, vec, 128 // vec) for vec in vecs[-2:]), side_by_side] if caps.is_cpu else [side_by_side]
    fma = int(caps.ok("fma") and caps.ok("fma_speed"))
    best: Arithmetic | None = None
    most = 0.0
    for wg, vec, unroll in forms:
        try:
            found = arithmetic(dev, wg, vec, unroll, fma)
        except BuildError:
            continue
        progress(f"multiply-adds: {found.how}")
        speed = found.operations / seconds_of(dev, found.enqueue, SEARCH_SECONDS)
        if speed > most and found.check() is None:
            best, most = found, speed
    return best


@dataclass(frozen=True)
class Span:
    """Several commands as one event for `median_device_seconds`: from the end of `first` to the end of `last`."""

    first: cl.Event
    last: cl.Event

    def wait(self) -> None:
        """Until the last is done."""
        self.last.wait()

    @property
    def profile(self) -> SimpleNamespace:
        """Has start and end, in nanoseconds."""
        return SimpleNamespace(start=self.first.profile.end, end=self.last.profile.end)


def span(dev: Device, enqueue: Callable[[list[cl.Event]], cl.Event]) -> Span:
    """Enqueue commands behind a gate and open it, so that the host's own time lies outside of the span.

    The span begins after a small fill: a marker, which would do, has no times on NVIDIA's driver 580.
    """
    gate = cl.UserEvent(dev.context)
    try:
        word = cl.Buffer(dev.context, cl.mem_flags.READ_WRITE, 4)
        first = cl.enqueue_fill_buffer(dev.queue, word, np.uint32(0), 0, 4, wait_for=[gate])
        return Span(first, enqueue([first]))
    finally:
        gate.set_status(cl.command_execution_status.COMPLETE)


def buffer_sets(dev: Device, nbytes: int) -> int:
    """How many sets of buffers of `nbytes` to rotate: beyond the caches, within a part of the memory."""
    reported = dev.capabilities.reported
    total = 1024 * MEGABYTE
    if dev.capabilities.is_cpu:
        total = max(256 * MEGABYTE, 4 * int(dev.queue.device.global_mem_cache_size or 0))
    total = min(total, int(reported.get("global_mem_size") or total) // 16)
    return max(2, min(64, -(-total // nbytes)))


@dataclass(frozen=True)
class Candidate:
    """A form of the kernels of cl/bench.cl. items: work-items for each compute unit, 0 for one round of vectors each."""

    wg: int
    vec: int
    contiguous: bool
    unroll: int
    items: int
    nontemporal: bool = False

    def __str__(self) -> str:
        form = "contiguous pieces" if self.contiguous else f"side by side, {self.unroll} at a time"
        stores = ", non-temporal stores" if self.nontemporal else ""
        items = f"{self.items} work-items a compute unit" if self.items else "one round"
        return f"{4 * self.vec}-byte vectors, {form}, {items}{stores}"

    def macros(self) -> dict[str, str | int]:
        """Of the build."""
        return {
            "WG": self.wg,
            "VEC": self.vec,
            "CONTIGUOUS": int(self.contiguous),
            "UNROLL": self.unroll,
            "NONTEMPORAL": int(self.nontemporal),
        }


def candidates(caps: Capabilities, copies: bool) -> list[Candidate]:
    """The forms worth trying on a kind of device. Both kinds try the other's form too."""
    wg = min(256, 1 << (caps.max_work_group_size.bit_length() - 1))
    vecs = [n for n in (4, 8, 16) if caps.ok(f"vector{n}")] or [4]
    if caps.is_cpu:
        stores = (False, True) if copies else (False,)
        pieces = [Candidate(1, vec, True, 1, items, nt) for vec, items, nt in product(vecs, (1, 4, 16, 256), stores)]
        return [*pieces, Candidate(min(wg, 64), vecs[-1], False, 1, 4096)]
    rows = [Candidate(wg, vec, False, unroll, items) for vec, unroll, items in product(vecs[:2], (1, 2, 4, 8), (0, 1024, 2048))]
    return [*rows, Candidate(wg, 4, True, 1, 2048)]


@dataclass(frozen=True)
class Contender:
    """A floor kernel ready to run. nbytes: read and written by a run.  check: None, or what it got wrong."""

    candidate: Candidate
    nbytes: int
    enqueue: Enqueue
    check: Callable[[], str | None]


class Floors:
    """Buffers of the floor kernels, as large as those of the operations: nbytes is a multiple of PIECE."""

    def __init__(self, dev: Device, nbytes: int) -> None:
        self.dev = dev
        self.nbytes = nbytes
        sets = buffer_sets(dev, 2 * self.nbytes)
        self.data = np.random.default_rng(0).integers(0, 1 << 32, self.nbytes // 4, dtype=np.uint32)
        first = cla.to_device(dev.queue, self.data)
        self.sources = [first, *(first.copy() for _ in range(sets - 1))]
        self.targets = [first.copy() for _ in range(sets)]

    def vectors(self, c: Candidate) -> int:
        """Vectors of a buffer: side by side a multiple of what a work-group takes at a time."""
        step = 1 if c.contiguous else c.wg * c.unroll
        return self.nbytes // (4 * c.vec) // step * step

    def global_size(self, c: Candidate) -> int:
        """Work-items of a launch, none without something to do."""
        most = self.vectors(c) // (1 if c.contiguous else c.unroll)
        units = int(self.dev.capabilities.reported.get("max_compute_units") or 1)
        return min(most, -(-units * c.items // c.wg) * c.wg) if c.items else most

    def launcher(self, kernel: str, c: Candidate) -> Callable[[cla.Array, cla.Array], cl.Event]:
        """Enqueues `kernel` in the form of `c` with a source and a target."""
        built = self.dev.programs.kernel("bench.cl", kernel, c.macros())
        size, vectors = self.global_size(c), np.uint64(self.vectors(c))

        def launch(source: cla.Array, target: cla.Array) -> cl.Event:
            arguments: list[Any] = [source.base_data, target.base_data, vectors]
            with self.dev.programs.lock:
                return built(self.dev.queue, (size,), (c.wg,), *arguments)

        return launch

    def read(self, c: Candidate) -> Contender:
        """Reads all buffers in turn, targets too."""
        launch = self.launcher("bench_read", c)
        sums = cla.empty(self.dev.queue, self.global_size(c), np.uint32)
        buffers = self.sources + self.targets
        words = self.vectors(c) * c.vec

        def check() -> str | None:
            launch(self.sources[0], sums)
            got, want = (np.bitwise_xor.reduce(a, keepdims=True) for a in (sums.get(), self.data[:words]))
            return mismatch(got, want, "bench_read")

        return Contender(c, 4 * words, lambda i: launch(buffers[i % len(buffers)], sums), check)

    def copy(self, c: Candidate) -> Contender:
        """Copies each source to its target in turn."""
        launch = self.launcher("bench_copy", c)
        sets = len(self.sources)
        words = self.vectors(c) * c.vec

        def check() -> str | None:
            self.targets[0].fill(0)
            launch(self.sources[0], self.targets[0])
            return mismatch(self.targets[0].get()[:words], self.data[:words], "bench_copy")

        return Contender(c, 8 * words, lambda i: launch(self.sources[i % sets], self.targets[i % sets]), check)

    def fastest(self, copies: bool, progress: Progress) -> Contender:
        """The contender with the shortest time for each byte. One that does not build or gives wrong bytes is passed over.

        Raises UnsupportedDeviceError when none is left.
        """
        contenders: list[Contender] = []
        failure = "no candidate"
        for c in candidates(self.dev.capabilities, copies):
            try:
                if self.vectors(c):
                    contenders.append(self.copy(c) if copies else self.read(c))
            except (BuildError, cl.Error) as error:
                failure = str(error)

        def look(n: int, seconds: float) -> float:
            progress(f"{'copy' if copies else 'read'} floor: {contenders[n].candidate}")
            return seconds_of(self.dev, contenders[n].enqueue, seconds) / contenders[n].nbytes

        best = {n: look(n, SEARCH_SECONDS / 6) for n in range(len(contenders))}
        order = sorted(best, key=best.__getitem__)
        finalists, others = order[:FINALISTS], order[FINALISTS:]
        for _, n in product(range(2), finalists):
            best[n] = min(best[n], look(n, SEARCH_SECONDS))
        for n in [*sorted(finalists, key=best.__getitem__), *others]:
            wrong = contenders[n].check()
            if wrong is None:
                return contenders[n]
            failure = wrong
        raise UnsupportedDeviceError(f"device: expected one that reads and copies a buffer, got {self.dev.name} ({failure})")

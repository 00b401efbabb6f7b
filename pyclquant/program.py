"""From a `.cl` file and macros to kernels that are built once and kept."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl

from pyclquant.errors import BuildError
from pyclquant.variants import Macros, Plan

HERE = Path(__file__).resolve().parent
CL_DIR = next(p for p in (HERE / "cl", HERE.parent / "cl") if p.is_dir())
"""Where the kernel files are: inside the installed package, or beside it in a checkout."""

INCLUDE = re.compile(r'#include "([\w.]+)"\s*$')


@cache
def source(file: str) -> str:
    """Text of a kernel file with its includes put in place, each once, and #line for the driver's messages."""
    seen: set[str] = set()

    def text(name: str) -> list[str]:
        seen.add(name)
        lines = [f'#line 1 "{name}"']
        for number, line in enumerate((CL_DIR / name).read_text().splitlines(), 1):
            include = INCLUDE.match(line)
            if include is None:
                lines.append(line)
            elif include[1] not in seen:
                lines += [*text(include[1]), f'#line {number + 1} "{name}"']
            else:
                lines.append("")
        return lines

    return "\n".join(text(file)) + "\n"


def build_options(macros: Mapping[str, str | int], options: tuple[str, ...] = ()) -> list[str]:
    """Command-line options of a build: macros sorted by name, then the rest."""
    return [f"-D{name}={value}" for name, value in sorted(macros.items())] + list(options)


def build(
    context: cl.Context, device: cl.Device, file: str, macros: Mapping[str, str | int], options: tuple[str, ...] = ()
) -> cl.Program:
    """Build one kernel file for one device, through pyopencl's cache of binaries.

    Raises BuildError with file, macros, device, driver and the driver's log.
    """
    flags = build_options(macros, options)
    try:
        program: cl.Program = cl.Program(context, source(file)).build(options=flags, devices=[device])
        return program
    except cl.Error as error:
        raise BuildError(
            f"{file}: did not build on {device.name} (driver {device.driver_version}) with {' '.join(flags)}\n{error}"
        ) from error


@dataclass(frozen=True)
class Launch:
    """A kernel over `blocks` blocks, ready to be built and enqueued. arguments: of the kernel, in order."""

    file: str
    name: str
    plan: Plan
    macros: Macros
    arguments: Sequence[Any]
    blocks: int


@dataclass(frozen=True)
class Bound:
    """A kernel object of one owner with its arguments set, which keeps what they refer to. Not for two threads at once."""

    kernel: cl.Kernel
    global_size: tuple[int]
    local_size: tuple[int]
    arguments: Sequence[Any]


class Programs:
    """The kernels of the context and device of a queue. A kernel object holds its arguments, so whoever sets and
    enqueues one holds `lock` meanwhile.

    in_order: whether commands of the queue run one after the other by themselves.
    """

    def __init__(self, queue: cl.CommandQueue) -> None:
        self.queue = queue
        self.context: cl.Context = queue.context
        self.device: cl.Device = queue.device
        self.in_order = not queue.properties & cl.command_queue_properties.OUT_OF_ORDER_EXEC_MODE_ENABLE
        self.lock = threading.RLock()
        self._programs: dict[object, cl.Program] = {}  # with Intel's CPU runtime 2026.2 a kernel does not keep its own alive
        self._kernels: dict[object, cl.Kernel] = {}
        self._fitting: dict[object, tuple[cl.Kernel, Plan, Plan]] = {}
        self._last: cl.Event | None = None
        self._partials: tuple[cl.Buffer, cl.Buffer] | None = None

    def kernel(self, file: str, name: str, macros: Mapping[str, str | int], options: tuple[str, ...] = ()) -> cl.Kernel:
        """The kernel `name` of a file built with these macros; built at the first call. Raises BuildError."""
        key = (file, name, tuple(sorted(macros.items())), options)
        with self.lock:
            if key not in self._kernels:
                self._kernels[key] = cl.Kernel(self.program(file, macros, options), name)
            return self._kernels[key]

    def program(self, file: str, macros: Mapping[str, str | int], options: tuple[str, ...] = ()) -> cl.Program:
        """A file built with these macros; built at the first call. Raises BuildError."""
        key = (file, tuple(sorted(macros.items())), options)
        with self.lock:
            if key not in self._programs:
                self._programs[key] = build(self.context, self.device, file, macros, options)
            return self._programs[key]

    def fitting(self, launch: Launch) -> tuple[cl.Kernel, Plan]:
        """The built kernel of a launch, its work-group shrunk until the device takes it. Raises BuildError."""
        key = (launch.file, launch.name, tuple(launch.macros.items()), id(launch.plan))
        with self.lock:
            if key not in self._fitting:
                plan = launch.plan
                while True:
                    kernel = self.kernel(launch.file, launch.name, {**launch.macros, **plan.defines()}, plan.options)
                    limit = kernel.get_work_group_info(cl.kernel_work_group_info.WORK_GROUP_SIZE, self.device)
                    if plan.wg <= limit or plan.wg == 1:
                        break
                    plan = plan.halved()
                kernel.set_scalar_arg_dtypes([a.dtype if isinstance(a, np.generic) else None for a in launch.arguments])
                self._fitting[key] = kernel, plan, launch.plan  # which is kept alive, and with it its id
            return self._fitting[key][:2]

    def partials(self, tiles: int, nbytes: int) -> tuple[cl.Buffer, cl.Buffer]:
        """Memory for partial sums, nbytes or more, and for a counter of each tile, 0.

        A launch leaves the counters at 0, so that all launches of a queue that runs one after the other share both.
        """
        with self.lock:
            if self._partials is not None:
                nbytes, tiles = max(nbytes, self._partials[0].size), max(tiles, self._partials[1].size // 4)
            if self._partials is None or (nbytes, 4 * tiles) != (self._partials[0].size, self._partials[1].size):
                flags = cl.mem_flags.READ_WRITE
                arrivals = cl.Buffer(self.context, flags | cl.mem_flags.COPY_HOST_PTR, hostbuf=np.zeros(tiles, np.uint32))
                found = cl.Buffer(self.context, flags, nbytes), arrivals
                if not self.in_order:
                    return found
                self._partials = found
            return self._partials

    def launch(self, launch: Launch, wait_for: Sequence[cl.Event]) -> cl.Event:
        """Build a launch if need be, and enqueue it."""
        with self.lock:
            kernel, plan = self.fitting(launch)
            kernel.set_args(*launch.arguments)
            return self.enqueue(Bound(kernel, (plan.global_size(launch.blocks),), (plan.wg,), launch.arguments), wait_for)

    def enqueue(self, bound: Bound, wait_for: Sequence[cl.Event]) -> cl.Event:
        """Enqueue a kernel; a queue that runs in order waits for its own events anyway."""
        waits = list(wait_for)
        if self.in_order:  # of the last event the driver need not be asked
            waits = [e for e in waits if e is not self._last and e.command_queue != self.queue]
        event = cl.enqueue_nd_range_kernel(self.queue, bound.kernel, bound.global_size, bound.local_size, wait_for=waits or None)
        self._last = event
        return event

    def bind(self, launch: Launch) -> Bound:
        """Build a launch if need be, and set its arguments on a kernel object of its own."""
        _, plan = self.fitting(launch)
        kernel = cl.Kernel(self.program(launch.file, {**launch.macros, **plan.defines()}, plan.options), launch.name)
        kernel.set_args(*launch.arguments)
        return Bound(kernel, (plan.global_size(launch.blocks),), (plan.wg,), launch.arguments)

"""From a `.cl` file and macros to kernels that are built once and kept."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

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


class Programs:
    """The kernels of one context and device. A kernel object holds its arguments, so whoever sets and
    enqueues one holds `lock` meanwhile.
    """

    def __init__(self, context: cl.Context, device: cl.Device) -> None:
        self.context = context
        self.device = device
        self.lock = threading.RLock()
        self._kernels: dict[object, cl.Kernel] = {}

    def kernel(self, file: str, name: str, macros: Mapping[str, str | int], options: tuple[str, ...] = ()) -> cl.Kernel:
        """The kernel `name` of a file built with these macros; built at the first call. Raises BuildError."""
        key = (file, name, tuple(sorted(macros.items())), options)
        with self.lock:
            if key not in self._kernels:
                program = build(self.context, self.device, file, macros, options)
                for kernel in program.all_kernels():
                    self._kernels[file, kernel.function_name, tuple(sorted(macros.items())), options] = kernel
            return self._kernels[key]

    def launch(
        self,
        queue: cl.CommandQueue,
        file: str,
        name: str,
        plan: Plan,
        macros: Macros,
        arguments: Sequence[Any],
        blocks: int,
        wait_for: Sequence[cl.Event],
    ) -> cl.Event:
        """Enqueue a kernel over `blocks` blocks. The work-group shrinks until the built kernel takes it."""
        with self.lock:
            while True:
                kernel = self.kernel(file, name, {**macros, **plan.defines()}, plan.options)
                limit = kernel.get_work_group_info(cl.kernel_work_group_info.WORK_GROUP_SIZE, self.device)
                if plan.wg <= limit or plan.wg == 1:
                    break
                plan = plan.halved()
            kernel.set_args(*arguments)
            return cl.enqueue_nd_range_kernel(queue, kernel, (plan.global_size(blocks),), (plan.wg,), wait_for=list(wait_for))

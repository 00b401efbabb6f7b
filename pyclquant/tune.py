"""Finds the launch parameters of `pyclquant.tuned` that are fastest on a device, with kernel-tuner.

kernel-tuner searches, launches, repeats and asks for verification; what it launches is what the library would: the plan, macros,
options and arguments of the real call with a candidate's parameters. Four things it does not do are put around it:

* it builds from one text with its own macros, and frees the program, which Intel's CPU runtime does not survive: `Bench.compile`
  builds like `pyclquant.program` and keeps what it built
* it launches the same arguments again, which are in the caches by then: before each launch, a buffer larger than these is read
* it waits for a launch by asking whether it has ended, but never flushes the queue, so that with rusticl it waits for ever
* it ends at the first wrong result: here a candidate whose bytes differ from those of the present parameters, which were compared
  with the reference before, is left out and named

A time is the median of the device's events.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import cache, cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl
import pyopencl.array as cla

from pyclquant import kv, reference, tuned, w8a8
from pyclquant.arrays import on_host
from pyclquant.bench_kv import TILE as KV_TILE
from pyclquant.bench_kv import tile_mismatch
from pyclquant.bench_w8a8 import CHECKED
from pyclquant.bench_w8a8 import TILE as WEIGHT_TILE
from pyclquant.bench_work import Array, Spec, check_memory, repeated, sample
from pyclquant.device import Device, discover
from pyclquant.errors import BuildError, NoDeviceError, PyclquantError, UnsupportedDeviceError
from pyclquant.files import check_output, replacing
from pyclquant.floor import MEGABYTE, PIECE, Floors, candidates
from pyclquant.formats import FLOAT_DTYPES, FORMATS
from pyclquant.program import Launch, Programs, build
from pyclquant.testing import mismatch, product_mismatch
from pyclquant.variants import ACT, GEMV, KV, Blocks, Product, Variant, mma_size, register_rows, tile_rows

Values = Mapping[str, int]
"""Parameter -> value."""
Step = Callable[[str], None]

OPS = {"kv": ("kv_quantize", "kv_dequantize"), "act_quant": ("act_quant",), "gemv": ("gemv",)}
"""Names that `--op` takes -> operations."""
TABLES: dict[str, tuple[Variant[Any], ...]] = {"kv_quantize": KV, "kv_dequantize": KV, "act_quant": ACT, "gemv": GEMV}

Space = dict[str, tuple[int, ...]]
"""Parameter -> values to try."""
SIDE_BY_SIDE: Space = {"wg": (64, 128, 256), "vectors": (1, 2, 4, 8), "held": (0, 1)}
KV_ROW: Space = {"items": (1, 4, 16, 64, 256)}
BASE: Space = {"wg": (16, 32, 64, 128, 256)}
KV_SPACES = {"vector_shuffle": SIDE_BY_SIDE, "vector": SIDE_BY_SIDE, "row": KV_ROW, "base": BASE}
GEMV_ROW: Space = {"tile_n": (1, 2, 4, 8, 16), "item_bytes": (1 << 14, 1 << 16, 1 << 18, 1 << 20), "items": (4, 16)}
SPACES: dict[str, Space] = {
    **{f"{op}/{variant}": space for op in OPS["kv"] for variant, space in KV_SPACES.items()},
    "act_quant/vector": {"wg": (64, 128, 256, 512, 1024), "most_held": (0, 16)},
    "act_quant/row": {"items": (1, 4, 16, 64), "most_held": (0, 16)},
    "act_quant/base": BASE,
    "gemv/mma": {"warps_k": (1, 4), "warps_n": (1, 2, 4), "warps_m": (1, 2, 4), "tiles_n": (1, 2), "stages": (2, 3, 4, 6)},
    "gemv/vector": {"wg": (64, 128, 256), "tile_n": (1, 2, 4, 8), "spans": (1, 2, 4, 8), "spread": (1, 4)},
    **{f"gemv/{variant}": GEMV_ROW for variant in ("row", "row_bf16")},
}
"""op/variant -> parameter -> values that are tried, beside the present one. Parameters that are missing stay as they are."""

MOST_SUMS = {"gemv/vector": 32, "gemv/row": 32, "gemv/row_bf16": 32}
"""Most sums, TILE_M * TILE_N, of a work-item: with more the registers do not do, and compilers take long."""

MOST_LAUNCHES = 48
"""All combinations are tried if they make no more launches than this, else those around the fastest, step by step."""
STEPS = 3
"""So many at most."""

FINALISTS = 3
"""So many of the fastest are timed again beside the present parameters."""
CPU_ROUNDS = 5
"""So often on a CPU driver, where the machine's other work slows all for seconds at a time: faster means in each of them."""
GAIN = 0.03
"""Candidates must be faster by this share: below it lies the noise of a busy machine."""
BUILDERS = 8
"""So many kernels are built at a time for a GPU."""
KERNEL_TUNER = "kernel_tuner"
SUFFIXES = (".json",)


def check_installed() -> None:
    """Raises PyclquantError when kernel-tuner is missing: before long work."""
    if find_spec(KERNEL_TUNER) is None:
        raise PyclquantError("tune: expected kernel-tuner to be installed, found none; pip install 'pyclquant[tune]'")


# ---- what is tuned ----


@dataclass(frozen=True)
class Task:
    """One size class of a kernel. shape: for people.  call: runs the operation on a device, its last launch is the kernel.

    outputs: arrays that the kernel fills.  check: None, or how their contents differ from the reference.
    """

    kernel: str
    size: str
    shape: str
    call: Callable[[Device], object]
    outputs: tuple[cla.Array, ...]
    check: Callable[[Sequence[Array]], str | None]

    @property
    def name(self) -> str:
        """Kernel, size class and shape."""
        return f"{self.kernel} {self.size}, {self.shape}"


def kv_task(dev: Device, kernel: str, size: str, shape: tuple[int, ...]) -> Task:
    """bfloat16 [*shape], in FP8 E4M3FN per head or INT4 in groups of 64."""
    op, _, variant = kernel.partition("/")
    fmt = FORMATS["int4" if size == "int4" else "fp8_e4m3fn"]
    how: dict[str, Any] = {"granularity": "per_group", "group_size": 64} if size == "int4" else {}
    per_row = int(np.prod(shape[1:-1], dtype=np.int64))
    tile = sample((min(shape[0], max(1, KV_TILE // per_row)), *shape[1:]), "bfloat16")
    codes, scales, mins = reference.quantize(tile, fmt, **how)
    x = cla.to_device(dev.queue, repeated(tile, shape[0]))
    q = kv.quantize(dev, x, fmt, force=variant, **how)
    if op == "kv_quantize":
        want = [a for a in (codes, scales, mins) if a is not None]
        outputs = tuple(a for a in (q.codes, q.scales, q.mins) if isinstance(a, cla.Array))

        def call(d: Device) -> object:
            return kv.quantize(d, x, fmt, out=q, force=variant, **how)
    else:
        want = [reference.dequantize(codes, scales, mins, fmt, tile.shape, dtype="bfloat16", **how)]
        outputs = (cla.empty_like(x),)

        def call(d: Device) -> object:
            return kv.dequantize(d, q, "bfloat16", out=outputs[0], force=variant)

    def check(got: Sequence[Array]) -> str | None:
        wrong = (tile_mismatch(a, b, f"output {n}") for n, (a, b) in enumerate(zip(got, want, strict=True)))
        return next((w for w in wrong if w), None)

    return Task(kernel, size, "×".join(map(str, shape)), call, outputs, check)


def act_task(dev: Device, kernel: str, size: str, rows: int, k: int) -> Task:
    """bfloat16 activations [rows, K], one scale a row or for each 128."""
    variant = kernel.partition("/")[2]
    layout = "block_128" if size == "block_128" else "per_row"
    x = sample((rows, k), "bfloat16")
    want = reference.act_quant(x, layout)
    on_device = cla.to_device(dev.queue, x)
    scratch = w8a8.Scratch.alloc(dev, k)
    acts = scratch.activations(rows, k, layout)

    def check(got: Sequence[Array]) -> str | None:
        wrong = (mismatch(a, b, part) for part, a, b in zip(w8a8.Activations._fields, got, want, strict=True))
        return next((w for w in wrong if w), None)

    def call(d: Device) -> object:
        return w8a8.act_quant(d, on_device, layout, scratch=scratch, force=variant)

    return Task(kernel, size, f"{rows}×{k}", call, (acts.codes, acts.scales), check)


def gemv_task(dev: Device, kernel: str, size: str, rows: int, make_weights: Callable[[], Weights]) -> Task:
    """bfloat16 product of quantized activations [rows, K] with weights [N, K]."""
    variant = kernel.partition("/")[2]
    weights = make_weights()
    w = weights.weight
    codes, scales = reference.act_quant(sample((rows, w.k), "bfloat16"), w.scale_layout)
    acts = w8a8.Activations(cla.to_device(dev.queue, codes), cla.to_device(dev.queue, scales))
    scratch = w8a8.Scratch.alloc(dev, w.k)
    out = cla.empty(dev.queue, (rows, w.n), FLOAT_DTYPES["bfloat16"])

    def call(d: Device) -> object:
        return w8a8.gemv(d, acts, w, "bfloat16", out=out, scratch=scratch, force=variant)

    def check(got: Sequence[Array]) -> str | None:
        return weights.check(codes, scales, got[0])

    return Task(kernel, size, f"{rows}×{w.k} by {w.n}×{w.k}", call, (out,), check)


@dataclass(frozen=True)
class Weights:
    """A random weight [N, K]. codes, scales: the same on the host."""

    weight: w8a8.Weight
    codes: Array
    scales: Array

    def check(self, a: Array, a_scales: Array, got: Array) -> str | None:
        """None, or the worst of CHECKED blocks of columns of got [M, N], the product with quantized activations a [M, K]."""
        blocks = -(-len(self.codes) // w8a8.CHUNK)
        for block in np.unique(np.linspace(0, blocks - 1, CHECKED).astype(int)):
            rows = slice(block * w8a8.CHUNK, min((block + 1) * w8a8.CHUNK, len(self.codes)))
            scales = self.scales[rows if self.scales.ndim == 1 else slice(block, block + 1)]
            exact, magnitude = reference.gemv(a, a_scales, [(self.codes[rows], scales)], self.weight.scale_layout)
            wrong = product_mismatch(got[:, rows], exact, magnitude, a.shape[1], f"result[:, {rows.start}:{rows.stop}]")
            if wrong:
                return wrong
        return None


def weights_for(dev: Device, n: int, k: int, layout: str) -> Weights:
    """One random weight."""
    check_memory(dev, n * k, "weight")
    segment = w8a8.quantize_weight(dev, repeated(sample((min(n, WEIGHT_TILE), k), "bfloat16"), n), layout)
    return Weights(w8a8.Weight(dev, segment), on_host(segment.codes), on_host(segment.scales))


@dataclass(frozen=True)
class Choice:
    """What to tune. ops: of OPS, or op/variant of `tuned.PARAMETERS`.  tensor: [rows, dim] of K/V.  weight: (N, K).

    rows: of activations; None is all size classes.  quick: only values next to the present ones, one parameter at a time, fewer
    repetitions.  seconds: after which no other task is begun.
    """

    ops: tuple[str, ...] = tuple(OPS)
    tensor: tuple[int, ...] = (262144, 128)
    weight: tuple[int, int] = Spec.weight
    rows: tuple[int, ...] | None = None
    quick: bool = False
    seconds: float = float("inf")


ACT_ROWS = 32
"""Rows of activations with which their quantizers are tuned, unless the choice says so."""


def kernels_of(dev: Device, choice: Choice) -> list[str]:
    """op/variant of each kernel, of an op alone with the variant that the device takes. Raises UnsupportedDeviceError."""
    n, k = choice.weight
    dim = choice.tensor[-1]
    shapes: dict[str, Any] = {
        "kv_quantize": Blocks(dim, dim, 4096, 2),
        "kv_dequantize": Blocks(dim, dim, 4096, 2, restore=True),
        "act_quant": Blocks(k, k, 8, 2),
        "gemv": Product(8, n, k),
    }
    kernels = []
    for name in choice.ops:
        family, _, variant = name.partition("/")
        for op in OPS.get(family, (family,)):
            taken = dev.plan(TABLES[op], shapes[op], variant or None).variant
            kernels.append(f"{op}/{taken}")
    return [kernel for kernel in dict.fromkeys(kernels) if kernel in SPACES]


def tasks(dev: Device, choice: Choice) -> Iterable[tuple[str, Callable[[], Task]]]:
    """Name and maker of each size class of each kernel; a task holds much memory."""
    n, k = choice.weight
    check_memory(dev, int(np.prod(choice.tensor, dtype=object)) * 2, "tensor")
    weights = cache(partial(weights_for, dev, n, k))
    for kernel in kernels_of(dev, choice):
        op, _, variant = kernel.partition("/")
        of_rows = tile_rows if variant == "mma" else register_rows
        wanted = None if choice.rows is None else {of_rows(min(m, w8a8.LAUNCH_ROWS)) for m in choice.rows}
        for size in tuned.sizes(kernel):
            make: Callable[[], Task]
            if op in OPS["kv"]:
                make = partial(kv_task, dev, kernel, size, choice.tensor)
            elif op == "act_quant":
                make = partial(act_task, dev, kernel, size, max(choice.rows or (ACT_ROWS,)), k)
            elif size == tuned.ANY:
                continue
            else:
                layout, rows = size.split()[:2]
                if wanted is not None and int(rows) not in wanted:
                    continue
                if variant == "mma" and size != mma_size(dev.capabilities, Product(int(rows), n, k, layout), int(rows)):
                    continue
                make = partial(gemv_task, dev, kernel, size, int(rows), partial(weights, layout))
            yield f"{kernel} {size}", make


# ---- candidates ----


class Recorder(Programs):
    """Notes launches. run: whether they are enqueued, too."""

    def __init__(self, queue: cl.CommandQueue, run: bool) -> None:
        super().__init__(queue)
        self.run = run
        self.launches: list[Launch] = []

    def launch(self, launch: Launch, wait_for: Sequence[cl.Event]) -> cl.Event:
        """Note a launch."""
        self.launches.append(launch)
        return super().launch(launch, wait_for) if self.run else cl.enqueue_marker(self.queue)


def launch_with(dev: Device, task: Task, values: Values, run: bool = False) -> Launch:
    """The launch that the operation takes with these parameters."""
    entry = {task.kernel: {task.size: values}}
    caps = replace(dev.capabilities, tuned=(("candidate", entry), *dev.capabilities.tuned))
    candidate = Device(dev.queue, caps)
    candidate.programs = recorder = Recorder(dev.queue, run)
    task.call(candidate)
    return recorder.launches[-1]


def scalars(launch: Launch) -> tuple[Any, ...]:
    """Arguments by value, None for others."""
    return tuple(a if isinstance(a, np.generic) else None for a in launch.arguments)


def settings(kernel: str, present: Values) -> list[dict[str, int]]:
    """All combinations of the values that are tried, the present ones first, then those that change the fewest parameters."""
    space = {name: sorted({*values, present[name]}) for name, values in SPACES[kernel].items()}
    found = [dict(present) | dict(zip(space, values, strict=True)) for values in product(*space.values())]
    return sorted(found, key=lambda values: sum(values[name] != present[name] for name in space))


def around(kernel: str, present: Values) -> list[dict[str, int]]:
    """The present values, then those with the next lower or higher one of a single parameter."""
    found = [dict(present)]
    for name, values in SPACES[kernel].items():
        known = sorted({*values, present[name]})
        at = known.index(present[name])
        found += [dict(present) | {name: value} for value in known[max(0, at - 1) : at + 2] if value != present[name]]
    return found


def distinct(dev: Device, task: Task, tried: Iterable[dict[str, int]]) -> dict[tuple[int, ...], Launch]:
    """Values in the order of PARAMETERS -> launch, each launch once; the first of tried, and the others that MOST_SUMS allows."""
    launches: dict[tuple[int, ...], Launch] = {}
    seen = set()
    for values in tried:
        launch = launch_with(dev, task, values)
        sums = int(launch.plan.macros.get("TILE_M", 0)) * int(launch.plan.macros.get("TILE_N", 0))
        if launches and sums > MOST_SUMS.get(task.kernel, sums):
            continue
        what = repr((sorted(launch.plan.defines().items()), launch.plan.global_size(launch.blocks), scalars(launch)))
        if what not in seen:
            seen.add(what)
            launches[tuple(values[name] for name in tuned.PARAMETERS[task.kernel])] = launch
    return launches


# ---- one task ----


@dataclass
class Bench:
    """What kernel-tuner is told to compile, launch, verify and time for a task."""

    dev: Device
    task: Task
    launches: Mapping[tuple[int, ...], Launch]
    first: Launch
    want: Sequence[Array]
    wrong: dict[tuple[int, ...], str] = field(default_factory=dict)
    built: dict[tuple[int, ...], tuple[cl.Kernel, cl.Program]] = field(default_factory=dict)
    current: tuple[int, ...] = ()
    times: list[float] = field(default_factory=list)
    backend: Any = None

    @property
    def names(self) -> tuple[str, ...]:
        """Of the parameters."""
        return tuple(tuned.PARAMETERS[self.task.kernel])

    def key(self, params: Mapping[str, Any]) -> tuple[int, ...]:
        """The values of a configuration."""
        return tuple(int(params[name]) for name in self.names)

    def named(self, key: tuple[int, ...]) -> dict[str, int]:
        """Parameter -> value."""
        return dict(zip(self.names, key, strict=True))

    @cached_property
    def arguments(self) -> list[Any]:
        """For kernel-tuner: contents of buffers, rubbish for outputs; scalars, chosen by configuration where they differ."""
        choose = import_module(f"{KERNEL_TUNER}.accuracy").Tunable
        found: list[Any] = []
        for n, argument in enumerate(self.first.arguments):
            of = {key: launch.arguments[n] for key, launch in self.launches.items()}
            if isinstance(argument, np.generic):
                found.append(argument if len(set(of.values())) == 1 else choose(self.key, of))
                continue
            # room for partial sums is as large as the candidate wants it
            size = max((a.size for a in (argument, *of.values()) if a is not None), default=0)
            host = np.full(size, 0 if self.output(argument) is None else 0xA5, np.uint8)
            if argument is not None and self.output(argument) is None:
                cl.enqueue_copy(self.dev.queue, host[: argument.size], argument)
            found.append(host if size else None)
        return found

    def output(self, argument: object) -> int | None:
        """Which of the outputs an argument is."""
        return next((n for n, a in enumerate(self.task.outputs) if a.base_data is argument), None)

    def answer(self) -> list[Array | None]:
        """The bytes that each output has to have; None for what is read."""
        return [None if (n := self.output(a)) is None else np.zeros(1, np.uint8) + n for a in self.first.arguments]

    def build(self, key: tuple[int, ...]) -> None:
        """Build the kernel of a configuration as `Programs` does; note one that does not build or takes no such work-group."""
        if key in self.built or key in self.wrong:
            return
        launch, device = self.launches[key], self.backend.ctx.devices[0]
        macros = {**launch.macros, **launch.plan.defines()}
        try:
            program = build(self.backend.ctx, device, launch.file, macros, launch.plan.options)
            kernel = cl.Kernel(program, launch.name)
        except (BuildError, cl.Error) as error:
            self.wrong[key] = str(error)
            return
        self.built[key] = kernel, program
        limit = kernel.get_work_group_info(cl.kernel_work_group_info.WORK_GROUP_SIZE, device)
        if limit < launch.plan.wg:
            self.wrong[key] = f"takes work-groups of {limit}"

    def build_all(self, keys: Iterable[tuple[int, ...]]) -> None:
        """Build ahead, several at a time."""
        with ThreadPoolExecutor(BUILDERS) as pool:
            list(pool.map(self.build, keys))

    def compile(self, instance: Any) -> cl.Kernel | None:
        """The kernel of a configuration, None for one that is left out."""
        self.current = key = self.key(instance.params)
        self.build(key)
        return None if key in self.wrong else self.built[key][0]

    def global_size(self, params: Mapping[str, Any]) -> tuple[int]:
        """Work-items of a configuration."""
        launch = self.launches[self.key(params)]
        return (launch.plan.global_size(launch.blocks),)

    def verify(self, answer: Sequence[Array | None], result: Sequence[Array | None], atol: float) -> bool:
        """Note a result with other bytes than the checked ones. True, or kernel-tuner would end."""
        for place, got in zip(answer, result, strict=True):
            if place is not None and got is not None:
                want = self.want[int(place[0])]
                bytes_wanted = np.ascontiguousarray(want).reshape(-1).view(np.uint8)
                differ = int((got[: bytes_wanted.size] != bytes_wanted).sum())
                if differ:
                    self.wrong[self.current] = f"{differ} of {bytes_wanted.size} bytes differ from the checked result"
        return True

    def observers(self, keys: Collection[tuple[int, ...]]) -> list[Any]:
        """One that builds our way, empties the caches before each launch and takes the median of the times."""
        observer: Any = import_module(f"{KERNEL_TUNER}.observers.observer").BenchmarkObserver
        bench = self

        class Cold(observer):  # type: ignore[misc]
            def register_device(self, dev: Any) -> None:
                super().register_device(dev)
                bench.backend = dev
                dev.compile = bench.compile
                if not bench.dev.capabilities.is_cpu:  # whose drivers use all cores to build, one at a time
                    bench.build_all(keys)
                self.flush = Flush(bench.dev, dev.queue)

            def before_start(self) -> None:
                self.flush.enqueue()

            def after_start(self) -> None:
                self.dev.queue.flush()

            def after_finish(self) -> None:
                profile = self.dev.event.profile
                bench.times.append((profile.end - profile.start) * 1e-3)

            def get_results(self) -> dict[str, float]:
                median = statistics.median(bench.times)
                bench.times.clear()
                return {"median_us": float("inf") if bench.current in bench.wrong else median}

        return [Cold()]

    def run(self, keys: Collection[tuple[int, ...]], iterations: int) -> dict[tuple[int, ...], float]:
        """Values -> median microseconds, of those that give the right bytes."""
        if not keys:
            return {}
        allowed = {(*key, self.launches[key].plan.wg) for key in keys}
        names = (*self.names, "work_items")
        parameters = {name: sorted({values[n] for values in allowed}) for n, name in enumerate(names)}
        platform, device = place_of(self.dev)

        def wanted(params: Mapping[str, int]) -> bool:  # as a lambda it would be parsed
            return tuple(params[name] for name in names) in allowed

        self.built.clear()  # of another context
        results, _ = import_module(KERNEL_TUNER).tune_kernel(
            self.first.name,
            lambda _: "",
            self.global_size,
            self.arguments,
            parameters,
            grid_div_x=["work_items"],
            restrictions=[wanted],
            answer=self.answer(),
            verify=self.verify,
            lang="OpenCL",
            platform=platform,
            device=device,
            block_size_names=["work_items"],
            iterations=iterations,
            observers=self.observers(keys),
            objective="median_us",
            objective_higher_is_better=False,
            quiet=True,
            defines={},
        )
        timed = {self.key(row): row["median_us"] for row in results if isinstance(row.get("median_us"), float)}
        return {key: us for key, us in timed.items() if key not in self.wrong}


def place_of(dev: Device) -> tuple[int, int]:
    """Index of the platform and of the device in it. Raises NoDeviceError."""
    for found in discover().found:
        if found.device == dev.queue.device:
            return found.platform_index, found.device_index
    raise NoDeviceError(f"queue: expected a device of this machine's platforms, got {dev.name}")


class Flush(Floors):
    """Reads a buffer larger than the device's caches, on the queue of another context."""

    def __init__(self, dev: Device, queue: cl.CommandQueue) -> None:
        self.dev = Device(queue, dev.capabilities)
        least = 64 if dev.capabilities.is_cpu else 512  # a GPU may tell of its innermost cache alone
        most = int(dev.capabilities.reported.get("global_mem_size") or 0) // 16 or least * MEGABYTE
        self.nbytes = min(most, max(least * MEGABYTE, 2 * int(queue.device.global_mem_cache_size or 0))) // PIECE * PIECE
        walks = dev.capabilities.walks_rows or not dev.capabilities.is_cpu  # candidates begin with what suits the kind of device
        candidate = candidates(dev.capabilities, copies=False)[0 if walks else -1]
        self.whole = cla.zeros(queue, self.nbytes // 4, np.uint32)
        self.sums = cla.empty(queue, self.global_size(candidate), np.uint32)
        self.launch = self.launcher("bench_read", candidate)

    def enqueue(self) -> None:
        """Read it."""
        self.launch(self.whole, self.sums)


@dataclass(frozen=True)
class Row:
    """What came of a task. present, best: all parameters, and microseconds.  tried: launches.  left_out: values -> why."""

    kernel: str
    size: str
    shape: str
    present: dict[str, int]
    present_us: float
    best: dict[str, int]
    best_us: float
    tried: int
    left_out: dict[str, str]


def tune(dev: Device, task: Task, quick: bool = False) -> Row:
    """Search for a task. Raises UnsupportedDeviceError when the present parameters do not give the reference's result."""
    present = tuned.find(dev.capabilities, task.kernel, task.size).values
    first = launch_with(dev, task, present, run=True)
    want = [a.get() for a in task.outputs]
    wrong = task.check(want)
    if wrong:
        raise UnsupportedDeviceError(f"{task.name}: expected the reference's result with the present parameters, got: {wrong}")
    everything = distinct(dev, task, around(task.kernel, present) if quick else settings(task.kernel, present))
    bench = Bench(dev, task, everything, first, want)
    iterations = 7 if quick else 15
    now = next(iter(everything))
    times: dict[tuple[int, ...], float] = {}
    if len(everything) <= MOST_LAUNCHES:
        times = bench.run(everything, iterations)
    else:
        middle, steps_left = now, STEPS
        while steps_left:
            near = [key for values in around(task.kernel, bench.named(middle)) if (key := bench.key(values)) in everything]
            times |= bench.run([key for key in near if key not in times and key not in bench.wrong], iterations)
            fastest = min(times, key=times.__getitem__, default=now)
            steps_left = steps_left - 1 if fastest != middle else 0
            middle = fastest
    tried = len(times) + len(bench.wrong)
    finalists = {now, *sorted(times, key=times.__getitem__)[:FINALISTS]}
    rounds = [bench.run(finalists, iterations) for _ in range(CPU_ROUNDS if dev.capabilities.is_cpu else 1)]
    if any(now not in of for of in rounds):
        raise UnsupportedDeviceError(f"{task.name}: expected a time with the present parameters, got: {bench.wrong.get(now)}")
    shares = {key: [of[key] / of[now] for of in rounds] for key in finalists if all(key in of for of in rounds)}
    better = {key: statistics.median(of) for key, of in shares.items() if max(of) < 1}
    best = min((key for key, share in better.items() if share < 1 - GAIN), key=lambda key: better[key], default=now)
    now_us = statistics.median(of[now] for of in rounds)

    left_out = {" ".join(f"{n}={v}" for n, v in bench.named(key).items()): why for key, why in bench.wrong.items()}
    kernel, size, shape = task.kernel, task.size, task.shape
    return Row(kernel, size, shape, bench.named(now), now_us, bench.named(best), now_us * better.get(best, 1.0), tried, left_out)


@dataclass(frozen=True)
class Report:
    """Rows of what was tuned, in order. failed: task -> why.  skipped: tasks for which there was no time."""

    rows: list[Row]
    failed: dict[str, str]
    skipped: list[str]


def run(dev: Device, choice: Choice, step: Step) -> Report:
    """Tune all that a choice means, one after the other. step: is told of each. Raises PyclquantError without kernel-tuner."""
    check_installed()
    report = Report([], {}, [])
    end = time.perf_counter() + choice.seconds
    for name, make in tasks(dev, choice):
        if time.perf_counter() > end:
            report.skipped.append(name)
            continue
        step(name)
        try:
            report.rows.append(tune(dev, make(), choice.quick))
        except (PyclquantError, cl.Error, RuntimeError) as error:  # the others are worth having all the same
            report.failed[name] = str(error)
    return report


# ---- files ----


def open_file(path: Path) -> dict[str, Any]:
    """What a file to be written holds by now, nothing if there is none. Raises TunedError, FileError: before long work."""
    path.parent.mkdir(parents=True, exist_ok=True)
    check_output(path, SUFFIXES)
    return tuned.read(path) if path.exists() else {}


def updated(content: Mapping[str, Any], dev: Device, level: str, rows: Iterable[Row], by: str) -> dict[str, Any]:
    """The content of a file with what is faster than the present parameters, under the device's key of a level.

    by: the command, which the entries tell.
    """
    key = key_of(dev, level)
    reported = dev.capabilities.reported
    old = content.get(level, {}).get(key, {})
    day = datetime.now(timezone.utc).date()
    entries = {**old, tuned.ABOUT: f"{by}, {day}, {reported['name']}, driver {reported['driver_version']}"}
    for row in rows:
        if row.best != row.present:
            others = tuned.sizes(row.kernel) if row.size == tuned.ANY else ()  # which an entry for any size would change
            kept = {size: tuned.find(dev.capabilities, row.kernel, size).values for size in others}
            entries[row.kernel] = {**kept, **entries.get(row.kernel, {}), row.size: row.best}
    return {**content, level: {**content.get(level, {}), key: entries}}


def key_of(dev: Device, level: str) -> str:
    """The device's key of a level. Raises UnsupportedDeviceError when it has none."""
    key = tuned.keys(dev.capabilities.reported).get(level)
    if key is None:
        raise UnsupportedDeviceError(f"level: expected one that {dev.name} has a key for, got {level}")
    return key


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file, checked and whole or not at all. Raises TunedError, FileError."""
    text = tuned.text_of(content)
    tuned.parse(text, path)
    with replacing(path, SUFFIXES) as beside:
        beside.write_text(text)

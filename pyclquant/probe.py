"""What works on a device: small kernels are built and run in a child process, and their bits compared.

A compiler that aborts or a kernel that hangs ends the child, not the caller: the feature in question
gets a verdict that says so and a new child goes on with the next one. `python -m pyclquant.probe` is the
child; it reads a request as JSON and writes a line before and after each feature.
"""

from __future__ import annotations

import json
import queue as queues
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pyopencl as cl

from pyclquant import icd, reference
from pyclquant.capabilities import Capabilities, Verdict
from pyclquant.errors import PyclquantError
from pyclquant.formats import FORMATS
from pyclquant.program import build
from pyclquant.testing import mismatch

FEATURE_SECONDS = 90.0
"""How long one feature may take, its build included."""

MARK = "@pyclquant "
Array = np.ndarray[Any, Any]


class Bench:
    """One device in the child: runs a probe kernel on arrays."""

    def __init__(self, device: cl.Device, caps: Capabilities) -> None:
        self.device = device
        self.caps = caps
        self.context = cl.Context([device])
        self.queue = cl.CommandQueue(self.context)

    def run(
        self,
        probe: str,
        inputs: Iterable[Array | np.generic],
        outputs: Iterable[Array],
        macros: dict[str, str | int] | None = None,
        options: tuple[str, ...] = (),
        items: int | None = None,
        more: Iterable[np.generic] = (),
        seconds: list[float] | None = None,
    ) -> list[Array]:
        """Build the kernel probe_<probe> and run it; outputs hold their initial values and come back new.

        more: arguments behind the outputs.  seconds: gets the time of the kernel appended.
        """
        defines: dict[str, str | int] = {"WG": 1, "X_TYPE": "F32", f"PROBE_{probe.upper()}": 1, **(macros or {})}
        program = build(self.context, self.device, "probe.cl", defines, options)
        kernel = cl.Kernel(program, f"probe_{probe}")
        mf = cl.mem_flags
        arguments: list[Any] = []
        back: list[tuple[cl.Buffer, Array]] = []
        for a in inputs:
            buffer = cl.Buffer(self.context, mf.READ_ONLY | mf.COPY_HOST_PTR, hostbuf=a) if isinstance(a, np.ndarray) else a
            arguments.append(buffer)
        for a in outputs:
            target = cl.Buffer(self.context, mf.READ_WRITE | mf.COPY_HOST_PTR, hostbuf=a)
            arguments.append(target)
            back.append((target, np.empty_like(a)))
        count = items if items is not None else back[0][1].size
        self.queue.finish()
        start = time.perf_counter()
        kernel(self.queue, (count,), (int(defines["WG"]),), *arguments, *more)
        if seconds is not None:
            self.queue.finish()
            seconds.append(time.perf_counter() - start)
        for buffer, host in back:
            cl.enqueue_copy(self.queue, host, buffer)
        self.queue.finish()
        return [host for _, host in back]


Feature = Callable[[Bench], Verdict]


def verdict(failure: str | None, success: str = "right bits", **more: Any) -> Verdict:
    """Ok when there is no failure."""
    return Verdict(failure is None, failure or success, **more)


def floats(seed: int, n: int, low: int = -100, high: int = 100) -> Array:
    """N float32 [n] with random mantissas, signs, and exponents low..high."""
    rng = np.random.default_rng(seed)
    mantissa = rng.integers(1 << 23, 1 << 24, n) * rng.choice([-1, 1], n)
    return np.asarray(np.ldexp(mantissa.astype(np.float64), rng.integers(low, high + 1, n) - 23), dtype=np.float32)


def base(b: Bench) -> Verdict:
    """Local memory, a barrier and arithmetic: what every kernel needs."""
    x = np.arange(64, dtype=np.float32)
    (y,) = b.run("base", [x], [np.zeros(64, np.float32)], {"WG": 16})
    return verdict(mismatch(y, np.repeat(x.reshape(4, 16).sum(1), 16) + x / 2))


def vector(width: int) -> Feature:
    """The built-ins of one vector width."""

    def feature(b: Bench) -> Verdict:
        rng = np.random.default_rng(1)
        x = (rng.integers(-4095, 4096, 16 * width) / 64).astype(np.float32)  # 12 bits: the fma is exact in float64
        f = (x.astype(np.float64) ** 2 + x).astype(np.float32)
        y, n, c = b.run(
            "vector",
            [x],
            [np.zeros(x.shape, np.float32), np.zeros(x.shape, np.int32), np.zeros(x.shape, np.uint8)],
            {"VEC": width},
            items=16,
        )
        return verdict(
            mismatch(y, np.where(np.abs(f) < 100, f, x / 2).astype(np.float32), "fma, fabs, ?:")
            or mismatch(n, np.maximum(x.view(np.int32) & 0x7FFFFFFF, f.view(np.int32)), "max, as_int")
            or mismatch(c, np.minimum(np.abs(x), 200).astype(np.uint8), "convert, min"),
            f"packed loads and stores, fma, max, min, fabs, convert, as and ?: of width {width} gave the right bits",
        )

    return feature


def fma(b: Bench) -> Verdict:
    """One rounding, for normal operands: residuals of products."""
    x, w = floats(2, 4096, -20, 20), floats(3, 4096, -20, 20)
    exact = x.astype(np.float64) * w
    z = -exact.astype(np.float32)
    (y,) = b.run("fma", [x, w, z], [np.zeros_like(x)])
    return verdict(mismatch(y, (exact + z).astype(np.float32)), "exact for normal operands")


def fma_denormals(b: Bench) -> Verdict:
    """One rounding, for subnormal operands."""
    x, w = floats(4, 1024, -100, -90), floats(5, 1024, -12, -10)
    z = np.ldexp(np.arange(1, 1025, dtype=np.float64), -149).astype(np.float32)
    (y,) = b.run("fma", [x, w, z], [np.zeros_like(x)])
    return verdict(mismatch(y, (x.astype(np.float64) * w + z).astype(np.float32)), "exact for subnormal operands")


def fma_speed(b: Bench) -> Verdict:
    """Whether fma() takes little longer than a product and a sum: without hardware for it, a driver calls a function."""
    width = max((n for n in (2, 4, 8, 16) if b.caps.ok(f"vector{n}")), default=1)
    items = 2048
    x = np.linspace(0, 4, items * 8 * width, dtype=np.float32)
    best: dict[tuple[int, int], float] = {}
    percent = 0
    for attempt in range(12):  # other work on the machine slows now one, now the other
        for rounds, fused in product((1, 2000), (0, 1)):
            seconds: list[float] = []
            (y,) = b.run(
                "fma_speed",
                [x],
                [np.zeros_like(x)],
                {"VEC": width, "FMA": fused},
                items=items,
                more=[np.uint32(rounds)],
                seconds=seconds,
            )
            best[fused, rounds] = min([*seconds, best.get((fused, rounds), float("inf"))])
            if rounds > 1 and not (y == 2).all():
                return Verdict(False, "x / 2 + 1 does not go to 2")
        separate, fused_time = (max(best[f, 2000] - best[f, 1], 1e-9) for f in (0, 1))
        percent = round(100 * fused_time / separate)
        if attempt >= 2 and percent <= 130:
            break
    return Verdict(percent <= 130, f"fma takes {percent} % of the time of a product and a sum", value=percent)


def denormals(b: Bench) -> Verdict:
    """Whether a float32 product may be subnormal, and its factor."""
    x = np.ldexp(np.arange(1, 1025, dtype=np.float64) + (1 << 23), -149).astype(np.float32)
    w = np.full(1024, 0.25, np.float32)
    x[::2], w[::2] = np.ldexp(np.arange(1, 513, dtype=np.float64), -149), 2.0**112
    (y,) = b.run("denormals", [x, w], [np.zeros_like(x)])
    return verdict(mismatch(y, x * w), "float32 subnormals are kept")


def division(mode: str, options: str = "") -> Feature:
    """One way of dividing, on hard and random quotients."""

    def feature(b: Bench) -> Verdict:
        w = np.abs(floats(6, 1 << 16, -60, 60))
        hard = np.array([1.0, 448.0, 127.0, 57344.0, 15.0, 2 - 2**-23, 1 + 2**-23, 1 / 3, 16777215.0, 2**-100], np.float32)
        w[: 4096 * hard.size] = np.repeat(hard, 4096)
        x = floats(7, w.size, -16, 16) * np.exp2(np.floor(np.log2(w))).astype(np.float32)
        x[::1000] = np.copysign(0, x[::1000])
        (y,) = b.run("divide", [x, w], [np.zeros_like(x)], {"DIVIDE": mode}, tuple(options.split()))
        return verdict(mismatch(y, x / w), "correctly rounded", options=options)

    return feature


def every_half() -> tuple[Array, Array]:
    """All float16 [65536], and float32 values around each of them that round every way [5 * 65536]."""
    halves = np.arange(65536, dtype=np.uint16).view(np.float16)
    with np.errstate(invalid="ignore", over="ignore"):
        wide = halves.astype(np.float32)
        upper = np.nextafter(halves, np.float16(np.inf)).astype(np.float32)
        middle = (wide + upper) / 2
        around = np.concatenate([wide, middle, np.nextafter(middle, wide), np.nextafter(middle, upper), -middle])
    return halves, around.astype(np.float32)


def half_load(b: Bench) -> Verdict:
    """vload_half of every float16."""
    halves, _ = every_half()
    (y,) = b.run("half_load", [halves.view(np.uint16)], [np.zeros(halves.shape, np.float32)])
    return verdict(mismatch(y, halves.astype(np.float32)), "all 65,536 values")


def half_store(b: Bench) -> Verdict:
    """vstore_half_rte of every float16 and of the ties between them."""
    _, x = every_half()
    with np.errstate(over="ignore"):
        want = x.astype(np.float16)
    (y,) = b.run("half_store", [x], [np.zeros(x.shape, np.uint16)])
    return verdict(mismatch(y.view(np.float16), want), "all 65,536 values and the ties between them")


def half_convert(b: Bench) -> Verdict:
    """The type half, converted both ways."""
    halves, x = every_half()
    repeated = np.tile(halves, 5)
    with np.errstate(over="ignore"):
        want = x.astype(np.float16)
    y, back = b.run(
        "half_convert",
        [repeated.view(np.uint16)],
        [np.zeros(x.shape, np.float32), x.copy(), np.zeros(x.shape, np.uint16)],
        {"HALF": 1},
    )[::2]
    return verdict(
        mismatch(y, repeated.astype(np.float32), "half to float") or mismatch(back.view(np.float16), want, "float to half"),
        "the type half converts all values right",
    )


def half_arithmetic(b: Bench) -> Verdict:
    """Products and sums in half."""
    rng = np.random.default_rng(8)
    x, w = (rng.normal(0, 4, 4096).astype(np.float16) for _ in range(2))
    (y,) = b.run("half_arithmetic", [x.view(np.uint16), w.view(np.uint16)], [np.zeros(4096, np.uint16)], {"HALF": 1})
    two_roundings = x * w + x
    one_rounding = (x.astype(np.float64) * w + x).astype(np.float16)
    got = y.view(np.float16)
    wrong = (got != two_roundings) & (got != one_rounding)
    return verdict(f"{int(wrong.sum())} of 4096 products and sums wrong" if wrong.any() else None, "x * y + x is right")


STANDARDS = ("", "-cl-std=CL3.0", "-cl-std=CL2.0")
"""Sub-group built-ins may be hidden without a later language version."""


def with_standards(attempt: Callable[[str], Verdict]) -> Verdict:
    """The first success over the language versions, else the first failure."""
    failure: Verdict | None = None
    for options in STANDARDS:
        try:
            found = replace(attempt(options), options=options)
        except (PyclquantError, cl.Error) as error:
            found = Verdict(False, describe(error))
        if found.ok:
            return found
        failure = failure or found
    assert failure is not None
    return failure


def subgroup(b: Bench) -> Verdict:
    """The size of a sub-group as measured inside a kernel, and the order of its lanes."""

    def attempt(options: str) -> Verdict:
        size, lane = b.run("subgroup", [], [np.zeros(256, np.uint32)] * 2, {"WG": 64}, tuple(options.split()))
        n = int(size[0])
        in_order = n > 0 and mismatch(lane, (np.arange(256) % n).astype(np.uint32), "lane") is None
        failure = (
            None if in_order and (size == n).all() else f"sizes {sorted(set(size.tolist()))[:4]}, lanes not 0..{n - 1} in order"
        )
        return verdict(failure, f"{n} lanes, measured", value=n)

    return with_standards(attempt)


def subgroup_size(b: Bench) -> Verdict:
    """Whether a kernel may ask for sub-groups of 16."""

    def attempt(options: str) -> Verdict:
        macros: dict[str, str | int] = {"WG": 64, "LANES": 16, "SHUFFLE": 2, "SUBGROUP_SIZE": 16}
        return shuffle_with(b, macros, options, 16)

    return with_standards(attempt)


def shuffle_with(b: Bench, macros: dict[str, str | int], options: str, lanes: int) -> Verdict:
    """Lane shuffles and a reduction over teams of `lanes`."""
    x = np.random.default_rng(9).integers(0, 2**32, 256).astype(np.uint32)
    (y,) = b.run("shuffle", [x], [np.zeros((256, 8), np.uint32)], macros, tuple(options.split()), items=256)
    i = np.arange(256)
    steps = [x[i ^ (1 << s)] if (1 << s) < lanes else np.zeros(256) for s in range(7)]
    want = np.stack([*steps, np.repeat(x.reshape(-1, lanes).max(1), lanes)], axis=1).astype(np.uint32)
    return verdict(mismatch(y, want), f"right values across {lanes} lanes", value=lanes)


def shuffle(number: int) -> Feature:
    """The widest team that one spelling of the lane shuffle serves."""

    def feature(b: Bench) -> Verdict:
        sized: dict[str, str | int] = {"SUBGROUP_SIZE": 16} if b.caps.ok("subgroup_size") else {}
        failure: Verdict | None = None
        for lanes in (16,) if sized else (32, 16, 8):

            def attempt(options: str, lanes: int = lanes) -> Verdict:
                return shuffle_with(b, {"WG": 64, "LANES": lanes, "SHUFFLE": number, **sized}, options, lanes)

            found = with_standards(attempt)
            if found.ok:
                return found
            failure = failure or found
        assert failure is not None
        return failure

    return feature


def dot(number: int) -> Feature:
    """One spelling of the dot product of four signed bytes."""

    def feature(b: Bench) -> Verdict:
        def attempt(options: str) -> Verdict:
            rng = np.random.default_rng(10)
            x, w = rng.integers(-128, 128, (2, 1024, 4)).astype(np.int8)
            start = rng.integers(-1000, 1000, 1024).astype(np.int32)
            (y,) = b.run(
                "dot", [x.view(np.uint32).ravel(), w.view(np.uint32).ravel()], [start], {"DOT": number}, tuple(options.split())
            )
            return verdict(mismatch(y, start + (x.astype(np.int32) * w).sum(1, dtype=np.int32)))

        return with_standards(attempt)

    return feature


def nv_convert(b: Bench) -> Verdict:
    """NVIDIA's conversions, all at once."""
    _, x = every_half()
    x = np.concatenate(
        [x, floats(11, 1 << 16, -126, 127), np.array([464, 465, 448, 61440, 57344, np.inf, -np.inf, np.nan], np.float32)]
    )
    n = x.size // 2
    codes, half_bits = (np.arange(2 * n) % count for count in (256, 65536))
    outputs = [np.zeros((n, 2), t) for t in (np.uint8, np.uint8, np.uint16, np.uint16, np.float32, np.float32, np.float32)]
    e4m3, e5m2, b16, f16, *back = (a.ravel() for a in b.run("nv_convert", [x], outputs, {"CONVERT_NV": 1}, items=n))
    with np.errstate(over="ignore", invalid="ignore"):
        return verdict(
            mismatch(e4m3, reference.encode(x, FORMATS["fp8_e4m3fn"]).view(np.uint8), "e4m3fn")
            or mismatch(e5m2, reference.encode(x, FORMATS["fp8_e5m2"]).view(np.uint8), "e5m2")
            or mismatch(b16.view(ml_dtypes.bfloat16), x.astype(ml_dtypes.bfloat16), "bfloat16")
            or mismatch(f16.view(np.float16), x.astype(np.float16), "float16")
            or mismatch(back[0], reference.decode(codes.astype(np.uint8), FORMATS["fp8_e4m3fn"]), "from e4m3fn")
            or mismatch(back[1], reference.decode(codes.astype(np.uint8), FORMATS["fp8_e5m2"]), "from e5m2")
            or mismatch(back[2], half_bits.astype(np.uint16).view(np.float16).astype(np.float32), "from float16")
        )


def nv_mma(b: Bench) -> Verdict:
    """NVIDIA's conversion of e4m3fn to half, and its matrix multiply of half."""
    e4m3 = ml_dtypes.float8_e4m3fn
    rng = np.random.default_rng(12)
    a, w = (rng.integers(-8, 9, shape).astype(np.float32).astype(e4m3) for shape in ((16, 16), (8, 16)))
    macros: dict[str, str | int] = {"WG": 32, "MMA_NV": 1}
    (y,) = b.run("nv_mma", [a.view(np.uint32), w.view(np.uint32)], [np.zeros((16, 8), np.float32)], macros, items=32)
    return verdict(mismatch(y, a.astype(np.float32) @ w.astype(np.float32).T))


def x86_bf16(b: Bench) -> Verdict:
    """The decoding of e4m3fn and the dot product of bfloat16 of x86, in the first spelling that works: of all codes, NaN too."""
    if not b.caps.is_cpu:
        return Verdict(False, "not a CPU")
    e4m3 = ml_dtypes.float8_e4m3fn
    w = np.arange(256, dtype=np.uint8).view(e4m3)
    x = np.random.default_rng(13).integers(-8, 9, 256).astype(np.float32).astype(e4m3)  # sums of the products are exact
    start = np.arange(64, dtype=np.float32)
    decoded = w.astype(ml_dtypes.bfloat16).reshape(4, 4, 2, 8).transpose(0, 2, 1, 3)  # items, 16 codes, parts
    products = (x.astype(np.float32) * w.astype(np.float32)).reshape(4, 4, 2, 4, 2)
    want = start + products.sum((2, 4)).ravel()

    def attempt(spelling: int) -> Verdict:
        pairs, sums = b.run(
            "x86_bf16",
            [x.view(np.uint32), w.view(np.uint32)],
            [np.zeros(128, np.uint32), start],
            {"VEC": 16, "X86_BF16": spelling},
            items=4,
        )
        wrong = mismatch(pairs.view(ml_dtypes.bfloat16), decoded.ravel(), "decoded") or mismatch(sums, want, "sums")
        return verdict(wrong, ("by inline assembly", "by LLVM's built-in functions")[spelling - 1], value=spelling)

    try:
        return attempt(1)
    except (PyclquantError, cl.Error):
        return attempt(2)


BEYOND_REPORTED = {"NVIDIA": (224 << 10, 160 << 10, 96 << 10)}
"""How a vendor's name begins -> bytes of local memory that its kernels may get beyond what it reports.

NVIDIA reports 48 kB, CUDA's static shared memory; its OpenCL compiler takes what the hardware has: 227 kB of compute capability
9.0, 163 of 8.0, 99 of 8.6 and 8.9 (CUDA C++ Programming Guide, technical specifications per compute capability).
"""


def local_memory(b: Bench) -> Verdict:
    """How much local memory one built kernel takes."""
    reported = int(b.caps.reported.get("local_mem_size") or 16384)
    vendor = str(b.caps.reported.get("vendor"))
    beyond = [s for start, found in BEYOND_REPORTED.items() if vendor.startswith(start) for s in found if s > reported]
    failure = ""
    for size in (*beyond, *(reported >> n for n in range(reported.bit_length() - 10))):
        words = size // 4
        try:
            (y,) = b.run("local", [], [np.zeros(64, np.uint32)], {"WG": 32, "WORDS": words})
            k = np.arange(words, dtype=np.uint64)
            values = ((k * 2654435761) & 0xFFFFFFFF).astype(np.uint32)
            want = np.array([np.bitwise_xor.reduce(values[31 - lid :: 32]) for lid in range(32)] * 2, np.uint32)
            wrong = mismatch(y, want)
            if wrong is None:
                return Verdict(True, f"{size} bytes of {reported} in one kernel", value=size)
            failure = failure or wrong
        except (PyclquantError, cl.Error) as error:
            failure = failure or describe(error)
    return Verdict(False, failure)


def work_group(b: Bench) -> Verdict:
    """How large a work-group with a barrier one built kernel takes."""
    size, failure = int(b.caps.reported.get("max_work_group_size") or 256), ""
    while size >= 1:
        try:
            x = np.ones(size, np.float32)
            (y,) = b.run("base", [x], [np.zeros(size, np.float32)], {"WG": size})
            wrong = mismatch(y, np.full(size, size + 0.5, np.float32))
            if wrong is None:
                return Verdict(True, f"{size} work-items with a barrier", value=size)
            failure = failure or wrong
        except (PyclquantError, cl.Error) as error:
            failure = failure or describe(error)
        size //= 2
    return Verdict(False, failure)


def index64(b: Bench) -> Verdict:
    """Whether indices have 64 bits."""
    offset = 3 << 33
    (y,) = b.run("index64", [np.uint64(offset)], [np.zeros(64, np.uint32)])
    index = (offset + np.arange(64, dtype=np.uint64)) * np.uint64(3)
    return verdict(mismatch(y, (index >> np.uint64(32)).astype(np.uint32) + np.uint32(8)), "indices beyond 2^32")


def kv_known_answer(variant: str) -> Feature:
    """Whether a variant of the K/V kernels equals the reference."""

    def feature(b: Bench) -> Verdict:
        from pyclquant.selftest import known_answers

        return verdict(known_answers(b.queue, b.caps, variant), "equals the reference byte for byte")

    return feature


def x86_look_up(b: Bench) -> Verdict:
    """Whether FP8 codes that a CPU looks up equal the reference."""
    from pyclquant.selftest import cases_past_the_caches, known_answers

    if reason := b.caps.missing("x86_bf16"):
        return Verdict(False, reason)
    asked = replace(b.caps, works={**b.caps.works, "x86_look_up": Verdict(True, "asked")})
    return verdict(known_answers(b.queue, asked, "row", cases_past_the_caches()), "codes of large tensors equal the reference")


def w8a8_known_answer(op: str, variant: str) -> Feature:
    """Whether a variant of the W8A8 quantizers equals the reference, or one of the GEMV is within its bounds."""

    def feature(b: Bench) -> Verdict:
        from pyclquant.selftest import projection_answers

        success = "within its bounds, rows invariant" if op == "gemv" else "equals the reference byte for byte"
        return verdict(projection_answers(b.queue, b.caps, op, variant), success)

    return feature


FEATURES: dict[str, Feature] = {
    "base": base,
    **{f"vector{n}": vector(n) for n in (2, 4, 8, 16)},
    "index64": index64,
    "work_group": work_group,
    "local_memory": local_memory,
    "denormals": denormals,
    "fma": fma,
    "fma_denormals": fma_denormals,
    "fma_speed": fma_speed,
    "divide": division("DIVIDE_NATIVE"),
    "divide_option": division("DIVIDE_NATIVE", "-cl-fp32-correctly-rounded-divide-sqrt"),
    "divide_fma": division("DIVIDE_FMA"),
    "half_load": half_load,
    "half_store": half_store,
    "half_convert": half_convert,
    "half_arithmetic": half_arithmetic,
    "subgroup": subgroup,
    "subgroup_size": subgroup_size,
    "shuffle_khr": shuffle(1),
    "shuffle_intel": shuffle(2),
    "shuffle_nv": shuffle(3),
    "dot_khr": dot(1),
    "dot_nv": dot(2),
    "dot_amd": dot(3),
    "dot_arm": dot(4),
    "nv_convert": nv_convert,
    "nv_mma": nv_mma,
    "x86_bf16": x86_bf16,
    "x86_look_up": x86_look_up,
    **{f"kv_{v}": kv_known_answer(v) for v in ("vector_shuffle", "vector", "row", "base")},
    **{f"act_{v}": w8a8_known_answer("act_quant", v) for v in ("vector", "row", "base")},
    **{f"gemv_{v}": w8a8_known_answer("gemv", v) for v in ("mma", "vector", "row_bf16", "row", "base")},
}
"""Every feature, in the order of probing: later ones may ask `Bench.caps` for earlier verdicts."""


def describe(error: Exception) -> str:
    """The first telling line of an error: a compiler's error line, else the first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = next((line for line in lines if "error:" in line.lower()), lines[0] if lines else type(error).__name__)
    return telling[:200]


def run_child(request: dict[str, Any]) -> None:
    """The child: probe the features of a request one by one, with a line before and after each."""
    icd.prepare()
    device = cl.get_platforms()[request["platform"]].get_devices()[request["device"]]
    if device.name != request["reported"]["name"]:
        raise SystemExit(f"expected device {request['reported']['name']}, found {device.name}")
    works = {name: Verdict.of(row) for name, row in request["works"].items()}
    b = Bench(device, Capabilities(request["reported"], works))
    for name in request["features"]:
        print(f"{MARK}{json.dumps({'start': name})}", flush=True)
        try:
            found = FEATURES[name](b)
        except (PyclquantError, cl.Error) as error:
            found = Verdict(False, describe(error))
        works[name] = found
        print(f"{MARK}{json.dumps({'done': name, 'verdict': found.json()})}", flush=True)


def run(platform: int, device: int, reported: dict[str, Any], seconds: float = FEATURE_SECONDS) -> dict[str, Verdict]:
    """Probe every feature of device number `device` of platform number `platform`, in child processes.

    A feature that takes longer than `seconds`, or whose child dies, does not work. Raises nothing that
    a driver may cause.
    """
    works: dict[str, Verdict] = {}
    todo = list(FEATURES)
    while todo:
        request = {
            "platform": platform,
            "device": device,
            "reported": reported,
            "features": todo,
            "works": {name: v.json() for name, v in works.items()},
        }
        guilty, reason = one_child(request, works, seconds)
        todo = [name for name in FEATURES if name not in works]
        if todo:
            works[guilty or todo[0]] = Verdict(False, reason)
            todo = [name for name in FEATURES if name not in works]
    return works


def one_child(request: dict[str, Any], works: dict[str, Verdict], seconds: float) -> tuple[str | None, str]:
    """Run one child and collect its verdicts in `works`. Returns the feature in progress at its end, and how it ended."""
    child = subprocess.Popen(
        [sys.executable, "-m", "pyclquant.probe"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdin
    assert child.stdout
    assert child.stderr
    lines: queues.Queue[bytes | None] = queues.Queue()
    errors: list[bytes] = []

    def read(stream: Any) -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    threads = [
        threading.Thread(target=read, args=(child.stdout,), daemon=True),
        threading.Thread(target=lambda: errors.append(child.stderr.read() if child.stderr else b""), daemon=True),
    ]
    for thread in threads:
        thread.start()
    current: str | None = None
    timed_out = False
    try:
        child.stdin.write(json.dumps(request).encode())
        child.stdin.close()
    except BrokenPipeError:
        pass
    while True:
        try:
            line = lines.get(timeout=seconds)
        except queues.Empty:
            timed_out = True
            child.kill()
            break
        if line is None:
            break
        text = line.decode(errors="replace")
        if text.startswith(MARK):
            message = json.loads(text[len(MARK) :])
            current = message.get("start")
            if "done" in message:
                works[message["done"]] = Verdict.of(message["verdict"])
    returncode = child.wait()
    for thread in threads:
        thread.join()
    child.stdout.close()
    child.stderr.close()
    if timed_out:
        return current, f"took longer than {seconds:g} s, building or running"
    how = icd.describe_exit(returncode, errors[0] if errors else b"")
    return current, f"the process was {how}" if returncode < 0 else f"the process {how}"


if __name__ == "__main__":
    run_child(json.load(sys.stdin))

"""Every variant of every op that can run on a device, against the reference: byte for byte, sums of products within bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pyopencl as cl
import pyopencl.array as cla

from pyclquant import kv, reference, w8a8
from pyclquant.arrays import on_host
from pyclquant.capabilities import Capabilities
from pyclquant.device import Device
from pyclquant.errors import PyclquantError, UnsupportedDeviceError
from pyclquant.formats import FLOAT_DTYPES, FORMATS, GRANULARITIES
from pyclquant.testing import mismatch, product_mismatch
from pyclquant.variants import ACT, CACHED_BYTES, GEMV, KV, Blocks

Array = np.ndarray[Any, Any]
LIMITS = {"float32": (3.4e38, 2.0**-149), "bfloat16": (3.38e38, 2.0**-133), "float16": (65504.0, 2.0**-24)}
"""About the largest value and the smallest subnormal of each input type."""

GUARD = 64
"""Elements behind each output that must keep their bytes."""


@dataclass(frozen=True)
class Case:
    """One quantize and one dequantize: x [..., head_dim] and how."""

    x: Array
    format: str
    granularity: str
    group_size: int | None = None
    scale_dtype: str = "float32"
    out_dtype: str = "float32"


@dataclass(frozen=True)
class Result:
    """One row of a self-test. format: or scale layout.  ok: all `cases` equal the reference; detail: the first difference, or
    why it was not run.
    """

    op: str
    format: str
    variant: str
    cases: int
    ok: bool
    detail: str


def sample(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Array:
    """Random x of `shape` with every special value the kernels must get right, as far as there are rows.

    Rows of the innermost axis, in turn: normal, all zero, constant, huge, tiny, subnormal, NaN and Inf
    inside, -0.0, one outlier.
    """
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 3, (int(np.prod(shape[:-1], dtype=np.int64)), shape[-1])).astype(np.float32)
    largest, tiny = LIMITS[dtype]
    for row in range(1, x.shape[0], 2):
        kind = row // 2 % 8
        if kind == 0:
            x[row] = 0
        elif kind == 1:
            x[row] = 3.3
        elif kind == 2:
            x[row] *= largest / 64
        elif kind == 3:
            x[row] *= max(1e-30, tiny)
        elif kind == 4:
            x[row] = (rng.integers(-3, 4, x.shape[1]) * tiny).astype(np.float32)
        elif kind == 5:
            x[row, rng.integers(0, x.shape[1], 3)] = [np.nan, np.inf, -np.inf]
        elif kind == 6:
            x[row] = np.where(rng.random(x.shape[1]) < 0.5, -0.0, x[row])
        else:
            x[row, rng.integers(0, x.shape[1])] = 500
    with np.errstate(over="ignore"):
        return x.reshape(shape).astype(FLOAT_DTYPES[dtype])


def quick_cases() -> Iterator[Case]:
    """A few that reach each part of the kernels: what the probe asks of a variant before it is used."""
    yield Case(sample((24, 2, 64), "bfloat16", 1), "fp8_e4m3fn", "per_head", out_dtype="bfloat16")
    yield Case(sample((7, 5, 48), "float32", 2), "int8", "per_tensor")
    yield Case(sample((9, 4, 24), "float16", 3), "int4", "per_group", 16, "float16", "float16")


def all_cases(format: str) -> Iterator[Case]:
    """Every granularity x input type of a format, over odd and round sizes and both scale types."""
    granularities = ("per_group",) if FORMATS[format].asymmetric else GRANULARITIES
    for g, granularity in enumerate(granularities):
        for d, dtype in enumerate(FLOAT_DTYPES):
            for dim in (64, 7 + 33 * d):
                yield Case(
                    sample((9, 2, dim), dtype, dim),
                    format,
                    granularity,
                    (16, 32, 64)[d] if granularity == "per_group" else None,
                    ("float32", "float16")[(g + d) % 2],
                    tuple(FLOAT_DTYPES)[(g + d) % 3],
                )


def guarded(queue: cl.CommandQueue, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[cla.Array, cla.Array]:
    """An array of `shape` on the device and the whole of its storage, GUARD elements longer, filled with 0xA5."""
    size = int(np.prod(shape, dtype=np.int64))
    storage = cla.to_device(queue, np.full((size + GUARD) * dtype.itemsize, 0xA5, np.uint8))
    whole: cla.Array = storage.view(dtype)  # type: ignore[no-untyped-call]
    return whole[:size].reshape(shape), whole


def guard_intact(whole: cla.Array) -> bool:
    """Whether the bytes behind the array are as `guarded` left them."""
    host = whole.get()[-GUARD:]
    return bool((np.ascontiguousarray(host).view(np.uint8) == 0xA5).all())


def check_case(dev: Device, case: Case, variant: str | None) -> str | None:
    """Run one case on the device: None, or the first difference from the reference."""
    fmt = FORMATS[case.format]
    how: dict[str, Any] = {"granularity": case.granularity, "group_size": case.group_size}
    codes, scales, mins = reference.quantize(case.x, fmt, scale_dtype=case.scale_dtype, **how)
    arrays = {"codes": codes, "scales": scales} | ({"mins": mins} if mins is not None else {})
    stores = {name: guarded(dev.queue, a.shape, a.dtype) for name, a in arrays.items()}
    out = kv.Quantized(
        case.format, case.granularity, case.group_size, case.x.shape, **{name: array for name, (array, _) in stores.items()}
    )
    q = kv.quantize(dev, case.x, fmt, scale_dtype=case.scale_dtype, out=out, force=variant, **how)
    for name, want in arrays.items():
        wrong = mismatch(getattr(q, name).get(), want, name)
        if wrong:
            return f"{wrong} ({describe(case)})"
        if not guard_intact(stores[name][1]):
            return f"{name}: bytes behind the array were written ({describe(case)})"
    y, whole = guarded(dev.queue, case.x.shape, FLOAT_DTYPES[case.out_dtype])
    kv.dequantize(dev, q, case.out_dtype, out=y, force=variant)
    want = reference.dequantize(codes, scales, mins, fmt, case.x.shape, dtype=case.out_dtype, **how)
    wrong = mismatch(y.get(), want, "values")
    if wrong is None and not guard_intact(whole):
        wrong = "values: bytes behind the array were written"
    return f"{wrong} ({describe(case)})" if wrong else None


def describe(case: Case) -> str:
    """The case in a few words."""
    group = f" {case.group_size}" if case.group_size else ""
    return f"{case.format} {case.granularity}{group} of {case.x.dtype} {case.x.shape}, {case.scale_dtype} scales"


def cases_past_the_caches() -> Iterator[Case]:
    """Tensors so large that a CPU looks their codes up, where it can: see `variants.plan_kv_row`."""
    x = np.tile(sample((1024, 1, 128), "bfloat16", 4), (CACHED_BYTES // (3 * 128 * 1024) + 1, 1, 1))
    for format in ("fp8_e4m3fn", "fp8_e5m2"):
        yield Case(x, format, "per_head", out_dtype="bfloat16")


def known_answers(queue: cl.CommandQueue, caps: Capabilities, variant: str, cases: Iterable[Case] | None = None) -> str | None:
    """The quick cases of `kv`, or others, with one variant: None, or why it cannot run, or what went wrong first."""
    row = next(v for v in KV if v.name == variant)
    dev = Device(queue, caps)
    for case in cases or quick_cases():
        reason = row.unsupported(caps, Blocks(case.x.shape[-1], case.x.shape[-1], len(case.x), case.x.dtype.itemsize))
        wrong = reason or check_case(dev, case, variant)
        if wrong:
            return wrong
    return None


# ---- W8A8 ----


@dataclass(frozen=True)
class Projection:
    """A product of `rows` rows and weights of `segments` rows each, K columns: quantizers and GEMV alike."""

    rows: int
    segments: tuple[int, ...]
    k: int
    scale_layout: str
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        return f"{self.scale_layout}, {self.rows} rows of {self.dtype}, weights {list(self.segments)} x {self.k}"


def quick_projections() -> Iterator[Projection]:
    """A few that reach each part of the kernels: what the probe asks of a variant before it is used."""
    yield Projection(3, (160,), 384, "per_row", "float32")
    yield Projection(10, (128, 128, 130), 640, "block_128")


def all_projections(scale_layout: str) -> Iterator[Projection]:
    """One for each tile of the GEMV, over odd and round sizes, each type, one to three segments."""
    for i, rows in enumerate((1, 2, 5, 9, 17, 40, 129)):
        segments = ((200,), (128, 72), (256, 128, 17))[i % 3]
        yield Projection(rows, segments, (128, 384, 1152)[i % 3], scale_layout, tuple(FLOAT_DTYPES)[i % 3])


def matrix(rows: int, k: int, dtype: str, seed: int) -> Array:
    """Random [rows, k] with outliers; of `sample`'s special rows the finite ones."""
    x = sample((rows, k), dtype, seed)
    wide = x.astype(np.float32)
    return np.where(np.isfinite(wide) & (np.abs(wide) < 1e30), x, np.ones((), x.dtype)).astype(x.dtype)


def uneven(n: int, k: int, seed: int) -> Array:
    """Random weights [n, k] whose blocks of 128 x 128 differ in size, so that no two scales are alike."""
    factors = np.random.default_rng(seed).uniform(0.01, 0.1, (-(-n // w8a8.CHUNK), k // w8a8.CHUNK)).astype(np.float32)
    whole: Array = matrix(n, k, "float32", seed) * factors.repeat(w8a8.CHUNK, 0)[:n].repeat(w8a8.CHUNK, 1)
    return whole


def check_quantizers(dev: Device, p: Projection, variant: str | None) -> str | None:
    """All quantizers of W8A8 on one case: None, or the first difference from the reference."""
    x, up = (sample((p.rows, p.k), p.dtype, seed) for seed in (5, 6))
    w = sample((p.segments[0], p.k), p.dtype, 7)
    layout: str = p.scale_layout
    how: dict[str, Any] = {"force": variant}
    for name, got, want in (
        ("act_quant", w8a8.act_quant(dev, x, layout, **how), reference.act_quant(x, layout)),
        ("act_quant_silu", w8a8.act_quant_silu(dev, x, up, layout, **how), reference.act_quant_silu(x, up, layout)),
        ("quantize_weight", w8a8.quantize_weight(dev, w, layout, **how), reference.quantize_weight(w, layout)),
    ):
        for part, a, b in zip(("codes", "scales"), got, want, strict=True):
            wrong = mismatch(on_host(a), b, f"{name} {part}")
            if wrong:
                return f"{wrong} ({p})"
    wrong = mismatch(w8a8.silu_mul(dev, x, up, force=variant).get(), reference.silu_mul(x, up), "silu_mul")
    return f"{wrong} ({p})" if wrong else None


def check_gemv(dev: Device, p: Projection, variant: str | None) -> str | None:
    """One product against the exact one, each row alone against the same row among the others, and the columns beyond N."""
    layout = p.scale_layout
    codes, scales = reference.act_quant(matrix(p.rows, p.k, p.dtype, 8), layout)
    segments = [reference.quantize_weight(uneven(n, p.k, 9 + i), layout) for i, n in enumerate(p.segments)]
    exact, magnitude = reference.gemv(codes, scales, segments, layout)
    w = w8a8.Weight(dev, segments)
    acts = w8a8.Activations(cla.to_device(dev.queue, codes), cla.to_device(dev.queue, scales))
    sentinel = np.full((p.rows, w.n + GUARD), 0.0, FLOAT_DTYPES[p.dtype])
    sentinel.view(np.uint8)[:] = 0xA5
    whole = cla.to_device(dev.queue, sentinel)
    w8a8.gemv(dev, acts, w, p.dtype, out=whole[:, : w.n], force=variant)
    got = whole.get()
    with np.errstate(over="ignore"):
        wrong = product_mismatch(got[:, : w.n], exact, magnitude, p.k)
    if wrong is None and not (got[:, w.n :].view(np.uint8) == 0xA5).all():
        wrong = "columns beyond N were written"
    for row in range(0, p.rows, max(1, p.rows // 3)):
        if wrong is None:
            one = w8a8.Activations(acts.codes[row : row + 1], acts.scales[row : row + 1])
            alone = w8a8.gemv(dev, one, w, p.dtype, force=variant).get()
            wrong = mismatch(alone[0], got[row, : w.n], f"row {row} alone")
    return f"{wrong} ({p})" if wrong else None


def projection_answers(queue: cl.CommandQueue, caps: Capabilities, op: str, variant: str) -> str | None:
    """The quick projections with one variant of act_quant or gemv: None, or why it cannot run, or what went wrong first."""
    dev = Device(queue, caps)
    check = CHECKS[op]
    for p in quick_projections():
        try:
            wrong = check(dev, p, variant)
        except UnsupportedDeviceError as error:
            return str(error)
        if wrong:
            return wrong
    return None


CHECKS: dict[str, Callable[[Device, Projection, str | None], str | None]] = {"act_quant": check_quantizers, "gemv": check_gemv}


# ---- the whole run ----


def steps() -> Iterator[tuple[str, str, str]]:
    """Operation, format or scale layout, and variant of every result of a run."""
    yield from (("kv", name, v.name) for v, name in product(KV, FORMATS))
    yield from (("act_quant", layout, v.name) for v, layout in product(ACT, w8a8.SCALE_LAYOUTS))
    yield from (("gemv", layout, v.name) for v, layout in product(GEMV, w8a8.SCALE_LAYOUTS))


def run(dev: Device, progress: Callable[[str], None] = lambda _: None) -> list[Result]:
    """All cases of every variant that the device can run. progress: called with the name of each step.

    A case whose shape a variant does not take does not count; a variant that takes none has the reason as detail.
    """
    results = []
    for op, what, variant in steps():
        progress(f"{op} {what} {variant}")
        results.append(run_one(dev, op, what, variant))
    return results


def run_one(dev: Device, op: str, what: str, variant: str) -> Result:
    """All cases of one format or scale layout with one variant."""
    count, refused = 0, ""
    checks: list[Callable[[], str | None]]
    if op == "kv":
        checks = [partial(check_case, dev, case, variant) for case in all_cases(what)]
    else:
        checks = [partial(CHECKS[op], dev, p, variant) for p in all_projections(what)]
    for check in checks:
        try:
            wrong = check()
        except UnsupportedDeviceError as error:
            refused = refused or str(error)
            continue
        except (PyclquantError, cl.Error) as error:
            wrong = str(error)
        count += 1
        if wrong:
            return Result(op, what, variant, count, False, wrong)
    return Result(op, what, variant, count, True, "" if count else f"not run: {refused}")

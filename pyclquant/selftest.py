"""Every variant of every op that can run on a device, against the reference, byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyopencl as cl
import pyopencl.array as cla

from pyclquant import kv, reference
from pyclquant.capabilities import Capabilities
from pyclquant.device import Device
from pyclquant.errors import PyclquantError, UnsupportedDeviceError
from pyclquant.formats import FLOAT_DTYPES, FORMATS, GRANULARITIES
from pyclquant.testing import mismatch
from pyclquant.variants import KV, Blocks

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
    """One row of a self-test. ok: all `cases` equal the reference; detail: the first difference, or why it was not run."""

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


def known_answers(queue: cl.CommandQueue, caps: Capabilities, variant: str) -> str | None:
    """The quick cases with one variant: None, or why it cannot run, or what went wrong first."""
    row = next(v for v in KV if v.name == variant)
    dev = Device(queue, caps)
    for case in quick_cases():
        reason = row.unsupported(caps, Blocks(case.x.shape[-1], case.x.shape[-1], len(case.x), case.x.dtype.itemsize))
        wrong = reason or check_case(dev, case, variant)
        if wrong:
            return wrong
    return None


def run(dev: Device, progress: Callable[[str], None] = lambda _: None) -> list[Result]:
    """All cases of every variant that the device can run. progress: called with the name of each step.

    A case whose shape a variant does not take does not count; a variant that takes none has the reason as detail.
    """
    results = []
    for variant in KV:
        for name in FORMATS:
            progress(f"kv {name} {variant.name}")
            results.append(run_one(dev, name, variant.name))
    return results


def run_one(dev: Device, format: str, variant: str) -> Result:
    """All cases of one format with one variant."""
    count, refused = 0, ""
    for case in all_cases(format):
        try:
            wrong = check_case(dev, case, variant)
        except UnsupportedDeviceError as error:
            refused = refused or str(error)
            continue
        except (PyclquantError, cl.Error) as error:
            wrong = str(error)
        count += 1
        if wrong:
            return Result("kv", format, variant, count, False, wrong)
    return Result("kv", format, variant, count, True, "" if count else f"not run: {refused}")

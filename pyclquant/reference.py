"""Every operation in NumPy: the specification, slow and plain.

Each kernel variant on each driver is compared with this file byte for byte. The rules and their
reasons: formats store `code`, and a value decodes as `code * scale` (int4: `+ min`); `scale` is
always the multiplier used to decode. All arithmetic is float32, every operation rounded to nearest
even. Source: OCP 8-bit Floating Point Specification 1.0; the kernels of the two seeds, mended.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pyclquant.formats import (
    EPS,
    FLOAT_DTYPES,
    Format,
    Layout,
    check_eps,
    float_dtype,
    get_format,
)

Array = np.ndarray[Any, Any]
F32 = np.float32
SMALLEST_NORMAL = F32(2.0**-126)
LARGEST_FLOAT = np.finfo(np.float32).max


def widen(x: Array) -> Array:
    """X as float32, exactly; a float32 or bfloat16 subnormal becomes a zero of its sign.

    Some devices flush such values and some do not: the result must not depend on it.
    """
    v = np.asarray(x).astype(F32)
    flushed: Array = np.where(np.abs(v) < SMALLEST_NORMAL, np.copysign(F32(0), v), v)
    return flushed


def encode(v: Array, fmt: Format) -> Array:
    """Codes of float32 values that are already divided by their scale; int4 is not packed yet.

    To nearest even straight from float32. FP8 saturates, also from Inf; NaN gives 0x7f.
    int8 and int4 clamp; NaN gives 0.
    """
    v = np.asarray(v, dtype=F32)
    nan = np.isnan(v)
    if fmt.name.startswith("fp8"):
        clamped = np.clip(np.where(nan, F32(0), v), -fmt.largest, fmt.largest).astype(F32)
        codes = clamped.astype(fmt.codes_dtype).view(np.uint8)
        return np.asarray(np.where(nan, np.uint8(0x7F), codes).view(fmt.codes_dtype))
    least = 0.0 if fmt.asymmetric else -fmt.largest
    whole = np.rint(np.clip(np.where(nan, F32(0), v), least, fmt.largest))
    return np.asarray(whole.astype(fmt.codes_dtype))


def decode(codes: Array, fmt: Format) -> Array:
    """Float32 values of codes (int4: not packed), exactly, before the scale."""
    values: Array = np.asarray(codes).view(fmt.codes_dtype).astype(F32)
    return values


def pack(codes: Array, fmt: Format) -> Array:
    """int4 codes [..., dim] to bytes [..., ceil(dim / 2)], even index in the low nibble, spare nibble 0."""
    if fmt.pack == 1:
        return codes
    padded = np.concatenate([codes, np.zeros((*codes.shape[:-1], codes.shape[-1] % 2), np.uint8)], axis=-1)
    return np.asarray(padded[..., 0::2] | (padded[..., 1::2] << np.uint8(4)))


def unpack(packed: Array, dim: int, fmt: Format) -> Array:
    """The inverse of `pack`: [..., dim]."""
    if fmt.pack == 1:
        return packed
    both = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)
    return both.reshape(*packed.shape[:-1], -1)[..., :dim]


def block_parameters(x: Array, fmt: Format, scale_dtype: str = "float32", eps: float = EPS) -> tuple[Array, Array]:
    """Scales [...] and mins [...] as float32, of blocks x [..., block] of float32.

    Symmetric: scale = max(max|x| / largest, eps), min 0.  int4: scale = (hi - lo) / 15, min = lo.
    Extremes are taken over the finite elements; without any they are 0.  What float16 would store
    is returned, so that codes are made with what decodes them.
    """
    finite = np.isfinite(x)
    if fmt.asymmetric:
        lo = np.min(x, axis=-1, where=finite, initial=np.inf)
        hi = np.max(x, axis=-1, where=finite, initial=-np.inf)
        lo, hi = (np.where(np.isfinite(lo), v, F32(0)) for v in (lo, hi))
        span = np.minimum(hi - lo, LARGEST_FLOAT)
        scale = np.where(span < F32(2.0**-100), F32(0), span / F32(15))
        lo = lo + F32(0)  # -0.0 becomes 0.0: which of the two min() returns depends on the order
    else:
        amax = np.max(np.abs(x), axis=-1, where=finite, initial=F32(0))
        scale = np.maximum(amax / F32(fmt.largest), F32(eps))
        lo = np.zeros_like(scale)
    if scale_dtype == "float16":
        rounded = np.clip(scale, F32(2.0**-14), F32(65504)).astype(np.float16).astype(F32)
        scale = np.where(scale == 0, scale, rounded)
        lo = np.clip(lo, F32(-65504), F32(65504)).astype(np.float16).astype(F32)
    return scale, lo


def quantize(
    x: Array,
    format: str | Format,
    *,
    granularity: str | None = None,
    group_size: int | None = None,
    scale_dtype: str = "float32",
    eps: float = EPS,
) -> tuple[Array, Array, Array | None]:
    """Quantize x [..., head_dim] (float32, float16 or bfloat16), block by block.

    Returns codes [..., head_dim] (int4: [..., ceil(head_dim / 2)] bytes), scales and, for int4,
    mins, shaped as `Layout.of` says. Raises DTypeError and ShapeError as `pyclquant.kv.quantize`.
    """
    fmt = get_format(format)
    float_dtype(x.dtype, "x")
    stored = FLOAT_DTYPES[float_dtype(scale_dtype, "scale_dtype", ("float32", "float16"))]
    check_eps(eps)
    layout = Layout.of(x.shape, fmt, granularity, group_size)
    if x.size == 0:  # scales that exist all the same are those of no element
        scales, mins = block_parameters(np.zeros((*layout.scales_shape, 0), F32), fmt, scale_dtype, eps)
        return (
            np.zeros(layout.codes_shape, fmt.codes_dtype),
            scales.astype(stored),
            mins.astype(stored) if fmt.asymmetric else None,
        )
    padding = layout.blocks_per_row * layout.block - layout.dim  # NaN: no extreme, and cut off again
    rows = np.pad(widen(x).reshape(layout.rows, layout.dim), ((0, 0), (0, padding)), constant_values=np.nan)
    blocks = rows.reshape(layout.rows, layout.blocks_per_row, layout.block)
    with np.errstate(over="ignore", invalid="ignore", under="ignore", divide="ignore"):
        scales, mins = block_parameters(blocks, fmt, scale_dtype, eps)
        codes = encode((blocks - mins[..., None]) / scales[..., None], fmt)
        if fmt.asymmetric:
            codes = np.where(scales[..., None] == 0, np.uint8(0), codes)
    codes = codes.reshape(layout.rows, layout.dim + padding)[:, : layout.dim].reshape(x.shape)
    scales, mins = (a.astype(stored).reshape(layout.scales_shape) for a in (scales, mins))
    return pack(codes, fmt), scales, mins if fmt.asymmetric else None


def dequantize(
    codes: Array,
    scales: Array,
    mins: Array | None,
    format: str | Format,
    shape: tuple[int, ...],
    *,
    granularity: str | None = None,
    group_size: int | None = None,
    dtype: str = "float32",
) -> Array:
    """Values [*shape] of what `quantize` returned, in `dtype`: code * scale (int4: + min), each step
    rounded to float32, then rounded once to `dtype`.
    """
    fmt = get_format(format)
    layout = Layout.of(shape, fmt, granularity, group_size)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        values = decode(unpack(codes, shape[-1], fmt), fmt).reshape(layout.rows, layout.dim)
        block = np.arange(layout.dim) // max(layout.block, 1)
        values = values * scales.astype(F32).reshape(layout.rows, layout.blocks_per_row)[:, block]
        if mins is not None:
            values = values + mins.astype(F32).reshape(layout.rows, layout.blocks_per_row)[:, block]
        return values.reshape(shape).astype(FLOAT_DTYPES[float_dtype(dtype)])


def float8_values(fmt: Format) -> Array:
    """The 256 values of an FP8 format by its own definition (sign, exponent, mantissa), without ml_dtypes."""
    ebits, mbits = (4, 3) if fmt.name == "fp8_e4m3fn" else (5, 2)
    bias = 2 ** (ebits - 1) - 1
    code = np.arange(256)
    sign = np.where(code & 0x80, -1.0, 1.0)
    exponent = (code >> mbits) & (2**ebits - 1)
    mantissa = code & (2**mbits - 1)
    value = np.where(
        exponent == 0,
        mantissa * 2.0 ** (1 - bias - mbits),
        (2**mbits + mantissa) * 2.0 ** (exponent.astype(float) - bias - mbits),
    )
    if fmt.name == "fp8_e4m3fn":
        value = np.where((code & 0x7F) == 0x7F, np.nan, value)
    else:
        value = np.where(exponent == 31, np.where(mantissa == 0, np.inf, np.nan), value)
    return (sign * value).astype(F32)

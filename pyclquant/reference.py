"""Every operation in NumPy: the specification, slow and plain.

Each kernel variant on each driver is compared with this file byte for byte. The rules and their
reasons: formats store `code`, and a value decodes as `code * scale` (int4: `+ min`); `scale` is
always the multiplier used to decode. All arithmetic is float32, every operation rounded to nearest
even. Source: OCP 8-bit Floating Point Specification 1.0; the kernels of the two seeds, mended.
"""

from __future__ import annotations

from collections.abc import Sequence
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


# ---- W8A8 ----

E4M3 = get_format("fp8_e4m3fn")
CHUNK = 128
"""Columns that share a scale in the layout block_128."""


def quantize_tiles(x: Array, tile_rows: int, tile_columns: int, eps: float = EPS) -> tuple[Array, Array]:
    """e4m3fn codes [M, K] and float32 scales [ceil(M / tile_rows), K / tile_columns] of x [M, K], one scale a tile."""
    rows, k = x.shape
    tall, wide = -(-rows // tile_rows), k // tile_columns
    padded = np.pad(widen(x), ((0, tall * tile_rows - rows), (0, 0)), constant_values=np.nan)  # NaN: no extreme
    tiles = padded.reshape(tall, tile_rows, wide, tile_columns).swapaxes(1, 2)
    with np.errstate(over="ignore", invalid="ignore", under="ignore", divide="ignore"):
        scales, _ = block_parameters(tiles.reshape(tall, wide, -1), E4M3, eps=eps)
        codes = encode(tiles / scales[..., None, None], E4M3)
    return codes.swapaxes(1, 2).reshape(tall * tile_rows, k)[:rows], scales


def act_quant(x: Array, scale_layout: str, eps: float = EPS) -> tuple[Array, Array]:
    """Activations x [M, K] to codes [M, K] and scales: per_row [M], block_128 [M, K / 128]."""
    codes, scales = quantize_tiles(x, 1, x.shape[1] if scale_layout == "per_row" else CHUNK, eps)
    return codes, scales[:, 0] if scale_layout == "per_row" else scales


def quantize_weight(w: Array, scale_layout: str, eps: float = EPS) -> tuple[Array, Array]:
    """Weights w [N, K] to codes [N, K] and scales: per_row [N], block_128 [ceil(N / 128), K / 128]."""
    if scale_layout == "per_row":
        return act_quant(w, scale_layout, eps)
    return quantize_tiles(w, CHUNK, CHUNK, eps)


def flush(v: Array) -> Array:
    """Float32 v with subnormals as zeros of their sign."""
    return widen(np.asarray(v, F32))


def exponential(x: Array) -> Array:
    """exp(x) for float32 -30 <= x <= 88, within 1.02 ulp, every step rounded to float32."""
    n = (x * F32(1.4426950216293335) + F32(12582912)) - F32(12582912)
    r = (x - n * F32(0.693115234375)) - n * F32(float.fromhex("0x1.0bfbe8p-15"))
    y = r * (F32(1) / F32(5040)) + F32(1) / F32(720)
    for c in (F32(1) / F32(120), F32(1) / F32(24), F32(1) / F32(6), F32(0.5)):
        y = y * r + c
    y = y * (r * r) + r
    bits = (y + F32(1)).view(np.int32) + (n.astype(np.int32) << 23)
    return np.asarray(bits.view(F32))


def sigmoid(g: Array) -> Array:
    """1 / (1 + exp(-g)) of float32 g, 0 where that is subnormal; a NaN gives 1, which a product with g mends."""
    x = np.where(-g > F32(-30), -g, F32(-30))
    e = exponential(np.where(x < F32(88), x, F32(88)))
    return np.asarray(np.where(e < F32(2.0**126), F32(1) / (F32(1) + e), F32(0)))


def silu_mul(gate: Array, up: Array) -> Array:
    """(g * sigmoid(g)) * u [M, K] as bfloat16, every step in float32, subnormals as zeros."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        g, u = widen(gate), widen(up)
        return flush(flush(g * sigmoid(g)) * u).astype(FLOAT_DTYPES["bfloat16"])


def act_quant_silu(gate: Array, up: Array, scale_layout: str, eps: float = EPS) -> tuple[Array, Array]:
    """`act_quant` of `silu_mul(gate, up)`."""
    return act_quant(silu_mul(gate, up), scale_layout, eps)


def gemv(codes: Array, scales: Array, segments: Sequence[tuple[Array, Array]], scale_layout: str) -> tuple[Array, Array]:
    """C [M, N] of activations and stacked weights exactly, in float64, and the sum of the magnitudes of its terms [M, N].

    codes [M, K], scales: as `act_quant` returns them.  segments: codes [n, K] and scales of each, as of `quantize_weight`.
    A code is a multiple of 2^-9 below 2^9, so that the sum S of K <= 2^17 products is exact in float64 in any order.  Only the
    product of the two scales is rounded, to float32: the kernels form it first.
    """
    a = codes.astype(np.float64)
    columns, magnitudes = [], []
    for w_codes, w_scales in segments:
        w = w_codes.astype(np.float64)
        if scale_layout == "per_row":
            factor = (w_scales[None, :] * scales[:, None]).astype(np.float64)
            columns.append((a @ w.T) * factor)
            magnitudes.append((np.abs(a) @ np.abs(w.T)) * factor)
            continue
        exact, magnitude = (np.zeros((len(a), len(w))) for _ in range(2))
        for c in range(a.shape[1] // CHUNK):
            part = slice(c * CHUNK, (c + 1) * CHUNK)
            factor = (np.repeat(w_scales[:, c], CHUNK)[None, : len(w)] * scales[:, c, None]).astype(np.float64)
            exact += (a[:, part] @ w[:, part].T) * factor
            magnitude += (np.abs(a[:, part]) @ np.abs(w[:, part].T)) * factor
        columns.append(exact)
        magnitudes.append(magnitude)
    return np.concatenate(columns, axis=1), np.concatenate(magnitudes, axis=1)

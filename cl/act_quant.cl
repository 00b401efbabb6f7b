/* act_quant.cl - quantize activations, and weights, to FP8 E4M3FN for the W8A8 GEMV.

1. Computes
   A matrix is cut into tiles that share a scale, over the finite elements of the tile:
       scale = max(max|x| / 448, eps)     code = encode(x / scale)
   both divisions correctly rounded.  Activations: a tile is a row, or 128 columns of a row.  Weights: a
   row, or 128 x 128.  With SILU 1 the elements are those of
       h = (g * sigmoid(g)) * u     sigmoid(g) = 1 / (1 + exp(-g))
   in float32, rounded to bfloat16; act_quant_silu_mul writes them out.  The exponential is our own: h has the
   same bits on every device.  An element below 2^-126 counts as a zero of its sign, here and in h.

2. Layouts   (row-major, offsets counted in elements of the array they belong to)
   x       [rows, dim] row pitch ldx   F32, BF16 or F16; g with SILU
   up      [rows, dim] row pitch ldx   SILU only, u
   codes   [rows, dim]                 one byte each, packed
   scales  [ceil(rows / tile_rows), dim / tile_columns]  F32
   h       [rows, dim]                 bits of bfloat16, packed; act_quant_silu_mul
   VEC divides tile_columns, and tile_columns divides dim.

3. Launch
   local size WG, global size WG * ceil(ceil(tiles / tiles_per_team) / (WG / LANES)).
   tiles = elements of scales; tiles_per_team, from 1, is how many a team takes one after the other.
   act_quant_silu_mul is launched alike.  Local memory: WG uint2, nothing when LANES is 1.

4. Macros
   SILU  0 (default) | 1
   CHUNKS  n: tile_rows == 1 and tile_columns <= LANES * VEC * n, each lane keeps its n vectors in registers, so that none is
           loaded and no h computed twice; 0 (default): any tile
   X_TYPE WG VEC LANES ALIGNED DIVIDE HALF CONVERT_NV SHUFFLE  see common.h, vendor.h

5. Needs
   OpenCL C 1.2 full profile.

6. Reference
   pyclquant/reference.py: act_quant(), act_quant_silu(), quantize_weight(), silu_mul().
*/
#define FORMAT FP8_E4M3FN
#define SCALE_TYPE F32
#include "common.h"
#include "format.h"

#define TEAM_T uint2
#include "team.h"

#ifndef SILU
#define SILU 0
#endif
#ifndef CHUNKS
#define CHUNKS 0
#endif

/* ---- elements ---- */

/* A float32 subnormal as a zero of its sign: some devices flush it and some do not. */
static vfloat flush(vfloat v)
{
    const vuint bits = as_v(uint)(v);
    return as_v(float)((bits & 0x7f800000u) == 0u ? bits & 0x80000000u : bits);
}

#if SILU
/* exp(x) for -30 <= x <= 88, within 1.02 ulp: x = n ln 2 + r, a Taylor polynomial of r, and n into the exponent. */
static vfloat exponential(vfloat x)
{
    const vfloat shifted = x * 0x1.715476p+0f + 0x1.8p23f; /* n in the low bits */
    const vfloat n = shifted - 0x1.8p23f;
    const vfloat r = (x - n * 0x1.62ep-1f) - n * 0x1.0bfbe8p-15f; /* ln 2 in two parts, the first exact in n */
    vfloat y = r * (1.0f / 5040.0f) + 1.0f / 720.0f;
    y = y * r + 1.0f / 120.0f;
    y = y * r + 1.0f / 24.0f;
    y = y * r + 1.0f / 6.0f;
    y = y * r + 0.5f;
    y = y * (r * r) + r;
    return as_v(float)(as_v(uint)(y + 1.0f) + (as_v(uint)(shifted) << 23));
}

/* 1 / (1 + exp(-g)), or 0 where that is subnormal.  Below -30 the exponential adds nothing to 1. */
static vfloat sigmoid(vfloat g)
{
    vfloat x = -g > (vfloat)(-30.0f) ? -g : (vfloat)(-30.0f);
    x = x < (vfloat)(88.0f) ? x : (vfloat)(88.0f);
    const vfloat e = exponential(x);
    return e < (vfloat)(0x1p126f) ? reciprocal(1.0f + e) : (vfloat)(0.0f);
}

/* The bits of h, bfloat16. */
static vushort silu_mul(vfloat g, vfloat u)
{
#if CONVERT_NV && VEC >= 2 && X_TYPE != F32 /* no product rounds up to 2^-126 from below: see tests/test_reference.py */
    return float_to_bfloat16(CAT(nv_multiply_flushed_, VEC)(CAT(nv_multiply_flushed_, VEC)(g, sigmoid(g)), u));
#else
    return float_to_bfloat16(flush(flush(g * sigmoid(g)) * flush(u)));
#endif
}
#endif

/* VEC elements to quantize, from element i on. */
static vfloat elements(__global const x_t *x, __global const x_t *up, size_t i)
{
    const vfloat v = widen(load_x(x + i, VEC));
#if SILU
    return as_v(float)(convert_v(uint)(silu_mul(v, widen(load_x(up + i, VEC)))) << 16);
#else
    return v;
#endif
}

/* ---- tiles ---- */

/* Tile number `number`: where it begins in x, in codes, and how many rows it has. */
typedef struct { size_t x, codes; uint rows; } tile_t;

static tile_t tile_span(size_t number, ulong rows, ulong dim, ulong ldx, uint tile_rows, uint tile_columns)
{
    const size_t per_row = dim / tile_columns;
    const size_t row = number / per_row * tile_rows;
    const size_t column = number % per_row * tile_columns;
    tile_t t;
    t.x = row * (size_t)ldx + column;
    t.codes = row * (size_t)dim + column;
    t.rows = (uint)min((size_t)tile_rows, (size_t)rows - row);
    return t;
}

/* x: bits of the largest finite magnitude; y: of the largest one, NaN and Inf included. */
static uint2 magnitudes(vuint finite, vuint all)
{
    uint2 m = (uint2)(0u);
#if VEC == 1
    m = (uint2)(finite, all);
#else
#pragma unroll
    for (uint i = 0; i < VEC; i++)
        m = max(m, (uint2)(((const uint *)&finite)[i], ((const uint *)&all)[i]));
#endif
    return m;
}

/* Takes the magnitudes of v into the largest ones, of the finite elements and of all. */
static void extend(vfloat v, vuint *finite, vuint *all)
{
    const vuint m = as_v(uint)(v) & 0x7fffffffu;
    *all = max(*all, m);
    *finite = max(*finite, m < 0x7f800000u ? m : (vuint)(0u));
}

static vuchar quotient_code(vfloat v, divisor_t d, bool plain)
{
    return plain ? encode(divide(v, d, true), true) : encode(divide(v, d, false), false);
}

__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void act_quant(__global const x_t *restrict x, ulong x_offset,
#if SILU
               __global const x_t *restrict up, ulong up_offset,
#endif
               __global uchar *restrict codes, ulong codes_offset, __global float *restrict scales, ulong scales_offset,
               ulong tiles, ulong rows, ulong dim, ulong ldx, uint tile_rows, uint tile_columns, uint tiles_per_team, float eps)
{
    __local TEAM_T scratch[TEAM_SLOTS];
    const uint lane = (uint)get_local_id(0) % LANES;
    const size_t first_tile = get_global_id(0) / LANES * tiles_per_team;
    x += x_offset;
#if SILU
    up += up_offset;
#else
    __global const x_t *up = x;
#endif
    codes += codes_offset;
    scales += scales_offset;
    for (uint i = 0; i < tiles_per_team; i++) {
        const size_t number = first_tile + i;
        const bool active = number < tiles;
        const tile_t t = tile_span(active ? number : 0, rows, dim, ldx, tile_rows, tile_columns);
#if !CHUNKS
        const uint tile_height = active ? t.rows : 0;
#endif
        vuint finite = (vuint)(0u), all = (vuint)(0u);
#if CHUNKS
        vfloat held[CHUNKS];
#pragma unroll
        for (uint c = 0; c < CHUNKS; c++) {
            const uint k = (c * LANES + lane) * VEC;
            held[c] = active && k < tile_columns ? elements(x, up, t.x + k) : (vfloat)(0.0f);
            extend(held[c], &finite, &all);
        }
#else
        for (uint row = 0; row < tile_height; row++)
            for (uint k = lane * VEC; k < tile_columns; k += LANES * VEC)
                extend(elements(x, up, t.x + row * (size_t)ldx + k), &finite, &all);
#endif
        const uint2 largest = team_max(magnitudes(finite, all), scratch);
        const float scale = max(divide_one(as_float(largest.x), divisor(LARGEST)), eps);
        const divisor_t d = divisor(scale);
        const bool plain = largest.y < 0x7f800000u && is_plain(scale);

#if CHUNKS
#pragma unroll
        for (uint c = 0; c < CHUNKS; c++) {
            const uint k = (c * LANES + lane) * VEC;
            if (active && k < tile_columns)
                store_bytes(codes + t.codes + k, quotient_code(held[c], d, plain));
        }
#else
        for (uint row = 0; row < tile_height; row++)
            for (uint k = lane * VEC; k < tile_columns; k += LANES * VEC)
                store_bytes(codes + t.codes + row * (size_t)dim + k,
                            quotient_code(elements(x, up, t.x + row * (size_t)ldx + k), d, plain));
#endif
        if (active && lane == 0)
            scales[number] = scale;
    }
}

#if SILU
typedef struct __attribute__((packed)) { vushort v; } packed_h_t;

__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void act_quant_silu_mul(__global const x_t *restrict x, ulong x_offset, __global const x_t *restrict up, ulong up_offset,
                        __global ushort *restrict h, ulong h_offset,
                        ulong tiles, ulong rows, ulong dim, ulong ldx, uint tile_rows, uint tile_columns, uint tiles_per_team)
{
    const uint lane = (uint)get_local_id(0) % LANES;
    const size_t first_tile = get_global_id(0) / LANES * tiles_per_team;
    const size_t end = min((size_t)tiles, first_tile + tiles_per_team);
    for (size_t number = first_tile; number < end; number++) {
        const tile_t t = tile_span(number, rows, dim, ldx, tile_rows, tile_columns);
        for (uint row = 0; row < t.rows; row++)
            for (uint k = lane * VEC; k < tile_columns; k += LANES * VEC) {
                const size_t i = t.x + row * (size_t)ldx + k;
                const vushort bits = silu_mul(widen(load_x(x + x_offset + i, VEC)), widen(load_x(up + up_offset + i, VEC)));
                ((__global packed_h_t *)(h + h_offset + t.codes + row * (size_t)dim + k))->v = bits;
            }
    }
}
#endif

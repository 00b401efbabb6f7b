/* kv_dequantize.cl - the values of quantized K/V codes.

1. Computes
   y = float32(code) * scale, one float32 rounding (INT4: then + min, one more; no FMA), then one
   rounding to the output type.

2. Layouts   as kv_quantize.cl; the output takes the place of x
   codes, scales, mins   read
   y       [rows, dim]   F32, BF16 or F16 (X_TYPE)

3. Launch   as kv_quantize.cl, without local memory.

4. Macros
   FORMAT  FP8_E4M3FN | FP8_E5M2 | INT8 | INT4
   SCALE_TYPE  F32 | F16
   PER_TENSOR  0 (default) | 1: the one scale serves all blocks
   CHUNKS  n: block == LANES * VEC * n and blocks_per_row == 1; 0 (default): any block
   PAIRS STREAM  see common.h; taken for BF16
   X_TYPE WG VEC LANES ALIGNED HALF CONVERT_NV  see common.h, vendor.h

5. Needs
   OpenCL C 1.2 full profile.  HALF and CONVERT_NV: what the probe calls by these names.

6. Reference
   pyclquant/reference.py: dequantize().
*/
#include "common.h"
#include "format.h"

#ifndef PER_TENSOR
#define PER_TENSOR 0
#endif
#ifndef CHUNKS
#define CHUNKS 0
#endif

/* low: the block's min, unused without one */
static vfloat restore(vuchar codes, float scale, float low)
{
    const vfloat v = decode(codes) * scale;
#if ASYMMETRIC
    return v + low;
#else
    return v;
#endif
}

#if WALKS_PAIRS && ASYMMETRIC
/* The bits of v, rounded to bfloat16, in the upper half; not for NaN. */
static vuint rounded(vfloat v) { return as_v(uint)(v) + (0x7fffu + (as_v(uint)(v) >> 16 & 1u)); }

/* The values of a block.  An element with an odd index is 16 times itself where it stands. */
static void restore_pairs(__global x_t *y, __global const uchar *codes, float scale, float low)
{
#pragma unroll
    for (uint k = 0; k < PAIRS * VEC; k += 2 * VEC) {
        const vint bytes = convert_v(int)(((__global const packed_vuchar *)(codes + k / 2))->v);
        const vfloat even = convert_v(float)(bytes & 15) * scale + low;
        const vfloat odd = convert_v(float)(bytes & 240) * (scale * 0.0625f) + low;
        store_pairs(y + k, (rounded(even) >> 16) | (rounded(odd) & 0xffff0000u), vuint);
    }
}

/* Whether restore_pairs() is right. */
static bool is_plain_block(__global const uchar *codes, float scale, float low)
{
    return (scale == 0.0f || scale >= 0x1p-100f) && scale < INFINITY && fabs(low) < INFINITY;
}
#elif WALKS_PAIRS
static void restore_pairs(__global x_t *y, __global const uchar *codes, float scale, float low)
{
#pragma unroll
    for (uint k = 0; k < PAIRS * VEC; k += VEC)
        store_pairs(y + k, decode_pairs(load_codes(codes + k), scale), vx);
}

static bool is_plain_block(__global const uchar *codes, float scale, float low)
{
    return scale > 0x1p-60f && scale < PAIR_SCALE && !has_special(codes, PAIRS * VEC);
}
#endif

__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void kv_dequantize(__global x_t *restrict y, ulong y_offset, __global const uchar *restrict codes, ulong codes_offset,
                   __global const scale_t *restrict scales, ulong scales_offset,
#if ASYMMETRIC
                   __global const scale_t *restrict mins, ulong mins_offset,
#endif
                   ulong blocks, ulong dim, uint block, uint blocks_per_row, uint blocks_per_team)
{
    const uint lane = (uint)get_local_id(0) % LANES;
    const size_t team = get_global_id(0) / LANES;
    const size_t end = min((size_t)blocks, (team + 1) * blocks_per_team);
    y += y_offset;
    codes += codes_offset;
    for (size_t b = team * blocks_per_team; b < end; b++) {
        const size_t stored = PER_TENSOR ? 0 : b;
        const float scale = load_scale(scales + scales_offset + stored);
#if ASYMMETRIC
        const float low = load_scale(mins + mins_offset + stored);
#else
        const float low = 0.0f;
#endif
#if WALKS_PAIRS
        __global x_t *to = y + b * (PAIRS * VEC);
        __global const uchar *from = codes + b * (PAIRS * VEC / PACK);
        if (is_plain_block(from, scale, low))
            restore_pairs(to, from, scale, low);
        else
            for (uint k = 0; k < PAIRS * VEC; k += VEC)
                store_x(to + k, restore(load_codes(from + k / PACK), scale, low), VEC);
#elif CHUNKS
        const size_t start = b * block + lane * VEC;
        vuchar held[CHUNKS]; /* all loads are on their way before the first use */
#pragma unroll
        for (uint c = 0; c < CHUNKS; c++)
            held[c] = load_codes(codes + (start + c * LANES * VEC) / PACK);
#pragma unroll
        for (uint c = 0; c < CHUNKS; c++)
            store_x(y + start + c * LANES * VEC, restore(held[c], scale, low), VEC);
#else
        const span_t s = block_span(b, dim, block, blocks_per_row);
        for (uint k = lane * VEC; k < s.size; k += LANES * VEC)
            store_x(y + s.x + k, restore(load_codes(codes + s.codes + k / PACK), scale, low), s.size - k);
#endif
    }
}

/* kv_quantize.cl - quantize a K/V tensor to FP8, INT8 or INT4 codes with scales.

1. Computes
   Each block of consecutive elements of a row shares one scale:
       FP8, INT8   scale = max(max|x| / LARGEST, eps)     code = encode(x / scale)
       INT4        scale = (hi - lo) / 15, min = lo       code = encode((x - lo) / scale)
   over the finite elements of the block; both divisions are correctly rounded.  A value decodes as
   code * scale (+ min).  With PER_TENSOR 1 there is one scale, from kv_quantize_amax run before.

2. Layouts   (row-major, offsets counted in elements of the array they belong to)
   x       [rows, dim]            F32, BF16 or F16
   codes   [rows, dim]            one byte each;  INT4: [rows, ceil(dim / 2)], even index low nibble
   scales  [rows, blocks_per_row] F32 or F16;  PER_TENSOR: [1]
   mins    [rows, blocks_per_row] INT4 only, type of the scales
   amax    [1]                    PER_TENSOR only, float32 bits of max|x|; zero before kv_quantize_amax
   A row is cut into blocks_per_row = ceil(dim / block) blocks; the last may be shorter.
   VEC divides dim and block, but for INT4 with VEC 2, where dim may be odd.

3. Launch
   local size WG, global size WG * ceil(ceil(blocks / blocks_per_team) / (WG / LANES)).
   blocks = rows * blocks_per_row.  Local memory: WG ints (INT4: int2), nothing when LANES is 1 or SHUFFLE is set.

4. Macros
   FORMAT  FP8_E4M3FN | FP8_E5M2 | INT8 | INT4
   SCALE_TYPE  F32 | F16
   PER_TENSOR  0 (default) | 1
   X_TYPE WG VEC LANES ALIGNED DIVIDE HALF SHUFFLE SUBGROUP_SIZE CONVERT_NV  see common.h, vendor.h

5. Needs
   OpenCL C 1.2 full profile.  SHUFFLE, HALF and CONVERT_NV: what the probe calls by these names.

6. Reference
   pyclquant/reference.py: quantize().
*/
#include "common.h"
#include "format.h"

#if ASYMMETRIC
#define TEAM_T int2
#else
#define TEAM_T int
#endif
#include "team.h"

#ifndef PER_TENSOR
#define PER_TENSOR 0
#endif

/* Extremes of a block as integers that order like the floats they stand for, so that no float
   comparison can flush a subnormal or lose a NaN.  FP8, INT8: bits of max|x|.  INT4: hi, and lo
   with its order reversed. */
#if ASYMMETRIC
#define NO_ELEMENT (int)0x80000000
#else
#define NO_ELEMENT 0
#endif
typedef struct { vint hi, lo; } extremes_t;

static extremes_t no_extremes(void)
{
    extremes_t e;
    e.hi = e.lo = (vint)(NO_ELEMENT);
    return e;
}

/* Widens e by the finite elements of v. */
static extremes_t extend(extremes_t e, vfloat v)
{
    const vint bits = as_v(int)(v);
    const vint magnitude = bits & 0x7fffffff;
#if ASYMMETRIC
    const vint key = bits ^ ((bits >> 31) & 0x7fffffff);
    e.hi = max(e.hi, magnitude < 0x7f800000 ? key : (vint)(NO_ELEMENT));
    e.lo = max(e.lo, magnitude < 0x7f800000 ? ~key : (vint)(NO_ELEMENT));
#else
    e.hi = max(e.hi, magnitude < 0x7f800000 ? magnitude : (vint)(NO_ELEMENT));
#endif
    return e;
}

static TEAM_T horizontal(extremes_t e)
{
#if ASYMMETRIC
    return (int2)(hmax(e.hi), hmax(e.lo));
#else
    return hmax(e.hi);
#endif
}

/* What the elements of one block are encoded with. */
typedef struct { float scale, min; divisor_t divisor; } block_t;

#if ASYMMETRIC
static int ordered(int bits) { return bits ^ ((bits >> 31) & 0x7fffffff); } /* its own inverse */

static float flush_subnormal(float v)
{
    return (as_uint(v) & 0x7f800000u) == 0u ? 0.0f : v;
}

/* What a block with the extremes hi_lo is encoded with; below 2^-100 a range counts as none, so that
   no scale is subnormal. */
static block_t block_parameters(int2 hi_lo, float eps)
{
    block_t b;
    const bool empty = hi_lo.x == NO_ELEMENT;
    const float high = empty ? 0.0f : flush_subnormal(as_float(ordered(hi_lo.x)));
    const float low = empty ? 0.0f : flush_subnormal(as_float(ordered(~hi_lo.y)));
    const float range = min(high - low, MAXFLOAT);
    const bool constant_block = range < 0x1p-100f;
    b.scale = constant_block ? 0.0f : round_scale(divide_one(range, divisor(LARGEST)));
    b.min = round_min(low);
    b.divisor = divisor(constant_block ? 1.0f : b.scale);
    return b;
}
#else
/* What a block with the largest magnitude amax (float32 bits) is encoded with. */
static block_t block_parameters(int amax, float eps)
{
    block_t b;
    b.scale = round_scale(max(divide_one(as_float(amax), divisor(LARGEST)), eps));
    b.min = 0.0f;
    b.divisor = divisor(b.scale);
    return b;
}
#endif

static vuchar encode_block(vfloat v, block_t b)
{
#if ASYMMETRIC
    return b.scale == 0.0f ? (vuchar)(0) : encode(divide(v - b.min, b.divisor));
#else
    return encode(divide(v, b.divisor));
#endif
}

#if PER_TENSOR
/* Raises *amax to the largest finite |x|: an integer maximum, the same for any number of work-groups. */
__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void kv_quantize_amax(__global const x_t *x, ulong x_offset, __global int *amax,
                      ulong blocks, ulong dim, uint block, uint blocks_per_row, uint blocks_per_team)
{
    __local TEAM_T scratch[TEAM_SLOTS];
    const uint lane = (uint)get_local_id(0) % LANES;
    const size_t team = get_global_id(0) / LANES;
    extremes_t e = no_extremes();
    for (uint i = 0; i < blocks_per_team; i++) {
        const size_t b = team * blocks_per_team + i;
        if (b < blocks) {
            const span_t s = block_span(b, dim, block, blocks_per_row);
            for (size_t k = lane * VEC; k < s.size; k += LANES * VEC)
                e = extend(e, load_x(x + x_offset + s.x + k, s.size - k));
        }
    }
    const int team_amax = team_max(horizontal(e), scratch);
    if (lane == 0 && team_amax > 0)
        atomic_max(amax, team_amax);
}
#endif

#ifdef SUBGROUP_SIZE
__attribute__((intel_reqd_sub_group_size(SUBGROUP_SIZE)))
#endif
__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void kv_quantize(__global const x_t *x, ulong x_offset, __global uchar *codes, ulong codes_offset,
                 __global scale_t *scales, ulong scales_offset,
#if ASYMMETRIC
                 __global scale_t *mins, ulong mins_offset,
#endif
#if PER_TENSOR
                 __global const int *amax,
#endif
                 ulong blocks, ulong dim, uint block, uint blocks_per_row, uint blocks_per_team, float eps)
{
    __local TEAM_T scratch[TEAM_SLOTS];
    const uint lane = (uint)get_local_id(0) % LANES;
    const size_t team = get_global_id(0) / LANES;
    /* The trip count is the same for all: the reduction has barriers. */
    for (uint i = 0; i < blocks_per_team; i++) {
        const size_t b = team * blocks_per_team + i;
        const bool active = b < blocks;
        span_t s = block_span(active ? b : 0, dim, block, blocks_per_row);
        if (!active)
            s.size = 0;
        __global const x_t *from = x + x_offset + s.x;
        __global uchar *to = codes + codes_offset + s.codes;
        const size_t k0 = lane * VEC;
        /* The first chunk stays in registers; in the usual case it is all that a lane has. */
        const vfloat head = k0 < s.size ? load_x(from + k0, s.size - k0) : (vfloat)(NAN);
#if PER_TENSOR
        const block_t p = block_parameters(*amax, eps);
        const bool writes_scale = b == 0 && lane == 0;
#else
        extremes_t e = extend(no_extremes(), head);
        for (size_t k = k0 + LANES * VEC; k < s.size; k += LANES * VEC)
            e = extend(e, load_x(from + k, s.size - k));
        const block_t p = block_parameters(team_max(horizontal(e), scratch), eps);
        const bool writes_scale = active && lane == 0;
#endif
        if (writes_scale) {
            store_scale(scales + scales_offset + b, p.scale);
#if ASYMMETRIC
            store_scale(mins + mins_offset + b, p.min);
#endif
        }
        if (k0 < s.size)
            store_codes(to + k0 / PACK, encode_block(head, p), s.size - k0);
        for (size_t k = k0 + LANES * VEC; k < s.size; k += LANES * VEC)
            store_codes(to + k / PACK, encode_block(load_x(from + k, s.size - k), p), s.size - k);
    }
}

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
   amax    [1]                    PER_TENSOR only, bits of max|x| in X_TYPE; zero before kv_quantize_amax
   A row is cut into blocks_per_row = ceil(dim / block) blocks; the last may be shorter.
   VEC divides dim and block, but for INT4 with VEC 2, where dim may be odd.

3. Launch
   local size WG, global size WG * ceil(ceil(blocks / blocks_per_team) / (WG / LANES)).
   blocks = rows * blocks_per_row; blocks_per_team, from 1, is how many a team takes one after the other.
   kv_quantize_amax and kv_quantize are launched alike.  Local memory: WG uints (INT4: uint2), nothing when LANES is 1 or SHUFFLE is set.

4. Macros
   FORMAT  FP8_E4M3FN | FP8_E5M2 | INT8 | INT4
   SCALE_TYPE  F32 | F16
   PER_TENSOR  0 (default) | 1
   CHUNKS  n: block == LANES * VEC * n and blocks_per_row == 1, each lane keeps its n vectors in registers;
           0 (default): any block
   PAIRS STREAM  see common.h; taken for BF16, F32 scales and one scale a block
   X86_BF16  see vendor.h; taken with PAIRS: FP8 codes are looked up (VEC 16), worth it where a work-item takes hundreds of blocks,
             by a table of 16 kB of private memory;
             INT8 and INT4 elements are prefetched
   X_TYPE WG VEC LANES ALIGNED DIVIDE HALF SHUFFLE SUBGROUP_SIZE CONVERT_NV  see common.h, vendor.h

5. Needs
   OpenCL C 1.2 full profile.  SHUFFLE, HALF and CONVERT_NV: what the probe calls by these names.

6. Reference
   pyclquant/reference.py: quantize().
*/
#include "common.h"
#include "format.h"

#if ASYMMETRIC
#define TEAM_T uint2
#else
#define TEAM_T uint
#endif
#include "team.h"

#ifndef PER_TENSOR
#define PER_TENSOR 0
#endif
#ifndef CHUNKS
#define CHUNKS 0
#endif

/* ---- extremes ---- */

/* Extremes of a block, as bits that order like the values they stand for: no float comparison can
   flush a subnormal or lose a NaN, and elements are not widened to be compared.  FP8, INT8: hi = bits
   of max|x|.  INT4: hi = key of the largest, lo = complement of the key of the smallest.  0: none. */
typedef struct { vx hi, lo; } extremes_t;

/* Widens e by the elements of raw; when checked, only by the finite ones. */
static extremes_t extend(extremes_t e, vx raw, const bool checked)
{
    const vx none = (vx)(0);
    const vx magnitude = raw & (vx)(SIGN_BIT - 1);
#if ASYMMETRIC
    const vx flip = (raw & (vx)(SIGN_BIT)) != none ? (vx)(~none) : (vx)(SIGN_BIT);
    vx hi = raw ^ flip;
    vx lo = ~hi;
    if (checked) {
        hi = magnitude < (vx)(INFINITY_BITS) ? hi : none;
        lo = magnitude < (vx)(INFINITY_BITS) ? lo : none;
    }
    e.lo = max(e.lo, lo);
#else
    vx hi = magnitude;
    if (checked)
        hi = magnitude < (vx)(INFINITY_BITS) ? hi : none;
#endif
    e.hi = max(e.hi, hi);
    return e;
}

/* Largest of the VEC elements. */
static uint hmax(vx v)
{
#if VEC == 16
    const V8(x_t) a = max(v.lo, v.hi);
    const V4(x_t) b = max(a.lo, a.hi);
    const V2(x_t) c = max(b.lo, b.hi);
    return max(c.x, c.y);
#elif VEC == 8
    const V4(x_t) b = max(v.lo, v.hi);
    const V2(x_t) c = max(b.lo, b.hi);
    return max(c.x, c.y);
#elif VEC == 4
    const V2(x_t) c = max(v.lo, v.hi);
    return max(c.x, c.y);
#elif VEC == 2
    return max(v.x, v.y);
#else
    return v;
#endif
}

static TEAM_T horizontal(extremes_t e)
{
#if ASYMMETRIC
    return (uint2)(hmax(e.hi), hmax(e.lo));
#else
    return hmax(e.hi);
#endif
}

/* Whether these extremes, taken unchecked, are those of finite elements only. */
static bool all_finite(TEAM_T extremes)
{
#if ASYMMETRIC
    const uint infinity = INFINITY_BITS ^ SIGN_BIT;
    return extremes.x < infinity && extremes.y < infinity;
#else
    return extremes < INFINITY_BITS;
#endif
}

/* ---- what a block is encoded with ---- */

/* plain: no element is special and the scale is neither cut off nor extreme; see encode(), divide(). */
typedef struct { float scale, min; divisor_t divisor; bool plain; } block_t;

/* The value of an extreme. */
static float from_bits(uint bits)
{
    return first(widen((vx)((x_t)bits)));
}

#if ASYMMETRIC
static float from_key(uint key)
{
    const float v = from_bits(key & SIGN_BIT ? key ^ SIGN_BIT : ~key);
    return (as_uint(v) & 0x7f800000u) == 0u ? 0.0f : v; /* a subnormal, or -0.0 */
}

/* Parameters of a block with the extremes hi_lo.  Below 2^-100 a range counts as none, so that no
   scale is subnormal. */
static block_t block_parameters(uint2 hi_lo, float eps)
{
    block_t b;
    const bool empty = hi_lo.x == 0u;
    const float high = empty ? 0.0f : from_key(hi_lo.x);
    const float low = empty ? 0.0f : from_key(~hi_lo.y);
    const float range = min(high - low, MAXFLOAT);
    const bool constant_block = range < 0x1p-100f;
    b.scale = constant_block ? 0.0f : round_scale(divide_one(range, divisor(LARGEST)));
    b.min = round_min(low);
    b.divisor = divisor(constant_block ? 1.0f : b.scale);
    b.plain = SCALE_TYPE == F32 ? is_plain(b.divisor.value) : false; /* a rounded min may leave [0, LARGEST] */
    return b;
}
#else
/* Parameters of a block with the largest magnitude amax. */
static block_t block_parameters(uint amax, float eps)
{
    block_t b;
    b.scale = round_scale(max(divide_one(from_bits(amax), divisor(LARGEST)), eps));
    b.min = 0.0f;
    b.divisor = divisor(b.scale);
    b.plain = SCALE_TYPE == F32 ? is_plain(b.scale) : b.scale < 65504.0f;
    return b;
}
#endif

/* ---- a block of a team ---- */

/* Where block `number` lies, its parameters, and with CHUNKS this lane's elements. */
typedef struct {
    size_t number, codes;
    uint size;
    __global const x_t *from;
    block_t parameters;
    vx held[CHUNKS ? CHUNKS : 1];
} work_t;

#if CHUNKS && CONVERT_NV && X_TYPE != F32
/* Unchecked extremes of this lane's elements, two elements an instruction. */
#if X_TYPE == BF16
#define MAX_PAIR nv_max_bfloat16_pair
#define MIN_PAIR nv_min_bfloat16_pair
#define MAX_PAIRS CAT(nv_max_bfloat16_, VEC_WORDS)
#define MIN_PAIRS CAT(nv_min_bfloat16_, VEC_WORDS)
#else
#define MAX_PAIR nv_max_half_pair
#define MIN_PAIR nv_min_half_pair
#define MAX_PAIRS CAT(nv_max_half_, VEC_WORDS)
#define MIN_PAIRS CAT(nv_min_half_, VEC_WORDS)
#endif
static uint key(uint bits) { return bits ^ (bits & SIGN_BIT ? 0xffffu : SIGN_BIT); }

static TEAM_T lane_extremes(work_t w, uint lane)
{
#if ASYMMETRIC
    words_t hi = as_words(w.held[0]), lo = hi;
#else
    words_t hi = as_words(w.held[0]) & 0x7fff7fffu;
#endif
#pragma unroll
    for (uint c = 1; c < CHUNKS; c++) {
#if ASYMMETRIC
        hi = MAX_PAIRS(hi, as_words(w.held[c]));
        lo = MIN_PAIRS(lo, as_words(w.held[c]));
#else
        hi = MAX_PAIRS(hi, as_words(w.held[c]) & 0x7fff7fffu);
#endif
    }
    uint h = hi.s0;
#pragma unroll
    for (uint k = 1; k < VEC_WORDS; k++)
        h = MAX_PAIR(h, ((const uint *)&hi)[k]);
    h = MAX_PAIR(h, h >> 16) & 0xffffu;
#if ASYMMETRIC
    uint l = lo.s0;
#pragma unroll
    for (uint k = 1; k < VEC_WORDS; k++)
        l = MIN_PAIR(l, ((const uint *)&lo)[k]);
    l = MIN_PAIR(l, l >> 16) & 0xffffu;
    return (uint2)(key(h), ~key(l) & 0xffffu);
#else
    return h;
#endif
}
#else
/* Unchecked extremes of this lane's elements. */
static TEAM_T lane_extremes(work_t w, uint lane)
{
    extremes_t e = { (vx)(0), (vx)(0) };
#if CHUNKS
#pragma unroll
    for (uint c = 0; c < CHUNKS; c++)
        e = extend(e, w.held[c], false);
#else
    for (uint k = lane * VEC; k < w.size; k += LANES * VEC)
        e = extend(e, load_x(w.from + k, w.size - k), false);
#endif
    return horizontal(e);
}
#endif

/* Extremes of the finite elements of the whole block: blocks with NaN or Inf are rare, so every lane
   looks at all of it, without a word to the others. */
static TEAM_T checked_extremes(work_t w)
{
    extremes_t e = { (vx)(0), (vx)(0) };
    for (uint k = 0; k < w.size; k += VEC)
        e = extend(e, load_x(w.from + k, w.size - k), true);
    return horizontal(e);
}

/* Finds block `number` and its parameters; every work-item of the work-group must call it, beyond the
   last block too: it has barriers.  amax: PER_TENSOR's, else unused. */
static work_t prepare(size_t number, __global const x_t *x, __global const uint *amax, ulong blocks, ulong dim, uint block,
                      uint blocks_per_row, float eps, uint lane, __local TEAM_T *scratch)
{
    const bool active = number < blocks;
    work_t w;
    w.number = number;
#if CHUNKS
    const size_t start = (active ? number : 0) * block;
    w.codes = start / PACK;
    w.size = active ? block : 0;
    w.from = x + start;
#pragma unroll
    for (uint c = 0; c < CHUNKS; c++)
        w.held[c] = load_x(w.from + (c * LANES + lane) * VEC, block);
#else
    const span_t s = block_span(active ? number : 0, dim, block, blocks_per_row);
    w.codes = s.codes;
    w.size = active ? s.size : 0;
    w.from = x + s.x;
#endif
#if PER_TENSOR
    w.parameters = block_parameters(*amax, eps);
    w.parameters.plain = false;
#else
    TEAM_T extremes = team_max(lane_extremes(w, lane), scratch);
    const bool finite = all_finite(extremes);
    if (!finite)
        extremes = checked_extremes(w);
    w.parameters = block_parameters(extremes, eps);
    w.parameters.plain = w.parameters.plain && finite;
#endif
    return w;
}

static bytes_t encode_chunk(vx raw, block_t b, const bool plain, uint left)
{
    vfloat v = widen(raw);
#if ASYMMETRIC
    v -= b.min;
    if (!plain && b.scale == 0.0f)
        v = (vfloat)(0.0f); /* a plain constant block has x == min, or all but */
#endif
    return encode_packed(divide(v, b.divisor, plain), plain, left);
}

/* Writes the codes of this lane's elements. */
static void encode_lane(work_t w, __global uchar *to, uint lane, const bool plain)
{
#if CHUNKS
#pragma unroll
    for (uint c = 0; c < CHUNKS; c++)
        store_bytes(to + (c * LANES + lane) * (VEC / PACK), encode_chunk(w.held[c], w.parameters, plain, VEC));
#else
    for (uint k = lane * VEC; k < w.size; k += LANES * VEC)
        store_bytes(to + k / PACK, encode_chunk(load_x(w.from + k, w.size - k), w.parameters, plain, w.size - k));
#endif
}

/* Writes the scale (and min) and the codes of a prepared block. */
static void emit(work_t w, __global uchar *codes, __global scale_t *scales, __global scale_t *mins, uint lane)
{
    if (w.size == 0)
        return;
    const bool has_scale = PER_TENSOR ? w.number == 0 : true;
    if (lane == 0 && has_scale) {
        store_scale(scales + w.number, w.parameters.scale);
#if ASYMMETRIC
        store_scale(mins + w.number, w.parameters.min);
#endif
    }
    if (w.parameters.plain)
        encode_lane(w, codes + w.codes, lane, true);
    else
        encode_lane(w, codes + w.codes, lane, false);
}

#define ROWS_OF_PAIRS (WALKS_PAIRS && SCALE_TYPE == F32 && !PER_TENSOR)
#if ROWS_OF_PAIRS
#include "kv_quantize_pairs.h"
#endif

#if PER_TENSOR
/* Raises *amax to the largest finite |x|: an integer maximum, the same for any number of work-groups. */
__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void kv_quantize_amax(__global const x_t *restrict x, ulong x_offset, volatile __global uint *amax,
                      ulong blocks, ulong dim, uint block, uint blocks_per_row, uint blocks_per_team)
{
    __local TEAM_T scratch[TEAM_SLOTS];
    const uint lane = (uint)get_local_id(0) % LANES;
    const size_t first_block = get_global_id(0) / LANES * blocks_per_team;
    const size_t end = min((size_t)blocks, first_block + blocks_per_team);
    extremes_t e = { (vx)(0), (vx)(0) };
    for (size_t b = first_block; b < end; b++) {
        const span_t s = block_span(b, dim, block, blocks_per_row);
        for (uint k = lane * VEC; k < s.size; k += LANES * VEC)
            e = extend(e, load_x(x + x_offset + s.x + k, s.size - k), true);
    }
    const uint team_amax = team_max(horizontal(e), scratch);
    if (lane == 0 && team_amax > 0)
        atomic_max(amax, team_amax);
}
#endif

#ifdef SUBGROUP_SIZE
__attribute__((intel_reqd_sub_group_size(SUBGROUP_SIZE)))
#endif
__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void kv_quantize(__global const x_t *restrict x, ulong x_offset, __global uchar *restrict codes, ulong codes_offset,
                 __global scale_t *restrict scales, ulong scales_offset,
#if ASYMMETRIC
                 __global scale_t *restrict mins, ulong mins_offset,
#endif
#if PER_TENSOR
                 __global const uint *restrict amax,
#endif
                 ulong blocks, ulong dim, uint block, uint blocks_per_row, uint blocks_per_team, float eps)
{
#if !ASYMMETRIC
    __global scale_t *mins = 0;
    const ulong mins_offset = 0;
#endif
#if !PER_TENSOR
    __global const uint *amax = 0;
#endif
    __local TEAM_T scratch[TEAM_SLOTS];
    const uint lane = (uint)get_local_id(0) % LANES;
    const size_t first_block = get_global_id(0) / LANES * blocks_per_team;
    x += x_offset;
    codes += codes_offset;
    scales += scales_offset;
    mins += mins_offset;
#if ROWS_OF_PAIRS
    quantize_rows(x, codes, scales, mins, first_block, min((size_t)blocks, first_block + blocks_per_team), dim, eps, scratch);
#elif LANES == 1
    /* A block is prepared before the one ahead of it is written: its reduction and the divisions for its
       scale are a long chain, which a CPU fills with the encoding.  (A GPU fills it with other work-items,
       and would keep w in memory.) */
    work_t w = prepare(first_block, x, amax, blocks, dim, block, blocks_per_row, eps, lane, scratch);
    for (uint i = 1; i < blocks_per_team; i++) {
        const work_t next = prepare(first_block + i, x, amax, blocks, dim, block, blocks_per_row, eps, lane, scratch);
        emit(w, codes, scales, mins, lane);
        w = next;
    }
    emit(w, codes, scales, mins, lane);
#else
    for (uint i = 0; i < blocks_per_team; i++)
        emit(prepare(first_block + i, x, amax, blocks, dim, block, blocks_per_row, eps, lane, scratch), codes, scales, mins, lane);
#endif
}

/* gemv_w8a8_row.cl - W8A8 GEMV for drivers that run one work-item at a time (CPUs).

1. Computes
   C[m, n] = sum over k of A[m, k] * W[n, k], codes FP8 E4M3FN, accumulated in float32:
       PER_ROW    round(S * (w_scale[n] * a_scale[m]))
       BLOCK_128  acc = fma(S_c, w_scale[n / 128, c] * a_scale[m, c], acc) over the chunks c of 128 columns, in order
   A work-item walks TILE_N rows of weights, each vector lane sums every fourth column of its words (X86_BF16: every fourth
   pair of columns), and the lanes are added at the end: the same order for any number of activation rows.
   gemv_w8a8_row_stage, run before, decodes the activations into the order in which they are needed.

2. Layouts   (row-major, offsets counted in elements of the array they belong to)
   a             [rows, k]  codes of the activations, packed
   staged        [ceil(rows / TILE_M), k / (4 VEC), PARTS, TILE_M, VEC]  words: PARTS 4 of float, X86_BF16: PARTS 2 of two
                 bfloat16; rows beyond the last are 0
   a_scales      [rows], BLOCK_128: [rows, k / 128]
   w0 w1 w2      [rows of the segment, k]  codes of up to three weights, stacked: rows 0..n1, n1..n2, n2..n of the output;
                 n1 = n2 = n for one, n2 = n for two; those that are not there may be NULL
   s0 s1 s2      [rows of the segment], BLOCK_128: [ceil(rows of the segment / 128), k / 128]
   c             [rows, n] row pitch ldc  F32, BF16 or F16
   k is a multiple of 128; n1 and n2 - n1 of TILE_N, BLOCK_128: of 128.

3. Launch
   gemv_w8a8_row_stage: local size 1, global size ceil(steps / steps_per_item), steps = ceil(rows / TILE_M) * k / (4 VEC).
   gemv_w8a8_row: local size 1, global size ceil(n / rows_per_item).  rows_per_item, a multiple of TILE_N, is how many rows of
   weights a work-item takes one after the other.  No local memory.

4. Macros
   SCALES  PER_ROW | BLOCK_128
   TILE_M  rows of activations that share a decoded weight
   TILE_N  rows of weights a work-item walks together, a divisor of 16
   DENORMALS  see gemv.h
   X_TYPE WG VEC FMA HALF  see common.h; WG 1, VEC 1 to 16
   X86_BF16  see vendor.h; VEC 16

5. Needs
   OpenCL C 1.2 full profile; X86_BF16: what the probe calls x86_bf16.

6. Reference
   pyclquant/reference.py: gemv().
*/
#include "common.h"
#include "gemv.h"

#ifndef TILE_M
#error "TILE_M: rows of activations is required"
#endif
#ifndef TILE_N
#error "TILE_N: rows of weights is required"
#endif
#define STEP (4 * VEC) /* columns in VEC words */
#if VEC == 8
#define SHORTS 16
#elif VEC == 4
#define SHORTS 8
#elif VEC == 2
#define SHORTS 4
#endif

/* Parts of the columns of VEC words: their values, decoded, and the sum of products of two. */
#if X86_BF16
#define PARTS 2
typedef vuint part_t;
#define activation_part x86_e4m3_to_bfloat16
#define weight_part x86_e4m3_to_bfloat16
#define add_products x86_dot_bfloat16
#define SUM_FACTOR 1.0f
#define prefetch_codes x86_prefetch
#else
#define PARTS 4
typedef vfloat part_t;
#define activation_part activations
#define weight_part row_weights
#define add_products multiply_add
#define SUM_FACTOR RESULT_FACTOR
#define prefetch_codes(p)
#endif
#define STAGED_STEP (PARTS * TILE_M * VEC)

typedef struct __attribute__((packed)) { vuint v; } packed_words_t;

static vuint load_words(__global const uchar *p)
{
    return ((__global const packed_words_t *)p)->v;
}

__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void gemv_w8a8_row_stage(__global const uchar *restrict a, ulong a_offset, __global uint *restrict staged, ulong staged_offset,
                         uint rows, uint k, uint steps_per_item)
{
    const uint steps = k / STEP;
    const size_t all = (size_t)((rows + TILE_M - 1) / TILE_M) * steps;
    const size_t first_step = get_global_id(0) * steps_per_item;
    const size_t end = min(all, first_step + steps_per_item);
    for (size_t number = first_step; number < end; number++) {
        const uint row = (uint)(number / steps) * TILE_M;
        const size_t column = number % steps * STEP;
        __global uint *to = staged + staged_offset + number * STAGED_STEP;
        for (uint m = 0; m < TILE_M; m++) {
            const vuint words = row + m < rows ? load_words(a + a_offset + (size_t)(row + m) * k + column) : (vuint)(0u);
#pragma unroll
            for (uint j = 0; j < PARTS; j++)
                *(__global part_t *)(to + (j * TILE_M + m) * VEC) = activation_part(words, j);
        }
    }
}

#if DENORMALS && VEC >= 2
/* The 16-bit halves of each word, shifted to the right, their signs kept. */
static vuint shift_halves(vuint words)
{
#if VEC == 16 /* there is no short32 */
    return (uint16)(as_uint8(as_short16(words.lo) >> (short)4), as_uint8(as_short16(words.hi) >> (short)4));
#else
    return as_v(uint)(CAT(as_short, SHORTS)(words) >> (short)4);
#endif
}

/* As weights(), with fewer shifts: two bytes at a time. */
static vfloat row_weights(vuint words, uint j)
{
    const vuint moved = shift_halves(j % 2 ? words : words << 8);
    return as_v(float)((j < 2 ? moved << 16 : moved) & 0x87f00000u);
}
#else
#define row_weights weights
#endif

static float lane_sum(vfloat v)
{
#if VEC == 16
    const float8 a = v.lo + v.hi;
    const float4 b = a.lo + a.hi;
    const float2 c = b.lo + b.hi;
    return c.x + c.y;
#elif VEC == 8
    const float4 b = v.lo + v.hi;
    const float2 c = b.lo + b.hi;
    return c.x + c.y;
#elif VEC == 4
    const float2 c = v.lo + v.hi;
    return c.x + c.y;
#elif VEC == 2
    return v.x + v.y;
#else
    return v;
#endif
}

/* Rows start..start + TILE_N of the output, of segment s, for the activation rows m0..m0 + TILE_M.  staged, a_scales, c: from
   their offsets on. */
static void walk_rows(__global const uint *staged, __global const float *a_scales, segment_t s, uint start,
                      __global x_t *c, uint m0, uint rows, uint k, uint ldc)
{
    const uint chunks = k / CHUNK;
    const uint row = start - s.start;
    __global const uchar *walk[TILE_N];
#pragma unroll
    for (uint r = 0; r < TILE_N; r++)
        walk[r] = s.codes + (size_t)min(row + r, s.rows - 1) * k;

    __global const uint *a = staged + (size_t)(m0 / TILE_M) * (k / STEP) * STAGED_STEP;
    vfloat sum[TILE_N][TILE_M];
#pragma unroll
    for (uint r = 0; r < TILE_N; r++)
#pragma unroll
        for (uint m = 0; m < TILE_M; m++)
            sum[r][m] = (vfloat)(0.0f);

    for (uint chunk = 0; chunk < chunks; chunk++) {
#if SCALES == BLOCK_128
        vfloat whole[TILE_N][TILE_M];
#pragma unroll
        for (uint r = 0; r < TILE_N; r++)
#pragma unroll
            for (uint m = 0; m < TILE_M; m++) {
                whole[r][m] = sum[r][m];
                sum[r][m] = (vfloat)(0.0f);
            }
#endif
        for (uint column = chunk * CHUNK; column < (chunk + 1) * CHUNK; column += STEP) {
            vuint words[TILE_N];
#pragma unroll
            for (uint r = 0; r < TILE_N; r++)
                words[r] = load_words(walk[r] + column);
#pragma unroll
            for (uint r = 0; r < TILE_N; r++)
                prefetch_codes(walk[r] + column + (size_t)TILE_N * k); /* of the rows to be walked next */
#pragma unroll
            for (uint j = 0; j < PARTS; j++) {
                part_t w[TILE_N];
#pragma unroll
                for (uint r = 0; r < TILE_N; r++)
                    w[r] = weight_part(words[r], j);
#pragma unroll
                for (uint m = 0; m < TILE_M; m++) {
                    const part_t x = *(__global const part_t *)(a + (size_t)(column / STEP) * STAGED_STEP + (j * TILE_M + m) * VEC);
#pragma unroll
                    for (uint r = 0; r < TILE_N; r++)
                        sum[r][m] = add_products(w[r], x, sum[r][m]);
                }
            }
        }
#if SCALES == BLOCK_128
        const float w_scale = weight_scale(s, row, chunk, chunks);
#pragma unroll
        for (uint m = 0; m < TILE_M; m++) {
            const float scale = w_scale * a_scales[(size_t)min(m0 + m, rows - 1) * chunks + chunk];
#pragma unroll
            for (uint r = 0; r < TILE_N; r++)
                sum[r][m] = multiply_add(sum[r][m], (vfloat)(scale), whole[r][m]);
        }
#endif
    }
#pragma unroll
    for (uint m = 0; m < TILE_M; m++)
#pragma unroll
        for (uint r = 0; r < TILE_N; r++)
            if (m0 + m < rows && row + r < s.rows) {
                float v = lane_sum(sum[r][m]) * SUM_FACTOR;
#if SCALES == PER_ROW
                v *= weight_scale(s, row + r, 0, chunks) * a_scales[m0 + m];
#endif
                store_output(c + (size_t)(m0 + m) * ldc + start + r, v);
            }
}

__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void gemv_w8a8_row(__global const uint *restrict staged, ulong staged_offset,
                   __global const float *restrict a_scales, ulong a_scales_offset,
                   __global const uchar *restrict w0, ulong w0_offset, __global const float *restrict s0, ulong s0_offset,
                   __global const uchar *restrict w1, ulong w1_offset, __global const float *restrict s1, ulong s1_offset,
                   __global const uchar *restrict w2, ulong w2_offset, __global const float *restrict s2, ulong s2_offset,
                   __global x_t *restrict c, ulong c_offset, uint rows, uint n, uint k, uint ldc, uint n1, uint n2,
                   uint rows_per_item)
{
    const size_t first_row = get_global_id(0) * rows_per_item;
    const size_t end = min((size_t)n, first_row + rows_per_item);
    for (uint m0 = 0; m0 < rows; m0 += TILE_M) /* outside: activations are further away than the weights of a work-item */
        for (size_t start = first_row; start < end; start += TILE_N) {
            const segment_t s = start < n1   ? segment(w0, w0_offset, s0, s0_offset, 0, n1)
                                : start < n2 ? segment(w1, w1_offset, s1, s1_offset, n1, n2)
                                             : segment(w2, w2_offset, s2, s2_offset, n2, n);
            walk_rows(staged + staged_offset, a_scales + a_scales_offset, s, (uint)start, c + c_offset, m0, rows, k, ldc);
        }
}

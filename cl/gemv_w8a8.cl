/* gemv_w8a8.cl - W8A8 GEMV for devices that run work-items side by side.

1. Computes
   C[m, n] = sum over k of A[m, k] * W[n, k], codes FP8 E4M3FN, accumulated in float32:
       PER_ROW    round(S * (w_scale[n] * a_scale[m]))
       BLOCK_128  acc = fma(S_c, w_scale[n / 128, c] * a_scale[m, c], acc) over the chunks c of 128 columns, in order
   A team of LANES work-items takes TILE_N rows of weights; each lane sums the columns of its VEC words, and the lanes are
   added at the end: the same order for any number of activation rows.

2. Layouts   (row-major, offsets counted in elements of the array they belong to)
   a             [rows, k]  codes of the activations, packed
   a_scales      [rows], BLOCK_128: [rows, k / 128]
   w0 w1 w2      [rows of the segment, k]  codes of up to three weights, stacked: rows 0..n1, n1..n2, n2..n of the output;
                 n1 = n2 = n for one, n2 = n for two; those that are not there may be NULL
   s0 s1 s2      [rows of the segment], BLOCK_128: [ceil(rows of the segment / 128), k / 128]
   c             [rows, n] row pitch ldc  F32, BF16 or F16
   k is a multiple of 128; n1 and n2 - n1 of TILE_N, BLOCK_128: of 128.

3. Launch
   local size WG, global size WG * ceil(ceil(n / TILE_N) / (WG / LANES)).
   Local memory: BUFFERS * SPANS * 16 * TILE_M * LANES * VEC bytes.

4. Macros
   SCALES  PER_ROW | BLOCK_128
   TILE_M  rows of activations that share a decoded weight
   TILE_N  rows of weights a team takes, a divisor of 16
   SPANS   n, default 1: activations are decoded for 4 LANES VEC columns n times at once, n barriers become one
   SPREAD  n, default 1: n teams take n LANES work-items together, of each LANES neighbours every team has LANES / n, which read
           side by side; a divisor of LANES and of WG / LANES
   BUFFERS  2 (default): the next activations are decoded while these are used; 1: where local memory is short
   DENORMALS  see gemv.h
   X_TYPE WG VEC LANES ALIGNED FMA HALF CONVERT_NV  see common.h; VEC 1 to 4, ALIGNED 1: codes lie on multiples of 4 VEC

5. Needs
   OpenCL C 1.2 full profile; WG / LANES * (LANES + 1) <= BUFFERS * SPANS * 4 * LANES * VEC.

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
#ifndef SPANS
#define SPANS 1
#endif
#ifndef SPREAD
#define SPREAD 1
#endif
#ifndef BUFFERS
#define BUFFERS 2
#endif
#if LANES % SPREAD || WG % (LANES * SPREAD)
#error "SPREAD: a divisor of LANES and of WG / LANES is required"
#endif
#define NEAR (LANES / SPREAD) /* neighbours of a team */
#define WORDS (LANES * VEC) /* words of a row that a team takes at a time */
#define SPAN (4 * WORDS)    /* and their columns */
#define STAGE (SPANS * SPAN) /* columns whose activations are in local memory together */

typedef struct __attribute__((packed)) { vuint v; } packed_words_t;

/* The words of a lane from `column` on; 0 beyond the last column. */
static vuint load_words(__global const uchar *row, uint column, uint k)
{
    if (column >= k)
        return (vuint)(0u);
#if ALIGNED
    return *(__global const vuint *)(row + column);
#else
    return ((__global const packed_words_t *)(row + column))->v;
#endif
}

#define VECTORS (SPANS * TILE_M * LANES)     /* of activations in a stage, [SPANS][TILE_M][LANES] */
#define SHARE ((VECTORS + WG - 1) / WG) /* of which a work-item decodes so many */

/* A work-item's share of the activations from column `stage` on, rows m0 and following: their codes. */
static void load_share(vuint share[SHARE], __global const uchar *a, uint m0, uint rows, uint stage, uint k, uint lid)
{
#pragma unroll
    for (uint i = 0; i < SHARE; i++) {
        const uint v = i * WG + lid;
        const uint row = m0 + v / LANES % TILE_M;
        const uint column = stage + v / LANES / TILE_M * SPAN + v % LANES * 4 * VEC;
        share[i] = v < VECTORS && row < rows ? load_words(a + (size_t)row * k, column, k) : (vuint)(0u);
    }
}

/* And their values, to a buffer [SPANS][4][TILE_M][WORDS].  always_inline: see team.h. */
__attribute__((always_inline))
static void store_share(__local float *buffer, const vuint share[SHARE], uint lid)
{
#pragma unroll
    for (uint i = 0; i < SHARE; i++) {
        const uint v = i * WG + lid;
        __local float *to = buffer + (v / LANES / TILE_M * 4 * TILE_M + v / LANES % TILE_M) * WORDS + v % LANES * VEC;
        if (v < VECTORS)
#pragma unroll
            for (uint j = 0; j < 4; j++)
                *(__local vfloat *)(to + j * TILE_M * WORDS) = activations(share[i], j);
    }
}

#if VEC == 1
#define dot_add(w, x, sum) multiply_add(w, x, sum)
#else
/* sum + w . x, one product after the other. */
static float dot_add(vfloat w, vfloat x, float sum)
{
#pragma unroll
    for (uint i = 0; i < VEC; i++)
        sum = multiply_add(((const float *)&w)[i], ((const float *)&x)[i], sum);
    return sum;
}
#endif

#if SCALES == BLOCK_128
/* The scale of a row of weights at a column, times that of activation row m. */
static float scale_of(segment_t s, uint row, __global const float *a_scales, uint m, uint column, uint k)
{
    const uint chunks = k / CHUNK, chunk = min(column, k - 1) / CHUNK;
    return weight_scale(s, row, chunk, chunks) * a_scales[(size_t)m * chunks + chunk];
}
#endif

__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void gemv_w8a8(__global const uchar *restrict a, ulong a_offset, __global const float *restrict a_scales, ulong a_scales_offset,
               __global const uchar *restrict w0, ulong w0_offset, __global const float *restrict s0, ulong s0_offset,
               __global const uchar *restrict w1, ulong w1_offset, __global const float *restrict s1, ulong s1_offset,
               __global const uchar *restrict w2, ulong w2_offset, __global const float *restrict s2, ulong s2_offset,
               __global x_t *restrict c, ulong c_offset, uint rows, uint n, uint k, uint ldc, uint n1, uint n2)
{
    /* The activations of a stage, decoded, [BUFFERS][SPANS][4][TILE_M][WORDS]; at the end the sums of the lanes. */
    __local float shared[BUFFERS * SPANS * 4 * TILE_M * WORDS] __attribute__((aligned(16)));
    const uint lid = (uint)get_local_id(0);
    const uint lane = lid % NEAR + lid / LANES % SPREAD * NEAR;
    const uint team = lid % LANES / NEAR + lid / (LANES * SPREAD) * SPREAD;
    const uint chunks = k / CHUNK;
    const uint start = ((uint)get_group_id(0) * (WG / LANES) + team) * TILE_N;
    const bool active = start < n;
    const uint first_row = min(start, n - 1);
    const segment_t s = first_row < n1   ? segment(w0, w0_offset, s0, s0_offset, 0, n1)
                        : first_row < n2 ? segment(w1, w1_offset, s1, s1_offset, n1, n2)
                                         : segment(w2, w2_offset, s2, s2_offset, n2, n);
    const uint row = first_row - s.start;
    a += a_offset;
    a_scales += a_scales_offset;
    __global const uchar *walk[TILE_N];
#pragma unroll
    for (uint r = 0; r < TILE_N; r++)
        walk[r] = s.codes + (size_t)min(row + r, s.rows - 1) * k;

    for (uint m0 = 0; m0 < rows; m0 += TILE_M) {
        float sum[TILE_N][TILE_M];
        vuint next[TILE_N];
#pragma unroll
        for (uint r = 0; r < TILE_N; r++) {
            next[r] = load_words(walk[r], lane * 4 * VEC, k);
#pragma unroll
            for (uint m = 0; m < TILE_M; m++)
                sum[r][m] = 0.0f;
        }

        vuint share[SHARE];
        load_share(share, a, m0, rows, 0, k, lid);
        store_share(shared, share, lid);
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint stage = 0; stage < k; stage += STAGE) {
            __local const float *buffer = shared + stage / STAGE % BUFFERS * SPANS * 4 * TILE_M * WORDS;
            load_share(share, a, m0, rows, stage + STAGE, k, lid);

#if SPANS == 1 /* no loop: in one, Intel's compiler for GPUs keeps no sums in registers */
            const uint span = 0;
            {
#else
#pragma unroll
            for (uint span = 0; span < SPANS && stage + span * SPAN < k; span++) {
#endif
                const uint column = stage + span * SPAN + lane * 4 * VEC;
#if SCALES == BLOCK_128 && TILE_M < 8 /* asked for before the words of the next span; more would fill the registers */
                float scale[TILE_M];
#pragma unroll
                for (uint m = 0; m < TILE_M; m++)
                    scale[m] = scale_of(s, row, a_scales, min(m0 + m, rows - 1), column, k);
#endif
                vuint words[TILE_N];
#pragma unroll
                for (uint r = 0; r < TILE_N; r++) { /* the next words are on their way during the arithmetic */
                    words[r] = next[r];
                    next[r] = load_words(walk[r], column + SPAN, k);
                }
#if SCALES == BLOCK_128
                float whole[TILE_N][TILE_M];
#pragma unroll
                for (uint r = 0; r < TILE_N; r++)
#pragma unroll
                    for (uint m = 0; m < TILE_M; m++) {
                        whole[r][m] = sum[r][m];
                        sum[r][m] = 0.0f;
                    }
#endif
#pragma unroll(TILE_M < 4 ? 4 : 1) /* more would have the compiler load all activations first, and fill the registers */
                for (uint j = 0; j < 4; j++) {
                    vfloat w[TILE_N];
#pragma unroll
                    for (uint r = 0; r < TILE_N; r++)
                        w[r] = weights(words[r], j);
#pragma unroll
                    for (uint m = 0; m < TILE_M; m++) {
                        const vfloat x = *(__local const vfloat *)(buffer + ((span * 4 + j) * TILE_M + m) * WORDS + lane * VEC);
#pragma unroll
                        for (uint r = 0; r < TILE_N; r++)
                            sum[r][m] = dot_add(w[r], x, sum[r][m]);
                    }
                }
#if SCALES == BLOCK_128
#pragma unroll
                for (uint m = 0; m < TILE_M; m++) {
#if TILE_M < 8
                    const float both = scale[m];
#else
                    const float both = scale_of(s, row, a_scales, min(m0 + m, rows - 1), column, k);
#endif
#pragma unroll
                    for (uint r = 0; r < TILE_N; r++)
                        sum[r][m] = multiply_add(sum[r][m], both, whole[r][m]);
                }
#endif
            }
#if BUFFERS == 1
            barrier(CLK_LOCAL_MEM_FENCE); /* the next stage is written where this one was read */
#endif
            store_share(shared + (stage / STAGE + 1) % BUFFERS * SPANS * 4 * TILE_M * WORDS, share, lid);
            barrier(CLK_LOCAL_MEM_FENCE);
        }

        /* A row of weights at a time: lane m of the team adds up the lanes' sums for activation row m. */
#pragma unroll
        for (uint r = 0; r < TILE_N; r++) {
#pragma unroll
            for (uint m = 0; m < TILE_M; m++)
                shared[(team * TILE_M + m) * (LANES + 1) + lane] = sum[r][m];
            barrier(CLK_LOCAL_MEM_FENCE);
            for (uint m = lane; m < TILE_M; m += LANES) {
                if (!active || m0 + m >= rows || row + r >= s.rows)
                    continue;
                __local const float *sums = shared + (team * TILE_M + m) * (LANES + 1);
                float4 four = (float4)(0.0f); /* shorter chains: less to wait for, and fewer roundings in a row */
                uint i = 0;
                for (; i + 4 <= LANES; i += 4)
                    four += vload4(0, sums + i);
                float v = (four.x + four.y) + (four.z + four.w);
                for (; i < LANES; i++)
                    v += sums[i];
                v *= RESULT_FACTOR;
#if SCALES == PER_ROW
                v *= weight_scale(s, row + r, 0, chunks) * a_scales[m0 + m];
#endif
                store_output(c + c_offset + (size_t)(m0 + m) * ldc + start + r, v);
            }
            barrier(CLK_LOCAL_MEM_FENCE);
        }
    }
}

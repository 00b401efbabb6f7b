/* gemv_w8a8_mma.cl - W8A8 GEMV on matrix units (NVIDIA, inline PTX).

1. Computes
   C[m, n] = sum over k of A[m, k] * W[n, k], codes FP8 E4M3FN, accumulated in float32:
       PER_ROW    round(S * (w_scale[n] * a_scale[m]))
       BLOCK_128  acc = fma(S_c, w_scale[n / 128, c] * a_scale[m, c], acc) over the chunks c of 128 columns, in order
   Codes are exact in half, and their products in float32.  A work-group takes TILE_N rows of weights, in tiles of 16, the
   rows of the matrix unit; activations are its columns, in tiles of 8.  Warp w of W takes the chunks of 128 columns w, w + W, ..., and the warps are added at the end: the same order for any
   number of activation rows.

2. Layouts   (row-major, offsets counted in elements of the array they belong to)
   a             [rows, k]  codes of the activations, packed
   a_scales      [rows], BLOCK_128: [rows, k / 128]
   w0 w1 w2      [rows of the segment, k]  codes of up to three weights, stacked: rows 0..n1, n1..n2, n2..n of the output;
                 n1 = n2 = n for one, n2 = n for two
   s0 s1 s2      [rows of the segment], BLOCK_128: [ceil(rows of the segment / 128), k / 128]
   c             [rows, n] row pitch ldc  F32, BF16 or F16
   k is a multiple of 128; n1 and n2 - n1 of 16, BLOCK_128: of 128.  Codes lie on multiples of 16 bytes.

3. Launch
   local size WG, global size WG * ceil(n / TILE_N).  Local memory: WG * TILE_N bytes.

4. Macros
   SCALES  PER_ROW | BLOCK_128
   TILE_M  rows of activations, a multiple of 8: rows <= TILE_M
   TILE_N  rows of weights of a work-group, a multiple of 16
   UNROLL  chunks whose loads are on their way together, from 1
   X_TYPE WG HALF  see common.h; WG a multiple of 32
   MMA_NV  see vendor.h; 1

5. Needs
   What the probe calls nv_mma.

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
#if WG % 32
#error "WG: a multiple of 32 is required"
#endif
#ifndef UNROLL
#define UNROLL 1
#endif
#define M_TILES (TILE_M / 8)
#define N_TILES (TILE_N / 16)
#define WARPS (WG / 32)
#define STEPS (CHUNK / 16) /* of the matrix unit in a chunk */

/* The words that a lane has of a chunk of one row: its 16 bytes of each half.  Columns within a chunk may be taken in any order, as
   long as weights and activations take the same: so the four bytes of a word are a lane's share of a step of the matrix unit. */
typedef union { uint4 halves[2]; uint words[STEPS]; } lane_words_t;

/* A lane's share of 16 rows of weights in a step. */
static uint4 weight_fragment(uint upper, uint lower)
{
    const uint2 u = nv_e4m3_to_half_pairs(upper), l = nv_e4m3_to_half_pairs(lower);
    return (uint4)(u.x, l.x, u.y, l.y);
}

__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void gemv_w8a8_mma(__global const uchar *restrict a, ulong a_offset, __global const float *restrict a_scales, ulong a_scales_offset,
                   __global const uchar *restrict w0, ulong w0_offset, __global const float *restrict s0, ulong s0_offset,
                   __global const uchar *restrict w1, ulong w1_offset, __global const float *restrict s1, ulong s1_offset,
                   __global const uchar *restrict w2, ulong w2_offset, __global const float *restrict s2, ulong s2_offset,
                   __global x_t *restrict c, ulong c_offset, uint rows, uint n, uint k, uint ldc, uint n1, uint n2)
{
    __local float partial[WARPS][8][TILE_N];
    const uint lid = (uint)get_local_id(0);
    const uint lane = lid % 32;
    const uint warp = lid / 32;
    const uint chunks = k / CHUNK;
    const uint start = (uint)get_group_id(0) * TILE_N;
    const uint share = lane % 4 * 16; /* of 64 columns */
    a += a_offset + share;
    a_scales += a_scales_offset;

    /* Each 16 rows lie in one segment; rows beyond n are read from the last ones, and not written. */
    segment_t s[N_TILES];
    uint row[N_TILES];
    __global const uchar *upper[N_TILES], *lower[N_TILES];
#pragma unroll
    for (uint i = 0; i < N_TILES; i++) {
        const uint first_row = min(start + i * 16, n - 1);
        s[i] = first_row < n1   ? segment(w0, w0_offset, s0, s0_offset, 0, n1)
               : first_row < n2 ? segment(w1, w1_offset, s1, s1_offset, n1, n2)
                                : segment(w2, w2_offset, s2, s2_offset, n2, n);
        row[i] = first_row - s[i].start;
        upper[i] = s[i].codes + (size_t)min(row[i] + lane / 4, s[i].rows - 1) * k + share;
        lower[i] = s[i].codes + (size_t)min(row[i] + lane / 4 + 8, s[i].rows - 1) * k + share;
    }

    float4 sum[N_TILES][M_TILES];
#pragma unroll
    for (uint i = 0; i < N_TILES; i++)
#pragma unroll
        for (uint t = 0; t < M_TILES; t++)
            sum[i][t] = (float4)(0.0f);

#pragma unroll UNROLL
    for (uint chunk = warp; chunk < chunks; chunk += WARPS) {
        const size_t column = (size_t)chunk * CHUNK;
        uint4 w[N_TILES][STEPS];
#pragma unroll
        for (uint i = 0; i < N_TILES; i++) {
            lane_words_t u, l;
#pragma unroll
            for (uint h = 0; h < 2; h++) {
                u.halves[h] = nv_load_once(upper[i] + column + h * 64);
                l.halves[h] = nv_load_once(lower[i] + column + h * 64);
            }
#pragma unroll
            for (uint step = 0; step < STEPS; step++)
                w[i][step] = weight_fragment(u.words[step], l.words[step]);
        }
#pragma unroll
        for (uint t = 0; t < M_TILES; t++) {
            __global const uchar *p = a + (size_t)min(t * 8 + lane / 4, rows - 1) * k + column;
            lane_words_t x;
            x.halves[0] = *(__global const uint4 *)p;
            x.halves[1] = *(__global const uint4 *)(p + 64);
#if SCALES == BLOCK_128
            const uint m = t * 8 + lane % 4 * 2;
            const float a_scale0 = a_scales[(size_t)min(m, rows - 1) * chunks + chunk];
            const float a_scale1 = a_scales[(size_t)min(m + 1, rows - 1) * chunks + chunk];
            float4 part[N_TILES];
#pragma unroll
            for (uint i = 0; i < N_TILES; i++)
                part[i] = (float4)(0.0f);
#endif
#pragma unroll
            for (uint step = 0; step < STEPS; step++) {
                const uint2 pairs = nv_e4m3_to_half_pairs(x.words[step]);
#pragma unroll
                for (uint i = 0; i < N_TILES; i++)
#if SCALES == BLOCK_128
                    part[i] = nv_mma_half(w[i][step], pairs, part[i]);
#else
                    sum[i][t] = nv_mma_half(w[i][step], pairs, sum[i][t]);
#endif
            }
#if SCALES == BLOCK_128
#pragma unroll
            for (uint i = 0; i < N_TILES; i++) {
                const float w_scale = weight_scale(s[i], row[i], chunk, chunks);
                const float2 scale = (float2)(w_scale * a_scale0, w_scale * a_scale1);
                sum[i][t] = fma(part[i], (float4)(scale, scale), sum[i][t]);
            }
#endif
        }
    }

#pragma unroll
    for (uint t = 0; t < M_TILES; t++) {
        const uint m = lane % 4 * 2;
#pragma unroll
        for (uint i = 0; i < N_TILES; i++) {
            const uint r = i * 16 + lane / 4;
            partial[warp][m][r] = sum[i][t].x;
            partial[warp][m + 1][r] = sum[i][t].y;
            partial[warp][m][r + 8] = sum[i][t].z;
            partial[warp][m + 1][r + 8] = sum[i][t].w;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint e = lid; e < 8 * TILE_N; e += WG) {
            const uint out_m = t * 8 + e / TILE_N, out_n = start + e % TILE_N;
            float v = 0.0f;
#pragma unroll
            for (uint w = 0; w < WARPS; w++)
                v += partial[w][e / TILE_N][e % TILE_N];
            if (out_m < rows && out_n < n) {
#if SCALES == PER_ROW
                const float w_scale = out_n < n1   ? s0[s0_offset + out_n]
                                      : out_n < n2 ? s1[s1_offset + out_n - n1]
                                                   : s2[s2_offset + out_n - n2];
                v *= w_scale * a_scales[out_m];
#endif
                store_output(c + c_offset + (size_t)out_m * ldc + out_n, v);
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
}

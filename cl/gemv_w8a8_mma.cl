/* gemv_w8a8_mma.cl - W8A8 GEMV on FP8 matrix units (NVIDIA, inline PTX).

1. Computes
   C[m, n] = sum over k of A[m, k] * W[n, k], codes FP8 E4M3FN, accumulated in float32:
       PER_ROW    round(S * (w_scale[n] * a_scale[m]))
       BLOCK_128  acc = fma(S_c, w_scale[n / 128, c] * a_scale[m, c], acc) over the chunks c of 128 columns, in order
   A work-group takes 16 rows of weights, the rows of the matrix unit; activations are its columns, in tiles of 8.
   Warp w of W takes the chunks of 128 columns w, w + W, ..., and the warps are added at the end: the same order for any
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
   local size WG, global size WG * ceil(n / 16).  Local memory: 16 * WG bytes.

4. Macros
   SCALES  PER_ROW | BLOCK_128
   TILE_M  rows of activations, a multiple of 8: rows <= TILE_M
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
#define TILE_N 16
#define TILES (TILE_M / 8)
#define WARPS (WG / 32)

/* Columns within a chunk may be taken in any order, as long as weights and activations take the same: each lane loads
   16 bytes of a row at once, which are its share of two steps of the matrix unit. */
static float4 two_steps(uint4 upper, uint4 lower, uint4 x, float4 sum)
{
    sum = nv_mma_e4m3((uint4)(upper.x, lower.x, upper.y, lower.y), x.lo, sum);
    return nv_mma_e4m3((uint4)(upper.z, lower.z, upper.w, lower.w), x.hi, sum);
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
    const segment_t s = start < n1   ? segment(w0, w0_offset, s0, s0_offset, 0, n1)
                        : start < n2 ? segment(w1, w1_offset, s1, s1_offset, n1, n2)
                                     : segment(w2, w2_offset, s2, s2_offset, n2, n);
    const uint row = start - s.start;
    const uint share = lane % 4 * 16; /* of 64 columns */
    __global const uchar *upper = s.codes + (size_t)min(row + lane / 4, s.rows - 1) * k + share;
    __global const uchar *lower = s.codes + (size_t)min(row + lane / 4 + 8, s.rows - 1) * k + share;
    a += a_offset + share;
    a_scales += a_scales_offset;

    float4 sum[TILES];
#pragma unroll
    for (uint t = 0; t < TILES; t++)
        sum[t] = (float4)(0.0f);

#pragma unroll 2
    for (uint chunk = warp; chunk < chunks; chunk += WARPS) {
        const size_t column = (size_t)chunk * CHUNK;
        const uint4 upper0 = nv_load_once(upper + column), upper1 = nv_load_once(upper + column + 64);
        const uint4 lower0 = nv_load_once(lower + column), lower1 = nv_load_once(lower + column + 64);
#if SCALES == BLOCK_128
        const float w_scale = weight_scale(s, row, chunk, chunks);
#endif
#pragma unroll
        for (uint t = 0; t < TILES; t++) {
            __global const uchar *x = a + (size_t)min(t * 8 + lane / 4, rows - 1) * k + column;
            const uint4 x0 = *(__global const uint4 *)x, x1 = *(__global const uint4 *)(x + 64);
#if SCALES == PER_ROW
            sum[t] = two_steps(upper1, lower1, x1, two_steps(upper0, lower0, x0, sum[t]));
#else
            const float4 whole = two_steps(upper1, lower1, x1, two_steps(upper0, lower0, x0, (float4)(0.0f)));
            const uint m = t * 8 + lane % 4 * 2;
            const float scale0 = w_scale * a_scales[(size_t)min(m, rows - 1) * chunks + chunk];
            const float scale1 = w_scale * a_scales[(size_t)min(m + 1, rows - 1) * chunks + chunk];
            sum[t] = fma(whole, (float4)(scale0, scale1, scale0, scale1), sum[t]);
#endif
        }
    }

    for (uint t = 0; t < TILES; t++) {
        const uint m = lane % 4 * 2, r = lane / 4;
        partial[warp][m][r] = sum[t].x;
        partial[warp][m + 1][r] = sum[t].y;
        partial[warp][m][r + 8] = sum[t].z;
        partial[warp][m + 1][r + 8] = sum[t].w;
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint i = lid; i < 8 * TILE_N; i += WG) {
            const uint out_m = t * 8 + i / TILE_N, out_n = i % TILE_N;
            float v = 0.0f;
#pragma unroll
            for (uint w = 0; w < WARPS; w++)
                v += partial[w][i / TILE_N][out_n];
            if (out_m < rows && row + out_n < s.rows) {
#if SCALES == PER_ROW
                v *= weight_scale(s, row + out_n, 0, chunks) * a_scales[out_m];
#endif
                store_output(c + c_offset + (size_t)out_m * ldc + start + out_n, v);
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
}

/* gemv_w8a8_mma.cl - W8A8 GEMV on matrix units (NVIDIA, inline PTX).

1. Computes
   C[m, n] = sum over k of A[m, k] * W[n, k], codes FP8 E4M3FN, accumulated in float32:
       PER_ROW    round(S * (w_scale[n] * a_scale[m]))
       BLOCK_128  acc = fma(S_c, w_scale[n / 128, c] * a_scale[m, c], acc) over the chunks c of 128 columns, in order
   Codes are exact in half, and their products in float32.  The matrix unit takes 16 rows of weights by 8 of activations; it
   sums a chunk of 128 columns, and chunks are added in float32.  K is cut into four parts of consecutive chunks, summed apart
   and added as (p0 + p1) + (p2 + p3): the bits depend on K alone, not on who sums a part.  The parts are teams of warps of one
   work-group (WARPS_K = 4), or work-groups of one team, of which the one that finishes last adds all four (WARPS_K = 1).

2. Layouts   (row-major, offsets counted in elements of the array they belong to)
   a             [rows, k]  codes of the activations, packed
   a_scales      [rows], BLOCK_128: [rows, k / 128]
   w0 w1 w2      [rows of the segment, k]  codes of up to three weights, stacked: rows 0..n1, n1..n2, n2..n of the output;
                 n1 = n2 = n for one, n2 = n for two; those that are not there may be NULL
   s0 s1 s2      [rows of the segment], BLOCK_128: [ceil(rows of the segment / 128), k / 128]
   c             [rows, n] row pitch ldc  F32, BF16 or F16; the launch writes columns begin..end, begin a multiple of 128
   partials      [tiles, 4, TILE_N * TILE_M / 4]  overwritten; WARPS_K = 4: unused
   arrivals      [tiles]  0 before and after the launch; WARPS_K = 4: unused
   k is a multiple of 128; n1 and n2 - n1 of 16, BLOCK_128: of 128.  Codes lie on multiples of 16 bytes.

3. Launch
   tiles = ceil((end - begin) / TILE_N); local size WG, global size WG * tiles * (4 / WARPS_K).
   Local memory: max(WARPS_K * STAGES * 128 * (TILE_N + TILE_M), 4 * TILE_M * (WARPS_K * (TILE_N + 4) + 1)) bytes.

4. Macros
   SCALES   PER_ROW | BLOCK_128
   TILE_M   rows of activations, a multiple of 8 WARPS_M: rows <= TILE_M
   TILE_N   rows of weights of a work-group, a multiple of 16 WARPS_N
   WARPS_K  teams of a work-group, each with a part of K: 1 or 4
   WARPS_N  warps of a team, each with its rows of weights
   WARPS_M  and times as many, each with its rows of activations
   STAGES   chunks of a team in local memory, from 2: one in use, the others on their way
   X_TYPE WG HALF  see common.h; WG = 32 WARPS_K WARPS_N WARPS_M
   MMA_NV   see vendor.h; 1

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
#ifndef WARPS_K
#define WARPS_K 4
#endif
#ifndef WARPS_N
#define WARPS_N 1
#endif
#ifndef WARPS_M
#define WARPS_M 1
#endif
#ifndef STAGES
#define STAGES 2
#endif
#if WG != 32 * WARPS_K * WARPS_N * WARPS_M
#error "WG: 32 WARPS_K WARPS_N WARPS_M is required"
#endif
#define PARTS 4 /* of K */
#define SPLITS (PARTS / WARPS_K)
#define TEAM (32 * WARPS_N * WARPS_M)
#define N_TILES (TILE_N / (16 * WARPS_N)) /* of a warp */
#define M_TILES (TILE_M / (8 * WARPS_M))
#define M_BLOCK (M_TILES < 4 ? M_TILES : 4) /* tiles whose sums of a chunk are under way together: more hide more, and take registers */
#define STEPS (CHUNK / 16)                  /* of the matrix unit in a chunk */
#define STAGE ((TILE_N + TILE_M) * CHUNK)   /* bytes */
#define RING_BYTES (WARPS_K * STAGES * STAGE)
#define PITCH (TILE_N + 4) /* of sums in local memory: the lanes of a warp write to different banks */
#define SUMS_BYTES (4 * WARPS_K * TILE_M * PITCH + 4 * TILE_M)

/* Local memory has rows of 128 bytes.  A lane of the matrix unit reads 16 bytes of each half of a row; of neighbouring rows one has
   its halves swapped, so that eight lanes that read together meet 32 different banks. */
static uint swapped(uint row, uint piece) { return row * CHUNK + (piece ^ row % 2 * 4) * 16; }

/* The words that a lane has of a chunk of one row: its 16 bytes of each half.  Columns within a chunk may be taken in any order, as
   long as weights and activations take the same: so the four bytes of a word are a lane's share of a step of the matrix unit. */
typedef union { uint4 halves[2]; uint words[STEPS]; } lane_words_t;

static lane_words_t lane_words(__local const uchar *rows, uint lane)
{
    lane_words_t w;
    w.halves[0] = *(__local const uint4 *)(rows + swapped(lane / 4, lane % 4));
    w.halves[1] = *(__local const uint4 *)(rows + swapped(lane / 4, lane % 4 + 4));
    return w;
}

/* A lane's share of 16 rows of weights in a step. */
static uint4 weight_fragment(uint upper, uint lower)
{
    const uint2 u = nv_e4m3_to_half_pairs(upper), l = nv_e4m3_to_half_pairs(lower);
    return (uint4)(u.x, l.x, u.y, l.y);
}

/* How a work-item of a team fills its share of a stage: 16 bytes (a piece) of every HOP-th row.  Each 16 rows of weights lie in one
   segment.  Rows that are not there keep what was in local memory, and what comes of them is not written. */
#define HOP (TEAM / 8)
#define HOPS (HOP < 16 ? 16 / HOP : 1) /* in 16 rows */
#define SOURCES (TILE_N / (HOPS * HOP))
typedef struct {
    __global const uchar *w[SOURCES], *a;
    uint row, piece, pitch, w_rows, a_rows;
} loads_t;

static void fetch(const loads_t *from, __local uchar *stage, uint chunk, uint end)
{
    __local uchar *to = stage + swapped(from->row, from->piece);
    if (chunk < end) {
#pragma unroll
        for (uint i = 0; i < TILE_N / HOP; i++)
            if (from->row + i * HOP < from->w_rows)
                nv_copy_16(to + i * HOP * CHUNK, from->w[i / HOPS] + (i % HOPS * HOP * from->pitch + chunk * CHUNK));
#pragma unroll
        for (uint i = 0; i * HOP < TILE_M; i++)
            if (from->row + i * HOP < from->a_rows)
                nv_copy_16(to + (TILE_N + i * HOP) * CHUNK, from->a + (i * HOP * from->pitch + chunk * CHUNK));
    }
    nv_copy_commit();
}

#define SEGMENT_OF(row)                                                        \
    ((row) < n1   ? segment(w0, w0_offset, s0, s0_offset, 0, n1)               \
     : (row) < n2 ? segment(w1, w1_offset, s1, s1_offset, n1, n2)              \
                  : segment(w2, w2_offset, s2, s2_offset, n2, n))

/* The warps of a team wait for each other. */
static void team_barrier(uint team)
{
#if TEAM == 32
    nv_warp_barrier();
#elif WARPS_K == 1
    barrier(CLK_LOCAL_MEM_FENCE);
#else
    nv_named_barrier(team + 1, TEAM);
#endif
}

__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void gemv_w8a8_mma(__global const uchar *restrict a, ulong a_offset, __global const float *restrict a_scales, ulong a_scales_offset,
                   __global const uchar *restrict w0, ulong w0_offset, __global const float *restrict s0, ulong s0_offset,
                   __global const uchar *restrict w1, ulong w1_offset, __global const float *restrict s1, ulong s1_offset,
                   __global const uchar *restrict w2, ulong w2_offset, __global const float *restrict s2, ulong s2_offset,
                   __global x_t *restrict c, ulong c_offset, __global float4 *partials, __global uint *arrivals,
                   uint rows, uint n, uint k, uint ldc, uint n1, uint n2, uint begin, uint end)
{
    __local uchar memory[RING_BYTES > SUMS_BYTES ? RING_BYTES : SUMS_BYTES] __attribute__((aligned(128)));
    const uint lid = (uint)get_local_id(0);
    const uint lane = lid % 32;
    const uint team = lid / TEAM;
    const uint member = lid % TEAM;
    const uint warp_n = member / 32 % WARPS_N, warp_m = member / 32 / WARPS_N;
    const uint tile = (uint)get_group_id(0) / SPLITS;
    const uint split = (uint)get_group_id(0) % SPLITS;
    const uint start = begin + tile * TILE_N;
    const uint chunks = k / CHUNK;
    a += a_offset;
    a_scales += a_scales_offset;
    c += c_offset;

    loads_t loads;
    loads.row = member / 8;
    loads.piece = member % 8;
    loads.pitch = k;
    loads.w_rows = end - start;
    loads.a_rows = rows;
    loads.a = a + (size_t)loads.row * k + loads.piece * 16;
#pragma unroll
    for (uint i = 0; i < SOURCES; i++) {
        const uint row = min(start + i * HOPS * HOP + loads.row, n - 1);
        const segment_t s = SEGMENT_OF(row);
        loads.w[i] = s.codes + (size_t)(row - s.start) * k + loads.piece * 16;
    }
    __local uchar *ring = memory + team * STAGES * STAGE;

    const uint part = split * WARPS_K + team;
    const uint first_chunk = part * chunks / PARTS, last_chunk = (part + 1) * chunks / PARTS;

#if SCALES == BLOCK_128
    segment_t blocks[N_TILES];
    uint block_row[N_TILES];
#pragma unroll
    for (uint i = 0; i < N_TILES; i++) {
        block_row[i] = min(start + (warp_n * N_TILES + i) * 16, n - 1);
        blocks[i] = SEGMENT_OF(block_row[i]);
        block_row[i] -= blocks[i].start;
    }
#endif

    /* Scales come from far away and are asked for at the start.  WG is a multiple of TILE_N: what a work-item writes at the end lies
       in one column. */
    const uint out = start + lid % TILE_N;
#if SCALES == PER_ROW
    const segment_t out_segment = SEGMENT_OF(min(out, n - 1));
    const float w_scale = weight_scale(out_segment, min(out, n - 1) - out_segment.start, 0, chunks);
    float a_scale_share[(TILE_M + WG - 1) / WG];
#pragma unroll
    for (uint i = 0; i * WG < TILE_M; i++)
        a_scale_share[i] = a_scales[min(i * WG + lid, rows - 1)];
#endif

    float4 sum[N_TILES][M_TILES];
#pragma unroll
    for (uint i = 0; i < N_TILES; i++)
#pragma unroll
        for (uint t = 0; t < M_TILES; t++)
            sum[i][t] = (float4)(0.0f);

#pragma unroll
    for (uint i = 0; i < STAGES - 1; i++)
        fetch(&loads, ring + i * STAGE, first_chunk + i, last_chunk);
    for (uint chunk = first_chunk; chunk < last_chunk; chunk++) {
#if SCALES == BLOCK_128 /* asked for before the wait for the chunk itself */
        float2 a_scale[M_TILES];
        float w_scale[N_TILES];
#pragma unroll
        for (uint t = 0; t < M_TILES; t++) {
            const uint m = (warp_m * M_TILES + t) * 8 + lane % 4 * 2;
            a_scale[t].x = a_scales[(size_t)min(m, rows - 1) * chunks + chunk];
            a_scale[t].y = a_scales[(size_t)min(m + 1, rows - 1) * chunks + chunk];
        }
#pragma unroll
        for (uint i = 0; i < N_TILES; i++)
            w_scale[i] = weight_scale(blocks[i], block_row[i], chunk, chunks);
#endif
        nv_copy_wait(STAGES - 2);
        team_barrier(team); /* everyone's copies are there, and nobody reads the stage that is filled next */
        fetch(&loads, ring + (chunk - first_chunk + STAGES - 1) % STAGES * STAGE, chunk + STAGES - 1, last_chunk);

        __local const uchar *stage = ring + (chunk - first_chunk) % STAGES * STAGE;
        uint4 w[N_TILES][STEPS];
#pragma unroll
        for (uint i = 0; i < N_TILES; i++) {
            __local const uchar *from = stage + (warp_n * N_TILES + i) * 16 * CHUNK;
            const lane_words_t upper = lane_words(from, lane), lower = lane_words(from + 8 * CHUNK, lane);
#pragma unroll
            for (uint step = 0; step < STEPS; step++)
                w[i][step] = weight_fragment(upper.words[step], lower.words[step]);
        }
#pragma unroll
        for (uint block = 0; block < M_TILES; block += M_BLOCK) {
            lane_words_t x[M_BLOCK];
            float4 whole[N_TILES][M_BLOCK]; /* of the chunk */
#pragma unroll
            for (uint t = 0; t < M_BLOCK; t++) {
                x[t] = lane_words(stage + (TILE_N + (warp_m * M_TILES + block + t) * 8) * CHUNK, lane);
#pragma unroll
                for (uint i = 0; i < N_TILES; i++)
                    whole[i][t] = (float4)(0.0f);
            }
#pragma unroll
            for (uint step = 0; step < STEPS; step++)
#pragma unroll
                for (uint t = 0; t < M_BLOCK; t++) {
                    const uint2 pairs = nv_e4m3_to_half_pairs(x[t].words[step]);
#pragma unroll
                    for (uint i = 0; i < N_TILES; i++)
                        whole[i][t] = nv_mma_half(w[i][step], pairs, whole[i][t]);
                }
#pragma unroll
            for (uint i = 0; i < N_TILES; i++) {
#pragma unroll
                for (uint t = 0; t < M_BLOCK; t++)
#if SCALES == BLOCK_128
                    sum[i][block + t] = fma(whole[i][t], (float4)(a_scale[block + t], a_scale[block + t]) * w_scale[i], sum[i][block + t]);
#else
                    sum[i][block + t] += whole[i][t];
#endif
            }
        }
    }
    nv_copy_wait(0);

#if SPLITS > 1
    __global float4 *mine = partials + (size_t)tile * SPLITS * N_TILES * M_TILES * WG + lid; /* [SPLITS][N_TILES][M_TILES][WG] */
#pragma unroll
    for (uint i = 0; i < N_TILES; i++)
#pragma unroll
        for (uint t = 0; t < M_TILES; t++)
            mine[((split * N_TILES + i) * M_TILES + t) * WG] = sum[i][t];
    nv_fence();
    barrier(CLK_LOCAL_MEM_FENCE);
    __local uint *last = (__local uint *)memory;
    if (lid == 0)
        *last = atomic_inc(arrivals + tile) == SPLITS - 1;
    barrier(CLK_LOCAL_MEM_FENCE);
    if (!*last)
        return;
    nv_fence();
    if (lid == 0)
        arrivals[tile] = 0;
#pragma unroll
    for (uint i = 0; i < N_TILES; i++)
#pragma unroll
        for (uint t = 0; t < M_TILES; t++) {
            __global const float4 *p = mine + (i * M_TILES + t) * WG;
            const uint next = N_TILES * M_TILES * WG;
            sum[i][t] = (p[0] + p[next]) + (p[2 * next] + p[3 * next]);
        }
#endif

    /* Sums of a lane are rows lane / 4 (x, y) and 8 more (z, w) of weights, activations 2 (lane % 4) (x, z) and 1 more (y, w). */
    barrier(CLK_LOCAL_MEM_FENCE);
    __local float *sums = (__local float *)memory; /* [WARPS_K][TILE_M][PITCH] */
#if SCALES == PER_ROW
    __local float *a_scale = sums + WARPS_K * TILE_M * PITCH; /* [TILE_M] */
#pragma unroll
    for (uint i = 0; i * WG < TILE_M; i++)
        if (i * WG + lid < TILE_M)
            a_scale[i * WG + lid] = a_scale_share[i];
#endif
#pragma unroll
    for (uint i = 0; i < N_TILES; i++)
#pragma unroll
        for (uint t = 0; t < M_TILES; t++) {
            __local float *to = sums + (team * TILE_M + (warp_m * M_TILES + t) * 8 + lane % 4 * 2) * PITCH
                                + (warp_n * N_TILES + i) * 16 + lane / 4;
            to[0] = sum[i][t].x;
            to[PITCH] = sum[i][t].y;
            to[8] = sum[i][t].z;
            to[PITCH + 8] = sum[i][t].w;
        }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (out >= end)
        return;
#pragma unroll 4
    for (uint m = lid / TILE_N; m < rows; m += WG / TILE_N) {
        __local const float *p = sums + m * PITCH + lid % TILE_N;
#if WARPS_K == 1
        float v = p[0];
#else
        const uint next = TILE_M * PITCH;
        float v = (p[0] + p[next]) + (p[2 * next] + p[3 * next]);
#endif
#if SCALES == PER_ROW
        v *= w_scale * a_scale[m];
#endif
        store_output(c + (size_t)m * ldc + out, v);
    }
}

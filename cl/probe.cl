/* probe.cl - small kernels whose results are known: what does this device really do?

1. Computes
   One kernel a build, chosen by a macro PROBE_*; each is described where it stands.  The host compares
   the bits (pyclquant/probe.py).

2. Layouts
   Flat arrays; work-item i reads and writes element i unless said otherwise.

3. Launch
   Global size = number of elements, local size WG.

4. Macros (one of)
   PROBE_BASE PROBE_VECTOR PROBE_FMA PROBE_FMA_SPEED PROBE_DENORMALS PROBE_DIVIDE PROBE_HALF_LOAD PROBE_HALF_STORE
   PROBE_HALF_CONVERT PROBE_HALF_ARITHMETIC PROBE_SUBGROUP PROBE_SHUFFLE PROBE_DOT PROBE_NV_CONVERT
   PROBE_NV_MMA PROBE_X86_BF16 PROBE_LOCAL PROBE_INDEX64
   DOT    PROBE_DOT: 1 cl_khr_integer_dot_product | 2 NVIDIA PTX | 3 AMD builtin | 4 cl_arm_integer_dot_product
   WORDS  PROBE_LOCAL: 32-bit words of local memory
   X_TYPE WG VEC LANES FMA DIVIDE SHUFFLE SUBGROUP_SIZE CONVERT_NV MMA_NV X86_BF16  see common.h, vendor.h

5. Needs
   OpenCL C 1.2, and what the kernel is there to find out.

6. Reference
   pyclquant/probe.py.
*/
#include "common.h"
#define TEAM_T uint
#include "team.h"

#ifdef PROBE_BASE
/* y[i] = the sum of x over the work-group, through local memory and a barrier, plus x[i] / 2. */
__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void probe_base(__global const float *x, __global float *y)
{
    __local float scratch[WG];
    const uint lid = (uint)get_local_id(0);
    const size_t i = get_global_id(0);
    scratch[lid] = x[i];
    barrier(CLK_LOCAL_MEM_FENCE);
    float sum = 0.0f;
    for (uint k = 0; k < WG; k++)
        sum += scratch[k];
    y[i] = sum + x[i] * 0.5f;
}
#endif

#ifdef PROBE_VECTOR
typedef struct __attribute__((packed)) { vint v; } packed_n_t;
typedef struct __attribute__((packed)) { vuchar v; } packed_b_t;

/* The built-ins of VEC elements that the kernels use. y, n, b: VEC elements a work-item. */
__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void probe_vector(__global const float *x, __global float *y, __global int *n, __global uchar *b)
{
    const size_t i = get_global_id(0) * VEC;
    const vfloat v = as_v(float)(((__global const packed_x_t *)(x + i))->v);
    const vint bits = as_v(int)(v);
    const vfloat f = fma(v, v, v);
    ((__global packed_x_t *)(y + i))->v = as_v(uint)(fabs(f) < 100.0f ? f : v * 0.5f);
    ((__global packed_n_t *)(n + i))->v = max(bits & 0x7fffffff, as_v(int)(f));
    ((__global packed_b_t *)(b + i))->v = convert_v(uchar)(min(convert_v(uint)(fabs(v)), (vuint)(200u)));
}
#endif

#ifdef PROBE_FMA
/* y = fma(x, w, z): one rounding. */
__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void probe_fma(__global const float *x, __global const float *w, __global const float *z, __global float *y)
{
    const size_t i = get_global_id(0);
    y[i] = fma(x[i], w[i], z[i]);
}
#endif

#ifdef PROBE_FMA_SPEED
/* y = a long chain of multiply_add() on each of several vectors of VEC elements, to be timed; y[i] = x[i] after it. */
#define CHAINS 8
__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void probe_fma_speed(__global const float *x, __global float *y, uint rounds)
{
    const size_t i = get_global_id(0) * CHAINS * VEC;
    vfloat v[CHAINS];
#pragma unroll
    for (uint c = 0; c < CHAINS; c++)
        v[c] = as_v(float)(((__global const packed_x_t *)(x + i + c * VEC))->v);
    for (uint r = 0; r < rounds; r++)
#pragma unroll
        for (uint c = 0; c < CHAINS; c++)
            v[c] = multiply_add(v[c], (vfloat)(0.5f), (vfloat)(1.0f)); /* goes to 2, and stays there */
#pragma unroll
    for (uint c = 0; c < CHAINS; c++)
        ((__global packed_x_t *)(y + i + c * VEC))->v = as_v(uint)(v[c]);
}
#endif

#ifdef PROBE_DENORMALS
/* y = x * w, where the product or x is subnormal. */
__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void probe_denormals(__global const float *x, __global const float *w, __global float *y)
{
    const size_t i = get_global_id(0);
    y[i] = x[i] * w[i];
}
#endif

#ifdef PROBE_DIVIDE
/* y = x / w, by the divide() that the quantizers use, the short way where it is allowed. */
__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void probe_divide(__global const float *x, __global const float *w, __global float *y)
{
    const size_t i = get_global_id(0);
    const divisor_t d = divisor(w[i]);
    y[i] = i % 2 == 0 && is_plain(w[i]) ? divide(x[i], d, true) : divide(x[i], d, false);
}
#endif

#ifdef PROBE_HALF_LOAD
/* y = float of the half x, by the built-in that needs no half type. */
__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void probe_half_load(__global const ushort *x, __global float *y)
{
    const size_t i = get_global_id(0);
    y[i] = vload_half(i, (__global const half *)x);
}
#endif

#ifdef PROBE_HALF_STORE
/* y = half of the float x, to nearest even. */
__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void probe_half_store(__global const float *x, __global ushort *y)
{
    const size_t i = get_global_id(0);
    vstore_half_rte(x[i], i, (__global half *)y);
}
#endif

#ifdef PROBE_HALF_CONVERT
/* HALF 1: y = float of the half x; back = half of the float z, to nearest even. */
__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void probe_half_convert(__global const ushort *x, __global float *y, __global const float *z, __global ushort *back)
{
    const size_t i = get_global_id(0);
    y[i] = half_to_float(x[i]);
    back[i] = float_to_half(z[i]);
}
#endif

#ifdef PROBE_HALF_ARITHMETIC
/* y = x * w + x in half arithmetic, two roundings or one. */
__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void probe_half_arithmetic(__global const ushort *x, __global const ushort *w, __global ushort *y)
{
    const size_t i = get_global_id(0);
    const half a = as_half(x[i]);
    const half product = a * as_half(w[i]);
    y[i] = as_ushort((half)(product + a));
}
#endif

#ifdef PROBE_SUBGROUP
#ifdef cl_khr_subgroups
#pragma OPENCL EXTENSION cl_khr_subgroups : enable
#endif
/* size, lane: of the sub-group this work-item is in. */
__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void probe_subgroup(__global uint *size, __global uint *lane)
{
    const size_t i = get_global_id(0);
    size[i] = get_sub_group_size();
    lane[i] = get_sub_group_local_id();
}
#endif

#ifdef PROBE_SHUFFLE
/* y[i * 8 + s] = lane_xor(x[i], 2^s) for 2^s < LANES, then the maximum of the team at s = 7. */
#ifdef SUBGROUP_SIZE
__attribute__((intel_reqd_sub_group_size(SUBGROUP_SIZE)))
#endif
__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void probe_shuffle(__global const uint *x, __global uint *y)
{
    __local uint scratch[TEAM_SLOTS];
    const size_t i = get_global_id(0);
    for (uint s = 0; s < 7; s++)
        y[i * 8 + s] = (1u << s) < LANES ? lane_xor(x[i], 1u << s) : 0u;
    y[i * 8 + 7] = team_max(x[i], scratch);
}
#endif

#ifdef PROBE_DOT
/* y = y + sum of the products of the four signed bytes of x and w. */
#if DOT == 4
#pragma OPENCL EXTENSION cl_arm_integer_dot_product_int8 : enable
#endif
__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void probe_dot(__global const uint *x, __global const uint *w, __global int *y)
{
    const size_t i = get_global_id(0);
#if DOT == 1
    y[i] += dot_4x8packed_ss_int(x[i], w[i]);
#elif DOT == 2
    int r;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(x[i]), "r"(w[i]), "r"(y[i]));
    y[i] = r;
#elif DOT == 3
    y[i] = __builtin_amdgcn_sdot4((int)x[i], (int)w[i], y[i], false);
#else
    y[i] += arm_dot(as_char4(x[i]), as_char4(w[i]));
#endif
}
#endif

#ifdef PROBE_NV_CONVERT
/* Two floats x[2i], x[2i + 1] to two e4m3fn, e5m2, bfloat16 and half; the two bytes and the two halves back. */
__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void probe_nv_convert(__global const float2 *x, __global uchar2 *e4m3, __global uchar2 *e5m2, __global ushort2 *bfloat16,
                      __global ushort2 *half16, __global float2 *from_e4m3, __global float2 *from_e5m2, __global float2 *from_half)
{
    const size_t i = get_global_id(0);
    e4m3[i] = nv_float_to_e4m3_2(x[i]);
    e5m2[i] = nv_float_to_e5m2_2(x[i]);
    bfloat16[i] = nv_float_to_bfloat16_2(x[i]);
    half16[i] = nv_float_to_half_2(x[i]);
    from_e4m3[i] = nv_e4m3_to_float_2((uchar2)((uchar)(2 * i), (uchar)(2 * i + 1)));
    from_e5m2[i] = nv_e5m2_to_float_2((uchar2)((uchar)(2 * i), (uchar)(2 * i + 1)));
    from_half[i] = nv_half_to_float_2((ushort2)((ushort)(2 * i), (ushort)(2 * i + 1)));
}
#endif

#ifdef PROBE_NV_MMA
/* One warp: y[16][8] = a[16][16] * b[8][16]^T, e4m3fn to float32, by the matrix multiply of half. */
__kernel __attribute__((reqd_work_group_size(32, 1, 1)))
void probe_nv_mma(__global const uint *a, __global const uint *b, __global float *y)
{
    const uint lane = (uint)get_local_id(0);
    const uint row = lane / 4; /* rows of 16 bytes are 4 words */
    const uint word = lane % 4;
    const uint2 upper = nv_e4m3_to_half_pairs(a[row * 4 + word]), lower = nv_e4m3_to_half_pairs(a[(row + 8) * 4 + word]);
    const uint2 x = nv_e4m3_to_half_pairs(b[row * 4 + word]);
    const float4 c = nv_mma_half((uint4)(upper.x, lower.x, upper.y, lower.y), x, (float4)(0.0f));
    y[row * 8 + word * 2] = c.x;
    y[row * 8 + word * 2 + 1] = c.y;
    y[(row + 8) * 8 + word * 2] = c.z;
    y[(row + 8) * 8 + word * 2 + 1] = c.w;
}
#endif

#ifdef PROBE_X86_BF16
/* pairs[2i + part] = one part of the 64 codes w[i]; sum[i] = sum[i] + the products of the codes x[i] and w[i]. */
__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void probe_x86_bf16(__global const uint16 *x, __global const uint16 *w, __global uint16 *pairs, __global float16 *sum)
{
    const size_t i = get_global_id(0);
    for (uint part = 0; part < 2; part++) {
        pairs[2 * i + part] = x86_e4m3_to_bfloat16(w[i], part);
        sum[i] = x86_dot_bfloat16(pairs[2 * i + part], x86_e4m3_to_bfloat16(x[i], part), sum[i]);
        x86_prefetch(w + i + 1);
    }
}
#endif

#ifdef PROBE_LOCAL
/* Writes and reads WORDS words of local memory; y[i] = a word that another work-item wrote. */
__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void probe_local(__global uint *y)
{
    __local uint scratch[WORDS];
    const uint lid = (uint)get_local_id(0);
    for (uint k = lid; k < WORDS; k += WG)
        scratch[k] = k * 2654435761u;
    barrier(CLK_LOCAL_MEM_FENCE);
    uint sum = 0;
    for (uint k = WG - 1 - lid; k < WORDS; k += WG)
        sum ^= scratch[k];
    y[get_global_id(0)] = sum;
}
#endif

#ifdef PROBE_INDEX64
/* y = high word of (offset + i) * 3, computed as an index would be. */
__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void probe_index64(ulong offset, __global uint *y)
{
    const size_t i = get_global_id(0);
    const size_t index = ((size_t)offset + i) * 3;
    y[i] = (uint)((ulong)index >> 32) + (uint)sizeof(size_t);
}
#endif

/* vendor.h - neutral primitives and their vendor spellings.  OpenCL C 1.2 when all are 0.

Included by common.h.  A primitive is there only when its macro names a spelling; the host sets
the macro only where the probe has seen the right bits.

Macros
    SHUFFLE     0 none | 1 cl_khr_subgroup_shuffle | 2 cl_intel_subgroups | 3 NVIDIA PTX
                lane_xor(v, mask): v (int or int2) of the lane whose number differs by mask, mask < LANES
    CONVERT_NV  1: NVIDIA PTX conversions between float32, bfloat16 and FP8 (sm_89 and later)
                nv_to_e4m3_N(v), nv_to_e5m2_N(v), nv_to_bfloat16_N(v) for N = 2, 4, 8, 16:
                floatN to ucharN or ushortN, to nearest even, NaN to NaN; FP8 saturates
*/
#ifndef CONVERT_NV
#define CONVERT_NV 0
#endif

#if SHUFFLE == 1
#ifdef cl_khr_subgroup_shuffle
#pragma OPENCL EXTENSION cl_khr_subgroup_shuffle : enable
#endif
static int lane_xor_word(int v, uint mask) { return sub_group_shuffle_xor(v, mask); }
#elif SHUFFLE == 2
#pragma OPENCL EXTENSION cl_intel_subgroups : enable
static int lane_xor_word(int v, uint mask) { return intel_sub_group_shuffle_xor(v, mask); }
#elif SHUFFLE == 3
static int lane_xor_word(int v, uint mask)
{
    int r;
    asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 31, 0xffffffff;" : "=r"(r) : "r"(v), "r"(mask));
    return r;
}
#endif
#if SHUFFLE
/* 32-bit scalars only: shuffles of vectors of smaller types are broken on some drivers (llama.cpp issue 19921). */
static int __attribute__((overloadable)) lane_xor(int v, uint mask) { return lane_xor_word(v, mask); }
static int2 __attribute__((overloadable)) lane_xor(int2 v, uint mask)
{
    return (int2)(lane_xor_word(v.x, mask), lane_xor_word(v.y, mask));
}
#endif

#if CONVERT_NV
static uchar2 nv_to_e4m3_2(float2 v)
{
    ushort r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(v.y), "f"(v.x));
    return as_uchar2(r);
}

static uchar2 nv_to_e5m2_2(float2 v)
{
    ushort r;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(r) : "f"(v.y), "f"(v.x));
    return as_uchar2(r);
}

static ushort2 nv_to_bfloat16_2(float2 v)
{
    uint r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(v.y), "f"(v.x));
    return as_ushort2(r);
}

#define nv_to_e4m3_4(v) (uchar4)(nv_to_e4m3_2((v).lo), nv_to_e4m3_2((v).hi))
#define nv_to_e4m3_8(v) (uchar8)(nv_to_e4m3_4((v).lo), nv_to_e4m3_4((v).hi))
#define nv_to_e4m3_16(v) (uchar16)(nv_to_e4m3_8((v).lo), nv_to_e4m3_8((v).hi))
#define nv_to_e5m2_4(v) (uchar4)(nv_to_e5m2_2((v).lo), nv_to_e5m2_2((v).hi))
#define nv_to_e5m2_8(v) (uchar8)(nv_to_e5m2_4((v).lo), nv_to_e5m2_4((v).hi))
#define nv_to_e5m2_16(v) (uchar16)(nv_to_e5m2_8((v).lo), nv_to_e5m2_8((v).hi))
#define nv_to_bfloat16_4(v) (ushort4)(nv_to_bfloat16_2((v).lo), nv_to_bfloat16_2((v).hi))
#define nv_to_bfloat16_8(v) (ushort8)(nv_to_bfloat16_4((v).lo), nv_to_bfloat16_4((v).hi))
#define nv_to_bfloat16_16(v) (ushort16)(nv_to_bfloat16_8((v).lo), nv_to_bfloat16_8((v).hi))
#endif

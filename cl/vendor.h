/* vendor.h - neutral primitives and their vendor spellings.  OpenCL C 1.2 when all are 0.

Included by common.h.  A primitive is there only when its macro names a spelling; the host sets
the macro only where the probe has seen the right bits.

Macros
    SHUFFLE     0 none | 1 cl_khr_subgroup_shuffle | 2 cl_intel_subgroups | 3 NVIDIA PTX
                lane_xor(v, mask): v (uint or uint2) of the lane whose number differs by mask, mask < LANES
    CONVERT_NV  1: NVIDIA PTX conversions (sm_89 and later), for N = 2, 4, 8, 16:
                nv_float_to_{e4m3,e5m2,bfloat16,half}_N, to nearest even, NaN to NaN; FP8 saturates
                nv_{e4m3,e5m2,half}_to_float_N, exact
                nv_reciprocal_N, within 1 ulp; nv_multiply_flushed_N, subnormals as zeros
                nv_{max,min}_{bfloat16,half}_N for N = 2, 4, 8 words of two elements; NaN wins
    MMA_NV      1: NVIDIA PTX matrix multiply of half, and its conversion from e4m3 (sm_89 and later):
                nv_e4m3_to_half_pairs(codes)
                nv_mma_half(w, x, sum), a warp's W [16, 16] times X^T [16, 8] added to sum [16, 8]
                nv_copy_16(to, from), nv_copy_commit(), nv_copy_wait(n), from global to local memory while others compute
                nv_warp_barrier(), nv_named_barrier(name, items), nv_fence()
    X86_BF16    0 none | 1 inline assembly | 2 LLVM's built-in functions; of x86 with AVX512_VBMI and AVX512_BF16:
                x86_e4m3_to_bfloat16(codes, part): 32 of 64 codes
                x86_dot_bfloat16(a, b, sum): the products of 32 pairs added to 16 sums, two to each
                x86_look_up(lower, indices, upper): bytes of a table of 128
                x86_every_other_byte(a, b, odd): the even or odd bytes of both
                x86_prefetch(p): the 64 bytes at p, into the cache of the second level
*/
#ifndef CONVERT_NV
#define CONVERT_NV 0
#endif
#ifndef MMA_NV
#define MMA_NV 0
#endif
#ifndef X86_BF16
#define X86_BF16 0
#endif

#if SHUFFLE == 1
#ifdef cl_khr_subgroup_shuffle
#pragma OPENCL EXTENSION cl_khr_subgroup_shuffle : enable
#endif
static uint lane_xor_word(uint v, uint mask) { return sub_group_shuffle_xor(v, mask); }
#elif SHUFFLE == 2
#pragma OPENCL EXTENSION cl_intel_subgroups : enable
static uint lane_xor_word(uint v, uint mask) { return intel_sub_group_shuffle_xor(v, mask); }
#elif SHUFFLE == 3
static uint lane_xor_word(uint v, uint mask)
{
    uint r;
    asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 31, 0xffffffff;" : "=r"(r) : "r"(v), "r"(mask));
    return r;
}
#endif
#if SHUFFLE
/* 32-bit scalars only: shuffles of vectors of smaller types are broken on some drivers (llama.cpp issue 19921). */
static uint __attribute__((overloadable)) lane_xor(uint v, uint mask) { return lane_xor_word(v, mask); }
static uint2 __attribute__((overloadable)) lane_xor(uint2 v, uint mask)
{
    return (uint2)(lane_xor_word(v.x, mask), lane_xor_word(v.y, mask));
}
#endif

#if CONVERT_NV
static uchar2 nv_float_to_e4m3_2(float2 v)
{
    ushort r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(v.y), "f"(v.x));
    return as_uchar2(r);
}

static uchar2 nv_float_to_e5m2_2(float2 v)
{
    ushort r;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(r) : "f"(v.y), "f"(v.x));
    return as_uchar2(r);
}

static ushort2 nv_float_to_bfloat16_2(float2 v)
{
    uint r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(v.y), "f"(v.x));
    return as_ushort2(r);
}

static ushort2 nv_float_to_half_2(float2 v)
{
    uint r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(v.y), "f"(v.x));
    return as_ushort2(r);
}

static float2 nv_half_to_float_2(ushort2 h)
{
    float2 v;
    asm("cvt.f32.f16 %0, %1;" : "=f"(v.x) : "h"(h.x));
    asm("cvt.f32.f16 %0, %1;" : "=f"(v.y) : "h"(h.y));
    return v;
}

/* Every FP8 value is a float16 value. */
static float2 nv_e4m3_to_float_2(uchar2 codes)
{
    uint r;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(as_ushort(codes)));
    return nv_half_to_float_2(as_ushort2(r));
}

static float2 nv_e5m2_to_float_2(uchar2 codes)
{
    uint r;
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(r) : "h"(as_ushort(codes)));
    return nv_half_to_float_2(as_ushort2(r));
}

/* Products of which a subnormal factor, or one that is subnormal, is a zero of its sign. */
static float2 nv_multiply_flushed_2(float2 a, float2 b)
{
    float2 v;
    asm("mul.ftz.f32 %0, %1, %2;" : "=f"(v.x) : "f"(a.x), "f"(b.x));
    asm("mul.ftz.f32 %0, %1, %2;" : "=f"(v.y) : "f"(a.y), "f"(b.y));
    return v;
}

/* 1 / v within 1 ulp, for |v| from 2^-126 to 2^126. */
static float2 nv_reciprocal_2(float2 v)
{
    float2 y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y.x) : "f"(v.x));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y.y) : "f"(v.y));
    return y;
}

/* Larger and smaller of two pairs; NaN wins. */
static uint nv_max_bfloat16_pair(uint a, uint b)
{
    uint r;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

static uint nv_min_bfloat16_pair(uint a, uint b)
{
    uint r;
    asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

static uint nv_max_half_pair(uint a, uint b)
{
    uint r;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

static uint nv_min_half_pair(uint a, uint b)
{
    uint r;
    asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

#define NV_WORDS(name)                                                                                          \
    static uint2 name##_2(uint2 a, uint2 b) { return (uint2)(name##_pair(a.x, b.x), name##_pair(a.y, b.y)); }    \
    static uint4 name##_4(uint4 a, uint4 b) { return (uint4)(name##_2(a.lo, b.lo), name##_2(a.hi, b.hi)); }      \
    static uint8 name##_8(uint8 a, uint8 b) { return (uint8)(name##_4(a.lo, b.lo), name##_4(a.hi, b.hi)); }
NV_WORDS(nv_max_bfloat16)
NV_WORDS(nv_min_bfloat16)
NV_WORDS(nv_max_half)
NV_WORDS(nv_min_half)

/* From pairs to VEC. */
#define NV_WIDEN(name, from, to)                                                           \
    static to##4 name##_4(from##4 v) { return (to##4)(name##_2(v.lo), name##_2(v.hi)); }    \
    static to##8 name##_8(from##8 v) { return (to##8)(name##_4(v.lo), name##_4(v.hi)); }    \
    static to##16 name##_16(from##16 v) { return (to##16)(name##_8(v.lo), name##_8(v.hi)); }
NV_WIDEN(nv_float_to_e4m3, float, uchar)
NV_WIDEN(nv_float_to_e5m2, float, uchar)
NV_WIDEN(nv_float_to_bfloat16, float, ushort)
NV_WIDEN(nv_float_to_half, float, ushort)
NV_WIDEN(nv_half_to_float, ushort, float)
NV_WIDEN(nv_e4m3_to_float, uchar, float)
NV_WIDEN(nv_e5m2_to_float, uchar, float)
NV_WIDEN(nv_reciprocal, float, float)
static float4 nv_multiply_flushed_4(float4 a, float4 b)
{
    return (float4)(nv_multiply_flushed_2(a.lo, b.lo), nv_multiply_flushed_2(a.hi, b.hi));
}
static float8 nv_multiply_flushed_8(float8 a, float8 b)
{
    return (float8)(nv_multiply_flushed_4(a.lo, b.lo), nv_multiply_flushed_4(a.hi, b.hi));
}
static float16 nv_multiply_flushed_16(float16 a, float16 b)
{
    return (float16)(nv_multiply_flushed_8(a.lo, b.lo), nv_multiply_flushed_8(a.hi, b.hi));
}
#endif

#if MMA_NV
/* The values of four codes as two pairs of half, exactly. */
static uint2 nv_e4m3_to_half_pairs(uint codes)
{
    uint2 r;
    asm("{.reg .b16 lo, hi; mov.b32 {lo, hi}, %2; cvt.rn.f16x2.e4m3x2 %0, lo; cvt.rn.f16x2.e4m3x2 %1, hi;}"
        : "=r"(r.x), "=r"(r.y) : "r"(codes));
    return r;
}

/* Lane l holds of W rows l / 4 (w.x, w.z) and l / 4 + 8 (w.y, w.w), of X row l / 4, of each the columns 2 (l % 4), + 1 and 8
   more; of the sum rows l / 4 (x, y) and l / 4 + 8 (z, w), columns 2 (l % 4), + 1.
   Not volatile: the compiler may move loads across it. */
static float4 nv_mma_half(uint4 w, uint2 x, float4 sum)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum.x), "+f"(sum.y), "+f"(sum.z), "+f"(sum.w)
        : "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w), "r"(x.x), "r"(x.y));
    return sum;
}

/* Copies of 16 bytes to local memory: started by nv_copy_16, gathered in groups by nv_copy_commit; nv_copy_wait(n) returns
   when at most n groups of this work-item are on their way.  Whole lines of 128 bytes are asked of memory: H200, 16 rows of
   activations, 5120 x 17408: 29.2 us instead of 30.1. */
static void nv_copy_16(__local uchar *to, __global const uchar *from)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" : : "r"((uint)(size_t)to), "l"(from));
}

static void nv_copy_commit(void) { asm volatile("cp.async.commit_group;" : : : "memory"); }

#define nv_copy_wait(n) asm volatile("cp.async.wait_group %0;" : : "n"(n) : "memory")

/* The lanes of a warp, or `items` work-items that name the same barrier 1 to 15, wait for each other and see each other's writes to
   local memory. */
static void nv_warp_barrier(void) { asm volatile("bar.warp.sync 0xffffffff;" : : : "memory"); }

static void nv_named_barrier(uint name, uint items) { asm volatile("bar.sync %0, %1;" : : "r"(name), "r"(items) : "memory"); }

/* What this work-item wrote is seen by whoever sees its later atomics; and the other way round. */
static void nv_fence(void) { asm volatile("fence.acq_rel.gpu;" : : : "memory"); }
#endif

#if X86_BF16
typedef uchar x86_bytes_t __attribute__((ext_vector_type(64)));
#define as_x86_bytes(v) __builtin_astype(v, x86_bytes_t)

/* For each byte of the indices, the byte of a table of 128, given in halves, that its low seven bits choose. */
#if X86_BF16 == 1
static uint16 x86_look_up(uint16 lower, uint16 indices, uint16 upper)
{
    __asm__("vpermi2b %2, %1, %0" : "+v"(indices) : "v"(lower), "v"(upper));
    return indices;
}
#else
x86_bytes_t x86_permute(x86_bytes_t lower, x86_bytes_t indices, x86_bytes_t upper) __asm__("llvm.x86.avx512.vpermi2var.qi.512");
static uint16 x86_look_up(uint16 lower, uint16 indices, uint16 upper)
{
    return as_uint16(x86_permute(as_x86_bytes(lower), as_x86_bytes(indices), as_x86_bytes(upper)));
}
#endif

/* The even (odd 0) or odd (odd 1) bytes of a, then those of b. */
static uint16 x86_every_other_byte(uint16 a, uint16 b, uint odd)
{
    const uint16 fours = (uint16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return x86_look_up(a, fours * 0x08080808u + (0x06040200u + odd * 0x01010101u), b);
}

/* The bytes of the bfloat16 of the codes 0 to 63 and 64 to 127.  Eight codes with one exponent follow each other; of the
   low bytes only those of the subnormal codes, 0 to 7, and of NaN, 127, do not repeat. */
#define E4M3_LOW_8_TO_15 0xb0a09080u, 0xf0e0d0c0u
#define E4M3_LOW_8_TO_23 E4M3_LOW_8_TO_15, 0x30201000u, 0x70605040u
#define E4M3_LOW_0_TO_63                                                                                                 \
    (uint16)(0xc0800000u, 0x60402000u, E4M3_LOW_8_TO_23, E4M3_LOW_8_TO_23, E4M3_LOW_8_TO_23, E4M3_LOW_8_TO_15)
#define E4M3_LOW_64_TO_127                                                                                               \
    (uint16)(0x30201000u, 0x70605040u, E4M3_LOW_8_TO_23, E4M3_LOW_8_TO_23, E4M3_LOW_8_TO_23, 0xb0a09080u, 0xc0e0d0c0u)
#define E4M3_HIGH_0_TO_63                                                                                                \
    (uint16)(0x3b3b3b00u, 0x3c3c3c3cu, 0x3c3c3c3cu, 0x3c3c3c3cu, (uint4)(0x3d3d3d3du), (uint4)(0x3e3e3e3eu), (uint4)(0x3f3f3f3fu))
#define E4M3_HIGH_64_TO_127                                                                                              \
    (uint16)((uint4)(0x40404040u), (uint4)(0x41414141u), (uint4)(0x42424242u), (uint3)(0x43434343u), 0x7f434343u)

/* The values of 64 codes, exactly, two bfloat16 a word: of each 16 codes the first 8 (part 0) or the last 8 (part 1). */
static uint16 x86_e4m3_to_bfloat16(uint16 codes, uint part)
{
    const x86_bytes_t low = as_x86_bytes(x86_look_up(E4M3_LOW_0_TO_63, codes, E4M3_LOW_64_TO_127));
    const uint16 magnitude = x86_look_up(E4M3_HIGH_0_TO_63, codes, E4M3_HIGH_64_TO_127);
    const x86_bytes_t high = as_x86_bytes(magnitude | (codes & 0x80808080u));
#define ALTERNATELY(i) i, i + 64, i + 1, i + 65, i + 2, i + 66, i + 3, i + 67, i + 4, i + 68, i + 5, i + 69, i + 6, i + 70, i + 7, i + 71
    return as_uint16(part == 0 ? __builtin_shufflevector(low, high, ALTERNATELY(0), ALTERNATELY(16), ALTERNATELY(32), ALTERNATELY(48))
                               : __builtin_shufflevector(low, high, ALTERNATELY(8), ALTERNATELY(24), ALTERNATELY(40), ALTERNATELY(56)));
}

/* Rounds to nearest even after each product; takes subnormal bfloat16 for zeros. */
#if X86_BF16 == 1
static float16 x86_dot_bfloat16(uint16 a, uint16 b, float16 sum)
{
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}
#else
typedef __bf16 x86_bfloat16_t __attribute__((ext_vector_type(32)));
float16 x86_dot(float16 sum, x86_bfloat16_t a, x86_bfloat16_t b) __asm__("llvm.x86.avx512bf16.dpbf16ps.512");
static float16 x86_dot_bfloat16(uint16 a, uint16 b, float16 sum)
{
    return x86_dot(sum, __builtin_astype(a, x86_bfloat16_t), __builtin_astype(b, x86_bfloat16_t));
}
#endif

/* Past the first level: with lines that are far ahead it has too few requests left for those that are needed. */
#define x86_prefetch(p) __builtin_prefetch(p, 0, 2)
#endif

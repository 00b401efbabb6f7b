/* common.h - vectors, loads and stores, exact division.  OpenCL C 1.2.

Every kernel file but bench.cl includes it first.  It defines no kernel.

A TEAM is LANES consecutive work-items of one work-group that serve one block of
elements together; each takes VEC consecutive elements at a time.  All variants
of a kernel are one body at different points of (VEC, LANES):
    base    VEC 1, one team or a few a work-group, reduction in local memory (team.h)
    vector  VEC 8 to 16 bytes, several teams in a work-group
    row     VEC 8 or 16, LANES 1: one work-item walks whole blocks (CPU drivers)

Macros (all have defaults but WG and X_TYPE)
    WG       local size; the kernels carry reqd_work_group_size(WG, 1, 1)
    VEC      1, 2, 4, 8, 16      elements a work-item handles at a time
    LANES    1..WG, a divisor of WG; a power of two when SHUFFLE is not 0
    ALIGNED  1: every VEC-wide access lies on a multiple of its own size
    X_TYPE   F32 | BF16 | F16    element type of the float side
    DIVIDE   DIVIDE_NATIVE: `/` is correctly rounded on this device
             DIVIDE_FMA: fma() is correctly rounded for normal operands
             DIVIDE_INT: neither; long division in integers, right everywhere
    FMA      1: multiply_add() is fma(), one rounding; 0: a product and a sum, where fma() is wrong or slow
    PAIRS    n: bfloat16 blocks of exactly VEC * n elements go two elements in a word; for K/V with LANES 1, VEC 8 or 16, n a
             multiple of 4 (INT4: 2), where fma() is right and fast and float32 subnormals are kept; 0 (default)
    STREAM   1: with PAIRS, outputs pass the caches by (clang's builtin); they begin at multiples of 64 bytes; 0 (default)
    HALF     1: the type `half` converts to and from float correctly; 0: integers do it
    SHUFFLE  0: teams reduce in local memory; else see vendor.h
    SUBGROUP_SIZE  n: ask for this sub-group size (cl_intel_required_subgroup_size)
Needs: OpenCL C 1.2.
*/
#pragma OPENCL FP_CONTRACT OFF /* a contracted a*b+c changes the bytes */

#define F32 1
#define BF16 2
#define F16 3
#define DIVIDE_NATIVE 0
#define DIVIDE_FMA 1
#define DIVIDE_INT 2

#ifndef WG
#error "WG: the local size is required"
#endif
#ifndef X_TYPE
#error "X_TYPE: F32, BF16 or F16 is required"
#endif
#ifndef VEC
#define VEC 1
#endif
#ifndef LANES
#define LANES WG
#endif
#ifndef ALIGNED
#define ALIGNED 0
#endif
#ifndef DIVIDE
#define DIVIDE DIVIDE_INT
#endif
#ifndef FMA
#define FMA 0
#endif
#ifndef PAIRS
#define PAIRS 0
#endif
#ifndef STREAM
#define STREAM 0
#endif
#ifndef HALF
#define HALF 0
#endif
#ifndef SHUFFLE
#define SHUFFLE 0
#endif
#if HALF && defined(cl_khr_fp16)
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#endif

#include "vendor.h"

/* ---- vectors of VEC elements; plain scalars when VEC is 1 ---- */

#define CAT_(a, b) a##b
#define CAT(a, b) CAT_(a, b)
#define V2(type) CAT(type, 2)
#define V4(type) CAT(type, 4)
#define V8(type) CAT(type, 8)
#if VEC == 1
#define V(type) type
#define VSUFFIX
#define first(v) (v)
#else
#define V(type) CAT(type, VEC)
#define VSUFFIX VEC
#define first(v) ((v).s0)
#endif
#define convert_v(type) CAT(convert_##type, VSUFFIX)
#define as_v(type) CAT(as_##type, VSUFFIX)

typedef V(float) vfloat;
typedef V(int) vint;
typedef V(uint) vuint;
typedef V(ushort) vushort;
typedef V(uchar) vuchar;

/* ---- small binary floats: 1 sign, EBITS exponent, MBITS mantissa bits, subnormals kept ---- */

#define MIN_NORMAL(ebits) ((129u - (1u << ((ebits) - 1))) << 23) /* float32 bits of the smallest normal */

/* Code of the magnitude |v| <= largest, to nearest even, in the low 1 + ebits + mbits bits; what is above
   them means nothing.  magnitude: float32 bits of |v|.
   Adding M = 2^(e + 23 - mbits), e the exponent of |v| or the smallest normal one, makes the float adder
   round at the last bit kept: the sum has the rounded significand in its low bits and e on top, and
   the two added up are the code, but for a bias.  That bias, even, is added to M beforehand. */
static vuint small_float_encode(vuint magnitude, uint ebits, uint mbits)
{
    const uint shift = 23u - mbits;
    const uint bias = -(((shift << 23) + MIN_NORMAL(ebits)) >> shift) & ((2u << (ebits + mbits)) - 1u);
    const vuint e = max(magnitude & 0x7f800000u, (vuint)(MIN_NORMAL(ebits)));
    const vuint m = e + ((shift << 23) + bias);
    const vuint sum = as_v(uint)(as_v(float)(magnitude) + as_v(float)(m));
    return sum + (sum >> shift);
}

/* Value of a magnitude code, without any float32 subnormal on the way: with the implicit 1
   always set, a subnormal code reads 2^emin too much, and min() picks the right formula. */
static vfloat small_float_decode(vuint magnitude, uint ebits, uint mbits)
{
    const uint rebias = (127u - ((1u << (ebits - 1)) - 1u)) << 23;
    const vfloat f = as_v(float)((magnitude << (23u - mbits)) + rebias);
    const vfloat g = f + f - as_float(MIN_NORMAL(ebits));
    return g < f ? g : f;
}

/* ---- the float side: float32, bfloat16, float16 ---- */

#if X_TYPE == F32
#define x_t uint
#define SIGN_BIT 0x80000000u
#define INFINITY_BITS 0x7f800000u
#else
#define x_t ushort
#define SIGN_BIT ((ushort)0x8000)
#if X_TYPE == BF16
#define INFINITY_BITS ((ushort)0x7f80)
#else
#define INFINITY_BITS ((ushort)0x7c00)
#endif
#endif
/* The bits of VEC elements: x_t is an integer, of the size of the element type. */
typedef V(x_t) vx;

static vfloat half_to_float(vushort h)
{
#if CONVERT_NV && VEC >= 2
    return CAT(nv_half_to_float_, VEC)(h);
#elif HALF
    return convert_v(float)(as_v(half)(h));
#else
    const vuint m = convert_v(uint)(h) & 0x7fffu;
    const vuint sign = (convert_v(uint)(h) & 0x8000u) << 16;
    const vuint value = as_v(uint)(small_float_decode(m, 5, 10));
    const vuint special = 0x7f800000u | (m << 13); /* Inf and NaN */
    return as_v(float)((m >= 0x7c00u ? special : value) | sign);
#endif
}

/* Nearest even; overflow gives Inf, NaN stays NaN. */
static vushort float_to_half(vfloat v)
{
#if CONVERT_NV && VEC >= 2
    return CAT(nv_float_to_half_, VEC)(v);
#elif HALF
    return as_v(ushort)(convert_v(half)(v));
#else
    const vuint bits = as_v(uint)(v);
    const vuint a = bits & 0x7fffffffu;
    vuint code = small_float_encode(a < 0x47800000u ? a : (vuint)(0x47800000u), 5, 10); /* 2^16 -> 0x7c00 */
    code = a > 0x7f800000u ? (vuint)(0x7e00u) : code;
    return convert_v(ushort)((code & 0x7fffu) | ((bits >> 16) & 0x8000u));
#endif
}

/* Nearest even; overflow gives Inf, NaN stays NaN. */
static vushort float_to_bfloat16(vfloat v)
{
#if CONVERT_NV && VEC >= 2
    return CAT(nv_float_to_bfloat16_, VEC)(v);
#else
    const vuint bits = as_v(uint)(v);
    const vuint rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const vuint quiet = (bits >> 16) | 0x40u;
    return convert_v(ushort)((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
#endif
}

#define WALKS_PAIRS (PAIRS && X_TYPE == BF16)

#if ALIGNED || WALKS_PAIRS
/* Aligned vectors are moved as 32-bit words: NVIDIA's compiler takes vectors of shorts in pieces. */
#if X_TYPE == F32
#define VEC_WORDS VEC
#elif VEC == 16
#define VEC_WORDS 8
#elif VEC == 8
#define VEC_WORDS 4
#elif VEC == 4
#define VEC_WORDS 2
#else
#error "ALIGNED: vectors of at least 8 bytes are required"
#endif
typedef CAT(uint, VEC_WORDS) words_t;
#define as_words(v) CAT(as_uint, VEC_WORDS)(v)
#if X_TYPE == F32
#define from_words(w) (w)
#else
#define from_words(w) as_v(ushort)(w)
#endif
#endif

/* The values of VEC elements, exactly. */
static vfloat widen(vx raw)
{
#if X_TYPE == F32
    return as_v(float)(raw);
#elif X_TYPE == BF16 && ALIGNED /* by words: one instruction an element on a GPU */
    vfloat v;
    v.even = CAT(as_float, VEC_WORDS)(as_words(raw) << 16);
    v.odd = CAT(as_float, VEC_WORDS)(as_words(raw) & 0xffff0000u);
    return v;
#elif X_TYPE == BF16
    return as_v(float)(convert_v(uint)(raw) << 16);
#else
    return half_to_float(raw);
#endif
}

/* At any address: PoCL 3.1 stores vstore16 byte by byte, a packed structure at once. */
typedef struct __attribute__((packed)) { vx v; } packed_x_t;

/* The bits of VEC elements at p.  left: elements of the block from here on; only an odd row read in
   pairs (VEC 2) may see 1, and reads its last element twice. */
static vx load_x(__global const x_t *p, uint left)
{
#if ALIGNED
    return from_words(*(__global const words_t *)p);
#elif VEC == 2
    return (vx)(p[0], p[left > 1]);
#else
    return ((__global const packed_x_t *)p)->v;
#endif
}

/* Rounds to the element type and writes VEC elements; one element when left is 1 (see load_x). */
static void store_x(__global x_t *p, vfloat v, uint left)
{
#if X_TYPE == F32
    const vx raw = as_v(uint)(v);
#elif X_TYPE == BF16
    const vx raw = float_to_bfloat16(v);
#else
    const vx raw = float_to_half(v);
#endif
#if ALIGNED
    *(__global words_t *)p = as_words(raw);
#elif VEC == 2
    p[0] = raw.x;
    if (left > 1)
        p[1] = raw.y;
#else
    ((__global packed_x_t *)p)->v = raw;
#endif
}

#if WALKS_PAIRS
typedef CAT(float, VEC_WORDS) wfloat;

/* The values of the elements in the low and in the high halves of words. */
static wfloat low_values(words_t w) { return CAT(as_float, VEC_WORDS)(w << 16); }
static wfloat high_values(words_t w) { return CAT(as_float, VEC_WORDS)(w & 0xffff0000u); }

/* The low halves of both, side by side. */
static vx low_halves(wfloat low, wfloat high)
{
    return from_words((CAT(as_uint, VEC_WORDS)(low) & 0xffffu) | (CAT(as_uint, VEC_WORDS)(high) << 16));
}

/* The high halves of both, side by side. */
static vx high_halves(wfloat low, wfloat high)
{
    return from_words((CAT(as_uint, VEC_WORDS)(low) >> 16) | (CAT(as_uint, VEC_WORDS)(high) & 0xffff0000u));
}

#if STREAM && defined(__clang__)
#define store_pairs(p, what, type) __builtin_nontemporal_store(what, (__global type *)(p))
#else
#define store_pairs(p, what, type) (((__global packed_##type *)(p))->v = (what))
#endif
typedef struct __attribute__((packed)) { vuint v; } packed_vuint;
typedef struct __attribute__((packed)) { vuchar v; } packed_vuchar;
typedef packed_x_t packed_vx;
#endif

#if FMA
#define multiply_add(a, b, c) fma(a, b, c)
#else
#define multiply_add(a, b, c) ((a) * (b) + (c))
#endif

/* ---- correctly rounded division ---- */

#if DIVIDE == DIVIDE_INT
/* a / b to nearest even for b > 0, by long division of the mantissas; limits as of divide(). */
static vfloat divide_long(vfloat a, vuint b)
{
    const vuint bits = as_v(uint)(a);
    const vuint magnitude = bits & 0x7fffffffu;
    const vuint mb = (b & 0x7fffffu) | 0x800000u;
    vuint rest = (bits & 0x7fffffu) | 0x800000u;
    vint e = as_v(int)(magnitude >> 23) - as_v(int)(b >> 23) + 126;
    e = rest < mb ? e - 1 : e;
    rest = rest < mb ? rest << 1 : rest;
    vuint q = (vuint)(0u); /* 24 bits and a guard bit, one a round */
    for (int i = 0; i < 25; i++) {
        q = (q << 1) | (rest >= mb ? (vuint)(1u) : (vuint)(0u));
        rest = (rest >= mb ? rest - mb : rest) << 1;
    }
    const vuint odd = (q >> 1) | (rest != 0u ? (vuint)(1u) : (vuint)(0u));
    vuint r = as_v(uint)(e << 23) + (q >> 1) + (q & odd & 1u);
    r = e < 1 ? (vuint)(0u) : r;
    r = e > 252 ? (vuint)(0x7f800000u) : r;
    r = magnitude < 0x800000u ? (vuint)(0u) : r;
    r = magnitude >= 0x7f800000u ? magnitude : r;
    return as_v(float)(r | (bits & 0x80000000u));
}
#endif

/* 1 / v to nearest even for 1 <= v <= 2^126. */
static vfloat reciprocal(vfloat v)
{
#if DIVIDE == DIVIDE_NATIVE
    return 1.0f / v;
#elif DIVIDE == DIVIDE_FMA
    /* Two Newton steps from the driver's 2.5 ulp or less; the last one rounds correctly (Markstein 1990). */
#if CONVERT_NV && VEC >= 2
    vfloat y = CAT(nv_reciprocal_, VEC)(v);
#else
    vfloat y = 1.0f / v;
#endif
    y = fma(fma(-v, y, (vfloat)(1.0f)), y, y);
    return fma(fma(-v, y, (vfloat)(1.0f)), y, y);
#else
    return divide_long((vfloat)(1.0f), as_v(uint)(v));
#endif
}

/* A divisor with all that can be computed before the elements are known. */
typedef struct {
    float value;      /* positive and normal */
    float inverse;    /* 1 / value, correctly rounded (DIVIDE_FMA) */
    float mantissa;   /* value * power, in [1, 2) */
    float power;      /* a power of two */
    float reciprocal; /* 1 / mantissa, correctly rounded (DIVIDE_FMA) */
} divisor_t;

/* Whether divide() may take the short way with this divisor: no residual can be subnormal, no quotient
   of a float32 that is not tiny overflows. */
static bool is_plain(float value)
{
    return value > 0x1p-60f && value < 0x1p60f;
}

/* value: 2^-110 to 2^127. */
static divisor_t divisor(float value)
{
    divisor_t d;
    d.value = value;
    d.power = as_float(0x7f000000u - (as_uint(value) & 0x7f800000u));
    d.mantissa = value * d.power;
#if DIVIDE == DIVIDE_FMA
    d.reciprocal = first(reciprocal((vfloat)(d.mantissa)));
#else
    d.reciprocal = 0.0f;
#endif
    d.inverse = d.reciprocal * d.power;
    return d;
}

/* a / d.value to nearest even for 2^-80 <= |a / d.value| < 2^100.  A smaller quotient may come out
   as any value that small, a larger one as any value that large, with a's sign; NaN stays NaN.
   plain: a promise that is_plain(d.value) and that |a / d.value| < 2^20; then 2^-20 is the lower end. */
static vfloat divide(vfloat a, divisor_t d, const bool plain)
{
#if DIVIDE == DIVIDE_NATIVE
    return a / d.value;
#elif DIVIDE == DIVIDE_FMA
    /* Otherwise the divisor is scaled into [1, 2) so that no residual is subnormal: some devices flush
       those.  The first step makes q faithful, the second rounds it (Markstein 1990, theorem 8). */
    const vfloat m = (vfloat)(plain ? d.value : d.mantissa);
    const vfloat y = (vfloat)(plain ? d.inverse : d.reciprocal);
    const vfloat s = plain ? a : a * d.power;
    const vfloat q0 = s * y;
    const vfloat q1 = fma(-fma(q0, m, -s), y, q0); /* the residual negated: -0.0 stays -0.0 */
    const vfloat q2 = fma(-fma(q1, m, -s), y, q1);
    if (plain)
        return q2;
    return fabs(q0) < 0x1p100f ? q2 : q0; /* Inf * 0 in a residual would make NaN of Inf */
#else
    return divide_long(a, (vuint)(as_uint(d.value)));
#endif
}

/* a / d.value for 0 <= a, to nearest even; for quotients above 2^-100. */
static vfloat divide_any(vfloat a, divisor_t d)
{
    const vfloat up = a < (vfloat)(1.0f) ? (vfloat)(0x1p64f) : (vfloat)(0x1p-64f); /* moves any float32 into divide()'s range */
    const vfloat down = a < (vfloat)(1.0f) ? (vfloat)(0x1p-64f) : (vfloat)(0x1p64f);
    return divide(a * up, d, false) * down;
}

/* The same for one number. */
static float divide_one(float a, divisor_t d)
{
    return first(divide_any((vfloat)(a), d));
}

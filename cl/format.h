/* format.h - the storage formats: one encode and one decode for all.  OpenCL C 1.2.

The only place with #if FORMAT.  Included after common.h.

Macros (required)
    FORMAT      FP8_E4M3FN | FP8_E5M2 | INT8 | INT4
    SCALE_TYPE  F32 | F16        type of the stored scales and mins

Every value has one code of 8 bits; INT4 packs two codes into a byte, the even index in the low
nibble (PACK 2).  A new format needs LARGEST, encode() and decode() here and a row in formats.py.
Reference: pyclquant/reference.py; OCP 8-bit Floating Point Specification 1.0 for the FP8 formats.
*/
#define FP8_E4M3FN 1
#define FP8_E5M2 2
#define INT8 3
#define INT4 4

#ifndef FORMAT
#error "FORMAT: FP8_E4M3FN, FP8_E5M2, INT8 or INT4 is required"
#endif
#ifndef SCALE_TYPE
#error "SCALE_TYPE: F32 or F16 is required"
#endif

#if FORMAT == FP8_E4M3FN
#define LARGEST 448.0f
#define EBITS 4
#define MBITS 3
#elif FORMAT == FP8_E5M2
#define LARGEST 57344.0f
#define EBITS 5
#define MBITS 2
#elif FORMAT == INT8
#define LARGEST 127.0f
#else
#define LARGEST 15.0f
#endif
#define ASYMMETRIC (FORMAT == INT4) /* a block has a minimum beside its scale */
#if FORMAT == INT4
#define PACK 2 /* codes in a byte */
#else
#define PACK 1
#endif

/* ---- codes ---- */

/* Codes of values already divided by their scale.  plain: a promise that every value is finite and
   rounds to no more than LARGEST in magnitude; then NaN, Inf and saturation cost nothing. */

#if CONVERT_NV && VEC >= 2 && FORMAT == FP8_E4M3FN
static vuchar encode(vfloat v, const bool plain) { return CAT(nv_float_to_e4m3_, VEC)(v); }

#elif CONVERT_NV && VEC >= 2 && FORMAT == FP8_E5M2
static vuchar encode(vfloat v, const bool plain) { return CAT(nv_float_to_e5m2_, VEC)(v); }

#elif FORMAT == FP8_E4M3FN || FORMAT == FP8_E5M2
static vuchar encode(vfloat v, const bool plain)
{
    const vuint bits = as_v(uint)(v);
    const vuint a = bits & 0x7fffffffu;
    vuint code = small_float_encode(plain ? a : min(a, (vuint)(as_uint(LARGEST))), EBITS, MBITS) | ((bits >> 24) & 0x80u);
    if (!plain)
        code = a > 0x7f800000u ? (vuint)(0x7fu) : code;
    return convert_v(uchar)(code & 0xffu);
}

#else /* INT8, INT4 */
/* The rounded value is in the low bits of the sum with 1.5 * 2^23. */
static vuint encode_int(vfloat v, const bool plain)
{
    if (!plain) {
        const vfloat least = (vfloat)(ASYMMETRIC ? 0.0f : -LARGEST);
        const vfloat largest = (vfloat)(LARGEST);
        v = v == v ? v : (vfloat)(0.0f);
        v = v < largest ? v : largest;
        v = v > least ? v : least;
    }
    return as_v(uint)(v + 0x1.8p23f);
}

static vuchar encode(vfloat v, const bool plain) { return convert_v(uchar)(encode_int(v, plain) & 0xffu); }
#endif

static vfloat decode(vuchar codes)
{
#if FORMAT == INT8
    return convert_v(float)(as_v(char)(codes));
#elif FORMAT == INT4
    return convert_v(float)(codes);
#elif CONVERT_NV && VEC >= 2 && FORMAT == FP8_E4M3FN
    return CAT(nv_e4m3_to_float_, VEC)(codes);
#elif CONVERT_NV && VEC >= 2
    return CAT(nv_e5m2_to_float_, VEC)(codes);
#else
    const vuint code = convert_v(uint)(codes);
    const vuint a = code & 0x7fu;
    vuint value = as_v(uint)(small_float_decode(a, EBITS, MBITS));
#if FORMAT == FP8_E4M3FN
    value = a == 0x7fu ? (vuint)(0x7fc00000u) : value;
#else
    value = a >= 0x7cu ? 0x7f800000u | (a << 21) : value;
#endif
    return as_v(float)(value | ((code & 0x80u) << 24));
#endif
}

/* The bytes that hold VEC codes, and the integers as which aligned ones are moved. */
#if VEC == 1 && FORMAT == INT4
#error "INT4: VEC of at least 2 is required, a work-item owns whole bytes"
#elif VEC == 16 && FORMAT != INT4
typedef uchar16 bytes_t;
typedef uint4 moved_t;
#define as_moved as_uint4
#define as_bytes as_uchar16
#elif VEC / PACK == 8
typedef uchar8 bytes_t;
typedef uint2 moved_t;
#define as_moved as_uint2
#define as_bytes as_uchar8
#elif VEC / PACK == 4
typedef uchar4 bytes_t;
typedef uint moved_t;
#define as_moved as_uint
#define as_bytes as_uchar4
#elif VEC / PACK == 2
typedef uchar2 bytes_t;
typedef ushort moved_t;
#define as_moved as_ushort
#define as_bytes as_uchar2
#else
typedef uchar bytes_t;
typedef uchar moved_t;
#define as_moved
#define as_bytes
#endif
typedef struct __attribute__((packed)) { bytes_t v; } packed_bytes_t;

/* Packs the codes of VEC values already divided by their scale; plain as in encode(), left as in load_x:
   an odd row's spare nibble is 0. */
static bytes_t encode_packed(vfloat v, const bool plain, uint left)
{
#if FORMAT != INT4
    return encode(v, plain);
#elif VEC == 2
    const uchar2 codes = encode(v, plain);
    return left > 1 ? (uchar)(codes.x | (codes.y << 4)) : codes.x;
#elif ALIGNED && VEC == 8 /* a multiplication and addition an element: the codes add up without a carry */
    const uint8 u = encode_int(v, plain);
    const uint4 two = u.odd * 16u + u.even;
    const uint2 four = two.odd * 256u + two.even;
    return as_uchar4(four.y * 65536u + four.x - as_uint(0x1.8p23f) * 0x11111111u);
#else
    const vuchar codes = encode(v, plain);
    return codes.even | (codes.odd << (uchar)4);
#endif
}

static void store_bytes(__global uchar *p, bytes_t bytes)
{
#if ALIGNED
    *(__global moved_t *)p = as_moved(bytes);
#else
    ((__global packed_bytes_t *)p)->v = bytes;
#endif
}

/* VEC codes, one a byte, from memory. */
static vuchar load_codes(__global const uchar *p)
{
#if ALIGNED
    const bytes_t bytes = as_bytes(*(__global const moved_t *)p);
#else
    const bytes_t bytes = ((__global const packed_bytes_t *)p)->v;
#endif
#if FORMAT == INT4
    vuchar codes;
    codes.even = bytes & (uchar)15;
    codes.odd = bytes >> (uchar)4;
    return codes;
#else
    return bytes;
#endif
}

#if WALKS_PAIRS && !ASYMMETRIC
/* ---- pairs ---- */

/* Bits of bfloat16 are taken two in a word and stay there: half of the work is done on 16-bit integers, and nothing is
   widened or narrowed but codes. */

/* How the elements of a plain block become codes. */
typedef struct {
    float inverse; /* PAIR_FACTOR / scale, correctly rounded */
    float rest;    /* PAIR_FACTOR / scale - inverse, to 24 bits */
    ushort shift;  /* bits of the least bfloat16 >= scale, less PAIR_EXPONENT << 7 */
} pair_divisor_t;

/* FP8: the exponent field of a float32 whose last bit is that of the code of 1, the quotients being multiplied by
   PAIR_FACTOR; the factor is such that the field << MBITS, in 7 bits, is the code of 1 without its significand. */
#if FORMAT == FP8_E4M3FN
#define PAIR_FACTOR 0x1p3f
#define PAIR_EXPONENT (127 + 20 + 3)
#elif FORMAT == FP8_E5M2
#define PAIR_FACTOR 0x1p-6f
#define PAIR_EXPONENT (127 + 21 - 6)
#else
#define PAIR_FACTOR 1.0f
#define PAIR_EXPONENT 127
#endif

/* x / scale * PAIR_FACTOR to nearest even, for a scale that is a bfloat16 divided by LARGEST, between 2^-60 and 2^60; a zero
   may have either sign, a quotient below 2^-60 may be any as small.
   inverse + rest is PAIR_FACTOR / scale but for 2^-47 of it, and x * rest is rounded by 2^-48 of the quotient: the sum,
   rounded once, is the right float unless the quotient lies within 2^-46 of the middle between two.  With 8 bits in x and
   in the dividend of the scale there are 2^14 pairs of significands, none of which goes wrong: tests/test_kv.py tries all. */
static wfloat pair_quotient(wfloat x, pair_divisor_t d)
{
    return fma(x, (wfloat)(d.inverse), x * d.rest);
}

/* Codes of the elements raw of a plain block. */
static vuchar encode_pairs(vx raw, pair_divisor_t d)
{
#if FORMAT == INT8
    const words_t w = as_words(raw);
    const wfloat low = pair_quotient(low_values(w), d), high = pair_quotient(high_values(w), d);
    return convert_v(uchar)(low_halves(low + 0x1.8p23f, high + 0x1.8p23f));
#else
    /* As small_float_encode(); but the exponent of |x| / scale is found from the bits of both, which count up with the
       values, and the exponent's part of the code is added to both halves of a word at once. */
    const vx x = raw & (ushort)0x7fff;
    const V(short) least = (V(short))((PAIR_EXPONENT + 2 - (1 << (EBITS - 1))) << 7);
    const vx e = as_v(ushort)(max(as_v(short)(x - d.shift), least)) & (ushort)0xff80;
    const words_t w = as_words(x), m = as_words(e);
    const wfloat low = pair_quotient(low_values(w), d), high = pair_quotient(high_values(w), d);
    const vx significand = low_halves(low + low_values(m), high + high_values(m));
    const vx code = significand + (e >> (ushort)EBITS);
    return convert_v(uchar)((code & (ushort)0xff7f) | ((raw >> (ushort)8) & (ushort)0x80));
#endif
}

/* Whether one of n codes is NaN or Inf. */
static bool has_special(__global const uchar *codes, uint n)
{
#if FORMAT == INT8
    return false;
#else
    vuint found = (vuint)(0u);
#pragma unroll
    for (uint k = 0; k < n; k += 4 * VEC)
        found |= (((__global const packed_vuint *)(codes + k))->v & 0x7f7f7f7fu) + (FORMAT == FP8_E4M3FN ? 0x01010101u : 0x04040404u);
#if VEC == 16
    const uint8 a = found.lo | found.hi;
#else
    const uint8 a = found;
#endif
    const uint4 b = a.lo | a.hi;
    const uint2 c = b.lo | b.hi;
    return ((c.x | c.y) & 0x80808080u) != 0u;
#endif
}

/* The bits of finite codes * scale, rounded to float32 and then to bfloat16; 2^-60 < scale < PAIR_SCALE. */
#define PAIR_SCALE (FORMAT == INT8 ? 0x1p60f : FORMAT == FP8_E4M3FN ? 0x1p7f : 0x1p15f)
static vx decode_pairs(vuchar codes, float scale)
{
    const V(short) c = convert_v(short)(as_v(char)(codes));
#if FORMAT == INT8
    /* An integer that begins in the middle of a word is 2^16 times itself. */
    const words_t w = as_words(c);
    const float s = scale * 0x1p-16f;
    const wfloat low = CAT(convert_float, VEC_WORDS)(CAT(as_int, VEC_WORDS)(w << 16)) * s;
    const wfloat high = CAT(convert_float, VEC_WORDS)(CAT(as_int, VEC_WORDS)(w & 0xffff0000u)) * s;
#else
    /* A code's bits, moved to where bfloat16 has sign, exponent and mantissa, are its value times a power of two, a
       subnormal's too; the product with the rest of that power is exact before it is rounded. */
    const words_t w = as_words(c << (short)(7 - MBITS)) & (FORMAT == FP8_E4M3FN ? 0x87f087f0u : 0x8fe08fe0u);
    const float s = scale * (FORMAT == FP8_E4M3FN ? 0x1p120f : 0x1p112f);
    const wfloat low = low_values(w) * s, high = high_values(w) * s;
#endif
    /* Up when the lower half is more than one half of the upper one's last bit, or just that and the last bit is odd. */
    const vx upper = high_halves(low, high);
    const vx lower = low_halves(low, high);
    return upper - as_v(ushort)((lower | (upper & (ushort)1)) > (ushort)0x8000);
}
#endif

/* ---- scales ---- */

#if SCALE_TYPE == F32
#define scale_t float
#else
#define scale_t ushort
#endif

static void store_scale(__global scale_t *p, float v)
{
#if SCALE_TYPE == F32
    *p = v;
#else
    *p = first(float_to_half((vfloat)(v)));
#endif
}

static float load_scale(__global const scale_t *p)
{
#if SCALE_TYPE == F32
    return *p;
#else
    return first(half_to_float((vushort)(*p)));
#endif
}

/* The value that comes back for a stored positive scale or a stored min; codes are made from it. */
static float round_scale(float v)
{
#if SCALE_TYPE == F32
    return v;
#else
    return first(half_to_float(float_to_half((vfloat)(clamp(v, 0x1p-14f, 65504.0f)))));
#endif
}

static float round_min(float v)
{
#if SCALE_TYPE == F32
    return v;
#else
    return first(half_to_float(float_to_half((vfloat)(clamp(v, -65504.0f, 65504.0f)))));
#endif
}

/* ---- blocks ---- */

/* Block number b of rows cut into blocks: its first element, where its codes begin, its length. */
typedef struct { size_t x, codes; uint size; } span_t;

static span_t block_span(size_t b, ulong dim, uint block, uint blocks_per_row)
{
    span_t s;
    size_t row = b;
    size_t column = 0;
    if (blocks_per_row != 1) {
        row = b / blocks_per_row;
        column = (b - row * blocks_per_row) * block;
    }
    s.x = row * (size_t)dim + column;
    s.codes = row * (size_t)((dim + PACK - 1) / PACK) + column / PACK;
    s.size = (uint)min((size_t)block, (size_t)dim - column);
    return s;
}

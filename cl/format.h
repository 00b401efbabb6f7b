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

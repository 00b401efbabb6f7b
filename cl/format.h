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
#define PACK (FORMAT == INT4 ? 2 : 1) /* codes in a byte */

/* ---- codes ---- */

#if CONVERT_NV && VEC >= 2 && FORMAT == FP8_E4M3FN
static vuchar encode(vfloat v) { return CAT(nv_to_e4m3_, VEC)(v); }

#elif CONVERT_NV && VEC >= 2 && FORMAT == FP8_E5M2
static vuchar encode(vfloat v) { return CAT(nv_to_e5m2_, VEC)(v); }

#elif FORMAT == FP8_E4M3FN || FORMAT == FP8_E5M2
static vuchar encode(vfloat v)
{
    const vuint bits = as_v(uint)(v);
    const vuint a = bits & 0x7fffffffu;
    const vuint largest = (vuint)(as_uint(LARGEST));
    vuint code = small_float_encode(min(a, largest), EBITS, MBITS);
    code = a > 0x7f800000u ? (vuint)(0x7fu) : code | ((bits >> 24) & 0x80u);
    return convert_v(uchar)(code);
}

#else /* INT8, INT4: the sum with 1.5 * 2^23 has the rounded integer in its low bits */
static vuchar encode(vfloat v)
{
    const vfloat least = (vfloat)(ASYMMETRIC ? 0.0f : -LARGEST);
    const vfloat largest = (vfloat)(LARGEST);
    v = v == v ? v : (vfloat)(0.0f);
    v = v < largest ? v : largest;
    v = v > least ? v : least;
    return convert_v(uchar)(as_v(uint)(v + 0x1.8p23f) & 0xffu);
}
#endif

static vfloat decode(vuchar codes)
{
#if FORMAT == INT8
    return convert_v(float)(as_v(char)(codes));
#elif FORMAT == INT4
    return convert_v(float)(codes);
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

#if FORMAT == INT4
#if VEC == 16
#define BYTES 8 /* that hold VEC codes */
#elif VEC == 8
#define BYTES 4
#elif VEC == 4
#define BYTES 2
#elif VEC == 1
#error "INT4: VEC of at least 2 is required, a work-item owns whole bytes"
#endif
#else
#define BYTES VEC
#endif

/* VEC codes to memory.  left as in load_x: an odd row's spare nibble is 0. */
static void store_codes(__global uchar *p, vuchar codes, size_t left)
{
#if FORMAT == INT4 && VEC == 2
    *p = left > 1 ? (uchar)(codes.x | (codes.y << 4)) : codes.x;
#else
#if FORMAT == INT4
    const CAT(uchar, BYTES) raw = codes.even | (codes.odd << (uchar)4);
#else
    const vuchar raw = codes;
#endif
#if VEC == 1
    *p = raw;
#elif ALIGNED
    *(__global CAT(uchar, BYTES) *)p = raw;
#else
    CAT(vstore, BYTES)(raw, 0, p);
#endif
#endif
}

/* The counterpart of store_codes. */
static vuchar load_codes(__global const uchar *p)
{
#if FORMAT == INT4 && VEC == 2
    return (uchar2)(*p & 15, *p >> 4);
#else
#if VEC == 1
    const uchar raw = *p;
#elif ALIGNED
    const CAT(uchar, BYTES) raw = *(__global const CAT(uchar, BYTES) *)p;
#else
    const CAT(uchar, BYTES) raw = CAT(vload, BYTES)(0, p);
#endif
#if FORMAT == INT4
    vuchar codes;
    codes.even = raw & (uchar)15;
    codes.odd = raw >> (uchar)4;
    return codes;
#else
    return raw;
#endif
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
typedef struct { size_t x, codes, size; } span_t;

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
    s.size = min((size_t)block, (size_t)dim - column);
    return s;
}

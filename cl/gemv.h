/* gemv.h - what the W8A8 GEMV kernels share: segments, codes in words, the output.  OpenCL C 1.2.

Included after common.h by gemv_w8a8*.cl.

Macros
    SCALES  PER_ROW: a weight scale for each row, an activation scale for each row
            BLOCK_128: a weight scale for each 128 x 128 block, an activation scale for each 128 columns
    DENORMALS  1: float32 subnormals are kept as operands and results, decoding weights takes three operations;
               0 (default): it takes a few more
    X_TYPE VEC FMA HALF  see common.h; X_TYPE is the type of the output, VEC counts words of four codes
Reference: pyclquant/reference.py: gemv().
*/
#define PER_ROW 1
#define BLOCK_128 2
#define CHUNK 128 /* columns that share a scale in BLOCK_128; K is a multiple of it */

#ifndef SCALES
#error "SCALES: PER_ROW or BLOCK_128 is required"
#endif
#ifndef DENORMALS
#define DENORMALS 0
#endif

/* ---- segments ---- */

/* Consecutive rows of the output that come from one weight: its codes [rows, k], its scales, the row of the
   output where it begins. */
typedef struct {
    __global const uchar *codes;
    __global const float *scales;
    uint start, rows;
} segment_t;

static segment_t segment(__global const uchar *codes, ulong codes_offset, __global const float *scales, ulong scales_offset,
                         uint start, uint end)
{
    segment_t s;
    s.codes = codes + codes_offset;
    s.scales = scales + scales_offset;
    s.start = start;
    s.rows = end - start;
    return s;
}

/* The scale of a row of the segment, BLOCK_128 in chunk c of `chunks`. */
static float weight_scale(segment_t s, uint row, uint c, uint chunks)
{
#if SCALES == PER_ROW
    return s.scales[row];
#else
    return s.scales[(size_t)(row / CHUNK) * chunks + c];
#endif
}

/* ---- codes ---- */

/* Four codes of a row in each 32-bit word, the first in the low byte: byte j of VEC words are VEC codes. */

#if DENORMALS
/* A code's bits, moved to where float32 has sign, exponent and mantissa, are its value times 2^-120.  The
   activations are multiplied by 2^112, the largest power that keeps them finite, and 2^8 is left to the end. */
#define ACTIVATION_FACTOR 0x1p112f
#define RESULT_FACTOR 0x1p8f
static vfloat weights(vuint words, uint j)
{
    return as_v(float)(as_v(uint)(as_v(int)(words << (24 - 8 * j)) >> 4) & 0x87f00000u);
}
#else
#define ACTIVATION_FACTOR 1.0f
#define RESULT_FACTOR 1.0f
static vfloat weights(vuint words, uint j)
{
    const vuint b = words >> (8 * j);
    return as_v(float)(as_v(uint)(small_float_decode(b & 0x7fu, 4, 3)) | ((b & 0x80u) << 24));
}
#endif

/* The values of activation codes, times ACTIVATION_FACTOR.  With a NaN among its four codes a word is all NaN: so is every sum. */
static vfloat activations(vuint words, uint j)
{
    const vuint nan = ((words & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
    const vfloat factor = nan != 0u ? (vfloat)(NAN) : (vfloat)(ACTIVATION_FACTOR);
#if DENORMALS
    return weights(words, j) * 0x1p120f * factor;
#else
    return weights(words, j) * factor;
#endif
}

/* ---- output ---- */

/* Rounds to the type of the output and writes one element. */
static void store_output(__global x_t *p, float v)
{
#if X_TYPE == F32
    *p = as_uint(v);
#elif X_TYPE == BF16
    *p = first(float_to_bfloat16((vfloat)(v)));
#else
    *p = first(float_to_half((vfloat)(v)));
#endif
}

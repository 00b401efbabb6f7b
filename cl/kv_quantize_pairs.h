/* kv_quantize_pairs.h - blocks of bfloat16 one after the other, two elements in a word: how a CPU core quantizes K/V.  OpenCL C 1.2.

Included by kv_quantize.cl with PAIRS (see common.h), for one float32 scale a block.  Scales of VEC blocks are found at once: their
divisions cost as much as those of one.  A block that is not plain is left to prepare() and emit() there.

Macros
    FORMAT PAIRS STREAM X86_BF16  see kv_quantize.cl, common.h, vendor.h
*/

#if ASYMMETRIC
/* Scales of VEC blocks, and what they are encoded with. */
typedef struct { vfloat scale, min, divisor, inverse; vint plain; } scales_t;
typedef struct __attribute__((packed)) { vfloat v; } packed_vfloat_t;

/* A step of the search for the extremes of several blocks: of a's and b's numbers the larger one of each pair. */
static vx larger_of_pairs(vx a, vx b)
{
    const V(short) even = as_v(short)((vx)(a.even, b.even)), odd = as_v(short)((vx)(a.odd, b.odd));
    return as_v(ushort)(max(even, odd));
}

/* Candidates for the extremes of a block: in the lower half keys of large elements, in the upper one complements of those of small
   ones.  A key is bits that order like the values, as signed integers: below zero a magnitude is complemented. */
static vx block_keys(__global const x_t *from)
{
    V(short) hi = (V(short))((short)-32768), lo = (V(short))((short)32767);
#pragma unroll
    for (uint k = 0; k < PAIRS * VEC; k += VEC) {
        const V(short) bits = as_v(short)(load_x(from + k, VEC));
        const V(short) key = bits ^ (bits >> (short)15 & (short)0x7fff);
        hi = max(hi, key);
        lo = min(lo, key);
    }
    return as_v(ushort)((V(short))(max(hi.lo, hi.hi), ~min(lo.lo, lo.hi)));
}

/* Values of the keys in the upper halves of words; a subnormal is zero. */
static vfloat key_values(vint keys)
{
    const vint bits = keys ^ (keys >> 31 & 0x7fff0000);
    return as_v(float)((bits & 0x7f800000) == 0 ? (vint)(0) : bits);
}

/* As block_parameters().  found: what block_keys() gave for VEC blocks. */
static scales_t block_scales(vx *found)
{
#pragma unroll
    for (uint n = VEC / 2; n > 1; n /= 2)
#pragma unroll
        for (uint i = 0; i < n; i++)
            found[i] = larger_of_pairs(found[2 * i], found[2 * i + 1]);
    /* A block is now a word: its largest key below, the other one above. */
    const vint words = as_v(int)((vuint)(as_words(found[0]), as_words(found[1])));
    scales_t s;
    const vfloat high = key_values(words << 16);
    s.min = key_values(~words & (int)0xffff0000);
    const vfloat range = high - s.min;
    const vfloat quotient = divide_any(range, divisor(LARGEST));
    const vint constant_block = range < (vfloat)(0x1p-100f);
    s.plain = constant_block | (quotient > (vfloat)(0x1p-60f) & quotient < (vfloat)(0x1p60f)); /* NaN and Inf give neither */
    s.scale = constant_block ? (vfloat)(0.0f) : quotient;
    s.divisor = s.plain & ~constant_block ? quotient : (vfloat)(1.0f);
    const vfloat y = 1.0f / s.divisor; /* as reciprocal(), which takes 1 or more */
    const vfloat z = fma(fma(-s.divisor, y, (vfloat)(1.0f)), y, y);
    s.inverse = fma(fma(-s.divisor, z, (vfloat)(1.0f)), z, z);
    return s;
}

/* The code of each of (x - low) / scale in the low bits.  The residual makes the quotient right but for 2^-22 of its last bit: it
   comes out wrong only that near to the middle between two floats.  Of those beside n + 0.5, where the code would be another one,
   few scales have one so near, and for none of them it does: tests/test_kv.py tries all. */
static vuint encode_differences(vfloat x, float low, float scale, float inverse)
{
    const vfloat v = x - low;
    const vfloat q = v * inverse;
    return as_v(uint)(fma(fma(-q, (vfloat)(scale), v), (vfloat)(inverse), q) + 0x1.8p23f);
}

/* Writes the codes of plain block i of VEC. */
static void encode_block(__global const x_t *from, __global uchar *to, const scales_t *s, uint i)
{
    const float low = ((const float *)&s->min)[i], scale = ((const float *)&s->divisor)[i], inverse = ((const float *)&s->inverse)[i];
#pragma unroll
    for (uint k = 0; k < PAIRS * VEC; k += 2 * VEC) {
        const vuint words = ((__global const packed_vuint *)(from + k))->v;
        const vuint even = encode_differences(as_v(float)(words << 16), low, scale, inverse);
        const vuint odd = encode_differences(as_v(float)(words & 0xffff0000u), low, scale, inverse);
        store_pairs(to + k / 2, convert_v(uchar)(((odd << 4) + even) & 0xffu), vuchar);
    }
}

/* Quantizes blocks first..end.  While a block is encoded, the extremes of the one VEC further on are sought: neither waits for the
   other. */
static void quantize_rows(__global const x_t *x, __global uchar *codes, __global scale_t *scales, __global scale_t *mins, size_t first,
                          size_t end, ulong dim, float eps, __local TEAM_T *scratch)
{
    const uint block = PAIRS * VEC;
    if (first >= end)
        return;
    vx found[VEC];
    for (uint i = 0; i < VEC; i++)
        found[i] = block_keys(x + min(first + i, end - 1) * block);
    for (size_t b = first; b < end; b += VEC) {
        const scales_t s = block_scales(found);
        const bool all_plain = end - b >= VEC && all(s.plain);
        if (all_plain) {
            ((__global packed_vfloat_t *)(scales + b))->v = s.scale;
            ((__global packed_vfloat_t *)(mins + b))->v = s.min;
        }
        for (uint i = 0; i < VEC && b + i < end; i++) {
            __global const x_t *from = x + (b + i) * block;
            found[i] = block_keys(x + min(b + VEC + i, end - 1) * block);
#if X86_BF16
#pragma unroll
            for (uint k = 0; k < block; k += 2 * VEC)
                x86_prefetch(from + 16384 + k);
#endif
            if (!all_plain && !((const int *)&s.plain)[i]) {
                emit(prepare(b + i, x, 0, end, dim, block, 1, eps, 0, scratch), codes, scales, mins, 0);
                continue;
            }
            if (!all_plain) {
                scales[b + i] = ((const float *)&s.scale)[i];
                mins[b + i] = ((const float *)&s.min)[i];
            }
            encode_block(from, codes + (b + i) * (block / 2), &s, i);
        }
    }
}
#else
/* Writes the codes of a plain block, 4 * VEC at a time. */
static void encode_block(__global const x_t *from, __global uchar *to, pair_divisor_t d)
{
#pragma unroll
    for (uint k = 0; k < PAIRS * VEC; k += 4 * VEC) {
        const moved_t a = as_moved(encode_pairs(load_x(from + k, VEC), d));
        const moved_t b = as_moved(encode_pairs(load_x(from + k + VEC, VEC), d));
        const moved_t c = as_moved(encode_pairs(load_x(from + k + 2 * VEC, VEC), d));
        const moved_t e = as_moved(encode_pairs(load_x(from + k + 3 * VEC, VEC), d));
        store_pairs(to + k, ((vuint)(a, b, c, e)), vuint);
    }
}

/* Scales of VEC blocks, as one vector: their divisions cost as much as those of one.  One that is not plain is 1. */
typedef struct { vfloat scale; vint plain; } scales_t;

static scales_t block_scales(vx amax, float eps)
{
    scales_t s;
    const vfloat quotient = divide_any(widen(amax), divisor(LARGEST));
    s.plain = quotient > (vfloat)(max(eps, 0x1p-60f)) && quotient < (vfloat)(0x1p60f);
    s.scale = s.plain ? quotient : (vfloat)(1.0f);
    return s;
}

typedef struct { vfloat inverse, rest; vuint shift; } pair_divisors_t;

static pair_divisors_t pair_divisors(vfloat scale)
{
    pair_divisors_t d;
    d.inverse = PAIR_FACTOR / scale;
    d.rest = fma(-scale, d.inverse, (vfloat)(PAIR_FACTOR)) * (d.inverse * (1.0f / PAIR_FACTOR));
    d.shift = ((as_v(uint)(scale) + 0xffffu) >> 16) - (PAIR_EXPONENT << 7);
    return d;
}

static pair_divisor_t pair_divisor(const pair_divisors_t *d, uint i)
{
    const pair_divisor_t one = { ((const float *)&d->inverse)[i], ((const float *)&d->rest)[i],
                                 (ushort)((const uint *)&d->shift)[i] };
    return one;
}

#define LOOKS_UP (X86_BF16 && VEC == 16 && FORMAT != INT8)

#if LOOKS_UP
/* A normal code depends on the significands of x and of amax, 7 bits each, but for its exponent, to which x's adds and from which
   that of amax takes away.  A table has a row of 128 bytes for each significand of amax, filled when that is first met, and a byte in
   it for each one of x.  No scale is needed: blocks are loaded once, and scales are found for VEC of them at once. */
typedef struct { uint16 lower, upper; } looked_up_t;
typedef struct __attribute__((packed)) { vfloat v; } packed_vfloat_t;

/* Exponents are added in the code's own place: there the low byte of the bits of a bfloat16, moved so far, has the low bits of its
   exponent, and below them bits of its significand, which the table takes away again. */
#define EXPONENT_SHIFT (7 - MBITS)

/* Blocks are looked up whose smallest magnitude is this near to the largest one, in bits: all their codes are normal. */
#define NEAR ((FORMAT == FP8_E4M3FN ? 14 : 29) << 7)

/* What is rare is not inlined, so that the loop over blocks keeps its constants in registers. */
static __attribute__((noinline)) void divide_block(__global const x_t *from, __global uchar *to, pair_divisor_t d)
{
    encode_block(from, to, d);
}

/* The row of the table for an amax, whose divisor is d. */
static __attribute__((noinline)) void fill_row(looked_up_t *row, ushort amax, pair_divisor_t d)
{
    const ushort below = (ushort)((amax & 0x7f80) - 0x80); /* half of amax's exponent: these quotients are normal and finite */
    for (uint k = 0; k < 128; k += 16) {
        const vx x = (vx)((ushort)(below + k)) + (vx)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const uchar16 code = encode_pairs(x, d) - convert_uchar16((x - (vx)((ushort)(amax & 0x7f80))) >> (ushort)EXPONENT_SHIFT);
        for (uint i = 0; i < 16; i++)
            ((uchar *)row)[k + i] = ((const uchar *)&code)[i];
    }
}

/* Quantizes blocks first..end.  A block that is not plain, or whose scale is eps, is left to the others' functions. */
static void quantize_rows(__global const x_t *x, __global uchar *codes, __global scale_t *scales, __global scale_t *mins, size_t first,
                          size_t end, ulong dim, float eps, __local TEAM_T *scratch)
{
    const uint block = PAIRS * VEC;
    looked_up_t table[128];
    uint4 known = (uint4)(0u); /* which of its rows are filled, a bit each */
    for (size_t b = first; b < end; b += VEC) {
        const uint count = (uint)min((size_t)VEC, end - b);
        vx amax = (vx)(0);
        uint rare = 0; /* which of these blocks are, a bit each */
        for (uint i = 0; i < count; i++) {
            __global const x_t *from = x + (b + i) * block;
            __global uchar *to = codes + (b + i) * block;
            uint16 held[PAIRS / 2];
            ushort16 hi = (ushort16)(0), lo = (ushort16)(0xffff);
#pragma unroll
            for (uint k = 0; k < PAIRS / 2; k++) {
                held[k] = ((__global const packed_vuint *)(from + 2 * k * VEC))->v;
                const ushort16 m = as_ushort16(held[k].lo & 0x7fff7fffu), n = as_ushort16(held[k].hi & 0x7fff7fffu);
                hi = max(hi, max(m, n));
                lo = min(lo, min(m, n));
            }
            const ushort16 both = (ushort16)(max(hi.lo, hi.hi), ~min(lo.lo, lo.hi)); /* the rest of both at once */
            const ushort8 b8 = max(both.even, both.odd);
            const ushort4 b4 = max(b8.even, b8.odd);
            const ushort2 extremes = max(b4.even, b4.odd);
            const uint top = extremes.x, bottom = (ushort)~extremes.y;
            const uint row = top & 0x7f;
            ((x_t *)&amax)[i] = (x_t)top;
            if (top - bottom > NEAR || !(((const uint *)&known)[row / 32] >> row % 32 & 1u)) {
                rare |= 1u << i;
                continue;
            } /* a block that turns out not to be plain is overwritten */
            const x86_bytes_t base = (x86_bytes_t)((uchar)((top & 0x7f80) >> EXPONENT_SHIFT));
            const uint16 lower = table[row].lower, upper = table[row].upper;
#pragma unroll
            for (uint k = 0; k < PAIRS / 2; k += 2) {
                const uint16 exponents = x86_every_other_byte(held[k] >> EXPONENT_SHIFT, held[k + 1] >> EXPONENT_SHIFT, 0);
                const uint16 significands = x86_look_up(lower, x86_every_other_byte(held[k], held[k + 1], 0), upper);
                const uint16 code = as_uint16(as_x86_bytes(exponents) - base + as_x86_bytes(significands));
                store_pairs(to + 2 * k * VEC, bitselect(code, x86_every_other_byte(held[k], held[k + 1], 1), (uint16)(0x80808080u)), vuint);
            }
        }
        const scales_t found = block_scales(amax, eps);
        if (rare == 0 && all(found.plain)) {
            ((__global packed_vfloat_t *)(scales + b))->v = found.scale;
            continue;
        }
        const pair_divisors_t divisors = pair_divisors(found.scale);
        for (uint i = 0; i < count; i++) {
            const ushort top = ((const x_t *)&amax)[i];
            const uint row = top & 0x7f;
            uint *word = (uint *)&known + row / 32;
            if (!((const int *)&found.plain)[i]) {
                emit(prepare(b + i, x, 0, end, dim, block, 1, eps, 0, scratch), codes, scales, 0, 0);
                continue;
            }
            scales[b + i] = ((const float *)&found.scale)[i];
            if (!(rare >> i & 1u))
                continue;
            const pair_divisor_t d = pair_divisor(&divisors, i);
            divide_block(x + (b + i) * block, codes + (b + i) * block, d);
            if (!(*word >> row % 32 & 1u)) {
                fill_row(table + row, top, d);
                *word |= 1u << row % 32;
            }
        }
    }
}
#else
/* Bits of the largest magnitude of a block. */
static x_t block_amax(__global const x_t *from)
{
    extremes_t e = { (vx)(0), (vx)(0) };
#pragma unroll
    for (uint k = 0; k < PAIRS * VEC; k += VEC)
        e = extend(e, load_x(from + k, VEC), false);
    return (x_t)hmax(e.hi);
}

/* Quantizes blocks first..end.  While a block is encoded, the largest magnitude of the one VEC further on is sought: neither waits
   for the other.  A block that is not plain, or whose scale is eps, is left to the others' functions. */
static void quantize_rows(__global const x_t *x, __global uchar *codes, __global scale_t *scales, __global scale_t *mins, size_t first,
                          size_t end, ulong dim, float eps, __local TEAM_T *scratch)
{
    const uint block = PAIRS * VEC;
    vx amax = (vx)(0);
    for (uint i = 0; i < VEC && first + i < end; i++)
        ((x_t *)&amax)[i] = block_amax(x + (first + i) * block);
    for (size_t b = first; b < end; b += VEC) {
        const scales_t found = block_scales(amax, eps);
        const pair_divisors_t divisors = pair_divisors(found.scale);
        for (uint i = 0; i < VEC && b + i < end; i++) {
            const size_t at = (b + i) * block;
            if (b + VEC + i < end)
                ((x_t *)&amax)[i] = block_amax(x + at + VEC * block);
#if X86_BF16 /* 32 kB ahead, whether there is anything or not: INT8 takes a tenth less time on PoCL 3.1 and Intel's CPU runtime */
#pragma unroll
            for (uint k = 0; k < block; k += 2 * VEC)
                x86_prefetch(x + at + 16384 + k);
#endif
            if (((const int *)&found.plain)[i]) {
                encode_block(x + at, codes + at, pair_divisor(&divisors, i));
                scales[b + i] = ((const float *)&found.scale)[i];
            } else {
                emit(prepare(b + i, x, 0, end, dim, block, 1, eps, 0, scratch), codes, scales, 0, 0);
            }
        }
    }
}
#endif
#endif

/* bench.cl - how fast the device reads, copies and computes: what `pyclquant bench` compares kernels with.

1. Computes
   bench_read   sums[i] = xor of all words that work-item i read
   bench_copy   dst = src
   bench_nothing        nothing: what a launch costs
   bench_multiply_add   sums[i] = sum over u, k of x[u][k], where each x[u][k] = local id + u, then steps times x * a + b

2. Layouts
   src   [vectors * VEC]    uint
   dst   [vectors * VEC]    uint
   sums  [global size]      uint; float of bench_multiply_add

3. Launch
   local size WG, any number of work-groups.
   CONTIGUOUS 1: work-item i walks the vectors [i * n, (i + 1) * n), n = ceil(vectors / global size).
   CONTIGUOUS 0: a work-group takes WG * UNROLL neighbouring vectors at a time, UNROLL a work-item;
   vectors is a multiple of WG * UNROLL.

4. Macros
   WG          local size
   VEC         4 (default), 8, 16    words of a vector
   CONTIGUOUS  0 (default) | 1
   UNROLL      vectors that a work-item has in flight with CONTIGUOUS 0, chains of bench_multiply_add, default 1
   FMA         1: x * a + b is fma(); 0 (default): a product and a sum, which a compiler may make one operation
   NONTEMPORAL 0 (default) | 1: stores pass the caches by (clang's builtin)

5. Needs
   OpenCL C 1.2.

6. Reference
   numpy.copyto, numpy.bitwise_xor.reduce, floor.multiplied_and_added.
*/
#ifndef WG
#error "WG: the local size is required"
#endif
#ifndef VEC
#define VEC 4
#endif
#ifndef CONTIGUOUS
#define CONTIGUOUS 0
#endif
#ifndef UNROLL
#define UNROLL 1
#endif
#ifndef FMA
#define FMA 0
#endif
#ifndef NONTEMPORAL
#define NONTEMPORAL 0
#endif

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
#define vuint PASTE(uint, VEC)
#define vfloat PASTE(float, VEC)

static void store(__global vuint *to, vuint v)
{
#if NONTEMPORAL
    __builtin_nontemporal_store(v, to);
#else
    *to = v;
#endif
}

/* Where a work-item begins, the distance of the vectors that it has in flight, of its steps, and its end. */
#if CONTIGUOUS
#define PIECE(vectors) (((vectors) + get_global_size(0) - 1) / get_global_size(0))
#define BEGIN(vectors) (get_global_id(0) * PIECE(vectors))
#define END(vectors) min((size_t)(vectors), BEGIN(vectors) + PIECE(vectors))
#define STEP 1
#define FLIGHT 1
#else
#define BEGIN(vectors) (get_group_id(0) * WG * UNROLL + get_local_id(0))
#define END(vectors) (size_t)(vectors)
#define STEP (get_num_groups(0) * WG * UNROLL)
#define FLIGHT UNROLL
#endif

__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void bench_read(__global const vuint *src, __global uint *sums, ulong vectors)
{
    vuint sum[FLIGHT];
    for (uint u = 0; u < FLIGHT; u++)
        sum[u] = (vuint)(0);
    for (size_t i = BEGIN(vectors), end = END(vectors), step = STEP; i < end; i += step)
        for (uint u = 0; u < FLIGHT; u++)
            sum[u] ^= src[i + u * WG];
    for (uint u = 1; u < FLIGHT; u++)
        sum[0] ^= sum[u];
    uint words[VEC];
    PASTE(vstore, VEC)(sum[0], 0, words);
    for (uint k = 1; k < VEC; k++)
        words[0] ^= words[k];
    sums[get_global_id(0)] = words[0];
}

__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void bench_copy(__global const vuint *src, __global vuint *dst, ulong vectors)
{
    vuint v[FLIGHT];
    for (size_t i = BEGIN(vectors), end = END(vectors), step = STEP; i < end; i += step) {
        for (uint u = 0; u < FLIGHT; u++)
            v[u] = src[i + u * WG];
        for (uint u = 0; u < FLIGHT; u++)
            store(dst + i + u * WG, v[u]);
    }
}

__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void bench_nothing(void)
{
}

static vfloat multiply_add(vfloat x, vfloat a, vfloat b)
{
#if FMA
    return fma(x, a, b);
#else
    return x * a + b;
#endif
}

__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void bench_multiply_add(__global float *sums, float a, float b, uint steps)
{
    const vfloat va = (vfloat)(a), vb = (vfloat)(b);
    vfloat x[UNROLL];
    /* registers, not an array in memory: PoCL 3.1 unrolls nothing by itself here */
#pragma unroll
    for (uint u = 0; u < UNROLL; u++)
        x[u] = (vfloat)((float)(get_local_id(0) + u));
    for (uint i = 0; i < steps; i++) {
#pragma unroll
        for (uint u = 0; u < UNROLL; u++)
            x[u] = multiply_add(x[u], va, vb);
    }
#pragma unroll
    for (uint u = 1; u < UNROLL; u++)
        x[0] += x[u];
    float terms[VEC];
    PASTE(vstore, VEC)(x[0], 0, terms);
    for (uint k = 1; k < VEC; k++)
        terms[0] += terms[k];
    sums[get_global_id(0)] = terms[0];
}

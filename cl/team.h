/* team.h - the reduction over a team.  OpenCL C 1.2.

Included after common.h by kernels that reduce.

Macros
    TEAM_T  what is reduced: uint or uint2 (defined by the kernel file)
    WG LANES SHUFFLE  see common.h, vendor.h
*/
#ifndef TEAM_T
#error "TEAM_T: uint or uint2 is required"
#endif

#if SHUFFLE || LANES == 1
#define TEAM_SLOTS 1 /* local memory of the reduction, in TEAM_T */
#else
#define TEAM_SLOTS WG
#endif

/* Largest v of the team (of each component), in every lane.  Every work-item of the work-group must
   call it.  scratch: TEAM_SLOTS elements.  Any LANES: the tree halves upwards, so no lane is dropped.
   always_inline: PoCL 3.0 and 3.1 share the __local array of a kernel between their threads when it
   reaches a function that was not inlined, and give wrong maxima now and then. */
__attribute__((always_inline))
static TEAM_T team_max(TEAM_T v, __local TEAM_T *scratch)
{
#if LANES == 1
    return v;
#elif SHUFFLE
    for (uint step = LANES / 2; step > 0; step >>= 1)
        v = max(v, lane_xor(v, step));
    return v;
#else
    const uint lid = (uint)get_local_id(0);
    const uint lane = lid % LANES;
    scratch[lid] = v;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint n = LANES; n > 1; n = (n + 1) / 2) {
        const uint upper = (n + 1) / 2;
        if (lane + upper < n)
            scratch[lid] = max(scratch[lid], scratch[lid + upper]);
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    v = scratch[lid - lane];
    barrier(CLK_LOCAL_MEM_FENCE); /* the next call writes scratch again */
    return v;
#endif
}

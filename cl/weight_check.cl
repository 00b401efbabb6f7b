/* weight_check.cl - find NaN among FP8 E4M3FN weights before they are trusted.

1. Computes
   *first = the smallest number of a row with a code 0x7F or 0xFF, unless *first is smaller already.

2. Layouts   (row-major, offsets counted in elements)
   codes  [rows, dim]  one byte each
   first  [1]          0xFFFFFFFF before the launch
   VEC divides dim.

3. Launch
   local size WG, global size WG * ceil(ceil(rows / rows_per_team) / (WG / LANES)).
   rows_per_team, from 1, is how many a team takes one after the other.  No local memory.

4. Macros
   X_TYPE WG VEC LANES ALIGNED  see common.h; X_TYPE any

5. Needs
   OpenCL C 1.2 full profile.

6. Reference
   pyclquant/reference.py: decode(), numpy.isnan.
*/
#define FORMAT FP8_E4M3FN
#define SCALE_TYPE F32
#include "common.h"
#include "format.h"

__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void weight_check(__global const uchar *restrict codes, ulong codes_offset, volatile __global uint *restrict first,
                  uint rows, ulong dim, uint rows_per_team)
{
    const uint lane = (uint)get_local_id(0) % LANES;
    const size_t first_row = get_global_id(0) / LANES * rows_per_team;
    const size_t end = min((size_t)rows, first_row + rows_per_team);
    for (size_t row = first_row; row < end; row++) {
        vuchar largest = (vuchar)(0);
        for (size_t k = lane * VEC; k < dim; k += LANES * VEC)
            largest = max(largest, (vuchar)(load_codes(codes + codes_offset + row * dim + k) & (uchar)0x7f)); /* scalars promote */
        uint most = 0;
#if VEC == 1
        most = largest;
#else
#pragma unroll
        for (uint i = 0; i < VEC; i++)
            most = max(most, (uint)((const uchar *)&largest)[i]);
#endif
        if (most == 0x7fu)
            atomic_min(first, (uint)row);
    }
}

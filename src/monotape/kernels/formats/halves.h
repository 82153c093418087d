// Eight neighbouring values: from and to a word of 16-bit floats, and from float32.
#pragma once
#include "machine/machine.h"

namespace monotape {

__device__ __forceinline__ void load8(const float* from, float (&out)[8]) {
  const float4 low = reinterpret_cast<const float4*>(from)[0], high = reinterpret_cast<const float4*>(from)[1];
  out[0] = low.x, out[1] = low.y, out[2] = low.z, out[3] = low.w;
  out[4] = high.x, out[5] = high.y, out[6] = high.z, out[7] = high.w;
}
template <bool Float16 = kFloat16>
__device__ __forceinline__ void unpack8(uint4 v, float* out) {
  const uint32_t pair[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) out[2 * i] = low_half<Float16>(pair[i]), out[2 * i + 1] = high_half<Float16>(pair[i]);
}
template <bool Float16 = kFloat16>
__device__ __forceinline__ uint4 pack8(const float* v) {
  return make_uint4(pack_pair<Float16>(v[0], v[1]), pack_pair<Float16>(v[2], v[3]), pack_pair<Float16>(v[4], v[5]),
                    pack_pair<Float16>(v[6], v[7]));
}

}  // namespace monotape

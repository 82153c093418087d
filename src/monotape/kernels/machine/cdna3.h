// AMD CDNA3 (MI300X): the functions of machine/hopper.h, for clang's HIP mode without any file of ROCm. Compiled and run on
// the host's machine, never on hardware.
//
// A worker is a work-group on one compute unit; a warp is a wave of 64 lanes, so two blocks of weights lie side by side in
// it. There is no copy engine: waves read weights straight from the tape into registers, past the caches. Eight dies (XCDs)
// have an L2 each. An access with the scope of the agent (sc1) reads and writes what all dies see; one without it is served by
// the die's own L2, which other dies' writes do not reach before that L2 is told (buffer_inv), and whose own writes
// others may see late (buffer_wbl2). What crosses dies is therefore either such an access, or between such fences.
#pragma once
#include "machine/cdna3_types.h"
#include "machine/logarithms.h"
#include "plan.h"

__device__ __forceinline__ double exp(double v) { return monotape::exp_of(v); }
__device__ __forceinline__ double log(double v) { return monotape::log_of(v); }
__device__ __forceinline__ double log1p(double v) { return monotape::log1p_of(v); }

namespace monotape {

using int64_t = long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

constexpr int kLanes = 64, kDies = 8;
#define MONOTAPE_DIE_COPIES  // of the exchange: see exchange/dies.h
__device__ __forceinline__ int worker_number() { return static_cast<int>(__builtin_amdgcn_workgroup_id_x()); }
// Hides a value from the compiler, so that values derived from it are recomputed and not kept in registers.
__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+v"(value));
  return value;
}
__device__ __forceinline__ int thread_number() { return opaque(static_cast<int>(__builtin_amdgcn_workitem_id_x())); }
__device__ __forceinline__ int warp_number() { return thread_number() / kLanes; }
__device__ __forceinline__ int lane_number() { return thread_number() % kLanes; }
// The die that a worker is on: the hardware register XCC_ID.
__device__ __forceinline__ int die_number() { return static_cast<int>(__builtin_amdgcn_s_getreg(20 | 3 << 11)); }

// A zero that the compiler does not know: it would make a load of an atomic that changes nothing.
__device__ __forceinline__ uint64_t hidden_zero() {
  uint32_t zero = 0;
  asm volatile("" : "+v"(zero));
  return zero;
}

// Between lanes. Neighbours in a group of four are moved in the instruction that uses them, those in a half of the wave by a
// swizzle, all others through the LDS' crossbar.
__device__ __forceinline__ int bits_at(int value, int lane) { return __builtin_amdgcn_ds_bpermute(lane * 4, value); }
__device__ __forceinline__ int bits_across(int value, int mask) {
  if (__builtin_constant_p(mask)) {
    if (mask == 1) return __builtin_amdgcn_update_dpp(0, value, 0xb1, 0xf, 0xf, false);
    if (mask == 2) return __builtin_amdgcn_update_dpp(0, value, 0x4e, 0xf, 0xf, false);
    if (mask == 4) return __builtin_amdgcn_ds_swizzle(value, 4 << 10 | 0x1f);
    if (mask == 8) return __builtin_amdgcn_ds_swizzle(value, 8 << 10 | 0x1f);
    if (mask == 16) return __builtin_amdgcn_ds_swizzle(value, 16 << 10 | 0x1f);
  }
  return bits_at(value, lane_number() ^ mask);
}
template <class T, class Move>
__device__ __forceinline__ T moved(T value, Move move) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "what lanes exchange");
  if constexpr (sizeof(T) == 4) {
    return __builtin_bit_cast(T, move(__builtin_bit_cast(int, value)));
  } else {
    const uint2 two = __builtin_bit_cast(uint2, value);
    return __builtin_bit_cast(T, uint2{static_cast<unsigned>(move(static_cast<int>(two.x))), static_cast<unsigned>(move(static_cast<int>(two.y)))});
  }
}
template <class T>
__device__ __forceinline__ T lane_at(T value, int lane) {
  return moved(value, [=](int v) { return bits_at(v, lane); });
}
template <class T>
__device__ __forceinline__ T lane_across(T value, int mask) {
  return moved(value, [=](int v) { return bits_across(v, mask); });
}
template <class T>
__device__ __forceinline__ T lane_above(T value, int distance) {
  return moved(value, [=](int v) { return bits_at(v, lane_number() + distance); });
}
template <class T>
__device__ __forceinline__ T lane_below(T value, int distance) {
  return moved(value, [=](int v) { return bits_at(v, lane_number() - distance); });
}
__device__ __forceinline__ void warp_meets() {
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
  __builtin_amdgcn_wave_barrier();
}
__device__ __forceinline__ void block_meets() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

// Arithmetic that the machine does approximately, in a few units of the last place.
__device__ __forceinline__ float power_of_two(float exponent) { return __builtin_amdgcn_exp2f(exponent); }
__device__ __forceinline__ float exponential(float value) { return power_of_two(value * 1.4426950408889634f); }
__device__ __forceinline__ float quotient(float a, float b) { return a * __builtin_amdgcn_rcpf(b); }
__device__ __forceinline__ float inverse_root(float value) { return __builtin_amdgcn_rsqf(value); }
__device__ __forceinline__ int leading_zeros(uint32_t value) { return value ? __builtin_clz(value) : 32; }
__device__ __forceinline__ float float_of(uint32_t bits) { return __uint_as_float(bits); }
__device__ __forceinline__ uint32_t bits_of(float value) { return __float_as_uint(value); }
// Four bytes of two words: nibble i of `Which` says which is byte i.
template <uint32_t Which>
__device__ __forceinline__ uint32_t pick_bytes(uint32_t first, uint32_t second) {
  constexpr uint32_t kEach = (Which & 7) | (Which & 0x70) << 4 | (Which & 0x700) << 8 | (Which & 0x7000) << 12;
  return __builtin_amdgcn_perm(second, first, kEach);
}
__device__ __forceinline__ uint32_t most_of_lanes(uint32_t value) {
#pragma unroll
  for (int mask = kLanes / 2; mask; mask >>= 1) {
    const uint32_t other = lane_across(value, mask);
    value = value < other ? other : value;
  }
  return value;
}
__device__ __forceinline__ float infinity() { return __builtin_huge_valf(); }

// Registers are the same for all waves of a work-group: twelve of them, three to a SIMD.
#define MONOTAPE_UNIT "machine/cdna3_unit.h"  // how a wave attends to a unit of KV
#define MONOTAPE_GROUPS "machine/cdna3_groups.h"  // how a wave multiplies weights that are codes with scales
constexpr int kSharedMemory = 64 * 1024 - 128;  // and the consumers' own barrier
constexpr bool kFewRegisters = true;  // no address is kept over a barrier
// A value that all lanes of a wave share, in a scalar register. An address is one of the GPU's memory: through an address
// that could be any, loads and stores would also wait for the LDS.
__device__ __forceinline__ int uniform(int value) { return __builtin_amdgcn_readfirstlane(value); }
template <class T>
__device__ __forceinline__ T* uniform(T* p) {
  const uint2 two = __builtin_bit_cast(uint2, p);
  const uint2 same = {static_cast<unsigned>(uniform(static_cast<int>(two.x))), static_cast<unsigned>(uniform(static_cast<int>(two.y)))};
  return (T*)(__builtin_bit_cast(__attribute__((address_space(1))) T*, same));  // no other cast changes the space
}
#define MONOTAPE_UNIFORM(value) uniform(value)
template <class T>
__device__ __forceinline__ T* kept_pointer(T* p) {
  return p;
}
template <int Count>
__device__ __forceinline__ void take_registers() {}
template <int Count>
__device__ __forceinline__ void give_registers() {}
template <class T>
__device__ __forceinline__ T& kept(T& object, uint32_t) {
  return object;
}
// The parameters of a launch, as memory that may change: the compiler would otherwise load all of them at the start, into
// more scalar registers than there are.
template <class T>
__device__ __forceinline__ const T& changeable(const T& object) {
  const T* p = &object;
  asm volatile("" : "+s"(p));
  return *p;
}


// c += a * b: see cdna3_products.h.
typedef float Four __attribute__((ext_vector_type(4)));

template <bool Float16>
__device__ __forceinline__ void multiply_slots(float* c, uint2 a, uint2 b) {
  typedef short Shorts __attribute__((ext_vector_type(4)));
  typedef _Float16 Halves __attribute__((ext_vector_type(4)));
  Four sums = {c[0], c[1], c[2], c[3]};
  if constexpr (Float16) sums = __builtin_amdgcn_mfma_f32_16x16x16f16(__builtin_bit_cast(Halves, a), __builtin_bit_cast(Halves, b), sums, 0, 0, 0);
  else sums = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(__builtin_bit_cast(Shorts, a), __builtin_bit_cast(Shorts, b), sums, 0, 0, 0);
  c[0] = sums[0], c[1] = sums[1], c[2] = sums[2], c[3] = sums[3];
}

// Pairs of 16-bit floats. A NaN is 0x7fff, so that no word looks like "not yet".
__device__ __forceinline__ uint32_t half_of(float value) {
  return value != value ? 0x7fffu : static_cast<uint32_t>(__builtin_bit_cast(uint16_t, static_cast<_Float16>(value)));
}
__device__ __forceinline__ uint32_t bfloat_of(float value) {
  const uint32_t bits = __float_as_uint(value);
  return value != value ? 0x7fffu : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
template <bool Float16 = kFloat16>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  if constexpr (Float16) return half_of(low) | half_of(high) << 16;
  else return bfloat_of(low) | bfloat_of(high) << 16;
}
template <bool Float16 = kFloat16>
__device__ __forceinline__ float widen(uint16_t half) {
  if constexpr (!Float16) return __uint_as_float(static_cast<uint32_t>(half) << 16);
  else return static_cast<float>(__builtin_bit_cast(_Float16, half));
}
template <bool Float16 = kFloat16>
__device__ __forceinline__ float low_half(uint32_t pair) {
  return widen<Float16>(static_cast<uint16_t>(pair));
}
template <bool Float16 = kFloat16>
__device__ __forceinline__ float high_half(uint32_t pair) {
  if constexpr (!Float16) return __uint_as_float(pair & 0xffff0000u);
  else return widen<Float16>(static_cast<uint16_t>(pair >> 16));
}
template <bool Float16 = kFloat16>
__device__ __forceinline__ uint32_t times_pair(uint32_t a, uint32_t b) {
  return pack_pair<Float16>(low_half<Float16>(a) * low_half<Float16>(b), high_half<Float16>(a) * high_half<Float16>(b));
}
__device__ __forceinline__ uint32_t scaled_pair(uint32_t pair, float factor) {
  return pack_pair<false>(low_half<false>(pair) * factor, high_half<false>(pair) * factor);
}

}  // namespace monotape

#include "machine/cdna3_meeting.h"
#include "machine/cdna3_memory.h"
#include "machine/cdna3_products.h"

namespace monotape {

__device__ __forceinline__ ConsumersMeeting& consumers_meeting() {
  static __shared__ ConsumersMeeting meeting;
  return meeting;
}

}  // namespace monotape

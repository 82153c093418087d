// The machine of the host: the functions of machine/hopper.h, made of the pseudo-GPU in machine.h.
#pragma once
#include "cuda_on_host.h"
#include "plan.h"

namespace monotape {

using int64_t = long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using host::machine;

constexpr int kLanes = host::kLanes;
inline int worker_number() { return static_cast<int>(blockIdx.x); }
inline int thread_number() { return static_cast<int>(threadIdx.x); }
inline int warp_number() { return thread_number() / kLanes; }
inline int lane_number() { return thread_number() % kLanes; }
template <class T>
inline T lane_at(T value, int lane) {
  return __shfl_sync(~0u, value, lane);
}
template <class T>
inline T lane_across(T value, int mask) {
  return __shfl_xor_sync(~0u, value, mask);
}
template <class T>
inline T lane_above(T value, int distance) {
  return __shfl_down_sync(~0u, value, distance);
}
template <class T>
inline T lane_below(T value, int distance) {
  return __shfl_up_sync(~0u, value, distance);
}
inline void warp_meets() { __syncwarp(); }
inline void block_meets() { __syncthreads(); }
inline float exponential(float value) { return expf(value); }
inline float quotient(float a, float b) { return a / b; }
inline float inverse_root(float value) { return 1 / sqrtf(value); }
inline int leading_zeros(uint32_t value) { return value ? __builtin_clz(value) : 32; }

// A barrier in shared memory: its phase, arrivals that a phase takes and that are still missing, and bytes to come.
struct BarrierBits {
  unsigned phase : 1, expected : 15, missing : 16;
  int bytes;
};
static_assert(sizeof(BarrierBits) == 8, "as large as the GPU's own");
inline void change_barrier(void* at, int arrivals, int bytes) {
  BarrierBits bits;
  memcpy(&bits, at, 8);
  if (arrivals > static_cast<int>(bits.missing)) machine->fail("A barrier with too many arrivals");
  bits.missing -= arrivals, bits.bytes += bytes;
  if (bits.missing == 0 && bits.bytes == 0) bits.phase ^= 1, bits.missing = bits.expected;
  memcpy(at, &bits, 8);
}
inline void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  machine->did_something();
  change_barrier(barrier, 0, static_cast<int>(bytes));
  change_barrier(barrier, 1, 0);
}
inline void barrier_arrive(uint64_t* barrier) {
  machine->did_something();
  change_barrier(barrier, 1, 0);
  if (machine->once_in(4)) machine->yield();
}
inline bool barrier_passed(uint64_t* barrier, uint32_t parity) {
  BarrierBits bits;
  memcpy(&bits, barrier, 8);
  const bool passed = bits.phase != parity;
  machine->saw(passed, "waiting for a page");
  return passed;
}

inline uint64_t streaming_policy() { return 1; }
constexpr int kL2LineBytes = 256;
inline uint32_t load_line(const void* from) {
  machine->touch(from, 4, 4);
  return *static_cast<const uint32_t*>(from);
}
class Barriers {
 public:
  Barriers(uint64_t* first, uint32_t) : first_(first) {}
  bool passed(int i, uint32_t parity) const { return barrier_passed(first_ + i, parity); }
  void arrive(int i) const { barrier_arrive(first_ + i); }
  void expect(int i, uint32_t bytes) const { barrier_expect(first_ + i, bytes); }
  uint64_t* at(int i) const { return first_ + i; }

 private:
  uint64_t* first_;
};

inline void copy_page(void* to, const void* from, uint32_t bytes, uint64_t* barrier, uint64_t) {
  if (bytes % 16 || reinterpret_cast<uintptr_t>(to) % 16) machine->fail("A copy that is not of whole words");
  machine->copy({static_cast<unsigned char*>(to), static_cast<const unsigned char*>(from), bytes,
                 reinterpret_cast<::uint64_t*>(barrier)});
}
template <class T>
const T& changeable(const T& object) {
  return object;
}
template <class T>
T& kept(T& object, uint32_t) {
  return object;
}
template <int PageBytes>
class Pages {
 public:
  Pages(void* first, uint32_t) : first_(static_cast<uint8_t*>(first)) {}
  void copy(int i, const void* from, uint32_t bytes, const Barriers& full, uint64_t policy) const {
    full.expect(i, bytes);
    add(i, 0, from, bytes, full, policy);
  }
  void add(int i, int at, const void* from, uint32_t bytes, const Barriers& full, uint64_t policy) const {
    copy_page(first_ + i * PageBytes + at, from, bytes, full.at(i), policy);
  }

 private:
  uint8_t* first_;
};
template <int Count>
inline void take_registers() {}
template <int Count>
inline void give_registers() {}
inline int opaque(int value) { return __shfl_sync(~0u, value, lane_number()); }
#define MONOTAPE_UNIFORM(value) (value)
template <class T>
inline T* kept_pointer(T* p) {
  return p;
}

inline float from_half(uint16_t half) {
  const int exponent = half >> 10 & 31, fraction = half & 1023;
  const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                     : exponent     ? ldexpf(static_cast<float>(1024 + fraction), exponent - 25)
                                    : ldexpf(static_cast<float>(fraction), -24);
  return half >> 15 ? -size : size;
}
inline uint16_t to_half(float value) {
  if (value != value) return 0x7fff;
  const unsigned sign = __float_as_uint(value) >> 16 & 0x8000;
  const float size = fabsf(value);
  if (size >= 65520) return static_cast<uint16_t>(sign | 0x7c00);
  const int exponent = size < 6.103515625e-5f ? -14 : ilogbf(size);
  return static_cast<uint16_t>(sign | ((exponent + 14) * 1024 + static_cast<int>(nearbyintf(ldexpf(size, 10 - exponent)))));
}
inline uint16_t to_bfloat(float value) {
  if (value != value) return 0x7fff;
  const uint32_t bits = __float_as_uint(value);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float widen_as(bool float16, uint16_t half) {
  return float16 ? from_half(half) : __uint_as_float(static_cast<uint32_t>(half) << 16);
}
template <bool Float16 = kFloat16>
inline float widen(uint16_t half) {
  return widen_as(Float16, half);
}
template <bool Float16 = kFloat16>
inline uint32_t pack_pair(float low, float high) {
  if (Float16) return to_half(low) | static_cast<uint32_t>(to_half(high)) << 16;
  return to_bfloat(low) | static_cast<uint32_t>(to_bfloat(high)) << 16;
}
template <bool Float16 = kFloat16>
inline float low_half(uint32_t pair) {
  return widen_as(Float16, static_cast<uint16_t>(pair));
}
template <bool Float16 = kFloat16>
inline float high_half(uint32_t pair) {
  return widen_as(Float16, static_cast<uint16_t>(pair >> 16));
}
template <bool Float16 = kFloat16>
inline uint32_t times_pair(uint32_t a, uint32_t b) {
  return pack_pair<Float16>(low_half<Float16>(a) * low_half<Float16>(b), high_half<Float16>(a) * high_half<Float16>(b));
}
inline uint32_t scaled_pair(uint32_t pair, float factor) {
  return pack_pair<false>(low_half<false>(pair) * factor, high_half<false>(pair) * factor);
}
inline float power_of_two(float exponent) { return exp2f(exponent); }
inline float float_of(uint32_t bits) { return __uint_as_float(bits); }
inline uint32_t bits_of(float value) { return __float_as_uint(value); }
template <uint32_t Which>
inline uint32_t pick_bytes(uint32_t first, uint32_t second) {
  const uint64_t both = static_cast<uint64_t>(second) << 32 | first;
  uint32_t word = 0;
  for (int i = 0; i < 4; i++) word |= static_cast<uint32_t>(both >> 8 * (Which >> 4 * i & 7) & 0xff) << 8 * i;
  return word;
}
inline uint32_t most_of_lanes(uint32_t value) {
  for (int mask = kLanes / 2; mask; mask >>= 1) {
    const uint32_t other = __shfl_xor_sync(~0u, value, mask);
    value = value < other ? other : value;
  }
  return value;
}
inline float infinity() { return INFINITY; }

}  // namespace monotape

#include MONOTAPE_HOST_MEMORY
#include MONOTAPE_HOST_PRODUCTS

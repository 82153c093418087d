// NVIDIA Hopper: every instruction and built-in that touches memory, synchronises, moves values between lanes or exists only
// on this machine, under a name that says its purpose. No file of the kernel but this one and its parts, hopper_*.h, contains
// assembly or CUDA's own names, so another machine is another header with the same functions.
#pragma once
#include "plan.h"

namespace monotape {

using int64_t = long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

// A worker is a thread block on one SM; a warp has 32 lanes.
constexpr int kLanes = 32;
__device__ __forceinline__ int worker_number() { return static_cast<int>(blockIdx.x); }
__device__ __forceinline__ int thread_number() { return static_cast<int>(threadIdx.x); }
__device__ __forceinline__ int warp_number() { return static_cast<int>(threadIdx.x / kLanes); }
__device__ __forceinline__ int lane_number() { return static_cast<int>(threadIdx.x % kLanes); }

// The value of another lane of the warp: of a given one, of the one whose number differs in the bits of `mask`, of the
// one `distance` further on, or further back. All lanes of the warp take part.
template <class T>
__device__ __forceinline__ T lane_at(T value, int lane) {
  return __shfl_sync(~0u, value, lane);
}
template <class T>
__device__ __forceinline__ T lane_across(T value, int mask) {
  return __shfl_xor_sync(~0u, value, mask);
}
template <class T>
__device__ __forceinline__ T lane_above(T value, int distance) {
  return __shfl_down_sync(~0u, value, distance);
}
template <class T>
__device__ __forceinline__ T lane_below(T value, int distance) {
  return __shfl_up_sync(~0u, value, distance);
}
// The largest value of all lanes.
__device__ __forceinline__ uint32_t most_of_lanes(uint32_t value) { return __reduce_max_sync(~0u, value); }
__device__ __forceinline__ void warp_meets() { __syncwarp(); }
__device__ __forceinline__ void block_meets() { __syncthreads(); }

// An operand's block is the words of 32 lanes, 16 bytes each, so a warp may have several blocks side by side. Which of them
// a lane's own word is in, which of that block's words it is, in which row, and which 16 of the row's 64 bytes.
constexpr int kBlockLanes = 32, kSide = kLanes / kBlockLanes;
__device__ __forceinline__ int fragment_side(unsigned) { return 0; }
__device__ __forceinline__ int fragment_word(unsigned lane) { return static_cast<int>(lane); }
__device__ __forceinline__ int fragment_row(unsigned lane) { return static_cast<int>(lane / 4); }
__device__ __forceinline__ int fragment_column(unsigned lane) { return static_cast<int>(lane % 4); }

// Heads side by side in a warp: which one is a lane's, and which 16 of every 64 bytes; and a sum, or the largest value, over
// the lanes of a head.
constexpr int kHeadLanes = 8;
__device__ __forceinline__ int head_row(unsigned lane) { return static_cast<int>(lane / 4); }
__device__ __forceinline__ int head_column(unsigned lane) { return static_cast<int>(lane % 4); }
__device__ __forceinline__ float sum_of_head(float value) {
  value += lane_across(value, 1);
  return value + lane_across(value, 2);
}
__device__ __forceinline__ float largest_of_head(float value) {
  value = fmaxf(value, lane_across(value, 1));
  return fmaxf(value, lane_across(value, 2));
}

// Shared memory of a worker, and how it is used.
#define MONOTAPE_RING  // bulk copies fill a ring of pages: worker/ring.h
#define MONOTAPE_UNIT "machine/hopper_unit.h"  // how a warp attends to a unit of KV
#define MONOTAPE_GROUPS "machine/hopper_groups.h"  // how a warp multiplies weights that are codes with scales
constexpr int kSharedMemory = 227 * 1024;
constexpr bool kFewRegisters = false;  // true: no address is kept over a barrier
// A prefill's operands in shared memory: steps at least, and blocks of k in one step of so many tiles.
constexpr int kLeastSteps = 4, kLeastAttendedSteps = 4, kAttendedUnits = 2;
__host__ __device__ constexpr int step_blocks(int tiles) { return tiles > 32 ? 1 : 2; }

// Arithmetic that the machine does approximately, in a few units of the last place.
__device__ __forceinline__ float exponential(float value) {
  float power;  // results below the normal numbers are zero: otherwise each takes four instructions more
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(value * 1.4426950408889634f));
  return power;
}
__device__ __forceinline__ float quotient(float a, float b) { return __fdividef(a, b); }
__device__ __forceinline__ float inverse_root(float value) {  // of a normal number
  float root;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(value));
  return root;
}
__device__ __forceinline__ int leading_zeros(uint32_t value) { return __clz(static_cast<int>(value)); }

// Registers per thread from here on, for a group of four warps. `setmaxnreg.inc` blocks until others have released enough.
template <int Count>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

__device__ __forceinline__ int64_t clock_ns() {
  int64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}
__device__ __forceinline__ int64_t clock_ticks() { return clock64(); }
__device__ __forceinline__ void rest(int ns) { __nanosleep(ns); }
__device__ __forceinline__ void wait_ticks(int ticks) {
  for (const int64_t began = clock_ticks(); clock_ticks() - began < ticks;) continue;
}

// Hides a value from the compiler, so that values derived from it are recomputed and not kept in registers from one stage to
// the next. It takes a real instruction: the assembler would remove an empty one.
__device__ __forceinline__ int opaque(int value) {
  asm volatile("shfl.sync.idx.b32 %0, %0, %1, 0x1f, 0xffffffff;" : "+r"(value) : "r"(threadIdx.x % 32));
  return value;
}
// A value that all lanes of a warp share, which other machines keep in registers for such values. A macro, because even a
// function that returns its argument changes the machine code.
#define MONOTAPE_UNIFORM(value) (value)
// A pointer that stays in registers: the compiler cannot see through the empty statement, and otherwise makes the pointer anew
// for each load, from its parts.
template <class T>
__device__ __forceinline__ T* kept_pointer(T* p) {
  asm volatile("" : "+l"(p));
  return p;
}

// A barrier of the consumer warps; the producer does not take part.
__device__ __forceinline__ void consumers_meet(int threads) {
  asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
}

// The same barrier, with a vote: true if all threads pass true.
__device__ __forceinline__ bool consumers_agree(int threads, bool good) {
  uint32_t all;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.u32 p, %2, 0;\nbar.red.and.pred q, 1, %1, p;\nselp.u32 %0, 1, 0, q;\n}"
      : "=r"(all)
      : "r"(threads), "r"(static_cast<uint32_t>(good))
      : "memory");
  return all;
}

// Pairs of 16-bit floats, fp16 or bf16, by default those of activations. The conversion never makes the pattern
// "all ones": its only NaN is 0x7fff.
template <bool Float16 = kFloat16>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  uint32_t pair;
  if constexpr (Float16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
template <bool Float16 = kFloat16>
__device__ __forceinline__ float widen(uint16_t half) {
  if constexpr (!Float16) return __uint_as_float(static_cast<uint32_t>(half) << 16);
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
}
template <bool Float16 = kFloat16>
__device__ __forceinline__ float low_half(uint32_t pair) {
  if constexpr (!Float16) return __uint_as_float(pair << 16);
  return widen<Float16>(static_cast<uint16_t>(pair));
}
template <bool Float16 = kFloat16>
__device__ __forceinline__ float high_half(uint32_t pair) {
  if constexpr (!Float16) return __uint_as_float(pair & 0xffff0000u);
  return widen<Float16>(static_cast<uint16_t>(pair >> 16));
}
// Halves times halves, pair by pair, subnormals included.
template <bool Float16 = kFloat16>
__device__ __forceinline__ uint32_t times_pair(uint32_t a, uint32_t b) {
  uint32_t out;
  if constexpr (Float16) asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  else asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
// Both halves times a power of two, exactly where the results are halves at all.
__device__ __forceinline__ uint32_t scaled_pair(uint32_t pair, float factor) {
  uint32_t out;
  const uint32_t two = pack_pair<false>(factor, factor);
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(pair), "r"(two));
  return out;
}
__device__ __forceinline__ float power_of_two(float exponent) {
  float value;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(exponent));
  return value;
}
__device__ __forceinline__ float float_of(uint32_t bits) { return __uint_as_float(bits); }
__device__ __forceinline__ uint32_t bits_of(float value) { return __float_as_uint(value); }
// Four of the eight bytes of two words: hexadecimal digit i of Which is the number of byte i.
template <uint32_t Which>
__device__ __forceinline__ uint32_t pick_bytes(uint32_t first, uint32_t second) {
  return __byte_perm(first, second, Which);
}
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

}  // namespace monotape

#include "machine/hopper_memory.h"
#include "machine/hopper_products.h"

// What CUDA offers without a header: words, built-in variables, shuffles and arithmetic, for the fiber that runs.
#pragma once
#include <cmath>
#include <cstring>

#include "machine.h"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __constant__
#define __grid_constant__
#define __shared__
#define __align__(bytes)

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

struct Index {
  unsigned x;
};
extern Index threadIdx, blockIdx;  // of the fiber that runs

template <class To, class From>
inline To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits are neither made nor lost");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}
inline unsigned __float_as_uint(float v) { return same_bits<unsigned>(v); }
inline int __float_as_int(float v) { return same_bits<int>(v); }
inline float __uint_as_float(unsigned v) { return same_bits<float>(v); }
inline float __int_as_float(int v) { return same_bits<float>(v); }
inline long long __double_as_longlong(double v) { return same_bits<long long>(v); }
inline double __longlong_as_double(long long v) { return same_bits<double>(v); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }

namespace host {

// All lanes of a warp come to the same operation; the last one to come does `together`.
template <class Together>
inline void come_together(Collective kind, Together together) {
  Fiber& fiber = *machine->current;
  Warp& warp = machine->block().warp[fiber.warp()];
  if (warp.arrived == 0) warp.kind = kind;
  if (warp.kind != kind) machine->fail("Lanes of a warp are at different operations");
  machine->did_something();
  fiber.collectives++;
  if (++warp.arrived < kLanes) return machine->wait("waiting for its warp");
  warp.arrived = 0;
  together(warp);
  machine->wake_warp(fiber.block, fiber.warp(), fiber.lane());
  if (machine->once_in(2)) machine->yield();
}
inline int turn() { return machine->current->collectives & 1; }

template <class T>
inline T shuffle(unsigned mask, Collective kind, T value, int from) {
  static_assert(sizeof(T) <= 8, "what a shuffle moves");
  if (mask != ~0u) machine->fail("A shuffle of a part of a warp");
  const int slot = turn();
  Warp& warp = machine->block().warp[machine->current->warp()];
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  warp.value[slot][machine->current->lane()] = bits;
  come_together(kind, [](Warp&) {});
  if (from >= 0 && from < kLanes) memcpy(&value, &warp.value[slot][from], sizeof(T));
  return value;
}

// All threads that take part in a barrier of the block. True if all of them say so.
inline bool meet(int number, int threads, bool good) {
  Fiber& fiber = *machine->current;
  Meeting& meeting = machine->block().meeting[number];
  machine->did_something();
  if (meeting.arrived && meeting.expected != threads) machine->fail("A barrier with two numbers of threads");
  if (!meeting.arrived) meeting.expected = threads, meeting.good = true;
  meeting.good &= good;
  if (++meeting.arrived < threads) {
    meeting.waiting.push_back(&fiber);
    machine->wait(number ? "waiting for the consumers" : "waiting for the block");
    const bool agreed = fiber.agreed;
    machine->oversleep();
    return agreed;
  }
  meeting.arrived = 0;
  machine->stores_met(fiber.block, -1);
  for (Fiber* other : meeting.waiting) {
    other->agreed = meeting.good;
    machine->wake(*other);
  }
  meeting.waiting.clear();
  const bool agreed = meeting.good;
  machine->yield();
  return agreed;
}

// Takes the place of `volatile int`: a look at it may be one of a loop that waits.
class Watched {
 public:
  operator int() const {
    machine->looked_at(this);
    return value_;
  }
  int operator=(int value) {
    machine->did_something();
    value_ = value;
    if (machine->once_in(4)) machine->yield();
    return value;
  }
  Watched& operator=(const Watched& other) {
    *this = static_cast<int>(other);
    return *this;
  }

 private:
  int value_;
};

}  // namespace host

template <class T>
inline T __shfl_sync(unsigned mask, T value, int lane) {
  return host::shuffle(mask, host::Collective::shuffle, value, lane & (host::kLanes - 1));
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int other) {
  return host::shuffle(mask, host::Collective::shuffle_xor, value, host::machine->current->lane() ^ other);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, int distance) {
  return host::shuffle(mask, host::Collective::shuffle_down, value, host::machine->current->lane() + distance);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, int distance) {
  return host::shuffle(mask, host::Collective::shuffle_up, value, host::machine->current->lane() - distance);
}
inline void __syncwarp() {
  host::come_together(host::Collective::sync, [](host::Warp&) {
    host::machine->stores_met(host::machine->current->block, static_cast<int>(host::machine->current->warp()));
  });
}
inline void __syncthreads() { host::meet(0, host::kThreadsOfBlock, true); }

// `extern __shared__ uint8_t memory[]` becomes a pointer to the running block's own.
extern unsigned char (*host_memory)[];
#define memory (*host_memory)

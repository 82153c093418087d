// CDNA3: memory. Words of the exchange, of ranks and of the host, copies into the LDS, fences and clocks.
#pragma once

namespace monotape {

// Eight bytes are what one access stores and loads at once. `Scope`: who sees it, and what it sees.
template <int Scope>
__device__ __forceinline__ uint64_t load_eight(const uint64_t* p) {
  return __hip_atomic_load(const_cast<uint64_t*>(p), __ATOMIC_RELAXED, Scope);
}
template <int Scope>
__device__ __forceinline__ void store_eight(uint64_t* p, uint64_t v) {
  __hip_atomic_store(p, v, __ATOMIC_RELAXED, Scope);
}
template <int Scope>
__device__ __forceinline__ uint4 load_two(const uint4* p) {
  const uint64_t* half = reinterpret_cast<const uint64_t*>(p);
  const uint64_t low = load_eight<Scope>(half), high = load_eight<Scope>(half + 1);
  return make_uint4(static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high), static_cast<uint32_t>(high >> 32));
}
template <int Scope>
__device__ __forceinline__ void store_two(uint4* p, uint4 v) {
  uint64_t* half = reinterpret_cast<uint64_t*>(p);
  store_eight<Scope>(half, v.x | static_cast<uint64_t>(v.y) << 32);
  store_eight<Scope>(half + 1, v.z | static_cast<uint64_t>(v.w) << 32);
}

// Words of the exchange, between all dies. Each half of a word says itself whether it has arrived.
__device__ __forceinline__ uint4 load_word(const uint4* p) { return load_two<__HIP_MEMORY_SCOPE_AGENT>(p); }
__device__ __forceinline__ void store_word(uint4* p, uint4 v) { store_two<__HIP_MEMORY_SCOPE_AGENT>(p, v); }
// Words between ranks, which may be on several GPUs.
__device__ __forceinline__ uint64_t load_link(const uint64_t* p) { return load_eight<__HIP_MEMORY_SCOPE_SYSTEM>(p); }
__device__ __forceinline__ void store_link(uint64_t* p, uint64_t v) { store_eight<__HIP_MEMORY_SCOPE_SYSTEM>(p, v); }
__device__ __forceinline__ void load_links(const uint64_t* p, uint64_t& a, uint64_t& b) { a = load_link(p), b = load_link(p + 1); }
__device__ __forceinline__ void store_links(uint64_t* p, uint64_t a, uint64_t b) { store_link(p, a), store_link(p + 1, b); }
__device__ __forceinline__ void store_row_word(uint4* p, uint4 v) { store_two<__HIP_MEMORY_SCOPE_SYSTEM>(p, v); }
// Rows of a prefill: ordinary loads, between the fences of the barriers that separate its parts.
__device__ __forceinline__ uint4 load_row_word(const uint4* p) { return *p; }
__device__ __forceinline__ uint2 load_row_pair(const uint2* p) { return *p; }
__device__ __forceinline__ float load_row_value(const float* p) { return *p; }

// Words of a die's own copy, served by its L2. They are read by an atomic that changes nothing: atomics pass the compute unit's
// L1 by, where a load of this scope may find an old line.
__device__ __forceinline__ uint64_t load_from_die(uint64_t* p) {
  return __hip_atomic_fetch_or(p, hidden_zero(), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}
__device__ __forceinline__ void store_to_die(uint64_t* p, uint64_t v) { store_eight<__HIP_MEMORY_SCOPE_WORKGROUP>(p, v); }

// Weights are read once a token: they leave the caches first.
__device__ __forceinline__ uint4 load_weights(const uint4* p) {
  typedef uint32_t Four __attribute__((vector_size(16)));
  return __builtin_bit_cast(uint4, __builtin_nontemporal_load(reinterpret_cast<const Four*>(p)));
}

// Copies 16 bytes per lane into the LDS, through registers: they have landed when the threads meet.
__device__ __forceinline__ void copy_word(void* to, const void* from, uint32_t bytes) {
  *static_cast<uint4*>(to) = bytes ? *static_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
}
__device__ __forceinline__ void end_copy_group() {}
template <int Left>
__device__ __forceinline__ void wait_copy_groups() {}
__device__ __forceinline__ void fence_copies() {}
__device__ __forceinline__ void fence_shared_copies() {}

__device__ __forceinline__ void add_to_shared(uint32_t* p, uint32_t n) {
  __hip_atomic_fetch_add(p, n, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}
__device__ __forceinline__ void least_in_shared(uint32_t* p, uint32_t n) {
  __hip_atomic_fetch_min(p, n, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}
// A counter that all workers raise with release and poll with acquire: a barrier. The release writes the die's L2 back, the
// acquire drops what it has of other dies' memory.
__device__ __forceinline__ void raise_counter(uint32_t* p) {
  __hip_atomic_fetch_add(p, 1u, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_AGENT);
}
__device__ __forceinline__ uint32_t read_counter(const uint32_t* p) {
  return __hip_atomic_load(const_cast<uint32_t*>(p), __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_AGENT);
}
__device__ __forceinline__ uint32_t read_flag(const uint32_t* p) {
  return __hip_atomic_load(const_cast<uint32_t*>(p), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
__device__ __forceinline__ void store_flag(uint32_t* p, uint32_t v) {
  __hip_atomic_store(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
__device__ __forceinline__ void mark_unhealthy(uint32_t* p) {
  __hip_atomic_store(p, 0u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
// True for the first caller alone.
__device__ __forceinline__ bool claim(uint32_t* p) {
  return __hip_atomic_exchange(p, 0u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT) != 0;
}

// Memory of the host.
__device__ __forceinline__ uint32_t load_host_flag(const uint32_t* p) {
  return __hip_atomic_load(const_cast<uint32_t*>(p), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
__device__ __forceinline__ uint64_t load_from_host(const uint64_t* p) {
  return __hip_atomic_load(const_cast<uint64_t*>(p), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
__device__ __forceinline__ void store_to_host(int* p, int v) {
  __hip_atomic_store(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
__device__ __forceinline__ void store_to_host(float* p, float v) { store_to_host(reinterpret_cast<int*>(p), __float_as_int(v)); }
__device__ __forceinline__ void store_to_host(int64_t* p, int64_t v) {
  __hip_atomic_store(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
__device__ __forceinline__ void fence_host() { __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, ""); }
__device__ __forceinline__ void fence_device() { __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "agent"); }
// What other workers released is seen from here on, by the whole worker once its threads have met.
__device__ __forceinline__ void acquire_device() { __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent"); }
__device__ __forceinline__ void fence_block() { __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "workgroup"); }

// A clock of 100 MHz that all dies share, and the compute unit's own.
__device__ __forceinline__ int64_t clock_ns() { return static_cast<int64_t>(__builtin_amdgcn_s_memrealtime()) * 10; }
__device__ __forceinline__ int64_t clock_ticks() { return static_cast<int64_t>(__builtin_readcyclecounter()); }
__device__ __forceinline__ void rest(int ns) {
  if (ns <= 100) __builtin_amdgcn_s_sleep(3);  // of 64 cycles each
  else __builtin_amdgcn_s_sleep(8);
}
// About so many: two a nanosecond.
__device__ __forceinline__ void wait_ticks(int ticks) {
  if (ticks > 0) rest(ticks / 2);
}

}  // namespace monotape

// NVIDIA Hopper's memory: barriers and bulk copies of the ring, words between workers, ranks and the host, and fences.
// A part of machine/hopper.h, which includes it.
#pragma once

namespace monotape {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Barriers in shared memory: the ring's pages.
__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}
__device__ __forceinline__ void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;"); }
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ bool barrier_passed(uint64_t* barrier, uint32_t parity) {
  uint32_t passed;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.b32 %0, 1, 0, p;\n}"
      : "=r"(passed)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return passed;
}

// A place in shared memory whose address stays in a register: the compiler would otherwise recompute it for every page.
// `lanes` is the mask of the calling lanes. (It takes a real instruction: the assembler would remove an empty one.)
__device__ __forceinline__ uint32_t kept_address(const void* p, uint32_t lanes) {
  uint32_t address = shared_address(p);
  asm volatile("shfl.sync.idx.b32 %0, %0, %1, 0x1f, %2;" : "+r"(address) : "r"(threadIdx.x % 32), "r"(lanes));
  return address;
}
template <class T>
__device__ __forceinline__ T& kept(T& object, uint32_t lanes) {
  return *static_cast<T*>(__cvta_shared_to_generic(kept_address(&object, lanes)));
}

template <class T>
__device__ __forceinline__ const T& changeable(const T& object) {
  return object;  // constant memory costs no registers
}

class Barriers {
 public:
  __device__ Barriers(const uint64_t* first, uint32_t lanes) : first_(kept_address(first, lanes)) {}
  __device__ __forceinline__ bool passed(int i, uint32_t parity) const {
    uint32_t passed;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p;\n}"
        : "=r"(passed)
        : "r"(first_ + 8 * i), "r"(parity)
        : "memory");
    return passed;
  }
  __device__ __forceinline__ void arrive(int i) const {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(first_ + 8 * i) : "memory");
  }
  __device__ __forceinline__ void expect(int i, uint32_t bytes) const {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(first_ + 8 * i), "r"(bytes) : "memory");
  }
  __device__ __forceinline__ uint32_t at(int i) const { return first_ + 8 * i; }

 private:
  uint32_t first_;
};

// Copies a page of a tape into shared memory; the barrier learns how many bytes have landed. Weights are read once a
// token, so they should leave the L2 first.
__device__ __forceinline__ uint64_t streaming_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void copy_page(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void copy_page(void* to, const void* from, uint32_t bytes, uint64_t* barrier, uint64_t policy) {
  copy_page(shared_address(to), from, bytes, shared_address(barrier), policy);
}
// Pages in shared memory, for copies.
template <int PageBytes>
class Pages {
 public:
  __device__ Pages(const void* first, uint32_t lanes) : first_(kept_address(first, lanes)) {}
  __device__ __forceinline__ void copy(int i, const void* from, uint32_t bytes, const Barriers& full, uint64_t policy) const {
    full.expect(i, bytes);
    add(i, 0, from, bytes, full, policy);
  }
  // A part of a page whose bytes the barrier expects already.
  __device__ __forceinline__ void add(int i, int at, const void* from, uint32_t bytes, const Barriers& full, uint64_t policy) const {
    copy_page(first_ + i * PageBytes + at, from, bytes, full.at(i), policy);
  }

 private:
  uint32_t first_;
};
// A load that brings the surrounding 256 bytes into the L2. (After prefetch instructions a copy is hardly faster than from
// memory; reports/LOG.md, fifth slice, has the measurement and a guess why.)
constexpr int kL2LineBytes = 256;
__device__ __forceinline__ uint32_t load_line(const void* from) {
  uint32_t value;
  asm volatile("ld.global.L2::256B.b32 %0, [%1];" : "=r"(value) : "l"(from));
  return value;
}
// Orders ordinary accesses before bulk copies, and the other way round.
__device__ __forceinline__ void fence_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }

// The same for shared memory alone, which warp-group products read through the same proxy as copies.
__device__ __forceinline__ void fence_shared_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Copies 16 bytes per lane into shared memory, in groups that can be awaited; `bytes` 0 writes zeros.
__device__ __forceinline__ void copy_word(void* to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void end_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Left>
__device__ __forceinline__ void wait_copy_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Left) : "memory");
}

// Words of the exchange: relaxed accesses at GPU scope. They go to the L2, which all workers share.
__device__ __forceinline__ uint4 load_word(const uint4* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
__device__ __forceinline__ uint2 load_half(const uint2* p) {
  uint2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_word(uint4* p, uint4 v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
// Words between ranks, which may be on several GPUs: eight bytes at once, at system scope.
__device__ __forceinline__ uint64_t load_link(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_link(uint64_t* p, uint64_t v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
// Two words in one instruction; each arrives whole, in either order.
__device__ __forceinline__ void load_links(const uint64_t* p, uint64_t& a, uint64_t& b) {
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0,%1}, [%2];" : "=l"(a), "=l"(b) : "l"(p) : "memory");
}
__device__ __forceinline__ void store_links(uint64_t* p, uint64_t a, uint64_t b) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1,%2};" ::"l"(p), "l"(a), "l"(b) : "memory");
}
// Four values of a row, into the memory of any rank. Relaxed: a meeting of all ranks follows.
__device__ __forceinline__ void store_row_word(uint4* p, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
// Through the L2, because another worker wrote it: rows of a prefill.
__device__ __forceinline__ uint4 load_row_word(const uint4* p) { return __ldcg(p); }
__device__ __forceinline__ uint2 load_row_pair(const uint2* p) { return __ldcg(p); }
__device__ __forceinline__ float load_row_value(const float* p) { return __ldcg(p); }

// Adds to a counter in the worker's own shared memory.
__device__ __forceinline__ void add_to_shared(uint32_t* p, uint32_t n) {
  asm volatile("red.relaxed.cta.shared::cta.add.u32 [%0], %1;" ::"r"(shared_address(p)), "r"(n) : "memory");
}

// A counter that all workers raise with release and poll with acquire: a barrier.
__device__ __forceinline__ void raise_counter(uint32_t* p) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(p) : "memory");
}
__device__ __forceinline__ uint32_t read_counter(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// A relaxed load of a flag: an acquire would also invalidate the worker's L1.
__device__ __forceinline__ uint32_t read_flag(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void mark_unhealthy(uint32_t* p) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], 0;" ::"l"(p) : "memory");
}

// True for the first caller alone. (In device memory: a bus need not perform atomics on host memory.)
__device__ __forceinline__ bool claim(uint32_t* p) { return atomicExch(p, 0) != 0; }

// Memory of the host.
__device__ __forceinline__ uint32_t load_host_flag(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint64_t load_from_host(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_to_host(int* p, int v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void store_to_host(float* p, float v) { store_to_host(reinterpret_cast<int*>(p), __float_as_int(v)); }
__device__ __forceinline__ void store_to_host(int64_t* p, int64_t v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ void fence_host() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ __forceinline__ void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
__device__ __forceinline__ void fence_block() { asm volatile("fence.acq_rel.cta;" ::: "memory"); }

}  // namespace monotape

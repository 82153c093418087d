// NVIDIA Hopper: every instruction and built-in that touches memory, synchronises, moves values between lanes or exists only
// on this machine, under a name that says its purpose. No other file of the kernel contains assembly or CUDA's own names,
// so another machine is another header with the same functions.
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
__device__ __forceinline__ float exponential(float value) { return __expf(value); }
__device__ __forceinline__ float quotient(float a, float b) { return __fdividef(a, b); }
__device__ __forceinline__ float inverse_root(float value) { return rsqrtf(value); }
__device__ __forceinline__ int leading_zeros(uint32_t value) { return __clz(static_cast<int>(value)); }

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

// Hides a value from the compiler, so that values derived from it are recomputed and not kept in registers from one stage to
// the next. It takes a real instruction: the assembler would remove an empty one.
__device__ __forceinline__ int opaque(int value) {
  asm volatile("shfl.sync.idx.b32 %0, %0, %1, 0x1f, 0xffffffff;" : "+r"(value) : "r"(threadIdx.x % 32));
  return value;
}
// A value that all lanes of a warp share, which other machines keep in registers for such values. A macro, because even a
// function that returns its argument changes the machine code.
#define MONOTAPE_UNIFORM(value) (value)

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

// c += a * b for 16 rows of a, 8 columns of b and 16 values of k. a0 and a2 are rows 0-7, a1 and a3 rows 8-15. Operands are
// fp16 or bf16, by default those of activations.
template <bool Float16 = kFloat16>
__device__ __forceinline__ void multiply_accumulate(float* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                    uint32_t b0, uint32_t b1) {
  if constexpr (Float16)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same for 32 values of k: bytes without a sign in a, with one in b.
__device__ __forceinline__ void multiply_accumulate_bytes(int* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// A block of weights times one token's activations, and up to three more rows (token/matrix.h). The halves of row p of the
// pass are columns 2p and 2p + 1, so a lane has eight bytes of its column. In all, a lane adds to four sums.
using TokenInput = uint2;
constexpr int kTokenSums = 4, kGroupInputs = 8;  // inputs of a group of 32 values of k, in shared memory
// A word of the input in the order of products: its first and third pair, then its second and fourth.
__device__ __forceinline__ uint4 input_order(uint4 word) { return make_uint4(word.x, word.z, word.y, word.w); }
__device__ __forceinline__ TokenInput no_input() { return make_uint2(0, 0); }
// Whose input a lane takes: which row of the pass, and which inputs from the warp's first on, of blocks of `sub` groups.
__device__ __forceinline__ int input_pass(unsigned lane) { return fragment_row(lane) / 2; }
__device__ __forceinline__ int first_input(unsigned lane, int) { return fragment_column(lane) * 2; }
__device__ __forceinline__ int second_input(unsigned lane) { return fragment_row(lane) % 2; }
__device__ __forceinline__ bool takes_input(unsigned) { return true; }
// A lane's half of a word of the exchange, which says by itself whether it has come; then, with the lane that has the other
// half, its input.
__device__ __forceinline__ TokenInput load_input(const uint4* word, unsigned lane) {
  return load_half(reinterpret_cast<const uint2*>(word) + second_input(lane));
}
__device__ __forceinline__ bool input_came(TokenInput v) { return v.x != ~0u && v.y != ~0u; }
__device__ __forceinline__ TokenInput ordered_input(TokenInput v, unsigned lane) {
  const bool second = second_input(lane);
  const uint32_t other = lane_across(second ? v.x : v.y, 4);
  return second ? make_uint2(other, v.y) : make_uint2(v.x, other);
}
template <bool Float16>
__device__ __forceinline__ void multiply_token(float* sums, const uint4& w, TokenInput x) {
  multiply_accumulate<Float16>(sums, w.x, w.y, w.z, w.w, x.x, x.y);
}
// A lane's part of the product, then the whole of it: of which row of the tile, and of which row of the pass.
__device__ __forceinline__ float token_part(const float* sums, unsigned) { return sums[0] + sums[3]; }
__device__ __forceinline__ float token_whole(float part) { return part; }
__device__ __forceinline__ int token_row(unsigned lane) { return fragment_row(lane); }
__device__ __forceinline__ int token_pass(unsigned lane) { return fragment_column(lane); }
// Weights, from the page that they have come in.
__device__ __forceinline__ uint4 load_weights(const uint4* p) { return *p; }

// Products of a group: four warps, of which the first is a multiple of four, multiply operands that both lie in shared
// memory, without reading them into registers. An operand is tiles of eight rows and 32 values of k, one block after
// another, the words of each block in the order of `operand_place`: that is how the tensor cores read 64 bytes a row
// without conflicts. Warp w of a group has rows 16 w to 16 w + 15 of the first operand's 64, and holds of each tile of the
// second what multiply_accumulate holds.
__device__ __forceinline__ int operand_place(int lane) { return (lane & ~3) | ((lane ^ lane >> 3) & 3); }

__device__ __forceinline__ uint64_t operand_at(const void* block, int half) {
  constexpr uint64_t kRows64Bytes = 2ull << 62, kTileStride = static_cast<uint64_t>(512 >> 4) << 32, kUnused = 1ull << 16;
  return kRows64Bytes | kTileStride | kUnused | (shared_address(block) + 32 * half) >> 4;
}

// With 64 columns for every 32 of a lane's sums; `io` is the constraint of the sums ("+f", or "=f" where they are not read),
// `add` whether to add.
#define MONOTAPE_TILE(io, t) io(c[t][0]), io(c[t][1]), io(c[t][2]), io(c[t][3])
#define MONOTAPE_TILES_8(io, t)                                                                               \
  MONOTAPE_TILE(io, t), MONOTAPE_TILE(io, t + 1), MONOTAPE_TILE(io, t + 2), MONOTAPE_TILE(io, t + 3),         \
      MONOTAPE_TILE(io, t + 4), MONOTAPE_TILE(io, t + 5), MONOTAPE_TILE(io, t + 6), MONOTAPE_TILE(io, t + 7)
#define MONOTAPE_SUMS_0                                                                                       \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"        \
  "%27,%28,%29,%30,%31"
#define MONOTAPE_SUMS_1                                                                                       \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,"      \
  "%57,%58,%59,%60,%61,%62,%63"
#define MONOTAPE_SUMS_2                                                                                       \
  "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,"      \
  "%89,%90,%91,%92,%93,%94,%95"
#define MONOTAPE_SUMS_3                                                                                       \
  "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,"          \
  "%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define MONOTAPE_SUMS_64 " {" MONOTAPE_SUMS_0 "}, "
#define MONOTAPE_SUMS_128 " {" MONOTAPE_SUMS_0 "," MONOTAPE_SUMS_1 "}, "
#define MONOTAPE_SUMS_192 " {" MONOTAPE_SUMS_0 "," MONOTAPE_SUMS_1 "," MONOTAPE_SUMS_2 "}, "
#define MONOTAPE_SUMS_256 " {" MONOTAPE_SUMS_0 "," MONOTAPE_SUMS_1 "," MONOTAPE_SUMS_2 "," MONOTAPE_SUMS_3 "}, "
#define MONOTAPE_PRODUCT_64(type, io, add)                                                                    \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type MONOTAPE_SUMS_64                   \
               "%32, %33, " add ", 1, 1, 0, 0;"                                                               \
               : MONOTAPE_TILES_8(io, 0)                                                                      \
               : "l"(operand_at(first, half)), "l"(operand_at(second, half)))
#define MONOTAPE_PRODUCT_128(type, io, add)                                                                   \
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type MONOTAPE_SUMS_128                 \
               "%64, %65, " add ", 1, 1, 0, 0;"                                                               \
               : MONOTAPE_TILES_8(io, 0), MONOTAPE_TILES_8(io, 8)                                             \
               : "l"(operand_at(first, half)), "l"(operand_at(second, half)))
#define MONOTAPE_PRODUCT_192(type, io, add)                                                                   \
  asm volatile("wgmma.mma_async.sync.aligned.m64n192k16.f32." type "." type MONOTAPE_SUMS_192                 \
               "%96, %97, " add ", 1, 1, 0, 0;"                                                               \
               : MONOTAPE_TILES_8(io, 0), MONOTAPE_TILES_8(io, 8), MONOTAPE_TILES_8(io, 16)                   \
               : "l"(operand_at(first, half)), "l"(operand_at(second, half)))
#define MONOTAPE_PRODUCT_256(type, io, add)                                                                   \
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type MONOTAPE_SUMS_256                 \
               "%128, %129, " add ", 1, 1, 0, 0;"                                                             \
               : MONOTAPE_TILES_8(io, 0), MONOTAPE_TILES_8(io, 8),                                            \
                 MONOTAPE_TILES_8(io, 16), MONOTAPE_TILES_8(io, 24)                                           \
               : "l"(operand_at(first, half)), "l"(operand_at(second, half)))
#define MONOTAPE_WEIGHTED_64(type, io, add)                                                                   \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type MONOTAPE_SUMS_64                   \
               "{%32,%33,%34,%35}, %36, " add ", 1, 1, 0;"                                                    \
               : MONOTAPE_TILES_8(io, 0)                                                                      \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(operand_at(second, half)))
#define MONOTAPE_WEIGHTED_128(type, io, add)                                                                  \
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type MONOTAPE_SUMS_128                 \
               "{%64,%65,%66,%67}, %68, " add ", 1, 1, 0;"                                                    \
               : MONOTAPE_TILES_8(io, 0), MONOTAPE_TILES_8(io, 8)                                             \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(operand_at(second, half)))
// c += a * b for 64 rows of a, `Tiles` tiles of b and one half of the k of their blocks. Asynchronous. One wide product and not
// several narrow ones, because each reads all of its rows from shared memory again.
template <int Tiles, bool Float16 = kFloat16>
__device__ __forceinline__ void begin_product(float (*c)[4], const void* first, const void* second, int half) {
  static_assert(Tiles == 8 || Tiles == 16 || Tiles == 24 || Tiles == 32, "products that there are");
  if constexpr (Tiles == 8 && Float16) MONOTAPE_PRODUCT_64("f16", "+f", "1");
  else if constexpr (Tiles == 8) MONOTAPE_PRODUCT_64("bf16", "+f", "1");
  else if constexpr (Tiles == 16 && Float16) MONOTAPE_PRODUCT_128("f16", "+f", "1");
  else if constexpr (Tiles == 16) MONOTAPE_PRODUCT_128("bf16", "+f", "1");
  else if constexpr (Tiles == 24 && Float16) MONOTAPE_PRODUCT_192("f16", "+f", "1");
  else if constexpr (Tiles == 24) MONOTAPE_PRODUCT_192("bf16", "+f", "1");
  else if constexpr (Float16) MONOTAPE_PRODUCT_256("f16", "+f", "1");
  else MONOTAPE_PRODUCT_256("bf16", "+f", "1");
}
// The same with a in registers, laid out as in multiply_accumulate. They must not change before the product is awaited. Where
// it does not add, c = a * b.
template <int Tiles, bool Add = true>
__device__ __forceinline__ void begin_weighted_product(float (*c)[4], const uint32_t (&a)[4], const void* second, int half) {
  static_assert(Tiles == 8 || Tiles == 16, "products that there are");
  if constexpr (Tiles == 8 && kFloat16 && Add) MONOTAPE_WEIGHTED_64("f16", "+f", "1");
  else if constexpr (Tiles == 8 && kFloat16) MONOTAPE_WEIGHTED_64("f16", "=f", "0");
  else if constexpr (Tiles == 8 && Add) MONOTAPE_WEIGHTED_64("bf16", "+f", "1");
  else if constexpr (Tiles == 8) MONOTAPE_WEIGHTED_64("bf16", "=f", "0");
  else if constexpr (kFloat16 && Add) MONOTAPE_WEIGHTED_128("f16", "+f", "1");
  else if constexpr (kFloat16) MONOTAPE_WEIGHTED_128("f16", "=f", "0");
  else if constexpr (Add) MONOTAPE_WEIGHTED_128("bf16", "+f", "1");
  else MONOTAPE_WEIGHTED_128("bf16", "=f", "0");
}
#undef MONOTAPE_TILE
#undef MONOTAPE_TILES_8
#undef MONOTAPE_SUMS_0
#undef MONOTAPE_SUMS_1
#undef MONOTAPE_SUMS_2
#undef MONOTAPE_SUMS_3
#undef MONOTAPE_SUMS_64
#undef MONOTAPE_SUMS_128
#undef MONOTAPE_SUMS_192
#undef MONOTAPE_SUMS_256
#undef MONOTAPE_PRODUCT_64
#undef MONOTAPE_PRODUCT_128
#undef MONOTAPE_PRODUCT_192
#undef MONOTAPE_PRODUCT_256
#undef MONOTAPE_WEIGHTED_64
#undef MONOTAPE_WEIGHTED_128
template <int Tiles>
__device__ __forceinline__ void clear_sums(float (&c)[Tiles][4]) {
#pragma unroll
  for (int t = 0; t < Tiles; t++)
#pragma unroll
    for (int i = 0; i < 4; i++) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(c[t][i]));
}
// Orders ordinary writes of sums before products that add to them.
__device__ __forceinline__ void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_product_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Sums of a group's product: of `Tiles` tiles a lane has kSumTiles<Tiles> times four, of kLaneRows rows, eight apart. Which
// row and column of the warp's 16 by 8 * Tiles the first is, and how much further sum i of the t-th four is; which word of
// eight columns that is in, and which pair of the word; sums of a row are neighbours.
constexpr int kLaneRows = 2, kRowSums = 4 / kLaneRows, kTileSums = 4;
template <int Tiles>
constexpr int kSumTiles = Tiles;
__device__ __forceinline__ int sum_row(unsigned lane) { return static_cast<int>(lane / 4); }
__device__ __forceinline__ int sum_column(unsigned lane) { return 2 * static_cast<int>(lane % 4); }
__device__ __forceinline__ constexpr int sum_step(int t, int i) { return t * 8 + i % 2; }
__device__ __forceinline__ int sum_word(unsigned, int t) { return t; }
__device__ __forceinline__ int sum_pair(unsigned lane, int) { return static_cast<int>(lane % 4); }
// The position of a score, where columns are positions in the order of a unit's values.
__device__ __forceinline__ int score_position(int first, unsigned lane, int t, int i) {
  return first + t / 4 * 32 + static_cast<int>(lane % 4) * 8 + t % 4 * 2 + i % 2;
}
// The operands of all but the latest group have been read.
__device__ __forceinline__ void wait_operands() { asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory"); }
// All products have been added to the sums.
template <int Tiles>
__device__ __forceinline__ void wait_products(float (&c)[Tiles][4]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int t = 0; t < Tiles; t++) asm volatile("" : "+f"(c[t][0]), "+f"(c[t][1]), "+f"(c[t][2]), "+f"(c[t][3])::"memory");
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

// Queries of a prefill are an operand in registers: in shared memory they would be read again with every step, and products of
// 64 columns with both operands there ask for all of its bandwidth.
template <int Blocks>
struct RowQueries {
  uint32_t pair[2 * Blocks][4];  // by half of a block, laid out as in multiply_accumulate

  // `row_of` has the lane's two rows, null past the last one. The padding of a head is zero.
  template <class RowOf>
  __device__ __forceinline__ void load(RowOf row_of, unsigned lane) {
    const float* rows[2] = {reinterpret_cast<const float*>(row_of(0)), reinterpret_cast<const float*>(row_of(1))};  // pairs of values
#pragma unroll
    for (int i = 0; i < 2 * Blocks; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int at = 8 * i + j / 2 * 4 + static_cast<int>(lane % 4);
        pair[i][j] = rows[j % 2] && at < kHeadDim / 2 ? bits_of(load_row_value(rows[j % 2] + at)) : 0;
      }
  }
  template <int Sums>
  __device__ __forceinline__ void multiply(const uint8_t* keys, float (&score)[Sums][4]) const {
    fence_products();
    begin_weighted_product<Sums, false>(score, pair[0], keys, 0);
#pragma unroll
    for (int i = 1; i < 2 * Blocks; i++) begin_weighted_product<Sums>(score, pair[i], keys + i / 2 * Sums * 512, i % 2);
    end_product_group();
    wait_products(score);
  }
};

}  // namespace monotape

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

constexpr int kLanes = 32;
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
inline int fragment_row(unsigned lane) { return static_cast<int>(lane / 4); }
inline int fragment_column(unsigned lane) { return static_cast<int>(lane % 4); }
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
inline void barrier_init(uint64_t* barrier, int arrivals) {
  BarrierBits bits;
  bits.phase = 0, bits.expected = bits.missing = static_cast<unsigned>(arrivals), bits.bytes = 0;
  memcpy(static_cast<void*>(barrier), &bits, 8);
}
inline void barrier_init_fence() {}
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
T& kept(T& object, uint32_t) {
  return object;
}
template <int PageBytes>
class Pages {
 public:
  Pages(void* first, uint32_t) : first_(static_cast<uint8_t*>(first)) {}
  void copy(int i, const void* from, uint32_t bytes, const Barriers& full, uint64_t policy) const {
    barrier_expect(full.at(i), bytes);
    copy_page(first_ + i * PageBytes, from, bytes, full.at(i), policy);
  }

 private:
  uint8_t* first_;
};
inline void fence_copies() {}
inline void fence_shared_copies() {}

// Groups of copies are a thread's own: they may land at once, or not before they are waited for.
inline void copy_word(void* to, const void* from, uint32_t bytes) {
  machine->touch(to, 16, 16), machine->touch(from, bytes, 16);
  const host::AsyncWord word = {to, from, bytes, machine->current->copy_group};
  memset(to, 0xff, 16);
  machine->current->copies.push_back(word);
  machine->did_something();
}
inline void land_copies(int groups) {  // all of the groups before that one
  auto& copies = machine->current->copies;
  size_t kept = 0;
  for (const host::AsyncWord& word : copies) {
    if (word.group >= groups) {
      copies[kept++] = word;
      continue;
    }
    memset(word.to, 0, 16);
    memcpy(word.to, word.from, word.bytes);
  }
  copies.resize(kept);
}
inline void end_copy_group() {
  machine->current->copy_group++;
  if (machine->once_in(4)) land_copies(machine->current->copy_group - machine->below(3));
}
template <int Left>
inline void wait_copy_groups() {
  land_copies(machine->current->copy_group - Left);
  machine->yield();
}

inline bool all_there(uint4 v) { return v.x != ~0u && v.y != ~0u && v.z != ~0u && v.w != ~0u; }
inline uint4 load_word(const uint4* p) {
  machine->touch(p, 16, 16);
  machine->settle(reinterpret_cast<const uint32_t*>(p));
  uint4 v = *p;
  machine->saw(all_there(v), "waiting for a word");
  return v;
}
inline void store_word(uint4* p, uint4 v) {
  const uint32_t parts[4] = {v.x, v.y, v.z, v.w};
  machine->store(reinterpret_cast<uint32_t*>(p), parts, 15);
}
// Words between ranks: eight bytes at once. A fiber that reads one is polling it.
inline uint64_t load_link(const uint64_t* p) {
  machine->settle(reinterpret_cast<const uint32_t*>(p));
  const uint64_t v = *p;
  machine->saw(false, "waiting for a rank");
  return v;
}
inline void store_link(uint64_t* p, uint64_t v) {
  const uint32_t parts[4] = {static_cast<uint32_t>(v), static_cast<uint32_t>(v >> 32), 0, 0};
  machine->store(reinterpret_cast<uint32_t*>(p), parts, 3);
}
inline void load_links(const uint64_t* p, uint64_t& a, uint64_t& b) {
  const bool turned = machine->once_in(2);  // in either order
  (turned ? b : a) = load_link(p + turned);
  (turned ? a : b) = load_link(p + !turned);
}
inline void store_links(uint64_t* p, uint64_t a, uint64_t b) { store_link(p, a), store_link(p + 1, b); }
inline void store_row_word(uint4* p, uint4 v) { store_word(p, v); }
inline uint4 load_row_word(const uint4* p) {
  machine->touch(p, 16, 16);
  return *p;
}
inline float load_row_value(const float* p) { return *p; }

inline void add_to_shared(uint32_t* p, uint32_t n) {
  if (machine->once_in(8)) machine->yield();
  *p += n;
}

inline void raise_counter(uint32_t* p) {
  machine->fence();
  ++*p;
  machine->yield();
}
inline uint32_t read_counter(const uint32_t* p) {
  const uint32_t v = *p;
  machine->saw(false, "waiting for a counter");  // a fiber that reads one is polling, or resting
  return v;
}
inline uint32_t read_flag(const uint32_t* p) { return read_counter(p); }
inline void mark_unhealthy(uint32_t* p) {
  const uint32_t zero[4] = {0, 0, 0, 0};
  machine->store(p, zero, 1);
}

template <int Count>
inline void take_registers() {}
template <int Count>
inline void give_registers() {}
inline bool claim(uint32_t* p) {
  const bool first = *p != 0;
  *p = 0;
  return first;
}

inline uint32_t load_host_flag(const uint32_t* p) { return *p; }
template <class T>
inline void store_to_host(T* p, T v) {
  *p = v;
}
inline void store_to_host(int* p, unsigned v) { *p = static_cast<int>(v); }
inline void fence_host() { machine->fence(); }
inline void fence_device() { machine->fence(); }
inline void fence_block() {}

inline int64_t clock_ns() { return 1000000 + static_cast<int64_t>(machine->now()); }
inline int64_t clock_ticks() { return clock_ns(); }
inline void rest(int ns) {
  machine->did_something();
  machine->current->doing = "resting";
  machine->sleep(4 * ns);
}

inline int opaque(int value) { return __shfl_sync(~0u, value, static_cast<int>(threadIdx.x % 32)); }
inline void consumers_meet(int threads) { host::meet(1, threads, true); }
inline bool consumers_agree(int threads, bool good) { return host::meet(1, threads, good); }

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
  for (int mask = 16; mask; mask >>= 1) {
    const uint32_t other = __shfl_xor_sync(~0u, value, mask);
    value = value < other ? other : value;
  }
  return value;
}
inline float infinity() { return INFINITY; }

// The product of a whole warp, from the fragments that mma.sync.m16n8k16 documents: lane l has rows l / 4 and l / 4 + 8
// of a, column l / 4 of b, and of each the values 2 * (l % 4), the next, and the two that are eight further on.
template <bool Float16>
inline void multiply_warp(host::Warp& warp, int slot) {
  float a[16][16], b[16][8], c[16][8] = {};
  bool empty[16], finite = true;
  for (bool& row : empty) row = true;
  for (int lane = 0; lane < 32; lane++) {
    const uint32_t* word = warp.operand[slot][lane];
    const int g = lane / 4, t = 2 * (lane % 4);
    for (int i = 0; i < 4; i++) {
      const int row = g + i % 2 * 8, k = t + i / 2 * 8;
      empty[row] &= word[i] == 0;
      a[row][k] = low_half<Float16>(word[i]), a[row][k + 1] = high_half<Float16>(word[i]);
    }
    for (int i = 0; i < 2; i++) {
      const float low = low_half<Float16>(word[4 + i]), high = high_half<Float16>(word[4 + i]);
      finite &= low - low == 0 && high - high == 0;
      b[t + 8 * i][g] = low, b[t + 8 * i + 1][g] = high;
    }
  }
  for (int row = 0; row < 16; row++) {
    if (empty[row] && finite) continue;  // most rows are, and most of the time would go here
    for (int k = 0; k < 16; k++)
      for (int n = 0; n < 8; n++) c[row][n] += a[row][k] * b[k][n];
  }
  for (int lane = 0; lane < 32; lane++)
    for (int i = 0; i < 4; i++) warp.result[slot][lane][i] = c[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2];
}
template <bool Float16 = kFloat16>
inline void multiply_accumulate(float* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  const int slot = host::turn(), lane = machine->current->lane();
  host::Warp& warp = machine->block().warp[machine->current->warp()];
  const uint32_t words[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(warp.operand[slot][lane], words, sizeof(words));
  host::come_together(host::Collective::multiply, [slot](host::Warp& w) { multiply_warp<Float16>(w, slot); });
  for (int i = 0; i < 4; i++) c[i] += warp.result[slot][lane][i];
}

// The same with bytes: mma.sync.m16n8k32, in which a lane has values 4 * (l % 4) to the third from it, and those 16 further on.
inline void multiply_warp_bytes(host::Warp& warp, int slot) {
  int a[16][32], b[32][8], c[16][8] = {};
  for (int lane = 0; lane < 32; lane++) {
    const uint32_t* word = warp.operand[slot][lane];
    const int g = lane / 4, t = 4 * (lane % 4);
    for (int byte = 0; byte < 4; byte++) {
      for (int i = 0; i < 4; i++) a[g + i % 2 * 8][t + i / 2 * 16 + byte] = word[i] >> 8 * byte & 0xff;
      for (int i = 0; i < 2; i++) b[t + 16 * i + byte][g] = static_cast<signed char>(word[4 + i] >> 8 * byte & 0xff);
    }
  }
  for (int row = 0; row < 16; row++)
    for (int k = 0; k < 32; k++)
      for (int n = 0; n < 8; n++) c[row][n] += a[row][k] * b[k][n];
  for (int lane = 0; lane < 32; lane++)
    for (int i = 0; i < 4; i++) warp.integers[slot][lane][i] = c[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2];
}
inline void multiply_accumulate_bytes(int* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  const int slot = host::turn(), lane = machine->current->lane();
  host::Warp& warp = machine->block().warp[machine->current->warp()];
  const uint32_t words[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(warp.operand[slot][lane], words, sizeof(words));
  host::come_together(host::Collective::multiply, [slot](host::Warp& w) { multiply_warp_bytes(w, slot); });
  for (int i = 0; i < 4; i++) c[i] += warp.integers[slot][lane][i];
}

// Products of a group are a thread's own here: it reads operands and adds when it waits for them, or at once.
inline int operand_place(int lane) { return (lane & ~3) | ((lane ^ lane >> 3) & 3); }
inline bool operand_row(bool float16, const uint8_t* operand, int row, int half, float (&value)[16]) {
  const uint8_t* block = operand + row / 8 * 512;
  uint16_t bits[16];
  for (int word = 0; word < 2; word++) memcpy(bits + 8 * word, block + 16 * operand_place(row % 8 * 4 + 2 * half + word), 16);
  bool any = false;
  for (int i = 0; i < 16; i++) value[i] = widen_as(float16, bits[i]), any |= bits[i] != 0;
  return any;
}
inline void do_product(const host::AsyncProduct& product) {
  const int lane = machine->current->lane(), row = machine->current->warp() % 4 * 16 + lane / 4;
  float a[2][16], b[16];
  bool any[2] = {true, true};
  memcpy(a, product.rows, sizeof(a));
  for (int i = 0; i < 2 && product.first; i++) any[i] = operand_row(product.float16, product.first, row + 8 * i, product.half, a[i]);
  for (int tile = 0; tile < product.tiles && !product.add; tile++) memset(product.sums[tile], 0, 16);
  if (!any[0] && !any[1]) return;  // most rows are empty, and most of the time would go here
  for (int column = 0; column < product.tiles * 8; column++) {
    if (column % 8 / 2 != lane % 4) continue;
    operand_row(product.float16, product.second, column, product.half, b);
    for (int i = 0; i < 2; i++) {
      float sum = 0;
      for (int k = 0; k < 16; k++) sum += a[i][k] * b[k];
      product.sums[column / 8][2 * i + column % 2] += sum;
    }
  }
}
inline void do_products(int groups) {  // all of the groups before that one
  auto& products = machine->current->products;
  size_t done = 0;
  while (done < products.size() && products[done].group < groups) do_product(products[done++]);
  products.erase(products.begin(), products.begin() + static_cast<std::ptrdiff_t>(done));
}
inline void check_operand(const void* operand, int tiles) {
  machine->touch(operand, tiles * 512, 16);
  if ((static_cast<const uint8_t*>(operand) - machine->shared_memory(machine->current->block)) % 512)
    machine->fail("An operand that is not of whole blocks");
}
inline void begin_any_product(bool float16, float (*c)[4], bool add, const void* first, const void* second, int tiles, int half,
                              const float (&rows)[2][16]) {
  if (first) check_operand(first, 8);
  check_operand(second, tiles);
  host::AsyncProduct product = {c, add, static_cast<const uint8_t*>(first), static_cast<const uint8_t*>(second), tiles, half,
                                machine->current->product_group, {}, float16};
  memcpy(product.rows, rows, sizeof(rows));
  for (int tile = 0; tile < tiles; tile++)  // sums of products in flight must not be read
    for (int i = 0; i < 4 && !add; i++) c[tile][i] = NAN;
  machine->current->products.push_back(product);
  machine->did_something();
}
template <int Tiles, bool Float16 = kFloat16>
inline void begin_product(float (*c)[4], const void* first, const void* second, int half) {
  begin_any_product(Float16, c, true, first, second, Tiles, half, {});
}
inline void begin_first_product(float (*c)[4], const void* first, const void* second, int half) {
  begin_any_product(kFloat16, c, false, first, second, 8, half, {});
}
// The four lanes of a row have its values between them.
template <int Tiles>
inline void begin_weighted_product(float (*c)[4], const uint32_t (&a)[4], const void* second, int half) {
  float rows[2][16];
  for (int t = 0; t < 4; t++)
    for (int i = 0; i < 4; i++) {
      const uint32_t word = __shfl_sync(~0u, a[i], static_cast<int>(machine->current->lane() & ~3) + t);
      rows[i % 2][2 * t + i / 2 * 8] = low_half(word), rows[i % 2][2 * t + i / 2 * 8 + 1] = high_half(word);
    }
  begin_any_product(kFloat16, c, true, nullptr, second, Tiles, half, rows);
}
template <int Tiles>
inline void clear_sums(float (&c)[Tiles][4]) {
  memset(c, 0, sizeof(c));
}
inline void fence_products() {}
inline void end_product_group() {
  machine->current->product_group++;
  if (machine->once_in(4)) do_products(machine->current->product_group);
}
inline void wait_operands() {
  do_products(machine->current->product_group - 1);
  machine->yield();
}
template <int Tiles>
inline void wait_products(float (&)[Tiles][4]) {
  do_products(machine->current->product_group);
  machine->yield();
}

}  // namespace monotape

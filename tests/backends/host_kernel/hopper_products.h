// The machine of the host: fragments and products of machine/hopper.h.
#pragma once

namespace monotape {

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


#define MONOTAPE_RING  // bulk copies fill a ring of pages: worker/ring.h
#define MONOTAPE_UNIT "machine/hopper_unit.h"  // how a warp attends to a unit of KV
#define MONOTAPE_GROUPS "machine/hopper_groups.h"
constexpr int kSharedMemory = 227 * 1024;
constexpr bool kFewRegisters = false;  // true: no address is kept over a barrier
// A prefill's operands in shared memory: steps at least, and blocks of k in one step of so many tiles.
constexpr int kLeastSteps = 4, kLeastAttendedSteps = 4, kAttendedUnits = 2;
__host__ __device__ constexpr int step_blocks(int tiles) { return tiles > 32 ? 1 : 2; }


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
// The four lanes of a row have its values between them.
template <int Tiles, bool Add = true>
inline void begin_weighted_product(float (*c)[4], const uint32_t (&a)[4], const void* second, int half) {
  float rows[2][16];
  for (int t = 0; t < 4; t++)
    for (int i = 0; i < 4; i++) {
      const uint32_t word = __shfl_sync(~0u, a[i], static_cast<int>(machine->current->lane() & ~3) + t);
      rows[i % 2][2 * t + i / 2 * 8] = low_half(word), rows[i % 2][2 * t + i / 2 * 8 + 1] = high_half(word);
    }
  begin_any_product(kFloat16, c, Add, nullptr, second, Tiles, half, rows);
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

using TokenInput = uint2;
constexpr int kTokenSums = 4, kGroupInputs = 8;  // inputs of a group of 32 values of k, in shared memory
__device__ __forceinline__ uint4 input_order(uint4 word) { return make_uint4(word.x, word.z, word.y, word.w); }
__device__ __forceinline__ TokenInput no_input() { return make_uint2(0, 0); }
// Whose input a lane takes: which row of the pass, and which inputs from the warp's first on, of blocks of `sub` groups.
__device__ __forceinline__ int input_pass(unsigned lane) { return fragment_row(lane) / 2; }
__device__ __forceinline__ int first_input(unsigned lane, int) { return fragment_column(lane) * 2; }
__device__ __forceinline__ int second_input(unsigned lane) { return fragment_row(lane) % 2; }
__device__ __forceinline__ bool takes_input(unsigned) { return true; }
inline uint2 load_half(const uint2* p);
using InputPlace = const uint2*;
constexpr int kPlacesInWord = 2;
inline InputPlace input_place(const uint4* word, unsigned lane) { return reinterpret_cast<const uint2*>(word) + second_input(lane); }
inline TokenInput load_input(InputPlace place, unsigned) { return load_half(place); }
inline bool input_came(TokenInput v) { return v.x != ~0u && v.y != ~0u; }
template <bool Float16>
__device__ __forceinline__ void multiply_token(float* sums, const uint4& w, TokenInput x) {
  multiply_accumulate<Float16>(sums, w.x, w.y, w.z, w.w, x.x, x.y);
}
// A lane's part of the product, then the whole of it: of which row of the tile, and of which row of the pass.
__device__ __forceinline__ float token_part(const float* sums, unsigned) { return sums[0] + sums[3]; }
__device__ __forceinline__ float token_whole(float part) { return part; }
__device__ __forceinline__ int token_row(unsigned lane) { return fragment_row(lane); }
__device__ __forceinline__ int token_pass(unsigned lane) { return fragment_column(lane); }
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

// CDNA3: products. One instruction multiplies 16 rows of a, 16 columns of b and 16 values of k: lane l has row (of b: column)
// l % 16 and four values of k, those of slot l / 16; of the sums it has column l % 16 and rows 4 * (l / 16) onwards
// (`multiply_slots` in cdna3.h). No instruction is here: the host's machine runs this file as it is.
#pragma once

namespace monotape {

// Eight values of k of each lane.
template <bool Float16>
__device__ __forceinline__ void multiply_words(float* c, const uint4& a, const uint4& b) {
  multiply_slots<Float16>(c, make_uint2(a.x, a.y), make_uint2(b.x, b.y));
  multiply_slots<Float16>(c, make_uint2(a.z, a.w), make_uint2(b.z, b.w));
}

// An operand's block is the words of 32 lanes, 16 bytes each: two blocks lie side by side in a wave.
constexpr int kBlockLanes = 32, kSide = kLanes / kBlockLanes;
__device__ __forceinline__ int fragment_side(unsigned lane) { return static_cast<int>(lane / 32); }
__device__ __forceinline__ int fragment_word(unsigned lane) { return static_cast<int>(lane % 32); }
__device__ __forceinline__ int fragment_row(unsigned lane) { return static_cast<int>(lane % 32 / 4); }
__device__ __forceinline__ int fragment_column(unsigned lane) { return static_cast<int>(lane % 4); }

// Heads side by side in a wave: sixteen, as the columns of a product.
constexpr int kHeadLanes = 16;
__device__ __forceinline__ int head_row(unsigned lane) { return static_cast<int>(lane % 16); }
__device__ __forceinline__ int head_column(unsigned lane) { return static_cast<int>(lane / 16); }
__device__ __forceinline__ float sum_of_head(float value) {
  value += lane_across(value, 16);
  return value + lane_across(value, 32);
}
__device__ __forceinline__ float largest_of_head(float value) {
  value = fmaxf(value, lane_across(value, 16));
  return fmaxf(value, lane_across(value, 32));
}

// Blocks of weights times a token's activations. A wave's words as they lie are an operand whose row a has, in slots 0 and 2,
// row a / 4 of the tile and, in slots 1 and 3, row 4 + a / 4, each with word a % 4 of its block. So column j of the other
// operand has activations of word j % 4, and zeros in the slots whose rows it does not take: it takes rows of the lower half
// of the tile where j / 4 is even. Of a lane's four sums the one of its own word counts, and the sum of a row is that of its
// four words' lanes. Columns 8 onwards are for a second row of the pass.
static_assert(kRows <= 2, "rows of a pass that the columns of a product have room for");
using TokenInput = uint4;
constexpr int kTokenSums = 4, kGroupInputs = 4;
__device__ __forceinline__ uint4 input_order(uint4 word) { return word; }
__device__ __forceinline__ TokenInput no_input() { return make_uint4(0, 0, 0, 0); }
__device__ __forceinline__ int input_pass(unsigned lane) { return fragment_row(lane) % 4 / 2; }
__device__ __forceinline__ int first_input(unsigned lane, int sub) { return fragment_side(lane) * sub * kGroupInputs; }
__device__ __forceinline__ int second_input(unsigned lane) { return fragment_column(lane); }
__device__ __forceinline__ bool takes_input(unsigned lane) { return fragment_row(lane) / 4 == fragment_row(lane) % 2; }
// A lane's word of the exchange is its input.
using InputPlace = const uint4*;
constexpr int kPlacesInWord = 1;
__device__ __forceinline__ InputPlace input_place(const uint4* word, unsigned) { return word; }
__device__ __forceinline__ TokenInput load_input(InputPlace place, unsigned lane) { return takes_input(lane) ? load_word(place) : no_input(); }
__device__ __forceinline__ bool input_came(TokenInput v) { return v.x != ~0u && v.y != ~0u && v.z != ~0u && v.w != ~0u; }
template <bool Float16>
__device__ __forceinline__ void multiply_token(float* sums, const uint4& w, TokenInput x) {
  multiply_words<Float16>(sums, w, x);
}
__device__ __forceinline__ float token_part(const float* sums, unsigned lane) {
  const float first = sums[0], second = sums[1], third = sums[2], fourth = sums[3];  // values: a chosen place would not be a register
  const float low = lane % 2 ? second : first, high = lane % 2 ? fourth : third;
  return lane % 4 / 2 ? high : low;
}
__device__ __forceinline__ float token_whole(float part) {
  part += lane_across(part, 1);
  return part + lane_across(part, 2);
}
__device__ __forceinline__ int token_row(unsigned lane) { return static_cast<int>(lane / 16 + lane / 4 % 2 * 4); }
__device__ __forceinline__ int token_pass(unsigned lane) { return lane % 4 ? kRows : fragment_row(lane) % 4 / 2; }

// Products of a group of four waves, whose operands lie in the LDS. Columns are the first operand of the instruction, so that
// a lane has four neighbouring columns of one row, which is row 16 w + lane % 16 of wave w of the group.
constexpr int kLeastSteps = 3, kLeastAttendedSteps = 2, kAttendedUnits = 1;
__host__ __device__ constexpr int step_blocks(int) { return 1; }
constexpr int kLaneRows = 1, kRowSums = 4 / kLaneRows, kTileSums = 2;
template <int Tiles>
constexpr int kSumTiles = Tiles / 2;
__device__ __forceinline__ int sum_row(unsigned lane) { return static_cast<int>(lane % 16); }
__device__ __forceinline__ int sum_column(unsigned lane) { return static_cast<int>(lane / 16 * 4); }
__host__ __device__ __forceinline__ constexpr int sum_step(int t, int i) { return t * 16 + i; }
__device__ __forceinline__ int sum_word(unsigned lane, int t) { return static_cast<int>(2 * t + lane / 32); }
__device__ __forceinline__ int sum_pair(unsigned lane, int i) { return static_cast<int>(lane / 16 % 2 * 2) + i / 2; }
__device__ __forceinline__ int score_position(int first, unsigned lane, int t, int i) {
  const int column = sum_step(t, i) + sum_column(lane), slot = column % 32;
  return first + column / 32 * 32 + slot % 8 / 2 * 8 + slot / 8 * 2 + slot % 2;
}

// Words of a block lie so that the lanes of a product read different banks.
__device__ __forceinline__ int operand_place(int lane) { return (lane & ~3) | ((lane ^ lane >> 3) & 3); }
// A lane's 16 bytes of a row of an operand, or the half of them that belongs to 16 of the block's 32 values of k.
__device__ __forceinline__ const uint8_t* operand_word(const void* operand, unsigned row, unsigned word) {
  return static_cast<const uint8_t*>(operand) + row / 8 * 512 + operand_place(static_cast<int>(row % 8 * 4 + word)) * 16;
}
__device__ __forceinline__ uint2 operand_slot(const void* operand, unsigned row, int half, unsigned slot) {
  return *reinterpret_cast<const uint2*>(operand_word(operand, row, 2 * static_cast<unsigned>(half) + slot / 2) + slot % 2 * 8);
}
template <int Tiles, bool Float16 = kFloat16>
__device__ __forceinline__ void multiply_tiles_by(float (*c)[4], uint2 row, const void* second, int half) {
  const unsigned lane = static_cast<unsigned>(lane_number());
#pragma unroll
  for (int t = 0; t < Tiles / 2; t++) multiply_slots<Float16>(c[t], operand_slot(second, 16 * t + lane % 16, half, lane / 16), row);
}
template <int Tiles, bool Float16 = kFloat16>
__device__ __forceinline__ void begin_product(float (*c)[4], const void* first, const void* second, int half) {
  const unsigned lane = static_cast<unsigned>(lane_number()), wave = static_cast<unsigned>(warp_number()) % 4;
  multiply_tiles_by<Tiles, Float16>(c, operand_slot(first, 16 * wave + lane % 16, half, lane / 16), second, half);
}
template <int Tiles>
__device__ __forceinline__ void begin_weighted_product(float (*c)[4], const uint32_t (&a)[2], const void* second, int half) {
  multiply_tiles_by<Tiles>(c, make_uint2(a[0], a[1]), second, half);
}
template <int Tiles>
__device__ __forceinline__ void clear_sums(float (&c)[Tiles][4]) {
#pragma unroll
  for (int t = 0; t < Tiles; t++) c[t][0] = c[t][1] = c[t][2] = c[t][3] = 0;
}
__device__ __forceinline__ void fence_products() {}
__device__ __forceinline__ void end_product_group() {}
__device__ __forceinline__ void wait_operands() {}
template <int Tiles>
__device__ __forceinline__ void wait_products(float (&)[Tiles][4]) {}

// Queries of a prefill stay in registers: the LDS has no room for them beside keys and values.
template <int Blocks>
struct RowQueries {
  uint4 word[Blocks];

  template <class RowOf>
  __device__ __forceinline__ void load(RowOf row_of, unsigned lane) {
    const uint4* query = row_of(0);
#pragma unroll
    for (int b = 0; b < Blocks; b++) {
      const int at = static_cast<int>(4 * b + lane / 16);
      word[b] = query && at < kHeadDim / 8 ? query[at] : make_uint4(0, 0, 0, 0);
    }
  }
  template <int Sums>
  __device__ __forceinline__ void multiply(const uint8_t* keys, float (&score)[Sums][4]) const {
    const unsigned lane = static_cast<unsigned>(lane_number());
    clear_sums(score);
#pragma unroll
    for (int b = 0; b < Blocks; b++)
#pragma unroll
      for (int t = 0; t < Sums; t++) {
        const uint8_t* key = operand_word(keys + b * Sums * 2 * 512, 16 * t + lane % 16, lane / 16);
        multiply_words<kFloat16>(score[t], *reinterpret_cast<const uint4*>(key), word[b]);
      }
  }
};

}  // namespace monotape

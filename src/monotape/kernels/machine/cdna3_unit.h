// CDNA3: how a wave attends to a unit of KV, as the fragments of its products lie.
#pragma once

namespace monotape {

static_assert(!kNarrowKv, "KV in 16 bits");

// Attention of a token. Keys are the first operand, in an order of positions that makes the weights of the scores, as they
// come, the second operand of the product with the values: a lane has two scores of each tile of eight positions.
__device__ __forceinline__ const uint4* own_words(const uint4* unit, unsigned) { return unit; }
__device__ __forceinline__ int key_position(unsigned lane, int m) {
  return static_cast<int>(16 * m + lane % 16 / 4 * 2 + lane % 2 + lane % 4 / 2 * 8);
}
template <int Blocks>
struct KeyWords {
  uint4 word[2][Blocks];

  __device__ __forceinline__ void load(const uint4* keys, unsigned lane) {
#pragma unroll
    for (int m = 0; m < 2; m++) {
      const int at = key_position(lane, m);
#pragma unroll
      for (int b = 0; b < Blocks; b++) word[m][b] = keys[(at / 8 * Blocks + b) * kBlockLanes + at % 8 * 4 + head_column(lane)];
    }
  }
  // The key of a position that is not in memory yet.
  __device__ __forceinline__ void insert(const uint4* key, int position, unsigned lane) {
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int b = 0; b < Blocks; b++)
        if (key_position(lane, m) == position) word[m][b] = key[b * 4 + head_column(lane)];
  }
  __device__ __forceinline__ void multiply(const uint4 (&query)[Blocks], float (&sum)[4][4]) const {
    float both[2][4] = {};
#pragma unroll
    for (int b = 0; b < Blocks; b++)
#pragma unroll
      for (int m = 0; m < 2; m++) multiply_words<kFloat16>(both[m], word[m][b], query[b]);
#pragma unroll
    for (int tile = 0; tile < 4; tile++) sum[tile][0] = both[tile / 2][tile % 2 * 2], sum[tile][1] = both[tile / 2][tile % 2 * 2 + 1];
  }
};
template <int Tiles>
struct ValueWords {
  static constexpr int kPairs = (Tiles + 1) / 2;
  uint4 word[kPairs];

  __device__ __forceinline__ void load(const uint4* values, unsigned lane) {
    const int half = static_cast<int>(lane % 16 / 8), row = static_cast<int>(lane % 8);
#pragma unroll
    for (int j = 0; j < kPairs; j++) {
      const bool there = Tiles % 2 == 0 || 2 * j + half < Tiles;
      word[j] = there ? values[(2 * j + half) * kBlockLanes + row * 4 + head_column(lane)] : make_uint4(0, 0, 0, 0);
    }
  }
  // The value of a position, `slot` of its row, that is not in memory yet.
  __device__ __forceinline__ void insert(const uint16_t* value, int slot, unsigned lane) {
    if (slot / 8 != head_column(lane)) return;
    const int pair = slot % 8 / 2, shift = slot % 2 * 16;
#pragma unroll
    for (int j = 0; j < kPairs; j++) {
      const int d = static_cast<int>(16 * j + lane % 16);
      const uint32_t keep = ~(0xffffu << shift), own = static_cast<uint32_t>(d < 8 * Tiles ? value[d] : 0) << shift;
      word[j].x = pair == 0 ? (word[j].x & keep) | own : word[j].x;
      word[j].y = pair == 1 ? (word[j].y & keep) | own : word[j].y;
      word[j].z = pair == 2 ? (word[j].z & keep) | own : word[j].z;
      word[j].w = pair == 3 ? (word[j].w & keep) | own : word[j].w;
    }
  }
  __device__ __forceinline__ void multiply(const uint32_t (&weight)[4], float (&values)[kPairs][4]) const {
#pragma unroll
    for (int j = 0; j < kPairs; j++) multiply_words<kFloat16>(values[j], word[j], make_uint4(weight[0], weight[1], weight[2], weight[3]));
  }
};
__device__ __forceinline__ int value_head(unsigned lane, int) { return head_row(lane); }
__device__ __forceinline__ int value_dimension(unsigned lane, int j, int i) { return 16 * j + 4 * head_column(lane) + i; }
struct OfHeads {
  float own;
  __device__ __forceinline__ OfHeads(float of_lane, unsigned) : own(of_lane) {}
  __device__ __forceinline__ float operator[](int) const { return own; }
};

// The unnormalised softmax of some positions, for the query heads that share a KV head: peak and sum of the lane's own head,
// values of the heads and dimensions that the machine's header says.
constexpr int kValueTiles = divide_up(kHeadTiles, 2);

struct Running {
  float peak = -infinity(), sum = 0;
  float values[kValueTiles][4];

  __device__ void clear() {
#pragma unroll
    for (int j = 0; j < kValueTiles; j++) values[j][0] = values[j][1] = values[j][2] = values[j][3] = 0;
  }
};

// One unit of 32 positions, of which [begin, end) are visible. All loads come before the products, and consecutive products
// are independent.
// `newest` is the place of the new token's key and value where the unit in memory does not have them yet; -1: it has.
__device__ __forceinline__ void look_at(Consumer& c, const uint4* unit, const Head& query, int begin, int end, Running& running, int newest) {
  KeyWords<kHeadBlocks> keys;
  const uint4* own = own_words(unit, c.lane());
  keys.load(own, c.lane());
  if (newest >= 0) keys.insert(c.shared.new_key, newest, c.lane());
  float sum[4][4] = {}, score[4][2];
  keys.multiply(query.block, sum);
  ValueWords<kHeadTiles> values;
  values.load(own + kKeyBlocks * kBlockWords, c.lane());
  if (newest >= 0) values.insert(c.shared.new_value, value_slot(newest), c.lane());
  float top = running.peak;
#pragma unroll
  for (int tile = 0; tile < 4; tile++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int at = tile * 8 + 2 * head_column(c.lane()) + i;
      score[tile][i] = at >= begin && at < end ? sum[tile][i] : -infinity();
      top = fmaxf(top, score[tile][i]);
    }
  top = largest_of_head(top);
  if (top == -infinity()) top = 0;  // no visible position: all weights are zero
  const float fade = exponential(running.peak - top);
  running.peak = top;
  uint32_t weight[4];
  float total = 0;
#pragma unroll
  for (int tile = 0; tile < 4; tile++) {
    const float a = exponential(score[tile][0] - top), b = exponential(score[tile][1] - top);
    total += a + b;
    weight[tile] = pack_pair(a, b);
  }
  total = sum_of_head(total);
  running.sum = running.sum * fade + total;
  const OfHeads fades(fade, c.lane());
#pragma unroll
  for (int j = 0; j < kValueTiles; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) running.values[j][i] *= fades[i];
  values.multiply(weight, running.values);
}

// Stores the warp's part in shared memory, head by head.
__device__ __forceinline__ void keep_part(Consumer& c, const Running& running, int place) {
  float(*part)[kPartValues] = c.shared.attention[place];
#pragma unroll
  for (int j = 0; j < kValueTiles; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int head = value_head(c.lane(), i), d = value_dimension(c.lane(), j, i);
      if (head < kGroup && d < kHeadDim) part[head][d] = running.values[j][i];
    }
  const int row = head_row(c.lane());
  if (head_column(c.lane()) == 0 && row < kGroup) part[row][kHeadDim] = running.peak, part[row][kHeadDim + 1] = running.sum;
}

}  // namespace monotape

// Rows: the tokens of a prompt go through the model together, a chunk at a time. Parts are separated by a barrier of all
// workers, activations lie in global memory, and the ring's shared memory serves as the buffer of ordinary matrix
// products. A product that too few workers would share is cut along k as well: it leaves sums of its pieces, which the
// part after it adds up in order.
#pragma once
#include "heads.h"
#include "model.h"

namespace monotape {

struct Chunk {
  int start, count;  // position of its first row, and how many rows it has
};

// What a chunk passes in each layer, in this order; a barrier after each.
enum class Part : int { attention_norm, qkv, heads, attention, combine, output, ffn_norm, gate_up, down };
constexpr int kParts = 9;

// How a product is cut into blocks of work: their shape, and how many pieces of k. See rows_matrix.h.
struct Cut {
  int shape, pieces;
};

// What a prefill is at. It lies in shared memory, where decoding has its sums, because a part takes all registers: what
// follows from it is worked out anew wherever it is needed.
struct RowsState {
  Chunk chunk;
  int number;  // of the part, counted through all layers
  Cut cuts[kMatrixStages];

  __device__ __forceinline__ int layer() const { return number / kParts; }
  __device__ __forceinline__ Part part() const { return static_cast<Part>(number % kParts); }
};
__device__ __forceinline__ RowsState& rows_state(Consumer& c) { return *reinterpret_cast<RowsState*>(c.shared.sums[1]); }

// All workers have arrived, and see what the others wrote before. The next part begins.
__device__ inline bool all_meet(Consumer& c, int parts) {
  if (!c.meet()) return false;
  if (c.thread == 0) {
    const int barriers = ++c.shared.barriers;
    c.shared.progress = c.shared.progress + 1;
    raise_counter(&c.params.exchange->counter);
    Patience patience(c.shared, c.lost, Stage::rows, rows_state(c).layer());
    while (static_cast<int>(read_counter(&c.params.exchange->counter)) < barriers * kWorkers - 1)
      if (!patience.more(barriers)) break;
    rows_state(c).number += parts;
  }
  return c.meet();
}

// Items are dealt out to the warps of all workers.
template <class Work>
__device__ __forceinline__ void for_each_item(Consumer& c, int items, Work work) {
#pragma unroll 1
  for (int item = c.warp() * kWorkers + blockIdx.x; item < items; item += kWarps * kWorkers) work(item);
}

// Where word `word` (eight values) of a row lies in an array of blocks.
__device__ __forceinline__ int64_t block_word(int row, int word, int blocks) {
  return (static_cast<int64_t>(row / kTileRows) * blocks + word / 4) * kBlockWords + row % kTileRows * 4 + word % 4;
}

__device__ __forceinline__ void load_row_values(const float* from, float (&value)[8]) {
  const uint4 low = load_row_word(reinterpret_cast<const uint4*>(from)), high = load_row_word(reinterpret_cast<const uint4*>(from) + 1);
  const uint32_t bits[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < 8; i++) value[i] = __uint_as_float(bits[i]);
}
__device__ __forceinline__ void store_row_values(float* to, const float (&value)[8]) {
#pragma unroll
  for (int i = 0; i < 2; i++)
    reinterpret_cast<uint4*>(to)[i] = make_uint4(__float_as_uint(value[4 * i]), __float_as_uint(value[4 * i + 1]),
                                                 __float_as_uint(value[4 * i + 2]), __float_as_uint(value[4 * i + 3]));
}

// What a product left: sums of each of its pieces of k, [pieces][rows of the chunk][words of eight].
struct Pieces {
  int count, rows, words;
};

__device__ __forceinline__ float* piece_values(const Params& params, const Pieces& pieces, int piece, int row, int word) {
  return params.rows.partials + ((static_cast<int64_t>(piece) * pieces.rows + row) * pieces.words + word) * 8;
}
// Adds eight neighbouring sums of a row, piece after piece.
__device__ __forceinline__ void add_pieces(const Params& params, const Pieces& pieces, int row, int word, float (&value)[8]) {
#pragma unroll 4
  for (int piece = 0; piece < pieces.count; piece++) {
    float sums[8];
    load_row_values(piece_values(params, pieces, piece, row, word), sums);
#pragma unroll
    for (int i = 0; i < 8; i++) value[i] += sums[i];
  }
}

// The same of what several ranks have sent of a module: see ranks_rows.h.
__device__ __forceinline__ void add_ranks(Consumer& c, int row, int word, float (&value)[8]);

__device__ __forceinline__ float* residual_values(const Params& params, int row, int word) {
  return params.rows.residual + (static_cast<int64_t>(row) * kWidthWords + word) * 8;
}
__device__ __forceinline__ void load_embedding(const Params& params, int token, int word, float (&value)[8]) {
  if constexpr (kWidth % 8 == 0) {
    unpack8(*reinterpret_cast<const uint4*>(embedding_value(params, token, word * 8)), value);
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++) value[i] = word * 8 + i < kWidth ? widen(*embedding_value(params, token, word * 8 + i)) : 0;
  }
}

// The residual stream takes in what the product before has left (or begins, with the embedding), and its normalised
// values become the next one's input. All threads of a worker share a row, and a worker has several rows at a time.
class RowNorm {
 public:
  static constexpr int kWords = divide_up(kWidthWords, kConsumers), kRows = larger(1, 4 / kWords);

  __device__ RowNorm(Consumer& c, Pieces pieces, const float* gain, bool first)
      : c_(c), chunk_(rows_state(c).chunk), pieces_(pieces), gain_(gain), first_(first) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (int row = blockIdx.x; row < chunk_.count; row += kRows * kWorkers) {
      float value[kRows][kWords][8];
#pragma unroll
      for (int r = 0; r < kRows; r++) read(row + r * kWorkers, value[r]);
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        const float squares = warp_sum(squares_of(value[r]));
        if (c_.lane() == 0) squares_at(r)[c_.warp()] = squares;
      }
      consumers_meet(kConsumers);
#pragma unroll
      for (int r = 0; r < kRows; r++) write(row + r * kWorkers, squares_at(r), value[r]);
      consumers_meet(kConsumers);  // everybody has read the squares
    }
  }

 private:
  __device__ __forceinline__ float* squares_at(int r) { return c_.shared.sums[0][0][r]; }
  __device__ __forceinline__ bool mine(int row, int word) const { return row < chunk_.count && word < kWidthWords; }

  __device__ __forceinline__ void read(int row, float (&value)[kWords][8]) {
#pragma unroll
    for (int w = 0; w < kWords; w++) {
      const int word = c_.thread + w * kConsumers;
#pragma unroll
      for (int i = 0; i < 8; i++) value[w][i] = 0;
      if (!mine(row, word)) continue;
      if (first_) load_embedding(c_.params, c_.params.prompt[chunk_.start + row], word, value[w]);
      else load_row_values(residual_values(c_.params, row, word), value[w]);
      if constexpr (kRanks == 1) add_pieces(c_.params, pieces_, row, word, value[w]);
      else add_ranks(c_, row, word, value[w]);
    }
  }
  __device__ __forceinline__ float squares_of(const float (&value)[kWords][8]) const {
    float squares = 0;
#pragma unroll
    for (int w = 0; w < kWords; w++)
#pragma unroll
      for (int i = 0; i < 8; i++) squares += value[w][i] * value[w][i];
    return squares;
  }
  __device__ __forceinline__ void write(int row, const float* squares, float (&value)[kWords][8]) {
    float total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; w++) total += squares[w];
    const float scale = rsqrtf(total / kWidth + kNormEps);
#pragma unroll
    for (int w = 0; w < kWords; w++) {
      const int word = c_.thread + w * kConsumers;
      if (!mine(row, word)) continue;
      store_row_values(residual_values(c_.params, row, word), value[w]);
#pragma unroll
      for (int i = 0; i < 8; i++) value[w][i] *= word * 8 + i < kWidth ? scale * gain_[word * 8 + i] : 0;
      c_.params.rows.normed[block_word(row, word, k_blocks(Stage::qkv))] = pack8(value[w]);
    }
  }

  Consumer& c_;
  Chunk chunk_;
  Pieces pieces_;
  const float* gain_;
  bool first_;
};

// A head's words of a row, as the qkv product left them, rounded as a token's are.
__device__ __forceinline__ uint4 qkv_word(const Params& params, const Pieces& pieces, int layer, int row, int word) {
  float value[8];
#pragma unroll
  for (int i = 0; i < 8; i++)
    value[i] = kQkvBias ? params.qkv_bias[static_cast<int64_t>(layer) * kQkvRows + word * 8 + i] : 0;
  add_pieces(params, pieces, row, word, value);
  return pack8(value);
}

// Queries and keys are normalised and rotated; keys go into the KV with the values. A warp does eight rows of a head.
__device__ inline void finish_heads(Consumer& c, Pieces pieces) {
  const Chunk chunk = rows_state(c).chunk;
  const int layer = rows_state(c).layer();
  for_each_item(c, divide_up(chunk.count, 8) * (kHeads + kKvHeads), [&](int item) {
    const int head = item % (kHeads + kKvHeads), row = item / (kHeads + kKvHeads) * 8 + c.row(), position = chunk.start + row;
    const bool real = row < chunk.count, is_key = head >= kHeads;
    int number[HeadWords::count];
    HeadWords::numbers(c.column(), number);
    uint4 word[HeadWords::count];
#pragma unroll
    for (int i = 0; i < HeadWords::count; i++)
      word[i] = real && number[i] >= 0 ? qkv_word(c.params, pieces, layer, row, head * kHeadWords + number[i]) : make_uint4(0, 0, 0, 0);
    const float* gain = kQkNorm ? (is_key ? c.params.k_norm : c.params.q_norm) + layer * kHeadDim : nullptr;
    const Head done = finish_head(word, c.column(), gain, angles_of(c.params, real ? position : chunk.start),
                                  is_key ? 1.0f : kAttentionScale);
    if (!real) return;
    uint8_t* unit = kv_unit(c.params, layer, is_key ? head - kHeads : 0, position / kUnitPositions);
#pragma unroll
    for (int b = 0; b < kHeadBlocks; b++) {
      const int at = 4 * b + c.column();
      if (is_key) store_key_word(unit, position, b, c.column(), done.block[b]);
      if (at >= kHeadWords) continue;
      if (!is_key) {
        c.params.rows.queries[static_cast<int64_t>(row) * kAttendedWords + head * kHeadWords + at] = done.block[b];
        continue;
      }
      const uint4 value = qkv_word(c.params, pieces, layer, row, (head + kKvHeads) * kHeadWords + at);
      const uint32_t pair[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
      for (int i = 0; i < 8; i++)
        *value_place(unit, position, at * 8 + i) = static_cast<uint16_t>(pair[i / 2] >> (i % 2 * 16));
    }
  });
}

// The chunk's last row becomes what the head starts from.
__device__ inline void publish_last_row(Consumer& c, Pieces pieces) {
  const Span& owned = c.span(Stage::output);
  const int row = rows_state(c).chunk.count - 1;
#pragma unroll 1
  for (int tile = c.thread; tile < owned.count; tile += kConsumers) {
    float value[8];
    load_row_values(residual_values(c.params, row, owned.first + tile), value);
    if constexpr (kRanks == 1) add_pieces(c.params, pieces, row, owned.first + tile, value);
    else add_ranks(c, row, owned.first + tile, value);
    publish(c.params.exchange->final_residual, c.sample_turn(), owned.first + tile, pack8(value));
  }
}

}  // namespace monotape

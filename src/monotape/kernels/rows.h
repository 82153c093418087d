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
// Adds sums of each of several places in a piece, in words (negative: nothing), piece after piece. `AtOnce` pieces are on
// their way together: one after another they would take the time of as many loads.
template <int AtOnce, int Places>
__device__ __forceinline__ void add_pieces(const Params& params, const Pieces& pieces, const int (&place)[Places], float (&value)[Places][8]) {
#pragma unroll 1
  for (int first = 0; first < pieces.count; first += AtOnce) {
    float sums[AtOnce][Places][8];
#pragma unroll
    for (int i = 0; i < AtOnce; i++)
#pragma unroll
      for (int n = 0; n < Places; n++) {
#pragma unroll
        for (int k = 0; k < 8; k++) sums[i][n][k] = 0;
        if (first + i < pieces.count && place[n] >= 0) load_row_values(piece_values(params, pieces, first + i, 0, place[n]), sums[i][n]);
      }
#pragma unroll
    for (int i = 0; i < AtOnce; i++)
#pragma unroll
      for (int n = 0; n < Places; n++)
#pragma unroll
        for (int k = 0; k < 8; k++) value[n][k] += sums[i][n][k];
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
// values become the next one's input. All threads of a worker share a row, and a worker has `Rows` rows at a time.
template <int Rows>
class RowNorm {
 public:
  static constexpr int kWords = divide_up(kWidthWords, kConsumers), kPlaces = Rows * kWords;

  __device__ RowNorm(Consumer& c, Pieces pieces, const float* gain, bool first)
      : c_(c), chunk_(rows_state(c).chunk), pieces_(pieces), gain_(gain), first_(first) {}

  __device__ __forceinline__ void run() {
    float gain[kWords][8];  // they are under way with the first rows
#pragma unroll
    for (int w = 0; w < kWords; w++)
#pragma unroll
      for (int i = 0; i < 8; i++) gain[w][i] = word(w) * 8 + i < kWidth ? gain_[word(w) * 8 + i] : 0;
#pragma unroll 1
    for (int row = blockIdx.x; row < chunk_.count; row += Rows * kWorkers) {
      float value[kPlaces][8];
      read(row, value);
#pragma unroll
      for (int r = 0; r < Rows; r++) {
        const float squares = warp_sum(squares_of(value + r * kWords));
        if (c_.lane() == 0) squares_at(r)[c_.warp()] = squares;
      }
      consumers_meet(kConsumers);
#pragma unroll
      for (int r = 0; r < Rows; r++) write(row + r * kWorkers, squares_at(r), gain, value + r * kWords);
      consumers_meet(kConsumers);  // everybody has read the squares
    }
  }

 private:
  __device__ __forceinline__ float* squares_at(int r) { return c_.shared.sums[0][0][r]; }
  __device__ __forceinline__ int word(int w) const { return c_.thread + w * kConsumers; }
  __device__ __forceinline__ bool mine(int row, int w) const { return row < chunk_.count && word(w) < kWidthWords; }

  __device__ __forceinline__ void read(int row, float (&value)[kPlaces][8]) {
    int place[kPlaces];
#pragma unroll
    for (int n = 0; n < kPlaces; n++) {
      const int r = row + n / kWords * kWorkers, w = n % kWords;
      place[n] = mine(r, w) ? r * kWidthWords + word(w) : -1;
#pragma unroll
      for (int i = 0; i < 8; i++) value[n][i] = 0;
      if (place[n] < 0) continue;
      if (first_) load_embedding(c_.params, c_.params.prompt[chunk_.start + r], word(w), value[n]);
      else load_row_values(residual_values(c_.params, r, word(w)), value[n]);
    }
    if constexpr (kRanks == 1) {
      add_pieces<larger(1, 8 / kPlaces)>(c_.params, pieces_, place, value);
    } else {
#pragma unroll
      for (int n = 0; n < kPlaces; n++)
        if (place[n] >= 0) add_ranks(c_, row + n / kWords * kWorkers, word(n % kWords), value[n]);
    }
  }
  __device__ __forceinline__ float squares_of(const float (*value)[8]) const {
    float squares = 0;
#pragma unroll
    for (int w = 0; w < kWords; w++)
#pragma unroll
      for (int i = 0; i < 8; i++) squares += value[w][i] * value[w][i];
    return squares;
  }
  __device__ __forceinline__ void write(int row, const float* squares, const float (&gain)[kWords][8], float (*value)[8]) {
    float total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; w++) total += squares[w];
    const float scale = rsqrtf(total / kWidth + kNormEps);
#pragma unroll
    for (int w = 0; w < kWords; w++) {
      if (!mine(row, w)) continue;
      store_row_values(residual_values(c_.params, row, word(w)), value[w]);
#pragma unroll
      for (int i = 0; i < 8; i++) value[w][i] *= scale * gain[w][i];
      c_.params.rows.normed[block_word(row, word(w), k_blocks(Stage::qkv))] = pack8(value[w]);
    }
  }

  Consumer& c_;
  Chunk chunk_;
  Pieces pieces_;
  const float* gain_;
  bool first_;
};

constexpr float kQueryScale = kAttentionScale * 1.4426950408889634f;  // scores are exponents of two

// Of eight rows and one head: queries and keys are normalised and rotated; keys and values go into the KV.
class RowHead {
 public:
  __device__ RowHead(Consumer& c, Pieces pieces, int head, int row)
      : c_(c), pieces_(pieces), layer_(rows_state(c).layer()), head_(head), row_(row),
        position_(rows_state(c).chunk.start + row), real_(row < rows_state(c).chunk.count) {}

  __device__ __forceinline__ void keep_value() {
    int number[kHeadBlocks];
    uint4 value[kHeadBlocks];
#pragma unroll
    for (int b = 0; b < kHeadBlocks; b++) number[b] = 4 * b + c_.column() < kHeadWords ? 4 * b + c_.column() : -1;
    read(number, value);
    if (!real_) return;
    uint8_t* unit = kv_unit(c_.params, layer_, head_ - kHeads - kKvHeads, position_ / kUnitPositions);
#pragma unroll
    for (int b = 0; b < kHeadBlocks; b++) {
      if (number[b] < 0) continue;
      const uint32_t pair[4] = {value[b].x, value[b].y, value[b].z, value[b].w};
#pragma unroll
      for (int i = 0; i < 8; i++)
        *value_place(unit, position_, number[b] * 8 + i) = static_cast<uint16_t>(pair[i / 2] >> (i % 2 * 16));
    }
  }

  __device__ __forceinline__ void finish() {
    const bool is_key = head_ >= kHeads;
    int number[HeadWords::count];
    HeadWords::numbers(c_.column(), number);
    uint4 word[HeadWords::count];
    read(number, word);
    const HeadGains gains = read_head_gains((is_key ? c_.params.k_norm : c_.params.q_norm) + layer_ * kHeadDim, c_.column());
    const Angles angles = angles_of(c_.params, real_ ? position_ : rows_state(c_).chunk.start);
    const Head done = finish_head(word, c_.column(), gains, angles, is_key ? 1.0f : kQueryScale);
    if (!real_) return;
    uint4* queries = c_.params.rows.queries + static_cast<int64_t>(row_) * kAttendedWords + head_ * kHeadWords;
    uint8_t* unit = kv_unit(c_.params, layer_, is_key ? head_ - kHeads : 0, position_ / kUnitPositions);
#pragma unroll
    for (int b = 0; b < kHeadBlocks; b++) {
      const int at = 4 * b + c_.column();
      if (is_key) store_key_word(unit, position_, b, c_.column(), done.block[b]);
      else if (at < kHeadWords) queries[at] = done.block[b];
    }
  }

 private:
  // Words of the head (negative: zeros) as the qkv product left them, rounded as a token's are.
  template <int Words>
  __device__ __forceinline__ void read(const int (&number)[Words], uint4 (&word)[Words]) const {
    int place[Words];
    float value[Words][8];
#pragma unroll
    for (int n = 0; n < Words; n++) {
      const bool there = real_ && number[n] >= 0;
      place[n] = there ? row_ * kQkvWords + head_ * kHeadWords + number[n] : -1;
#pragma unroll
      for (int i = 0; i < 8; i++) value[n][i] = 0;
      if constexpr (kQkvBias)
        if (there) load8(c_.params.qkv_bias + static_cast<int64_t>(layer_) * kQkvRows + (head_ * kHeadWords + number[n]) * 8, value[n]);
    }
    add_pieces<larger(1, 8 / Words)>(c_.params, pieces_, place, value);
#pragma unroll
    for (int n = 0; n < Words; n++) word[n] = pack8(value[n]);
  }

  Consumer& c_;
  Pieces pieces_;
  int layer_, head_, row_, position_;
  bool real_;
};

__device__ inline void finish_heads(Consumer& c, Pieces pieces) {
  constexpr int kAll = kHeads + 2 * kKvHeads;  // keys follow the queries, values the keys
  for_each_item(c, divide_up(pieces.rows, 8) * kAll, [&](int item) {
    RowHead head(c, pieces, item % kAll, item / kAll * 8 + c.row());
    if (item % kAll >= kHeads + kKvHeads) head.keep_value();
    else head.finish();
  });
}

// The chunk's last row becomes what the head starts from.
__device__ inline void publish_last_row(Consumer& c, Pieces pieces) {
  const Span& owned = c.span(Stage::output);
  const int row = rows_state(c).chunk.count - 1;
#pragma unroll 1
  for (int tile = c.thread; tile < owned.count; tile += kConsumers) {
    const int place[1] = {row * kWidthWords + owned.first + tile};
    float value[1][8];
    load_row_values(residual_values(c.params, row, owned.first + tile), value[0]);
    if constexpr (kRanks == 1) add_pieces<8>(c.params, pieces, place, value);
    else add_ranks(c, row, owned.first + tile, value[0]);
    publish(c.params.exchange->final_residual, c.sample_turn(), owned.first + tile, pack8(value[0]));
  }
}

}  // namespace monotape

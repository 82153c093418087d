// The norms of rows: they add the sums of the product before to the residual stream.
#pragma once
#include "ranks/rows.h"

namespace monotape {

// Adds the sums of the product before to the residual stream (or starts it from the embedding), and stores its normalised
// values as the next product's input. All threads of a worker share a row, and a worker has `Rows` rows at a time.
template <int Rows>
class RowNorm {
 public:
  static constexpr int kWords = divide_up(kWidthWords, kConsumers), kPlaces = Rows * kWords;

  __device__ RowNorm(Consumer& c, Pieces pieces, const float* gain, bool first)
      : c_(c), chunk_(rows_state(c).chunk), pieces_(pieces), gain_(gain), stage_(rows_state(c).part.stage), first_(first) {}

  __device__ __forceinline__ void run() {
    float gain[kWords][8];  // in flight together with the first rows
#pragma unroll
    for (int w = 0; w < kWords; w++)
#pragma unroll
      for (int i = 0; i < 8; i++) gain[w][i] = word(w) * 8 + i < kWidth ? gain_[word(w) * 8 + i] : 0;
#pragma unroll 1
    for (int row = rows_state(c_).first_row() + worker_number(); row < chunk_.count; row += Rows * kWorkers) {
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
      consumers_meet(kConsumers);  // all threads have read the squares
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
    const float scale = inverse_root(total / kWidth + kNormEps);
#pragma unroll
    for (int w = 0; w < kWords; w++) {
      if (!mine(row, w)) continue;
      store_row_values(residual_values(c_.params, row, word(w)), value[w]);
#pragma unroll
      for (int i = 0; i < 8; i++) value[w][i] *= scale * gain[w][i];
      c_.params.rows.normed[block_word(row, word(w), kWidthBlocks)] = pack8_for(stage_, value[w]);
    }
  }

  Consumer& c_;
  Chunk chunk_;
  Pieces pieces_;
  const float* gain_;
  Stage stage_;  // whose input it makes
  bool first_;
};

// Publishes the chunk's last row as the head's input.
__device__ inline void publish_last_row(Consumer& c, Pieces pieces) {
  const Span& owned = c.span(kResidualStage);
  const int row = rows_state(c).chunk.count - 1;
#pragma unroll 1
  for (int tile = c.thread; tile < owned.count; tile += kConsumers) {
    const int place[1] = {row * kWidthWords + owned.first + tile};
    float value[1][8];
    load_row_values(residual_values(c.params, row, owned.first + tile), value[0]);
    if constexpr (kRanks == 1) add_pieces<8>(c.params, pieces, place, value);
    else add_ranks(c, row, owned.first + tile, value[0]);
    publish<Buffer::final_residual>(*c.params.exchange, c.sample_turn(), owned.first + tile, pack8(value[0]));
  }
}

}  // namespace monotape

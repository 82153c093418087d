// A matrix stage: read the input from the exchange, multiply it by this worker's tiles as they come off the tape, add
// up what the eight warps have, and hand each finished row to the stage's own ending.
#pragma once
#include "exchange.h"
#include "ring.h"

namespace monotape {

// Everything a consumer thread carries through the kernel.
// Where a worker's time goes, by stage: clock ticks spent waiting for input and in all. Only there when it is asked for.
constexpr int kTraced = 8;
struct Trace {
  int64_t waited[kTraced] = {}, total[kTraced] = {};
  int64_t start_ = 0;
  __device__ void begin() {
    if constexpr (kTrace) start_ = clock64();
  }
  __device__ void arrived(Stage stage) {
    if constexpr (kTrace) waited[static_cast<int>(stage)] += clock64() - start_;
  }
  __device__ void end(Stage stage) {
    if constexpr (kTrace) total[static_cast<int>(stage)] += clock64() - start_;
  }
};

struct Consumer {
  const Params& params;
  Shared& shared;
  PageReader pages;
  int warp, lane, thread;
  // Which half of the exchange buffers is in use: each counter goes up with every use of its buffers, and only then.
  int layer_turn = 0, residual_turn = 0, sample_turn = 0;
  int buffer = 0;  // which of the two sum buffers
  Trace trace;

  __device__ Consumer(const Params& p, Shared& s)
      : params(p), shared(s), pages(s), warp(threadIdx.x / 32), lane(threadIdx.x % 32), thread(threadIdx.x) {}
  __device__ const Span& span(Stage stage) const { return shared.spans[static_cast<int>(stage)]; }
  // False: a wait was given up somewhere in this block. The same for all its consumers.
  __device__ bool meet() {
    consumers_meet(kConsumers);
    return !shared.failed;
  }
};

// Blocks of k are dealt out to warps in turn: warp w has blocks w, w + 8, w + 16, ... of every tile.
template <Stage S>
constexpr int kWarpBlocks = divide_up(k_blocks(S), kWarps);

// Polls this warp's words of the input, multiplies the norm's gain in, and keeps them in the warp's part of shared
// memory. Returns this lane's part of the sum of squares, taken before the gain.
template <Stage S, bool Normalised>
__device__ float read_input(Consumer& c, const uint4* input, const float* gain, int layer) {
  constexpr int kRounds = divide_up(kWarpBlocks<S>, 8), kWords = stage_k(S) / 8;
  uint4 word[kRounds];
  int index[kRounds];
  bool missing = false;
  for (int r = 0; r < kRounds; r++) {
    index[r] = ((c.lane / 4 + 8 * r) * kWarps + c.warp) * 4 + c.lane % 4;
    word[r] = index[r] < kWords ? load_word(input + index[r]) : make_uint4(0, 0, 0, 0);
    missing |= !arrived(word[r]);
  }
  if (c.thread == 0) c.shared.waiting = 1;
  Patience patience(c.params, c.shared, S, layer);
  while (missing) {  // every missing word in each round, not one after another
    missing = false;
    int first_missing = -1;
#pragma unroll
    for (int r = 0; r < kRounds; r++)
      if (!arrived(word[r])) {
        word[r] = load_word(input + index[r]);
        if (!arrived(word[r])) missing = true, first_missing = index[r];
      }
    if (missing && !patience.more(first_missing)) break;
  }
  if (c.thread == 0) c.shared.waiting = 0;
  float squares = 0;
#pragma unroll
  for (int r = 0; r < kRounds; r++) {
    if constexpr (Normalised) {
      uint32_t* pair = reinterpret_cast<uint32_t*>(&word[r]);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float a = low_half(pair[i]), b = high_half(pair[i]);
        squares += a * a + b * b;
        const int at = index[r] * 8 + 2 * i;
        if (at + 1 < kWidth) pair[i] = pack_pair(a * gain[at], b * gain[at + 1]);
        else if (at < kWidth) pair[i] = pack_pair(a * gain[at], 0);
      }
    }
    const int slot = c.lane + 32 * r;
    if (slot < kWarpBlocks<S> * 4) c.shared.x[c.warp][slot] = word[r];
  }
  __syncwarp();
  return squares;
}

// One tile: eight rows times the input, this warp's blocks only. Lanes 0 to 3 end up with two rows each.
template <Stage S>
__device__ __forceinline__ float2 multiply_tile(Consumer& c, int tile) {
  float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
  const bool first_row = c.lane < 4;  // the other fifteen rows of the operand are zero
#pragma unroll 4
  for (int i = 0; i < kWarpBlocks<S>; i++) {
    const int block = i * kWarps + c.warp;
    if (block >= k_blocks(S)) break;
    const uint4 w = *c.pages.block(tile * k_blocks(S) + block, c.lane);
    uint4 x = c.shared.x[c.warp][i * 4 + c.lane % 4];
    if (!first_row) x = make_uint4(0, 0, 0, 0);
    multiply_accumulate(even, x.x, x.y, w.x, w.y);
    multiply_accumulate(odd, x.z, x.w, w.z, w.w);
  }
  return make_float2(even[0] + odd[0], even[1] + odd[1]);
}

// A worker that owns nothing of a stage reads nothing. But nobody may run ahead of a layer: old words would look new
// to it. So everybody waits for one word of each layer's input.
template <Stage S>
__device__ bool follow(Consumer& c, const uint4* input, int layer) {
  if (S != Stage::qkv) return !c.shared.failed;
  Patience patience(c.params, c.shared, S, layer);
  if (c.thread == 0) wait_word(input, 0, patience);
  return c.meet();
}

// Runs the stage: reset_word(tile of this worker) once the input is there, then ending(tile, row of the tile, value,
// whether it is real) for every row of a batch, with whole warps so that the ending may shuffle.
template <Stage S, bool Normalised, class Resetting, class Ending>
__device__ bool matrix_stage(Consumer& c, const uint4* input, const float* gain, int layer, Resetting reset_word,
                             Ending ending) {
  const int count = c.span(S).count;
  if (count == 0) return follow<S>(c, input, layer);
  c.trace.begin();
  float squares = read_input<S, Normalised>(c, input, gain, layer);
  c.trace.arrived(S);
  if (c.thread % kTileRows == 0)  // the threads that will publish
    for (int t = c.thread / kTileRows; t < count; t += kConsumers / kTileRows) reset_word(t);
  if constexpr (Normalised) {
#pragma unroll
    for (int o = 16; o; o >>= 1) squares += __shfl_xor_sync(~0u, squares, o);
  }
  c.pages.begin();
  for (int first = 0; first < count; first += kBatchTiles, c.buffer ^= 1) {
    const int batch = count - first < kBatchTiles ? count - first : kBatchTiles;
    for (int t = 0; t < batch; t++) {
      const float2 rows = multiply_tile<S>(c, first + t);
      if (c.lane < 4) *reinterpret_cast<float2*>(&c.shared.sums[c.buffer][t][c.warp][2 * c.lane]) = rows;
    }
    if (c.lane == 0) c.shared.squares[c.buffer][c.warp] = squares;
    if (first + batch == count) c.pages.finish(divide_up(count * k_blocks(S), kPageBlocks), c.lane);
    if (!c.meet()) return false;
    float scale = 1;
    if constexpr (Normalised) {
      float total = 0;
#pragma unroll
      for (int w = 0; w < kWarps; w++) total += c.shared.squares[c.buffer][w];
      scale = rsqrtf(total / kWidth + kNormEps);
    }
    const int t = c.thread / kTileRows, row = c.thread % kTileRows;
    if (c.thread < divide_up(batch * kTileRows, 32) * 32) {
      float y = 0;
#pragma unroll
      for (int w = 0; w < kWarps; w++) y += c.shared.sums[c.buffer][t][w][row];
      ending(first + t, row, y * scale, t < batch);
    }
  }
  c.trace.end(S);
  return true;
}

}  // namespace monotape

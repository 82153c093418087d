// Rows: the tokens of a prompt go through the model together, a chunk at a time. A barrier of all workers separates the
// parts, activations are in global memory, and the ring's shared memory buffers ordinary matrix products. A product with too
// few blocks of output for all workers is cut along k as well (split-K): the next part adds its pieces up in order.
#pragma once
#include "token/heads.h"
#include "token/model.h"

namespace monotape {

struct Chunk {
  int start, count;  // position of its first row, and how many rows it has
};
__device__ __forceinline__ int end_of(Chunk chunk) { return chunk.start + chunk.count; }

// The parts of a layer, with a barrier after each, derived from the stage table: the norm of a stage that has one, its
// product, and after the product that makes queries, keys and values: the heads, attention, and the combination of splits.
// Experts take the router's input: before the first of their products rows choose, and experts list their rows.
enum class PartKind : int { norm, product, heads, attention, combine, choose, group };
struct Part {
  PartKind kind;
  Stage stage;  // of the norm or the product
};
__host__ __device__ constexpr bool has_norm(StageRow row) { return row.gain != kNoVector && row.routed == 0; }
__host__ __device__ constexpr bool waits_for_choice(StageRow row) { return row.routed > 0 && row.gain != kNoVector; }
__host__ __device__ constexpr int parts_of(StageRow row) { return has_norm(row) + 2 * waits_for_choice(row) + 1 + (row.attends ? 3 : 0); }
__host__ __device__ constexpr int count_parts() {
  int count = 0;
  for (int i = 0; i < kLayerSteps; i++) count += parts_of(stage_row(i));
  return count;
}
constexpr int kParts = count_parts();
__host__ __device__ constexpr Part part_row(int number) {
  int stage = 0;
  for (; number >= parts_of(stage_row(stage)); stage++) number -= parts_of(stage_row(stage));
  if (waits_for_choice(stage_row(stage)) && number < 2) return {number == 0 ? PartKind::choose : PartKind::group, static_cast<Stage>(stage)};
  if (waits_for_choice(stage_row(stage))) number -= 2;
  if (!has_norm(stage_row(stage))) number++;
  return {static_cast<PartKind>(number), static_cast<Stage>(stage)};
}
static_assert(part_row(0).kind == PartKind::norm && part_row(1).kind == PartKind::product, "what the head's parts are read off");
template <int I = 0>
__device__ __forceinline__ Part part_at(int number) {
  constexpr Part kPart = part_row(I);
  if constexpr (I + 1 == kParts) return kPart;
  else return number == I ? kPart : part_at<I + 1>(number);
}

__host__ __device__ constexpr int heads_part() {
  int number = 0;
  while (part_row(number).kind != PartKind::heads) number++;
  return number;
}
constexpr int kHeadsPart = heads_part();  // after it a layer's keys and values are complete

// How a product is cut into blocks of work: their shape, and the number of pieces of k; in plan.h for every chunk size.
struct Cut {
  int shape, pieces;
};

// The state of a prefill. It is in shared memory, where decode has its sums, because a part needs all registers.
struct RowsState {
  Chunk chunk;
  int read_from;      // the first row whose output of the last layer is read; chunk.count: of no row
  int layer, number;  // number of the part in its layer
  Part part;
  Cut cuts[kMatrixStages];
  int expert_blocks[kExperts + 1];  // of rows, of all experts before: see rows/experts.h

  // After the last layer come the norm and, for tests, the product of the head.
  __device__ __forceinline__ void go_to(int to_layer, int to_number) {
    const bool next = to_number >= kParts;
    layer = to_layer + next, number = to_number - (next ? kParts : 0);
    part = part_at(number);
    if (layer == kLayers) part.stage = Stage::head;
  }
  __device__ __forceinline__ void go_on(int parts) { go_to(layer, ends_with_kv() ? kParts : number + parts); }

  // In the last layer keys and values of all rows are kept, and of the rest only what is read: the output of the prompt's
  // last row. A chunk before the last one ends with its keys and values. Several ranks compute all rows: their sends and
  // meetings are counted by chunk, so every chunk must have the same ones (see count_in_request).
  __device__ __forceinline__ bool narrows() const { return kRanks == 1 && layer == kLayers - 1; }
  __device__ __forceinline__ bool ends_with_kv() const { return narrows() && number == kHeadsPart && read_from == chunk.count; }
  __device__ __forceinline__ bool ends_layer() const { return number == kParts - 1 || ends_with_kv(); }
  // The first row that has queries, and the first that the current part computes; a chunk's rows end at its last one.
  __device__ __forceinline__ int first_query() const { return narrows() ? read_from : 0; }
  __device__ __forceinline__ int first_row() const { return number > kHeadsPart ? first_query() : 0; }
};
static_assert(sizeof(RowsState) <= sizeof(Shared::sums) / 2, "it lies in half of the sums");
__device__ __forceinline__ RowsState& rows_state(Consumer& c) { return *reinterpret_cast<RowsState*>(c.shared.sums[1]); }

// A barrier of all workers: stores before it are visible after it. The next part begins.
__device__ inline bool all_meet(Consumer& c, int parts) {
  if (!c.meet()) return false;
  if (c.thread == 0) {
    const int barriers = ++c.shared.barriers;
    c.shared.progress = c.shared.progress + 1;
    raise_counter(&c.params.exchange->counter);
    Patience patience(c.shared, c.lost, Stage::rows, rows_state(c).layer);
    while (static_cast<int>(read_counter(&c.params.exchange->counter)) < barriers * kWorkers - 1)
      if (!patience.more(barriers)) break;
    rows_state(c).go_on(parts);
  }
  return c.meet();
}

// Distributes items over the warps of all workers.
template <class Work>
__device__ __forceinline__ void for_each_item(Consumer& c, int items, Work work) {
#pragma unroll 1
  for (int item = c.warp() * kWorkers + worker_number(); item < items; item += kWarps * kWorkers) work(item);
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

// The sums of a product's pieces of k: [pieces][rows of the chunk][words of eight].
struct Pieces {
  int count, rows, words;
};

__device__ __forceinline__ float* piece_values(const Params& params, const Pieces& pieces, int piece, int row, int word) {
  return params.rows.partials + ((static_cast<int64_t>(piece) * pieces.rows + row) * pieces.words + word) * 8;
}
// Adds up the sums at several places, in words (negative: none), piece after piece. Loads of `AtOnce` pieces are in flight
// together, because their latencies would otherwise add up.
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

__device__ __forceinline__ float* residual_values(const Params& params, int row, int word) {
  return params.rows.residual + (static_cast<int64_t>(row) * kWidthWords + word) * 8;
}
__device__ __forceinline__ void load_embedding(const Params& params, int token, int word, float (&value)[8]) {
  if constexpr (kWidth % 8 == 0) {
    embedding_values(params, token, word * 8, value);
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++) value[i] = word * 8 + i < kWidth ? embedding_value(params, token, word * 8 + i) : 0;
  }
}

}  // namespace monotape

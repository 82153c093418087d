// How far a warp is in its worker's tiles of a stage, and what it has in registers of those that come next.
#pragma once
#include "token/experts.h"

namespace monotape {

// Blocks that a warp has in registers: its share of the tiles that it multiplies together, or of a part of a tile.
__host__ __device__ constexpr int blocks_at_once(Product p) { return p.together * divide_up(p.page_run, kWarps * kSide); }
__host__ __device__ constexpr int most_vectors_at_once() {
  int most = 1;
  for (int i = 0; i < kProducts; i++) most = larger(most, blocks_at_once(product(i)) * format_row(product(i).format).vectors);
  return most;
}
__host__ __device__ constexpr int most_extra_at_once() {
  int most = 0;
  for (int i = 0; i < kProducts; i++) most = larger(most, blocks_at_once(product(i)) * format_row(product(i).format).extra);
  return most;
}
#ifdef MONOTAPE_RING
#define MONOTAPE_AT_FIRST  // fetched before it is read: zeros would take time in every stage
#else
#define MONOTAPE_AT_FIRST = {}  // without it the compiler keeps what has no value yet in registers
#endif
template <int Count>
struct ExtraWords {
  uint32_t extra[Count] MONOTAPE_AT_FIRST;
  __device__ __forceinline__ uint32_t* extra_of(int at) { return extra + at; }
};
template <>
struct ExtraWords<0> {
  __device__ __forceinline__ uint32_t* extra_of(int) { return nullptr; }
};
// A lane's words of each block.
struct Weights : ExtraWords<most_extra_at_once()> {
  uint4 block[most_vectors_at_once()] MONOTAPE_AT_FIRST;
};

// Tiles that are dealt out come in runs, each of one expert.
struct ExpertRuns {
  int left = 0, rest = 0, most = 0;     // tiles to be fetched of the run at hand, those after it, and those of the longest run
  int batch = 0;                        // where experts are added up: the first tile whose scales are in shared memory
#ifndef MONOTAPE_RING
  const uint4* from = nullptr;          // the run at hand
  int found = 0;                        // its tiles
#endif
};
// In a pass of several rows an input may be too long for shared memory. Then lanes read it from the exchange, two steps ahead or
// one, as registers allow, for every tile again.
__host__ __device__ constexpr int most_inputs_ahead() {
  int most = 1;
  for (int i = 0; i < kProducts; i++)
    if (is_direct(kRows, product(i).blocks)) most = larger(most, divide_up(product(i).page_run, kWarps * kSide));
  return most;
}
constexpr int kStepsAhead = most_inputs_ahead() > 8 ? 1 : 2;
struct RowsInput {
  TokenInput ahead[kStepsAhead][most_inputs_ahead()];
  InputPlace first;  // the lane's first, of its row
  Stage stage;        // which reads it, for the report of a wait
  int layer, rows, words;
};
struct OneRowInput {};
// The row of the pass whose input a lane takes. Columns of a product without a row have copies of the first one's.
__device__ __forceinline__ int own_input_row(unsigned lane, int rows) { return input_pass(lane) < rows ? input_pass(lane) : 0; }
template <class Progress>
__device__ __forceinline__ RowsInput& rows_input(Progress& progress) {
  return progress;
}

// A warp's position in its worker's tiles of a stage. A tile may take several pages.
struct Progress : ExpertRuns, Chosen<(kRows > 1), RowsInput, OneRowInput> {
  Weights even, odd;              // the weights to multiply next, and those after them
  int tile = 0, k = 0;            // of what is multiplied next
  int next_tile = 0, next_k = 0;  // of what is fetched next
  int in_page = 0;                // tiles of the page at hand that have been fetched
  bool page_ends = false;         // with what was fetched last
};

}  // namespace monotape

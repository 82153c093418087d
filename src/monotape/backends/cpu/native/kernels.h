// The arithmetic of one instruction set, as a table of functions: everything that touches a weight or a key.
#pragma once
#include <cstddef>
#include <cstdint>

#include "abi.h"
#include "formats.h"

namespace monotape {

// Softmax over one block of positions, not yet normalised: sum of exp(score - peak), and values weighted by it.
// In memory: peak, sum, then head_dim accumulated values.
constexpr int kPartialHeader = 2;

// Activation rows that share one pass over a tile in prefill.
constexpr int kPanelRows = 4;
// Rows of a pass in decode: the token that was chosen last, and drafts of those after it. One panel, so that a tile is read
// and unpacked once for all of them.
constexpr int kPassRows = kPanelRows;
constexpr int whole_panels(int rows) { return (rows + kPanelRows - 1) / kPanelRows * kPanelRows; }

struct Kernels {
  const char* name;

  // Bytes of one prepared row of k values, and of a panel of kPanelRows of them: float formats keep float32, formats of
  // codes keep 16-bit integers with scales.
  size_t (*prepared_bytes)(Format format, int padded_k);
  size_t (*panel_bytes)(Format format, int padded_k);
  // Turns a row of activations into what multiply() reads; values past k become zeros.
  void (*prepare)(Format format, const float* x, int k, int padded_k, uint8_t* prepared);
  // The same for row `row` of a panel, which multiply_panels() reads. x null: zeros, for rows that are not there.
  void (*prepare_in_panel)(Format format, const float* x, int k, int padded_k, int row, uint8_t* panel);
  // y[8 * tile + lane] = sum over k. The order of that sum depends on k alone.
  void (*multiply)(Format format, const uint8_t* tiles, int count, int padded_k, const uint8_t* prepared, float* y);
  // The same for each row of some panels, with the same bits: y[row * y_stride + 8 * tile + lane]. Writes
  // whole_panels(rows) rows.
  void (*multiply_panels)(Format format, const uint8_t* tiles, int count, int padded_k, const uint8_t* panels,
                          size_t panel_stride, int rows, float* y, size_t y_stride);
  // One row of a tile as float32: an embedding.
  void (*unpack_row)(Format format, const uint8_t* tile, int lane, int k, float* row);

  // out = x / rms(x) * gain
  void (*normalise)(const float* x, const float* gain, int count, float eps, float* out);
  // out[row * out_stride + i] = silu(gate[i]) * up[i] for 8 values of each row; products: 8 of gate, then 8 of up, a row
  void (*gate_rows)(const float* products, int rows, float* out, size_t out_stride);
  // The same as gate * sigmoid(alpha * gate) * (up + shift), after gate <= limit and -limit <= up <= limit.
  void (*gate_limited_rows)(const float* products, int rows, float alpha, float limit, float shift, float* out,
                            size_t out_stride);
  void (*store_kv)(Format format, const float* x, int count, void* out);
  // Keys or values as float32, which attend() reads with Format::f32: the same bits, without widening them each time.
  void (*widen_kv)(Format format, const void* values, int count, float* out);
  // Partial results of `group` query heads (q, scaled, [group][head_dim]) over `count` positions of one KV head.
  void (*attend)(Format format, const float* q, int group, int head_dim, const void* keys, const void* values,
                 int count, float* scores, float* partials, size_t partial_stride);
  // out = the partial results of `blocks` blocks, combined in their order. `sink`: a score that joins the softmax and
  // weighs nothing, or null.
  void (*combine)(const float* partials, int blocks, size_t block_stride, int head_dim, const float* sink, float* out);
  // exp(x - peak) for a run of values.
  void (*exponentials)(const float* x, int count, float peak, float* out);
};

const Kernels& portable_kernels();
const Kernels* neon_kernels();  // null where this build or this machine lacks them
const Kernels* avx2_kernels();
const Kernels* avxvnni_kernels();
const Kernels* avx512_kernels();
// The best set for this machine, or the one that was asked for by name; null when that one is not there.
const Kernels* choose_kernels(const char* name);

}  // namespace monotape

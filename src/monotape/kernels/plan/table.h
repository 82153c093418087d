// The stage table: what plan.h says of the stages that a token passes. Producer, consumers, janitor, scout, rows and
// ranks walk this table and nothing else; a shape compiles to code of its own, because every row is a constant.
//
// plan.h is generated (backends/cuda/header.py) from the GPU plan (plan/gpu.py). It names the stages, buffers, vectors and
// formats, includes this header for their types, and then gives the rows.
#pragma once

namespace monotape {

// What becomes of a finished row of a stage.
enum class Epilogue : int {
  publish,   // its value goes into the output buffer
  residual,  // it is added to the owner's residual, which goes into the output buffer
  gated,     // silu(gate) * up: gate tiles are even, their up tiles follow
  logits,    // it is kept for the sampler
};
// Where a stage's weights are played from: the worker's tape, or an address that is published while the kernel runs.
enum class Source : int { tape, published };

// How warps multiply tiles of one length and format. Short tiles share a page; a long one takes several pages, with
// `page_run` blocks in each but the last.
struct Product {
  Format format;
  int blocks, tiles_in_page, page_run, together, batch;
};

struct StageRow {
  Buffer reads, writes;
  Vector gain, bias;
  Epilogue epilogue;
  Source source;
  int k, tiles, product;
  bool attends;  // attention follows: its output is queries, keys and values
};

// A block of a prefill's products, in tiles: see rows/matrix.h.
struct Shape {
  int row_tiles, column_tiles;
};

// When words of a buffer are reset: with the input of stage `at`, in the turn that used them or in the next one.
struct ResetRow {
  Buffer buffer;
  Stage at;
  int turns;
  bool first_layer, listed;
};

// A buffer of the exchange: its words, its copies, which are used in turn, and the stage by whose spans workers own it.
struct BufferRow {
  int words, copies, start, stride;
  Stage owner;
};

}  // namespace monotape

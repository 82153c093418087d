// The stage table: the types of plan.h's rows. Producer, consumers, janitor, scout, rows and ranks walk this table and
// nothing else. Every row is a compile-time constant, so each shape compiles to its own code.
//
// plan.h is generated (backends/cuda/header.py) from the GPU plan (plan/gpu.py). It names the stages, buffers, vectors and
// formats, includes this header for their types, and then gives the rows.
#pragma once

namespace monotape {

// The last step of a stage, for each finished row.
enum class Epilogue : int {
  publish,   // its value goes into the output buffer
  residual,  // it is added to the owner's residual, which goes into the output buffer
  gated,     // gate and up become one: gate tiles are even, their up tiles follow
  choice,    // a router's: the float32 value goes into the output buffer
  logits,    // it is kept for the sampler
};
// Where a stage's weights come from: the worker's tape, an address that is published while the kernel runs, or the library of
// experts.
enum class Source : int { tape, published, library };

// How warps multiply tiles of one length and format. Short tiles share a page; a long one takes several pages, with
// `page_run` blocks in each but the last. Where experts are added up, a tile has the blocks of all of them, in their order.
struct TileLayout {
  Format format;
  int blocks, tiles_in_page, page_run, together, batch;
};
struct Product : TileLayout {
  int inputs, dealt;  // experts that are added up, each with an input of its own, or whose tiles follow each other; 0: none
};

struct StageRow {
  Buffer reads, writes;
  Vector gain, bias, scale;  // scale: of finished rows, before the bias
  Epilogue epilogue;
  Source source;
  int k, tiles, product;
  bool attends;  // attention follows: its output is queries, keys and values
  int routed;    // experts that a token passes; 0: the stage is not routed
};

// A block of a prefill's products, in tiles: see rows/block.h.
struct Shape {
  int row_tiles, column_tiles;
};

// When words of a buffer are reset: after the input of stage `at` has arrived, in their own turn or in the next.
struct ResetRow {
  Buffer buffer;
  Stage at;
  int turns;
  bool first_layer, listed;
};

// A buffer of the exchange: its words, its copies, which turns use alternately, and the stage whose spans own it.
struct BufferRow {
  int words, copies, start, stride;
  Stage owner;
};

}  // namespace monotape

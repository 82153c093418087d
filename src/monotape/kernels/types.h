// What crosses the boundary between the host and the kernel, and the shape of a block's shared memory.
#pragma once
#include "plan.h"
#include "ptx.h"

namespace monotape {

constexpr int kWarps = 8;             // consumers; one more warp plays the tape
constexpr int kConsumers = kWarps * 32;
constexpr int kThreads = kConsumers + 32;
constexpr int kTileRows = 8;
constexpr int kBlockK = 32;           // k values of a tile that one warp takes at a time
constexpr int kBlockBytes = kTileRows * kBlockK * 2;
constexpr int kPageBlocks = 32;
constexpr int kPageBytes = kPageBlocks * kBlockBytes;
constexpr int kBatchTiles = 32;       // tiles whose partial sums are kept before warps add them up

enum class Stage : int { qkv = 0, output = 1, gate_up = 2, down = 3, head = 4, attention = 5, combine = 6, sample = 7 };
constexpr int kMatrixStages = 5;
enum class Finish : int { running = 0, stop = 1, length = 2, cancelled = 3, numerical_fault = 4, deadline_fault = 5 };

__host__ __device__ constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }
constexpr int kHeadStride = divide_up(kHeadDim, kTileRows) * kTileRows;  // a head's rows, padded to tiles
constexpr int kGroup = kHeads / kKvHeads;
constexpr int kQueryRows = kHeads * kHeadStride, kKvRows = kKvHeads * kHeadStride;

__host__ __device__ constexpr int stage_k(Stage s) {
  return s == Stage::output ? kQueryRows : s == Stage::down ? divide_up(kFfn, 8) * 8 : divide_up(kWidth, 8) * 8;
}
__host__ __device__ constexpr int k_blocks(Stage s) { return divide_up(stage_k(s), kBlockK); }

// Words (16 bytes: eight bf16) of the exchange buffers, each buffer twice, for even and odd turns.
constexpr int kWidthWords = divide_up(kWidth, 8), kQkvWords = (kQueryRows + 2 * kKvRows) / 8;
constexpr int kAttendedWords = kQueryRows / 8, kActivationWords = divide_up(kFfn, 8);
constexpr int kMaxSplits = kWorkers / kKvHeads > 16 ? 16 : (kWorkers / kKvHeads > 0 ? kWorkers / kKvHeads : 1);
constexpr int kPartialWords = kHeadStride / 4 + 1;  // float32 values, then (peak, sum, 0, 0)
constexpr int kPartialsWords = kHeads * kMaxSplits * kPartialWords;

struct Span {
  int first, count;
  int64_t offset;  // of the segment: in the layer's run, or on the tape for the head
};

struct Exchange {  // word offsets are the same on host and device
  uint4 residual[2][kWidthWords];         // what a layer starts from
  uint4 final_residual[2][kWidthWords];   // what the head starts from
  uint4 after_attention[2][kWidthWords];
  uint4 qkv[2][kQkvWords];
  uint4 partials[2][kPartialsWords];
  uint4 attended[2][kAttendedWords];
  uint4 activation[2][kActivationWords];
  uint4 candidates[3][kWorkers];          // three: everybody both writes and reads them, with nothing in between
};

struct HostStatus {  // in pinned memory that both sides see
  int finish, tokens, worker, stage, word, layer;
  uint32_t cancel;
  int launches;
};

struct Params {
  const uint8_t* tapes;
  const int64_t* tape_start;    // [workers]
  const int64_t* layer_bytes;   // [workers]
  const Span* spans;            // [workers][kMatrixStages]
  const float* attention_norm;  // [layers][width]
  const float* ffn_norm;
  const float* final_norm;
  const float* qkv_bias;        // [layers][q rows + 2 kv rows, heads padded]
  const float* q_norm;          // [layers][head_dim]
  const float* k_norm;
  const float* cosines;         // [context][rope_dims / 2]
  const float* sines;
  const int* windows;           // [layers]; 0: all
  const uint16_t* embedding;    // [vocab][width], null when tied
  uint16_t* keys;               // [layers][kv_heads][capacity][head_stride]
  uint16_t* values;
  Exchange* exchange;
  float* logits;                // [vocab padded]
  float* logits_out;            // [prompt - cached][vocab], null unless logits are asked for
  HostStatus* status;
  const int* prompt;
  const int* stop_ids;
  int* ids;
  int64_t* times_ns;
  int64_t* trace;               // [workers][stages][waited, total] clock ticks, or null
  int64_t kv_capacity, deadline_ns;
  int prompt_length, cached, max_tokens, stop_count;
};

}  // namespace monotape

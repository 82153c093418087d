// The structures that host and kernel share, and how weights, KV and activations lie in memory.
//
// Everything that the tensor cores multiply lies in blocks of 8 x 32 sixteen-bit values, one row of 64 bytes after
// another: 8 weight rows and 32 values of k, 8 positions and 32 values of a key, 8 values and 32 positions of a value.
// A lane always takes 16 bytes of a block, its own: row lane / 4, values 8 * (lane % 4) onwards.
#pragma once
#include "formats/formats.h"
#include "sampling/settings.h"

namespace monotape {

constexpr int kConsumers = kWarps * kLanes;  // threads; for the four warps more of a worker, see monotape.cu
constexpr int kThreads = kConsumers + 4 * kLanes;  // registers are allotted to four warps at a time
constexpr int kConsumerRegisters = 224, kOtherRegisters = 56;
// A block has the registers that it was launched with, 168 a thread. `take_registers` deadlocks if the other warps have
// not released enough.
static_assert(kConsumers * kConsumerRegisters + 4 * kLanes * kOtherRegisters <= kThreads * 168, "registers of a block");
constexpr int kBlockBytes = kTileRows * kBlockK * 2, kBlockWords = kBlockBytes / 16;  // of 16-bit values
constexpr int kPageBytes = kPageBlocks * kBlockBytes;

enum class Finish : int { running = 0, stop, length, cancelled, numerical_fault, deadline_fault };

constexpr int kGroup = kHeads / kKvHeads;
constexpr int kQueryRows = kHeads * kHeadDim, kKvRows = kKvHeads * kHeadDim, kQkvRows = kQueryRows + 2 * kKvRows;

__host__ __device__ constexpr int k_blocks(Stage stage) { return divide_up(row_of(stage).k, kBlockK); }

// KV: for each layer and KV head, units of 32 positions: keys, then transposed values. In 8 bits a power of two for each key and
// each value follows: token/kv.h.
constexpr int kHeadBlocks = divide_up(kHeadDim, kBlockK), kHeadTiles = kHeadDim / kTileRows;
constexpr int kKeyBlocks = kUnitPositions / kTileRows * kHeadBlocks;
constexpr int kUnitBytes = (kKeyBlocks + kHeadTiles) * kBlockBytes / (kNarrowKv ? 2 : 1) + (kNarrowKv ? 2 * kUnitPositions : 0);
#ifdef MONOTAPE_RING
constexpr int kPageUnits = kPageBytes / kUnitBytes;
#else
constexpr int kPageUnits = 1;  // units are read where they lie
#endif
static_assert(kPageUnits >= 1, "a unit of KV fits a page");
static_assert(kHeadDim % 8 == 0 && kHeadDim <= 128 && kRopeDims % 16 == 0 && kGroup <= 8, "heads that attention can do");

// Words of 16 bytes, eight values each.
constexpr int kWidthBlocks = divide_up(kWidth, kBlockK), kWidthWords = divide_up(kWidth, 8), kAttendedWords = kQueryRows / 8;
constexpr int kHeadWords = kHeadDim / 8, kPartialWords = kHeadDim / 4 + 1;  // float32 values, then (peak, sum, 0, 0)

// A pass of several rows keeps the inputs of all of them in shared memory if they are not longer than these.
constexpr int kRowRounds = divide_up(divide_up(kWidthBlocks, kWarps * kSide), 8), kMostRowBlocks = kRowRounds * kWarps * kSide * 8;
__host__ __device__ constexpr int row_blocks() {
  int most = 0;
  for (int i = 0; i < kMatrixStages; i++) {
    const int blocks = divide_up(stage_row(i).k, kBlockK);
    if (blocks <= kMostRowBlocks) most = larger(most, blocks);
  }
  return most;
}
constexpr int kRowBlocks = row_blocks();
// Longer inputs are read from the exchange as they are multiplied (TileProduct): their words are published in the order of products.
__host__ __device__ constexpr bool is_direct(int rows, int blocks) { return rows > 1 && blocks > kMostRowBlocks; }
__host__ __device__ constexpr bool is_read_directly(int rows, Buffer buffer) {
  for (int i = 0; i < kMatrixStages; i++)
    if (stage_row(i).reads == buffer && is_direct(rows, product(stage_row(i).product).blocks)) return true;
  return false;
}
static_assert(!is_read_directly(kRows, Buffer::residual) && !is_read_directly(kRows, Buffer::final_residual), "the embedding's words have their own order");
constexpr int kRowLogits = divide_up(kAllVocab, 8) * 8;  // values between the logits of one row and of the next
constexpr int kMostRowBatch = 8;  // tiles of a row that a batch has threads for
constexpr int kKeptTiles = kRows == 1 ? kBatchTiles : larger(kBatchTiles, kRows * kRowBatch);

struct Span {
  int first, count;
  int64_t offset;  // of the segment: in the layer's run, or on the tape for the head
};

struct TilePlace {  // where a tile of a stage lies: at start + layer * stride
  int64_t start, stride;
};

// The words of the exchange, buffer after buffer (plan.h: buffer_row), then counters and flags of all workers.
struct Exchange {  // all ones before a launch
  uint4 words[kExchangeWords];
  uint32_t counter;      // arrivals at the barriers of a prefill, from -1
  uint32_t healthy;      // 0 once a worker has failed: all polls end
  uint32_t going_on;     // 0 once the host has cancelled a prefill
  uint32_t claimed;      // 0 once a worker says how the request ended: the first one counts
  uint64_t choice[2];    // which weights a published stage takes: a pass of a layer and a number; see worker/ring.h
  int4 waits[kWorkers];  // after a deadline: position, layer, stage and word that a worker waited for
};

struct HostStatus {  // in pinned memory that both sides see
  int finish, tokens;
  int worker, stage, layer;  // where a NaN came from
  uint32_t cancel;
  int64_t start_ns;  // when the kernel began, by the clock of times_ns
  int filled;  // positions whose KV a prefill has completed, cached ones included; 0 before its first chunk has ended
  int drafted, accepted;  // drafts of the request, and those that were what followed
};

struct Rows {  // activations of a prefill's chunk; 16-bit ones in blocks of 8 rows x 32 values
  float* residual;     // [rows][width, padded to words]
  uint4* normed;
  uint4* queries;      // [rows][query rows]
  uint4* attended;
  uint4* activation;
  float* partials;     // sums of pieces of k, or results of splits of attention
};

// Between ranks: see ranks/words.h. A word is 64 bits, a value and a number; experiments with slow links add when it was sent.
constexpr int kMostRanks = 8;
constexpr int kLinkParts = kLinkDelay ? 2 : 1;
static_assert(kRanks <= kMostRanks && kRanks <= kWarps, "ranks that one warp can hear at once");
struct alignas(8 * kLinkParts) LinkWord {
  uint64_t part[kLinkParts];
};
constexpr int kLinkWidth = kWidthWords * 8;
enum class HeadInput : int { own = 0, mean, sum };  // plan/types.py: head_input
constexpr HeadInput kHeadInput = static_cast<HeadInput>(kHeadInputNumber);

struct alignas(16) RankStep {  // plan/types.py: Step. A module is named by the number of its send in a token, from 1
  float own;
  int sends, folds;  // 0: nothing
  int whole;
};

struct Inbox {  // of one rank, which all ranks write to; for a sender, its own part of each
  LinkWord* sums;     // [slots][from][width]
  LinkWord* lanes;    // [2][from][width]
  LinkWord* squares;  // [2][from][workers]
  LinkWord* choices;  // [2][from][score, id, stop, logit]
  LinkWord* logits;   // [2][vocab of all]
  LinkWord* meetings; // [2][from]: see ranks/rows.h
  float* rows;        // [kRowSlots][rows of a chunk][from][width]
};

struct Ranks {
  Inbox inbox[kMostRanks];  // this rank's parts of all ranks' inboxes
  Inbox own;                // all of its own
  const RankStep* steps;  // [kSteps]
  int64_t link_delay_ns;  // only where kLinkDelay
  int rank, first_id;     // this one, and where its part of the vocabulary begins
  uint32_t peers;         // the others, a bit each
  uint32_t first_meeting; // as first_send, of a prefill's meetings
  uint32_t first_send, first_token;  // numbers that no request before has used
};

struct Params {
  const uint8_t* tapes;         // behind them, from kLibraryStart on: [layers][experts][kExpertBytes]
  const int64_t* tape_start;    // [workers]
  const int64_t* layer_bytes;   // [workers]
  const Span* spans;            // [workers][kMatrixStages]
  const TilePlace* places;      // [tiles of all stages, one stage after another]
  const float* vectors[kMostVectors];  // norms and biases, [layers][values], by Vector
  const float* cosines;         // [context][rope_dims / 2]
  const float* sines;
  const int* windows;           // [layers]; 0: all. Read where layers are of several kinds
  const uint16_t* embedding;    // [vocab][width], null where the head's tape holds it
  uint8_t* kv;                  // [layers][kv_heads][units]
  Exchange* exchange;
  Rows rows;
  float* logits;                // [vocab of all ranks, padded]
  float* logits_out;            // [prompt - cached][vocab of all ranks], null unless logits are asked for
  HostStatus* status;
  const int* prompt;
  const int* stop_ids;
  int* ids;
  int64_t* times_ns;
  int64_t* trace;               // [workers][tokens][slots][TraceField] ns, or null
  int64_t kv_units, deadline_ns;
  int64_t choice_stride;        // bytes between the weights that a published stage chooses among
  int first_place[kMostStages];  // of a stage, in places
  int prompt_length, cached, max_tokens, stop_count;
  int chunk;                    // rows of a prefill pass; 0: one token at a time, as in decoding
  int trace_tokens;
  Sampling sampling;
  uint4* sampler_words;         // [3][workers][kSamplerWords]; all ones before a launch that samples
  Ranks ranks;
  uint32_t* history;            // tokens to look for drafts in, and room for the output; null: no drafts
  int history_length;           // tokens before the output
  float* chains;                // of attention, that wait: see attend_rows in token/attention_rows.h
};

// Whether the prompt goes in rows, and its last row to the head; else its tokens are decoded one by one.
__device__ __forceinline__ bool has_rows(const Params& params) { return kPrefill && params.chunk > 0; }

static_assert(kMatrixStages <= kMostStages && kVectors <= kMostVectors, "tables of Params");

// The parameters of a launch, in constant memory: functions that are not inlined cannot read kernel parameters.
extern "C" {
__constant__ Params request;
}

}  // namespace monotape

// The shared memory of a worker: the ring, the input and sums of the current stage, and flags between its warps.
#pragma once
#include "plan/params.h"
#include "sampling/cut.h"  // needs the dimensions of plan/params.h

namespace monotape {

constexpr int kMailbox = 16;
constexpr int kPartValues = kHeadDim + 4;  // a warp's part of a head: values, peak and sum; two are spare

// How many copies may be in flight. Polls must not queue behind pages, but pages that are needed now must come.
enum Pace : int { kWorking = 0, kPolling, kAttending };

#ifdef MONOTAPE_DIE_COPIES
// What a worker brings over to its own die: see exchange/dies.h.
struct DieRole {
  int die;
  uint32_t readers[kMatrixStages + 1], place[kMatrixStages + 1];  // of each stage's input on this die, and this worker's turn
  uint32_t first_split;                                           // the first of this worker's KV head on this die
};
#endif

// A position in the ring: the next slot, and the parity of the laps.
struct Cursor {
  int slot = 0;
  uint32_t round = 0;
  __device__ void advance() {
    if (++slot == kRingPages) slot = 0, round ^= 1;
  }
};

// What a consumer carries from one pass to the next, and the pass that is next.
struct Carried {
  Cursor cursor;
  int turn, buffer, token_step, step_before;
};
struct Left {
  Carried state;
  int position, token;
};

// A pass of several rows: the token that was chosen last, and drafts of those after it.
struct Drafts {
  int rows;                                  // of the pass at hand
  int rows_of[4];                            // of the last passes, by their number: see exchange/janitor.h
  int token[kRows];                          // of the rows
  int chosen[kRows];                         // what followed each of them
  int row;                                   // whose logits are drawn from
  Left left;                                 // by the loop over passes that ran last
  uint4 offered;                             // what worker 0 expects to follow, and the tokens after it
  volatile int pass;                         // the number of the pass at hand
  volatile int offer_of;                     // the pass that `offer` is for: see worker/drafter.h
  volatile int offer[4];
  volatile int drafted, accepted;            // drafts of the request
};

// Between matrices: each warp's part of every head, then the queries of a pass of several rows, as the tensor cores want them.
constexpr int kPartsBytes = kWarps * kGroup * kPartValues * 4, kQueryLanes = 4 * kGroup, kQueryBytes = kHeadBlocks * kQueryLanes * 16;
constexpr int kInputBytes = larger(kMostBlocks, kRows * kRowBlocks) * 64;
constexpr int kSumBytes = larger(2 * kKeptTiles * kTileRows * kWarps * 4, static_cast<int>(sizeof(SelectScratch)));
// Parts of several rows where there is room for them: rows that need not wait for each other.
constexpr int kPartSets = kRows == 1 ? 1 : larger(1, smaller(kRows, (kInputBytes + kSumBytes - kRows * kQueryBytes) / kPartsBytes));
constexpr int kAllPartsBytes = kPartSets * kPartsBytes, kAttendingBytes = kAllPartsBytes + (kRows > 1 ? kRows * kQueryBytes : 0);

struct alignas(128) Shared {
  uint8_t ring[kRingPages][kPageBytes];
  union {
    struct {
      uint4 x[kInputBytes / 16];                            // the input of the current stage, each warp its own blocks
      union {
        // Partial sums of warps; two buffers, used in turn.
        alignas(16) float sums[2][kKeptTiles][kTileRows][kWarps];
        SelectScratch select;                               // while a token is drawn
      };
    };
    alignas(16) float attention[kPartSets * kWarps][kGroup][kPartValues];  // between matrices: each warp's part of every head
    uint8_t attending[kAttendingBytes];
  };
  SamplerState sampler;
  alignas(16) float squares[2][kRows][kWarps];
  float residual[kRows][kMostWidthTiles * kTileRows];       // this worker's own elements of the residual stream
  uint4 new_key[kHeadBlocks * 4];                           // of the current token, for its unit
  alignas(16) uint16_t new_value[kHeadDim];
  alignas(16) float cosines[kRopeDims / 2], sines[kRopeDims / 2];  // of the token at hand
  float best_value[kWarps];
  int best_id[kWarps];
  Span spans[kMatrixStages];
  int windows[kLayers];                                     // of the layers; 0: all is seen
  uint64_t full[kRingPages], empty[kRingPages];             // one after the other: a page's other barrier is kRingPages on
  int64_t mail_time[kMailbox];
  int mail_id[kMailbox];
  uint32_t own_words[2][kMostOwnWords];                     // words that this worker publishes in a turn: see exchange/janitor.h
  int own_count[2][kRows == 1 ? 1 : kRows + 1];
  int sample_turn;                                          // tokens that have been chosen
  int list_of[2], listed_splits;                            // which of the two, of even tokens and of odd ones
  volatile int swept;                                       // matrices up to it have their words reset: see exchange/janitor.h
  volatile int copied;                                      // bytes of the tape that the producer has asked for, modulo 2^32
  volatile int mailed, delivered;                           // tokens given to the clerk, and tokens that left
  volatile int cancel;                                      // the host asked to stop
  volatile int position;                                    // of the token that the consumers are at
  volatile int playing;                                     // the ring belongs to the producer
  volatile int head_first;                                  // a prefill has left its last row to the head
  volatile int pace;                                        // the number of the matrix that has its input, times 4, and a Pace
  volatile int done;                                        // the request has ended: all warps must stop
  volatile int finish;
  uint16_t first_look[kLayerSteps][kWarps];                 // after so many ticks: see exchange/words.h
  volatile int progress;                                    // goes up with every stage; read by the watchdog
  volatile int awaited_stage, awaited_layer, awaited_word;  // recorded by a long poll, at that progress
  volatile int awaited_progress;
  volatile int nan_place;                                   // layer and stage that gave a NaN; -1: none
  volatile int failed;                                      // polls must end
  int next_token, stopping, barriers;
  volatile int owed_stage, owed_layer, owed_word;           // the same for a wait for another rank: see ranks/words.h
  volatile int owed_progress;
  uint32_t first_send;                                      // number that this token's sends are counted from
  float lane_scale[kRanks];                                 // of each rank's final residual: see ranks/head.h
  RankStep steps[kSteps];                                   // of the modules, then those that fold what is left
  float early[kRanks > 1 ? kBatchTiles * kTileRows : 1];    // sums that arrived before the stage that folds them
  float input_scale[kIntegerProducts ? divide_up(kMostBlocks, 4) : 1];  // of each block of an input that is integers
#ifdef MONOTAPE_DIE_COPIES
  DieRole role;
#endif
  volatile int chosen_expert[larger(1, kChosen)];           // of the current layer, the lowest first: see token/experts.h
  float chosen_weight[larger(1, kChosen)];
  alignas(kScalesExperts ? 16 : 4) float expert_scale[kScalesExperts ? kChosen * kBatchTiles * kTileRows : 1];  // of the rows of a batch, expert after expert
  volatile int chosen_step;                                 // the number of the matrix for which they have been chosen
  Drafts drafts;
};

static_assert(sizeof(SelectScratch) == 864 + 32 * kCandidates, "as compiler/gpu/pages.py counts it");
static_assert(sizeof(Shared) <= kSharedMemory, "a block's shared memory");
static_assert(larger(larger(kInFlightNow, kInFlightAhead), larger(kInFlightPolling, kInFlightAttending)) <= kRingPages,
              "copies on their way have a page each: a barrier tells two rounds apart, not three");

}  // namespace monotape

// The ring: pages of the tape that are in shared memory. One thread plays the tape, eight warps take the pages.
#pragma once
#include "types.h"
#include "select.h"  // needs the dimensions of types.h

namespace monotape {

constexpr int kMailbox = 16;
constexpr int kPartValues = kHeadDim + 4;  // of a head that a warp has: the values, their peak and sum; two are spare

// How many copies may be in flight. Polls must not queue behind pages, but pages that are needed now must come.
enum Pace : int { kWorking = 0, kPolling, kAttending };

struct alignas(128) Shared {
  uint8_t ring[kRingPages][kPageBytes];
  union {
    struct {
      uint4 x[kMostBlocks * 4];                             // the input of the stage at hand, each warp its own blocks
      union {
        alignas(16) float sums[2][kBatchTiles][kTileRows][kWarps];  // partial sums of warps; two buffers, used in turn
        SelectScratch select;                               // while a token is drawn
      };
    };
    alignas(16) float attention[kWarps][kGroup][kPartValues];  // between matrices: what each warp has of every head
  };
  SamplerState sampler;
  alignas(16) float squares[2][kWarps];
  float residual[kMostWidthTiles * kTileRows];              // this worker's own elements of the residual stream
  uint4 new_key[kHeadBlocks * 4];                           // of the token at hand, for the unit that it belongs to
  alignas(16) uint16_t new_value[kHeadDim];
  alignas(16) float cosines[kRopeDims / 2], sines[kRopeDims / 2];  // of the token at hand
  float best_value[kWarps];
  int best_id[kWarps];
  Span spans[kMatrixStages];
  int windows[kLayers];                                     // of the layers; 0: all is seen
  uint64_t full[kRingPages], empty[kRingPages];             // one after the other: a page's other barrier is kRingPages on
  int64_t mail_time[kMailbox];
  int mail_id[kMailbox];
  uint32_t own_words[2][kMostOwnWords];                     // what this worker publishes in a turn: see housekeeping.h
  int own_count[2];
  int sample_turn;                                          // tokens that have been chosen
  int list_of[2], listed_splits;                            // which of the two, of even tokens and of odd ones
  volatile int swept;                                       // matrices up to it have their words reset: see housekeeping.h
  volatile int copied;                                      // bytes of the tape that the producer has asked for, modulo 2^32
  volatile int mailed, delivered;                           // tokens given to the clerk, and tokens that left
  volatile int cancel;                                      // the host asked to stop
  volatile int position;                                    // of the token that the consumers are at
  volatile int playing;                                     // the ring belongs to the producer
  volatile int head_first;                                  // a prefill has left its last row to the head
  volatile int pace;                                        // the number of the matrix that has its input, times 4, and a Pace
  volatile int done;                                        // the request has ended: everybody must stop
  volatile int finish;
  volatile int progress;                                    // goes up with every stage: the watchdog looks at it
  volatile int awaited_stage, awaited_layer, awaited_word;  // by whoever waits for long, at that progress
  volatile int awaited_progress;
  volatile int nan_place;                                   // layer and stage that gave a NaN; -1: none
  volatile int failed;                                      // waits are given up
  int next_token, stopping, barriers;
  volatile int owed_stage, owed_layer, owed_word;           // the same of who waits for another rank: see ranks.h
  volatile int owed_progress;
  uint32_t first_send;                                      // number that this token's sends are counted from
  float lane_scale[kRanks];                                 // of each rank's final residual: see ranks_head.h
  RankStep steps[kSteps];                                   // of the modules, then those that fold what is left
  float early[kRanks > 1 ? kBatchTiles * kTileRows : 1];    // sums that have come before the stage that folds them
};

static_assert(sizeof(SelectScratch) == 9056, "as backends/cuda/header.py counts it");
static_assert(sizeof(Shared) <= 227 * 1024, "a block's shared memory");
static_assert(larger(larger(kInFlightNow, kInFlightAhead), larger(kInFlightPolling, kInFlightAttending)) <= kRingPages,
              "copies on their way have a page each: a barrier tells two rounds apart, not three");

// The KV units that one worker looks at: those of one head, [first, first + count). Splits are as many in every layer
// of a token, and never fewer later, so that each word of their results is written in every turn.
struct Share {
  int kv_head, split, splits, first, count, begin;  // begin: the first position that the layer sees
  bool has_part, has_new;
};

__device__ __forceinline__ int split_count(const Params& params, int position) {
  const int units = position / kUnitPositions + 1;
  const int widest = params.widest_window ? smaller(units, divide_up(params.widest_window, kUnitPositions) + 1) : units;
  return smaller(kMaxSplits, divide_up(widest, kUnitsPerSplit));
}

__device__ inline Share share_of(const Params& params, const Shared& shared, int layer, int position) {
  const int window = shared.windows[layer], units = position / kUnitPositions + 1;
  Share share;
  share.splits = split_count(params, position);
  share.kv_head = blockIdx.x % kKvHeads;
  share.split = blockIdx.x / kKvHeads;
  share.has_part = share.split < share.splits;
  share.begin = window && position + 1 > window ? position + 1 - window : 0;
  const int first = share.begin / kUnitPositions, each = divide_up(units - first, share.splits);
  share.first = smaller(units, first + share.split * each);
  share.count = smaller(units - share.first, each);
  share.has_new = share.count > 0 && share.first + share.count == units;
  return share;
}

__device__ __forceinline__ uint8_t* kv_unit(const Params& params, int layer, int kv_head, int unit) {
  return params.kv + ((static_cast<int64_t>(layer) * kKvHeads + kv_head) * params.kv_units + unit) * kUnitBytes;
}

// Ring positions of one side: which slot is next, and how often the ring has gone round.
struct Cursor {
  int slot = 0;
  uint32_t round = 0;
  __device__ void advance() {
    if (++slot == kRingPages) slot = 0, round ^= 1;
  }
};

class Producer {
 public:
  __device__ Producer(Shared& shared, const Params& params)
      : shared_(shared), params_(params), full_(shared.full, kAlone), empty_(shared.empty, kAlone), pages_(shared.ring, kAlone) {}

  // Plays the tape for every token of the request. Never waits for activations, only for room in the ring.
  __device__ void play(int worker) {
    while (!shared_.playing) {
      if (shared_.done) return;
      rest(100);
    }
    fence_copies();
    policy_ = streaming_policy();
    const uint8_t* tape = params_.tapes + params_.tape_start[worker];
    const int64_t layer_bytes = params_.layer_bytes[worker];
    int position = shared_.position;
    int step = shared_.head_first ? 4 * kLayers : 0;  // four matrices a layer, then the head
    step_ = step;
    while (!shared_.done) {
      const bool head = step == 4 * kLayers;
      const Stage stage = head ? Stage::head : static_cast<Stage>(step % 4);
      if (!segment(head ? tape : tape + step / 4 * layer_bytes, stage)) break;
      if (stage == Stage::qkv && !look_back(step / 4, position)) break;
      if (head && !shared_.head_first) position++;
      if (head) shared_.head_first = 0;
      step = head ? 0 : step + 1;
      step_++;
    }
    drain();
  }

 private:
  // See types.h for what is in a page.
  __device__ bool segment(const uint8_t* base, Stage stage) {
    const Span& span = shared_.spans[static_cast<int>(stage)];
    const uint8_t* from = base + span.offset;
    const int blocks = k_blocks(stage);
    const bool whole = blocks <= kPageBlocks;
    const int run = whole ? span.count * blocks : blocks, most = full_page(stage);
    for (int tile = 0; tile < (whole ? 1 : span.count); tile++)
      for (int left = run; left > 0; left -= most) {
        const uint32_t bytes = smaller(left, most) * kBlockBytes;
        if (!page(from, bytes)) return false;
        from += bytes;
        if constexpr (kLeadBytes > 0) shared_.copied = static_cast<int>(copied_ += bytes);
      }
    return true;
  }

  // Earlier positions are prefetched like weights, once everything in them has been written: whole units need the
  // tokens before them to be done, the last unit all tokens before this one.
  __device__ bool look_back(int layer, int position) {
    const Share share = share_of(params_, shared_, layer, position);
    if (!share.has_part) return true;
    const uint8_t* from = kv_unit(params_, layer, share.kv_head, share.first);
    for (int unit = 0; unit < share.count; unit += kPageUnits) {
      const int units = smaller(kPageUnits, share.count - unit);
      const bool last = share.has_new && unit + units == share.count;
      const int written = last ? position : position / kUnitPositions * kUnitPositions;
      if (begun_ < written) {
        while (shared_.position < written)
          if (shared_.done) return false;
        begun_ = written;
        fence_device();
        fence_copies();
      }
      if (!page(from, units * kUnitBytes)) return false;
      from += units * kUnitBytes;
    }
    return true;
  }

  __device__ bool page(const uint8_t* from, uint32_t bytes) {
    if (!room()) return false;
    pages_.copy(next_.slot, from, bytes, full_, policy_);
    next_.advance();
    issued_++;
    return true;
  }

  // Waits until the slot is free and it is time for the next copy. False: the request has ended.
  __device__ bool room() {
    if (issued_ >= kRingPages)
      while (!empty_.passed(next_.slot, next_.round ^ 1))
        if (shared_.done) return false;
    while (!is_time()) {
      if (landed()) continue;
      if (shared_.done) return false;
    }
    last_ = clock_ticks();
    return true;
  }

  // What the consumers need now comes as fast as it can. What they need later comes no faster than the memory could serve
  // all workers: then no queue builds up before which their polls would have to wait.
  __device__ bool is_time() const {
    const int now = shared_.pace, pace = now % 4;
    const bool needed = pace == kWorking && now / 4 == step_;
    const int most = needed ? kInFlightNow : pace == kPolling ? kInFlightPolling : pace == kAttending ? kInFlightAttending : kInFlightAhead;
    return issued_ - landed_ < most && (needed || clock_ticks() - last_ >= kPageTicks);
  }

  // Notes the oldest copy that has landed, if it has.
  __device__ bool landed() {
    if (landed_ == issued_ || !full_.passed(oldest_.slot, oldest_.round)) return false;
    oldest_.advance();
    landed_++;
    return true;
  }

  // Shared memory must not go away under a copy.
  __device__ void drain() {
    while (landed_ < issued_) landed();
  }

  static constexpr uint32_t kAlone = 1;  // it is lane 0 of its warp, and no other lane is there
  Shared& shared_;
  const Params& params_;
  Barriers full_, empty_;
  Pages<kPageBytes> pages_;
  uint64_t policy_ = 0;
  Cursor next_, oldest_;
  int issued_ = 0, landed_ = 0;
  int64_t last_ = 0;  // when a copy was issued last
  int begun_ = -1;
  uint32_t copied_ = 0;
  int step_ = 0;  // counted on from token to token, as the consumers do
};

// A warp's place in the ring. Every warp takes every page in order, whether or not it has work in it.
class PageReader {
 public:
  __device__ explicit PageReader(Shared& shared) : shared_(shared), barriers_(shared.full, ~0u) {}

  // A page may be taken several times before it is given back.
  __device__ __forceinline__ const uint4* take(bool& lost) {
    while (!barriers_.passed(cursor_.slot, cursor_.round))
      if (shared_.failed) {
        lost = true;  // what was taken is never used: the block's next meeting ends the request
        break;
      }
    return reinterpret_cast<const uint4*>(shared_.ring[cursor_.slot]);
  }
  __device__ __forceinline__ void give_back(int lane, bool lost) {
    __syncwarp();
    // After a failure pages are skipped, not taken: giving them back would have them overwritten while they land.
    if (lane == 0 && !lost) barriers_.arrive(kRingPages + cursor_.slot);
    cursor_.advance();
  }

 private:
  Shared& shared_;
  Barriers barriers_;
  Cursor cursor_;
};

}  // namespace monotape

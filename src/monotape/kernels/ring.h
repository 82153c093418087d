// The ring: pages of the tape that are in shared memory. One thread plays the tape, eight warps take the pages.
#pragma once
#include "types.h"

namespace monotape {

struct alignas(128) Shared {
  uint8_t ring[kRingPages][kPageBytes];
  uint4 x[kWarps][kLongestInput];                       // each warp's own part of a stage's input
  float sums[2][kBatchTiles][kWarps][kTileRows];        // partial sums of warps; two buffers, used in turn
  float squares[2][kWarps];
  float residual[kMostWidthTiles * kTileRows];          // this worker's own elements of the residual stream
  float attention[kWarps * kGroup * (kHeadStride + 2)];
  float combined[kMaxSplits * (kHeadStride + 2)];
  float query[kGroup * kHeadStride];
  float new_key[kHeadStride], new_value[kHeadStride];
  float best_value[kWarps];
  int best_id[kWarps];
  Span spans[kMatrixStages];
  uint64_t full[kRingPages], empty[kRingPages];
  volatile int waiting;                                 // consumers are polling
  volatile int done;                                    // the request has ended: the producer must stop
  int next_token, failed;
};

static_assert(sizeof(Shared) <= 227 * 1024, "a block's shared memory");

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
  __device__ Producer(Shared& shared, const Params& params) : shared_(shared), params_(params) {}

  // Plays the tape for every token of the request. Never waits for activations, only for room in the ring.
  __device__ void play(int worker) {
    policy_ = streaming_policy();
    const uint8_t* tape = params_.tapes + params_.tape_start[worker];
    for (int position = params_.cached; !shared_.done; position++) {
      for (int layer = 0; layer < kLayers; layer++)
        for (int s = 0; s < 4; s++)
          if (!segment(tape + layer * params_.layer_bytes[worker], static_cast<Stage>(s))) return drain();
      const bool headless = position + 1 < params_.prompt_length && !params_.logits_out;
      if (!headless && !segment(tape, Stage::head)) return drain();
    }
    drain();
  }

 private:
  __device__ bool segment(const uint8_t* base, Stage stage) {
    const Span& span = shared_.spans[static_cast<int>(stage)];
    const uint8_t* from = base + span.offset;
    int64_t left = static_cast<int64_t>(span.count) * k_blocks(stage) * kBlockBytes;
    for (; left > 0; left -= kPageBytes, from += kPageBytes) {
      if (!room()) return false;
      const uint32_t bytes = left < kPageBytes ? static_cast<uint32_t>(left) : kPageBytes;
      barrier_expect(&shared_.full[next_.slot], bytes);
      copy_page(shared_.ring[next_.slot], from, bytes, &shared_.full[next_.slot], policy_);
      next_.advance();
      issued_++;
    }
    return true;
  }

  // Waits until the slot is free and few enough copies are in flight. False: the request has ended.
  __device__ bool room() {
    if (issued_ >= kRingPages)
      while (!barrier_passed(&shared_.empty[next_.slot], next_.round ^ 1))
        if (shared_.done) return false;
    while (issued_ - landed_ >= (shared_.waiting ? kFewInFlight : kManyInFlight)) {
      if (landed()) continue;
      if (shared_.done) return false;
    }
    return !shared_.done;
  }

  // Notes the oldest copy that has landed, if it has.
  __device__ bool landed() {
    if (landed_ == issued_ || !barrier_passed(&shared_.full[oldest_.slot], oldest_.round)) return false;
    oldest_.advance();
    landed_++;
    return true;
  }

  // Shared memory must not go away under a copy.
  __device__ void drain() {
    while (landed_ < issued_) landed();
  }

  Shared& shared_;
  const Params& params_;
  uint64_t policy_ = 0;
  Cursor next_, oldest_;
  int64_t issued_ = 0, landed_ = 0;
};

// A warp's place in the pages of the running stage. Every warp takes every page in order, whether or not it has a
// block in it: only so do the barriers' rounds stay in step.
class PageReader {
 public:
  __device__ explicit PageReader(Shared& shared) : shared_(shared) {}

  __device__ void begin() { page_ = -1; }
  // Block `index` of this worker's part of the stage.
  __device__ const uint4* block(int index, int lane) {
    while (page_ < index / kPageBlocks) step(lane);
    return reinterpret_cast<const uint4*>(shared_.ring[cursor_.slot] + index % kPageBlocks * kBlockBytes) + lane;
  }
  // Takes the rest of the stage's pages.
  __device__ void finish(int pages, int lane) {
    while (page_ < pages - 1) step(lane);
    if (page_ >= 0) release(lane);
  }

 private:
  __device__ void step(int lane) {
    if (page_ >= 0) release(lane);
    page_++;
    while (!barrier_passed(&shared_.full[cursor_.slot], cursor_.round)) {
    }
  }
  __device__ void release(int lane) {
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared_.empty[cursor_.slot]);
    cursor_.advance();
  }

  Shared& shared_;
  Cursor cursor_;
  int page_ = -1;
};

}  // namespace monotape

// The ring: pages of the tape in shared memory. The producer, one thread, fills it; eight warps read the pages.
#pragma once
#include "worker/shared.h"

namespace monotape {

// The KV units that one worker attends to: [first, first + count) of one head. The number of splits is the same in every
// layer of a token and never shrinks, so each word of the parts is published in every turn.
struct Share {
  int kv_head, split, splits, first, count, begin;  // begin: the first position that the layer sees
  bool has_part, has_new;
};

__device__ __forceinline__ int split_count(int position) {
  const int units = position / kUnitPositions + 1;
  const int widest = kWidestWindow ? smaller(units, divide_up(kWidestWindow, kUnitPositions) + 1) : units;
  return smaller(kMaxSplits, divide_up(widest, kUnitsPerSplit));
}

// Positions that a layer sees, the token's own included; 0: all.
__device__ __forceinline__ int window_of(const Shared& shared, int layer) {
  if constexpr (kKinds == 1) return kWidestWindow;
  return shared.windows[layer];
}

__device__ inline Share share_of(const Shared& shared, int layer, int position) {
  const int window = window_of(shared, layer), units = position / kUnitPositions + 1;
  Share share;
  share.splits = split_count(position);
  share.kv_head = worker_number() % kKvHeads;
  share.split = worker_number() / kKvHeads;
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

// Bytes of a stage's tiles that fill a page, and of one of their blocks.
__host__ __device__ constexpr int block_bytes(Product p) { return format_block_bytes(p.format); }
__host__ __device__ constexpr int full_page(Product p) { return p.tiles_in_page * p.page_run * block_bytes(p); }
__device__ __forceinline__ bool attention_follows(Stage stage) {
  return of_stage(stage, [](StageRow row) { return row.attends; });
}
__device__ __forceinline__ bool is_published(Stage stage) {
  return of_stage(stage, [](StageRow row) { return row.source == Source::published; });
}

// Whether the worker has tiles of experts, and so needs the router's choice.
__device__ __forceinline__ bool has_experts(const Shared& shared) {
  return shared.spans[static_cast<int>(kFirstRouted)].count > 0 || shared.spans[static_cast<int>(kLastStage)].count > 0;
}

#ifdef MONOTAPE_RING
class Producer {
 public:
  __device__ Producer(Shared& shared, const Params& params)
      : shared_(shared), params_(params), full_(shared.full, kAlone), empty_(shared.empty, kAlone), pages_(shared.ring, kAlone) {}

  // Copies the tape for every token of the request. It waits for room in the ring, never for activations.
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
    int step = shared_.head_first ? kTokenSteps - 1 : 0;
    step_ = step;
    while (!shared_.done) {
      const Stage stage = stage_of(step);
      const bool head = stage == Stage::head;
      const uint8_t* from = head ? tape : tape + layer_of(step) * layer_bytes;
      if constexpr (kChoices > 1)
        if (is_published(stage) && !find_published(layer_of(step), from)) break;
      if constexpr (kExperts > 0)
        if (is_routed(stage)) from = nullptr;
      if (kExperts > 0 && !from ? !experts(stage, layer_of(step)) : !segment(from, stage)) break;
      if constexpr (kRows > 1)
        if (unknown_ && attention_follows(stage) && !find_position(position)) break;
      if (attention_follows(stage) && !look_back(layer_of(step), position)) break;
      if (head && !shared_.head_first) kRows == 1 ? position++ : unknown_ = true;
      if (head) shared_.head_first = 0;
      step = head ? 0 : step + 1;
      step_++;
    }
    drain();
  }

 private:
  // Short tiles share pages; a long tile begins a page of its own. See Product in plan/table.h.
  __device__ bool segment(const uint8_t* base, Stage stage) {
    return segment(base, stage, shared_.spans[static_cast<int>(stage)]);
  }
  __device__ __forceinline__ bool segment(const uint8_t* base, Stage stage, const Span& span) {
    const uint8_t* from = base + span.offset;
    const int tile_bytes = of_stage(stage, [](StageRow row) { return product(row.product).blocks * block_bytes(product(row.product)); });
    const int most = of_stage(stage, [](StageRow row) { return full_page(product(row.product)); });
    const bool whole = of_stage(stage, [](StageRow row) { return product(row.product).page_run == product(row.product).blocks; });
    const int run = whole ? span.count * tile_bytes : tile_bytes;
    for (int tile = 0; tile < (whole ? 1 : span.count); tile++)
      for (int left = run; left > 0; left -= most) {
        const uint32_t bytes = smaller(left, most);
        if (!page(from, bytes)) return false;
        from += bytes;
        if constexpr (kLeadBytes > 0) shared_.copied = static_cast<int>(copied_ += bytes);
      }
    return true;
  }

  // The tiles of the chosen experts, as TileProduct (token/tiles.h) takes them.
  __device__ bool experts(Stage stage, int layer) {
    if (stage == kFirstRouted && has_experts(shared_) && !await_choice()) return false;
    return is_dealt(stage) ? dealt_tiles(stage, layer) : added_tiles(layer);
  }
  // One expert's after the other's: runs that lie together in the library.
  __device__ bool dealt_tiles(Stage stage, int layer) {
    const Span& span = shared_.spans[static_cast<int>(stage)];
    const int all = of_stage(stage, [](StageRow row) { return row.tiles; });
    const int tile_bytes = of_stage(stage, [](StageRow row) { return product(row.product).blocks * block_bytes(product(row.product)); });
    for (int done = 0, run; done < span.count; done += run) {
      const int slot = (span.first + done) / all, tile = (span.first + done) % all;
      run = smaller(all - tile, span.count - done);
      if (!segment(chosen(layer, slot), stage, {tile, run, span.offset + static_cast<int64_t>(tile) * tile_bytes})) return false;
    }
    return true;
  }
  // A tile of all experts is put together from as many places of the library. Pages are filled as those of other tiles are.
  __device__ bool added_tiles(int layer) {
    constexpr Product kTiles = product(row_of(kLastStage).product);
    constexpr bool kWhole = kTiles.page_run == kTiles.blocks;
    constexpr int kStep = kWhole ? kTiles.tiles_in_page : 1, kMost = kTiles.tiles_in_page * kTiles.page_run;
    const int count = shared_.spans[static_cast<int>(kLastStage)].count;
    for (int tile = 0; tile < count; tile += kStep) {
      const int blocks = smaller(kStep, count - tile) * kTiles.blocks;
      for (int at = 0; at < blocks; at += kMost)
        if (!added_page(layer, tile, at, smaller(kMost, blocks - at))) return false;
    }
    return true;
  }
  // `count` blocks from block `at` on, counted from the first of a tile.
  __device__ bool added_page(int layer, int tile, int at, int count) {
    constexpr Product kTiles = product(row_of(kLastStage).product);
    constexpr int kEach = expert_blocks(kTiles), kBytes = block_bytes(kTiles);
    const Span& span = shared_.spans[static_cast<int>(kLastStage)];
    if (!room()) return false;
    full_.expect(next_.slot, count * kBytes);
    for (int done = 0, run; done < count; done += run) {
      const int block = at + done, within = block % kEach, its = span.first + tile + block / kTiles.blocks;
      run = smaller(kEach - within, count - done);
      const int64_t offset = span.offset + (static_cast<int64_t>(its) * kEach + within) * kBytes;
      pages_.add(next_.slot, done * kBytes, chosen(layer, block % kTiles.blocks / kEach) + offset, run * kBytes, full_, policy_);
    }
    issued();
    return true;
  }
  // Where the weights of a chosen expert begin.
  __device__ const uint8_t* chosen(int layer, int slot) const {
    const int64_t expert = static_cast<int64_t>(layer) * kExperts + shared_.chosen_expert[slot];
    return params_.tapes + kLibraryStart + expert * kExpertBytes;
  }
  // The consumers choose. Pages before these land meanwhile.
  __device__ bool await_choice() {
    while (shared_.chosen_step != step_) {
      landed();
      if (shared_.done) return false;
    }
    fence_block();
    return true;
  }

  // How many rows of the pass before were accepted decides where the next one begins.
  __device__ bool find_position(int& position) {
    for (int found; unknown_; unknown_ = found == position, position = found) {
      found = shared_.position;
      landed();
      if (shared_.done) return false;
    }
    return true;
  }

  // Units are prefetched like weights once all their positions have been written: for a whole unit when the tokens in it
  // are done, for the last unit when all tokens before this one are.
  __device__ bool look_back(int layer, int position) {
    const Share share = share_of(shared_, layer, position);
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

  // A stage whose weights are chosen while the kernel runs: worker 0 publishes the choice, numbered by the layer's pass,
  // and every producer waits for it here. Pages before this one land meanwhile.
  __device__ bool find_published(int layer, const uint8_t*& from) {
    const uint32_t pass = static_cast<uint32_t>(step_ / kTokenSteps * kLayers + layer);
    uint64_t word = load_link(&params_.exchange->choice[pass % 2]);
    for (; word >> 32 != pass; word = load_link(&params_.exchange->choice[pass % 2])) {
      landed();
      if (shared_.done) return false;
    }
    from += static_cast<uint32_t>(word) * params_.choice_stride;
    return true;
  }

  __device__ bool page(const uint8_t* from, uint32_t bytes) {
    if (!room()) return false;
    pages_.copy(next_.slot, from, bytes, full_, policy_);
    issued();
    return true;
  }
  __device__ __forceinline__ void issued() {
    next_.advance();
    issued_++;
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

  // Pages that the consumers need now are copied as fast as possible. Later pages are copied no faster than the memory could
  // serve all workers: otherwise a queue would build up, and polls would wait behind it.
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

  // The thread block must not exit while a copy into its shared memory is in flight.
  __device__ void drain() {
    while (landed_ < issued_) landed();
  }

  static constexpr uint32_t kAlone = 1;  // only lane 0 of the warp is active
  Shared& shared_;
  const Params& params_;
  Barriers full_, empty_;
  Pages<kPageBytes> pages_;
  uint64_t policy_ = 0;
  Cursor next_, oldest_;
  int issued_ = 0, landed_ = 0;
  int64_t last_ = 0;  // when a copy was issued last
  int begun_ = -1;
  bool unknown_ = false;  // the position of the pass
  uint32_t copied_ = 0;
  int step_ = 0;  // counted on from token to token, as the consumers do
};

// A warp's position in the ring. Every warp takes every page in order, even pages without work for it.
class PageReader {
 public:
  __device__ explicit PageReader(Shared& shared) : shared_(shared), barriers_(shared.full, ~0u) {}

  // A page may be taken several times before it is given back.
  __device__ __forceinline__ const uint4* take(bool& lost) {
    const int64_t began = kTrace ? clock_ns() : 0;
    while (!barriers_.passed(cursor_.slot, cursor_.round))
      if (shared_.failed) {
        lost = true;  // the page is never used: the next barrier ends the request
        break;
      }
    if constexpr (kTrace) waited_ns += clock_ns() - began;
    return reinterpret_cast<const uint4*>(shared_.ring[cursor_.slot]);
  }
  __device__ __forceinline__ void begin_token(int) {}
  // A page of units of KV.
  template <class Consumer>
  __device__ __forceinline__ const uint4* take_units(Consumer& c, int, const Share&, int) {
    return take(c.lost);
  }
  template <class Consumer>
  __device__ __forceinline__ void go_to(Consumer&, Stage, int) {}
  __device__ __forceinline__ void give_back(int lane, bool lost) {
    warp_meets();
    // After a failure pages are skipped: releasing them would let the producer overwrite pages that are still landing.
    if (lane == 0 && !lost) barriers_.arrive(kRingPages + cursor_.slot);
    cursor_.advance();
  }

  // Several pages are taken and kept, and given back together; `first` is the slot of the first.
  __device__ __forceinline__ int keep(int pages, bool& lost) {
    const int first = cursor_.slot;
    for (int i = 0; i < pages; i++) {
      take(lost);
      cursor_.advance();
    }
    return first;
  }
  __device__ __forceinline__ const uint4* kept(int first, int page) const {
    return reinterpret_cast<const uint4*>(shared_.ring[slot_after(first, page)]);
  }
  __device__ __forceinline__ void give_kept(int first, int pages, int lane, bool lost) {
    warp_meets();
    for (int i = 0; i < pages && lane == 0 && !lost; i++) barriers_.arrive(kRingPages + slot_after(first, i));
  }

  __device__ __forceinline__ Cursor cursor() const { return cursor_; }
  __device__ __forceinline__ void go_on(Cursor cursor) { cursor_ = cursor; }

  int64_t waited_ns = 0;  // for pages, where a trace is kept

 private:
  static __device__ __forceinline__ int slot_after(int first, int pages) {
    return first + pages < kRingPages ? first + pages : first + pages - kRingPages;
  }

  Shared& shared_;
  Barriers barriers_;
  Cursor cursor_;
};

#else
// Without bulk copies there is no ring: a warp reads its weights from the tape into its own registers, two steps ahead
// (Progress in token/progress.h), and units of KV where they lie.
class PageReader {
 public:
  __device__ explicit PageReader(Shared&) {}

  // Other workers wrote KV of earlier tokens, and a worker's share of the units changes with the position.
  // 1. A worker writes the KV of a token, then executes a fence (`forward` in token/model.h), then publishes its candidate.
  // 2. Every worker polls all candidates before its consumers meet and the next token begins.
  // 3. The acquire comes after that, and before the barrier that all consumers pass before they attend.
  __device__ __forceinline__ void begin_token(int thread) {
    if (thread == 0) acquire_device();
  }
  // The first of this worker's tiles of a stage; of a routed one, the first tile of the layer's first expert.
  template <class Consumer>
  __device__ __forceinline__ void go_to(Consumer& c, Stage stage, int layer) {
    const Params& params = c.params;
    const int64_t run = stage == Stage::head ? 0 : layer * params.layer_bytes[worker_number()];
    const uint8_t* from = params.tapes + params.tape_start[worker_number()] + run + c.span(stage).offset;
    if constexpr (kExperts > 0)
      if (is_routed(stage)) from = params.tapes + kLibraryStart + static_cast<int64_t>(layer) * kExperts * kExpertBytes + c.span(stage).offset;
    if constexpr (kChoices > 1)
      if (is_published(stage)) from += published(c) * params.choice_stride;
    at_ = MONOTAPE_UNIFORM(reinterpret_cast<const uint4*>(from));
  }
  __device__ __forceinline__ const uint4* at() const { return at_; }
  template <class Consumer>
  __device__ __forceinline__ const uint4* take_units(Consumer& c, int layer, const Share& share, int unit) {
    return MONOTAPE_UNIFORM(reinterpret_cast<const uint4*>(kv_unit(c.params, layer, share.kv_head, share.first + unit)));
  }
  __device__ __forceinline__ const uint4* take(bool&) const { return at_; }
  __device__ __forceinline__ void give_back(int, bool) {}

  static __device__ __forceinline__ Cursor cursor() { return {}; }
  static __device__ __forceinline__ void go_on(Cursor) {}

  int64_t waited_ns = 0;  // there are no pages to wait for

 private:
  // The choice of a stage whose weights are chosen while the kernel runs: worker 0 publishes it, numbered by the turn.
  template <class Consumer>
  static __device__ __forceinline__ int64_t published(Consumer& c) {
    const uint32_t pass = static_cast<uint32_t>(c.turn);
    uint64_t word = load_link(&c.params.exchange->choice[pass % 2]);
    for (; word >> 32 != pass && !c.lost; word = load_link(&c.params.exchange->choice[pass % 2])) c.lost = c.shared.failed;
    return static_cast<uint32_t>(word);
  }

  const uint4* at_ = nullptr;
};
#endif

}  // namespace monotape

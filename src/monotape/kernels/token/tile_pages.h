// How a warp gets the blocks of its worker's tiles: off the pages of the ring, or off the tape itself where there is no ring.
#pragma once
#include "token/progress.h"

namespace monotape {

// Of product `Number`, a tile length and a format: its shape, and its blocks, which come into registers two pages ahead of the
// products. It depends on `Rows` because the compiler makes other code of functions that passes of one row and of several share.
template <int Number, int Rows>
class TilePages {
 public:
  static constexpr TileLayout kProduct = product(Number);
  static constexpr int kAdded = product(Number).inputs, kExpertBlocks = expert_blocks(product(Number));
  static constexpr int kTogether = kProduct.together;

  __device__ __forceinline__ TilePages(Consumer& c, Progress& progress, int count) : c_(c), at_(progress), count_(count) {}

  __device__ __forceinline__ void prepare() {
    if constexpr (kDealt) find_run();
    clear<kEveryBlock ? 0 : kSure>(at_.even);
    fetch(at_.even);  // there is a tile, or the stage would have been passed over
    give_back();
    if (more_to_fetch()) {
      clear<kEveryBlock ? 0 : kSure>(at_.odd);
      fetch(at_.odd);
      give_back();
    } else {
      clear<0>(at_.odd);  // a register without a value is kept through the whole token
    }
  }

 protected:
  using Weight = Stored<kProduct.format>;
  static constexpr int kSub = Weight::kSub, kExtra = Weight::kExtra, kBlockWords = Weight::kBlockBytes / 16;
  static constexpr int kBlocks = kProduct.blocks, kInPage = kProduct.tiles_in_page, kRun = kProduct.page_run;
  static constexpr int kAtOnce = divide_up(kRun, kWarps * kSide);
  static constexpr int kLastRun = kBlocks - (divide_up(kBlocks, kRun) - 1) * kRun, kSure = kLastRun / (kWarps * kSide);
  static constexpr int kPages = divide_up(kBlocks, kRun);  // of a tile
  static constexpr bool kWhole = kRun == kBlocks;  // a tile is never in two pages, and the input is the same for all
  static constexpr bool kAddsExperts = kAdded > 0, kDealt = product(Number).dealt > 0;

  // The blocks that were fetched before are in registers now.
  __device__ __forceinline__ void give_back() {
    if (at_.page_ends) c_.pages.give_back(c_.lane(), c_.lost);
    at_.page_ends = false;
  }

  // Blocks past the end of a tile, which some warps have: what no page brings is zero, as the inputs there are. Not all blocks,
  // where a page brings them: that would take time in every stage.
  template <int First>
  __device__ __forceinline__ void clear(Weights& to) const {
#pragma unroll
    for (int t = 0; t < kTogether; t++)
#pragma unroll
      for (int i = First; i < kAtOnce; i++) {
        const int at = t * kAtOnce + i;
#pragma unroll
        for (int v = 0; v < Weight::kVectors; v++) to.block[at * Weight::kVectors + v] = make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int e = 0; e < kExtra; e++) to.extra_of(at * kExtra)[e] = 0;
      }
  }

  __device__ __forceinline__ void fetch_next(Weights& to) {
    give_back();
    if (more_to_fetch()) fetch(to);
  }
  __device__ __forceinline__ void fetch(Weights& to) {
    const uint4* page = next_page() + (c_.warp() * kSide + c_.side()) * kBlockWords + c_.word();
#pragma unroll
    for (int t = 0; t < kTogether; t++)
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) {
        const uint4* block = page + (t * kBlocks + i * kWarps * kSide) * kBlockWords;
        if constexpr (kInLibrary) block = library_block(t, i, c_.side()) + c_.word();
        if (there(at_.next_k, i) && is_mine(t)) fetch_block(to, t * kAtOnce + i, block);
        else if (!kWhole) to.block[i * Weight::kVectors] = make_uint4(0, 0, 0, 0);  // for whole tiles it has been zero from the start
        if constexpr (Weight::kSides && kExtra > 0) fetch_scales(to, t, i, block);
      }
    at_.page_ends = kInPage == kTogether || at_.in_page == kInPage - kTogether || run_ends();
    at_.in_page = at_.page_ends ? 0 : at_.in_page + kTogether;
    at_.next_k += kRun;
    if (kWhole || at_.next_k >= kBlocks) {
      at_.next_k = 0;
      if constexpr (kDealt) at_.left -= kTogether;
      else at_.next_tile += kTogether;
    }
  }
  __device__ __forceinline__ bool more_to_fetch() {
    if constexpr (!kDealt) return at_.next_tile < count_;
    else if (at_.left > 0) return true;
    else return next_run();
  }
  // A page does not go on from one run to the next.
  __device__ __forceinline__ bool run_ends() const {
    if constexpr (kDealt) return at_.left <= kTogether;
    else return at_.next_tile + kTogether >= count_;
  }
  // As the producer copies them: `dealt_tiles` in worker/ring.h.
  __device__ __forceinline__ bool next_run() {
    at_.left = smaller(at_.rest, at_.most), at_.rest -= at_.left;
    if (at_.left > 0) find_run();
    return at_.left > 0;
  }

#ifdef MONOTAPE_RING
  static constexpr bool kEveryBlock = false;  // whether clear() zeroes every block: without a ring nothing past the last tile is fetched
  static constexpr bool kInLibrary = false;  // pages have the blocks in their order
  // The next tiles, in a page that has landed; past the last tile there is more of the ring.
  __device__ __forceinline__ const uint4* next_page() {
    return c_.pages.take(c_.lost) + (kInPage == kTogether ? 0 : at_.in_page * kBlocks) * kBlockWords;
  }
  static __device__ __forceinline__ bool is_mine(int) { return true; }
  static __device__ __forceinline__ void find_run() {}
  static __device__ __forceinline__ const uint4* library_block(int, int, int) { return nullptr; }
#else
  static constexpr bool kEveryBlock = true;
  static constexpr bool kInLibrary = kAddsExperts;
  // On the tape itself, past whose end nothing may be read. Runs of experts lie in the library.
  __device__ __forceinline__ const uint4* next_page() const {
    if constexpr (kDealt) return at_.from + (static_cast<int64_t>(at_.found - at_.left) * kBlocks + at_.next_k) * kBlockWords;
    else return c_.pages.at() + (static_cast<int64_t>(at_.next_tile) * kBlocks + at_.next_k) * kBlockWords;
  }
  __device__ __forceinline__ bool is_mine(int t) const {
    if constexpr (kDealt) return t < at_.left;
    else return at_.next_tile + t < count_;
  }
  // The tiles of an expert that are fetched next.
  __device__ __forceinline__ void find_run() {
    const Span& span = c_.span(kFirstRouted);
    const int dealt = span.first + span.count - at_.rest - at_.left;  // counted on from expert to expert
    const int64_t expert = static_cast<int64_t>(c_.shared.chosen_expert[dealt / at_.most]) * (kExpertBytes / 16);
    at_.from = MONOTAPE_UNIFORM(c_.pages.at() + expert + static_cast<int64_t>(dealt % at_.most) * kBlocks * kBlockWords);
    at_.found = at_.left;
  }
  // Of experts that are added up: a block of the tile that is fetched next, the warp's i-th.
  __device__ __forceinline__ const uint4* library_block(int t, int i, int side) const {
    const int block = at_.next_k + (i * kWarps + c_.warp()) * kSide + side, slot = smaller(block / kExpertBlocks, kAdded - 1);
    const int64_t expert = static_cast<int64_t>(c_.shared.chosen_expert[slot]) * (kExpertBytes / 16);
    const int tile = c_.span(kLastStage).first + at_.next_tile + t;
    return c_.pages.at() + expert + (static_cast<int64_t>(tile) * kExpertBlocks + block % kExpertBlocks) * kBlockWords;
  }
#endif

  // `block` is where the lane's first words lie.
  __device__ __forceinline__ void fetch_block(Weights& to, int at, const uint4* block) {
#pragma unroll
    for (int v = 0; v < Weight::kVectors; v++) to.block[at * Weight::kVectors + v] = load_weights(block + v * kBlockLanes);
    const uint8_t* first = reinterpret_cast<const uint8_t*>(block - c_.word());
    if constexpr (Weight::kSides) Weight::read_codes(first, c_.lane(), to.extra_of(at * kExtra));
    else if constexpr (kExtra > 0) Weight::read_extra(first, c_.lane(), to.extra_of(at * kExtra));
  }
  // The scales of a lane's sums may be of the block beside the one that it multiplies.
  __device__ __forceinline__ void fetch_scales(Weights& to, int t, int i, const uint4* block) const {
    const int side = Weight::own_side(c_.lane());
    if (!there(at_.next_k, i, side) || !is_mine(t)) return;
    const uint4* first = kInLibrary ? library_block(t, i, side) : block - c_.word() + (side - c_.side()) * kBlockWords;
    Weight::read_scales(reinterpret_cast<const uint8_t*>(first), c_.lane(), to.extra_of((t * kAtOnce + i) * kExtra));
  }

  __device__ __forceinline__ bool there(int k, int i) const { return there(k, i, c_.side()); }
  __device__ __forceinline__ bool there(int k, int i, int side) const { return i < kSure || k + i * kWarps * kSide + c_.warp() * kSide + side < kBlocks; }

  Consumer& c_;
  Progress& at_;
  const int count_;
};

}  // namespace monotape

// Experts of a token: the router's logits become a choice, and the tiles of the chosen experts are numbered through.
//
// Each worker chooses for itself: all have the same logits, so all choose alike. The first routed stage waits for the choice,
// and the producer with it. That stage's tiles are dealt out one expert's after the other's, and its epilogue multiplies each
// activation by the weight of its expert. In the second stage, which adds to the residual, a worker has the same tiles of every
// expert: they are one long product, the lowest expert's values of k first.
#pragma once
#include "token/input.h"

namespace monotape {

// A worker's tiles of the chosen experts. A warp multiplies several tiles at once, of one expert: so in a batch of sums an
// expert's tiles begin at a multiple of that number. A position is a place in these batches, and may have no tile.
struct Dealing {
  int first, count;     // tiles of the worker, counted on from expert to expert
  int all, together;    // tiles of an expert, and those that are multiplied at once

  struct Place {
    int tile;   // of the worker's
    int slot;   // which of the chosen experts
    int within; // tile of the expert
    bool real;
  };
  __device__ __forceinline__ int lead() const { return smaller(count, all - first % all); }
  __device__ __forceinline__ int whole(int tiles) const { return divide_up(tiles, together) * together; }
  __device__ __forceinline__ int positions() const {
    const int rest = count - lead();
    return whole(lead()) + rest / all * whole(all) + whole(rest % all);
  }
  __device__ __forceinline__ Place place_of(int position) const {
    const int after = position - whole(lead()), at = after < 0 ? position : after % whole(all);
    const int run = after < 0 ? lead() : all, tile = after < 0 ? position : lead() + after / whole(all) * all + at;
    return {tile, (first + tile) / all, (first + tile) % all, at < run && tile < count};
  }
};

__device__ __forceinline__ Dealing dealing_of(const Consumer& c, Stage stage) {
  const int all = of_stage(stage, [](StageRow row) { return row.tiles; });
  const int together = of_stage(stage, [](StageRow row) { return product(row.product).together; });
  return {c.span(stage).first, c.span(stage).count, all, together};
}

// Positions of a worker in a stage: its tiles, unless they are dealt out.
__device__ __forceinline__ int positions_of(const Consumer& c, Stage stage) {
  if constexpr (kExperts == 0) return c.span(stage).count;
  return is_dealt(stage) ? dealing_of(c, stage).positions() : c.span(stage).count;
}

// One warp: the chosen experts and their weights, from the logits of a row. Of equal logits the lower expert wins.
class ExpertChoice {
 public:
  static constexpr int kWords = larger(1, 2 * divide_up(kExperts, kTileRows)), kRounds = divide_up(kWords, kLanes);
  static_assert(kChosen <= kLanes, "a lane for each chosen expert");

  __device__ ExpertChoice(Consumer& c) : c_(c) {}

  // Of the token at hand, when the router has published them.
  __device__ __forceinline__ void hear(int layer) {
    int index[kRounds];
    uint4 word[kRounds];
#pragma unroll
    for (int r = 0; r < kRounds; r++) index[r] = r * kLanes + c_.lane() < kWords ? r * kLanes + c_.lane() : -1;
    Patience patience(c_.shared, c_.lost, kFirstRouted, layer);
#ifdef MONOTAPE_DIE_COPIES
    poll_on_die(words_of<kChoice>(*c_.params.exchange, c_.turn), copy_of<kChoice>(c_, c_.turn), index, word, patience,
                [&](int r) { return brings_over(c_, static_cast<int>(kFirstRouted), index[r]); });
#else
    poll(words_of<kChoice>(*c_.params.exchange, c_.turn), index, word, patience);
#endif
    warp_meets();
#pragma unroll
    for (int r = 0; r < kRounds; r++) {
      const uint32_t bits[4] = {word[r].x, word[r].y, word[r].z, word[r].w};
#pragma unroll
      for (int i = 0; i < 4; i++) logit_[r][i] = float_of(bits[i]);
    }
  }
  // From memory: add(word, logits) adds the four logits of a word.
  template <class Add>
  __device__ __forceinline__ void load(Add add) {
#pragma unroll
    for (int r = 0; r < kRounds; r++) {
#pragma unroll
      for (int i = 0; i < 4; i++) logit_[r][i] = 0;
      if (r * kLanes + c_.lane() < kWords) add(r * kLanes + c_.lane(), logit_[r]);
    }
  }

  // keep(slot, expert, weight) in one lane for each of them; slots are in the order of experts.
  template <class Keep>
  __device__ __forceinline__ void choose(Keep keep) {
    uint32_t key[kRounds][4];  // 0: taken, or no expert
    float peak = 0, mine = 0, every = 0;
    int expert = 0;
#pragma unroll
    for (int r = 0; r < kRounds; r++)
#pragma unroll
      for (int i = 0; i < 4; i++) key[r][i] = expert_of(r, i) < kExperts ? static_cast<uint32_t>(key_of(logit_[r][i], 0) >> 32) : 0;
#pragma unroll 1
    for (int n = 0; n < kChosen; n++) {  // its length is time that all workers wait: few steps that wait for each other
      uint32_t best = 0, first = 0;  // first: all ones less the lowest expert that has it
#pragma unroll
      for (int r = 0; r < kRounds; r++)
#pragma unroll
        for (int i = 0; i < 4; i++) best = key[r][i] > best ? key[r][i] : best;
      const uint32_t most = most_of_lanes(best);
#pragma unroll
      for (int r = kRounds - 1; r >= 0; r--)
#pragma unroll
        for (int i = 3; i >= 0; i--)
          if (key[r][i] == most) first = ~static_cast<uint32_t>(expert_of(r, i));
      const int found = static_cast<int>(~most_of_lanes(first));
      const float its = value_of(static_cast<uint64_t>(most) << 32);
      if (n == 0) peak = its;
      if (c_.lane() == n) mine = its, expert = found;
#pragma unroll
      for (int r = 0; r < kRounds; r++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (expert_of(r, i) == found) key[r][i] = 0;
    }
    mine = exponential(mine - peak);
    int slot = 0;
    float total = 0;
#pragma unroll
    for (int n = 0; n < kChosen; n++) {
      slot += lane_at(expert, n) < expert;
      total += lane_at(mine, n);
    }
    if constexpr (kOverAll) {
#pragma unroll
      for (int r = 0; r < kRounds; r++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (expert_of(r, i) < kExperts) every += exponential(logit_[r][i] - peak);
      total = warp_sum(every);
    }
    if (c_.lane() < kChosen) keep(slot, expert, quotient(mine, total));
    warp_meets();
  }

 private:
  __device__ __forceinline__ int expert_of(int round, int i) const { return (round * kLanes + c_.lane()) * 4 + i; }

  Consumer& c_;
  float logit_[kRounds][4];
};

// The scales of a batch's rows in the stage that adds experts up, of each of them, on their way into shared memory. Of the first
// batch they come while the experts' first stage is computed: that hides the way from memory, which begins with the choice.
__device__ __forceinline__ void fetch_expert_scales(Consumer& c, int layer, int first) {
  if constexpr (kScalesExperts) {
    constexpr StageRow kRow = row_of(kLastStage);
    constexpr int kWords = kTileRows / 4;
    const Span& span = c.span(kLastStage);
    const uint4* scales = reinterpret_cast<const uint4*>(c.params.vectors[static_cast<int>(kRow.scale)]);
#pragma unroll 1
    for (int i = c.thread; i < kChosen * kBatchTiles * kWords; i += kConsumers) {
      const int word = i % kWords, tile = first + i / kWords % kBatchTiles, slot = i / (kWords * kBatchTiles);
      if (tile >= span.count) continue;
      const int64_t expert = static_cast<int64_t>(layer) * kExperts + c.shared.chosen_expert[slot];
      copy_word(c.shared.expert_scale + 4 * i, scales + (expert * kRow.tiles + span.first + tile) * kWords + word, 16);
    }
    end_copy_group();
  }
}
__device__ __forceinline__ bool have_expert_scales(Consumer& c) {
  wait_copy_groups<0>();
  return c.meet();
}

// Chooses the experts of a layer for all warps of the worker, and for its producer.
__device__ __forceinline__ bool choose_experts(Consumer& c, int layer) {
  if (c.warp() == 0) {
    ExpertChoice choice(c);
    choice.hear(layer);
    choice.choose([&](int slot, int expert, float weight) {
      c.shared.chosen_expert[slot] = expert, c.shared.chosen_weight[slot] = weight;
    });
    fence_block();
    if (c.thread == 0 && !c.lost) c.shared.chosen_step = step_of(c, kFirstRouted, layer);
  }
  if (!c.meet()) return false;  // all warps read the choice
  fetch_expert_scales(c, layer, 0);
  return true;
}
// Whether the worker needs the choice though it has no tiles of the stage that waits for it.
__device__ __forceinline__ bool needs_choice(const Consumer& c, Stage stage) {
  return kExperts > 0 && stage == kFirstRouted && has_experts(c.shared);
}

// A value of each row of the experts' matrices, [experts][tiles][rows of a tile]: of the row that this thread finishes.
__device__ __forceinline__ float expert_value(const Consumer& c, const float* values, Stage stage, int slot, int tile) {
  const int all = of_stage(stage, [](StageRow row) { return row.tiles; });
  const int64_t at = static_cast<int64_t>(c.shared.chosen_expert[slot]) * all + tile;
  return values[at * kTileRows + c.within(kTileRows)];
}

// The same of every chosen expert, for a tile that a worker adds up: each times the expert's weight.
__device__ __forceinline__ float expert_values(const Consumer& c, const float* values, Stage stage, int tile) {
  float sum = 0;
#pragma unroll
  for (int slot = 0; slot < kChosen; slot++) sum += c.shared.chosen_weight[slot] * expert_value(c, values, stage, slot, tile);
  return sum;
}

}  // namespace monotape

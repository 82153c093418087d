// The helpers: a second team of eight warps that multiplies every other step of a worker's tiles, and does nothing else.
// Formats that take many instructions a byte then keep four warps of a scheduler busy, not two. A tile is multiplied by one
// team alone, its blocks of k shared out to eight warps as ever, so sums lie and add up as with one team.
#pragma once
#include "token/matrix.h"

namespace monotape {

template <int Team>
__device__ __forceinline__ bool help_with(Consumer& c, Stage stage, uint32_t& stages) {
  const int count = c.span(stage).count, number = product_number(stage);
  const int most = of_stage(stage, [](StageRow row) { return product(row.product).batch; });
  if (count == 0) return true;
  c.refresh();
  Progress progress;
  prepare_tiles<Team>(c, progress, number, count);
  if (!await_phase(c.shared, &c.shared.helping.heard[c.warp()], stages++ & 1)) return false;
#pragma unroll 1
  for (int first = 0; first < count; first += most, c.buffer ^= 1, c.batches++) {
    // Before the first batch of all, nothing is read.
    if (c.batches > 0 && !await_phase(c.shared, &c.shared.helping.met, (c.batches - 1) & 1)) return false;
    multiply_tiles<Team>(c, progress, number, count, smaller(first + most, count), [] {});
    warp_meets();
    if (c.lane() == 0) barrier_arrive(&c.shared.helping.helped);
  }
  return lanes_agree(!c.lost);
}

__device__ __forceinline__ void skip_attention(Consumer& c, int layer, int position) {
  const Share share = share_of(c.shared, layer, position);
  if (share.has_part) c.pages.skip(divide_up(share.count, kPageUnits));
}

// A template of the team: a kernel of one team then has no tables of a second.
template <int Team>
__device__ __noinline__ void help(Shared& shared) {
  Consumer c(request, kept(shared, ~0u), kFirstHelper);
  uint32_t stages = 0;
#pragma unroll 1
  for (uint32_t token = 0;; token++) {
    if (!await_phase(shared, &shared.helping.begun, token & 1)) return;
    const int position = shared.position;
#pragma unroll 1
    for (int step = shared.helping.head_only ? kTokenSteps - 1 : 0; step < kTokenSteps; step++) {
      const Stage stage = stage_of(step);
      if (!help_with<Team>(c, stage, stages)) return;
      if (attention_follows(stage)) skip_attention(c, layer_of(step), position);
    }
  }
}

}  // namespace monotape

// Attention of one token: the units of each KV head are spread over workers and come through the ring like weights. The
// results of several workers, the parts, are combined in the order of the positions (token/combine.h).
#pragma once
#include "token/query.h"
#include "token/parts.h"
#include MONOTAPE_UNIT  // Running, look_at, keep_part

namespace monotape {

__device__ __forceinline__ uint8_t* unit_in(const uint4* page, int number) {
  return reinterpret_cast<uint8_t*>(const_cast<uint4*>(page)) + number * kUnitBytes;
}

#ifdef MONOTAPE_RING
// Whether a worker's units are in one page, and a warp has one of them at most.
__device__ __forceinline__ bool has_one_page(const Share& share) { return share.count > 0 && share.count <= smaller(kPageUnits, kWarps); }
#else
__device__ __forceinline__ bool has_one_page(const Share&) { return false; }
#endif

// All units of a share, unit i by warp i % kWarps, as their pages come.
__device__ __forceinline__ void look_at_share(Consumer& c, const Share& share, int layer, int position, const Head& query, Running& running) {
  const int last = share.has_new ? share.count - 1 : -1;
  const bool newest = last >= 0 && last % kWarps == c.warp();
  for (int unit = 0; unit < share.count; unit += kPageUnits) {
    const uint4* page = c.pages.take_units(c, layer, share, unit);
#pragma unroll 1
    for (int i = unit; i < smaller(unit + kPageUnits, share.count); i++)
      if (i % kWarps == c.warp()) {
        const int base = (share.first + i) * kUnitPositions;
        const uint4* words = page + (i - unit) * (kUnitBytes / 16);
#ifdef MONOTAPE_RING
        if (i == last) {
          put_newest(c, unit_in(page, i - unit), position);
          warp_meets();
        }
        look_at<false>(c, words, query, share.begin - base, position + 1 - base, running);
#else
        look_at(c, words, query, share.begin - base, position + 1 - base, running, i == last ? position - base : -1);
#endif
      }
    if (!newest || unit + kPageUnits < share.count) c.pages.give_back(c.lane(), c.lost);
  }
}

// The stage: polls the query, attends to the units, warp by warp, and adds up the warps' results. A lone unit is the work of one
// warp, which publishes without meeting the others.
__device__ __forceinline__ bool attend(Consumer& c, int layer, int position) {
  const Share share = share_of(c.shared, layer, position);
  if (!share.has_part) return true;
  c.begin(Stage::attention, layer);
  if (!c.meet()) return false;  // no warp reads the sums of qkv any more; the parts will overwrite them
  const int last = share.has_new ? share.count - 1 : -1;  // the unit of the new token
  const bool newest = last >= 0 && last % kWarps == c.warp(), idle = resets_in_attention(c), one_page = has_one_page(share);
  const uint4* page = one_page ? c.pages.take_units(c, layer, share, 0) : nullptr;
  const Head query = hear_token(c, share.kv_head, c.warp() < share.count || idle, newest, layer, position, newest && one_page ? unit_in(page, last) : nullptr);
  c.trace.arrived();
  if (idle) reset_in_attention(c, layer);
  Running running;
  running.clear();
#ifdef MONOTAPE_RING
  if (one_page) {
    const int base = (share.first + c.warp()) * kUnitPositions;
    if (c.warp() < share.count) look_at<true>(c, page + c.warp() * (kUnitBytes / 16), query, share.begin - base, position + 1 - base, running);
    if (!newest) c.pages.give_back(c.lane(), c.lost);
  } else
#endif
    look_at_share(c, share, layer, position, query, running);
  const bool lone = !kFewRegisters && share.count == 1, heard = !lone || !most_of_lanes(c.lost);
  if (c.warp() < share.count) keep_part(c, running, c.warp());
  if (lone) {
    warp_meets();  // the part is complete, and lane 0 has awaited the resets: exchange/janitor.h, (2)b
    if (c.warp() == 0 && heard) publish_lone(c, layer, share);
  } else {
    if (!c.meet()) return false;
    publish_results(c, layer, share);
  }
  c.trace.end();
  if (newest) {
    fence_shared_copies();  // orders the store into the page before the next copy into it
    c.pages.give_back(c.lane(), c.lost);
  }
  // Into the KV cache: where registers are few, before the barrier, because no address is kept over it.
  if (kFewRegisters && newest) put_newest(c, kv_unit(c.params, layer, share.kv_head, position / kUnitPositions), position);
  const bool good = c.meet();  // the next input lies where the parts are, and the new key and value are complete
  // Otherwise by a warp that seldom has anything to publish, while the others go on.
  if (!kFewRegisters && good && share.has_new && c.warp() == kWarps - 1) put_newest(c, kv_unit(c.params, layer, share.kv_head, position / kUnitPositions), position);
  return good;
}

}  // namespace monotape

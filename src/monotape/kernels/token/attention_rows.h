// Attention of a pass of several rows: the same units for all rows, and each row's results as by a pass of its own.
#pragma once
#include "token/attention.h"

namespace monotape {

#ifdef MONOTAPE_RING
// The stage for several rows, which are all in one unit: they see the same units, split in the same way. Each row's results are
// made as by a pass of its own: chain w of it takes the units w, w + 8, w + 16 ..., and chains are added up in order. Which
// warp computes a chain does not matter: where there are fewer units than warps, warps share the rows.
//
// All pages of the ring but one may be kept until every row has seen them. Where there are more, chains wait in memory.
constexpr int kKeptUnits = (kRingPages - 1) * kPageUnits;

__device__ __forceinline__ uint4* row_query(Consumer& c, int row) {
  const int lane = smaller(c.lane(), kQueryLanes - 1);  // lanes without a head have any
  return reinterpret_cast<uint4*>(c.shared.attending + kAllPartsBytes + row * kQueryBytes) + lane;
}

// Each query is polled by one warp, for all. The key and the value go with it where this worker has the newest unit: into the
// KV cache, where other workers find them after the fence before the head, and into the unit in the ring, if it is there.
__device__ __forceinline__ void hear_rows(Consumer& c, const Share& share, int layer, int position, uint8_t* newest) {
  const int row = c.warp();
  if (row >= c.shared.drafts.rows) return;
  const auto keep = [&](const Head& key, bool has_key, uint4 value) {
    if (newest) put_row(c, newest, position + row, key, has_key, value);
    put_row(c, kv_unit(c.params, layer, share.kv_head, position / kUnitPositions), position + row, key, has_key, value);
  };
  const Head query = hear_row(c, share.kv_head, true, share.has_new, layer, row, angles_of(c.params, position + row), keep);
  if (c.lane() < kQueryLanes)
#pragma unroll
    for (int b = 0; b < kHeadBlocks; b++) row_query(c, row)[b * kQueryLanes] = query.block[b];
}

// The same from the KV cache, where this warp has put it: the unit came into the ring later.
__device__ __forceinline__ void take_row_codes(Consumer& c, uint8_t* unit, uint8_t* cache, int position) {
  for (int word = c.lane(); word < kHeadBlocks * 4; word += kLanes) {
    const int place = key_place(position, word / 4, word % 4);
    *key_codes(unit, place) = *key_codes(cache, place);
  }
  for (int d = c.lane(); d < kHeadDim; d += kLanes) *value_code(unit, position, d) = *value_code(cache, position, d);
  if (c.lane() < 2) *power_place(unit, position, c.lane()) = *power_place(cache, position, c.lane());
}
__device__ __forceinline__ void take_row(Consumer& c, uint8_t* unit, const uint8_t* cache, int position) {
  warp_meets();
  if constexpr (kNarrowKv) {
    take_row_codes(c, unit, const_cast<uint8_t*>(cache), position);
  } else {
#pragma unroll
    for (int word = c.lane(); word < kHeadBlocks * 4; word += kLanes)
      store_key_word(unit, position, word / 4, word % 4, key_word(cache, position, word / 4, word % 4));
#pragma unroll
    for (int d = c.lane(); d < kHeadDim; d += kLanes) *value_place(unit, position, d) = *value_place(const_cast<uint8_t*>(cache), position, d);
  }
}

// A unit of the share whose page is kept.
__device__ __forceinline__ const uint4* unit_at(Consumer& c, int kept, int unit) {
  return c.pages.kept(kept, unit / kPageUnits) + unit % kPageUnits * (kUnitBytes / 16);
}

// A chain of a row, from unit `first` to `end` of the share, whose pages are kept.
__device__ __forceinline__ void follow_chain(Consumer& c, int layer, const Share& share, int position, int row, int chain, int kept, int first, int end,
                                             Running& running) {
  Head query;
#pragma unroll
  for (int b = 0; b < kHeadBlocks; b++) query.block[b] = row_query(c, row)[b * kQueryLanes];
  const int seen = position + row + 1, window = window_of(c.shared, layer), begin = window && seen > window ? seen - window : 0;
#pragma unroll 1
  for (int i = first + ((chain - first) & (kWarps - 1)); i < end; i += kWarps) {
    const int base = (share.first + i) * kUnitPositions;
    look_at<false>(c, unit_at(c, kept, i - first), query, begin - base, seen - base, running);
  }
}

// A chain that waits, value after value, of all lanes of its warp side by side.
template <class Move>
__device__ __forceinline__ void move_chain(Consumer& c, int row, Running& running, Move move) {
  constexpr int kValues = sizeof(Running) / 4;
  float* at = c.params.chains + ((static_cast<int64_t>(worker_number()) * kRows + row) * kWarps + c.warp()) * kValues * kLanes + c.lane();
  move(at[0], running.peak);
  move(at[kLanes], running.sum);
#pragma unroll
  for (int j = 0; j < kValueTiles; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) move(at[(2 + j * 4 + i) * kLanes], running.values[j][i]);
}

__device__ __forceinline__ bool attend_rows(Consumer& c, int layer, int position) {
  static_assert(kRows == 1 || kRingPages > 1, "a page that is kept");
  const Share share = share_of(c.shared, layer, position);
  if (!share.has_part) return true;
  const int rows = c.shared.drafts.rows, last = share.has_new ? share.count - 1 : -1;
  const int chains = smaller(share.count, kWarps), at_once = chains == 0 ? kRows : smaller(kRows, kPartSets * kWarps / chains);  // rows
  c.begin(Stage::attention, layer);
  if (!c.meet()) return false;  // as in `attend`
#pragma unroll 1
  for (int first = 0;;) {
    const int end = smaller(share.count, first + kKeptUnits), pages = divide_up(end - first, kPageUnits);
    const int kept = c.pages.keep(pages, c.lost);
    const bool ends = end == share.count;
    uint8_t* newest = nullptr;  // its unit in the ring
    if (ends && last >= 0) newest = const_cast<uint8_t*>(reinterpret_cast<const uint8_t*>(unit_at(c, kept, last - first)));
    if (first == 0) {
      hear_rows(c, share, layer, position, newest);
      c.trace.arrived();
      if (resets_in_attention(c)) reset_in_attention(c, layer);
    } else if (newest && c.warp() < rows) {
      take_row(c, newest, kv_unit(c.params, layer, share.kv_head, position / kUnitPositions), position + c.warp());
    }
    if ((first == 0 || newest) && !c.meet()) return false;  // all queries are there, and the newest keys and values in their unit
#pragma unroll 1
    for (int group = 0; group < rows; group += at_once) {
#pragma unroll 1
      for (int part = c.warp(); part < chains * smaller(at_once, rows - group); part += kWarps) {
        const int row = group + part / chains;
        Running running;
        running.clear();
        if (first > 0) move_chain(c, row, running, [](float& there, float& here) { here = there; });
        follow_chain(c, layer, share, position, row, part % chains, kept, first, end, running);
        if (ends) keep_part(c, running, part);
        else move_chain(c, row, running, [](float& there, float& here) { there = here; });
      }
      if (!ends) continue;
      if (!c.meet()) return false;
      publish_rows(c, layer, share, chains, group, smaller(at_once, rows - group));
      if (group + at_once < rows && !c.meet()) return false;  // the next parts lie over these
    }
    if (newest) fence_shared_copies();  // orders the stores into the page before the next copy into it
    c.pages.give_kept(kept, pages, c.lane(), c.lost);
    if (ends) break;
    first = end;
  }
  c.trace.end();
  return c.meet();
}
#endif

}  // namespace monotape

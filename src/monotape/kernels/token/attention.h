// Attention of one token: the units of each KV head are spread over workers and come through the ring like weights. The
// results of several workers, the parts, are combined in the order of the positions.
#pragma once
#include "token/heads.h"
#include "exchange/janitor.h"
#ifdef MONOTAPE_DIE_COPIES
#include "exchange/dies.h"
#endif
#include MONOTAPE_UNIT  // Running, look_at, keep_part

namespace monotape {

// A token's angles are the same in all layers: they are in shared memory.
__device__ __forceinline__ void keep_angles(Consumer& c, int position) {
  const Angles angles = angles_of(c.params, position);
  if (c.thread < kRopeHalf) c.shared.cosines[c.thread] = angles.cosines[c.thread], c.shared.sines[c.thread] = angles.sines[c.thread];
}
__device__ __forceinline__ Angles token_angles(Consumer& c) { return {c.shared.cosines, c.shared.sines}; }

#ifdef MONOTAPE_RING
// A token's key and value, from the lanes that have them, into their unit.
__device__ __forceinline__ void put_row_codes(Consumer& c, uint8_t* unit, int position, const Head& key, bool has_key, uint4 value) {
  const int key_power = power_of_head(key.block), value_power = power_of_lanes(c.lane() < kHeadWords ? value : make_uint4(0, 0, 0, 0));
  if (has_key) {
#pragma unroll
    for (int b = 0; b < kHeadBlocks; b++) store_key_codes(unit, position, b, head_column(c.lane()), key.block[b], key_power);
    if (head_column(c.lane()) == 0) store_power(unit, position, false, key_power);
  }
  if (c.lane() < kHeadWords) store_value_codes(unit, position, c.lane(), value, value_power);
  if (c.lane() == 0) store_power(unit, position, true, value_power);
}
__device__ __forceinline__ void put_row(Consumer& c, uint8_t* unit, int position, const Head& key, bool has_key, uint4 value) {
  if constexpr (kNarrowKv) {
    put_row_codes(c, unit, position, key, has_key, value);
  } else {
    if (has_key) {
#pragma unroll
      for (int b = 0; b < kHeadBlocks; b++) store_key_word(unit, position, b, head_column(c.lane()), key.block[b]);
    }
    const uint32_t pairs[4] = {value.x, value.y, value.z, value.w};
    if (c.lane() < kHeadWords) {
#pragma unroll
      for (int i = 0; i < 8; i++) *value_place(unit, position, c.lane() * 8 + i) = static_cast<uint16_t>(pairs[i / 2] >> i % 2 * 16);
    }
  }
}
#endif

// Polls and finishes the token's query: row r of the result is query head r of those that share a KV head. The warp that has
// the newest unit also polls the new key and value and leaves them in shared memory. The key is one more row of the
// product where a row is free.
constexpr bool kKeyRides = kGroup < kHeadLanes;

template <class Keep>
__device__ __forceinline__ Head hear_row(Consumer& c, int kv_head, bool listens, bool newest, int layer, int row, Angles angles, Keep keep) {
  constexpr int kWords = HeadWords::count, kKeyWords = kKeyRides ? 0 : kWords, kAll = kWords + kKeyWords + 1;
  const int first_query = row * kRowWords + kv_head * kGroup * kHeadWords, first_key = row * kRowWords + (kHeads + kv_head) * kHeadWords;
  const bool queries = listens && head_row(c.lane()) < kGroup, is_key = kKeyRides && newest && head_row(c.lane()) == kGroup;
  int number[kWords], index[kAll];
  uint4 word[kAll];
  HeadWords::numbers(head_column(c.lane()), number);
#pragma unroll
  for (int i = 0; i < kWords; i++) {
    const int mine = queries ? first_query + head_row(c.lane()) * kHeadWords : first_key;
    index[i] = (queries || is_key) && number[i] >= 0 ? mine + number[i] : -1;
    if constexpr (!kKeyRides) index[kWords + i] = newest && number[i] >= 0 ? first_key + number[i] : -1;
  }
  index[kAll - 1] = newest && c.lane() < kHeadWords ? first_key + kKvHeads * kHeadWords + c.lane() : -1;
  const auto gains_of = [&](bool key) {
    return read_head_gains(head_gain(c.params, key, layer), head_column(c.lane()));
  };
  const HeadGains gains = gains_of(is_key), key_gains = kKeyRides ? gains : gains_of(true);
  Patience patience(c.shared, c.lost, Stage::attention, layer);
#ifdef MONOTAPE_DIE_COPIES
  // Many workers of a die may read the query. The key and the value have one reader.
  const bool brings = (first_on_die(c) && c.warp() == 0) || resets_in_attention(c) || is_key;
  poll_on_die(words_of<Buffer::qkv>(*c.params.exchange, c.turn), copy_of<Buffer::qkv>(c, c.turn), index, word, patience,
              [&](int i) { return brings || i >= kWords; });
#else
  poll(words_of<Buffer::qkv>(*c.params.exchange, c.turn), index, word, patience);
#endif
  warp_meets();
  const auto finish = [&](int first, bool key, const HeadGains& gains) {
    uint4 own[kWords];
#pragma unroll
    for (int i = 0; i < kWords; i++) own[i] = word[first + i];
    return finish_head(own, head_column(c.lane()), gains, angles, key ? 1.0f : kAttentionScale * power_float(kQueryLift));
  };
  const Head head = finish(0, is_key, gains);
  if (newest) {
    const Head key = kKeyRides ? head : finish(kKeyWords, true, key_gains);
    keep(key, is_key || (!kKeyRides && head_row(c.lane()) == 0), word[kAll - 1]);
    warp_meets();
  }
  return head;
}

// `unit` is where the newest unit lies if its page has landed, or null: the new key and value go there at once, otherwise later
// (put_newest).
__device__ __forceinline__ Head hear_token(Consumer& c, int kv_head, bool listens, bool newest, int layer, int position, uint8_t* unit) {
  return hear_row(c, kv_head, listens, newest, layer, 0, token_angles(c), [&](const Head& key, bool mine, uint4 value) {
    if (mine) {
#pragma unroll
      for (int b = 0; b < kHeadBlocks; b++) c.shared.new_key[b * 4 + head_column(c.lane())] = key.block[b];
    }
    if (c.lane() < kHeadWords) reinterpret_cast<uint4*>(c.shared.new_value)[c.lane()] = value;
#ifdef MONOTAPE_RING
    if (unit) put_row(c, unit, position, key, mine, value);
#endif
  });
}

// The new key and value as codes. All lanes take part in finding the powers.
__device__ __forceinline__ void put_newest_codes(Consumer& c, uint8_t* unit, int position) {
  const uint4 none = make_uint4(0, 0, 0, 0);
  const uint4 key = c.lane() < kHeadBlocks * 4 ? c.shared.new_key[c.lane()] : none;
  const uint4 value = c.lane() < kHeadWords ? reinterpret_cast<const uint4*>(c.shared.new_value)[c.lane()] : none;
  const int key_power = power_of_lanes(key), value_power = power_of_lanes(value);
  if (c.lane() < kHeadBlocks * 4) store_key_codes(unit, position, c.lane() / 4, c.column(), key, key_power);
  if (c.lane() < kHeadWords) store_value_codes(unit, position, c.lane(), value, value_power);
  if (c.lane() < 2) store_power(unit, position, c.lane(), c.lane() ? value_power : key_power);
}

// Stores the new key and value from shared memory into their unit: first the copy in the ring, so that the unit is like all
// others, later the one in the KV cache. Other workers read the latter after the fence before the head.
__device__ __forceinline__ void put_newest(Consumer& c, uint8_t* unit, int position) {
  if constexpr (kNarrowKv) {
    put_newest_codes(c, unit, position);
  } else {
    if (c.lane() < kHeadBlocks * 4) store_key_word(unit, position, c.lane() / 4, c.column(), c.shared.new_key[c.lane()]);
#pragma unroll
    for (int d = c.lane(); d < kHeadDim; d += kLanes) *value_place(unit, position, d) = c.shared.new_value[d];
  }
}

__device__ __forceinline__ uint8_t* unit_in(const uint4* page, int number) {
  return reinterpret_cast<uint8_t*>(const_cast<uint4*>(page)) + number * kUnitBytes;
}

// Four neighbouring values of a head with their peak and sum: the parts of all warps, added up in order.
struct Quad {
  float value[4], peak, sum;
};
__device__ __forceinline__ Quad combine_warps(const Shared& shared, int warps, int g, int d, int first = 0) {
  Quad all = {{0, 0, 0, 0}, -infinity(), 0};
  if (warps == 0) return all;
  float2 ends[kWarps];  // peak and sum of each warp
  float4 part[kWarps];
#pragma unroll
  for (int w = 0; w < kWarps; w++) {  // not behind branches, so that all loads are in flight together
    const float(&its)[kPartValues] = shared.attention[first + smaller(w, warps - 1)][g];
    ends[w] = *reinterpret_cast<const float2*>(&its[kHeadDim]), part[w] = *reinterpret_cast<const float4*>(&its[d]);
    if (w >= warps) ends[w].x = -infinity();
    all.peak = fmaxf(all.peak, ends[w].x);
  }
#pragma unroll
  for (int w = 0; w < kWarps; w++) {
    const float weight = exponential(ends[w].x - all.peak);
    all.sum += ends[w].y * weight;
    all.value[0] += part[w].x * weight, all.value[1] += part[w].y * weight;
    all.value[2] += part[w].z * weight, all.value[3] += part[w].w * weight;
  }
  return all;
}
// The part of a lone warp.
__device__ __forceinline__ Quad part_of_warp(const float (&part)[kPartValues], int d) {
  const float4 value = *reinterpret_cast<const float4*>(&part[d]);
  return {{value.x, value.y, value.z, value.w}, part[kHeadDim], part[kHeadDim + 1]};
}

// What finished values of a head are multiplied by.
__device__ __forceinline__ float scale_of_head(Consumer& c, int layer, int head, const Quad& all) {
  float sum = all.sum;
  if constexpr (kSinks >= 0) sum += exponential(c.params.vectors[kSinks][layer * kHeads + head] - all.peak);  // weighs in, and is worth nothing
  return quotient(1, sum);
}
__device__ __forceinline__ uint2 packed(const Quad& all, float scale) {
  return make_uint2(pack_pair(all.value[0] * scale, all.value[1] * scale), pack_pair(all.value[2] * scale, all.value[3] * scale));
}
// Two neighbouring lanes' values of a head, finished, are a word.
__device__ __forceinline__ void publish_attended(Consumer& c, int layer, int head, int quad, const Quad& all, bool real, int row = 0) {
  const uint2 half = packed(all, scale_of_head(c, layer, head, all));
  const uint4 word = make_uint4(half.x, half.y, lane_above(half.x, 1), lane_above(half.y, 1));
  if (real && quad % 2 == 0) publish<Buffer::attended>(*c.params.exchange, c.turn, row * kRowWords + head * kHeadWords + quad / 2, word);
}

// A part's values, not yet combined with those of other splits, and its peak and sum.
__device__ __forceinline__ void publish_part(Consumer& c, const Share& share, int row, int g, int quad, const Quad& all) {
  publish<Buffer::partials>(*c.params.exchange, c.turn, row * kRowWords + part_word(share.kv_head, g, share.split, quad),
                            make_uint4(bits_of(all.value[0]), bits_of(all.value[1]), bits_of(all.value[2]), bits_of(all.value[3])));
  if (quad == 0)
    publish<Buffer::partials>(*c.params.exchange, c.turn, row * kRowWords + part_word(share.kv_head, g, share.split, kPartialWords - 1),
                              make_uint4(bits_of(all.peak), bits_of(all.sum), 0, 0));
}
// Eight values of a head.
__device__ __forceinline__ void publish_whole(Consumer& c, int layer, const Share& share, int g, int word, const Quad& low, const Quad& high) {
  if (share.splits > 1) return publish_part(c, share, 0, g, 2 * word, low), publish_part(c, share, 0, g, 2 * word + 1, high);
  const int head = share.kv_head * kGroup + g;
  const float scale = scale_of_head(c, layer, head, low);
  const uint2 first = packed(low, scale), second = packed(high, scale);
  publish<Buffer::attended>(*c.params.exchange, c.turn, head * kHeadWords + word, make_uint4(first.x, first.y, second.x, second.y));
}

// Four values of a head, of one row: a single split publishes the attended values themselves; several splits publish their
// parts, for `combine`.
__device__ __forceinline__ void publish_result(Consumer& c, int layer, const Share& share, int row, int g, int quad, const Quad& all, bool real) {
  if (share.splits == 1) return publish_attended(c, layer, share.kv_head * kGroup + g, quad, all, real, row);
  if (real) publish_part(c, share, row, g, quad, all);
}

// Each thread has four values of a head per iteration.
__device__ __forceinline__ void publish_results(Consumer& c, int layer, const Share& share) {
  constexpr int kQuads = kHeadDim / 4;
#pragma unroll 1
  for (int i = c.thread; i < whole_warps(kGroup * kQuads); i += kConsumers) {  // whole warps: they shuffle
    const bool real = i < kGroup * kQuads;
    const int g = real ? i / kQuads : 0, quad = i % kQuads;
    const Quad all = combine_warps(c.shared, smaller(share.count, kWarps), g, quad * 4);
    publish_result(c, layer, share, 0, g, quad, all, real);
  }
}
// The same by the warp that alone has a part. A lane has whole words, so that none shuffles, and loads all that it has before it
// stores the first.
__device__ __forceinline__ void publish_lone(Consumer& c, int layer, const Share& share) {
  constexpr int kWords = kGroup * kHeadWords, kAtOnce = smaller(2, divide_up(kWords, kLanes));
  static_assert(kHeadDim % 8 == 0, "whole words");
#pragma unroll 1
  for (int first = c.lane(); first < kWords; first += kAtOnce * kLanes) {
    Quad low[kAtOnce], high[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; n++) {
      const int i = smaller(first + n * kLanes, kWords - 1);
      const float(&part)[kPartValues] = c.shared.attention[0][i / kHeadWords];
      low[n] = part_of_warp(part, i % kHeadWords * 8), high[n] = part_of_warp(part, i % kHeadWords * 8 + 4);
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; n++) {
      const int i = first + n * kLanes, g = i / kHeadWords, word = i % kHeadWords;
      if (i < kWords) publish_whole(c, layer, share, g, word, low[n], high[n]);
    }
  }
}
// The same for several rows from `group` on, each of which has so many parts.
__device__ __forceinline__ void publish_rows(Consumer& c, int layer, const Share& share, int chains, int group, int rows) {
  constexpr int kQuads = kHeadDim / 4, kEach = kGroup * kQuads;
#pragma unroll 1
  for (int i = c.thread; i < whole_warps(rows * kEach); i += kConsumers) {
    const bool real = i < rows * kEach;
    const int row = real ? i / kEach : 0, g = real ? i % kEach / kQuads : 0, quad = i % kQuads;
    const Quad all = combine_warps(c.shared, chains, g, quad * 4, row * chains);
    publish_result(c, layer, share, group + row, g, quad, all, real);
  }
}

// A worker that owns nothing else in a layer resets its words of the turn before here: the query was made from this turn's
// residual stream, so all readers of those words are done.
__device__ __forceinline__ void reset_in_attention(Consumer& c, int layer) {
  c.set_pace(kWorking, step_of(c, kFirstStage, layer));
  if (c.thread == 0) await_resets(c, step_of(c, kFirstStage, layer), c.shared.swept);
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
    warp_meets();  // the part is complete
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

// Where several workers share a KV head: for a query head, each warp adds up the parts of every eighth split, a lane four
// values at a time. Then the warps' sums are added up, as in `attend`.
__device__ __forceinline__ void hear_parts(Consumer& c, int head, int splits, int layer, int row) {
  constexpr int kAtOnce = smaller(divide_up(kMaxSplits, kWarps), 5);  // limited by registers
  const bool has_values = c.lane() < kPartialWords - 1;
  float peak = -infinity(), sum = 0, value[4] = {0, 0, 0, 0};
  Patience patience(c.shared, c.lost, Stage::combine, layer);
#pragma unroll 1
  for (int first = c.warp(); first < splits; first += kAtOnce * kWarps) {
    int index[2 * kAtOnce];
    uint4 word[2 * kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      const int split = first + i * kWarps, start = row * kRowWords + (head * kMaxSplits + split) * kPartialWords;
      index[2 * i] = split < splits && has_values ? start + c.lane() : -1;
      index[2 * i + 1] = split < splits ? start + kPartialWords - 1 : -1;
    }
    poll(words_of<Buffer::partials>(*c.params.exchange, c.turn), index, word, patience);
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      const float its_peak = first + i * kWarps < splits ? __uint_as_float(word[2 * i + 1].x) : -infinity();
      const float higher = fmaxf(peak, its_peak), top = higher == -infinity() ? 0 : higher;
      const float fade = exponential(peak - top), weight = exponential(its_peak - top);
      peak = higher;
      sum = sum * fade + __uint_as_float(word[2 * i + 1].y) * weight;
      value[0] = value[0] * fade + __uint_as_float(word[2 * i].x) * weight;
      value[1] = value[1] * fade + __uint_as_float(word[2 * i].y) * weight;
      value[2] = value[2] * fade + __uint_as_float(word[2 * i].z) * weight;
      value[3] = value[3] * fade + __uint_as_float(word[2 * i].w) * weight;
    }
  }
  warp_meets();
  float* part = c.shared.attention[c.warp()][0];
  if (has_values) reinterpret_cast<float4*>(part)[c.lane()] = float4{value[0], value[1], value[2], value[3]};
  if (c.lane() == 0) part[kHeadDim] = peak, part[kHeadDim + 1] = sum;
}

template <int Rows>
__device__ __forceinline__ bool combine(Consumer& c, int layer, int position, int rows) {
  const int splits = split_count(position);
  if (splits == 1) return true;
  // From the last worker down: the first ones have the most to do in attention.
#pragma unroll 1
  for (int task = kWorkers - 1 - worker_number(); task < rows * kHeads; task += kWorkers) {
    const int head = Rows == 1 ? task : task % kHeads, row = Rows == 1 ? 0 : task / kHeads;
    c.begin(Stage::combine, layer);
    if (!c.meet()) return false;  // no warp reads the sums of qkv any more, as in `attend`, or the parts of the head before
    hear_parts(c, head, splits, layer, row);
    if (resets_in_attention(c) && worker_number() / kKvHeads >= splits) reset_in_attention(c, layer);  // not before, in `attend`
    if (!c.meet()) return false;
    if (c.warp() == 0) {
      const int quad = smaller(c.lane(), kHeadDim / 4 - 1);  // all lanes: they shuffle
      const Quad all = combine_warps(c.shared, kWarps, 0, quad * 4);
      publish_attended(c, layer, head, c.lane(), all, c.lane() < kHeadDim / 4, row);
    }
    c.trace.end();
  }
  return worker_number() < kWorkers - rows * kHeads || c.meet();  // the next input lies where the parts are
}

}  // namespace monotape

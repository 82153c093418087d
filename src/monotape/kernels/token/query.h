// The query, key and value of the token at hand: polled by the workers that attend, finished, and stored into their unit.
#pragma once
#include "token/heads.h"
#include "exchange/janitor.h"
#ifdef MONOTAPE_DIE_COPIES
#include "exchange/dies.h"
#endif

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

// A worker that owns nothing else in a layer resets its words of the turn before here: the query was made from this turn's
// residual stream, so all readers of those words are done.
__device__ __forceinline__ void reset_in_attention(Consumer& c, int layer) {
  c.set_pace(kWorking, step_of(c, kFirstStage, layer));
  if (c.thread == 0) await_resets(c, step_of(c, kFirstStage, layer), c.shared.swept);
}

}  // namespace monotape

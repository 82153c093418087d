// Attention of one token: the positions of each KV head are spread over as many workers as they can feed, and come
// through the ring like weights; partial results are combined in the order of the positions.
#pragma once
#include "heads.h"
#include "housekeeping.h"

namespace monotape {

// The softmax of some positions, not normalised, of the query heads that share a KV head. Scores have heads as rows:
// lane / 4 is the head. Values are summed the other way round, with heads as columns, because then all sixteen rows of
// the product are used: values[j] has dimensions 16j + lane / 4 and eight more, of heads 2t and 2t + 1, t = lane % 4.
constexpr int kValueTiles = divide_up(kHeadTiles, 2);

struct Running {
  float peak = -infinity(), sum = 0;  // of head lane / 4
  float values[kValueTiles][4];

  __device__ void clear() {
#pragma unroll
    for (int j = 0; j < kValueTiles; j++) values[j][0] = values[j][1] = values[j][2] = values[j][3] = 0;
  }
};

__device__ __forceinline__ uint32_t with_half(uint32_t pair, int half, uint16_t value) {
  return half ? (pair & 0xffffu) | static_cast<uint32_t>(value) << 16 : (pair & 0xffff0000u) | value;
}

// A lane's part of block `tile` of a unit's values: dimension 8 * tile + lane / 4, its own eight of the positions.
__device__ __forceinline__ uint4 value_block(Consumer& c, const uint4* values, int tile, int newest) {
  if (tile >= kHeadTiles) return make_uint4(0, 0, 0, 0);
  uint4 value = load_block(values + tile * kBlockWords);
  if (newest < 0 || newest % 8 / 2 != c.column()) return value;
  const uint16_t fresh = c.shared.new_value[tile * 8 + c.row()];
  const int half = newest % 2, at = newest / 8;
  if (at == 0) value.x = with_half(value.x, half, fresh);
  if (at == 1) value.y = with_half(value.y, half, fresh);
  if (at == 2) value.z = with_half(value.z, half, fresh);
  if (at == 3) value.w = with_half(value.w, half, fresh);
  return value;
}

// One unit of 32 positions, of which [begin, end) can be seen. What the newest token adds is not in
// the ring yet: its key and value replace what the unit has at place `newest`; -1: the token is not of this unit.
__device__ __forceinline__ void look_at(Consumer& c, const uint4* unit, const Head& query, int newest,
                                        int begin, int end, Running& running) {
  float score[4][2];
  float top = running.peak;
#pragma unroll
  for (int tile = 0; tile < 4; tile++) {
    float sum[4] = {0, 0, 0, 0};
#pragma unroll
    for (int b = 0; b < kHeadBlocks; b++) {
      uint4 key = load_block(unit + (tile * kHeadBlocks + b) * kBlockWords + c.lane());
      if (newest == tile * 8 + c.row()) key = c.shared.new_key[b * 4 + c.column()];
      multiply_accumulate(sum, query.block[b].x, 0, query.block[b].y, 0, key.x, key.y);
      multiply_accumulate(sum, query.block[b].z, 0, query.block[b].w, 0, key.z, key.w);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int at = tile * 8 + 2 * c.column() + i;
      score[tile][i] = at >= begin && at < end ? sum[i] : -infinity();
      top = fmaxf(top, score[tile][i]);
    }
  }
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  if (top == -infinity()) top = 0;  // nothing to see: all weights are zero
  const float fade = __expf(running.peak - top);
  running.peak = top;
  uint32_t weight[4];
  float total = 0;
#pragma unroll
  for (int tile = 0; tile < 4; tile++) {
    const float a = __expf(score[tile][0] - top), b = __expf(score[tile][1] - top);
    total += a + b;
    weight[tile] = pack_pair(a, b);
  }
  total += __shfl_xor_sync(~0u, total, 1);
  total += __shfl_xor_sync(~0u, total, 2);
  running.sum = running.sum * fade + total;
  const float fade_even = __shfl_sync(~0u, fade, 8 * c.column()), fade_odd = __shfl_sync(~0u, fade, 8 * c.column() + 4);
  const uint4* values = unit + kKeyBlocks * kBlockWords + c.lane();
#pragma unroll
  for (int j = 0; j < kValueTiles; j++) {
    const uint4 low = value_block(c, values, 2 * j, newest), high = value_block(c, values, 2 * j + 1, newest);
    float* sums = running.values[j];
    sums[0] *= fade_even, sums[1] *= fade_odd, sums[2] *= fade_even, sums[3] *= fade_odd;
    multiply_accumulate(sums, low.x, high.x, low.y, high.y, weight[0], weight[1]);
    multiply_accumulate(sums, low.z, high.z, low.w, high.w, weight[2], weight[3]);
  }
}

// What a warp needs of this token: the query heads that share a KV head, row r query head r; and in one
// warp the new key (the same in all rows) and value. All words are polled together.
struct TokenWords {
  static constexpr int heads = HeadWords::count;
  uint4 query[heads], key[heads], value;

  __device__ __forceinline__ void fetch(Consumer& c, int kv_head, bool newest, int layer) {
    int index[2 * heads + 1];
    uint4 word[2 * heads + 1];
    int number[heads];
    HeadWords::numbers(c.column(), number);
#pragma unroll
    for (int i = 0; i < heads; i++) {
      index[i] = c.row() < kGroup && number[i] >= 0 ? (kv_head * kGroup + c.row()) * kHeadWords + number[i] : -1;
      index[heads + i] = newest && number[i] >= 0 ? (kHeads + kv_head) * kHeadWords + number[i] : -1;
    }
    index[2 * heads] = newest && c.lane() < kHeadWords ? (kHeads + kKvHeads + kv_head) * kHeadWords + c.lane() : -1;
    Patience patience(c.shared, c.lost, Stage::attention, layer);
    poll(c.params.exchange->qkv[c.turn & 1], index, word, patience);
#pragma unroll
    for (int i = 0; i < heads; i++) query[i] = word[i], key[i] = word[heads + i];
    value = word[2 * heads];
  }
};

// A token's angles are the same in all layers: they are in shared memory.
__device__ __forceinline__ void keep_angles(Consumer& c, int position) {
  const Angles angles = angles_of(c.params, position);
  if (c.thread < kRopeHalf) c.shared.cosines[c.thread] = angles.cosines[c.thread], c.shared.sines[c.thread] = angles.sines[c.thread];
}
__device__ __forceinline__ Angles token_angles(Consumer& c) { return {c.shared.cosines, c.shared.sines}; }

// The new token's key and value go where the warp finds them, and into the KV. The latter is seen by others only after
// the fence before the head, which is soon enough.
__device__ __forceinline__ void keep_newest(Consumer& c, const TokenWords& token, int kv_head, int layer, int position) {
  if (c.lane() < kHeadWords) reinterpret_cast<uint4*>(c.shared.new_value)[c.lane()] = token.value;
  const float* gain = kQkNorm ? c.params.k_norm + layer * kHeadDim : nullptr;
  const Head key = finish_head(token.key, c.column(), gain, token_angles(c), 1.0f);
  if (c.row() == 0) {
#pragma unroll
    for (int b = 0; b < kHeadBlocks; b++) c.shared.new_key[b * 4 + c.column()] = key.block[b];
  }
  __syncwarp();
  position = opaque(position);  // kept since the share was worked out, its unit would not fit the registers
  uint8_t* unit = kv_unit(c.params, layer, kv_head, position / kUnitPositions);
  if (c.row() == 0) {
#pragma unroll
    for (int b = 0; b < kHeadBlocks; b++) store_key_word(unit, position, b, c.column(), key.block[b]);
  }
  for (int d = c.lane(); d < kHeadDim; d += 32) *value_place(unit, position, d) = c.shared.new_value[d];
}

// Adds up the warps' results of one head, in order: value `d` of it, and the peak and sum.
__device__ __forceinline__ float combine_warps(const Shared& shared, int warps, int g, int d, float& peak, float& sum) {
  float peaks[kWarps], value = 0;
  peak = -infinity(), sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; w++) {
    peaks[w] = w < warps ? shared.attention[w][g][kHeadDim] : -infinity();
    peak = fmaxf(peak, peaks[w]);
  }
#pragma unroll
  for (int w = 0; w < kWarps; w++) {
    const float weight = __expf(peaks[w] - peak);
    if (w < warps) sum += shared.attention[w][g][kHeadDim + 1] * weight, value += shared.attention[w][g][d] * weight;
  }
  return value;
}

// Thread i has value i % kHeadDim of query head i / kHeadDim, and so on in rounds. One split publishes the attended
// values themselves, several publish their parts, for `combine`.
__device__ __forceinline__ void publish_results(Consumer& c, const Share& share) {
  Exchange& exchange = *c.params.exchange;
#pragma unroll 1
  for (int i = c.thread; i < divide_up(kGroup * kHeadDim, 32) * 32; i += kConsumers) {  // whole warps: they shuffle
    const bool real = i < kGroup * kHeadDim;
    const int g = real ? i / kHeadDim : 0, d = i % kHeadDim;
    float peak, sum;
    const float value = combine_warps(c.shared, smaller(share.count, kWarps), g, d, peak, sum);
    if (share.splits == 1) {
      const uint4 word = gather_word(__fdividef(value, sum));
      if (real && d % 8 == 0) publish(exchange.attended, c.turn, (share.kv_head * kGroup + g) * kHeadWords + d / 8, word);
      continue;
    }
    const uint4 word = make_uint4(__float_as_uint(value), __float_as_uint(__shfl_down_sync(~0u, value, 1)),
                                  __float_as_uint(__shfl_down_sync(~0u, value, 2)),
                                  __float_as_uint(__shfl_down_sync(~0u, value, 3)));
    if (real && d % 4 == 0) publish(exchange.partials, c.turn, part_word(share.kv_head, g, share.split, d / 4), word);
    if (real && d == 0)
      publish(exchange.partials, c.turn, part_word(share.kv_head, g, share.split, kPartialWords - 1),
              make_uint4(__float_as_uint(peak), __float_as_uint(sum), 0, 0));
  }
}

// The warp's part into shared memory, head by head.
__device__ __forceinline__ void keep_part(Consumer& c, const Running& running) {
  float(*part)[kHeadDim + 2] = c.shared.attention[c.warp()];
#pragma unroll
  for (int j = 0; j < kValueTiles; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int head = 2 * c.column() + i % 2, d = 16 * j + c.row() + i / 2 * 8;
      if (head < kGroup && d < kHeadDim) part[head][d] = running.values[j][i];
    }
  if (c.column() == 0 && c.row() < kGroup) part[c.row()][kHeadDim] = running.peak, part[c.row()][kHeadDim + 1] = running.sum;
}

// The stage: the query arrives, every warp looks at units in turn, and the warps' results are added up.
__device__ __forceinline__ bool attend(Consumer& c, int layer, int position) {
  const Share share = share_of(c.params, c.shared, layer, position);
  if (!share.has_part) return true;
  c.begin(Stage::attention, layer);
  const int last = share.has_new ? share.count - 1 : -1;  // the unit that the new token belongs to
  const bool keeps = last >= 0 && (last + 1) % kWarps == c.warp();  // not the warp that will look at it: that has enough to do
  TokenWords token;
  token.fetch(c, share.kv_head, keeps, layer);
  c.trace.arrived();
  if (keeps) keep_newest(c, token, share.kv_head, layer, position);
  const float* gain = kQkNorm ? c.params.q_norm + layer * kHeadDim : nullptr;
  const Head query = finish_head(token.query, c.column(), gain, token_angles(c), kAttentionScale);
  // The newest key and value are there, and nobody reads the sums of the stage before any more: they share their memory.
  if (!c.meet()) return false;
  if (c.span(Stage::qkv).count == 0) reset_turn_before(c, layer, kConsumers).confirm(c.shared, c.lost);
  Running running;
  running.clear();
  for (int unit = 0; unit < share.count; unit += kPageUnits) {
    const uint4* page = c.pages.take(c.lost);
#pragma unroll 1
    for (int i = unit; i < smaller(unit + kPageUnits, share.count); i++)
      if (i % kWarps == c.warp()) {
        const int base = (share.first + i) * kUnitPositions;
        look_at(c, page + (i - unit) * (kUnitBytes / 16), query, i == last ? position % kUnitPositions : -1,
                share.begin - base, position + 1 - base, running);
      }
    c.pages.give_back(c.lane(), c.lost);
  }
  keep_part(c, running);
  if (!c.meet()) return false;
  // Computed again: kept through the loop it would not fit the registers.
  publish_results(c, share_of(c.params, c.shared, layer, opaque(position)));
  c.trace.end();
  return c.meet();
}

// Where several workers shared a KV head: one warp a query head adds up their parts, a lane four of its values.
__device__ __forceinline__ void combine_head(Consumer& c, int head, int splits, int layer) {
  // Peaks and sums come in the same round as the first parts: a round is most of the time.
  constexpr int kAtOnce = smaller(kMaxSplits, 5);  // more would not fit the registers
  const uint4* words = c.params.exchange->partials[c.turn & 1];
  const auto part_of = [&](int split) {
    return split < splits && c.lane() < kPartialWords - 1 ? (head * kMaxSplits + split) * kPartialWords + c.lane() : -1;
  };
  int index[kAtOnce + 1];
  uint4 part[kAtOnce + 1];
#pragma unroll
  for (int s = 0; s < kAtOnce; s++) index[s] = part_of(s);
  index[kAtOnce] = c.lane() < splits ? (head * kMaxSplits + c.lane() + 1) * kPartialWords - 1 : -1;
  Patience patience(c.shared, c.lost, Stage::combine, layer);
  poll(words, index, part, patience);
  const uint4 sums = part[kAtOnce];
  __syncwarp();
  if (c.span(Stage::qkv).count == 0 && blockIdx.x / kKvHeads >= splits)  // it has nothing else to do in a layer
    reset_turn_before(c, layer, 32).confirm(c.shared, c.lost);
  float peak = c.lane() < splits ? __uint_as_float(sums.x) : -infinity();
  const float my_peak = peak;
#pragma unroll
  for (int o = 8; o; o >>= 1) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, o));
  peak = __shfl_sync(~0u, peak, 0);
  const float my_weight = c.lane() < splits ? __expf(my_peak - peak) : 0, my_sum = __uint_as_float(sums.y);
  float value[4] = {0, 0, 0, 0}, sum = 0;
#pragma unroll 1
  for (int first = 0; first < splits; first += kAtOnce) {
    if (first > 0) {
#pragma unroll
      for (int s = 0; s < kAtOnce; s++) index[s] = part_of(first + s);
      index[kAtOnce] = -1;
      poll(words, index, part, patience);
    }
#pragma unroll
    for (int s = 0; s < kAtOnce; s++) {  // past the last split there are zero words
      const float weight = __shfl_sync(~0u, my_weight, first + s);  // of no split: zero
      sum += __shfl_sync(~0u, my_sum, first + s) * weight;
      value[0] += __uint_as_float(part[s].x) * weight, value[1] += __uint_as_float(part[s].y) * weight;
      value[2] += __uint_as_float(part[s].z) * weight, value[3] += __uint_as_float(part[s].w) * weight;
    }
  }
  const float scale = __fdividef(1, sum);
  const uint32_t low = pack_pair(value[0] * scale, value[1] * scale), high = pack_pair(value[2] * scale, value[3] * scale);
  const uint4 word = make_uint4(low, high, __shfl_down_sync(~0u, low, 1), __shfl_down_sync(~0u, high, 1));
  __syncwarp();
  const bool publishes = c.lane() % 2 == 0 && c.lane() < kPartialWords - 1;
  if (publishes) publish(c.params.exchange->attended, c.turn, (head * kHeadDim + c.lane() * 4) / 8, word);
}

__device__ __forceinline__ void combine(Consumer& c, int layer, int position) {
  const int splits = split_count(c.params, position);
  if (splits == 1 || c.warp() != 0) return;
  // From the last worker down: the first ones have the most to do in attention.
#pragma unroll 1
  for (int head = kWorkers - 1 - blockIdx.x; head < kHeads; head += kWorkers) {
    c.begin(Stage::combine, layer);
    combine_head(c, head, splits, layer);
    c.trace.end();
  }
}

}  // namespace monotape

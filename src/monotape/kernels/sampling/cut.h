// Which tokens can be drawn: the cut of top-k and top-p, found by all workers together without sorting.
//
// A token is a key of 64 bits, its value and then its id, so that keys are all different and the larger is the better.
// Every filter is a cut: a key at and above which tokens survive. Where the cut lies between two keys is found by
// counting: the range is divided into 16 buckets, every worker publishes how many of its tokens fall into each and
// their weight, and the bucket that holds the cut becomes the range. When few enough are left, all workers gather them,
// and each finds the cut by comparing all pairs. Weights are integers, so sums do not depend on the order of adding.
//
// Everything here is the same for any team: threads of a worker that meet, and workers that publish words to each
// other. The kernel's team is in sampling/team.h; a test has one of ordinary threads. A team has
//   thread, worker, first, end            this thread, this worker, and the ids that are this worker's
//   scratch()                             memory that the threads of a worker share
//   meet()                                a barrier of those threads; false when the request has failed
//   add(counter, n)                       atomically, in memory that they share
//   sum(x), largest(x), scan(n)           over the threads of a worker; every one must call it. largest takes several
//   publish(n, word_at)                   words of this worker: a part of a word is never all ones
//   collect(index, word)                  word w of worker v is v * kSamplerWords + w; -1: none. Waits for them
//   end_turn()                            after all have collected
//   wants_to_stop()                       whether the host has asked this worker to end the request
// Needs the integer types of machine/hopper.h, uint4 and the dimensions, but nothing else of the GPU: tests compile it for the host.
#pragma once

namespace monotape {

constexpr int kCandidates = kConsumers;  // gathered at most: one for each thread of a worker
constexpr int kBuckets = 16;
constexpr int kSamplerWords = 1 + kCandidates / 2;  // of a worker in a turn
constexpr int kMassBits = 45;  // of the weight 1, which is the best token's: 2^18 of them fit 64 bits
static_assert(kVocab <= 1 << 18 && kWorkers <= kConsumers && kConsumers > kBuckets, "sums and tables are large enough");
constexpr uint64_t kAlive = 0x00800000ull << 32;  // the least key above those of -inf

struct alignas(16) Weighed {  // read as one
  uint64_t key, mass;
};

struct SelectScratch {
  Weighed candidate[kCandidates];
  uint64_t edge[kBuckets + 1];                                      // from above; bucket b is [edge[b + 1], edge[b])
  union {
    uint64_t part_mass[kCandidates / kBuckets][kBuckets];           // of all workers, by groups of threads
    uint64_t lot[kCandidates];                                      // of the candidates, when all have been gathered
  };
  union {
    uint32_t part_count[kCandidates / kBuckets][kBuckets];
    alignas(16) uint32_t peak[kCandidates];                         // of every worker: the upper half of its best key
  };
  uint64_t total_mass[kBuckets];
  uint32_t total_count[kBuckets];
  uint32_t limbs[4][kBuckets];                                      // of this worker: weight in three limbs, and number
  union {
    int before[kCandidates];                                        // candidates of the workers before
    uint32_t allowed[kCandidates];                                  // a part of the host's mask: see sampling/mask.h
  };
  uint64_t sums[2][2 * 8];                                          // the team's own, of each warp
  double log_sum;
  union {
    float chosen_logit;
    int verdict;                                                    // the host's: see sampling/mask.h
  };
  int stopping;                                                     // worker 0 wants to stop
};

__device__ __forceinline__ uint64_t ordered(float value) {
  const uint32_t bits = __float_as_uint(value);
  return static_cast<uint64_t>(bits >> 31 ? ~bits : bits | 0x80000000u) << 32;
}
// A NaN beats everything, so that it is noticed; -0 equals 0.
__device__ __forceinline__ uint64_t key_of(float value, int id) {
  return (value != value ? 0xffffffffull << 32 : ordered(value == 0 ? 0.0f : value)) | (0xffffffffu - id);
}
__device__ __forceinline__ float value_of(uint64_t key) {
  const uint32_t bits = static_cast<uint32_t>(key >> 32);
  return __uint_as_float(bits >> 31 ? bits & 0x7fffffffu : ~bits);
}
__device__ __forceinline__ int id_of(uint64_t key) { return static_cast<int>(0xffffffffu - static_cast<uint32_t>(key)); }

__device__ inline uint64_t mass_of(float value, float best) {
  return static_cast<uint64_t>(exp(static_cast<double>(value) - best) * static_cast<double>(1ull << kMassBits) + 0.5);
}
// The weight that reaches a share of a total.
__device__ __forceinline__ uint64_t share_of_mass(double share, uint64_t total) {
  const double wanted = ceil(share * static_cast<double>(total));
  const uint64_t target = static_cast<uint64_t>(wanted);
  return target < 1 ? 1 : target > total ? total : target;
}

// Calls use(id, value) for this worker's ids. Several loads are in flight at once.
template <class Team, class Use>
__device__ __forceinline__ void each_own(const Team& t, const float* values, Use use) {
  constexpr int kAtOnce = 4;
#pragma unroll 1
  for (int first = t.first + t.thread; first < t.end; first += kAtOnce * kConsumers) {
    float value[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) value[i] = first + i * kConsumers < t.end ? values[first + i * kConsumers] : 0;
#pragma unroll
    for (int i = 0; i < kAtOnce; i++)
      if (first + i * kConsumers < t.end) use(first + i * kConsumers, value[i]);
  }
}

// The goal: the shortest run of best tokens with `count` of them, or with `share` of the weight if count is 0.
struct Goal {
  uint32_t count;
  double share;
  uint64_t target;  // weight; 0 while the total is not known

  __device__ bool reached(uint32_t tokens, uint64_t mass) const { return count ? tokens >= count : mass >= target; }
};

// The range that holds the cut: from `low` to below `high`. Tokens at or above `high` survive.
struct Range {
  uint64_t low, high;
  uint64_t mass_above;
  uint32_t above, inside;
};

// Edge i of the range's buckets. The first round makes them one unit wide at most, and the last takes the rest; later
// ones divide evenly, by value as long as values differ, then by key: so there is an end even if all values are equal.
__device__ inline uint64_t edge_of(const Range& range, int round, int i) {
  if (i == 0) return range.high;
  if (i == kBuckets) return range.low;
  const uint64_t width = range.high - range.low;
  if (round >= 6 || width >> 32 < 1024) return range.high - ((width >> 4) * i + ((width & 15) * i >> 4));
  const float top = value_of(range.high - 1), bottom = value_of(range.low);
  float step = (top - bottom) * (1.0f / kBuckets);
  if (round == 0 && step > 1) step = 1;
  const uint64_t edge = ordered(top - step * i);
  return edge < range.low ? range.low : edge > range.high ? range.high : edge;
}

__device__ __forceinline__ int bucket_of(const SelectScratch& scratch, uint64_t key) {
  int bucket = 0;
#pragma unroll
  for (int step = kBuckets / 2; step; step >>= 1)
    if (scratch.edge[bucket + step] > key) bucket += step;
  return bucket;
}

// How many tokens of all workers fall into each bucket of the range, and their weight: scratch.total_*.
template <class Team>
__device__ __forceinline__ bool count_buckets(Team& t, const float* values, float best, const Range& range, int round) {
  SelectScratch& s = t.scratch();
  if (t.thread < kBuckets)
    for (int i = 0; i < 4; i++) s.limbs[i][t.thread] = 0;
  if (t.thread <= kBuckets) s.edge[t.thread] = edge_of(range, round, t.thread);
  if (!t.meet()) return false;
  uint64_t last_mass = 0, last_count = 0;  // of the last bucket: most tokens are there at first
#pragma unroll 1
  for (int id = t.first + t.thread; id < t.end; id += kConsumers) {
    const uint64_t key = key_of(values[id], id);
    if (key < range.low || key >= range.high) continue;
    const int bucket = bucket_of(s, key);
    const uint64_t mass = mass_of(values[id], best);
    if (bucket == kBuckets - 1) {
      last_mass += mass, last_count++;
    } else {
      for (int limb = 0; limb < 3; limb++)
        t.add(&s.limbs[limb][bucket], static_cast<uint32_t>(mass >> 16 * limb) & 0xffff);
      t.add(&s.limbs[3][bucket], 1);
    }
  }
  last_mass = t.sum(last_mass), last_count = t.sum(last_count);
  t.publish(kBuckets, [&](int bucket) {
    const bool last = bucket == kBuckets - 1;
    uint64_t mass = last ? last_mass : 0;
    if (!last)
      for (int limb = 0; limb < 3; limb++) mass += static_cast<uint64_t>(s.limbs[limb][bucket]) << 16 * limb;
    return make_uint4(last ? static_cast<uint32_t>(last_count) : s.limbs[3][bucket],
                      static_cast<uint32_t>(mass) & 0x7fffffffu, static_cast<uint32_t>(mass >> 31), 0);
  });
  constexpr int kGroups = kConsumers / kBuckets, kCount = (kWorkers + kGroups - 1) / kGroups;
  const int bucket = t.thread % kBuckets, group = t.thread / kBuckets;
  int index[kCount];
  uint4 word[kCount];
#pragma unroll
  for (int i = 0; i < kCount; i++)
    index[i] = group + i * kGroups < kWorkers ? (group + i * kGroups) * kSamplerWords + bucket : -1;
  t.collect(index, word);
  uint64_t mass = 0;
  uint32_t count = 0;
#pragma unroll
  for (int i = 0; i < kCount; i++) count += word[i].x, mass += word[i].y + (static_cast<uint64_t>(word[i].z) << 31);
  s.part_mass[group][bucket] = mass, s.part_count[group][bucket] = count;
  if (!t.meet()) return false;
  t.end_turn();
  if (t.thread < kBuckets) {
    uint64_t total = 0;
    uint32_t tokens = 0;
    for (int g = 0; g < kGroups; g++) total += s.part_mass[g][t.thread], tokens += s.part_count[g][t.thread];
    s.total_mass[t.thread] = total, s.total_count[t.thread] = tokens;
  }
  return t.meet();
}

// The bucket that the cut is in becomes the range. False: all tokens down to the range's low end survive.
__device__ inline bool step_inside(const SelectScratch& s, Range& range, Goal& goal) {
  uint32_t count = range.above;
  uint64_t mass = range.mass_above;
#pragma unroll 1
  for (int b = 0; b < kBuckets; b++) count += s.total_count[b], mass += s.total_mass[b];
  if (!goal.count && !goal.target) goal.target = share_of_mass(goal.share, mass);
  if (goal.count && count <= goal.count) return false;
  count = range.above, mass = range.mass_above;
#pragma unroll 1
  for (int b = 0; b < kBuckets; b++) {
    const uint32_t more = s.total_count[b];
    if (more && goal.reached(count + more, mass + s.total_mass[b])) {
      range = {s.edge[b + 1], s.edge[b], mass, count, more};
      return true;
    }
    count += more, mass += s.total_mass[b];
  }
  return false;
}

// Candidates of all workers go into scratch.candidate of every worker, in no order that matters. If they are too
// many, range.inside says so and they do not.
template <class Team>
__device__ __forceinline__ bool gather(Team& t, const float* values, float best, Range& range) {
  SelectScratch& s = t.scratch();
  const auto inside = [&](uint64_t key) { return key >= range.low && key < range.high; };
  int mine = 0;
  each_own(t, values, [&](int id, float value) { mine += inside(key_of(value, id)); });
  const auto own = t.scan(mine);
  if (mine && own.total <= kCandidates) {
    int at = own.before;
    each_own(t, values, [&](int id, float value) {
      if (inside(key_of(value, id))) s.candidate[at++].key = key_of(value, id);
    });
  }
  if (!t.meet()) return false;
  const bool send = own.total <= kCandidates;
  const auto key_at = [&](int i) { return send && i < own.total ? s.candidate[i].key : 0; };
  t.publish(send ? 1 + own.total / 2 : 1, [&](int word) {
    const uint64_t a = key_at(word ? 2 * word - 1 : 0), b = word ? key_at(2 * word) : 0;
    const uint32_t value = __float_as_uint(value_of(a)), id = id_of(a) & 0x7fffffff;
    return word ? make_uint4(value, id, b ? __float_as_uint(value_of(b)) : 0, id_of(b) & 0x7fffffff)
                : make_uint4(own.total, a ? value : 0, id, t.wants_to_stop());
  });
  int header[1] = {t.thread < kWorkers ? t.thread * kSamplerWords : -1};
  uint4 word[1];
  t.collect(header, word);
  if (t.thread == 0) s.stopping = word[0].w;
  if (!t.meet()) return false;
  const int count = static_cast<int>(word[0].x > kCandidates ? kCandidates + 1 : word[0].x);
  const auto all = t.scan(count);
  s.before[t.thread] = all.before;
  range.inside = all.total;
  if (!t.meet()) return false;
  if (all.total <= kCandidates) {
    int from = 0;  // the worker that candidate number `thread` is with: the last that has at most as many before it
#pragma unroll
    for (int step = kCandidates / 2; step; step >>= 1)
      if (from + step < kWorkers && s.before[from + step] <= t.thread) from += step;
    const int number = t.thread - s.before[from];
    int index[1] = {t.thread < all.total ? from * kSamplerWords + (number + 1) / 2 : -1};
    t.collect(index, word);
    if (t.thread < all.total) {
      const bool first = number % 2;  // of a word that is not the header
      const float value = __uint_as_float(number == 0 ? word[0].y : first ? word[0].x : word[0].z);
      s.candidate[t.thread] = {key_of(value, number == 0 ? word[0].z : first ? word[0].y : word[0].w), mass_of(value, best)};
    }
    if (!t.meet()) return false;
  }
  t.end_turn();
  return true;
}

// Where this thread's candidate stands among all tokens: how many are better, and their weight.
struct Standing {
  uint64_t key, mass_before;
  uint32_t rank;
};
__device__ inline Standing standing(const SelectScratch& s, const Range& range, int thread) {
  Standing mine = {~0ull, range.mass_above, range.above};
  if (thread >= static_cast<int>(range.inside)) return mine;
  mine.key = s.candidate[thread].key;
#pragma unroll 4
  for (int i = 0; i < static_cast<int>(range.inside); i++) {
    const Weighed other = s.candidate[i];
    if (other.key > mine.key) mine.rank++, mine.mass_before += other.mass;
  }
  return mine;
}

enum class Search { failed, no_cut, gathered };

// Narrows the range until the tokens inside have been gathered; with `whole`, those above it too. `hopeful`: try to gather
// at once.
template <class Team>
__device__ __forceinline__ Search search(Team& t, const float* values, float best, Range& range, Goal& goal, bool whole,
                                         bool hopeful) {
  const uint64_t top = range.high;
#pragma unroll 1
  for (int round = 0;; round++) {
    if (hopeful) {
      if (!gather(t, values, best, range)) return Search::failed;
      if (range.inside <= kCandidates) return Search::gathered;
    }
    if (!count_buckets(t, values, best, range, round)) return Search::failed;
    const bool narrower = step_inside(t.scratch(), range, goal);
    if (!t.meet()) return Search::failed;  // before any thread makes new edges
    if (!narrower && !whole) return Search::no_cut;
    if (!narrower) {  // there are no more than requested
      hopeful = true;
      continue;
    }
    const bool all_fit = range.above + range.inside <= kCandidates;
    if (all_fit) range = {range.low, top, 0, 0, range.above + range.inside};
    hopeful = all_fit || (!whole && range.inside <= kCandidates);
  }
}

// The largest value of every worker is known to all; this is the k-th largest of them, so at least k tokens are as good.
// Few more are: k tokens rarely meet at one worker. Below kAlive: there are not so many workers with tokens.
template <class Team>
__device__ __forceinline__ uint64_t best_worker(Team& t, uint64_t largest_of_worker, int k) {
  SelectScratch& s = t.scratch();
  if (k > kWorkers) return 0;
  const uint32_t mine = static_cast<uint32_t>(largest_of_worker >> 32);
  s.peak[t.thread] = t.thread < kWorkers ? mine : 0;
  if (!t.meet()) return 0;
  int as_good = 0;
  if (t.thread < kWorkers) {
    const uint4* peaks = reinterpret_cast<const uint4*>(s.peak);
#pragma unroll 3
    for (int i = 0; i < (kWorkers + 3) / 4; i++) {
      const uint4 other = peaks[i];
      as_good += (other.x >= mine) + (other.y >= mine) + (other.z >= mine) + (other.w >= mine);
    }
  }
  return t.largest(as_good >= k ? static_cast<uint64_t>(mine) << 32 : 0);
}

// The statistics of all workers' values, from one exchange.
struct Peak {
  uint64_t best;               // key of the best token of all
  uint64_t largest_of_worker;  // in thread w: of worker w
  double sum;                  // of all weights, in units of the best token's, if it is asked for
  float least;                 // of all values above -inf, if the sum is not
};

template <class Team>
__device__ __forceinline__ bool survey(Team& t, const float* values, bool with_sum, Peak& peak) {
  uint64_t end[2] = {key_of(-infinity(), 0x7fffffff), 0};  // the best, and the least: that one turned over
  each_own(t, values, [&](int id, float value) {
    const uint64_t key = key_of(value, id);
    if (key > end[0]) end[0] = key;
    if (key >= kAlive && ~key > end[1]) end[1] = ~key;
  });
  t.largest(end);
  const uint64_t best = end[0];
  uint64_t rest = end[1] ? __float_as_uint(value_of(~end[1])) : 0x7f800000u;  // what else is published
  if (with_sum) {
    double sum = 0;
#pragma unroll 1
    for (int id = t.first + t.thread; id < t.end; id += kConsumers)
      sum += exp(static_cast<double>(values[id]) - value_of(best));
    rest = static_cast<uint64_t>(__double_as_longlong(t.sum(sum))) & 0x7ffffffffffffffeull;  // no part is all ones
  }
  t.publish(1, [&](int) {
    return make_uint4(__float_as_uint(value_of(best)), id_of(best), static_cast<uint32_t>(rest),
                      static_cast<uint32_t>(rest >> 32));
  });
  int index[1] = {t.thread < kWorkers ? t.thread * kSamplerWords : -1};
  uint4 word[1];
  t.collect(index, word);
  if (!t.meet()) return false;
  t.end_turn();
  const bool real = t.thread < kWorkers;
  const float largest = __uint_as_float(word[0].x);
  peak.largest_of_worker = real ? key_of(largest, word[0].y) : 0;
  end[0] = peak.largest_of_worker, end[1] = real && !with_sum ? ~ordered(__uint_as_float(word[0].z)) : 0;
  t.largest(end);
  peak.best = end[0], peak.least = value_of(~end[1]);
  if (with_sum) {
    const double sum = __longlong_as_double(static_cast<int64_t>(static_cast<uint64_t>(word[0].w) << 32 | word[0].z));
    peak.sum = t.sum(real && sum > 0 ? sum * exp(static_cast<double>(largest) - value_of(peak.best)) : 0.0);
  }
  return true;
}

}  // namespace monotape

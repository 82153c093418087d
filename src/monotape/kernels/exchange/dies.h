// The exchange on a GPU whose dies have an L2 each. A word lives in memory that all dies see, its home. Every die has a copy of
// each buffer that many workers read; one reader of the die brings a word over, and the others poll the copy in their own L2.
//
// A word of a copy is four pieces of 64 bits, stored and loaded at once: 32 bits of the word, and the number of its turn.
// (1) A reader takes a piece only with the number that it waits for, and numbers of a place only grow: it takes no old word,
//     and half of a store is no word.
// (2) Copies are not reset, and a word is not overwritten before all readers of the die have it: a word of the same place with
//     a higher number has been published at home, so the word before was reset at home, so all of its readers were done
//     (exchange/janitor.h, (1)).
// (3) Every kHomeRounds-th round a reader looks at home itself, and brings the word over. So no word is waited for in vain: not
//     if the reader that should bring it has nothing of the stage, nor if a late store of it has overwritten a newer one, nor if
//     a die's number is wrong. Readers of the copy need no other order, because the bytes are their own signal.
#pragma once
#include "exchange/words.h"
#include "worker/consumer.h"

namespace monotape {

// Parts of attention have one reader each: it brings them over by itself, and they have no copies.
__host__ __device__ constexpr int copied_words(int buffer) {
  return buffer == static_cast<int>(Buffer::partials) ? 0 : buffer_row(buffer).words * buffer_row(buffer).copies;
}
__host__ __device__ constexpr int copied_before(int buffer) {
  int words = 0;
  for (int i = 0; i < buffer; i++) words += copied_words(i);
  return words;
}
constexpr int kLineBytes = 128;  // of an L2; copies share none
constexpr int kCopyWords = divide_up(((kRows - 1) * kRowWords + copied_before(kBuffers)) * 32, kLineBytes) * (kLineBytes / 32);
constexpr unsigned kHomeRounds = 32;
constexpr int kRun = 8;  // neighbouring words that the same worker brings over

struct alignas(kLineBytes) Copies {  // after the exchange, from the next line on; all ones before a launch, which is no number
  uint64_t words[kDies][kCopyWords][4];
  uint32_t die_of[kWorkers];  // the die of each worker, as the hardware says
};

__device__ __forceinline__ Copies& copies_of(const Params& params) {
  constexpr int kStart = divide_up(static_cast<int>(sizeof(Exchange)), kLineBytes) * kLineBytes;
  return *reinterpret_cast<Copies*>(reinterpret_cast<uint8_t*>(params.exchange) + kStart);
}

// This die's copy of the words that a stage reads in a turn.
struct DieCopy {
  uint64_t* words;
  uint32_t number;
  static __device__ __forceinline__ bool has(int) { return true; }
  __device__ __forceinline__ uint64_t* at(int word) const { return words + word * 4; }
};
__device__ __forceinline__ DieCopy copy_of(Consumer& c, int start, int words, int copies, int turn) {
  uint64_t* own = copies_of(c.params).words[c.shared.role.die][0] + (start + turn % copies * words) * 4;
  return {MONOTAPE_UNIFORM(own), static_cast<uint32_t>(turn)};
}
template <Buffer B>
__device__ __forceinline__ DieCopy copy_of(Consumer& c, int turn) {
  constexpr BufferRow kRow = buffer_row(static_cast<int>(B));
  return copy_of(c, copied_before(static_cast<int>(B)), kRow.words, kRow.copies, turn);
}
__device__ __forceinline__ DieCopy copy_of_input(Consumer& c, Stage stage) {
  const int start = of_stage(stage, [](StageRow row) { return copied_before(static_cast<int>(row.reads)); });
  const int words = of_stage(stage, [](StageRow row) { return buffer_row(static_cast<int>(row.reads)).words; });
  const int copies = of_stage(stage, [](StageRow row) { return buffer_row(static_cast<int>(row.reads)).copies; });
  return copy_of(c, start, words, copies, stage == Stage::head ? c.sample_turn() : c.turn);
}

template <class Copy>
__device__ __forceinline__ uint4 load_copy(const Copy& copy, int word) {
  uint64_t* at = copy.at(word);
  const uint64_t x = load_from_die(at), y = load_from_die(at + 1), z = load_from_die(at + 2), w = load_from_die(at + 3);
  const bool there = x >> 32 == copy.number && y >> 32 == copy.number && z >> 32 == copy.number && w >> 32 == copy.number;
  return there ? make_uint4(static_cast<uint32_t>(x), static_cast<uint32_t>(y), static_cast<uint32_t>(z), static_cast<uint32_t>(w)) : not_yet();
}
template <class Copy>
__device__ __forceinline__ void store_copy(const Copy& copy, int word, uint4 v) {
  uint64_t* at = copy.at(word);
  const uint64_t number = static_cast<uint64_t>(copy.number) << 32;
  store_to_die(at, number | v.x), store_to_die(at + 1, number | v.y), store_to_die(at + 2, number | v.z), store_to_die(at + 3, number | v.w);
}

// As `poll` in exchange/words.h. brings(i): this lane brings word i over; all others come from the die's copy.
template <int Count, class Copy, class Brings>
__device__ __forceinline__ void poll_on_die(const uint4* home, const Copy& copy, const int (&index)[Count], uint4 (&word)[Count],
                                            Patience& patience, Brings brings) {
#pragma unroll
  for (int i = 0; i < Count; i++) word[i] = index[i] >= 0 ? not_yet() : make_uint4(0, 0, 0, 0);
  for (unsigned round = 1;; round++) {
    int missing = -1;
#pragma unroll
    for (int i = 0; i < Count; i++) {
      if (arrived(word[i])) continue;
      if (brings(i) || round % kHomeRounds == 0) {
        word[i] = load_word(home + index[i]);
        if (arrived(word[i]) && copy.has(index[i])) store_copy(copy, index[i], word[i]);
      } else {
        word[i] = load_copy(copy, index[i]);
      }
      if (!arrived(word[i])) missing = index[i];
    }
    if (missing < 0 || !patience.more(missing)) return;
  }
}

// Readers of a stage's input on this die take turns, a run of words each. kMatrixStages: the candidates, which all workers read.
// A worker may read a router's logits without tiles of the stage that takes them: then it brings over only what no other does.
__device__ __forceinline__ bool brings_over(const Consumer& c, int stage, int word) {
  const uint32_t readers = c.shared.role.readers[stage];
  if (kExperts > 0 && readers == 0) return true;
  return static_cast<uint32_t>(word) / kRun % readers == c.shared.role.place[stage];
}

// The sampler's words (sampling/team.h), of which all workers read all: copies of the first ones of each worker, which are in
// use in every turn. The others are candidates of a worker that has many: they are read at home.
constexpr int kCopiedSamplerWords = kBuckets;
struct alignas(kLineBytes) SamplerCopies {  // after the sampler's words, from the next line on
  uint64_t words[kDies][3][kWorkers * kCopiedSamplerWords][4];
};
struct SamplerCopy {
  uint64_t* words;
  uint32_t number;
  static __device__ __forceinline__ bool has(int word) { return word % kSamplerWords < kCopiedSamplerWords; }
  static __device__ __forceinline__ int place(int word) { return word / kSamplerWords * kCopiedSamplerWords + word % kSamplerWords; }
  __device__ __forceinline__ uint64_t* at(int word) const { return words + place(word) * 4; }
};
__device__ __forceinline__ SamplerCopy copy_of_sampler(const Consumer& c, uint4* words, int turn) {
  constexpr int kStart = divide_up(3 * kWorkers * kSamplerWords * 16, kLineBytes) * kLineBytes;
  SamplerCopies& all = *reinterpret_cast<SamplerCopies*>(reinterpret_cast<uint8_t*>(words) + kStart);
  return {MONOTAPE_UNIFORM(all.words[c.shared.role.die][turn % 3][0]), static_cast<uint32_t>(turn)};
}

// Whether this worker is the first on its die that attends to its KV head, whenever others there do.
__device__ __forceinline__ bool first_on_die(const Consumer& c) {
  return c.shared.role.first_split == static_cast<uint32_t>(worker_number() / kKvHeads);
}

// Which die each worker is on, and so what this worker brings over. Once a request: workers tell each other what the hardware
// says, and each counts the readers of every stage on its own die, in the order of workers.
__device__ __forceinline__ bool find_die(Consumer& c) {
  Copies& copies = copies_of(c.params);
  if (c.thread == 0) {
    c.shared.role.die = die_number() % kDies;
    c.shared.role.first_split = kWorkers;
    for (int i = 0; i <= kMatrixStages; i++) c.shared.role.readers[i] = c.shared.role.place[i] = 0;
    store_flag(&copies.die_of[worker_number()], static_cast<uint32_t>(c.shared.role.die));
  }
  if (!c.meet()) return false;
  Patience patience(c.shared, c.lost, kFirstStage, 0);
#pragma unroll 1
  for (int worker = c.thread; worker < kWorkers; worker += kConsumers) {
    uint32_t die = read_flag(&copies.die_of[worker]);
    while (die == ~0u && patience.more(worker)) die = read_flag(&copies.die_of[worker]);
    if (die != static_cast<uint32_t>(c.shared.role.die)) continue;
#pragma unroll 1
    for (int stage = 0; stage <= kMatrixStages; stage++) {
      if (stage < kMatrixStages && c.params.spans[worker * kMatrixStages + stage].count == 0) continue;
      add_to_shared(&c.shared.role.readers[stage], 1);
      if (worker < worker_number()) add_to_shared(&c.shared.role.place[stage], 1);
    }
    if (worker % kKvHeads == worker_number() % kKvHeads) least_in_shared(&c.shared.role.first_split, static_cast<uint32_t>(worker / kKvHeads));
  }
  return c.meet();
}

}  // namespace monotape

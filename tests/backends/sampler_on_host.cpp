// The kernel's sampler on the host: its headers are compiled as they are, for a team of fibers instead of GPU threads.
//
// Every thread of every worker is a fiber. They run one at a time, in an order that a random number generator makes up,
// and lose control only where they wait: so a missing meeting or a word that is taken back too early shows.
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#define __device__
#define __forceinline__ inline

struct uint4 {
  unsigned x, y, z, w;
};
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
template <class To, class From>
static To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}
static inline unsigned __float_as_uint(float v) { return same_bits<unsigned>(v); }
static inline float __uint_as_float(unsigned v) { return same_bits<float>(v); }
static inline long long __double_as_longlong(double v) { return same_bits<long long>(v); }
static inline double __longlong_as_double(long long v) { return same_bits<double>(v); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }

namespace monotape {
using int64_t = long long;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
constexpr int kWorkers = 5, kConsumers = 32, kVocab = 1 << 18, kTileRows = 8;
static inline float infinity() { return INFINITY; }
}  // namespace monotape

#include "sampling/steps.h"

namespace monotape {
namespace {

constexpr int kFibers = kWorkers * kConsumers, kStackBytes = 64 << 10, kPatience = 5000000;

struct Worker {
  SelectScratch scratch;
  int arrived = 0, meetings = 0;
  uint64_t parts[2][kConsumers];
  int written[3] = {0, 0, 0};
  int turn = 0;

  Worker() { memset(static_cast<void*>(&scratch), 0xee, sizeof(scratch)); }  // earlier contents must not matter
};

struct Machine {
  ucontext_t scheduler, fiber[kFibers];
  std::vector<char> stacks = std::vector<char>(static_cast<size_t>(kFibers) * kStackBytes);
  const int* blocked_on[kFibers] = {};  // a meeting that has not taken place while it has this value
  int blocked_value[kFibers] = {};
  bool ended[kFibers] = {};
  int current = 0;
  Worker worker[kWorkers];
  std::vector<uint4> words = std::vector<uint4>(3 * kWorkers * kSamplerWords, uint4{~0u, ~0u, ~0u, ~0u});
  std::function<void(int)> body;
  const char* fault = nullptr;

  void yield() { swapcontext(&fiber[current], &scheduler); }
};
Machine* machine;

void enter() {
  machine->body(machine->current);
  machine->ended[machine->current] = true;
  machine->yield();
}

// Runs all fibers to their end in a random order. False: none of them can go on.
bool run_all(unsigned seed) {
  Machine& m = *machine;
  std::mt19937 random(seed);
  for (int f = 0; f < kFibers; f++) {
    m.ended[f] = false, m.blocked_on[f] = nullptr;
    getcontext(&m.fiber[f]);
    m.fiber[f].uc_stack.ss_sp = m.stacks.data() + static_cast<size_t>(f) * kStackBytes;
    m.fiber[f].uc_stack.ss_size = kStackBytes;
    m.fiber[f].uc_link = nullptr;
    makecontext(&m.fiber[f], enter, 0);
  }
  for (int resumed = 0; resumed < kPatience;) {
    std::vector<int> ready;
    bool all_ended = true;
    for (int f = 0; f < kFibers; f++) {
      all_ended &= m.ended[f];
      if (!m.ended[f] && !(m.blocked_on[f] && *m.blocked_on[f] == m.blocked_value[f])) ready.push_back(f);
    }
    if (all_ended) return true;
    if (ready.empty() || m.fault) return false;
    const size_t burst = 1 + random() % ready.size();
    for (size_t i = 0; i < burst; i++) {
      m.current = ready[random() % ready.size()];
      if (m.ended[m.current] || (m.blocked_on[m.current] && *m.blocked_on[m.current] == m.blocked_value[m.current])) continue;
      swapcontext(&m.scheduler, &m.fiber[m.current]);
      resumed++;
    }
  }
  m.fault = "a word never came";
  return false;
}

class HostTeam {
 public:
  const int thread, first, end;
  HostTeam(int fiber, int vocab)
      : thread(fiber % kConsumers), first(edge(fiber / kConsumers, vocab)), end(edge(fiber / kConsumers + 1, vocab)),
        number_(fiber / kConsumers), worker_(machine->worker[number_]), turn_(worker_.turn) {}

  SelectScratch& scratch() { return worker_.scratch; }
  bool meet() {
    const int meeting = worker_.meetings;
    if (++worker_.arrived == kConsumers) {
      worker_.arrived = 0, worker_.meetings++;
      return true;
    }
    const int self = machine->current;
    machine->blocked_on[self] = &worker_.meetings, machine->blocked_value[self] = meeting;
    machine->yield();
    machine->blocked_on[self] = nullptr;
    return true;
  }
  void add(uint32_t* counter, uint32_t n) { *counter += n; }
  template <class T>
  T sum(T value) {
    uint64_t* parts = all(same_bits<uint64_t>(value));
    value = 0;
    for (int i = 0; i < kConsumers; i++) value += same_bits<T>(parts[i]);
    return value;
  }
  template <int Count>
  void largest(uint64_t (&value)[Count]) {
    for (uint64_t& one : value) one = largest(one);
  }
  uint64_t largest(uint64_t value) {
    uint64_t* parts = all(value);
    for (int i = 0; i < kConsumers; i++)
      if (parts[i] > value) value = parts[i];
    return value;
  }
  struct Scan {
    int before, total;
  };
  Scan scan(int value) {
    uint64_t* parts = all(value);
    Scan result = {0, 0};
    for (int i = 0; i < kConsumers; i++) result.before += i < thread ? static_cast<int>(parts[i]) : 0, result.total += static_cast<int>(parts[i]);
    return result;
  }
  template <class WordAt>
  void publish(int count, WordAt word_at) {
    if (thread != 0) return;
    if (count > kSamplerWords) machine->fault = "too many words";
    for (int i = 0; i < count && !machine->fault; i++) {
      uint4& word = at(turn_, number_ * kSamplerWords + i);
      if ((word.x & word.y & word.z & word.w) != ~0u) machine->fault = "a word was not taken back";
      word = word_at(i);
      if (!there(word)) machine->fault = "a part of a word is all ones";
      if (i % 3 == 0) machine->yield();
    }
    worker_.written[turn_ % 3] = count;
  }
  template <int Count>
  void collect(const int (&index)[Count], uint4 (&word)[Count]) {
    for (int i = 0; i < Count; i++) {
      word[i] = {0, 0, 0, 0};
      if (index[i] < 0) continue;
      while (!there(at(turn_, index[i])) && !machine->fault) machine->yield();
      word[i] = at(turn_, index[i]);
    }
  }
  void end_turn() {
    if (thread == 0)
      for (int i = 0; i < worker_.written[(turn_ + 2) % 3]; i++) at(turn_ + 2, number_ * kSamplerWords + i) = {~0u, ~0u, ~0u, ~0u};
    turn_++;
    if (thread == 0) worker_.turn = turn_;
  }
  bool wants_to_stop() const { return false; }
  int number() const { return number_; }

 private:
  static int edge(int worker, int vocab) {  // the last worker has no tokens at all, as when there are few tiles
    const int tiles = (vocab + kTileRows - 1) / kTileRows;
    const int tile = worker >= kWorkers - 1 ? tiles : tiles * worker / (kWorkers - 1);
    return tile * kTileRows < vocab ? tile * kTileRows : vocab;
  }
  static bool there(uint4 v) { return v.x != ~0u && v.y != ~0u && v.z != ~0u && v.w != ~0u; }
  static uint4& at(int turn, int word) { return machine->words[turn % 3 * kWorkers * kSamplerWords + word]; }
  uint64_t* all(uint64_t value) {
    flip_ ^= 1;
    worker_.parts[flip_][thread] = value;
    meet();
    return worker_.parts[flip_];
  }

  int number_;
  Worker& worker_;
  int turn_, flip_ = 0;
};

}  // namespace

// Chooses `steps` tokens from as many rows of logits. Null: all went well; else what went wrong.
extern "C" const char* choose_on_host(const Sampling* sampling, const float* logits, int vocab, int steps,
                                      const int* prompt, int prompt_length, const int* stop_ids, int stop_count,
                                      unsigned seed, int* chosen, int* known_steps) {
  std::unique_ptr<Machine> owner(machine = new Machine);
  const Sampling& s = *sampling;
  std::vector<uint64_t> best(kFibers), known(kFibers);
  std::vector<double> log_sums(kFibers);
  for (int step = 0; step < steps; step++) {
    const float* row = logits + static_cast<size_t>(step) * vocab;
    machine->body = [&, step, row](int fiber) {
      HostTeam team(fiber, vocab);
      if (step == 0 && s.counts) begin_counts(team, s, prompt, prompt_length);
      const float* values = row;
      if (adjusts(s, step)) adjust(team, s, row, stop_ids, stop_count, step), values = s.adjusted;
      Filtered left;
      left.noisy = s.temperature > 0;
      const auto tell = [&](int rank, int id, float value, double log_sum) {
        if (team.number() != step % kWorkers) return;  // each of them knows
        s.top_ids[step * s.top_logprobs + rank] = id;
        s.top_values[step * s.top_logprobs + rank] = static_cast<float>(value - log_sum);
      };
      if (filter(team, s, row, values, prompt_length + step, left, tell))
        best[fiber] = pick(team, s, values, left, prompt_length + step);
      log_sums[fiber] = left.log_sum, known[fiber] = left.winner;
    };
    if (!run_all(seed + step)) return machine->fault ? machine->fault : "everybody waits";
    uint64_t winner = 0;
    for (uint64_t key : best) winner = key > winner ? key : winner;
    for (uint64_t key : known)
      if (key != known[0] || (key && key != winner)) return "not everybody knows the winner";
    chosen[step] = id_of(winner);
    if (known[0]) (*known_steps)++;
    if (chosen[step] < 0 || chosen[step] >= vocab) return "nobody was chosen";
    if (s.counts) s.counts[chosen[step]]++;
    if (s.top_logprobs >= 0) s.logprobs[step] = static_cast<float>(row[chosen[step]] - log_sums[0]);
  }
  return nullptr;
}

}  // namespace monotape

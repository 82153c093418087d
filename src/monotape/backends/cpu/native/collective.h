// Communication between ranks, and their only way to communicate: each rank pushes words into the inbox of every peer.
//
// A word is 64 bits, stored and loaded at once: a value and the number of its send. A reader polls for that number.
// Numbers only grow, so no word is ever reset and a NaN is a value like any other. Every rank adds up for itself, in
// rank order.
//
// Why no word is overwritten before it is read. Sends take turns in `slots` slots.
// 1. Before rank A stores send k, it has folded send k - 1 - lag of every peer B.
// 2. Before B stored that send, B had folded all sends up to k - 2 - 2 lag.
// 3. With 2 lag + 2 slots, send k reuses the slot of send k - 2 - 2 lag, which B has read by 1 and 2.
// 4. Release on the store and acquire on the poll make 1 and 2 happens-before edges; within a rank the rendezvous
//    carries them from worker to worker.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "abi.h"
#include "kernels.h"
#include "rendezvous.h"

namespace monotape {

using Word = std::atomic<uint64_t>;

// Delays words, for tests and experiments, at the sender and at the reader. Every word draws its own delay, and the seed
// makes some ranks slow and others quick, so that they run as far apart as they can.
class LinkDelay {
 public:
  void set(int64_t longest_ns, uint64_t seed) {
    longest_ns_ = longest_ns;
    seed_ = state_ = seed;
  }
  void pass(int rank) {
    const int64_t longest = longest_ns_.load(std::memory_order_relaxed);
    if (longest) wait(longest * static_cast<int64_t>(seed_.load(std::memory_order_relaxed) >> (2 * (rank & 31)) & 3));
  }

 private:
  void wait(int64_t longest) {
    uint64_t bits = state_.fetch_add(0x9E3779B97F4A7C15ull, std::memory_order_relaxed);  // splitmix64
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9ull;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBull;
    bits ^= bits >> 31;
    if (bits & 7) return;  // most come at once, or all would only be slow together
    const int64_t until = now_ns() + static_cast<int64_t>((bits >> 8) % static_cast<uint64_t>(longest + 1));
    while (now_ns() < until) std::this_thread::yield();
  }

  std::atomic<int64_t> longest_ns_{0};
  std::atomic<uint64_t> seed_{0}, state_{0};
};

class Collective {
 public:
  Collective(const Group& group, size_t rows, size_t width, size_t controls, int64_t deadline_us)
      : deadlines_us(group.ranks, deadline_us), group_(group), rows_(rows), width_(width), controls_(controls),
        steps_(group.schedule, group.schedule + group.steps), send_index_(group.steps, -1) {
    for (int module = 0; module < group.steps; module++)
      if (steps_[module].sends) send_index_[module] = sends_++;
    const size_t words = partial_words() + lane_words() + logit_words() + controls_;
    for (int rank = 0; rank < group.ranks; rank++) inboxes_.emplace_back(new Word[words]());
  }

  int ranks() const { return group_.ranks; }
  int steps() const { return group_.steps; }
  const Step& step(int module) const { return steps_[module]; }
  HeadInput head_input() const { return group_.head_input; }
  int vocab() const { return group_.vocab; }
  uint32_t sends() const { return sends_; }  // of a pass
  uint32_t send_index(int module) const { return static_cast<uint32_t>(send_index_[module]); }

  // Where words lie in a rank's inbox. `send` counts from the beginning of all time.
  Word* partial(int rank, uint32_t send, int from, size_t row) {
    return inboxes_[rank].get() + ((send % group_.slots * group_.ranks + from) * rows_ + row) * width_;
  }
  Word* lane(int rank, int from, int row) {
    return inboxes_[rank].get() + partial_words() + (static_cast<size_t>(row) * group_.ranks + from) * width_;
  }
  Word* logits(int rank, int row) {
    return inboxes_[rank].get() + partial_words() + lane_words() + static_cast<size_t>(row) * group_.vocab;
  }
  Word* control(int rank, uint32_t number) {
    return inboxes_[rank].get() + partial_words() + lane_words() + logit_words() + number % controls_;
  }

  void push(Word& word, uint32_t payload, uint32_t tag, int from) {
    link_delay.pass(from);
    word.store(static_cast<uint64_t>(tag) << 32 | payload, std::memory_order_release);
  }
  void push(Word& word, float value, uint32_t tag, int from) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    push(word, bits, tag, from);
  }

  void forget() {
    const size_t words = partial_words() + lane_words() + logit_words() + controls_;
    for (auto& inbox : inboxes_)
      for (size_t i = 0; i < words; i++) inbox[i].store(0, std::memory_order_relaxed);
  }

  LinkDelay link_delay;
  std::vector<int64_t> deadlines_us;  // how long to wait for a word of each rank; changes between jobs only
  std::atomic<int> stopped_rank{-1};  // for tests of the deadline: this rank stops
  std::atomic<int> stopped_after{0};  // after so many modules of a job

 private:
  size_t partial_words() const { return static_cast<size_t>(group_.slots) * group_.ranks * rows_ * width_; }
  size_t lane_words() const { return kPassRows * group_.ranks * width_; }
  size_t logit_words() const { return static_cast<size_t>(kPassRows) * group_.vocab; }

  Group group_;
  size_t rows_, width_, controls_;
  std::vector<Step> steps_;
  std::vector<int> send_index_;
  uint32_t sends_ = 0;
  std::vector<std::unique_ptr<Word[]>> inboxes_;
};

}  // namespace monotape

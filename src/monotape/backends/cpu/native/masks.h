// Masks from the host: which tokens may be chosen next. Another thread gives them, in the order of the tokens, while a job
// runs; only worker 0 of rank 0 reads them. A mask of one token is a forced token, which no logits have to choose.
#pragma once
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

namespace monotape {

constexpr int kMaskBits = 32;    // of a word. backends/protocol.py: MASK_BITS
constexpr int kMasksAhead = 64;  // masks that may wait for their tokens. bridge.py: MASKS_AHEAD

struct Mask {
  int32_t only = -1;           // the forced token; -1: there are several, by the bits
  std::vector<uint32_t> bits;  // bit i % 32 of word i / 32 is that of id i

  bool allows(int32_t id) const { return bits[id / kMaskBits] >> id % kMaskBits & 1; }
};

class Masks {
 public:
  explicit Masks(int vocab) : words_((vocab + kMaskBits - 1) / kMaskBits) {}

  // A new job. Without `wanted` every token is free, and nothing below is called for it.
  void begin(bool wanted);
  bool wanted() const { return wanted_; }
  void end_job();

  // Called by the host. The mask of the next token, at most kMasksAhead after the last one that was told.
  void allow(const uint32_t* bits);
  // The next tokens, all forced: their masks. Returns for how many there was room.
  int force(const int32_t* ids, int count);
  // In place of the next mask: the text is complete.
  void complete();
  // Waits until more than `index` tokens have been told: 1. 0: the time is up; -1: the job has ended.
  int await(int index, int timeout_ms);
  // A cancellation has been requested.
  void wake();

  // Called by worker 0. Before a pass's tokens are chosen, which share a deadline: other workers wait for all of them.
  void begin_choice() { waited_us_ = 0; }
  // Waits for the mask of the next token.
  enum class Answer { mask, complete, cancelled, late };
  Answer take(const std::atomic<bool>& cancelled, const Mask*& mask);
  // The next token if its mask is there and forces it, which is then taken; else -1.
  int32_t take_forced();
  void tell();
  // How long take() has waited in this job.
  int64_t waited_ns() const { return job_waited_ns_; }

  void set_deadline_us(int64_t deadline_us) { deadline_us_ = deadline_us; }

 private:
  Mask& at(int number) { return ring_[number % kMasksAhead]; }
  // Until the mask of the next token is there, or what comes in its place.
  Answer wait(std::unique_lock<std::mutex>& lock, const std::atomic<bool>& cancelled);

  const size_t words_;
  bool wanted_ = false;
  std::mutex mutex_;
  std::condition_variable news_;
  std::array<Mask, kMasksAhead> ring_;
  int given_ = 0, taken_ = 0, told_ = 0;
  bool complete_ = false, over_ = true;
  int64_t deadline_us_ = 0, waited_us_ = 0;  // of a pass's choices
  int64_t job_waited_ns_ = 0;                // by the clock; written and read by worker 0 while a job runs
};

}  // namespace monotape

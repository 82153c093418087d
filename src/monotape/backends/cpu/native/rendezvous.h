// The barrier of workers: each has a counter of finished steps on its own cache line, and waits until every other counter
// has caught up. A wait has a deadline and a name.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>

namespace monotape {

inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The fault that ended a job, and the worker that saw it first. No worker writes to its cache line while all is well, so
// reading it between two tiles costs nothing.
struct alignas(128) Fault {
  std::atomic<int> kind{0};             // 0: none; else a Finish
  std::atomic<bool> cancelled{false};   // requested from outside; the first worker that sees it stores it as the kind
  int64_t cancel_at = -1;               // for tests: the number of worker 0's check at which it is requested; -1: none
  int rank = 0, worker = -1, stage = -1, position = -1, waited_for = -1, waited_rank = -1;
};

// The worker that waits, and its stage: the text of a fault.
struct Waiter {
  int rank, worker, stage;
};

// How long to spin and how long to wait at all.
struct Patience {
  int spins = 4096;  // covers a stage's unevenness; after that, yield the core
  int64_t deadline_us;
};

// Waits until `ready`. False: it did not come in time, or a fault was raised meanwhile; the caller must unwind.
// `other` of rank `other_rank` (-1: the same rank) is the worker that is waited for.
template <class Ready>
inline bool wait_until(Ready ready, const Patience& patience, const Waiter& waiter, int other, int other_rank,
                       Fault& fault, int fault_kind) {
  constexpr int64_t kSliceUs = 10000;  // the most one look at the clock may count, so that a stopped or sleeping
                                       // process does not use up its deadline
  for (int spin = 0; spin < patience.spins; spin++) {
    if (ready()) return true;
    relax();
  }
  int64_t waited_us = 0, last_ns = now_ns();
  while (!ready()) {
    if (fault.kind.load(std::memory_order_acquire)) return false;
    std::this_thread::yield();
    const int64_t time_ns = now_ns(), slice_us = (time_ns - last_ns) / 1000;
    waited_us += slice_us < kSliceUs ? slice_us : kSliceUs;
    last_ns = slice_us > 0 ? time_ns : last_ns;
    if (waited_us > patience.deadline_us) {
      int none = 0;
      if (fault.kind.compare_exchange_strong(none, -1)) {
        fault.rank = waiter.rank, fault.worker = waiter.worker, fault.stage = waiter.stage;
        fault.waited_for = other, fault.waited_rank = other_rank, fault.position = -1;
        fault.kind.store(fault_kind, std::memory_order_release);
      }
      return false;
    }
  }
  return true;
}

class Rendezvous {
 public:
  Rendezvous(int workers, Patience patience)
      : workers_(workers), patience_(patience), counters_(new Counter[workers]) {}

  // Between jobs, when no worker waits.
  void reset() {
    for (int w = 0; w < workers_; w++) counters_[w].steps.store(0, std::memory_order_relaxed);
  }

  // Publishes what `worker` wrote (release) and waits until all workers have finished as many steps (acquire).
  // False: a worker did not come in time, or a fault was raised meanwhile; the caller must unwind.
  bool meet(const Waiter& waiter, Fault& fault, int fault_kind) {
    const uint64_t step = counters_[waiter.worker].steps.load(std::memory_order_relaxed) + 1;
    counters_[waiter.worker].steps.store(step, std::memory_order_release);
    for (int other = 0; other < workers_; other++) {
      const auto& steps = counters_[other].steps;
      const auto ready = [&] { return steps.load(std::memory_order_acquire) >= step; };
      if (!wait_until(ready, patience_, waiter, other, -1, fault, fault_kind)) return false;
    }
    return true;
  }

 private:
  struct alignas(128) Counter {
    std::atomic<uint64_t> steps{0};
  };

  int workers_;
  Patience patience_;
  std::unique_ptr<Counter[]> counters_;
};

}  // namespace monotape

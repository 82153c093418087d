// How workers wait for each other: each has a counter of finished steps on a cache line of its own, and waits until
// every other counter has caught up. A wait has a deadline and a name.
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

// What ended a job before its time, and who saw it first.
struct Fault {
  std::atomic<int> kind{0};  // 0: none; else a Finish
  int worker = -1, stage = -1, position = -1, waited_for = -1;
};

class Rendezvous {
 public:
  Rendezvous(int workers, int64_t deadline_us)
      : workers_(workers), deadline_us_(deadline_us), counters_(new Counter[workers]) {}

  // Between jobs, when nobody waits.
  void reset() {
    for (int w = 0; w < workers_; w++) counters_[w].steps.store(0, std::memory_order_relaxed);
  }

  // Publishes what `worker` wrote (release) and waits until everybody has finished as many steps (acquire).
  // False: somebody did not come, or a fault was raised meanwhile; the caller must unwind.
  bool meet(int worker, int stage, Fault& fault, int fault_kind) {
    const uint64_t step = counters_[worker].steps.load(std::memory_order_relaxed) + 1;
    counters_[worker].steps.store(step, std::memory_order_release);
    for (int other = 0; other < workers_; other++)
      if (!wait_for(other, step, worker, stage, fault, fault_kind)) return false;
    return true;
  }

 private:
  static constexpr int kSpins = 4096;         // a stage's unevenness; then give the core to whoever we wait for
  static constexpr int64_t kSliceUs = 10000;  // the most one look at the clock may count, so that a stopped or
                                              // sleeping process does not use up its deadline
  struct alignas(128) Counter {
    std::atomic<uint64_t> steps{0};
  };

  bool wait_for(int other, uint64_t step, int worker, int stage, Fault& fault, int fault_kind) {
    const auto& steps = counters_[other].steps;
    for (int spin = 0; spin < kSpins; spin++) {
      if (steps.load(std::memory_order_acquire) >= step) return true;
      relax();
    }
    int64_t waited_us = 0, last_ns = now_ns();
    while (steps.load(std::memory_order_acquire) < step) {
      if (fault.kind.load(std::memory_order_acquire)) return false;
      std::this_thread::yield();
      const int64_t time_ns = now_ns(), slice_us = (time_ns - last_ns) / 1000;
      waited_us += slice_us < kSliceUs ? slice_us : kSliceUs;
      last_ns = slice_us > 0 ? time_ns : last_ns;
      if (waited_us > deadline_us_) {
        int none = 0;
        if (fault.kind.compare_exchange_strong(none, -1)) {
          fault.worker = worker, fault.stage = stage, fault.waited_for = other;
          fault.kind.store(fault_kind, std::memory_order_release);
        }
        return false;
      }
    }
    return true;
  }

  int workers_;
  int64_t deadline_us_;
  std::unique_ptr<Counter[]> counters_;
};

}  // namespace monotape

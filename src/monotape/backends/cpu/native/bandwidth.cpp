// How fast this machine reads memory: the ceiling of everything else.
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "rendezvous.h"

namespace {

constexpr size_t kAhead = 4096 / sizeof(uint64_t);

// `ahead`: words further on that are asked for. The prefetchers of some processors stop at the end of a page.
uint64_t read_all(const uint64_t* data, size_t count, size_t ahead) {
  uint64_t a = 0, b = 0, c = 0, d = 0;
  for (size_t i = 0; i + 32 <= count; i += 32) {  // several sums, so that loads never wait for an addition
    if (ahead)
      for (int j = 0; j < 32; j += 8) __builtin_prefetch(data + i + j + ahead);  // past the end that is no fault
    for (int j = 0; j < 32; j += 4) {
      a ^= data[i + j], b ^= data[i + j + 1], c ^= data[i + j + 2], d ^= data[i + j + 3];
    }
  }
  return a ^ b ^ c ^ d;
}

}  // namespace

// Bytes per second that `threads` threads read together from `words` 64-bit words: the best of `rounds` passes without
// prefetches of their own, and as many with them, because the kernels of some machines prefetch.
extern "C" double monotape_read_bandwidth(const uint64_t* words, int64_t count, int32_t threads, int32_t rounds) {
  double best = 0;
  static std::atomic<uint64_t> sink;
  for (int round = 0; round < 2 * rounds; round++) {
    const size_t ahead = round % 2 ? kAhead : 0;
    std::atomic<int> ready{0};
    std::atomic<bool> go{false};
    std::vector<std::thread> readers;
    for (int t = 0; t < threads; t++)
      readers.emplace_back([&, t] {
        const int64_t first = count * t / threads, end = count * (t + 1) / threads;
        ready++;
        while (!go) monotape::relax();
        sink ^= read_all(words + first, end - first, ahead);
      });
    while (ready < threads) std::this_thread::yield();
    const int64_t start = monotape::now_ns();
    go = true;
    for (auto& reader : readers) reader.join();
    const double bandwidth = 8.0 * count / ((monotape::now_ns() - start) * 1e-9);
    best = bandwidth > best ? bandwidth : best;
  }
  return best;
}

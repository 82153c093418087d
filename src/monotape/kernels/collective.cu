// The time of a sum over ranks alone: the words and polls of ranks/words.h without a model, and a plain barrier of all thread
// blocks for comparison. Ranks are groups of thread blocks of one launch; each has its own inbox.
#include "machine/machine.h"

namespace monotape {

// backends/cuda/collective.py: CollectiveStruct
struct CollectiveParams {
  uint64_t* inbox;    // [ranks][2][from][elements]: a value and the number of its round
  float* sums;        // [ranks][elements]: what the last round has left
  int64_t* ticks;     // [blocks][rounds + 1]: when a block began a round, and ended the last
  int64_t* times_ns;  // [blocks][start, end]
  uint32_t* counter;  // arrivals at the barrier
  uint32_t* failed;
  int elements, blocks, rounds, barrier;  // blocks of a rank; barrier: nothing but that
};

constexpr int64_t kDeadlineNs = 1000000000;

// One element of one round: pushed to all peers, then all words are polled together and added up in rank order.
__device__ __forceinline__ bool add_up(const CollectiveParams& p, int rank, int element, uint32_t round, float& value) {
  const int64_t slot = static_cast<int64_t>(round & 1) * kRanks * p.elements;
  const int64_t inbox = static_cast<int64_t>(2) * kRanks * p.elements;
  const uint64_t word = static_cast<uint64_t>(round) << 32 | __float_as_uint(value);
#pragma unroll
  for (int to = 0; to < kRanks; to++)
    if (to != rank) store_link(p.inbox + to * inbox + slot + static_cast<int64_t>(rank) * p.elements + element, word);
  const uint64_t* own = p.inbox + rank * inbox + slot + element;
  uint64_t found[kRanks];
  for (int polls = 1;; polls++) {
    bool all = true;
#pragma unroll
    for (int from = 0; from < kRanks; from++) found[from] = from == rank ? word : load_link(own + static_cast<int64_t>(from) * p.elements);
#pragma unroll
    for (int from = 0; from < kRanks; from++) all &= found[from] >> 32 == round;
    if (all) break;
    if (polls % 4096 == 0 && clock_ns() - p.times_ns[2 * blockIdx.x] > kDeadlineNs) {
      *p.failed = 1;
      return false;
    }
  }
  float sum = 0;
#pragma unroll
  for (int from = 0; from < kRanks; from++) sum += __uint_as_float(static_cast<uint32_t>(found[from]));
  value = sum / kRanks;  // so that it stays what it is
  return true;
}

__device__ __forceinline__ bool meet_all(const CollectiveParams& p, uint32_t round) {
  if (threadIdx.x != 0) return true;
  raise_counter(p.counter);
  for (int polls = 1; read_counter(p.counter) < round * gridDim.x; polls++)
    if (polls % 4096 == 0 && clock_ns() - p.times_ns[2 * blockIdx.x] > kDeadlineNs) {
      *p.failed = 1;
      return false;
    }
  return true;
}

}  // namespace monotape

extern "C" __global__ void monotape_collective(const __grid_constant__ monotape::CollectiveParams p) {
  using namespace monotape;
  const int rank = blockIdx.x / p.blocks, worker = blockIdx.x % p.blocks;
  const int share = (p.elements + p.blocks - 1) / p.blocks, element = worker * share + threadIdx.x;
  const bool mine = threadIdx.x < share && element < p.elements;
  int64_t* ticks = p.ticks + static_cast<int64_t>(blockIdx.x) * (p.rounds + 1);
  float value = static_cast<float>(rank + 1 + element);
  if (threadIdx.x == 0) p.times_ns[2 * blockIdx.x] = clock_ns();
  // A round begins for a thread block when all its threads have the result of the round before.
  for (int round = 1; round <= p.rounds; round++) {
    __syncthreads();
    if (threadIdx.x == 0) ticks[round - 1] = clock_ticks();
    if (p.barrier ? !meet_all(p, round) : mine && !add_up(p, rank, element, round, value)) return;
  }
  __syncthreads();
  if (threadIdx.x == 0) ticks[p.rounds] = clock_ticks(), p.times_ns[2 * blockIdx.x + 1] = clock_ns();
  if (mine) p.sums[static_cast<int64_t>(rank) * p.elements + element] = value;
}

// How fast this GPU reads memory: the speed of light that every percentage is measured against. Each thread block copies
// its share of a buffer into a ring of shared memory, as the producer of the monokernel does, and never reads it.
#include "machine/machine.h"

namespace monotape {

constexpr int kMostPages = 32;

// backends/cuda/bandwidth.py: BandwidthStruct
struct BandwidthParams {
  const uint8_t* from;
  int64_t* times_ns;  // [blocks][start, end]
  int64_t block_bytes;
  int page_bytes, pages, rounds;
};

}  // namespace monotape

extern "C" __global__ void __launch_bounds__(32)
    monotape_bandwidth(const __grid_constant__ monotape::BandwidthParams params) {
  using namespace monotape;
  extern __shared__ __align__(128) uint8_t ring[];
  __shared__ uint64_t landed[kMostPages];
  if (threadIdx.x != 0) return;
  for (int page = 0; page < params.pages; ++page) barrier_init(&landed[page], 1);
  barrier_init_fence();
  const uint64_t policy = streaming_policy();
  const uint8_t* from = params.from + blockIdx.x * params.block_bytes;
  const int copies = static_cast<int>(params.block_bytes / params.page_bytes);
  const int total = copies * params.rounds;
  int page = 0, copy = 0;
  uint32_t lap = 0;  // how often the ring has been filled
  params.times_ns[2 * blockIdx.x] = clock_ns();
  for (int i = 0; i < total + params.pages; ++i) {
    // No deadline: a copy waits for no other thread. It lands, or the launch fails with the driver's error.
    if (i >= params.pages)
      while (!barrier_passed(&landed[page], (lap - 1) & 1)) {
      }
    if (i < total) {
      barrier_expect(&landed[page], params.page_bytes);
      copy_page(ring + page * params.page_bytes, from + static_cast<int64_t>(copy) * params.page_bytes,
                params.page_bytes, &landed[page], policy);
    }
    if (++copy == copies) copy = 0;
    if (++page == params.pages) page = 0, ++lap;
  }
  params.times_ns[2 * blockIdx.x + 1] = clock_ns();
}

// The scout loads into the L2 the pages for which the ring has no room yet. While consumers wait for each other the ring is
// soon full, and the memory would idle.
#pragma once
#include "worker/ring.h"

namespace monotape {

class Scout {
 public:
  __device__ Scout(Shared& shared, const Params& params, int worker)
      : shared_(shared), tape_(params.tapes + params.tape_start[worker]), head_first_(has_rows(params)) {}

  // A whole warp. It sleeps between checks, because spinning takes issue slots from the consumers. While the producer copies
  // weights it does nothing: the memory is busy then, and loads of pages in flight slow the copies down.
  __device__ void work() {
    while (!all_see(shared_.playing) && !all_see(shared_.done)) rest(kRest);
    const Span head = shared_.spans[static_cast<int>(Stage::head)];
    constexpr Product kHead = product(row_of(Stage::head).product);
    const int64_t end = head.offset + static_cast<int64_t>(head.count) * kHead.blocks * block_bytes(kHead);
    int64_t at = head_first_ ? head.offset : 0;
    uint32_t brought = 0, before = 0;  // as Shared::copied is counted
    for (; end > 0 && !all_see(shared_.done); rest(kRest)) {
      const uint32_t copied = static_cast<uint32_t>(all_see(shared_.copied));
      const int ahead = static_cast<int>(brought - copied);
      const bool stands = copied == before;
      before = copied;
      if (ahead < 0) {  // left behind
        brought -= ahead, at -= ahead;
        while (at >= end) at -= end;
      }
      if (!stands || ahead >= kLeadBytes) continue;
      const int bytes = end - at < kPiece ? static_cast<int>(end - at) : kPiece;
      bring(at, bytes);
      brought += bytes, at = at + bytes == end ? 0 : at + bytes;
    }
  }

 private:
  // Lane 0's value for all lanes: the variable may change, and all lanes must branch the same way.
  static __device__ __forceinline__ int all_see(int value) { return lane_at(value, 0); }

  static constexpr int kRest = 200;  // nanoseconds
  static constexpr int kLoads = 4, kPiece = kLoads * kLanes * kL2LineBytes;

  // The loaded values are not used, but the next piece waits until this one has arrived.
  __device__ __forceinline__ void bring(int64_t at, int bytes) {
    uint32_t seen[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; i++) {  // unconditional: loads behind branches would wait for each other
      const int line = (i * kLanes + lane_number()) * kL2LineBytes;
      seen[i] = load_line(tape_ + at + smaller(line, bytes - kL2LineBytes));
    }
#pragma unroll
    for (int i = 0; i < kLoads; i++) opaque(seen[i]);
  }

  Shared& shared_;
  const uint8_t* const tape_;
  const bool head_first_;
};

}  // namespace monotape

// CDNA3: the barrier of a worker's consumers. The host's machine runs this file as it is.
//
// The hardware's barrier is one of all waves that still run, clerk and janitor included. The consumers' own is a count of
// arrivals in shared memory that only grows. A wave knows the round by the count before its own arrival. Votes have two
// places, used in turn: a wave that is a round ahead does not overwrite the vote that others have yet to read.
#pragma once

namespace monotape {

struct ConsumersMeeting {
  uint32_t arrived, lost[2];
};
__device__ __forceinline__ ConsumersMeeting& consumers_meeting();  // this worker's, in shared memory
// Phases of a ring's pages, of which there are none.
__device__ __forceinline__ void barrier_init(uint64_t*, int) {}
__device__ __forceinline__ void barrier_init_fence() {
  ConsumersMeeting& meeting = consumers_meeting();
  meeting.arrived = meeting.lost[0] = meeting.lost[1] = 0;
}
__device__ __forceinline__ bool consumers_agree(int threads, bool good) {
  ConsumersMeeting& meeting = consumers_meeting();
  const uint32_t waves = static_cast<uint32_t>(threads / kLanes);
  const bool lost = __builtin_amdgcn_ballot_w64(!good) != 0;
  uint32_t before = 0;
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  if (lane_number() == 0) {
    if (lost) {
      const uint32_t now = __hip_atomic_load(&meeting.arrived, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
      __hip_atomic_store(&meeting.lost[now / waves & 1], 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
      __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    }
    before = __hip_atomic_fetch_add(&meeting.arrived, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
  }
  const uint32_t round = static_cast<uint32_t>(__builtin_amdgcn_readfirstlane(static_cast<int>(before))) / waves;
  while (static_cast<int>(__hip_atomic_load(&meeting.arrived, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP) - (round + 1) * waves) < 0) {
  }
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
  return __hip_atomic_load(&meeting.lost[round & 1], __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP) == 0;
}
__device__ __forceinline__ void consumers_meet(int threads) { consumers_agree(threads, true); }

}  // namespace monotape

// The machine of the host: what clang's HIP mode offers to machine/cdna3_memory.h and cdna3_meeting.h, which are compiled as they are. A scope is
// that of the GPU (agent) or more: the access passes the die's L2 by. One of less is served by it.
#pragma once

namespace monotape {

constexpr int __HIP_MEMORY_SCOPE_WORKGROUP = 3, __HIP_MEMORY_SCOPE_AGENT = 4, __HIP_MEMORY_SCOPE_SYSTEM = 5;

inline bool releases(int order) { return order == __ATOMIC_RELEASE || order == __ATOMIC_ACQ_REL || order == __ATOMIC_SEQ_CST; }
inline bool acquires(int order) { return order == __ATOMIC_ACQUIRE || order == __ATOMIC_ACQ_REL || order == __ATOMIC_SEQ_CST; }
inline void order_before(int order) {
  if (!releases(order)) return;
  machine->dies->release();
  machine->fence();
}
inline void order_after(int order) {
  if (acquires(order)) machine->block().l1.clear(), machine->dies->acquire();
}

// The fences of one wave act for its whole worker: an L2 is written back, or dropped, as a whole.
inline void __builtin_amdgcn_fence(int order, const char* scope) {
  if (releases(order)) machine->release_to_block();
  if (acquires(order)) machine->acquire_in_block();
  if (*scope && strcmp(scope, "agent")) return;
  order_before(order);
  order_after(order);
}

inline bool is_there(uint64_t bits) { return static_cast<uint32_t>(bits) != ~0u && bits >> 32 != ~0u; }

// A fiber that loads a counter, a flag or a word of another rank is polling it; words say themselves whether they are there.
template <class T>
inline void looked(T value, int scope) {
  if (sizeof(T) == 4) return machine->saw(false, "waiting for a counter");
  machine->saw(is_there(static_cast<uint64_t>(value)) && scope < __HIP_MEMORY_SCOPE_SYSTEM, "waiting for a word");
}
// A compute unit's L1 may serve a load of less than the GPU's scope, with the value of an earlier one.
template <class T>
inline T through_l1(const T* p) {
  auto& l1 = machine->block().l1;
  const auto kept = l1.find(p);
  if (kept != l1.end() && !machine->once_in(64)) return static_cast<T>(kept->second);
  return static_cast<T>(l1[p] = static_cast<uint64_t>(*p));
}
// A fiber that finds the same count of the consumers' meeting again waits until it changes.
inline bool of_meeting(const void* p) {
  const auto& own = machine->block().header_memory;
  return p >= own && p < own + 4;
}
inline uint32_t look_at_meeting(uint32_t* p) {
  host::Fiber& fiber = *machine->current;
  const uint32_t value = *p;
  if (fiber.watched[0] == p && fiber.seen == value) {
    machine->block().watching.push_back(&fiber);
    machine->wait("waiting for the consumers");
    machine->oversleep();
  } else {
    machine->did_something();
    fiber.watched[0] = p, fiber.seen = value;
    if (machine->once_in(8)) machine->yield();
  }
  return *p;
}
inline void wake_meeting() {
  for (host::Fiber* fiber : machine->block().watching) machine->wake(*fiber);
  machine->block().watching.clear();
}

template <class T>
inline T __hip_atomic_load(T* p, int order, int scope) {
  if constexpr (sizeof(T) == 4)
    if (of_meeting(p)) return look_at_meeting(reinterpret_cast<uint32_t*>(p));
  machine->touch(p, sizeof(T), sizeof(T));
  T* all = machine->dies->past_cache(p);
  T* from = scope < __HIP_MEMORY_SCOPE_AGENT ? p : all;
  if (from != p) machine->settle(reinterpret_cast<const uint32_t*>(from));
  const T value = scope < __HIP_MEMORY_SCOPE_AGENT && all != p ? through_l1(p) : *from;
  if (scope == __HIP_MEMORY_SCOPE_AGENT && sizeof(T) == 8 && is_there(value)) machine->crossings++;
  if (scope >= __HIP_MEMORY_SCOPE_AGENT) order_after(order);
  if (sizeof(T) == 8 || scope < __HIP_MEMORY_SCOPE_SYSTEM) looked(value, scope);
  return value;
}
template <class T, class V>
inline void __hip_atomic_store(T* p, V value, int order, int scope) {
  if (scope < __HIP_MEMORY_SCOPE_AGENT) {
    *p = static_cast<T>(value);
    return;
  }
  order_before(order);
  uint32_t parts[4] = {};
  const T bits = static_cast<T>(value);
  memcpy(parts, &bits, sizeof(T));
  machine->store(reinterpret_cast<uint32_t*>(machine->dies->past_cache(p)), parts, sizeof(T) == 8 ? 3 : 1);
}
template <class T, class Change>
inline T changed_at_once(T* p, int order, int scope, Change change) {
  if (scope < __HIP_MEMORY_SCOPE_AGENT) {
    if (machine->once_in(8)) machine->yield();
    const T before = *p;
    *p = change(before);
    if (of_meeting(p)) machine->did_something(), wake_meeting();
    return before;
  }
  order_before(order);
  T* at = machine->dies->past_cache(p);
  const T before = *at;
  *at = change(before);
  machine->dies->changed(at);
  order_after(order);
  machine->yield();
  return before;
}
template <class T, class V>
inline T __hip_atomic_fetch_add(T* p, V n, int order, int scope) {
  return changed_at_once(p, order, scope, [n](T before) { return static_cast<T>(before + n); });
}
template <class T, class V>
inline T __hip_atomic_exchange(T* p, V value, int order, int scope) {
  return changed_at_once(p, order, scope, [value](T) { return static_cast<T>(value); });
}

template <class T, class V>
inline T __hip_atomic_fetch_min(T* p, V value, int order, int scope) {
  return changed_at_once(p, order, scope, [value](T before) { return before < value ? before : static_cast<T>(value); });
}
// Reads, where the value is zero: a poll of the die's own copy. An atomic passes the L1 by.
template <class T, class V>
inline T __hip_atomic_fetch_or(T* p, V value, int order, int scope) {
  const T before = *p;
  if (value) *p = before | static_cast<T>(value);
  looked(before, scope);
  return before;
}
// Of a whole wave.
inline uint64_t __builtin_amdgcn_ballot_w64(bool says) {
  const int slot = host::turn();
  host::Warp& warp = machine->block().warp[machine->current->warp()];
  warp.value[slot][machine->current->lane()] = says;
  host::come_together(host::Collective::ballot, [](host::Warp&) {});
  uint64_t votes = 0;
  for (int lane = 0; lane < kLanes; lane++) votes |= static_cast<uint64_t>(warp.value[slot][lane]) << lane;
  return votes;
}
inline int __builtin_amdgcn_readfirstlane(int value) { return lane_at(value, 0); }
inline uint64_t hidden_zero() { return 0; }
constexpr int kDies = MONOTAPE_DIES;
#define MONOTAPE_DIE_COPIES
inline int die_number() { return machine->dies->current % kDies; }

template <class T>
inline T __builtin_nontemporal_load(const T* p) {
  machine->touch(p, sizeof(T), sizeof(T));
  return *p;
}
inline uint64_t __builtin_amdgcn_s_memrealtime() { return 100000 + machine->now() / 10; }
inline uint64_t __builtin_readcyclecounter() { return machine->now(); }
inline void __builtin_amdgcn_s_sleep(int turns) {
  machine->did_something();
  machine->current->doing = "resting";
  machine->sleep(250 * turns);
}

}  // namespace monotape

#include "machine/cdna3_meeting.h"
#include "machine/cdna3_memory.h"

namespace monotape {

inline ConsumersMeeting& consumers_meeting() {
  static_assert(sizeof(ConsumersMeeting) <= sizeof(host::Block::header_memory), "room for it");
  return *reinterpret_cast<ConsumersMeeting*>(machine->block().header_memory);
}

}  // namespace monotape

// The machine of the host: the memory of machine/hopper.h. Barriers, words, copies in groups, fences and clocks.
#pragma once

namespace monotape {

inline void barrier_init(uint64_t* barrier, int arrivals) {
  BarrierBits bits;
  bits.phase = 0, bits.expected = bits.missing = static_cast<unsigned>(arrivals), bits.bytes = 0;
  memcpy(static_cast<void*>(barrier), &bits, 8);
}
inline void barrier_init_fence() {}
inline void consumers_meet(int threads) { host::meet(1, threads, true); }
inline bool consumers_agree(int threads, bool good) { return host::meet(1, threads, good); }

inline void fence_copies() {}
inline void fence_shared_copies() {}

// Groups of copies are a thread's own: they may land at once, or not before they are waited for.
inline void copy_word(void* to, const void* from, uint32_t bytes) {
  machine->touch(to, 16, 16), machine->touch(from, bytes, 16);
  const host::AsyncWord word = {to, from, bytes, machine->current->copy_group};
  memset(to, 0xff, 16);
  machine->current->copies.push_back(word);
  machine->did_something();
}
inline void land_copies(int groups) {  // all of the groups before that one
  auto& copies = machine->current->copies;
  size_t kept = 0;
  for (const host::AsyncWord& word : copies) {
    if (word.group >= groups) {
      copies[kept++] = word;
      continue;
    }
    memset(word.to, 0, 16);
    memcpy(word.to, word.from, word.bytes);
  }
  copies.resize(kept);
}
inline void end_copy_group() {
  machine->current->copy_group++;
  if (machine->once_in(4)) land_copies(machine->current->copy_group - machine->below(3));
}
template <int Left>
inline void wait_copy_groups() {
  land_copies(machine->current->copy_group - Left);
  machine->yield();
}

inline bool all_there(uint4 v) { return v.x != ~0u && v.y != ~0u && v.z != ~0u && v.w != ~0u; }
inline uint4 load_word(const uint4* p) {
  machine->touch(p, 16, 16);
  machine->settle(reinterpret_cast<const uint32_t*>(p));
  uint4 v = *p;
  machine->saw(all_there(v), "waiting for a word");
  return v;
}
inline uint2 load_half(const uint2* p) {
  machine->touch(p, 8, 8);
  machine->settle(reinterpret_cast<const uint32_t*>(p));
  uint2 v = *p;
  machine->saw(v.x != ~0u && v.y != ~0u, "waiting for half a word");
  return v;
}
inline void store_word(uint4* p, uint4 v) {
  const uint32_t parts[4] = {v.x, v.y, v.z, v.w};
  machine->store(reinterpret_cast<uint32_t*>(p), parts, 15);
}
// Words between ranks: eight bytes at once. A fiber that reads one is polling it.
inline uint64_t load_link(const uint64_t* p) {
  machine->settle(reinterpret_cast<const uint32_t*>(p));
  const uint64_t v = *p;
  machine->saw(false, "waiting for a rank");
  return v;
}
inline void store_link(uint64_t* p, uint64_t v) {
  const uint32_t parts[4] = {static_cast<uint32_t>(v), static_cast<uint32_t>(v >> 32), 0, 0};
  machine->store(reinterpret_cast<uint32_t*>(p), parts, 3);
}
inline void load_links(const uint64_t* p, uint64_t& a, uint64_t& b) {
  const bool turned = machine->once_in(2);  // in either order
  (turned ? b : a) = load_link(p + turned);
  (turned ? a : b) = load_link(p + !turned);
}
inline void store_links(uint64_t* p, uint64_t a, uint64_t b) { store_link(p, a), store_link(p + 1, b); }
inline void store_row_word(uint4* p, uint4 v) { store_word(p, v); }
inline uint2 load_row_pair(const uint2* p) {
  machine->touch(p, 8, 8);
  return *p;
}
inline uint4 load_row_word(const uint4* p) {
  machine->touch(p, 16, 16);
  return *p;
}
inline float load_row_value(const float* p) { return *p; }

inline void add_to_shared(uint32_t* p, uint32_t n) {
  if (machine->once_in(8)) machine->yield();
  *p += n;
}

inline void raise_counter(uint32_t* p) {
  machine->fence();
  ++*p;
  machine->yield();
}
inline uint32_t read_counter(const uint32_t* p) {
  const uint32_t v = *p;
  machine->saw(false, "waiting for a counter");  // a fiber that reads one is polling, or resting
  return v;
}
inline uint32_t read_flag(const uint32_t* p) { return read_counter(p); }
inline void mark_unhealthy(uint32_t* p) {
  const uint32_t zero[4] = {0, 0, 0, 0};
  machine->store(p, zero, 1);
}

inline bool claim(uint32_t* p) {
  const bool first = *p != 0;
  *p = 0;
  return first;
}

inline uint32_t load_host_flag(const uint32_t* p) { return *p; }
inline uint64_t load_from_host(const uint64_t* p) {
  machine->touch(p, 8, 8);
  return *p;
}
template <class T>
inline void store_to_host(T* p, T v) {
  *p = v;
}
inline void store_to_host(int* p, unsigned v) { *p = static_cast<int>(v); }
inline void fence_host() { machine->fence(); }
inline void fence_device() { machine->fence(); }
inline void fence_block() {}

inline int64_t clock_ns() { return 1000000 + static_cast<int64_t>(machine->now()); }
inline int64_t clock_ticks() { return clock_ns(); }
inline void wait_ticks(int ticks) {
  if (ticks > 0 && machine->once_in(4)) machine->yield();
}
inline void rest(int ns) {
  machine->did_something();
  machine->current->doing = "resting";
  machine->sleep(4 * ns);
}
inline uint4 load_weights(const uint4* p) {
  machine->touch(p, 16, 16);
  return *p;
}

}  // namespace monotape

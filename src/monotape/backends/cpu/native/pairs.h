// Two registers of sixteen bytes of codes, for instruction sets that take them one by one.
#pragma once
#include <cstdint>

namespace monotape::MONOTAPE_ISA {

struct bytes32 {
  bytes16 low, high;
};
static inline bytes32 joined(bytes16 low, bytes16 high) { return {low, high}; }
static inline bytes32 load_pair(const uint8_t* p) { return {load_bytes(p), load_bytes(p + 16)}; }
static inline void store_pair(int8_t* p, bytes32 a) {
  store_bytes(p, a.low);
  store_bytes(p + 16, a.high);
}
static inline bytes32 masked(bytes32 a, uint8_t mask) { return {masked(a.low, mask), masked(a.high, mask)}; }
// The low halves of sixteen bytes, then the high ones, each in the highest bits of a byte.
static inline bytes32 load_nibbles(const uint8_t* p) {
  const bytes16 a = load_bytes(p);
  return {shifted<4>(a), masked(a, 0xf0)};
}

}  // namespace monotape::MONOTAPE_ISA

// Philox4x32-10 (Salmon et al., 2011): random bits as a pure function of a key and a counter.
#pragma once
#include <cstdint>

namespace monotape {

struct Philox {
  uint32_t word[4];
};

inline Philox philox(uint64_t key, uint32_t c0, uint32_t c1) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32), c2 = 0, c3 = 0;
  for (int round = 0; round < 10; round++) {
    const uint64_t p0 = 0xD2511F53ull * c0, p1 = 0xCD9E8D57ull * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace monotape

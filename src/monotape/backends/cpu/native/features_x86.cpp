// Asks the processor itself: the compilers' own __builtin_cpu_supports needs a symbol of their runtime that not every
// toolchain has for a shared library.
#if defined(__x86_64__)
#include "features_x86.h"

#include <cpuid.h>

namespace monotape {

FeaturesX86 features_x86() {
  constexpr unsigned kVnni = 1u << 11, kAvxVnni = 1u << 4;  // leaf 7: ECX; leaf 7.1: EAX
  constexpr unsigned kYmm = 0x06, kZmm = 0xe6;
  constexpr unsigned kFirst = bit_FMA | bit_OSXSAVE | bit_AVX | bit_F16C, k512 = bit_AVX512F | bit_AVX512BW | bit_AVX512VL;
  FeaturesX86 found;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & kFirst) != kFirst) return found;
  unsigned saved = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  if ((saved & kYmm) != kYmm || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
  found.avx2 = b & bit_AVX2;
  found.avx512_vnni = found.avx2 && (saved & kZmm) == kZmm && (b & k512) == k512 && (c & kVnni);
  found.avx_vnni = found.avx2 && a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & kAvxVnni);
  return found;
}

}  // namespace monotape
#endif

// The kernels for x86 machines with AVX2, FMA and F16C.
#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>

#define MONOTAPE_ISA avx2
#define MONOTAPE_ISA_NAME "avx2"
#include "simd_avx2.h"

#include "kernels_impl.h"

namespace {

/// Whether processor and system have AVX2, FMA and F16C. The compilers' own __builtin_cpu_supports needs a symbol of
/// their runtime that not every toolchain has for a shared library.
bool has_avx2() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return false;
  const unsigned needed = bit_FMA | bit_OSXSAVE | bit_AVX | bit_F16C;
  if ((c & needed) != needed) return false;
  unsigned saved = 0, high = 0;
  __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  if ((saved & 6) != 6) return false;  // the system keeps XMM and YMM registers
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2);
}

}  // namespace

const monotape::Kernels* monotape::avx2_kernels() { return has_avx2() ? &avx2::kKernels : nullptr; }
#else
const monotape::Kernels* monotape::avx2_kernels() { return nullptr; }
#endif

// What an x86 processor has, as far as the system keeps the registers for it.
#pragma once

namespace monotape {

struct FeaturesX86 {
  bool avx2 = false;         // with FMA and F16C
  bool avx_vnni = false;     // and dot products of bytes
  bool avx512_vnni = false;  // the same with AVX-512, also in registers of 256 bits
};

// Compiled without the instructions that it looks for.
FeaturesX86 features_x86();

}  // namespace monotape

// The kernels for x86 machines with the dot products of AVX-512 (VNNI), in registers of 256 bits.
#include "kernels.h"

#if defined(__AVX512VNNI__)  // build.py: where the compiler knows them
#include "features_x86.h"

#define MONOTAPE_ISA avx512
#define MONOTAPE_ISA_NAME "avx512"
#define MONOTAPE_VNNI _mm256_dpbusd_epi32
#include "simd_avx2.h"

#include "kernels_impl.h"

const monotape::Kernels* monotape::avx512_kernels() { return features_x86().avx512_vnni ? &avx512::kKernels : nullptr; }
#else
const monotape::Kernels* monotape::avx512_kernels() { return nullptr; }
#endif

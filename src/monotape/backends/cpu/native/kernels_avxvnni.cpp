// The kernels for x86 machines with the dot products of AVX-VNNI.
#include "kernels.h"

#if defined(__AVXVNNI__)  // build.py: where the compiler knows them
#include "features_x86.h"

#define MONOTAPE_ISA avxvnni
#define MONOTAPE_ISA_NAME "avxvnni"
#define MONOTAPE_VNNI _mm256_dpbusd_avx_epi32
#include "simd_avx2.h"

#include "kernels_impl.h"

const monotape::Kernels* monotape::avxvnni_kernels() { return features_x86().avx_vnni ? &avxvnni::kKernels : nullptr; }
#else
const monotape::Kernels* monotape::avxvnni_kernels() { return nullptr; }
#endif

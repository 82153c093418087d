// The kernels for x86 machines with AVX2, FMA and F16C.
#include "kernels.h"

#if defined(__x86_64__)
#include "features_x86.h"

#define MONOTAPE_ISA avx2
#define MONOTAPE_ISA_NAME "avx2"
#include "simd_avx2.h"

#include "kernels_impl.h"

const monotape::Kernels* monotape::avx2_kernels() { return features_x86().avx2 ? &avx2::kKernels : nullptr; }
#else
const monotape::Kernels* monotape::avx2_kernels() { return nullptr; }
#endif

// The kernels for Arm machines with dot-product instructions.
#include "kernels.h"

#if defined(__aarch64__)
#define MONOTAPE_ISA neon
#define MONOTAPE_ISA_NAME "neon"
#define MONOTAPE_OWN_DOTS  // dots_neon.h
#include "simd_neon.h"

#include "kernels_impl.h"

#if defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
static bool machine_has_them() { return getauxval(AT_HWCAP) & HWCAP_ASIMDDP; }
#else
static bool machine_has_them() { return true; }  // every 64-bit Apple desktop chip
#endif

const monotape::Kernels* monotape::neon_kernels() { return machine_has_them() ? &neon::kKernels : nullptr; }
#else
const monotape::Kernels* monotape::neon_kernels() { return nullptr; }
#endif

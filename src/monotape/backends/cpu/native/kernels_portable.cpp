// The kernels for machines whose instructions we do not know.
#define MONOTAPE_ISA portable
#define MONOTAPE_ISA_NAME "portable"
#include "simd_portable.h"

#include "kernels_impl.h"

const monotape::Kernels& monotape::portable_kernels() { return portable::kKernels; }

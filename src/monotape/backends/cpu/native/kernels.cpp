// Chooses the kernels for the machine it runs on.
#include "kernels.h"

#include <cstring>

namespace monotape {

const Kernels* choose_kernels(const char* name) {
  const Kernels* sets[] = {neon_kernels(), avx512_kernels(), avxvnni_kernels(), avx2_kernels(), &portable_kernels()};
  for (const Kernels* set : sets)
    if (set && (!name || !*name || std::strcmp(set->name, name) == 0)) return set;
  return nullptr;
}

}  // namespace monotape

// The machine of the host: the one instruction of machine/cdna3_products.h, and what machine/cdna3.h says of the hardware.
#pragma once

namespace monotape {

#define MONOTAPE_UNIT "machine/cdna3_unit.h"
#define MONOTAPE_GROUPS "machine/cdna3_groups.h"
constexpr int kSharedMemory = 64 * 1024 - 128;
constexpr bool kFewRegisters = true;

// The product of a whole wave, from the fragments that the instruction documents: lane l has row (column) l % 16 of a (b)
// and values 4 * (l / 16) onwards of k.
template <bool Float16>
inline void multiply_wave(host::Warp& warp, int slot) {
  float a[16][16], b[16][16];
  for (int lane = 0; lane < 64; lane++)
    for (int i = 0; i < 2; i++) {
      const uint32_t* word = warp.operand[slot][lane];
      const int at = lane % 16, k = lane / 16 * 4 + 2 * i;
      a[at][k] = low_half<Float16>(word[i]), a[at][k + 1] = high_half<Float16>(word[i]);
      b[at][k] = low_half<Float16>(word[2 + i]), b[at][k + 1] = high_half<Float16>(word[2 + i]);
    }
  for (int lane = 0; lane < 64; lane++)
    for (int i = 0; i < 4; i++) {
      float sum = 0;
      for (int k = 0; k < 16; k++) sum += a[lane / 16 * 4 + i][k] * b[lane % 16][k];
      warp.result[slot][lane][i] = sum;
    }
}
template <bool Float16>
inline void multiply_slots(float* c, uint2 a, uint2 b) {
  const int slot = host::turn(), lane = machine->current->lane();
  host::Warp& warp = machine->block().warp[machine->current->warp()];
  const uint32_t words[4] = {a.x, a.y, b.x, b.y};
  memcpy(warp.operand[slot][lane], words, sizeof(words));
  host::come_together(host::Collective::multiply, [slot](host::Warp& w) { multiply_wave<Float16>(w, slot); });
  for (int i = 0; i < 4; i++) c[i] += warp.result[slot][lane][i];
}

}  // namespace monotape

#include "machine/cdna3_products.h"

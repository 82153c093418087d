// Formats of weights. A stage's tape has a format (plan.h names those in use); `Stored` says how a block of eight rows and
// 32 values of k lies in a page, and how it becomes the operand of a product: 16 bytes a lane, row lane / 4, values
// 8 * (lane % 4) onwards. A new format is one header with a specialisation, and an entry in plan/gpu.py: GPU_FORMATS.
//
//   kFloat16        whether its operands are fp16; else bf16
//   kBlockBytes     of a block on the tape
//   kAsMultiplied   whether a lane's 16 bytes of a block are the operand as they lie
//   operand(word)   from a lane's stored bytes to its operand
//   value(block, row, k)         one value, for an embedding that is read off the head's tape
//   values(block, row, k, out)   eight of them; k is a multiple of eight
#pragma once
#include "formats/halves.h"
#include "plan/walk.h"

namespace monotape {

template <Format F>
struct Stored;

// What all 16-bit floats have in common.
template <bool Float16>
struct StoredHalf {
  static constexpr bool kFloat16 = Float16, kAsMultiplied = true;
  static constexpr int kBlockBytes = kTileRows * kBlockK * 2;
  static __device__ __forceinline__ uint4 operand(uint4 word) { return word; }
  static __device__ __forceinline__ float value(const uint8_t* block, int row, int k) {
    return widen<Float16>(reinterpret_cast<const uint16_t*>(block)[row * kBlockK + k]);
  }
  static __device__ __forceinline__ void values(const uint8_t* block, int row, int k, float (&out)[8]) {
    unpack8<Float16>(reinterpret_cast<const uint4*>(block)[(row * kBlockK + k) / 8], out);
  }
};

}  // namespace monotape

#include MONOTAPE_FORMAT_0
#ifdef MONOTAPE_FORMAT_1
#include MONOTAPE_FORMAT_1
#endif
#ifdef MONOTAPE_FORMAT_2
#include MONOTAPE_FORMAT_2
#endif
#ifdef MONOTAPE_FORMAT_3
#include MONOTAPE_FORMAT_3
#endif

namespace monotape {

template <int F = 0>
__host__ __device__ constexpr int format_block_bytes(Format format) {
  if constexpr (F + 1 == kFormats) return Stored<static_cast<Format>(F)>::kBlockBytes;
  else return static_cast<int>(format) == F ? Stored<static_cast<Format>(F)>::kBlockBytes : format_block_bytes<F + 1>(format);
}
template <int F = 0>
__host__ __device__ constexpr bool format_is_float16(Format format) {
  if constexpr (F + 1 == kFormats) return Stored<static_cast<Format>(F)>::kFloat16;
  else return static_cast<int>(format) == F ? Stored<static_cast<Format>(F)>::kFloat16 : format_is_float16<F + 1>(format);
}
// Whether products of a stage take fp16 operands; its input is packed accordingly.
__device__ __forceinline__ bool takes_float16(Stage stage) {
  return of_stage(stage, [](StageRow row) { return format_is_float16(product(row.product).format); });
}
__host__ __device__ constexpr bool one_kind_of_half() {
  for (int i = 0; i < kProducts; i++)
    if (format_is_float16(product(i).format) != kFloat16) return false;
  return true;
}
__host__ __device__ constexpr bool one_format() {
  for (int i = 0; i < kProducts; i++)
    if (product(i).format != static_cast<Format>(0)) return false;
  return true;
}
constexpr bool kOneFormat = one_format();
// Whether every stage's products take halves of the kind that activations are.
constexpr bool kOneHalf = one_kind_of_half();

}  // namespace monotape

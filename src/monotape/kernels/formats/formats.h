// Formats of weights. A stage's tape has a format (plan.h names those in use); `Stored` says how a block of eight rows and
// 32 values of k lies in a page, and how it becomes the operand of a product: 16 bytes a lane, row lane / 4, values
// 8 * (lane % 4) onwards. A new format is an entry of GPU_FORMATS (plan/gpu.py), and a type in a header of
// its own, or codes and scales of a new kind in codes.h and scales.h.
//
//   kFloat16        whether its operands are fp16; else bf16
//   kSub            groups of 32 values of k in a block
//   kBlockBytes     of a block on the tape, scales included
//   kAsMultiplied   whether a lane's 16 bytes of a block are the operand as they lie
//   kGrouped        whether values have scales along k: groups.h
//   kVectors        words of 16 bytes that a lane has of a block, those of all lanes together
//   kExtra          words of 32 bits that a lane has besides
//   kInputExponent, kOutputExponent   of two: activations are multiplied by it before their product with operands of a token,
//                   and the product by it
//   kInteger        whether tokens' products are of integers: integers.h
//   kSides          whether sums of blocks that lie side by side in a warp are apart: machine/cdna3_groups.h
//   row_operand(block, lane, group)   the same for products of rows, scales included; not where kAsMultiplied
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
  static constexpr bool kFloat16 = Float16, kAsMultiplied = true, kGrouped = false, kShifts = false, kSlots = false, kInteger = false, kSides = false;
  static constexpr int kSub = 1, kBlockBytes = kTileRows * kBlockK * 2, kInputExponent = 0, kOutputExponent = 0, kVectors = 1, kExtra = 0, kHalves = 1, kInputs = 1;
  static __device__ __forceinline__ float value(const uint8_t* block, int row, int k) {
    return widen<Float16>(reinterpret_cast<const uint16_t*>(block)[row * kBlockK + k]);
  }
  static __device__ __forceinline__ void values(const uint8_t* block, int row, int k, float (&out)[8]) {
    unpack8<Float16>(reinterpret_cast<const uint4*>(block)[(row * kBlockK + k) / 8], out);
  }
};

__host__ __device__ constexpr float two_to(int exponent) { return exponent == 0 ? 1 : 2 * two_to(exponent - 1); }

}  // namespace monotape

#ifdef MONOTAPE_FORMAT_0
#include MONOTAPE_FORMAT_0
#endif
#ifdef MONOTAPE_FORMAT_1
#include MONOTAPE_FORMAT_1
#endif

namespace monotape {

MONOTAPE_STORED  // plan.h: a specialisation of Stored for each format in use

// Facts of a format that is not known as a type.
struct FormatRow {
  bool float16, integer;
  int sub, block_bytes, input_exponent, output_exponent, vectors, extra;
};
template <int F = 0>
__host__ __device__ constexpr FormatRow format_row(Format format) {
  using Weight = Stored<static_cast<Format>(F)>;
  constexpr FormatRow kRow = {Weight::kFloat16, Weight::kInteger, Weight::kSub, Weight::kBlockBytes, Weight::kInputExponent,
                              Weight::kOutputExponent, Weight::kVectors, Weight::kExtra};
  if constexpr (F + 1 == kFormats) return kRow;
  else return static_cast<int>(format) == F ? kRow : format_row<F + 1>(format);
}
__host__ __device__ constexpr int format_block_bytes(Format format) { return format_row(format).block_bytes; }
__host__ __device__ constexpr bool format_is_float16(Format format) { return format_row(format).float16; }
__host__ __device__ constexpr FormatRow format_of(StageRow row) { return format_row(product(row.product).format); }
// A dense model whose layers have codes: its warps spend most of a step on unpacking, and all of their registers.
__host__ __device__ constexpr bool dense_codes() {
  for (int i = 0; i < kLayerSteps; i++)
    if (format_of(stage_row(i)).sub > 1) return kExperts == 0;
  return false;
}
// Whether registers are short: all through on some machines, and where dense layers unpack codes. Then all stages share one copy of
// the code, whose further copies would take more time to fetch than they save; warps look for pages before they store sums;
// and they do not learn when to look for words.
constexpr bool kShortOfRegisters = kFewRegisters || dense_codes();
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
__host__ __device__ constexpr bool one_group() {
  for (int i = 0; i < kProducts; i++)
    if (format_row(product(i).format).sub != 1) return false;
  return true;
}
// Whether blocks of all stages have 32 values of k.
constexpr bool kOneGroup = one_group();
__host__ __device__ constexpr bool scales_inputs() {
  for (int i = 0; i < kProducts; i++)
    if (format_row(product(i).format).input_exponent) return true;
  return false;
}
constexpr bool kScalesInputs = scales_inputs();
// As `two_to`, for an exponent that is a constant only after inlining: that would stay a call in some compilers.
__device__ __forceinline__ float power_of(int exponent) { return float_of(static_cast<uint32_t>(127 + exponent) << 23); }
// What a stage's activations are multiplied by before its product.
__device__ __forceinline__ float input_factor(Stage stage) {
  return of_stage(stage, [](StageRow row) { return power_of(format_of(row).input_exponent); });
}
__device__ __forceinline__ float output_factor(Stage stage) {
  return of_stage(stage, [](StageRow row) { return power_of(format_of(row).output_exponent); });
}
__host__ __device__ constexpr bool integer_products() {
  for (int i = 0; i < kProducts; i++)
    if (format_row(product(i).format).integer) return true;
  return false;
}
// Whether some stages' products are of integers.
constexpr bool kIntegerProducts = integer_products();
__device__ __forceinline__ bool takes_integers(Stage stage) {
  return kIntegerProducts && of_stage(stage, [](StageRow row) { return format_of(row).integer; });
}
__host__ __device__ constexpr bool scales_rows() {
  for (int i = 0; i < kMatrixStages; i++)
    if (stage_row(i).scale != kNoVector) return true;
  return false;
}
// Whether some rows have scales of their own.
constexpr bool kScalesRows = scales_rows();
// Whether sums of some stages need a factor, their rows' or their format's.
constexpr bool kScalesOutputs = kScalesRows || kScalesInputs;
// Whether every stage's products take halves of the kind that activations are.
constexpr bool kOneHalf = one_kind_of_half();

}  // namespace monotape

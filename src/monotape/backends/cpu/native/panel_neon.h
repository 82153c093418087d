// A tile times a panel of four activation rows, for the two vector pipes of an Arm core.
//
// A core such as the Neoverse-N1 accepts two vector instructions a cycle and no more, so what counts is how many
// vector instructions a block of 32 takes: 128 dot products and 24 others here. Three things keep the 24 so few:
//   1. Sums start as the bits of kSumOffset (simd_neon.h), so that none has to be converted.
//   2. The scale of an activation block is a power of two. So scale * (256 * high + low) takes two multiply-adds, of
//      which the first takes the offset off both halves exactly, and the second rounds as the conversion would.
//   3. What can come from memory does (initial sums, offsets): loads have pipes of their own.
// It is assembly because the order matters: cycles without two vector instructions are lost, so loads stand one by one
// between them. Compilers group loads and make chains of dependent sums.
#pragma once
#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace monotape::MONOTAPE_ISA {

// The activations of a group, of four rows: [k / 4][half][row][4], where x = 256 * high + low and half 0 is high.
template <int Group>
struct PanelBlock {
  int8_t values[Group / 4][2][kPanelRows][4];
  float high_scales[kPanelRows];  // 256 * scale
  float scales[kPanelRows];       // powers of two
  float offsets[kPanelRows][4];   // -257 * kSumOffset * scale, four times
  float sums[kPanelRows];         // of the values as they are
};
static_assert(sizeof(PanelBlock<32>) == 368 && sizeof(PanelBlock<16>) == 240);

constexpr bool kRowsInPanels = false;  // halves and rows alternate: panel_product() alone reads that

// Unpacked codes as panel_product() reads them: in the lowest bits, as they are or less their centre.
template <int Bits, bool Centred>
static inline bytes16 for_panels(bytes16 codes) {
  if constexpr (Bits == 8) {
    return codes;  // always centred
  } else if constexpr (Centred) {
    return vreinterpretq_u8_s8(vshrq_n_s8(vreinterpretq_s8_u8(codes), 8 - Bits));
  } else {
    return vshrq_n_u8(veorq_u8(codes, vdupq_n_u8(0x80)), 8 - Bits);
  }
}
template <int Bits, bool Centred>
static inline bytes32 for_panels(bytes32 codes) {
  return {for_panels<Bits, Centred>(codes.low), for_panels<Bits, Centred>(codes.high)};
}

// Codes have neither shift nor lack anything here: for_panels().
template <int Group>
static inline void put_panel_row(const int16_t* x, float scale, int, int, int row, PanelBlock<Group>& block) {
  int32_t sum = 0;
  for (int k8 = 0; k8 < Group / 8; k8++) {
    const int16x8_t eight = vld1q_s16(x + 8 * k8);
    const int32x2_t high = vreinterpret_s32_s8(vrshrn_n_s16(eight, 8)), low = vreinterpret_s32_s8(vmovn_s16(eight));
    vst1_lane_s32(reinterpret_cast<int32_t*>(block.values[2 * k8][0][row]), high, 0);
    vst1_lane_s32(reinterpret_cast<int32_t*>(block.values[2 * k8][1][row]), low, 0);
    vst1_lane_s32(reinterpret_cast<int32_t*>(block.values[2 * k8 + 1][0][row]), high, 1);
    vst1_lane_s32(reinterpret_cast<int32_t*>(block.values[2 * k8 + 1][1][row]), low, 1);
    sum += vaddlvq_s16(eight);
  }
  block.high_scales[row] = 256 * scale;
  block.scales[row] = scale;
  block.sums[row] = scale * static_cast<float>(sum);
  vst1q_f32(block.offsets[row], vdupq_n_f32(-257 * kSumOffset * scale));
}
template <int Group>
static inline float panel_sum(const PanelBlock<Group>& block, int row) {
  return block.sums[row];
}

// Registers: 0-7 sums of high halves (row 0 lanes 0-3, row 0 lanes 4-7, row 1 ...), 8-15 of low halves, 16-23 results.
// 24-31: weights and activations of one step of four k, then of the next; at a block's end scales and temporaries.
#define MT_LOAD(reg, base, at) "ldr q" #reg ", [%[" #base "], #" #at "]\n"
#define MT_DOT(sum, w, x, lane) "sdot v" #sum ".4s, v" #w ".16b, v" #x ".4b[" #lane "]\n"
#define MT_FMA(sum, a, b) "fmla v" #sum ".4s, v" #a ".4s, v" #b ".4s\n"
#define MT_FMA_BY(sum, a, b, lane) "fmla v" #sum ".4s, v" #a ".4s, v" #b ".s[" #lane "]\n"
// Sixteen dot products: two registers of weights with the high halves, then with the low halves, of four rows.
#define MT_STEP(w0, w1, high, low, load0, load1, load2, load3)                                     \
  MT_DOT(0, w0, high, 0) MT_DOT(2, w0, high, 1) MT_DOT(4, w0, high, 2) MT_DOT(6, w0, high, 3) load0 \
  MT_DOT(1, w1, high, 0) MT_DOT(3, w1, high, 1) MT_DOT(5, w1, high, 2) MT_DOT(7, w1, high, 3) load1 \
  MT_DOT(8, w0, low, 0) MT_DOT(10, w0, low, 1) MT_DOT(12, w0, low, 2) MT_DOT(14, w0, low, 3) load2  \
  MT_DOT(9, w1, low, 0) MT_DOT(11, w1, low, 1) MT_DOT(13, w1, low, 2) MT_DOT(15, w1, low, 3) load3
#define MT_EVEN(next_w0, next_w1, next_high, next_low)                                                  \
  MT_STEP(24, 25, 26, 27, MT_LOAD(28, w, next_w0), MT_LOAD(30, x, next_high), MT_LOAD(29, w, next_w1), \
          MT_LOAD(31, x, next_low))
#define MT_ODD(next_w0, next_w1, next_high, next_low)                                                   \
  MT_STEP(28, 29, 30, 31, MT_LOAD(24, w, next_w0), MT_LOAD(26, x, next_high), MT_LOAD(25, w, next_w1), \
          MT_LOAD(27, x, next_low))
// A line of the panel four blocks ahead, out of the L2 cache.
#define MT_AHEAD(at) "prfm pldl1keep, [%[x], #" #at "]\n"
// The first step of a block: low sums get their initial value between the dot products of the high ones.
#define MT_FIRST                                                                                      \
  MT_DOT(0, 24, 26, 0) MT_LOAD(8, c, 0) MT_DOT(2, 24, 26, 1) MT_LOAD(10, c, 0) MT_DOT(4, 24, 26, 2)   \
  MT_LOAD(12, c, 0) MT_DOT(6, 24, 26, 3) MT_LOAD(14, c, 0) MT_DOT(1, 25, 26, 0) MT_LOAD(9, c, 0)      \
  MT_DOT(3, 25, 26, 1) MT_LOAD(11, c, 0) MT_DOT(5, 25, 26, 2) MT_LOAD(13, c, 0) MT_DOT(7, 25, 26, 3)  \
  MT_LOAD(15, c, 0) MT_DOT(8, 24, 27, 0) MT_DOT(10, 24, 27, 1) MT_LOAD(28, w, 32) MT_DOT(12, 24, 27, 2) \
  MT_DOT(14, 24, 27, 3) MT_LOAD(30, x, 32) MT_DOT(9, 25, 27, 0) MT_DOT(11, 25, 27, 1) MT_LOAD(29, w, 48) \
  MT_DOT(13, 25, 27, 2) MT_DOT(15, 25, 27, 3) MT_LOAD(31, x, 48)
// Results of four rows, the first loads, and initial values of the high sums.
#define MT_ENTER                                                                                 \
  "ldp q16, q17, [%[from]]\n add %[from], %[from], %[from_stride]\n"                             \
  "ldp q18, q19, [%[from]]\n add %[from], %[from], %[from_stride]\n"                             \
  "ldp q20, q21, [%[from]]\n add %[from], %[from], %[from_stride]\n"                             \
  "ldp q22, q23, [%[from]]\n"                                                                    \
  MT_LOAD(24, w, 0) MT_LOAD(26, x, 0) MT_LOAD(25, w, 16) MT_LOAD(27, x, 16)                      \
  MT_LOAD(0, c, 0) MT_LOAD(2, c, 0) MT_LOAD(4, c, 0) MT_LOAD(6, c, 0)                            \
  MT_LOAD(1, c, 0) MT_LOAD(3, c, 0) MT_LOAD(5, c, 0) MT_LOAD(7, c, 0)                            \
  "1:\n"
// The last step of a block, whose activations take `values` bytes of `size`. Rows 0 and 1, then 2 and 3. After the last
// block the next one's first loads read this one again: nothing past the end is read.
#define MT_END(values, size)                                                                              \
  MT_STEP(28, 29, 30, 31, MT_LOAD(27, x, values), MT_LOAD(26, x, values + 16), MT_LOAD(24, s, 0), MT_LOAD(25, s, 16)) \
  MT_LOAD(28, x, values + 32) MT_LOAD(29, x, values + 32) MT_FMA_BY(28, 0, 27, 0) MT_FMA_BY(29, 1, 27, 0) \
  MT_LOAD(30, x, values + 48) MT_LOAD(31, x, values + 48) MT_FMA_BY(30, 2, 27, 1) MT_FMA_BY(31, 3, 27, 1) \
  MT_FMA_BY(28, 8, 26, 0) MT_LOAD(0, c, 0) MT_FMA_BY(29, 9, 26, 0) MT_LOAD(1, c, 0)                       \
  MT_FMA_BY(30, 10, 26, 1) MT_LOAD(2, c, 0) MT_FMA_BY(31, 11, 26, 1) MT_LOAD(3, c, 0)                     \
  MT_FMA(16, 28, 24) MT_LOAD(28, x, values + 64) MT_FMA(17, 29, 25) MT_LOAD(29, x, values + 64)           \
  MT_FMA(18, 30, 24) MT_LOAD(30, x, values + 80) MT_FMA(19, 31, 25) MT_LOAD(31, x, values + 80)           \
  MT_FMA_BY(28, 4, 27, 2) "subs %w[n], %w[n], #1\n" MT_FMA_BY(29, 5, 27, 2) "add %[next], %[x], #" #size "\n" \
  MT_FMA_BY(30, 6, 27, 3) "csel %[x], %[next], %[x], ne\n" MT_FMA_BY(31, 7, 27, 3) MT_LOAD(27, x, 16)     \
  MT_FMA_BY(28, 12, 26, 2) MT_LOAD(4, c, 0) MT_FMA_BY(29, 13, 26, 2) "add %[next], %[w], %[w_stride]\n"   \
  MT_FMA_BY(30, 14, 26, 3) "csel %[w], %[next], %[w], ne\n" MT_FMA_BY(31, 15, 26, 3) MT_LOAD(26, x, 0)    \
  MT_FMA(20, 28, 24) MT_LOAD(6, c, 0) MT_FMA(22, 30, 24) MT_LOAD(24, w, 0) MT_LOAD(5, c, 0)               \
  MT_FMA(21, 29, 25) MT_LOAD(7, c, 0) MT_FMA(23, 31, 25) MT_LOAD(25, w, 16)                               \
  "add %[s], %[s], #32\n"                                                                                 \
  "b.ne 1b\n"                                                                                             \
  "stp q16, q17, [%[to]]\n add %[to], %[to], %[to_stride]\n"                                              \
  "stp q18, q19, [%[to]]\n add %[to], %[to], %[to_stride]\n"                                              \
  "stp q20, q21, [%[to]]\n add %[to], %[to], %[to_stride]\n"                                              \
  "stp q22, q23, [%[to]]\n"
#define MT_OPERANDS                                                                                                 \
  : [w] "+r"(codes), [x] "+r"(panel), [s] "+r"(scales), [n] "+r"(blocks), [next] "+r"(next), [from] "+r"(from),     \
    [to] "+r"(to)                                                                                                   \
  : [c] "r"(kInitial), [w_stride] "r"(stride), [from_stride] "r"(from_stride), [to_stride] "r"(to_stride)           \
  : "memory", "cc", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14",  \
    "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", \
    "v31"

// Adds `blocks` blocks of int8 ([k / 4][row][4], `stride` bytes apart) to the results at `from` and stores them at `to`,
// kPanelRows rows of eight floats; strides of results in floats. `scales`: eight a block, the tile's.
template <int Group>
static inline void panel_product(const uint8_t* codes, size_t stride, int blocks, const PanelBlock<Group>* panel,
                                 const float* scales, const float* from, size_t from_stride, float* to, size_t to_stride) {
  alignas(16) static const float kInitial[4] = {kSumOffset, kSumOffset, kSumOffset, kSumOffset};
  const void* next = nullptr;
  from_stride *= sizeof(float);
  to_stride *= sizeof(float);
  if constexpr (Group == 32)
    asm volatile(MT_ENTER MT_FIRST
      MT_ODD(64, 80, 64, 80) MT_AHEAD(1472)
      MT_EVEN(96, 112, 96, 112) MT_AHEAD(1536)
      MT_ODD(128, 144, 128, 144) MT_AHEAD(1600)
      MT_EVEN(160, 176, 160, 176) MT_AHEAD(1664)
      MT_ODD(192, 208, 192, 208) MT_AHEAD(1728)
      MT_EVEN(224, 240, 224, 240) MT_AHEAD(1792)
      MT_END(256, 368) MT_OPERANDS);
  else
    asm volatile(MT_ENTER MT_FIRST
      MT_ODD(64, 80, 64, 80) MT_AHEAD(960) MT_AHEAD(1024)
      MT_EVEN(96, 112, 96, 112) MT_AHEAD(1088) MT_AHEAD(1152)
      MT_END(128, 240) MT_OPERANDS);
}

#undef MT_LOAD
#undef MT_DOT
#undef MT_FMA
#undef MT_FMA_BY
#undef MT_STEP
#undef MT_EVEN
#undef MT_ODD
#undef MT_AHEAD
#undef MT_FIRST
#undef MT_ENTER
#undef MT_END
#undef MT_OPERANDS

}  // namespace monotape::MONOTAPE_ISA

// Dot products of 8 rows of packed codes with a group of one row's activations, for the two vector pipes of an Arm core.
//
// What counts is how many vector instructions a group takes, and that no cycle passes without two of them (panel_neon.h
// says more). So it is assembly: instructions that unpack the next registers, and loads, stand one by one between dot
// products. Codes are in the highest bits of their bytes (codes_impl.h).
#pragma once
#include <arm_neon.h>

#include <cstdint>

#include "formats.h"

namespace monotape::MONOTAPE_ISA {

#define MT_LOAD(reg, base, at) "ldr %q[" #reg "], [%[" #base "], #" #at "]\n"
#define MT_DOT(sum, w, x, lane) "sdot %[" #sum "].4s, %[" #w "].16b, %[" #x "].4b[" #lane "]\n"
#define MT_MASK(out, in) "and %[" #out "].16b, %[" #in "].16b, %[mask].16b\n"
#define MT_SHIFT(out, in, by) "shl %[" #out "].16b, %[" #in "].16b, #" #by "\n"
#define MT_INSERT(out, in, by) "sli %[" #out "].16b, %[" #in "].16b, #" #by "\n"
// Four k of 8 rows with both halves of the activations; four instructions go between.
#define MT_FOUR(w0, w1, high, low, lane, one, two, three, four)                          \
  MT_DOT(h0, w0, high, lane) one MT_DOT(h1, w1, high, lane) two MT_DOT(l0, w0, low, lane) three \
  MT_DOT(l1, w1, low, lane) four
#define MT_TOTAL(factors_at)                                                                             \
  "ldr %q[f], [%[x], #" #factors_at "]\n ldr %q[t0], [%[x], #" #factors_at "+16]\n"                      \
  "ldr %q[t1], [%[x], #" #factors_at "+16]\n"                                                            \
  "fmla %[t0].4s, %[h0].4s, %[f].s[0]\n fmla %[t1].4s, %[h1].4s, %[f].s[0]\n"                            \
  "fmla %[t0].4s, %[l0].4s, %[f].s[1]\n fmla %[t1].4s, %[l1].4s, %[f].s[1]\n"
#define MT_SUMS(at)                                                                                      \
  "ldr %q[h0], [%[x], #" #at "]\n ldr %q[h1], [%[x], #" #at "]\n"                                        \
  "ldr %q[l0], [%[x], #" #at "+16]\n ldr %q[l1], [%[x], #" #at "+16]\n"
#define MT_OUT(name) [name] "=&w"(name)
#define MT_OUTPUTS MT_OUT(h0), MT_OUT(h1), MT_OUT(l0), MT_OUT(l1), MT_OUT(f), MT_OUT(t0), MT_OUT(t1)
#define MT_MEMORY                                                              \
  [c] "r"(codes), [x] "r"(&x), "m"(x), "m"(*reinterpret_cast<const CodeBytes*>(codes))

template <int Bits, int Group>
struct PackedBytes {
  uint8_t bytes[Group * kTileRows * Bits / 8];
};

// Offsets within InputBlock<32>: high 0, low 32, factors 64, offset 80, initial 96 and 112.
template <int Bits>
static inline __attribute__((always_inline)) f32x8 dots_of(const uint8_t* codes, const InputBlock<32>& x) {
  static_assert(sizeof(InputBlock<32>) == 128);
  using CodeBytes = PackedBytes<Bits, 32>;
  int32x4_t h0, h1, l0, l1;
  float32x4_t f, t0, t1;
  int8x16_t xh, xl, yh, yl, p0, p1, p2, p3, p4, w0, w1, w2, w3, w4, w5, w6, w7;
  if constexpr (Bits == 4) {
    // One packed register: rows 0 to 3 in the low halves of its bytes, rows 4 to 7 in the high ones.
#define MT_STEP(a, b, p, high, low, lane, next_a, next_b, next_p, load) \
  MT_FOUR(a, b, high, low, lane, MT_SHIFT(next_a, next_p, 4), MT_MASK(next_b, next_p), load, "")
    asm(MT_LOAD(p0, c, 0) MT_LOAD(xh, x, 0) MT_SUMS(96) MT_LOAD(xl, x, 32) MT_LOAD(p1, c, 16)
        MT_SHIFT(w0, p0, 4) MT_MASK(w1, p0) MT_LOAD(p0, c, 32) MT_LOAD(yh, x, 16) MT_LOAD(yl, x, 48)
        MT_STEP(w0, w1, p0, xh, xl, 0, w2, w3, p1, MT_LOAD(p1, c, 48))
        MT_STEP(w2, w3, p1, xh, xl, 1, w0, w1, p0, MT_LOAD(p0, c, 64))
        MT_STEP(w0, w1, p0, xh, xl, 2, w2, w3, p1, MT_LOAD(p1, c, 80))
        MT_STEP(w2, w3, p1, xh, xl, 3, w0, w1, p0, MT_LOAD(p0, c, 96))
        MT_STEP(w0, w1, p0, yh, yl, 0, w2, w3, p1, MT_LOAD(p1, c, 112))
        MT_STEP(w2, w3, p1, yh, yl, 1, w0, w1, p0, "")
        MT_STEP(w0, w1, p0, yh, yl, 2, w2, w3, p1, "")
        MT_FOUR(w2, w3, yh, yl, 3, "", "", "", "")
        MT_TOTAL(64)
        : MT_OUTPUTS, MT_OUT(xh), MT_OUT(xl), MT_OUT(yh), MT_OUT(yl), MT_OUT(p0), MT_OUT(p1), MT_OUT(w0), MT_OUT(w1),
          MT_OUT(w2), MT_OUT(w3)
        : MT_MEMORY, [mask] "w"(vdupq_n_u8(0xf0)));
#undef MT_STEP
  } else if constexpr (Bits == 5) {
    // Sixteen k: five packed registers, and three in their lowest bits. L1 to L5 load the next five.
#define MT_SIXTEEN(high, low, L1, L2, L3, L4, L5)                                                                  \
  MT_MASK(w0, p0) MT_MASK(w1, p1)                                                                                  \
  MT_FOUR(w0, w1, high, low, 0, MT_MASK(w2, p2), MT_MASK(w3, p3), MT_SHIFT(w5, p3, 2), MT_INSERT(w5, p0, 5) L1)    \
  MT_FOUR(w2, w3, high, low, 1, MT_MASK(w4, p4), MT_MASK(w5, w5), MT_SHIFT(w6, p4, 2), MT_INSERT(w6, p1, 5) L2)    \
  MT_FOUR(w4, w5, high, low, 2, MT_SHIFT(w7, p4, 3) L3, MT_MASK(w6, w6), MT_INSERT(w7, p3, 4) L4, MT_INSERT(w7, p2, 5) L5) \
  MT_FOUR(w6, w7, high, low, 3, "", "", "", "")
    asm(MT_LOAD(p0, c, 0) MT_LOAD(p1, c, 16) MT_LOAD(xh, x, 0) MT_SUMS(96) MT_LOAD(p2, c, 32) MT_LOAD(p3, c, 48)
        MT_LOAD(xl, x, 32) MT_LOAD(p4, c, 64) MT_LOAD(yh, x, 16) MT_LOAD(yl, x, 48)
        MT_SIXTEEN(xh, xl, MT_LOAD(p0, c, 80), MT_LOAD(p1, c, 96), MT_LOAD(p4, c, 144), MT_LOAD(p3, c, 128),
                   MT_LOAD(p2, c, 112))
        MT_SIXTEEN(yh, yl, "", "", "", "", "")
        MT_TOTAL(64)
        : MT_OUTPUTS, MT_OUT(xh), MT_OUT(xl), MT_OUT(yh), MT_OUT(yl), MT_OUT(p0), MT_OUT(p1), MT_OUT(p2), MT_OUT(p3),
          MT_OUT(p4), MT_OUT(w0), MT_OUT(w1), MT_OUT(w2), MT_OUT(w3), MT_OUT(w4), MT_OUT(w5), MT_OUT(w6), MT_OUT(w7)
        : MT_MEMORY, [mask] "w"(vdupq_n_u8(0xf8)));
#undef MT_SIXTEEN
  } else {
    static_assert(Bits == 8);
    asm(MT_LOAD(w0, c, 0) MT_LOAD(xh, x, 0) MT_SUMS(96) MT_LOAD(w1, c, 16) MT_LOAD(xl, x, 32)
        MT_LOAD(w2, c, 32) MT_LOAD(w3, c, 48)
        MT_FOUR(w0, w1, xh, xl, 0, MT_LOAD(yh, x, 16), MT_LOAD(yl, x, 48), MT_LOAD(w0, c, 64), MT_LOAD(w1, c, 80))
        MT_FOUR(w2, w3, xh, xl, 1, "", "", MT_LOAD(w2, c, 96), MT_LOAD(w3, c, 112))
        MT_FOUR(w0, w1, xh, xl, 2, "", "", MT_LOAD(w0, c, 128), MT_LOAD(w1, c, 144))
        MT_FOUR(w2, w3, xh, xl, 3, "", "", MT_LOAD(w2, c, 160), MT_LOAD(w3, c, 176))
        MT_FOUR(w0, w1, yh, yl, 0, "", "", MT_LOAD(w0, c, 192), MT_LOAD(w1, c, 208))
        MT_FOUR(w2, w3, yh, yl, 1, "", "", MT_LOAD(w2, c, 224), MT_LOAD(w3, c, 240))
        MT_FOUR(w0, w1, yh, yl, 2, "", "", "", "")
        MT_FOUR(w2, w3, yh, yl, 3, "", "", "", "")
        MT_TOTAL(64)
        : MT_OUTPUTS, MT_OUT(xh), MT_OUT(xl), MT_OUT(yh), MT_OUT(yl), MT_OUT(w0), MT_OUT(w1), MT_OUT(w2), MT_OUT(w3)
        : MT_MEMORY);
  }
  return {t0, t1};
}

// Offsets within InputBlock<16>: high 0, low 16, factors 32, offset 48, initial 64 and 80.
template <int Bits>
static inline __attribute__((always_inline)) f32x8 dots_of(const uint8_t* codes, const InputBlock<16>& x) {
  static_assert(sizeof(InputBlock<16>) == 96);
  using CodeBytes = PackedBytes<Bits, 16>;
  int32x4_t h0, h1, l0, l1;
  float32x4_t f, t0, t1;
  int8x16_t xh, xl, p0, p1, p2, p3, p4, p5, w0, w1, w2, w3, w4, w5, w6, w7;
  if constexpr (Bits == 6) {
    // Eight k: three packed registers, and a fourth in their lowest bits; twice.
    asm(MT_LOAD(p0, c, 0) MT_LOAD(p1, c, 16) MT_LOAD(xh, x, 0) MT_SUMS(64) MT_LOAD(p2, c, 32) MT_LOAD(xl, x, 16)
        MT_MASK(w0, p0) MT_MASK(w1, p1) MT_LOAD(p3, c, 48) MT_LOAD(p4, c, 64) MT_LOAD(p5, c, 80)
        MT_FOUR(w0, w1, xh, xl, 0, MT_MASK(w2, p2), MT_SHIFT(w3, p2, 2), MT_INSERT(w3, p1, 4), MT_INSERT(w3, p0, 6))
        MT_FOUR(w2, w3, xh, xl, 1, MT_MASK(w4, p3), MT_MASK(w5, p4), MT_SHIFT(w7, p5, 2), MT_INSERT(w7, p4, 4))
        MT_FOUR(w4, w5, xh, xl, 2, MT_MASK(w6, p5), MT_INSERT(w7, p3, 6), "", "")
        MT_FOUR(w6, w7, xh, xl, 3, "", "", "", "")
        MT_TOTAL(32)
        : MT_OUTPUTS, MT_OUT(xh), MT_OUT(xl), MT_OUT(p0), MT_OUT(p1), MT_OUT(p2), MT_OUT(p3), MT_OUT(p4), MT_OUT(p5),
          MT_OUT(w0), MT_OUT(w1), MT_OUT(w2), MT_OUT(w3), MT_OUT(w4), MT_OUT(w5), MT_OUT(w6), MT_OUT(w7)
        : MT_MEMORY, [mask] "w"(vdupq_n_u8(0xfc)));
  } else {
    static_assert(Bits == 8);
    asm(MT_LOAD(w0, c, 0) MT_LOAD(xh, x, 0) MT_SUMS(64) MT_LOAD(w1, c, 16) MT_LOAD(xl, x, 16)
        MT_LOAD(w2, c, 32) MT_LOAD(w3, c, 48)
        MT_FOUR(w0, w1, xh, xl, 0, "", "", MT_LOAD(w0, c, 64), MT_LOAD(w1, c, 80))
        MT_FOUR(w2, w3, xh, xl, 1, "", "", MT_LOAD(w2, c, 96), MT_LOAD(w3, c, 112))
        MT_FOUR(w0, w1, xh, xl, 2, "", "", "", "")
        MT_FOUR(w2, w3, xh, xl, 3, "", "", "", "")
        MT_TOTAL(32)
        : MT_OUTPUTS, MT_OUT(xh), MT_OUT(xl), MT_OUT(w0), MT_OUT(w1), MT_OUT(w2), MT_OUT(w3)
        : MT_MEMORY);
  }
  return {t0, t1};
}

template <int Bits, int Group>
static inline __attribute__((always_inline)) void dots_of(const uint8_t* codes, const InputBlock<Group>* x, f32x8 (&y)[1]) {
  y[0] = dots_of<Bits>(codes, *x);
}

#undef MT_LOAD
#undef MT_DOT
#undef MT_MASK
#undef MT_SHIFT
#undef MT_INSERT
#undef MT_FOUR
#undef MT_TOTAL
#undef MT_SUMS
#undef MT_OUT
#undef MT_OUTPUTS
#undef MT_MEMORY

}  // namespace monotape::MONOTAPE_ISA

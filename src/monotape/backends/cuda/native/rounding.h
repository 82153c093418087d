// Rounds rows of floats to codes and scales. weights/rounding.py defines it; sums may differ in their last bits.
#pragma once
#include <cstdint>

namespace monotape {

constexpr int64_t kRoundedTogether = 128;  // rows are padded to a multiple of it, with zeros: no group is cut short

struct Cost {
  double squares = 0, squared_errors = 0;  // of the weights, of what rounding changed
};

// 128 values to codes 0..15 and the float16 scale with the least squared error.
uint16_t round_int4(const float* w, uint8_t* codes, Cost& cost);
// 32 values to codes 1..255 and a float16 scale.
uint16_t round_q8(const float* w, uint8_t* codes, Cost& cost);
// A row to e4m3 and a float32 scale.
float round_fp8(const float* w, int64_t count, uint8_t* codes, Cost& cost);

}  // namespace monotape

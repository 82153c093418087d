#include "rounding.h"

#include <cmath>
#include <cstring>

#include "../../cpu/native/half.h"

namespace monotape {
namespace {

// Four values at a time: what every machine has vectors of.
using Floats = float __attribute__((vector_size(16)));
using Words = uint32_t __attribute__((vector_size(16)));
constexpr int kLanes = 4;
constexpr int kInt4Group = 128, kQ8Group = 32;
constexpr float kEnds[] = {-6.5f, -7.0f, -7.5f, -8.0f, -8.5f, -9.0f, -9.5f, -10.0f};  // rounding.py: INT4_ENDS
constexpr float kRound = 12582912.0f;        // 1.5 * 2^23: adding it rounds to an integer, ties to even
constexpr uint32_t kRoundBits = 0x4b400000;  // its bits, to which that integer was added

Floats load(const float* from) {
  Floats value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
Words bits_of(Floats value) {
  Words bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
Floats floats_of(Words bits) {
  Floats value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
Floats absolute(Floats value) { return floats_of(bits_of(value) & 0x7fffffffu); }
Floats larger(Floats a, Floats b) { return a > b ? a : b; }
Floats bounded(Floats x, float low, float high) {
  const Floats least = Floats{} + low, most = Floats{} + high;
  x = x < least ? least : x;
  return x > most ? most : x;
}
float sum(Floats value) {
  float total = 0;
  for (int i = 0; i < kLanes; i++) total += value[i];
  return total;
}
float largest_of(const float* w, int64_t count) {
  Floats found = {};
  for (int64_t i = 0; i < count; i += kLanes) found = larger(found, absolute(load(w + i)));
  float largest = 0;
  for (int i = 0; i < kLanes; i++) largest = std::fmax(largest, found[i]);
  return largest;
}
void put_bytes(Words values, uint8_t* out) {
  for (int i = 0; i < kLanes; i++) out[i] = static_cast<uint8_t>(values[i]);
}

float inverse(float scale) { return scale != 0 ? 1.0f / scale : 0.0f; }

struct Products {
  float along, length;  // <q, w>, <q, q>
};

Products products(const float* w, float scale) {
  const float by = inverse(scale);
  Floats along = {}, length = {};
  for (int i = 0; i < kInt4Group; i += kLanes) {
    const Floats value = load(w + i), q = bounded(value * by, -8, 7) + kRound - kRound;
    along += q * value;
    length += q * q;
  }
  return {sum(along), sum(length)};
}

// `count` values, a multiple of kLanes, to integers around `middle`.
void put_integers(const float* w, int count, uint16_t scale, float low, float high, uint32_t middle, uint8_t* codes, Cost& cost) {
  const float step = f16_to_f32(scale), by = inverse(step);
  Floats squares = {}, errors = {};
  for (int i = 0; i < count; i += kLanes) {
    const Floats value = load(w + i), shifted = bounded(value * by, low, high) + kRound;
    const Floats error = (shifted - kRound) * step - value;
    put_bytes(bits_of(shifted) - kRoundBits + middle, codes + i);
    squares += value * value;
    errors += error * error;
  }
  cost.squares += sum(squares);
  cost.squared_errors += sum(errors);
}

}  // namespace

uint16_t round_int4(const float* w, uint8_t* codes, Cost& cost) {
  float end = 0;
  Floats lanes = {};
  for (int i = 0; i < kInt4Group; i++)
    if (std::fabs(w[i]) > std::fabs(end)) end = w[i];
  for (int i = 0; i < kInt4Group; i += kLanes) lanes += load(w + i) * load(w + i);
  const float energy = sum(lanes);
  uint16_t best = 0;
  float least = energy;
  for (float at : kEnds) {
    const Products found = products(w, end / at);
    const uint16_t scale = f32_to_f16(found.along / (found.length > 0 ? found.length : 1));
    const float step = f16_to_f32(scale), error = energy - step * (2 * found.along - step * found.length);
    if (error < least) best = scale, least = error;
  }
  put_integers(w, kInt4Group, best, -8, 7, 8, codes, cost);
  return best;
}

uint16_t round_q8(const float* w, uint8_t* codes, Cost& cost) {
  const float largest = largest_of(w, kQ8Group);
  uint16_t scale = f32_to_f16(largest / 127.0f);
  if (largest > 127.5f * f16_to_f32(scale)) scale++;
  put_integers(w, kQ8Group, scale, -127, 127, 128, codes, cost);
  return scale;
}

float round_fp8(const float* w, int64_t count, uint8_t* codes, Cost& cost) {
  const float largest = largest_of(w, count), scale = largest > 0 ? largest / 448.0f : 1.0f;
  double all_squares = 0, all_errors = 0;
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats value = load(w + i), size = absolute(value / scale);
    const Words magnitude = bits_of(size);
    // Below 2^-6: multiples of 2^-9. Else three bits after the first, ties to even, and no more than the largest.
    const Floats small = size * 512.0f + kRound;
    const Words cut = magnitude + 0x7ffffu + (magnitude >> 20 & 1u);
    Words code = (cut >> 20) - (120u << 3);
    code = code > 0x7eu ? Words{} + 0x7eu : code;
    Floats number = floats_of(cut & 0xfff00000u);
    number = number > 448.0f ? Floats{} + 448.0f : number;
    const auto is_small = magnitude < 0x3c800000u;
    code = is_small ? bits_of(small) - kRoundBits : code;
    number = is_small ? (small - kRound) * (1.0f / 512) : number;
    put_bytes(code | (bits_of(value) >> 24 & 0x80u), codes + i);
    const Floats error = number * scale - absolute(value);
    all_squares += sum(value * value);
    all_errors += sum(error * error);
  }
  cost.squares += all_squares;
  cost.squared_errors += all_errors;
  return scale;
}

}  // namespace monotape

// exp, log and log1p in double, for a machine whose compiler has no library: within two units of the last place, where the
// sampler needs them (sampling/cut.h, sampling/philox.h). Plain C++, so that a test compares them with the host's own.
#pragma once

namespace monotape {

constexpr double kLog2High = 6.93147180369123816490e-01, kLog2Low = 1.90821492927058770002e-10;

__device__ __forceinline__ double two_to_the(int exponent) {
  return __builtin_bit_cast(double, static_cast<unsigned long long>(1023 + exponent) << 52);
}

// exp(r) = the first 14 terms of its series, |r| <= log(2) / 2.
__device__ inline double exp_of(double x) {
  if (x != x) return x;
  if (x < -745.2) return 0;
  if (x > 709.8) return __builtin_huge_val();
  const double turns = __builtin_floor(x * 1.4426950408889634 + 0.5);
  const double r = (x - turns * kLog2High) - turns * kLog2Low;
  double sum = 1;
#pragma unroll 1
  for (int n = 14; n > 0; n--) sum = 1 + sum * r / n;
  const int exponent = static_cast<int>(turns), half = exponent / 2;  // in two steps: the result may be subnormal
  return sum * two_to_the(half) * two_to_the(exponent - half);
}

// log(x) = e log(2) + 2 atanh((m - 1) / (m + 1)), with x = 2^e m and m between the roots of 1/2 and of 2.
__device__ inline double log_of(double x) {
  if (x != x || x < 0) return __builtin_nan("");
  if (x == 0) return -__builtin_huge_val();
  if (x == __builtin_huge_val()) return x;
  int exponent = 0;
  if (x < 2.2250738585072014e-308) x *= two_to_the(54), exponent = -54;
  unsigned long long bits = __builtin_bit_cast(unsigned long long, x);
  exponent += static_cast<int>(bits >> 52) - 1023;
  bits = (bits & ((1ull << 52) - 1)) | 1023ull << 52;
  double m = __builtin_bit_cast(double, bits);
  if (m > 1.4142135623730951) m *= 0.5, exponent++;
  const double f = m - 1, s = f / (2 + f), square = s * s;
  double tail = 0;
#pragma unroll 1
  for (int n = 23; n > 1; n -= 2) tail = (tail + 1.0 / n) * square;
  return exponent * kLog2High + (f - (s * (f - 2 * tail) - exponent * kLog2Low));
}

// What 1 + x loses in rounding is put right by the quotient.
__device__ inline double log1p_of(double x) {
  const double y = 1 + x;
  return y == 1 ? x : y == 0 ? -__builtin_huge_val() : log_of(y) * (x / (y - 1));
}

}  // namespace monotape

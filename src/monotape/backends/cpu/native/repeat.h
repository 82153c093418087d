// Loops that are written out by the compiler. Part of kernels_impl.h.
#pragma once
#include <utility>

namespace monotape::MONOTAPE_ISA {
namespace {

// body(0) to body(N - 1), written out. Arrays that loops index stay in memory, where compilers store them in each round;
// with constant indices they become registers.
template <class Body, int... I>
inline __attribute__((always_inline)) void repeat(Body body, std::integer_sequence<int, I...>) {
  (body(std::integral_constant<int, I>{}), ...);
}
template <int N, class Body>
inline __attribute__((always_inline)) void repeat(Body body) {
  repeat(body, std::make_integer_sequence<int, N>{});
}
#define MT_BODY(name) [&](auto name) __attribute__((always_inline))
#define MT_BODY_OF(name, value) [&](auto name, auto value) __attribute__((always_inline))

}  // namespace
}  // namespace monotape::MONOTAPE_ISA

// Codes of 4, 5, 6 or 8 bits as bytes. Part of kernels_impl.h.
//
// A byte holds the code of one row and k in its highest bits: 2^(8 - bits) * (code - 2^(bits - 1)), an int8. Registers of
// 16 such bytes are packed in the fewest that hold them, so that most need one instruction to unpack: a mask leaves the
// highest bits of a packed byte, and codes that lie in the bits below are put together by shifts that insert.

namespace monotape::MONOTAPE_ISA {
namespace {

// `packed` registers hold `unpacked` ones. pack.cpp writes them: put_codes().
template <int Bits>
struct Codes;

template <>
struct Codes<4> {
  static constexpr int packed = 1, unpacked = 2;
  static inline __attribute__((always_inline)) void unpack(const uint8_t* p, bytes16 (&w)[2]) {
    const bytes16 a = load_bytes(p);
    w[0] = shifted<4>(a);
    w[1] = masked(a, 0xf0);
  }
};

// The three registers behind five lie in the lowest bits of those: three bits of each in 0, 1 and 2, the others in 3 and 4.
template <>
struct Codes<5> {
  static constexpr int packed = 5, unpacked = 8;
  static inline __attribute__((always_inline)) void unpack(const uint8_t* p, bytes16 (&w)[8]) {
    bytes16 a[5];
    repeat<5>(MT_BODY(i) { a[i] = load_bytes(p + 16 * i); });
    repeat<5>(MT_BODY(i) { w[i] = masked(a[i], 0xf8); });
    w[5] = masked(inserted<5>(shifted<2>(a[3]), a[0]), 0xf8);
    w[6] = masked(inserted<5>(shifted<2>(a[4]), a[1]), 0xf8);
    w[7] = inserted<5>(inserted<4>(shifted<3>(a[4]), a[3]), a[2]);
  }
};

// The fourth register lies in the two lowest bits of three.
template <>
struct Codes<6> {
  static constexpr int packed = 3, unpacked = 4;
  static inline __attribute__((always_inline)) void unpack(const uint8_t* p, bytes16 (&w)[4]) {
    bytes16 a[3];
    repeat<3>(MT_BODY(i) { a[i] = load_bytes(p + 16 * i); });
    repeat<3>(MT_BODY(i) { w[i] = masked(a[i], 0xfc); });
    w[3] = inserted<6>(inserted<4>(shifted<2>(a[2]), a[1]), a[0]);
  }
};

template <>
struct Codes<8> {
  static constexpr int packed = 1, unpacked = 1;
  static inline __attribute__((always_inline)) void unpack(const uint8_t* p, bytes16 (&w)[1]) { w[0] = load_bytes(p); }
};

// body(i, w) for the registers of Group values of k and 8 rows: register i has k 4 (i / 2) to 4 (i / 2) + 3 of rows 0 to 3
// (i even) or 4 to 7.
template <int Bits, int Group, class Body>
inline __attribute__((always_inline)) void each_register(const uint8_t* codes, Body body) {
  using C = Codes<Bits>;
  repeat<Group / 2 / C::unpacked>(MT_BODY(step) {
    bytes16 w[C::unpacked];
    C::unpack(codes + 16 * C::packed * step, w);
    repeat<C::unpacked>(MT_BODY(j) { body(std::integral_constant<int, step * C::unpacked + j>{}, w[j]); });
  });
}

// A part's codes of four bits as what a table says: [k / 4][row][4] int8, as each_register() has them.
inline __attribute__((always_inline)) void look_up(const uint8_t* codes, int8_t* out) {
  repeat<kPart * kTileRows / 32>(MT_BODY(i) {
    const bytes16 a = load_bytes(codes + 16 * i);
    store_bytes(out + 32 * i, doubled_e2m1(masked(a, 0x0f)));
    store_bytes(out + 32 * i + 16, doubled_e2m1(upper_halves(a)));
  });
}

#ifndef MONOTAPE_OWN_DOTS
// Dot products of 8 rows of packed codes with a group of one row's activations.
template <int Bits, int Group>
inline __attribute__((always_inline)) f32x8 dots_of(const uint8_t* codes, const InputBlock<Group>& x) {
  Dots<Group> dots(x);
  each_register<Bits, Group>(
      codes, MT_BODY_OF(i, w) { dots.template step<i>(w, x); });
  return dots.total(x);
}
#endif

}  // namespace
}  // namespace monotape::MONOTAPE_ISA

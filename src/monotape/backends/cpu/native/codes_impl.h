// Codes of 4, 5, 6 or 8 bits as bytes. Part of kernels_impl.h.
//
// A byte holds the code of one row and k in its highest bits: 2^(8 - bits) * (code - 2^(bits - 1)), an int8. Registers of
// 16 such bytes are packed in the fewest that hold them, so that most need one instruction to unpack: a mask leaves the
// highest bits of a packed byte, and codes that lie in the bits below are put together by shifts that insert.

namespace monotape::MONOTAPE_ISA {
namespace {

// `packed` registers hold `pairs` pairs of unpacked ones. pack.cpp writes them: put_codes().
template <int Bits>
struct Codes;

template <>
struct Codes<4> {
  static constexpr int packed = 1, pairs = 1;
  static inline __attribute__((always_inline)) void unpack(const uint8_t* p, bytes32 (&w)[1]) { w[0] = load_nibbles(p); }
};

// The three registers behind five lie in the lowest bits of those: three bits of each in 0, 1 and 2, the others in 3 and 4.
template <>
struct Codes<5> {
  static constexpr int packed = 5, pairs = 4;
  static inline __attribute__((always_inline)) void unpack(const uint8_t* p, bytes32 (&w)[4]) {
    bytes16 a[5];
    repeat<5>(MT_BODY(i) { a[i] = load_bytes(p + 16 * i); });
    const bytes16 fifth = inserted<5>(shifted<2>(a[3]), a[0]), sixth = inserted<5>(shifted<2>(a[4]), a[1]);
    const bytes16 seventh = inserted<5>(inserted<4>(shifted<3>(a[4]), a[3]), a[2]);
    w[0] = masked(load_pair(p), 0xf8);
    w[1] = masked(load_pair(p + 32), 0xf8);
    w[2] = masked(joined(a[4], fifth), 0xf8);
    w[3] = joined(masked(sixth, 0xf8), seventh);
  }
};

// The fourth register lies in the two lowest bits of three.
template <>
struct Codes<6> {
  static constexpr int packed = 3, pairs = 2;
  static inline __attribute__((always_inline)) void unpack(const uint8_t* p, bytes32 (&w)[2]) {
    bytes16 a[3];
    repeat<3>(MT_BODY(i) { a[i] = load_bytes(p + 16 * i); });
    w[0] = masked(load_pair(p), 0xfc);
    w[1] = joined(masked(a[2], 0xfc), inserted<6>(inserted<4>(shifted<2>(a[2]), a[1]), a[0]));
  }
};

template <>
struct Codes<8> {
  static constexpr int packed = 2, pairs = 1;
  static inline __attribute__((always_inline)) void unpack(const uint8_t* p, bytes32 (&w)[1]) { w[0] = load_pair(p); }
};

// body(i, w) for the pairs of registers of Group values of k and 8 rows: pair i has k 4 i to 4 i + 3 of rows 0 to 3, then
// of rows 4 to 7.
template <int Bits, int Group, class Body>
inline __attribute__((always_inline)) void each_pair(const uint8_t* codes, Body body) {
  using C = Codes<Bits>;
  repeat<Group / 4 / C::pairs>(MT_BODY(step) {
    bytes32 w[C::pairs];
    C::unpack(codes + 16 * C::packed * step, w);
    repeat<C::pairs>(MT_BODY(j) { body(std::integral_constant<int, step * C::pairs + j>{}, w[j]); });
  });
}

// A part's codes of four bits as what a table says: [k / 4][row][4] int8, as each_pair() has them.
inline __attribute__((always_inline)) void look_up(const uint8_t* codes, int8_t* out) {
  repeat<kPart * kTileRows / 32>(MT_BODY(i) {
    const bytes16 a = load_bytes(codes + 16 * i);
    store_bytes(out + 32 * i, doubled_e2m1(masked(a, 0x0f)));
    store_bytes(out + 32 * i + 16, doubled_e2m1(upper_halves(a)));
  });
}

#ifndef MONOTAPE_OWN_DOTS
// Dot products of 8 rows of packed codes with a group of the activations of R rows. Codes are unpacked once for all R.
template <int Bits, int Group, int R>
inline __attribute__((always_inline)) void dots_of(const uint8_t* codes, const InputBlock<Group>* x, f32x8 (&y)[R]) {
  Dots<Group> dots[R];
  repeat<R>(MT_BODY(r) { dots[r].begin(x[r]); });
  each_pair<Bits, Group>(
      codes, MT_BODY_OF(i, w) { repeat<R>(MT_BODY(r) { dots[r].template step<i>(w, x[r]); }); });
  repeat<R>(MT_BODY(r) { y[r] = dots[r].total(x[r]); });
}
#endif

}  // namespace
}  // namespace monotape::MONOTAPE_ISA

// The scales of a tile's groups as floats: a number is code * scale + minimum, the code less its centre where the layout
// says so. Products of d and s, or e and m, are exact in float32. Part of kernels_impl.h.

namespace monotape::MONOTAPE_ISA {
namespace {

inline f32x8 load_halves_at(const uint8_t* p) { return load_f16(reinterpret_cast<const uint16_t*>(p)); }
inline f32x8 load_floats_at(const uint8_t* p) { return load(reinterpret_cast<const float*>(p)); }

// Made of a block's head; then of each part, `group` is 0 or 1 where groups have 16 values.
template <Format F>
struct Scales {
  f32x8 d, e;

  inline __attribute__((always_inline)) explicit Scales(const uint8_t* head) {
    if constexpr (F == Format::mxfp4) {
      // Codes are looked up as twice their values, so the scale is 2^(exponent - 128). An exponent of 0 makes it a
      // subnormal number, which only the multiplication can make.
      const f32x8 exponent = add(load_int8(head), broadcast(12582912.0f));  // less 128, in the lowest bits
      d = mul(add_to_exponent(broadcast(4.0f), exponent), broadcast(0.25f));
      return;
    }
    if constexpr (layout_of(F).head_bytes > kBytes) d = load_halves_at(head);
    if constexpr (layout_of(F).head_bytes > kHalves) e = load_halves_at(head + kHalves);
    if constexpr (F == Format::int4_g32z || F == Format::int4_g64z || F == Format::int4_g128z)
      e = mul(sub(broadcast(8), e), d);
    if constexpr (F == Format::q4_k || F == Format::q5_k || F == Format::k_mixed) e = sub(broadcast(0), e);
  }

  inline __attribute__((always_inline)) f32x8 scale(const uint8_t* part, int group) const {
    if constexpr (F == Format::wide) return load_floats_at(part + group * kFloats);
    if constexpr (layout_of(F).scale_bytes > 0) return mul(d, load_int8(part + group * kBytes));
    return d;
  }

  inline __attribute__((always_inline)) f32x8 minimum(const uint8_t* part, int group) const {
    if constexpr (F == Format::wide)  // its codes are less 128 here, and not where they are stored
      return fma(scale(part, group), broadcast(128), load_floats_at(part + (2 + group) * kFloats));
    if constexpr (F == Format::k_mixed) return mul(e, load_int8(part + (2 + group) * kBytes));
    if constexpr (layout_of(F).scale_bytes > 0) return mul(e, load_int8(part + kBytes));
    return e;
  }
};

// body(constant) with the format as a constant, for every format of codes.
template <class Body>
inline void with_codes(Format format, Body body) {
  switch (format) {
#define MT_FORMAT(name) \
  case Format::name: return body(std::integral_constant<Format, Format::name>{});
    MT_FORMAT(q8) MT_FORMAT(int4_g32) MT_FORMAT(int4_g64) MT_FORMAT(int4_g128) MT_FORMAT(int4_g32z)
    MT_FORMAT(int4_g64z) MT_FORMAT(int4_g128z) MT_FORMAT(q4_1) MT_FORMAT(q5_0) MT_FORMAT(q4_k) MT_FORMAT(q5_k)
    MT_FORMAT(q6_k) MT_FORMAT(k_mixed) MT_FORMAT(wide) MT_FORMAT(mxfp4)
#undef MT_FORMAT
    default: return;
  }
}

// body(constant) for every format of floats.
template <class Body>
inline void with_floats(Format format, Body body) {
  if (format == Format::f32) return body(std::integral_constant<Format, Format::f32>{});
  if (format == Format::f16) return body(std::integral_constant<Format, Format::f16>{});
  return body(std::integral_constant<Format, Format::bf16>{});
}

}  // namespace
}  // namespace monotape::MONOTAPE_ISA

// A row of GGUF blocks as codes and scales, exactly as the file has them. weights/gguf_matrix.py does the same in NumPy.
#pragma once
#include <cstdint>
#include <vector>

namespace monotape {

// stored.py: KINDS has the same order. Halves are moved as they are, or rounded (bf16, f16).
enum class Kind : int64_t { half, bf16, f16, q4_0, q4_1, q5_0, q8_0, mxfp4, q4_k, q5_k, q6_k };

constexpr bool is_k(Kind kind) { return kind >= Kind::q4_k; }
constexpr bool is_gguf(Kind kind) { return kind >= Kind::q4_0; }
constexpr int block_values(Kind kind) { return is_k(kind) ? 256 : 32; }
constexpr int block_bytes_of(Kind kind) {
  switch (kind) {
    case Kind::q4_0: return 18;
    case Kind::q4_1: return 20;
    case Kind::q5_0: return 22;
    case Kind::q8_0: return 34;
    case Kind::mxfp4: return 17;
    case Kind::q4_k: return 144;
    case Kind::q5_k: return 176;
    default: return 210;
  }
}
constexpr int middle_of(Kind kind) { return kind == Kind::q8_0 ? 128 : kind == Kind::q5_0 ? 16 : 8; }

// Some blocks of a row. Of K-quants: d and e are of 256 values, s and m of 16.
struct GgufRow {
  std::vector<uint8_t> codes, exponents;
  std::vector<uint16_t> d, e;  // e: minima of Q4_1
  std::vector<int8_t> s, m;

  // False where a scale is not finite.
  bool read(Kind kind, const uint8_t* blocks, int64_t count);
};

}  // namespace monotape

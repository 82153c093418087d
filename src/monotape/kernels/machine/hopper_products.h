// NVIDIA Hopper's tensor cores: products of a warp, of one token's activations, and of a group of four warps.
// A part of machine/hopper.h, which includes it.
#pragma once

namespace monotape {

// c += a * b for 16 rows of a, 8 columns of b and 16 values of k. a0 and a2 are rows 0-7, a1 and a3 rows 8-15. Operands are
// fp16 or bf16, by default those of activations.
template <bool Float16 = kFloat16>
__device__ __forceinline__ void multiply_accumulate(float* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                    uint32_t b0, uint32_t b1) {
  if constexpr (Float16)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same for 32 values of k: bytes without a sign in a, with one in b.
__device__ __forceinline__ void multiply_accumulate_bytes(int* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// A block of weights times one token's activations, and up to three more rows (token/tiles.h). The halves of row p of the
// pass are columns 2p and 2p + 1, so a lane has eight bytes of its column. In all, a lane adds to four sums.
using TokenInput = uint2;
constexpr int kTokenSums = 4, kGroupInputs = 8;  // inputs of a group of 32 values of k, in shared memory
// A word of the input in the order of products: its first and third pair, then its second and fourth.
__device__ __forceinline__ uint4 input_order(uint4 word) { return make_uint4(word.x, word.z, word.y, word.w); }
__device__ __forceinline__ TokenInput no_input() { return make_uint2(0, 0); }
// Whose input a lane takes: which row of the pass, and which inputs from the warp's first on, of blocks of `sub` groups.
__device__ __forceinline__ int input_pass(unsigned lane) { return fragment_row(lane) / 2; }
__device__ __forceinline__ int first_input(unsigned lane, int) { return fragment_column(lane) * 2; }
__device__ __forceinline__ int second_input(unsigned lane) { return fragment_row(lane) % 2; }
__device__ __forceinline__ bool takes_input(unsigned) { return true; }
// A lane's input, half of a word of the exchange that is in the order of products. It says by itself whether it has come.
using InputPlace = const uint2*;
constexpr int kPlacesInWord = 2;
__device__ __forceinline__ InputPlace input_place(const uint4* word, unsigned lane) { return reinterpret_cast<const uint2*>(word) + second_input(lane); }
__device__ __forceinline__ TokenInput load_input(InputPlace place, unsigned) { return load_half(place); }
__device__ __forceinline__ bool input_came(TokenInput v) { return v.x != ~0u && v.y != ~0u; }
template <bool Float16>
__device__ __forceinline__ void multiply_token(float* sums, const uint4& w, TokenInput x) {
  multiply_accumulate<Float16>(sums, w.x, w.y, w.z, w.w, x.x, x.y);
}
// A lane's part of the product, then the whole of it: of which row of the tile, and of which row of the pass.
__device__ __forceinline__ float token_part(const float* sums, unsigned) { return sums[0] + sums[3]; }
__device__ __forceinline__ float token_whole(float part) { return part; }
__device__ __forceinline__ int token_row(unsigned lane) { return fragment_row(lane); }
__device__ __forceinline__ int token_pass(unsigned lane) { return fragment_column(lane); }
// Weights, from the page that they have come in.
__device__ __forceinline__ uint4 load_weights(const uint4* p) { return *p; }

// Products of a group: four warps, of which the first is a multiple of four, multiply operands that both lie in shared
// memory, without reading them into registers. An operand is tiles of eight rows and 32 values of k, one block after
// another, the words of each block in the order of `operand_place`: that is how the tensor cores read 64 bytes a row
// without conflicts. Warp w of a group has rows 16 w to 16 w + 15 of the first operand's 64, and holds of each tile of the
// second what multiply_accumulate holds.
__device__ __forceinline__ int operand_place(int lane) { return (lane & ~3) | ((lane ^ lane >> 3) & 3); }

__device__ __forceinline__ uint64_t operand_at(const void* block, int half) {
  constexpr uint64_t kRows64Bytes = 2ull << 62, kTileStride = static_cast<uint64_t>(512 >> 4) << 32, kUnused = 1ull << 16;
  return kRows64Bytes | kTileStride | kUnused | (shared_address(block) + 32 * half) >> 4;
}

// With 64 columns for every 32 of a lane's sums; `io` is the constraint of the sums ("+f", or "=f" where they are not read),
// `add` whether to add.
#define MONOTAPE_TILE(io, t) io(c[t][0]), io(c[t][1]), io(c[t][2]), io(c[t][3])
#define MONOTAPE_TILES_8(io, t)                                                                               \
  MONOTAPE_TILE(io, t), MONOTAPE_TILE(io, t + 1), MONOTAPE_TILE(io, t + 2), MONOTAPE_TILE(io, t + 3),         \
      MONOTAPE_TILE(io, t + 4), MONOTAPE_TILE(io, t + 5), MONOTAPE_TILE(io, t + 6), MONOTAPE_TILE(io, t + 7)
#define MONOTAPE_SUMS_0                                                                                       \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"        \
  "%27,%28,%29,%30,%31"
#define MONOTAPE_SUMS_1                                                                                       \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,"      \
  "%57,%58,%59,%60,%61,%62,%63"
#define MONOTAPE_SUMS_2                                                                                       \
  "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,"      \
  "%89,%90,%91,%92,%93,%94,%95"
#define MONOTAPE_SUMS_3                                                                                       \
  "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,"          \
  "%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define MONOTAPE_SUMS_64 " {" MONOTAPE_SUMS_0 "}, "
#define MONOTAPE_SUMS_128 " {" MONOTAPE_SUMS_0 "," MONOTAPE_SUMS_1 "}, "
#define MONOTAPE_SUMS_192 " {" MONOTAPE_SUMS_0 "," MONOTAPE_SUMS_1 "," MONOTAPE_SUMS_2 "}, "
#define MONOTAPE_SUMS_256 " {" MONOTAPE_SUMS_0 "," MONOTAPE_SUMS_1 "," MONOTAPE_SUMS_2 "," MONOTAPE_SUMS_3 "}, "
#define MONOTAPE_PRODUCT_64(type, io, add)                                                                    \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type MONOTAPE_SUMS_64                   \
               "%32, %33, " add ", 1, 1, 0, 0;"                                                               \
               : MONOTAPE_TILES_8(io, 0)                                                                      \
               : "l"(operand_at(first, half)), "l"(operand_at(second, half)))
#define MONOTAPE_PRODUCT_128(type, io, add)                                                                   \
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type MONOTAPE_SUMS_128                 \
               "%64, %65, " add ", 1, 1, 0, 0;"                                                               \
               : MONOTAPE_TILES_8(io, 0), MONOTAPE_TILES_8(io, 8)                                             \
               : "l"(operand_at(first, half)), "l"(operand_at(second, half)))
#define MONOTAPE_PRODUCT_192(type, io, add)                                                                   \
  asm volatile("wgmma.mma_async.sync.aligned.m64n192k16.f32." type "." type MONOTAPE_SUMS_192                 \
               "%96, %97, " add ", 1, 1, 0, 0;"                                                               \
               : MONOTAPE_TILES_8(io, 0), MONOTAPE_TILES_8(io, 8), MONOTAPE_TILES_8(io, 16)                   \
               : "l"(operand_at(first, half)), "l"(operand_at(second, half)))
#define MONOTAPE_PRODUCT_256(type, io, add)                                                                   \
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type MONOTAPE_SUMS_256                 \
               "%128, %129, " add ", 1, 1, 0, 0;"                                                             \
               : MONOTAPE_TILES_8(io, 0), MONOTAPE_TILES_8(io, 8),                                            \
                 MONOTAPE_TILES_8(io, 16), MONOTAPE_TILES_8(io, 24)                                           \
               : "l"(operand_at(first, half)), "l"(operand_at(second, half)))
#define MONOTAPE_WEIGHTED_64(type, io, add)                                                                   \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type MONOTAPE_SUMS_64                   \
               "{%32,%33,%34,%35}, %36, " add ", 1, 1, 0;"                                                    \
               : MONOTAPE_TILES_8(io, 0)                                                                      \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(operand_at(second, half)))
#define MONOTAPE_WEIGHTED_128(type, io, add)                                                                  \
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type MONOTAPE_SUMS_128                 \
               "{%64,%65,%66,%67}, %68, " add ", 1, 1, 0;"                                                    \
               : MONOTAPE_TILES_8(io, 0), MONOTAPE_TILES_8(io, 8)                                             \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(operand_at(second, half)))
// c += a * b for 64 rows of a, `Tiles` tiles of b and one half of the k of their blocks. Asynchronous. One wide product and not
// several narrow ones, because each reads all of its rows from shared memory again.
template <int Tiles, bool Float16 = kFloat16>
__device__ __forceinline__ void begin_product(float (*c)[4], const void* first, const void* second, int half) {
  static_assert(Tiles == 8 || Tiles == 16 || Tiles == 24 || Tiles == 32, "products that there are");
  if constexpr (Tiles == 8 && Float16) MONOTAPE_PRODUCT_64("f16", "+f", "1");
  else if constexpr (Tiles == 8) MONOTAPE_PRODUCT_64("bf16", "+f", "1");
  else if constexpr (Tiles == 16 && Float16) MONOTAPE_PRODUCT_128("f16", "+f", "1");
  else if constexpr (Tiles == 16) MONOTAPE_PRODUCT_128("bf16", "+f", "1");
  else if constexpr (Tiles == 24 && Float16) MONOTAPE_PRODUCT_192("f16", "+f", "1");
  else if constexpr (Tiles == 24) MONOTAPE_PRODUCT_192("bf16", "+f", "1");
  else if constexpr (Float16) MONOTAPE_PRODUCT_256("f16", "+f", "1");
  else MONOTAPE_PRODUCT_256("bf16", "+f", "1");
}
// The same with a in registers, laid out as in multiply_accumulate. They must not change before the product is awaited. Where
// it does not add, c = a * b.
template <int Tiles, bool Add = true>
__device__ __forceinline__ void begin_weighted_product(float (*c)[4], const uint32_t (&a)[4], const void* second, int half) {
  static_assert(Tiles == 8 || Tiles == 16, "products that there are");
  if constexpr (Tiles == 8 && kFloat16 && Add) MONOTAPE_WEIGHTED_64("f16", "+f", "1");
  else if constexpr (Tiles == 8 && kFloat16) MONOTAPE_WEIGHTED_64("f16", "=f", "0");
  else if constexpr (Tiles == 8 && Add) MONOTAPE_WEIGHTED_64("bf16", "+f", "1");
  else if constexpr (Tiles == 8) MONOTAPE_WEIGHTED_64("bf16", "=f", "0");
  else if constexpr (kFloat16 && Add) MONOTAPE_WEIGHTED_128("f16", "+f", "1");
  else if constexpr (kFloat16) MONOTAPE_WEIGHTED_128("f16", "=f", "0");
  else if constexpr (Add) MONOTAPE_WEIGHTED_128("bf16", "+f", "1");
  else MONOTAPE_WEIGHTED_128("bf16", "=f", "0");
}
#undef MONOTAPE_TILE
#undef MONOTAPE_TILES_8
#undef MONOTAPE_SUMS_0
#undef MONOTAPE_SUMS_1
#undef MONOTAPE_SUMS_2
#undef MONOTAPE_SUMS_3
#undef MONOTAPE_SUMS_64
#undef MONOTAPE_SUMS_128
#undef MONOTAPE_SUMS_192
#undef MONOTAPE_SUMS_256
#undef MONOTAPE_PRODUCT_64
#undef MONOTAPE_PRODUCT_128
#undef MONOTAPE_PRODUCT_192
#undef MONOTAPE_PRODUCT_256
#undef MONOTAPE_WEIGHTED_64
#undef MONOTAPE_WEIGHTED_128
template <int Tiles>
__device__ __forceinline__ void clear_sums(float (&c)[Tiles][4]) {
#pragma unroll
  for (int t = 0; t < Tiles; t++)
#pragma unroll
    for (int i = 0; i < 4; i++) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(c[t][i]));
}
// Orders ordinary writes of sums before products that add to them.
__device__ __forceinline__ void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_product_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Sums of a group's product: of `Tiles` tiles a lane has kSumTiles<Tiles> times four, of kLaneRows rows, eight apart. Which
// row and column of the warp's 16 by 8 * Tiles the first is, and how much further sum i of the t-th four is; which word of
// eight columns that is in, and which pair of the word; sums of a row are neighbours.
constexpr int kLaneRows = 2, kRowSums = 4 / kLaneRows, kTileSums = 4;
template <int Tiles>
constexpr int kSumTiles = Tiles;
__device__ __forceinline__ int sum_row(unsigned lane) { return static_cast<int>(lane / 4); }
__device__ __forceinline__ int sum_column(unsigned lane) { return 2 * static_cast<int>(lane % 4); }
__device__ __forceinline__ constexpr int sum_step(int t, int i) { return t * 8 + i % 2; }
__device__ __forceinline__ int sum_word(unsigned, int t) { return t; }
__device__ __forceinline__ int sum_pair(unsigned lane, int) { return static_cast<int>(lane % 4); }
// The position of a score, where columns are positions in the order of a unit's values.
__device__ __forceinline__ int score_position(int first, unsigned lane, int t, int i) {
  return first + t / 4 * 32 + static_cast<int>(lane % 4) * 8 + t % 4 * 2 + i % 2;
}
// The operands of all but the latest group have been read.
__device__ __forceinline__ void wait_operands() { asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory"); }
// All products have been added to the sums.
template <int Tiles>
__device__ __forceinline__ void wait_products(float (&c)[Tiles][4]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int t = 0; t < Tiles; t++) asm volatile("" : "+f"(c[t][0]), "+f"(c[t][1]), "+f"(c[t][2]), "+f"(c[t][3])::"memory");
}

// Queries of a prefill are an operand in registers: in shared memory they would be read again with every step, and products of
// 64 columns with both operands there ask for all of its bandwidth.
template <int Blocks>
struct RowQueries {
  uint32_t pair[2 * Blocks][4];  // by half of a block, laid out as in multiply_accumulate

  // `row_of` has the lane's two rows, null past the last one. The padding of a head is zero.
  template <class RowOf>
  __device__ __forceinline__ void load(RowOf row_of, unsigned lane) {
    const float* rows[2] = {reinterpret_cast<const float*>(row_of(0)), reinterpret_cast<const float*>(row_of(1))};  // pairs of values
#pragma unroll
    for (int i = 0; i < 2 * Blocks; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int at = 8 * i + j / 2 * 4 + static_cast<int>(lane % 4);
        pair[i][j] = rows[j % 2] && at < kHeadDim / 2 ? bits_of(load_row_value(rows[j % 2] + at)) : 0;
      }
  }
  template <int Sums>
  __device__ __forceinline__ void multiply(const uint8_t* keys, float (&score)[Sums][4]) const {
    fence_products();
    begin_weighted_product<Sums, false>(score, pair[0], keys, 0);
#pragma unroll
    for (int i = 1; i < 2 * Blocks; i++) begin_weighted_product<Sums>(score, pair[i], keys + i / 2 * Sums * 512, i % 2);
    end_product_group();
    wait_products(score);
  }
};

}  // namespace monotape

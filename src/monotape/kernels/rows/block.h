// One block of output: its operands stream through shared memory, and groups of four warps multiply them there.
#pragma once
#include "rows/product.h"

namespace monotape {

// One block of output: RowTiles x ColumnTiles tiles of eight. Two groups of warps share it, by rows or by columns.
template <int RowTiles, int ColumnTiles, Format F>
class BlockProduct {
 public:
  static constexpr int kTiles = RowTiles + ColumnTiles, kRowCopies = divide_up(RowTiles, kWarps * kSide), kColumnCopies = divide_up(ColumnTiles, kWarps * kSide);
  static constexpr int kStepBlocks = step_blocks(kTiles), kStepBytes = kTiles * kStepBlocks * kBlockBytes;
  static constexpr int kSteps = smaller(8, kPrefillBytes / kStepBytes);  // in shared memory at a time
  static constexpr bool kByRows = RowTiles == 16;
  static constexpr int kColumns = kByRows ? ColumnTiles : ColumnTiles / 2;  // tiles of a group
  static_assert(RowTiles == 8 || RowTiles == 16, "a group has 64 rows");
  static_assert(kTiles % kWarps == 0 && kColumns % 8 == 0 && kSteps >= kLeastSteps, "a block's shape");
  static_assert(RowTiles * kTileRows * finished_stride(ColumnTiles) * 4 <= kPrefillBytes, "a finished block fits the ring");

  // Leaves the finished block in shared memory.
  static __device__ __forceinline__ void run(Consumer& c, const RowProduct& product, Block at) {
    const int each = divide_up(product.blocks, product.pieces.count), first = at.piece * each;
    const int last = smaller(product.blocks, first + each), steps = divide_up(last - first, kStepBlocks);
    Sources from;  // rows follow each other, columns are on the tapes of their owners
    if constexpr (kExperts > 0) find_rows(c, product, at, from);
    else from.rows = (at.row_tile + own_tile(c)) * product.blocks * kBlockWords + c.word();
#pragma unroll
    for (int i = 0; i < kColumnCopies; i++) from.columns[i] = column_source(c, product, at, i) + c.word();
    float sums[kSumTiles<kColumns>][4];
    clear_sums(sums);
    consumers_meet(kConsumers);  // all warps are done with the block before
#pragma unroll 1
    for (int step = 0; step < kSteps - 2; step++) copy_step(c, product, from, step, first + step * kStepBlocks, last);
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      wait_copy_groups<kSteps - 3>();
      fence_shared_copies();
      consumers_meet(kConsumers);
      multiply_step(c, step % kSteps, sums);
      // All warps awaited the products of two steps ago before this barrier.
      const int next = step + kSteps - 2;
      copy_step(c, product, from, next % kSteps, first + next * kStepBlocks, last);
      wait_operands();
    }
    wait_products(sums);
    wait_copy_groups<0>();
    consumers_meet(kConsumers);
    leave(c, sums);
    consumers_meet(kConsumers);
  }

 private:
  using Weight = Stored<F>;
  // Numbers of 16-byte words; those of the tapes have 64 bits only where tapes are so large.
  using TapeWord = Chosen<kLargeTapes, uint64_t, uint32_t>;
  struct Sources : RowSources<kExperts ? kRowCopies : 0> {
    uint32_t rows;
    TapeWord columns[kColumnCopies];
  };

  // Where a lane's rows lie: one after the other, or those of an expert's list. Past the end it is the last one again.
  static __device__ __forceinline__ void find_rows(Consumer& c, const RowProduct& product, Block at, Sources& from) {
#pragma unroll
    for (int i = 0; i < kRowCopies; i++) {
      int row = (at.row_tile + own_tile(c) + i * kWarps * kSide) * kTileRows + c.row();
      if (is_routed(product.stage)) row = input_row(c, product, at.expert, row);
      from.row(i) = (row / kTileRows * product.blocks) * kBlockWords + row % kTileRows * 4 + c.column();
    }
  }

  static __device__ __forceinline__ uint32_t row_word(const RowProduct& product, const Sources& from, uint32_t word, int i) {
    if constexpr (kExperts > 0) return from.row(i) + word;
    else return from.rows + word + i * kWarps * kSide * product.blocks * kBlockWords;
  }

  // The first of the tiles that a lane copies; each kWarps * kSide-th follows.
  static __device__ __forceinline__ int own_tile(const Consumer& c) { return c.warp() + c.side() * kWarps; }

  static __device__ __forceinline__ uint8_t* step_place(Consumer& c, int slot) { return c.shared.ring[0] + slot * kStepBytes; }

  // The first block of a tile of weights, in words; past the end it is the last tile again, and not used.
  static __device__ __forceinline__ TapeWord column_source(Consumer& c, const RowProduct& product, Block at, int i) {
    const int column = smaller(at.column_tile + own_tile(c) + i * kWarps * kSide, product.tiles - 1);
    const TilePlace& place = c.params.places[c.params.first_place[static_cast<int>(product.stage)] + column];
    int64_t start = place.start + product.layer * place.stride;
    if constexpr (kExperts > 0) start += static_cast<int64_t>(at.expert) * kExpertBytes;
    return static_cast<TapeWord>(start / 16);
  }

  static __device__ __forceinline__ void copy_step(Consumer& c, const RowProduct& product, const Sources& from, int slot,
                                                    int block, int last) {
    if (block < last) {
      uint8_t* to = step_place(c, slot) + own_tile(c) * kBlockBytes + operand_place(c.word()) * 16;
#pragma unroll
      for (int b = 0; b < kStepBlocks; b++) {
        const uint32_t bytes = block + b < last ? 16 : 0;
        const uint32_t word = (bytes ? block + b : block) * kBlockWords;
#pragma unroll
        for (int i = 0; i < kRowCopies; i++) {
          if (RowTiles % (kWarps * kSide) && own_tile(c) + i * kWarps * kSide >= RowTiles) continue;
          copy_word(to + (b * kTiles + i * kWarps * kSide) * kBlockBytes, product.input + row_word(product, from, word, i), bytes);
        }
#pragma unroll
        for (int i = 0; i < kColumnCopies; i++) {
          if (ColumnTiles % (kWarps * kSide) && own_tile(c) + i * kWarps * kSide >= ColumnTiles) continue;
          copy_weights(c, to + (b * kTiles + RowTiles + i * kWarps * kSide) * kBlockBytes, from.columns[i], word, bytes);
        }
      }
    }
    end_copy_group();
  }

  // A lane's 16 bytes of a block of weights. Formats that must be converted go through registers.
  // `word` is where it would lie in a tile of 16-bit values.
  static __device__ __forceinline__ void copy_weights(Consumer& c, uint8_t* to, TapeWord tile, uint32_t word, uint32_t bytes) {
    const uint4* tapes = reinterpret_cast<const uint4*>(c.params.tapes);
    if constexpr (Weight::kAsMultiplied) {
      copy_word(to, tapes + (tile + word), bytes);
    } else {
      const uint32_t block = word / kBlockWords;
      const uint8_t* stored = reinterpret_cast<const uint8_t*>(tapes + (tile - c.word())) + block / Weight::kSub * Weight::kBlockBytes;
      *reinterpret_cast<uint4*>(to) = bytes ? Weight::row_operand(stored, c.word(), block % Weight::kSub) : make_uint4(0, 0, 0, 0);
    }
  }

  static __device__ __forceinline__ void multiply_step(Consumer& c, int slot, float (&sums)[kSumTiles<kColumns>][4]) {
    const int group = c.warp() / 4;
    const uint8_t* rows = step_place(c, slot) + (kByRows ? group * 8 : 0) * kBlockBytes;
    const uint8_t* columns = step_place(c, slot) + (RowTiles + (kByRows ? 0 : group * kColumns)) * kBlockBytes;
    fence_products();
#pragma unroll
    for (int b = 0; b < kStepBlocks; b++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        begin_product<kColumns, Weight::kFloat16>(sums, rows + b * kTiles * kBlockBytes, columns + b * kTiles * kBlockBytes, half);
    end_product_group();
  }

  static __device__ __forceinline__ void leave(Consumer& c, const float (&sums)[kSumTiles<kColumns>][4]) {
    const int row = (kByRows ? c.warp() : c.warp() % 4) * 16 + sum_row(c.lane());
    const int column = (kByRows ? 0 : c.warp() / 4 * kColumns * kTileRows) + sum_column(c.lane());
#pragma unroll
    for (int j = 0; j < kSumTiles<kColumns>; j++)
#pragma unroll
      for (int i = 0; i < 4; i += 2)
        *reinterpret_cast<float2*>(finished_row(c, row + 8 * (i / kRowSums), ColumnTiles) + column + sum_step(j, i)) =
            make_float2(sums[j][i], sums[j][i + 1]);
  }
};

}  // namespace monotape

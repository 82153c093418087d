// The products of one matrix by themselves, for tests and measurements: no plan, no workers.
#include <vector>

#include "kernels.h"

extern "C" {

using namespace monotape;

// y[row][8 * tile + lane] for `rows` rows of k floats, `together` or one by one. False: there are no such kernels here.
int32_t monotape_products(const char* isa, Format format, const uint8_t* tiles, int32_t count, int32_t k, const float* x,
                          int32_t rows, int32_t together, float* y) {
  const Kernels* kernels = choose_kernels(isa);
  if (!kernels) return false;
  const int padded_k = padded_to(format, k);
  const size_t width = static_cast<size_t>(count) * kTileRows;
  if (!together) {
    std::vector<uint8_t> prepared(kernels->prepared_bytes(format, padded_k));
    for (int r = 0; r < rows; r++) {
      kernels->prepare(format, x + static_cast<size_t>(r) * k, k, padded_k, prepared.data());
      kernels->multiply(format, tiles, count, padded_k, prepared.data(), y + r * width);
    }
    return true;
  }
  const int padded_rows = whole_panels(rows);
  const size_t stride = kernels->panel_bytes(format, padded_k);
  std::vector<uint8_t> panels(padded_rows / kPanelRows * stride);
  for (int r = 0; r < padded_rows; r++)
    kernels->prepare_in_panel(format, r < rows ? x + static_cast<size_t>(r) * k : nullptr, k, padded_k, r % kPanelRows,
                              panels.data() + r / kPanelRows * stride);
  std::vector<float> found(padded_rows * width);
  kernels->multiply_panels(format, tiles, count, padded_k, panels.data(), stride, rows, found.data(), width);
  for (size_t i = 0; i < rows * width; i++) y[i] = found[i];
  return true;
}

// All rows of some tiles as float32.
int32_t monotape_unpack(const char* isa, Format format, const uint8_t* tiles, int32_t count, int32_t k, float* out) {
  const Kernels* kernels = choose_kernels(isa);
  if (!kernels) return false;
  for (int row = 0; row < count * kTileRows; row++)
    kernels->unpack_row(format, tiles + row / kTileRows * tile_bytes(format, padded_to(format, k)), row % kTileRows, k,
                        out + static_cast<size_t>(row) * k);
  return true;
}

}  // extern "C"

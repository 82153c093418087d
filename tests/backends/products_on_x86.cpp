// Products and rows of a matrix by the kernels of one instruction set, for a machine that an emulator plays: reads a case
// from standard input and writes the results to standard output.
#include <cstdio>
#include <vector>

#include "kernels.h"

extern "C" {
int32_t monotape_products(const char*, monotape::Format, const uint8_t*, int32_t, int32_t, const float*, int32_t, int32_t,
                          float*);
int32_t monotape_unpack(const char*, monotape::Format, const uint8_t*, int32_t, int32_t, float*);
}

int main(int, char** arguments) {
  int32_t header[4];  // format, tiles, k, rows; until there are no more
  while (std::fread(header, sizeof header, 1, stdin) == 1) {
    const auto format = static_cast<monotape::Format>(header[0]);
    const int tiles = header[1], k = header[2], rows = header[3], width = tiles * monotape::kTileRows;
    std::vector<uint8_t> matrix(tiles * monotape::tile_bytes(format, monotape::padded_to(format, k)));
    std::vector<float> x(rows * k), y(rows * width), values(width * k);
    if (std::fread(matrix.data(), 1, matrix.size(), stdin) != matrix.size()) return 2;
    if (std::fread(x.data(), sizeof(float), x.size(), stdin) != x.size()) return 2;
    for (const bool together : {false, true}) {
      if (!monotape_products(arguments[1], format, matrix.data(), tiles, k, x.data(), rows, together, y.data())) return 3;
      std::fwrite(y.data(), sizeof(float), y.size(), stdout);
    }
    if (!monotape_unpack(arguments[1], format, matrix.data(), tiles, k, values.data())) return 3;
    std::fwrite(values.data(), sizeof(float), values.size(), stdout);
  }
}

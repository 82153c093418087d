// Rows of codes and scales, as the packer takes them.
#pragma once
#include <cstdint>

#include "formats.h"

namespace monotape {

// One row. Which of the pointers are set depends on the format: formats.h says what a block and a part hold.
struct CodeRow {
  const uint8_t* codes;         // [padded_k], each from 0 to 2^bits - 1
  const uint16_t *d, *e;        // f16, one a block
  const int8_t *s, *m;          // one a group
  const float *scales, *minima; // one a group
};

// Lays eight rows out as one tile.
void put_tile(Format format, const CodeRow (&rows)[kTileRows], int padded_k, uint8_t* out);

}  // namespace monotape

// fp16 weights, as they are.
#pragma once

namespace monotape {

template <>
struct Stored<Format::f16> : StoredHalf<true> {};

}  // namespace monotape

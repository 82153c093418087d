// bf16 weights, as they are.
#pragma once

namespace monotape {

template <>
struct Stored<Format::bf16> : StoredHalf<false> {};

}  // namespace monotape

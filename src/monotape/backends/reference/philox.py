"""Philox4x32-10, the counter-based generator: the noise of a token is a function, not a stream.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]
Ids = NDArray[np.int64]

ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # golden ratio, sqrt(3) - 1
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Four random words for each counter: uint32 [..., 4] to uint32 [..., 4]. The key is two 32-bit words."""
    c0, c1, c2, c3 = (counter[..., lane].astype(np.uint64) for lane in range(4))
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (second >> _HALF) ^ c1 ^ np.uint64(k0),
            second & _LOW,
            (first >> _HALF) ^ c3 ^ np.uint64(k1),
            first & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & 0xFFFFFFFF, (k1 + _KEY_STEPS[1]) & 0xFFFFFFFF
    return np.stack((c0, c1, c2, c3), axis=-1).astype(np.uint32)


def token_words(seed: int, position: int | Ids, ids: Ids) -> Words:
    """One random word for each id at each position: lane id % 4 of the counter (id // 4, position, 0, 0)."""
    ids, positions = np.broadcast_arrays(ids, np.asarray(position, np.int64))
    zeros = np.zeros_like(ids)
    counter = np.stack((ids // 4, positions, zeros, zeros), axis=-1).astype(np.uint32)
    words = philox4x32(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    return np.take_along_axis(words, (ids % 4)[..., None], axis=-1)[..., 0]

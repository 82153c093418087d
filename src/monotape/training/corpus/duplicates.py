"""Drops files that were seen before, exactly or nearly, by a sample of their runs of tokens."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

RUN = 8  # tokens
SAMPLE = 64  # one run of so many is remembered: 245M tokens are 4M numbers
MAX_SHARE = 0.6  # of a file's sampled runs that earlier files may have
MIN_RUNS = 4  # fewer say nothing
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def sampled_runs(tokens: NDArray[np.uint16]) -> NDArray[np.uint64]:
    """Hashes of the runs that the sample holds; a run's place does not decide whether it is in."""
    if len(tokens) < RUN:
        return np.zeros(0, np.uint64)
    hashes = np.zeros(len(tokens) - RUN + 1, np.uint64)
    for offset in range(RUN):
        hashes = hashes * _FACTOR + tokens[offset : offset + len(hashes)]
    hashes ^= hashes >> np.uint64(31)
    hashes *= _FACTOR
    hashes ^= hashes >> np.uint64(29)
    return np.unique(hashes[hashes % np.uint64(SAMPLE) == 0])


class Seen:
    """What has been taken so far."""

    def __init__(self) -> None:
        self._texts: set[bytes] = set()
        self._runs: set[int] = set()

    def same(self, text: str) -> bool:
        """Whether a file had this text before, white space aside; it is remembered."""
        digest = hashlib.blake2b("".join(text.split()).encode(), digest_size=12).digest()
        known = digest in self._texts
        self._texts.add(digest)
        return known

    def similar(self, tokens: NDArray[np.uint16]) -> bool:
        """Whether earlier files have most of these tokens' runs; they are remembered if not."""
        runs = sampled_runs(tokens).tolist()
        if len(runs) >= MIN_RUNS and sum(run in self._runs for run in runs) > MAX_SHARE * len(runs):
            return True
        self._runs.update(runs)
        return False

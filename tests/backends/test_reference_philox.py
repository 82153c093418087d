"""Philox4x32-10 against the known answers that Random123 publishes."""

from __future__ import annotations

import numpy as np
import pytest

from monotape.backends.reference.philox import philox4x32, token_words

PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI, (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, int, int, int]
) -> None:
    got = philox4x32(np.array([counter, counter], np.uint32), key)
    assert got.dtype == np.uint32
    assert got.tolist() == [list(words)] * 2


def test_a_token_has_its_own_lane_of_its_own_counter() -> None:
    seed, position = 0x0123456789ABCDEF, 70001
    ids = np.array([0, 3, 4, 151935], np.int64)
    got = token_words(seed, position, ids)
    for token, word in zip(ids.tolist(), got.tolist(), strict=True):
        counter = np.array([token // 4, position, 0, 0], np.uint32)
        assert word == philox4x32(counter, (0x89ABCDEF, 0x01234567))[token % 4]


def test_positions_and_ids_spread_over_each_other() -> None:
    ids, positions = np.arange(7), np.array([5, 6, 9])
    table = token_words(11, positions[:, None], ids)
    assert table.shape == (3, 7)
    assert table[2].tolist() == token_words(11, 9, ids).tolist()
    assert len(np.unique(table)) == 21

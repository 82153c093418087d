"""Masks as bits: what is packed comes out again, for any number of ids."""

from __future__ import annotations

import numpy as np
import pytest

from monotape.engine.constraint import from_bytes, only, packed, unpacked, without

SIZES = [1, 31, 32, 33, 131, 256]


@pytest.mark.parametrize("vocab", SIZES)
def test_bits_are_those_of_the_mask(vocab: int) -> None:
    mask = np.random.default_rng(vocab).random(vocab) < 0.5
    bits = packed(mask)
    assert bits.dtype == np.uint32 and len(bits) == -(-vocab // 32)
    assert np.array_equal(unpacked(bits, vocab), mask)
    for token_id in range(vocab):
        assert bool(bits[token_id // 32] >> token_id % 32 & 1) == mask[token_id]


@pytest.mark.parametrize("vocab", SIZES)
def test_ids_that_do_not_exist_have_no_bit(vocab: int) -> None:
    """Whatever a grammar sends: the text would otherwise never count as complete."""
    assert unpacked(from_bytes(b"\xff" * 100, vocab), vocab).all()
    assert sum(int(word).bit_count() for word in from_bytes(b"\xff" * 100, vocab)) == vocab
    assert not from_bytes(b"", vocab).any()
    assert np.flatnonzero(unpacked(from_bytes(b"\x01", vocab), vocab)).tolist() == [0]


@pytest.mark.parametrize("vocab", SIZES)
def test_one_id_and_all_but_one(vocab: int) -> None:
    for token_id in {0, vocab // 2, vocab - 1}:
        one = only(token_id, vocab)
        assert np.flatnonzero(unpacked(one, vocab)).tolist() == [token_id]
        assert not without(one, [token_id]).any() and one.any(), "a mask is not changed in place"
        everything = packed(np.ones(vocab, np.bool_))
        assert token_id not in np.flatnonzero(unpacked(without(everything, [token_id]), vocab))

"""How quantised rows lie on a GPU's tape: as the kernel's headers read them."""

from __future__ import annotations

import numpy as np
import pytest

from monotape.backends.cuda import native_tiles
from monotape.backends.cuda.tiles import BLOCK_K, pack
from monotape.plan.formats import GPU_LAYOUTS, TILE_ROWS, Format
from monotape.weights.coded import GROUPS, Coded
from monotape.weights.quantised.codes import E2M1, E4M3

RNG = np.random.default_rng(3)


def packed(fmt: Format, coded: Coded) -> np.ndarray:
    """[tile, block, byte]"""
    rows, k = coded.codes.shape
    tiles = np.zeros((rows // TILE_ROWS, GPU_LAYOUTS[fmt].tile_bytes(k)), np.uint8)
    pack(fmt, coded, tiles)
    return tiles.reshape(len(tiles), k // BLOCK_K, -1)


def lanes_of(codes: np.ndarray) -> np.ndarray:
    """[tile, block, row, column, group, value]"""
    return codes.reshape(-1, TILE_ROWS, codes.shape[1] // BLOCK_K, 4, 4, 8).transpose(0, 2, 1, 4, 3, 5)


def bf16(pairs: np.ndarray) -> np.ndarray:
    """Pairs of 16-bit floats as numbers: [..., pair] to [..., 2 pair + half]."""
    halves = np.stack([pairs << np.uint32(16), pairs & np.uint32(0xFFFF0000)], axis=-1).view(np.float32)
    return halves.astype(np.float64).reshape(*pairs.shape[:-1], -1)


def words_of(tiles: np.ndarray, start: int, each: int) -> np.ndarray:
    """`each` words of 32 bits of every lane: [tile, block, row, column, word]"""
    part = np.ascontiguousarray(tiles[..., start : start + 128 * each]).view(np.uint32)
    return part.reshape(*tiles.shape[:2], TILE_ROWS, 4, each)


def in_halves(tiles: np.ndarray) -> np.ndarray:
    """Eight bits a value, two groups after another: [..., group, word] where a group has neighbouring words."""
    both = [words_of(tiles, start, 4).reshape(*tiles.shape[:2], TILE_ROWS, 4, 2, 2) for start in (0, 512)]
    return np.concatenate(both, axis=-2)


def test_e4m3_needs_masks_and_shifts_alone() -> None:
    """Those of kernels/formats/codes.h, of every code in every place of a lane."""
    codes = RNG.permutation(np.arange(3 * TILE_ROWS * 256) % 256).astype(np.uint8).reshape(-1, 256)
    codes = np.where(codes & 0x7F == 0x7F, 0, codes).astype(np.uint8)
    words = in_halves(packed(Format.FP8, Coded(codes)))
    first = words & np.uint32(0x87F087F0)
    second = (words << np.uint32(4) & np.uint32(0x80F080F0)) | (words >> np.uint32(4) & np.uint32(0x07000700))
    pairs = np.stack([first, second], axis=-1).reshape(*words.shape[:-1], 4)
    assert np.array_equal(bf16(pairs) * 2.0**120, E4M3[lanes_of(codes)])


def test_e2m1_needs_masks_and_shifts_alone() -> None:
    codes = RNG.integers(0, 16, (2 * TILE_ROWS, 256)).astype(np.uint8)
    scales = RNG.integers(100, 140, (2 * TILE_ROWS, 8)).astype(np.uint8)
    tiles = packed(Format.MXFP4, Coded(codes, (scales,)))
    w = words_of(tiles, 0, 4)
    mask = np.uint32(0x81C081C0)
    fourth = (
        (w << np.uint32(1) & np.uint32(0x80008000))
        | (w >> np.uint32(3) & np.uint32(0x01800180))
        | (w >> np.uint32(7) & np.uint32(0x00400040))
    )
    pairs = np.stack([w & mask, w << np.uint32(3) & mask, w << np.uint32(6) & mask, fourth], axis=-1)
    assert np.array_equal(bf16(pairs) * 2.0**126, E2M1[lanes_of(codes)])
    assert np.array_equal(
        tiles[..., 512:].reshape(2, 2, TILE_ROWS, 4), scales.reshape(2, TILE_ROWS, 2, 4).swapaxes(1, 2)
    )


def bytes_of(words: np.ndarray) -> np.ndarray:
    """The bytes of words as numbers, in the order of a group's values: 0, 2, 1, 3, 4, 6, 5, 7."""
    return np.ascontiguousarray(words).view(np.uint8)[..., [0, 2, 1, 3, 4, 6, 5, 7]]


def of_groups(even: list[np.ndarray], odd: list[np.ndarray], times: int) -> np.ndarray:
    """[..., group, value] of words [..., pair]: two of an even group, and two of an odd one with multiples of codes."""
    pairs = [bytes_of(np.stack(words, axis=-1)) for words in (even, odd)]
    assert not np.any(pairs[1] % times)
    return np.stack([pairs[0], pairs[1] // times], axis=-2).reshape(*even[0].shape[:-1], 4, 8)


def test_integers_of_five_bits_need_masks_and_shifts_alone() -> None:
    codes = RNG.integers(0, 32, (2 * TILE_ROWS, 256)).astype(np.uint8)
    scales = RNG.random((2 * TILE_ROWS, 8)).astype(np.float16)
    tiles = packed(Format.Q5_0, Coded(codes, (scales,)))
    w, high = words_of(tiles, 0, 4), words_of(tiles, 512, 1)
    bits = np.array([[4, 6, 2, 0], [3, 5, 1, 7]], np.uint32)  # of even groups and of odd ones, words 0 to 3
    above, below = (high >> bit & np.uint32(0x01010101) for bit in bits)
    even = w & np.uint32(0x0F0F0F0F) | above << np.uint32(4)
    odd = w & np.uint32(0xF0F0F0F0) | below << np.uint32(3)
    seen = of_groups([even[..., 0::2], even[..., 1::2]], [odd[..., 0::2], odd[..., 1::2]], 8)
    assert np.array_equal(seen, lanes_of(codes))


def test_integers_of_six_bits_need_masks_and_shifts_alone() -> None:
    codes = RNG.integers(0, 64, (TILE_ROWS, 256)).astype(np.uint8)
    scales = RNG.integers(-128, 128, (TILE_ROWS, 16)).astype(np.int8)
    d = RNG.random((TILE_ROWS, 2)).astype(np.float16)
    tiles = packed(Format.Q6_K, Coded(codes, (scales,), (d,)))
    w, third = words_of(tiles, 0, 4), words_of(tiles, 512, 2)
    first, second = w[..., 0::2], w[..., 1::2]
    last = first & np.uint32(0xC0C0C0C0)
    last |= third >> np.uint32(2) & np.uint32(0x30303030) | second << np.uint32(2) & np.uint32(0x0C0C0C0C)
    lower = np.uint32(0x3F3F3F3F)
    seen = of_groups([first & lower, third & lower], [second & ~np.uint32(0x03030303), last], 4)
    assert np.array_equal(seen, lanes_of(codes))
    strip = tiles[..., 768:832].view(np.int8).reshape(1, 2, TILE_ROWS, 4, 2)  # row, slot, half
    assert np.array_equal(
        strip.swapaxes(3, 4).reshape(2, TILE_ROWS, 8), scales.reshape(TILE_ROWS, 2, 8).swapaxes(0, 1)
    )
    assert np.array_equal(np.ascontiguousarray(tiles[..., 832:]).view(np.float16)[0], d.T)


def test_integers_of_four_bits_share_bytes() -> None:
    """A product takes words as they lie: the first and the third of groups 0 and 1, the others of groups 2 and 3."""
    codes = RNG.integers(0, 16, (2 * TILE_ROWS, 256)).astype(np.uint8)
    scales = RNG.random((2 * TILE_ROWS, 8)).astype(np.float16)
    w = words_of(packed(Format.INT4_G32, Coded(codes, (scales,))), 0, 4)
    even, odd = w & np.uint32(0x0F0F0F0F), w & np.uint32(0xF0F0F0F0)
    seen = of_groups([even[..., :2], even[..., 2:]], [odd[..., :2], odd[..., 2:]], 16)
    assert np.array_equal(seen, lanes_of(codes))


def test_bytes_are_pairs_by_a_mask() -> None:
    codes = RNG.integers(0, 256, (TILE_ROWS, 128)).astype(np.uint8)
    words = in_halves(packed(Format.INT8, Coded(codes)))
    shape = words.shape
    words = (
        words.reshape(*shape[:-2], 2, 2, 2).swapaxes(-1, -2).reshape(shape)
    )  # words of two groups take turns
    pairs = np.stack([words & np.uint32(0x00FF00FF), words >> np.uint32(8) & np.uint32(0x00FF00FF)], axis=-1)
    assert np.array_equal(
        bf16(pairs.reshape(*words.shape[:-1], 4)) * 2.0**133, lanes_of(codes).astype(np.float64)
    )


#: Bytes of a number of each plane of groups, and how many planes of blocks there are.
PLANES = {
    Format.FP8: ((), 0), Format.FP8_BLOCK: (("f4",), 0), Format.INT8: ((), 0), Format.MXFP4: (("u1",), 0),
    Format.INT4_G32: (("f2",), 0), Format.INT4_G64: (("f2",), 0), Format.INT4_G128: (("f2",), 0),
    Format.INT4_G32Z: (("f2", "f2"), 0), Format.INT4_G64Z: (("f2", "f2"), 0), Format.INT4_G128Z: (("f2", "f2"), 0),
    Format.Q8: (("f2",), 0), Format.Q4_1: (("f2", "f2"), 0), Format.Q5_0: (("f2",), 0),
    Format.Q4_K: (("u1", "u1"), 2), Format.Q5_K: (("u1", "u1"), 2), Format.Q6_K: (("i1",), 1),
    Format.K_MIXED: (("i1", "i1"), 2), Format.WIDE: (("f4", "f4"), 0),
}  # fmt: skip
BITS = {Format.Q5_0: 5, Format.Q5_K: 5, Format.Q6_K: 6, Format.K_MIXED: 6}
WHOLE_BYTES = (Format.FP8, Format.FP8_BLOCK, Format.INT8, Format.Q8, Format.WIDE)


@pytest.mark.parametrize("fmt", native_tiles.FORMATS, ids=lambda fmt: fmt.value)
def test_native_tiles_have_the_same_bits(fmt: Format) -> None:
    """Where tiles lie apart as well, and planes are parts of larger ones."""
    tiles, k = 5, 384
    assert native_tiles.knows_layout(fmt)

    def numbers(kind: str, columns: int) -> np.ndarray:
        """Any bits; every second column of twice as many."""
        wide = RNG.integers(0, 256, (tiles * TILE_ROWS, 2 * columns * np.dtype(kind).itemsize)).astype(
            np.uint8
        )
        return wide.view(kind)[:, ::2]

    of_groups, row_planes = PLANES[fmt]
    codes = numbers("u1", k) & np.uint8(0xFF if fmt in WHOLE_BYTES else (1 << BITS.get(fmt, 4)) - 1)
    coded = Coded(
        codes,
        tuple(numbers(kind, k // GROUPS[fmt]) for kind in of_groups),
        tuple(numbers("f2", k // BLOCK_K) for _ in range(row_planes)),
    )
    size = GPU_LAYOUTS[fmt].tile_bytes(k)
    ours, theirs = (np.full((2 * tiles, size), 0xA5, np.uint8) for _ in range(2))
    native_tiles.pack(fmt, coded, ours[::2])
    pack(fmt, coded, theirs[::2])
    assert np.array_equal(ours, theirs)

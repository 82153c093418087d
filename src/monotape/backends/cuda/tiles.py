"""How quantised weights lie on a GPU's tape: the codes of a block, then the numbers of its groups.

kernels/formats/codes.h and scales.h read what is written here. A block has eight rows and 128 values of k, four groups
of 32; a lane has a row and eight values of each group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.plan.formats import TILE_ROWS, Format
from monotape.weights.coded import Coded
from monotape.weights.tapes import Bytes

BLOCK_K = 128
_LANE = (
    4,
    4,
    8,
)  # groups, columns and values of a row's block: lane 4 row + column has eight values of each group
Codes = NDArray[np.uint8]


def pack(fmt: Format, coded: Coded, out: Bytes) -> None:
    """Rows, as many as `out` has tiles for. The tiles of `out` may lie apart."""
    tiles, blocks = out.shape[0], coded.codes.shape[1] // BLOCK_K
    lanes = coded.codes.reshape(tiles, TILE_ROWS, blocks, *_LANE).transpose(0, 2, 1, 4, 3, 5)
    parts = [part.reshape(tiles, blocks, -1) for part in _CODES[fmt](lanes)]
    if coded.of_groups:
        parts.append(_strip(coded.of_groups, tiles, blocks))
    if coded.of_rows:
        parts.append(_strip(coded.of_rows, tiles, blocks))
    out.reshape(tiles, blocks, -1)[:] = np.concatenate(parts, axis=2)


def _strip(numbers: tuple[NDArray[Any], ...], tiles: int, blocks: int) -> Bytes:
    """Numbers of a block, row after row, those of a group together; of eight groups, 4 h + s is half h of slot s."""
    each = np.stack([part.reshape(tiles, TILE_ROWS, blocks, -1) for part in numbers], axis=-1)
    if each.shape[3] == 8:
        each = each.reshape(*each.shape[:3], 2, 4, -1).swapaxes(3, 4)
    strip = np.ascontiguousarray(np.moveaxis(each, 2, 1))
    return strip.reshape(tiles, blocks, -1).view(np.uint8)


# Codes of a format. Lanes are [tile, block, row, column, group, value].
def _words(pieces: NDArray[np.uint32]) -> Bytes:
    """Bits that do not overlap, of the last two axes, as one word."""
    words = np.bitwise_or.reduce(np.bitwise_or.reduce(pieces, axis=-1), axis=-1)
    return np.ascontiguousarray(words).view(np.uint8)


def _pairs(lanes: Codes) -> NDArray[np.uint32]:
    """[..., pair, half]: values 2 n and 2 n + 1."""
    return lanes.reshape(*lanes.shape[:-1], 4, 2).astype(np.uint32)


def _even_and_odd(lanes: Codes) -> tuple[Codes, Codes]:
    """Of groups 0 and 2, and of 1 and 3: [..., pair, byte]. Tensor cores multiply the bytes in this order."""
    ordered = lanes[..., [0, 2, 1, 3, 4, 6, 5, 7]]
    return ordered[..., 0::2, :], ordered[..., 1::2, :]


def _four_bits(lanes: Codes) -> list[Bytes]:
    """Four bytes with groups 0 and 1 in their lower and upper halves, four with groups 2 and 3, and so on in turns."""
    even, odd = _even_and_odd(lanes)
    return [_in_turns((even & np.uint8(15)) | odd << np.uint8(4))]


def _in_turns(groups: Codes) -> Codes:
    """[..., group, byte]: the first four bytes of all groups, then the others."""
    return groups.reshape(*groups.shape[:-1], 2, 4).swapaxes(-3, -2)


def _five_bits(lanes: Codes) -> list[Bytes]:
    even, odd = _even_and_odd(lanes)
    of_even, of_odd = (np.array(bits, np.uint8)[:, None] for bits in ([4, 6, 2, 0], [3, 5, 1, 7]))
    by_word = (*even.shape[:-2], 4, 4)  # [..., word, byte]
    high = (even >> np.uint8(4)).reshape(by_word) << of_even | (odd & np.uint8(1)).reshape(by_word) << of_odd
    return [(even & np.uint8(15)) | odd >> np.uint8(1) << np.uint8(4), np.bitwise_or.reduce(high, axis=-2)]


def _six_bits(lanes: Codes) -> list[Bytes]:
    even, odd = _even_and_odd(lanes)
    last = odd[..., 4:]
    first = even[..., :4] | last >> np.uint8(4) << np.uint8(6)
    second = odd[..., :4] << np.uint8(2) | last & np.uint8(3)
    third = even[..., 4:] | (last >> np.uint8(2) & np.uint8(3)) << np.uint8(6)
    return [np.concatenate([first, second], axis=-1), third]


def _in_halves(words: NDArray[Any]) -> list[Bytes]:
    """Two groups of all lanes, then the other two: [tile, block, row, column, group, ...]."""
    return [np.ascontiguousarray(half).view(np.uint8) for half in (words[..., :2, :], words[..., 2:, :])]


def _bytes(lanes: Codes) -> list[Bytes]:
    """Groups 0 and 1 of all lanes, then 2 and 3; of the two groups four bytes each, in turns."""
    ordered = lanes[..., [0, 2, 1, 3, 4, 6, 5, 7]]
    return [_in_turns(half) for half in (ordered[..., :2, :], ordered[..., 2:, :])]


def _e4m3(lanes: Codes) -> list[Bytes]:
    # [..., word, pair, half]: values 4 w + 2 p + h
    values = lanes.reshape(*lanes.shape[:-1], 2, 2, 2).astype(np.uint16)
    first, second = values[..., 0, :], values[..., 1, :]
    bits = (first & 0x80) << 8 | (first & 0x7F) << 4
    bits |= (second & 0x80) << 4 | (second & 0x70) << 8 | (second & 0x0F)
    return _in_halves(bits.reshape(*lanes.shape[:-1], 4))


def _e2m1(lanes: Codes) -> list[Bytes]:
    values = _pairs(lanes)
    sign, rest, exponent, mantissa = values >> 3, values & 7, values >> 1 & 3, values & 1
    placed = np.stack(
        [
            *(sign[..., n, :] << (15 - 3 * n) | rest[..., n, :] << (6 - 3 * n) for n in range(3)),
            sign[..., 3, :] << 14 | exponent[..., 3, :] << 10 | mantissa[..., 3, :] << 13,
        ],
        axis=-2,
    ).astype(np.uint32)
    return [_words(placed << np.array([0, 16], np.uint32))]


_CODES: dict[Format, Callable[[Codes], list[Bytes]]] = {
    Format.FP8: _e4m3,
    Format.FP8_BLOCK: _e4m3,
    Format.INT8: _bytes,
    Format.INT4_G32: _four_bits,
    Format.INT4_G64: _four_bits,
    Format.INT4_G128: _four_bits,
    Format.INT4_G32Z: _four_bits,
    Format.INT4_G64Z: _four_bits,
    Format.INT4_G128Z: _four_bits,
    Format.MXFP4: _e2m1,
    Format.Q8: _bytes,
    Format.Q4_1: _four_bits,
    Format.Q5_0: _five_bits,
    Format.Q4_K: _four_bits,
    Format.Q5_K: _five_bits,
    Format.Q6_K: _six_bits,
    Format.K_MIXED: _six_bits,
    Format.WIDE: _bytes,
}

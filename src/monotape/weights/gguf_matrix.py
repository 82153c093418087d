"""GGUF's stored blocks as codes and scales: nothing is unpacked to floats, nothing is rounded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.weights.gguf_header import GgufTensor
from monotape.weights.quantised.k_matrix import KMatrix, KRows
from monotape.weights.quantised.packing import Codes
from monotape.weights.quantised.stored import Kind, StoredMatrix

Raw = NDArray[np.uint8]
ReadRaw = Callable[[int, int], Raw]  # the stored bytes of rows, in the order of Hugging Face

BLOCK, SUPER = 32, 256  # values of a block, of a K-quant's block
#: Bytes of a block.
_BYTES = {
    "q4_0": 18, "q4_1": 20, "q5_0": 22, "q8_0": 34, "mxfp4": 17, "q4_k": 144, "q5_k": 176, "q6_k": 210,
}  # fmt: skip
_KINDS = {
    "q4_0": Kind.INT4, "q4_1": Kind.INT4, "q5_0": Kind.INT5, "q8_0": Kind.INT8, "mxfp4": Kind.E2M1,
}  # fmt: skip
_K_SCALES = slice(4, 16)  # of Q4_K and Q5_K: 8 scales and 8 minima of six bits


def stored_matrix(name: str, tensor: GgufTensor, read: ReadRaw) -> StoredMatrix | None:
    """A matrix of blocks of 32 values; None for another format."""
    stored = tensor.stored
    if stored not in _KINDS:
        return None
    rows, columns = tensor.shape

    def of_blocks(take: Callable[[Raw], NDArray[Any]]) -> Callable[[int, int], NDArray[Any]]:
        return lambda start, stop: _flat(take(_blocks(read(start, stop), stored)))

    is_mx = stored == "mxfp4"
    return StoredMatrix(
        name, (rows, columns), _KINDS[stored], (1, BLOCK), "e8m0" if is_mx else "f16",
        of_blocks(partial(_codes, stored)), of_blocks(_exponents if is_mx else partial(_halves, 0)),
        read_mins=of_blocks(partial(_halves, 2)) if stored == "q4_1" else None, name_of_format=stored,
    )  # fmt: skip


def k_matrix(name: str, tensor: GgufTensor, read: ReadRaw) -> KMatrix | None:
    """A matrix of K-quants; None for another format."""
    unpack = {"q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k}.get(tensor.stored)
    if unpack is None:
        return None
    rows, columns = tensor.shape
    return KMatrix(
        name, (rows, columns), tensor.stored,
        lambda start, stop: unpack(_blocks(read(start, stop), tensor.stored)),
    )  # fmt: skip


def _blocks(raw: Raw, stored: str) -> Raw:
    """[rows, blocks, bytes of a block]."""
    size = _BYTES[stored]
    return raw.reshape(raw.shape[0], raw.shape[1] // size, size)


def _halves(at: int, blocks: Raw) -> NDArray[np.float16]:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")[..., 0]


def _exponents(blocks: Raw) -> Codes:
    return blocks[..., 0]


def _codes(stored: str, blocks: Raw) -> Codes:
    if stored == "q8_0":
        return blocks[..., 2:] ^ np.uint8(0x80)  # int8 with 128 added to it
    codes = _nibbles(blocks[..., -BLOCK // 2 :])
    if stored == "q5_0":
        codes |= np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little") << np.uint8(4)
    return codes


def _nibbles(packed: Raw) -> Codes:
    """The low halves of the bytes, then the high halves."""
    return np.concatenate([packed & np.uint8(0x0F), packed >> np.uint8(4)], axis=-1)


def _flat(array: NDArray[Any]) -> NDArray[Any]:
    """[rows, columns]; a range of rows may be empty."""
    return array.reshape(array.shape[0], prod(array.shape[1:]))


def _q4_k(blocks: Raw) -> KRows:
    return _with_six_bits(blocks, _nibbles(_quarters(blocks[..., 16:144])))


def _q5_k(blocks: Raw) -> KRows:
    codes = _nibbles(_quarters(blocks[..., 48:176])).reshape(*blocks.shape[:2], 8, BLOCK)
    fifth = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    codes |= fifth << np.uint8(4)
    return _with_six_bits(blocks, codes)


def _quarters(packed: Raw) -> Raw:
    """Each 32 bytes hold 64 values: the low halves of all of them, then the high ones."""
    return packed.reshape(*packed.shape[:2], 4, BLOCK)


def _with_six_bits(blocks: Raw, codes: Codes) -> KRows:
    """The scales and minima of eight groups, of which the last four lie in bits that the first four leave."""
    first, second, last = np.split(blocks[..., _K_SCALES], 3, axis=-1)
    low, six, two = np.uint8(0x0F), np.uint8(0x3F), np.uint8(0x30)
    scales = np.concatenate([first & six, last & low | first >> np.uint8(2) & two], axis=-1)
    mins = np.concatenate([second & six, last >> np.uint8(4) | second >> np.uint8(2) & two], axis=-1)
    scales, mins = (_flat(np.repeat(part, 2, axis=-1).view(np.int8)) for part in (scales, mins))
    return KRows(_flat(codes), scales, mins, _halves(0, blocks), _halves(2, blocks))


def _q6_k(blocks: Raw) -> KRows:
    """Two halves of 128 values; a byte of the first 64 has two of its values, a byte of the other 32 bits of four."""
    shape = (*blocks.shape[:2], 2, 4, BLOCK)
    low = _nibbles(blocks[..., :128].reshape(*blocks.shape[:2], 2, 2 * BLOCK)).reshape(shape)
    high = (
        blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, BLOCK)
        >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    )
    codes = low | (high & np.uint8(3)) << np.uint8(4)
    scales, d = _flat(np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)), _halves(208, blocks)
    with np.errstate(over="ignore", invalid="ignore"):  # KMatrix refuses what is not finite
        return KRows(_flat(codes), scales, scales, d, d * np.float16(32))

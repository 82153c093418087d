"""KV read back: the keys and values that lie in a sequence's memory, and a reference that goes on from them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.backends.cuda.backend import CudaBackend
from monotape.plan.formats import Format
from monotape.plan.gpu import UNIT_POSITIONS
from monotape.weights.quantised.codes import E4M3

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def slot_of(position: int) -> int:
    """kernels/token/kv.h: value_slot"""
    return position % 8 // 2 * 8 + position // 8 * 2 + position % 2


def byte_of(slot: int) -> int:
    """kernels/token/kv.h: value_byte"""
    return slot & ~3 | (slot & 1) << 1 | slot >> 1 & 1


SLOTS = np.array([slot_of(at) for at in range(UNIT_POSITIONS)])
BYTES = np.array([byte_of(slot) for slot in range(UNIT_POSITIONS)])


def halves(fmt: Format, raw: Bytes) -> Floats:
    if fmt is Format.F16:
        return raw.view(np.float16).astype(np.float32)
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def key_codes(fmt: Format, raw: Bytes) -> Bytes:
    """Two codes in each 16 bits, the first where a half of this format has its bits."""
    words = raw.view(np.uint16).astype(np.int64).reshape(-1, 2, 2)  # of eight codes
    if fmt is Format.F16:
        first, second = words >> 8 & 0x80 | words >> 7 & 0x7F, words >> 7 & 0x80 | words & 0x7F
    else:
        first = words >> 8 & 0x80 | words >> 4 & 0x7F
        second = words >> 4 & 0x80 | words >> 8 & 0x70 | words & 0xF
    return np.stack((first, second), 2).astype(np.uint8).reshape(-1)


def stored(backend: CudaBackend, sequence: Any, layer: int, count: int) -> tuple[Floats, Floats]:
    """Keys and values of a layer as they lie in the KV cache, [kv head, position, head_dim]."""
    kv, half, units = backend.gpu_rank.kv, backend.gpu_rank.half, -(-count // UNIT_POSITIONS)
    everything = sequence._memory.read(np.empty(sequence.bytes, np.uint8))
    raw = everything.reshape(kv.layers, kv.kv_heads, sequence.units, kv.unit_bytes)[layer, :, :units]
    blocks, tiles, each = -(-kv.head_dim // 32), kv.head_dim // 8, 256 if kv.narrow else 512
    of_keys, end = 4 * blocks * each, (4 * blocks + tiles) * each
    powers = np.ones((kv.kv_heads, units, 2, UNIT_POSITIONS), np.float32)
    key_bytes, value_bytes = raw[..., :of_keys].reshape(-1), raw[..., of_keys:end].reshape(-1)
    if kv.narrow:
        keys = E4M3[key_codes(half, key_bytes)]
        values = E4M3[value_bytes.reshape(-1, UNIT_POSITIONS)[:, BYTES]]
        powers = np.ldexp(np.float32(1), raw[..., end:].copy().view(np.int8).astype(int)).reshape(
            powers.shape
        )
        powers = powers[..., SLOTS]
    else:
        keys, values = halves(half, key_bytes), halves(half, value_bytes)
    keys = keys.reshape(kv.kv_heads, units, 4, blocks, 8, 32).transpose(0, 1, 2, 4, 3, 5)
    keys = keys.reshape(kv.kv_heads, units, UNIT_POSITIONS, -1)[..., : kv.head_dim] * powers[:, :, 0, :, None]
    values = values.reshape(kv.kv_heads, units, kv.head_dim, UNIT_POSITIONS)[..., SLOTS].swapaxes(-1, -2)
    values = values * powers[:, :, 1, :, None]

    def joined(parts: Any) -> Floats:
        found: Floats = parts.reshape(kv.kv_heads, -1, kv.head_dim)[:, :count].astype(np.float32)
        return found

    return joined(keys), joined(values)


def continued(want: Any, kept: list[tuple[Floats, Floats]], length: int, tokens: tuple[int, ...]) -> Floats:
    """The reference's logits of tokens that follow these keys and values."""
    sequence = want.new_sequence()
    sequence.reserve(length + len(tokens))
    for layer, (keys, values) in enumerate(kept):
        sequence.keys[layer, :, :length], sequence.values[layer, :, :length] = keys, values
    sequence.length = length
    logits: Floats = want.logits(tokens, sequence)
    return logits

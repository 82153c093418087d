"""The forward pass in NumPy float32, one operation after the other: what every backend must agree with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from monotape.backends.reference.weights import ReferenceWeights, Roles
from monotape.models.rope import position_tables
from monotape.models.spec import ModelSpec

Floats = NDArray[np.float32]


class ReferenceSequence:
    """Keys and values of one conversation: [layer, kv head, position, head_dim], grown by doubling."""

    def __init__(self, spec: ModelSpec) -> None:
        self.length = 0
        shape = (spec.layers, spec.kv_heads, 0, spec.head_dim)
        self.keys, self.values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)

    @property
    def bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def truncate(self, length: int) -> None:
        assert 0 <= length <= self.length, f"cannot keep {length} of {self.length} positions"
        self.length = length

    def reserve(self, positions: int) -> None:
        """Makes room for so many positions in all."""
        capacity = self.keys.shape[2]
        if positions > capacity:
            missing = max(positions, 2 * capacity) - capacity
            room = ((0, 0), (0, 0), (0, missing), (0, 0))
            self.keys, self.values = np.pad(self.keys, room), np.pad(self.values, room)


def linear(x: Floats, matrix: Floats) -> Floats:
    """Each row of the matrix makes one output."""
    product: Floats = x @ matrix.T
    return product


def rms_norm(x: Floats, gain: Floats, eps: float) -> Floats:
    mean_square: Floats = np.mean(x * x, axis=-1, keepdims=True)
    normed: Floats = x / np.sqrt(mean_square + np.float32(eps))
    return normed * gain


def rotate(heads: Floats, cosines: Floats, sines: Floats) -> Floats:
    """RoPE on the first 2 * half values of each head, paired (i, i + half); heads are [row, head, value]."""
    half = cosines.shape[-1]
    cosines, sines = cosines[:, None, :], sines[:, None, :]
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    return np.concatenate(
        (first * cosines - second * sines, second * cosines + first * sines, rest), axis=-1, dtype=np.float32
    )


def softmax(scores: Floats) -> Floats:
    weights: Floats = np.exp(scores - scores.max(axis=-1, keepdims=True))
    total: Floats = weights.sum(axis=-1, keepdims=True)
    return weights / total


def silu(x: Floats) -> Floats:
    with np.errstate(over="ignore"):  # exp(-x) may be infinite, and x / inf is the 0 that is meant
        gated: Floats = x / (1 + np.exp(-x))
    return gated


def visible(rows: int, positions: int, window: int | None) -> NDArray[np.bool_]:
    """Which of `positions` each of the last `rows` sees: itself and what came before, in its window."""
    query = np.arange(positions - rows, positions)[:, None]
    key = np.arange(positions)[None, :]
    return (key <= query) & (key > query - (window or positions))


class ReferenceModel:
    """A model with its weights: tokens in, logits out, keys and values kept in a sequence."""

    def __init__(self, spec: ModelSpec, weights: ReferenceWeights, context: int) -> None:
        self.spec = spec
        self.weights = weights
        self.context = context
        self._cosines, self._sines = position_tables(spec.rope, context)

    def hidden(self, tokens: Sequence[int], sequence: ReferenceSequence) -> Floats:
        """Appends `tokens` to the sequence and gives the final hidden state of each: [row, width]."""
        start, end = sequence.length, sequence.length + len(tokens)
        assert end <= self.context, f"position {end - 1} is past the context of {self.context}"
        sequence.reserve(end)
        x = self.weights.model["embedding"][list(tokens)]
        for layer, tensors in enumerate(self.weights.layers):
            normed = rms_norm(x, tensors["attention_norm"], self.spec.norm_eps)
            x = x + self._attention(normed, layer, tensors, sequence, start, end)
            normed = rms_norm(x, tensors["ffn_norm"], self.spec.norm_eps)
            gated = silu(linear(normed, tensors["gate"])) * linear(normed, tensors["up"])
            x = x + linear(gated, tensors["down"])
        sequence.length = end
        return rms_norm(x, self.weights.model["final_norm"], self.spec.norm_eps)

    def logits(self, hidden: Floats) -> Floats:
        """[row, width] to [row, vocab]."""
        return linear(hidden, self.weights.head)

    def _attention(
        self, x: Floats, layer: int, tensors: Roles, sequence: ReferenceSequence, start: int, end: int
    ) -> Floats:
        """Rows start..end attend to positions 0..end; their keys and values join the sequence first."""
        spec, rows = self.spec, end - start
        q, k, v = (self._project(x, tensors, role) for role in ("q", "k", "v"))
        cosines, sines = self._cosines[start:end], self._sines[start:end]
        q, k = rotate(q, cosines, sines), rotate(k, cosines, sines)
        sequence.keys[layer, :, start:end] = k.transpose(1, 0, 2)
        sequence.values[layer, :, start:end] = v.transpose(1, 0, 2)

        group = spec.heads // spec.kv_heads  # consecutive q heads share a kv head
        queries = q.transpose(1, 0, 2).reshape(spec.kv_heads, group, rows, spec.head_dim)
        keys = sequence.keys[layer, :, None, :end]  # [kv head, 1, position, head_dim]
        values = sequence.values[layer, :, None, :end]
        scores = queries @ keys.swapaxes(-1, -2) * np.float32(spec.attention_scale)
        scores = np.where(visible(rows, end, spec.windows[layer]), scores, np.float32(-np.inf))
        mixed: Floats = (softmax(scores) @ values).reshape(spec.heads, rows, spec.head_dim)
        return linear(mixed.transpose(1, 0, 2).reshape(rows, -1), tensors["output"])

    def _project(self, x: Floats, tensors: Roles, role: str) -> Floats:
        """q, k or v of each row as [row, head, head_dim], with the bias and the norm that the family has."""
        projected = linear(x, tensors[role])
        if f"{role}_bias" in tensors:
            projected = projected + tensors[f"{role}_bias"]
        heads = projected.reshape(len(x), -1, self.spec.head_dim)
        if f"{role}_norm" in tensors:
            heads = rms_norm(heads, tensors[f"{role}_norm"], self.spec.norm_eps)
        return heads

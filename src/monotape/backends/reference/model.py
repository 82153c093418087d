"""The forward pass in NumPy float32, one operation after the other: what every backend must agree with.

Every row is computed by itself, with operations whose shapes depend on its position alone. A matrix product may sum in
another order when it has more rows, and a result must not depend on how a prompt was cut or what of it was cached.

Ranks are a loop: each has its share of every matrix and its own residual, and the plan's steps say what they exchange.
One rank is the model as its authors wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from monotape.backends.protocol import KvSequence
from monotape.backends.reference.experts import Choice, activations, choose, gated, weighted_sum
from monotape.backends.reference.shards import shard
from monotape.backends.reference.weights import ReferenceWeights, Roles
from monotape.errors import ResourceError
from monotape.models.lanes import steps, tensor_parallel
from monotape.models.layer import modules_of
from monotape.models.rope import position_tables
from monotape.models.spec import ModelSpec
from monotape.plan.formats import Format
from monotape.plan.types import Plan
from monotape.weights.rounding import fp8_heads

Floats = NDArray[np.float32]
_GROWTH = 256  # positions; KV grows in steps of this


class ReferenceSequence:
    """Keys and values of one conversation: [layer, kv head, position, head_dim], in arrays that grow with it.

    The KV heads of the ranks follow each other; a head that several ranks have is there as often.
    """

    def __init__(self, plan: Plan) -> None:
        self.length = 0
        self._kv, self._heads = plan.ranks[0].kv, sum(rank.kv.kv_heads for rank in plan.ranks)
        self.keys, self.values = self._empty(0), self._empty(0)

    @property
    def bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def truncate(self, length: int) -> None:
        assert 0 <= length <= self.length, f"cannot keep {length} of {self.length} positions"
        self.length = length

    def copy_from(self, other: KvSequence, length: int) -> None:
        assert isinstance(other, ReferenceSequence) and self.length == 0 and length <= other.length
        self.reserve(length)
        self.keys[:, :, :length], self.values[:, :, :length] = (
            other.keys[:, :, :length],
            other.values[:, :, :length],
        )
        self.length = length

    def reserve(self, positions: int) -> None:
        """Makes room for `positions` positions in all. The system gives memory to those that are written."""
        if positions <= self._capacity:
            return
        try:
            self._move(_rounded(positions))
        except MemoryError as error:
            raise ResourceError(
                f"This machine does not have the memory for the KV of {positions} positions in float32.",
                "Ask for fewer tokens, set a smaller --max-model-len, or use --backend cpu.",
            ) from error

    def shrink(self) -> bool:
        """Gives back the room that was reserved and not used, where it is more than half; says whether it was."""
        capacity = _rounded(self.length)
        if 2 * capacity >= self._capacity:
            return False
        self._move(capacity)
        return True

    @property
    def _capacity(self) -> int:
        return int(self.keys.shape[2])

    def _empty(self, capacity: int) -> Floats:
        return np.empty((self._kv.layers, self._heads, capacity, self._kv.head_dim), np.float32)

    def _move(self, capacity: int) -> None:
        """To arrays with that much room: both, or neither where there is no memory for both."""
        keys, values = self._empty(capacity), self._empty(capacity)
        keys[:, :, : self.length] = self.keys[:, :, : self.length]
        values[:, :, : self.length] = self.values[:, :, : self.length]
        self.keys, self.values = keys, values


def _rounded(positions: int) -> int:
    return -(-positions // _GROWTH) * _GROWTH


def linear(x: Floats, matrix: Floats) -> Floats:
    """Each row of the matrix makes one output; each row of `x` is one product of matrix and vector."""
    product: Floats = np.matmul(matrix, x[..., None])[..., 0]
    return product


def biased(x: Floats, tensors: Roles, role: str) -> Floats:
    """A product with the bias that the family has."""
    made = linear(x, tensors[role])
    return made + tensors[f"{role}_bias"] if f"{role}_bias" in tensors else made


def router_logits(x: Floats, tensors: Roles) -> Floats:
    """A product whose equal rows give equal logits, so that ties are ties.

    A BLAS adds up the columns at the edge of a block in another order than those inside.
    """
    made: Floats = np.einsum("rk,ek->re", x, tensors["router"], dtype=np.float64).astype(np.float32)
    return made + tensors["router_bias"] if "router_bias" in tensors else made


def rms_norm(x: Floats, gain: Floats, eps: float) -> Floats:
    mean_square: Floats = np.mean(x * x, axis=-1, keepdims=True)
    normed: Floats = x / np.sqrt(mean_square + np.float32(eps))
    return normed * gain


def rotate(heads: Floats, cosines: Floats, sines: Floats, interleaved: bool = False) -> Floats:
    """RoPE on the first 2 * half values of each head, paired (i, i + half); heads are [row, head, value].

    Interleaved, pairs are (2 i, 2 i + 1).
    """
    half = cosines.shape[-1]
    if interleaved:
        order = np.concatenate((np.arange(0, 2 * half, 2), np.arange(1, 2 * half, 2)))
        turned = heads.copy()
        turned[..., order] = rotate(heads[..., order], cosines, sines)
        return turned
    cosines, sines = cosines[:, None, :], sines[:, None, :]
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    return np.concatenate(
        (first * cosines - second * sines, second * cosines + first * sines, rest), axis=-1, dtype=np.float32
    )


def softmax(scores: Floats, sinks: Floats | None = None) -> Floats:
    """Over the last axis. A sink is one more score in it, whose weight is dropped."""
    peak = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        peak = np.maximum(peak, sinks)
    weights: Floats = np.exp(scores - peak)
    total: Floats = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks - peak)
    return weights / total


def visible(position: int, window: int | None) -> slice:
    """Which positions the row at `position` sees: itself and those before it, in its window."""
    return slice(max(0, position + 1 - window) if window else 0, position + 1)


class ReferenceModel:
    """A model with its weights: tokens in, logits out, keys and values kept in a sequence."""

    def __init__(self, spec: ModelSpec, plan: Plan, weights: ReferenceWeights, context: int) -> None:
        self.spec = spec
        self.plan = plan
        self.weights = weights
        self.context = context
        self._shards = [shard(spec, rank, weights) for rank in plan.ranks]
        self._steps = plan.steps or steps(tensor_parallel(1), spec.modules)
        self._modules = modules_of(spec.layer)
        self._cosines, self._sines = position_tables(spec.rope, context)

    def hidden(self, tokens: Sequence[int], sequence: ReferenceSequence) -> Floats:
        """Appends `tokens` to the sequence and gives what the head of each rank reads: [rank, row, width]."""
        start, end = sequence.length, sequence.length + len(tokens)
        assert end <= self.context, f"position {end - 1} is past the context of {self.context}"
        sequence.reserve(end)
        residuals = [self.weights.model["embedding"][list(tokens)]] * len(self._shards)
        partials: dict[int, list[Floats]] = {}
        for module, step in enumerate(self._steps):
            if module < self.spec.modules:
                made = [
                    self._module(module, rank, residual, sequence, start, end)
                    for rank, residual in enumerate(residuals)
                ]
                if step.own:
                    residuals = [x + np.float32(step.own) * o for x, o in zip(residuals, made, strict=True)]
                if step.sends:
                    partials[module] = made
            if step.folds is not None:
                sent = partials[step.folds]
                residuals = [
                    x + in_order(sent, None if step.whole else rank) for rank, x in enumerate(residuals)
                ]
        sequence.length = end
        return self._head_inputs(residuals)

    def logits(self, hidden: Floats) -> Floats:
        """[rank, row, width] to [row, vocab]: each rank has a share of the vocabulary."""
        shares = [linear(x, shares.head) for x, shares in zip(hidden, self._shards, strict=True)]
        return np.concatenate(shares, axis=-1)

    def _head_inputs(self, residuals: list[Floats]) -> Floats:
        eps, kind = self.spec.norm_eps, self.plan.head_input
        if kind == "sum":
            combined = rms_norm(in_order(residuals), self._shards[0].final_norm, eps)
            return np.stack([combined] * len(residuals))
        normed = [
            rms_norm(x, share.final_norm, eps) for x, share in zip(residuals, self._shards, strict=True)
        ]
        if kind == "own":
            return np.stack(normed)
        if kind == "concatenate":
            combined = np.concatenate(normed, axis=-1)
        else:
            combined = in_order(normed) / np.float32(len(normed))
        return np.stack([combined] * len(residuals))

    def _module(
        self, module: int, rank: int, x: Floats, sequence: ReferenceSequence, start: int, end: int
    ) -> Floats:
        """A rank's partial output of a module: what its last matrix adds to the residual."""
        layer, number = divmod(module, len(self._modules))
        if any(matrix.routed for matrix in self._modules[number]):
            return self._experts(x, self._shards[rank].layers[layer])
        tensors, values = self._shards[rank].layers[layer], {"residual": x}
        for matrix in self._modules[number]:
            read = values[matrix.reads]
            if matrix.gain is not None:
                read = rms_norm(read, tensors[matrix.gain], self.spec.norm_eps)
            if matrix.writes == "query":
                values["attended"] = self._attention(read, layer, rank, tensors, sequence, start, end)
            elif matrix.gated:
                gate, up = (biased(read, tensors, role) for role in matrix.parts)
                values[matrix.writes] = gated(gate, up, self.spec.gating)
            else:
                values[matrix.writes] = biased(read, tensors, matrix.parts[0])
        return values["residual"]

    def _experts(self, x: Floats, tensors: Roles) -> Floats:
        """A router and the experts that it chooses, as the layer lists them."""
        read = rms_norm(x, tensors["ffn_norm"], self.spec.norm_eps)
        choice = self._choice(read, tensors)
        return weighted_sum(activations(read, choice, tensors, self.spec.gating), choice, tensors)

    def _choice(self, read: Floats, tensors: Roles) -> Choice:
        assert self.spec.experts is not None, "a router without experts"
        return choose(router_logits(read, tensors), self.spec.experts)

    def _attention(
        self,
        x: Floats,
        layer: int,
        rank: int,
        tensors: Roles,
        sequence: ReferenceSequence,
        start: int,
        end: int,
    ) -> Floats:
        """Rows start..end attend to the positions that they see; their keys and values join the sequence first."""
        spec, rows = self.spec, end - start
        q, k, v = (self._project(x, tensors, role) for role in ("q", "k", "v"))
        cosines, sines = self._cosines[start:end], self._sines[start:end]
        q, k = (rotate(heads, cosines, sines, spec.rope.interleaved) for heads in (q, k))
        kv_heads, before = k.shape[1], sum(other.kv.kv_heads for other in self.plan.ranks[:rank])
        own = slice(before, before + kv_heads)
        if self.plan.ranks[rank].kv.format is Format.FP8:
            k, v = fp8_heads(k), fp8_heads(v)
        sequence.keys[layer, own, start:end] = k.transpose(1, 0, 2)
        sequence.values[layer, own, start:end] = v.transpose(1, 0, 2)

        queries = q.reshape(rows, kv_heads, -1, spec.head_dim)  # consecutive q heads share a kv head
        mixed = np.empty_like(queries)
        sinks = tensors["sinks"].reshape(kv_heads, -1, 1) if "sinks" in tensors else None
        for row in range(rows):
            seen = visible(start + row, spec.windows[layer])
            keys, values = sequence.keys[layer, own, seen], sequence.values[layer, own, seen]
            scores = queries[row] @ keys.swapaxes(-1, -2) * np.float32(spec.attention_scale)
            mixed[row] = softmax(scores, sinks) @ values
        return mixed.reshape(rows, -1)

    def _project(self, x: Floats, tensors: Roles, role: str) -> Floats:
        """q, k or v of each row as [row, head, head_dim], with the bias and the norm that the family has."""
        projected = biased(x, tensors, role)
        heads = projected.reshape(len(x), -1, self.spec.head_dim)
        if f"{role}_norm" in tensors:
            heads = rms_norm(heads, tensors[f"{role}_norm"], self.spec.norm_eps)
        return heads


def in_order(partials: Sequence[Floats], without: int | None = None) -> Floats:
    """The sum of the ranks' partials, added in rank order; nothing added up is zero."""
    total: Floats = np.zeros_like(partials[0])
    first = True
    for rank, partial in enumerate(partials):
        if rank != without:
            total, first = (partial if first else total + partial), False
    return total

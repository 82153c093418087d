"""Laneformer's forward pass as it is trained: the steps of models/lanes.py, arranged so that little memory is moved.

The residual of lane l is written as a part that all lanes share and a few partial outputs of its own:

    X_l = common + settled_l + sum over flying m of coefficient(m) * o_l(m)

A sum over lanes that arrives goes into `common`, once for all lanes. A lane's own partial o_l(m) is *flying* until no
later step changes its coefficient; then it is added to `settled_l`, or dropped if the coefficient has become 0, which
is the rule under Delayed Tensor Parallelism. Lanes that never differ (tensor parallelism, Ladder Residual) have nothing
but `common`, and their matrices are multiplied whole. laneformer.py is the same model without this arrangement; a test
holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from monotape.models.lanes import Lanes, steps
from monotape.training.laneformer import Attention, FeedForward, Laneformer, Layer, Norm

IGNORED = -100  # a target that is not counted


@dataclass(frozen=True, slots=True)
class Change:
    """What one step does to the residuals."""

    coefficients: tuple[tuple[int, float], ...]  # of the partials that fly after it
    settles: tuple[tuple[int, float], ...]  # partials whose coefficient is final, where it is not 0
    folds: int | None  # the module whose sum joins `common`


@dataclass(frozen=True, slots=True)
class Schedule:
    changes: tuple[Change, ...]
    kept_apart: frozenset[int]  # modules whose partials are needed lane by lane
    summed: frozenset[int]  # modules whose sum is needed


def schedule(lanes: Lanes, modules: int) -> Schedule:
    """The steps of models/lanes.py as changes of coefficients."""
    made = steps(lanes, modules)
    touched: dict[int, int] = {}
    for module, step in enumerate(made):
        if step.own:
            touched[module] = module
        if step.folds is not None and not step.whole:
            touched[step.folds] = module
    coefficients: dict[int, float] = {}
    changes = []
    for module, step in enumerate(made):
        if step.own:
            coefficients[module] = coefficients.get(module, 0.0) + step.own
        if step.folds is not None and not step.whole:
            coefficients[step.folds] = coefficients.get(step.folds, 0.0) - 1.0
        done = {one: value for one, value in coefficients.items() if touched[one] == module}
        coefficients = {one: value for one, value in coefficients.items() if one not in done}
        settles = tuple((one, value) for one, value in done.items() if value)
        changes.append(Change(tuple(coefficients.items()), settles, step.folds))
    return Schedule(
        tuple(changes), frozenset(touched), frozenset(step.folds for step in made if step.folds is not None)
    )


class Residuals:
    """All lanes' residuals, [lane, batch, position, width], as the sum that this file's first lines describe."""

    def __init__(self, common: Tensor, plan: Schedule) -> None:
        self._common, self._plan = common, plan
        self._settled: Tensor | None = None
        self._sums: dict[int, Tensor] = {}
        self._partials: dict[int, Tensor] = {}
        self._flying: tuple[tuple[int, float], ...] = ()

    def value(self) -> Tensor:
        """[lane, batch, position, width]; one lane where all are equal."""
        terms = [
            self._partials[module] * value if value != 1 else self._partials[module]
            for module, value in self._flying
        ]
        if self._settled is not None:
            terms.append(self._settled)
        total = self._common[None]
        for term in terms:
            total = total + term
        return total

    def add(self, module: int, partial: Tensor | None, total: Tensor | None) -> None:
        """The step after a module, given its partials by lane and their sum where they are needed."""
        if partial is not None:
            self._partials[module] = partial
        if total is not None:
            self._sums[module] = total
        change = self._plan.changes[module]
        if change.folds is not None:
            self._common = self._common + self._sums[change.folds]
        for one, value in change.settles:
            term = self._partials[one] * value
            self._settled = term if self._settled is None else self._settled + term
        self._flying = change.coefficients


class StreamedLaneformer(Laneformer):
    """The same parameters, names and files as Laneformer. `compute` is the type of activations and products."""

    compute: torch.dtype = torch.float32

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        # Stored: a compiler that is shown how they are made would make them again for every value.
        self.register_buffer("factors", by_value(self.turns), persistent=False)
        self.factors: Tensor

    def forward(self, ids: Tensor) -> Tensor:
        modules = 2 * len(self.model.layers)
        plan = schedule(self.lanes, modules)
        residuals = Residuals(self.model.tok_embeddings(ids).to(self.compute), plan)
        turns = self.factors[:, : ids.shape[1]]
        for number, layer in enumerate(self.model.layers):
            assert isinstance(layer, Layer)
            for module, part in ((2 * number, layer.attention), (2 * number + 1, layer.feed_forward)):
                norm = layer.ffn_norm if module % 2 else layer.attention_norm
                unit, gain = of_unit_size(residuals.value(), norm.eps).to(self.compute), gain_of(norm)
                inner = (
                    fed(part, unit, gain)
                    if isinstance(part, FeedForward)
                    else attended(part, unit, gain, turns)
                )
                last = part.w2.weight if isinstance(part, FeedForward) else part.wo.weight
                residuals.add(
                    module, *projected(inner, last, module in plan.kept_apart, module in plan.summed)
                )
        for module in range(modules, len(plan.changes)):
            residuals.add(module, None, None)
        return self._logits(residuals.value().permute(1, 2, 0, 3))

    def _logits(self, x: Tensor) -> Tensor:
        """As Laneformer's, in the type of the activations."""
        kind = self.lanes.head
        if kind not in ("mean", "sum") or (x.shape[2] == 1 and kind == "sum"):
            x = x.expand(-1, -1, self.lanes.count, -1)
        lane_first = (x.sum(2, keepdim=True) if kind == "sum" else x).permute(2, 0, 1, 3)
        norm = self.model.norm
        normed = (of_unit_size(lane_first, norm.eps) * gain_of(norm)[:, None]).to(x.dtype).permute(1, 2, 0, 3)
        if kind in ("mean", "sum"):
            flat = normed.mean(2)
            weight = (self.model.tok_embeddings if self.lm_head is None else self.lm_head).weight
            assert isinstance(weight, Tensor)
            return functional.linear(flat, weight.to(flat.dtype))
        assert self.lm_head is not None
        logits: Tensor = self.lm_head(normed)
        return logits.flatten(-2) if kind == "vocabulary" else logits


def of_unit_size(x: Tensor, eps: float) -> Tensor:
    """RMSNorm without its gain, in float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def gain_of(norm: Norm) -> Tensor:
    """[lane or 1, 1, width]."""
    gain: Tensor = getattr(norm, norm.name)
    return gain.view(-1, 1, gain.shape[-1])


def multiplied(x: Tensor, gain: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
    """[lane or 1, batch, position, in] by matrices [lane, out, in] side by side: [lane, batch, position, outs].

    Of one lane for all: [1, batch, position, lane * outs], lane by lane. The norm's gain goes into the matrices: its
    gradient is then a sum over their rows, where it would be one over all positions of all lanes."""
    stored = torch.cat(weights, 1).to(x.dtype)  # as a finished run's weights are kept
    weight = (stored * gain).to(x.dtype)
    lanes, _, width = weight.shape
    batch, length = x.shape[1:3]
    if x.shape[0] == 1:
        return functional.linear(x, weight.reshape(-1, width))
    return torch.bmm(x.reshape(lanes, batch * length, width), weight.transpose(1, 2)).view(
        lanes, batch, length, -1
    )


def attended(part: Attention, x: Tensor, gain: Tensor, turns: Tensor) -> Tensor:
    """[lane or 1, batch, position, width] to the mixed values [lane or 1, batch, position, lane's or all q_rows]."""
    groups, batch, length, _ = x.shape
    count = part.wq.weight.shape[0] // groups  # lanes side by side in one group
    rows = [part.wq.weight.shape[1], part.wk.weight.shape[1], part.wv.weight.shape[1]]
    joined = multiplied(x, gain, (part.wq.weight, part.wk.weight, part.wv.weight))
    q, k, v = torch.split(joined.view(groups * batch, length, count, sum(rows)), rows, -1)

    def heads(values: Tensor) -> Tensor:
        return values.reshape(groups * batch, length, -1, part.head_dim).transpose(1, 2)

    q, k, v = rotated(heads(q), turns), rotated(heads(k), turns), heads(v)
    if part.window is None or part.window >= length:
        mixed = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
    else:
        position = torch.arange(length, device=x.device)
        distance = position[:, None] - position[None, :]
        seen = (distance >= 0) & (distance < part.window)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    return mixed.transpose(1, 2).reshape(groups, batch, length, -1)


def fed(part: FeedForward, x: Tensor, gain: Tensor) -> Tensor:
    """[lane or 1, batch, position, width] to the gated columns [lane or 1, batch, position, lane's or all columns]."""
    groups, batch, length, _ = x.shape
    joined = multiplied(x, gain, (part.w1.weight, part.w3.weight))
    columns = part.w1.weight.shape[1]
    gate, up = joined.view(groups, batch, length, -1, 2, columns).unbind(-2)
    return (functional.silu(gate) * up).reshape(groups, batch, length, -1)


def projected(
    inner: Tensor, weight: Tensor, apart: bool, summed: bool
) -> tuple[Tensor | None, Tensor | None]:
    """A module's last matrix: partials [lane, batch, position, width] and their sum, where they are needed."""
    groups, batch, length, _ = inner.shape
    lanes, width, columns = weight.shape
    weight = weight.to(inner.dtype)
    if not apart:
        whole = weight.transpose(0, 1).reshape(width, lanes * columns)
        if groups > 1:
            inner = inner.permute(1, 2, 0, 3).reshape(1, batch, length, lanes * columns)
        return None, functional.linear(inner[0], whole)
    if groups == 1:
        inner = inner.view(batch * length, lanes, columns).transpose(0, 1)
    partial = torch.bmm(inner.reshape(lanes, batch * length, columns), weight.transpose(1, 2))
    partial = partial.view(lanes, batch, length, width)
    return partial, partial.sum(0) if summed else None


def by_value(turns: Tensor) -> Tensor:
    """Cosines and sines [2, position, pair] as factors of a value and of its partner, [2, position, head_dim]."""
    cosines, sines = turns[0], turns[1]
    return torch.stack((torch.stack((cosines, cosines), -1), torch.stack((-sines, sines), -1))).flatten(-2)


def rotated(heads: Tensor, turns: Tensor) -> Tensor:
    """RoPE on pairs (2 i, 2 i + 1) of [batch, head, position, head_dim], in float32.

    A flip brings each value its partner, and a flip's gradient is a flip: one pass forwards and one back. Halves that
    are taken apart and stacked would be written in float32 in between."""
    wide = heads.float()
    partners = wide.view(*wide.shape[:-1], -1, 2).flip(-1).flatten(-2)
    return (wide * turns[0] + partners * turns[1]).to(heads.dtype)


def token_losses(model: Laneformer, rows: Tensor, targets: Tensor) -> Tensor:
    """Nats of each target, [batch, position]; 0 where it is IGNORED."""
    logits = model(rows).float()
    return functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
    ).view(targets.shape)

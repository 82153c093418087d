"""What one rank has of a model's tensors, as its share of the plan says."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from monotape.backends.reference.weights import ReferenceWeights, Roles
from monotape.models.spec import ModelSpec
from monotape.plan.types import RankPlan

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's tensors by role; views of the model's own."""

    layers: tuple[Roles, ...]
    final_norm: Floats
    head: Floats  # the rank's words


def shard(spec: ModelSpec, rank: RankPlan, weights: ReferenceWeights) -> Shard:
    """The rows and columns of every tensor that belong to the rank."""
    rows, columns = {}, {}
    unshared = set()
    for stage in rank.layer_stages:
        for part in stage.parts:
            rows[part.role] = rows[f"{part.role}_bias"] = slice(part.first, part.first + part.rows)
            columns[part.role] = slice(stage.first_k, stage.first_k + stage.k)
            if part.role == "q":
                first, end = (bound // spec.head_dim for bound in (part.first, part.first + part.rows))
                rows["sinks"] = slice(first, end)
            if (
                stage.writes == "residual" and rank.rank > 0
            ):  # partial sums are added over the ranks: one adds the bias
                unshared.add(f"{part.role}_bias")

    def share(role: str, tensor: Floats) -> Floats:
        if role in columns:
            return np.ascontiguousarray(tensor[..., rows[role], columns[role]])
        if role in rows:
            return tensor[..., rows[role]]
        return tensor[rank.rank] if spec.own_gains and tensor.ndim == 2 and role.endswith("_norm") else tensor

    words = rank.head.parts[0]
    return Shard(
        tuple(
            {role: share(role, tensor) for role, tensor in layer.items() if role not in unshared}
            for layer in weights.layers
        ),
        share("final_norm", weights.model["final_norm"]),
        weights.head[words.first : words.first + words.rows],
    )

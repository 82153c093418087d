"""The tensors that are on no tape: norms and biases, read by every worker, small enough to stay float32."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from monotape.models.spec import ModelSpec
from monotape.plan.types import RankPlan
from monotape.weights.check import read_role
from monotape.weights.checkpoint import Checkpoint


def small_tensors(
    spec: ModelSpec, checkpoint: Checkpoint, rank: RankPlan | None = None
) -> dict[str, NDArray[np.float32]]:
    """By name: one row a layer, but for the final norm. With a rank, what that rank has of them."""

    def read(role: str, layer: int | None) -> NDArray[np.float32]:
        shape = spec.shape_of(role)
        values = read_role(spec, checkpoint, role, layer, 0, shape[0])
        if len(shape) == 2 and rank is not None:  # gains of each lane's own
            return np.ascontiguousarray(values[rank.rank], np.float32)
        return values

    def per_layer(role: str) -> NDArray[np.float32]:
        return np.stack([read(role, layer) for layer in range(spec.layers)])

    small = {
        **{gain: per_layer(gain) for gain in spec.layer_gains},
        "final_norm": read("final_norm", None),
    }
    if spec.qkv_bias:
        small["qkv_bias"] = np.concatenate(
            [_share(per_layer(f"{role}_bias"), role, rank) for role in ("q", "k", "v")], axis=1
        )
    if spec.qk_norm:
        small["q_norm"], small["k_norm"] = per_layer("q_norm"), per_layer("k_norm")
    if spec.sinks:
        small["sinks"] = _heads(per_layer("sinks"), spec, rank)
    first = rank is None or rank.rank == 0  # partial sums are added over the ranks: one adds the bias
    for matrix in spec.layer:
        if (
            matrix.bias == "qkv_bias"
            or not spec.has_bias(matrix)
            or not (first or matrix.writes != "residual")
        ):
            continue
        for role in matrix.parts:
            found = [_biases(spec, checkpoint, role, layer) for layer in range(spec.layers)]
            small[f"{role}_bias"] = np.ascontiguousarray(_share(np.stack(found), role, rank))
    return small


def _biases(spec: ModelSpec, checkpoint: Checkpoint, role: str, layer: int) -> NDArray[np.float32]:
    """Of a layer: [rows], or [experts, rows] of a matrix that every expert has."""
    name, experts = f"{role}_bias", spec.experts_of(role)
    rows = [read_role(spec, checkpoint, name, layer, 0, spec.shape_of(name)[0], expert) for expert in experts]
    return np.stack(rows) if spec.is_routed(role) else rows[0]


def _heads(values: NDArray[np.float32], spec: ModelSpec, rank: RankPlan | None) -> NDArray[np.float32]:
    """A value of each query head: those of the rank."""
    if rank is None:
        return values
    part = rank.layer_stages[0].parts[0]
    first = part.first // spec.head_dim
    return np.ascontiguousarray(values[:, first : first + part.rows // spec.head_dim])


def _share(values: NDArray[np.float32], role: str, rank: RankPlan | None) -> NDArray[np.float32]:
    if rank is None:
        return values
    part = next(part for stage in rank.layer_stages for part in stage.parts if part.role == role)
    return values[..., part.first : part.first + part.rows]

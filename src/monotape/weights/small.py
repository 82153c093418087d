"""The tensors that are on no tape: norms and biases, read by everybody, small enough to stay float32."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from monotape.models.spec import ModelSpec
from monotape.weights.check import read_role
from monotape.weights.checkpoint import Checkpoint


def small_tensors(spec: ModelSpec, checkpoint: Checkpoint) -> dict[str, NDArray[np.float32]]:
    """By name: one row a layer, but for the final norm."""

    def per_layer(role: str) -> NDArray[np.float32]:
        count = spec.shape_of(role)[0]
        return np.stack([read_role(spec, checkpoint, role, layer, 0, count) for layer in range(spec.layers)])

    small = {
        "attention_norm": per_layer("attention_norm"),
        "ffn_norm": per_layer("ffn_norm"),
        "final_norm": read_role(spec, checkpoint, "final_norm", None, 0, spec.width),
    }
    if spec.qkv_bias:
        small["qkv_bias"] = np.concatenate(
            [per_layer(role) for role in ("q_bias", "k_bias", "v_bias")], axis=1
        )
    if spec.qk_norm:
        small["q_norm"], small["k_norm"] = per_layer("q_norm"), per_layer("k_norm")
    return small

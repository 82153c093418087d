"""A model's tensors as float32 arrays by role: as a checkpoint holds them, or changed for a comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from monotape.models.spec import ModelSpec
from monotape.weights.check import check_tensors, read_role
from monotape.weights.checkpoint import Checkpoint

Floats = NDArray[np.float32]
Roles = Mapping[str, Floats]


@dataclass(frozen=True, slots=True)
class ReferenceWeights:
    """Tensors by role: those of the model (MODEL_ROLES), and those of each layer (LAYER_ROLES).

    A role that every expert has is one array, [experts, ...].
    """

    model: Roles
    layers: tuple[Roles, ...]

    @property
    def head(self) -> Floats:
        """The output matrix: a tied model has only the embedding."""
        return self.model["head"] if "head" in self.model else self.model["embedding"]

    def changed(self, change: Callable[[str, Floats], Floats]) -> ReferenceWeights:
        """The same tensors after `change(role, tensor)`: rounded, quantised, broken on purpose."""
        return ReferenceWeights(
            {role: change(role, tensor) for role, tensor in self.model.items()},
            tuple({role: change(role, tensor) for role, tensor in layer.items()} for layer in self.layers),
        )


def load_weights(spec: ModelSpec, checkpoint: Checkpoint) -> ReferenceWeights:
    """Reads every tensor that the spec names. Raises CheckpointError if the checkpoint is not that model."""
    check_tensors(spec, checkpoint)

    def read(role: str, layer: int | None) -> Floats:
        count = spec.shape_of(role)[0]
        found = [
            read_role(spec, checkpoint, role, layer, 0, count, expert) for expert in spec.experts_of(role)
        ]
        return np.stack(found) if spec.is_routed(role) else found[0]

    return ReferenceWeights(
        {role: read(role, None) for role in spec.model_tensors},
        tuple({role: read(role, layer) for role in spec.layer_tensors} for layer in range(spec.layers)),
    )

"""What it costs to keep keys and values in 8 bits: the first layer's, of a sample of tokens, computed and rounded."""

from __future__ import annotations

import numpy as np

from monotape.backends.reference.model import biased, rms_norm, rotate
from monotape.backends.reference.weights import Floats
from monotape.models.rope import position_tables
from monotape.models.spec import ModelSpec
from monotape.weights.check import read_role
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.rounding import fp8_heads

TOKENS = 64
_ROLES = ("attention_norm", "k", "v", "k_bias", "v_bias", "k_norm")


def first_layer_errors(spec: ModelSpec, checkpoint: Checkpoint) -> tuple[float, float]:
    """The relative errors of keys and of values. The first layer needs no other: its input is the embedding."""
    layer = {
        role: read_role(spec, checkpoint, role, 0, 0, spec.shape_of(role)[0])
        for role in _ROLES
        if role in spec.layer_tensors
    }
    count = min(TOKENS, spec.vocab, spec.context)
    tokens = [spec.vocab * i // count for i in range(count)]
    rows = np.concatenate([read_role(spec, checkpoint, "embedding", None, t, t + 1) for t in tokens])
    gain = layer["attention_norm"]
    x = rms_norm(rows, gain if gain.ndim == 1 else gain[0], spec.norm_eps)
    keys, values = (biased(x, layer, role).reshape(count, -1, spec.head_dim) for role in ("k", "v"))
    if "k_norm" in layer:
        keys = rms_norm(keys, layer["k_norm"], spec.norm_eps)
    keys = rotate(keys, *position_tables(spec.rope, count), spec.rope.interleaved)
    return _error(keys), _error(values)


def _error(heads: Floats) -> float:
    size = np.linalg.norm(heads)
    return float(np.linalg.norm(fp8_heads(heads) - heads) / size) if size else 0.0

"""GGUF models wide enough for K-quants, each of whose matrices may have a format of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Kind

from weights.gguf_files import Floats, model_metadata, stored, write_gguf

LAYERS, WIDTH, HEADS, KV_HEADS, FFN, VOCAB = 2, 256, 4, 2, 512, 37
_Q, _KV = WIDTH, WIDTH // 2
SHAPES = {
    "attn_q": (_Q, WIDTH), "attn_k": (_KV, WIDTH), "attn_v": (_KV, WIDTH), "attn_output": (WIDTH, _Q),
    "ffn_gate": (FFN, WIDTH), "ffn_up": (FFN, WIDTH), "ffn_down": (WIDTH, FFN),
}  # fmt: skip
_METADATA = {
    "block_count": LAYERS, "embedding_length": WIDTH, "feed_forward_length": FFN,
    "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "rope.dimension_count": WIDTH // HEADS,
}  # fmt: skip


def write_wide_model(
    path: Path, kinds: Mapping[str, Kind], default: Kind = Kind.F16, architecture: str = "llama"
) -> Path:
    """`kinds`: of tensors by their names, with the layer ("1.ffn_down") or without it ("ffn_down", "token_embd")."""
    rng = np.random.default_rng(7)

    def made(name: str, shape: tuple[int, ...]) -> Floats:
        return (0.3 * rng.standard_normal(shape)).astype(np.float32)

    tensors = {"output_norm.weight": (Kind.F32, made("", (WIDTH,)) + 1)}
    embedding = kinds.get("token_embd", default)
    tensors["token_embd.weight"] = (embedding, stored(made("", (VOCAB, WIDTH)), embedding))
    for layer in range(LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{layer}.{norm}.weight"] = (Kind.F32, made("", (WIDTH,)) + 1)
        for number, (name, shape) in enumerate(SHAPES.items()):
            kind = kinds.get(f"{layer}.{name}", kinds.get(name, default))
            tensors[f"blk.{layer}.{name}.weight"] = (
                kind,
                stored(made("", shape), kind, seed=10 * layer + number),
            )
    metadata = model_metadata(architecture) | {
        f"{architecture}.{key}": value for key, value in _METADATA.items()
    }
    return write_gguf(path, architecture, metadata, tensors)

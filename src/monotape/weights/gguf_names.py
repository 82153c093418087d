"""Tensor names: what GGUF calls a tensor, and what Hugging Face does."""

from __future__ import annotations

import re

from monotape.models.llama import LLAMA
from monotape.models.phi3 import PHI3
from monotape.models.qwen2 import QWEN2
from monotape.models.qwen3 import QWEN3

#: Families whose tensors are known, with the name of Hugging Face's class. GGUF calls them by their model_type.
ARCHITECTURES = {family.name: family.architecture for family in (LLAMA, QWEN2, QWEN3, PHI3)}

GGUF_EMBEDDING, GGUF_HEAD = "token_embd.weight", "output.weight"

#: Tensors that only carry factors of the rotary frequencies; gguf_config.py turns them into settings.
ROPE_FACTORS = "rope_freqs.weight"
ROPE_SHORT, ROPE_LONG = "rope_factors_short.weight", "rope_factors_long.weight"

_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
#: Phi-3 keeps q, k and v in one matrix, and gate and up in another.
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(\w+)\.(weight|bias)")
_OUTSIDE = re.compile(r"(\w+)\.(weight|bias)")


def hugging_face_name(architecture: str, name: str) -> str:
    """The Hugging Face name of a GGUF tensor; an unknown one keeps its own, so that a check can name it."""
    if architecture not in ARCHITECTURES:
        return name
    if block := _BLOCK.fullmatch(name):
        layer, part, end = block.groups()
        table = {**_LAYER, **_FUSED} if architecture == "phi3" else _LAYER
        return f"model.layers.{layer}.{table[part]}.{end}" if part in table else name
    if (outside := _OUTSIDE.fullmatch(name)) and outside[1] in _MODEL:
        return f"{_MODEL[outside[1]]}.{outside[2]}"
    return name


def interleaved_part(architecture: str, name: str) -> str | None:
    """Says "q" or "k" for a tensor whose rows lie interleaved for rotary positions, as in `llama` files."""
    block = _BLOCK.fullmatch(name)
    if architecture != "llama" or block is None:
        return None
    return {"attn_q": "q", "attn_k": "k"}.get(block[2])


def layer_of(name: str) -> int | None:
    """The layer a GGUF tensor belongs to."""
    block = _BLOCK.fullmatch(name)
    return int(block[1]) if block else None

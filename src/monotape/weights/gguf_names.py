"""Tensor names: what GGUF calls a tensor, and what Hugging Face does."""

from __future__ import annotations

import re

from monotape.models.gpt_oss import GPT_OSS
from monotape.models.llama import LLAMA
from monotape.models.mixtral import MIXTRAL
from monotape.models.phi3 import PHI3
from monotape.models.qwen2 import QWEN2
from monotape.models.qwen3 import QWEN3
from monotape.models.qwen3_moe import QWEN3_MOE

#: Families whose tensors are known, by the name of the architecture in a file. Mixtral is a llama with experts.
FAMILIES = {
    **{family.name: family for family in (LLAMA, QWEN2, QWEN3, PHI3)},
    "qwen3moe": QWEN3_MOE,
    "gpt-oss": GPT_OSS,
}
ARCHITECTURES = {name: family.architecture for name, family in FAMILIES.items()}
#: The families with experts. An architecture that is not here has none.
WITH_EXPERTS = {"llama": MIXTRAL, "qwen3moe": QWEN3_MOE, "gpt-oss": GPT_OSS}

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
#: Tensors of all experts are one stack, under a name that stands for each of them.
_EXPERTS = {
    "llama": {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
    },
    "qwen3moe": {
        "ffn_gate_inp": "mlp.gate",
        **{f"ffn_{part}_exps": f"mlp.experts.{{expert}}.{part}_proj" for part in ("gate", "up", "down")},
    },
    "gpt-oss": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
        **{f"ffn_{part}_exps": f"mlp.experts.{{expert}}.{part}_proj" for part in ("gate", "up", "down")},
    },
}
EXPERT = "{expert}"
_SINKS = "attn_sinks"
_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(\w+)\.(weight|bias)")
_OUTSIDE = re.compile(r"(\w+)\.(weight|bias)")


def hugging_face_name(architecture: str, name: str) -> str:
    """The Hugging Face name of a GGUF tensor; an unknown one keeps its own, so that a check can name it."""
    if architecture not in ARCHITECTURES:
        return name
    if block := _BLOCK.fullmatch(name):
        layer, part, end = block.groups()
        if (architecture, part, end) == ("gpt-oss", _SINKS, "weight"):
            return f"model.layers.{layer}.self_attn.sinks"
        table = _LAYER | (_FUSED if architecture == "phi3" else _EXPERTS.get(architecture, {}))
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

"""Whole small models that talk: random weights, a vocabulary of all bytes and a chat template, in both file formats.

They need neither PyTorch nor a download, so a bare installation can be tried with them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.vocabularies import byte_level
from monotape.engine.gguf_tokenizer import build

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}: {{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
)
_WIDTH, _FFN, _LAYERS, _HEADS = 64, 96, 2, 4
_CONTEXT = 2048


def _tensors(names: dict[str, tuple[int, ...]]) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(1)
    return {
        name: (np.ones(shape) if len(shape) == 1 else rng.standard_normal(shape) / shape[1] ** 0.5).astype(
            "f4"
        )
        for name, shape in names.items()
    }


def safetensors_folder(folder: Path) -> Path:
    """A Llama with a tokenizer.json."""
    from safetensors.numpy import save_file
    from tokenizers import decoders

    vocabulary = byte_level()
    shapes = {"model.embed_tokens.weight": (len(vocabulary.tokens), _WIDTH), "model.norm.weight": (_WIDTH,)}
    for layer in range(_LAYERS):
        start = f"model.layers.{layer}"
        shapes |= {f"{start}.self_attn.{part}_proj.weight": (_WIDTH, _WIDTH) for part in "qkvo"}
        shapes |= {f"{start}.mlp.{part}_proj.weight": (_FFN, _WIDTH) for part in ("gate", "up")}
        shapes |= {f"{start}.mlp.down_proj.weight": (_WIDTH, _FFN)}
        shapes |= {f"{start}.{part}_layernorm.weight": (_WIDTH,) for part in ("input", "post_attention")}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_tensors(shapes), folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": _WIDTH, "vocab_size":
        len(vocabulary.tokens), "intermediate_size": _FFN, "num_hidden_layers": _LAYERS, "num_attention_heads":
        _HEADS, "max_position_embeddings": _CONTEXT, "tie_word_embeddings": True, "eos_token_id": vocabulary.eos_id,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = build(vocabulary)[0]
    tokenizer.decoder = decoders.ByteLevel()  # ours needs none; a file says by it how its tokens are spelled
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


def gguf_file(path: Path) -> Path:
    """A Qwen2 in 8 bits with its vocabulary inside."""
    from gguf import GGMLQuantizationType as Kind

    from weights.gguf_files import stored, write_gguf

    vocabulary = byte_level("qwen2")
    shapes = {"token_embd.weight": (len(vocabulary.tokens), _WIDTH), "output_norm.weight": (_WIDTH,)}
    for layer in range(_LAYERS):
        shapes |= {f"blk.{layer}.attn_{part}.weight": (_WIDTH, _WIDTH) for part in ("q", "k", "v", "output")}
        shapes |= {f"blk.{layer}.attn_{part}.bias": (_WIDTH,) for part in "qkv"}
        shapes |= {f"blk.{layer}.ffn_{part}.weight": (_FFN, _WIDTH) for part in ("gate", "up")}
        shapes |= {f"blk.{layer}.ffn_down.weight": (_WIDTH, _FFN)}
        shapes |= {f"blk.{layer}.{part}_norm.weight": (_WIDTH,) for part in ("attn", "ffn")}
    metadata: dict[str, Any] = {
        "qwen2.block_count": _LAYERS, "qwen2.context_length": _CONTEXT, "qwen2.embedding_length": _WIDTH,
        "qwen2.feed_forward_length": _FFN, "qwen2.attention.head_count": _HEADS,
        "qwen2.attention.layer_norm_rms_epsilon": 1e-6, "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": list(vocabulary.tokens),
        "tokenizer.ggml.token_type": list(vocabulary.types), "tokenizer.ggml.merges": list(vocabulary.merges),
        "tokenizer.ggml.eos_token_id": vocabulary.eos_id, "tokenizer.chat_template": TEMPLATE,
    }  # fmt: skip
    tensors = {
        name: (kind, stored(values, kind))
        for name, values in _tensors(shapes).items()
        for kind in [Kind.Q8_0 if values.ndim == 2 else Kind.F32]
    }
    return write_gguf(path, "qwen2", metadata, tensors)

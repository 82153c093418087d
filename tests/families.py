"""Small random checkpoints of every family, made by transformers, and what transformers makes of them.

Sizes are odd on purpose (no multiple of 8, grouped heads, heads that do not add up to the width), and nothing
is left at a value that hides a mistake: norm gains are not 1, biases not 0, and matrices are large enough for
attention to look at few positions.
"""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

VOCAB = 131
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 54,
    "intermediate_size": 76,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_PHI3_FACTORS = {
    "short_factor": [1.0, 1.05, 1.1, 1.3],
    "long_factor": [1.0, 1.4, 2.1, 4.2],
}


@dataclass(frozen=True, slots=True)
class Case:
    """One checkpoint: a family's Hugging Face classes and the fields that differ from the shared sizes."""

    name: str
    family: str  # the model_type
    fields: dict[str, Any] = field(default_factory=dict)
    context: int = 160  # what an engine would load it with

    def config(self) -> Any:
        """A transformers config."""
        from transformers import AutoConfig

        return AutoConfig.for_model(self.family, **{**_SIZES, **self.fields})


def _rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **settings}}


CASES = (
    Case("llama", "llama", {"head_dim": 10, "rms_norm_eps": 1e-5}),
    Case("llama-tied", "llama", {"hidden_size": 60, "tie_word_embeddings": True, "num_key_value_heads": 6}),
    Case(
        "llama-llama3",
        "llama",
        {
            "head_dim": 14,
            **_rope(
                "llama3",
                factor=4.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=40,
            ),
        },
    ),
    Case("llama-linear", "llama", {"head_dim": 10, **_rope("linear", factor=2.5)}),
    Case(
        "llama-yarn",
        "llama",
        {"head_dim": 14, **_rope("yarn", factor=4.0, original_max_position_embeddings=40)},
    ),
    Case("mistral", "mistral", {"head_dim": 10, "sliding_window": None}),
    Case("mistral-window", "mistral", {"head_dim": 10, "sliding_window": 7}),
    Case("qwen2", "qwen2", {"hidden_size": 60, "tie_word_embeddings": True}),
    Case(
        "qwen2-mixed-windows",
        "qwen2",
        {"hidden_size": 60, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    Case("qwen3", "qwen3", {"head_dim": 12, "tie_word_embeddings": True}),
    Case(
        "qwen3-alternating",
        "qwen3",
        {
            "head_dim": 12,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    Case("phi3", "phi3", {"hidden_size": 60, "sliding_window": 11}),
    Case(
        "phi3-longrope-short",
        "phi3",
        {
            "hidden_size": 60,
            "original_max_position_embeddings": 120,
            **_rope("longrope", partial_rotary_factor=0.8, **_PHI3_FACTORS),
        },
        context=120,
    ),
    Case(
        "phi3-longrope-long",
        "phi3",
        {
            "hidden_size": 60,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 16,
            **_rope("longrope", partial_rotary_factor=0.8, **_PHI3_FACTORS),
        },
    ),
)
#: Mixtures of experts; no number of experts is a multiple of 8.
EXPERT_CASES = (
    Case(
        "gpt-oss",
        "gpt_oss",
        {
            "head_dim": 10,
            "num_local_experts": 11,
            "num_experts_per_tok": 4,
            "sliding_window": 7,
            **_rope("yarn", factor=4.0, original_max_position_embeddings=40, beta_fast=8.0, truncate=False),
        },
    ),
    Case(
        "qwen3-moe",
        "qwen3_moe",
        {
            "head_dim": 12,
            "moe_intermediate_size": 44,
            "num_experts": 13,
            "num_experts_per_tok": 5,
            "norm_topk_prob": True,
        },
    ),
    Case(
        "qwen3-moe-plain-softmax",
        "qwen3_moe",
        {"head_dim": 10, "moe_intermediate_size": 31, "num_experts": 5, "num_experts_per_tok": 3},
    ),
    Case("mixtral", "mixtral", {"head_dim": 10, "num_local_experts": 5, "num_experts_per_tok": 2}),
    Case(
        "mixtral-window",
        "mixtral",
        {"head_dim": 10, "num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 9},
    ),
)
BY_NAME = {case.name: case for case in (*CASES, *EXPERT_CASES)}


def make_checkpoint(case: Case, folder: Path, dtype: str = "float32", shard_bytes: int | None = None) -> Path:
    """Writes the case's checkpoint into `folder`: config.json and safetensors, the same bytes every time."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(zlib.crc32(case.name.encode()))
    model = AutoModelForCausalLM.from_config(case.config())
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = torch.randn_like(tensor)
            if name.endswith("norm.weight"):
                tensor.copy_(1 + 0.3 * noise)
            elif name.endswith("bias"):
                tensor.copy_(0.5 * noise)
            elif name.endswith("sinks"):
                tensor.copy_(noise)
            elif "embed_tokens" in name:
                tensor.copy_(0.3 * noise)  # a tied head must not only repeat its input
            else:
                inputs = tensor.shape[1 if case.family == "gpt_oss" and tensor.dim() == 3 else -1]
                tensor.copy_(1.5 * noise / inputs**0.5)
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size=shard_bytes or "5GB")
    return folder


def transformers_model(folder: Path, dtype: Any) -> Any:
    """As its authors wrote it, one operation after the other: grouped products take no odd sizes."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()


@functools.cache
def _model(folder: Path) -> Any:
    import torch

    return transformers_model(folder, torch.float32)


def transformers_logits(folder: Path, tokens: list[int]) -> NDArray[np.float32]:
    """The logits of transformers in float32 after each token: [token, vocab]."""
    import torch

    with torch.no_grad():
        logits: NDArray[np.float32] = _model(folder)(torch.tensor([tokens])).logits[0].numpy()
    return logits


def transformers_greedy(folder: Path, prompt: list[int], count: int) -> list[int]:
    """The next `count` greedy tokens of transformers in float32; no token ends it early."""
    import torch

    ids = torch.tensor([prompt])
    with torch.no_grad():
        output = _model(folder).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


#: Layers that are long enough for several rows a pass on a GPU of few workers.
WIDE = Case(
    "wide", "llama",
    {
        "hidden_size": 2048, "intermediate_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "num_hidden_layers": 1,
    },
)  # fmt: skip


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB, length)]

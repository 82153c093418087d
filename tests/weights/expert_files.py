"""Small mixtures of experts as files store them: GGUF with stacked experts, gpt-oss with MXFP4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from backends.cpu_cases import PROMPT, cpu
from backends.test_cpu_stored import middle_distance
from families import VOCAB
from monotape.weights.checkpoint import Checkpoint
from weights.gguf_files import interleaved, write_gguf

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

GGUF_NAMES = {"gpt_oss": "gpt-oss", "qwen3_moe": "qwen3moe", "mixtral": "llama"}
_MODEL = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
          "lm_head.weight": "output.weight"}  # fmt: skip
_LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.router": "ffn_gate_inp", "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}  # fmt: skip
_EXPERT = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}


def gguf_metadata(config: dict[str, Any]) -> dict[str, Any]:
    """What llama.cpp's converter writes for such a model."""
    name = GGUF_NAMES[config["model_type"]]
    rope = config["rope_parameters"]
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    found = {
        "block_count": config["num_hidden_layers"], "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"], "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": config["head_dim"], "expert_count": config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
    }  # fmt: skip
    if name != "llama":
        found["expert_feed_forward_length"] = inner
    if name == "gpt-oss":
        found |= {
            "attention.sliding_window": config["sliding_window"], "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"], "rope.scaling.yarn_beta_fast": rope.get("beta_fast"),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }  # fmt: skip
    tokens = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-4o",
        "tokenizer.ggml.tokens": [f"t{index}" for index in range(VOCAB)],
        "tokenizer.ggml.token_type": [1] * VOCAB, "tokenizer.ggml.merges": ["t 1"],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
    }  # fmt: skip
    return {f"{name}.{key}": value for key, value in found.items()} | tokens


def gguf_tensors(checkpoint: Checkpoint) -> dict[str, Floats]:
    """Every tensor under its GGUF name, experts stacked."""
    config = checkpoint.config
    stacks: dict[str, dict[int, Floats]] = {}
    found: dict[str, Floats] = {}
    for name in checkpoint.names:
        values = checkpoint.rows(name, 0, checkpoint.shape(name)[0])
        if name in _MODEL:
            found[_MODEL[name]] = values
            continue
        _, _, layer, rest = name.split(".", 3)
        module, _, end = rest.rpartition(".")
        if ".experts." in name:
            place, part = module.rsplit(".", 2)[1:]
            stacks.setdefault(f"blk.{layer}.ffn_{_EXPERT[part]}_exps.{end}", {})[int(place)] = values
        elif rest == "self_attn.sinks":
            found[f"blk.{layer}.attn_sinks.weight"] = values
        elif module == "post_attention_layernorm":
            norm = "post_attention_norm" if config["model_type"] == "gpt_oss" else "ffn_norm"
            found[f"blk.{layer}.{norm}.weight"] = values
        else:
            found[f"blk.{layer}.{_LAYER[module]}.{end}"] = values
    if config["model_type"] == "mixtral":
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        for name in [name for name in found if name.split(".")[-2] in heads]:
            found[name] = interleaved(found[name], heads[name.split(".")[-2]])
    for name, experts in stacks.items():
        found[name] = np.stack([experts[expert] for expert in range(len(experts))])
    return found


def write_gguf_of(
    path: Path, checkpoint: Checkpoint, metadata: dict[str, Any] | None = None,
    tensors: dict[str, tuple[Kind, Any]] | None = None,
) -> Path:  # fmt: skip
    """The checkpoint as a GGUF file of float32. `metadata` and `tensors` replace entries; None leaves a key out."""
    config = dict(checkpoint.config)
    if "num_experts" in config:
        config["num_local_experts"] = config["num_experts"]
    stored: dict[str, tuple[Kind, Any]] = {
        name: (Kind.F32, values) for name, values in gguf_tensors(checkpoint).items()
    }
    return write_gguf(
        path, GGUF_NAMES[config["model_type"]], gguf_metadata(config) | (metadata or {}), stored | (tensors or {})
    )  # fmt: skip


def random_mxfp4(shape: tuple[int, ...], seed: int) -> tuple[Bytes, Bytes]:
    """Codes [..., k] and exponents [..., k / 32] of numbers of the size that weights have."""
    generator = np.random.default_rng(seed)
    codes = generator.integers(0, 16, shape, np.uint8)
    exponents = generator.integers(122, 126, (*shape[:-1], shape[-1] // 32)).astype(np.uint8)
    return codes, exponents


def to_mxfp4(folder: Path) -> Path:
    """The experts of a float gpt-oss checkpoint become random MXFP4, as the released files store it."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    for seed, name in enumerate(sorted(weights)):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, k, rows = weights.pop(name).shape
        codes, exponents = random_mxfp4((experts, rows, k), seed)
        pairs = codes.reshape(experts, rows, k // 32, 16, 2)
        weights[f"{name}_blocks"] = pairs[..., 0] | pairs[..., 1] << 4
        weights[f"{name}_scales"] = exponents
    save_file(weights, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def mxfp4_blocks(codes: Bytes, exponents: Bytes) -> Bytes:
    """As GGUF has them: an exponent, then 16 bytes whose low halves are the first 16 values."""
    blocks = codes.reshape(*codes.shape[:-1], -1, 32)
    packed = blocks[..., :16] | blocks[..., 16:] << 4
    joined = np.concatenate([exponents[..., None], packed], axis=-1)
    return np.ascontiguousarray(joined.reshape(*codes.shape[:-1], -1))


def honest_limit(path: Path, exact: NDArray[np.float32]) -> float:
    """Twice what 16-bit weights cost by themselves."""
    with cpu(path, "f16") as rounded:
        honest = rounded.logits(PROMPT, rounded.new_sequence())
    return 2 * middle_distance(honest, exact) + float(np.finfo(np.float32).eps)

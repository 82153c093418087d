"""Named model shapes with random weights, for measuring speed where no checkpoint is at hand."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.models.registry import spec_from_config
from monotape.models.spec import ModelSpec
from monotape.weights.checkpoint import TextAssets

_LLAMA3_ROPE = {
    "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip


def _config(
    architecture: str, layers: int, width: int, heads: int, kv_heads: int, head_dim: int, ffn: int, vocab: int,
    **more: Any,
) -> dict[str, Any]:  # fmt: skip
    return {
        "architectures": [architecture], "num_hidden_layers": layers, "hidden_size": width,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "intermediate_size": ffn, "vocab_size": vocab, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "bfloat16", **more,
    }  # fmt: skip


SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": _config(
        "LlamaForCausalLM", 16, 2048, 32, 8, 64, 8192, 128256, rope_scaling={**_LLAMA3_ROPE, "factor": 32.0}
    ),
    "llama-3.1-8b": _config(
        "LlamaForCausalLM", 32, 4096, 32, 8, 128, 14336, 128256,
        rope_scaling={**_LLAMA3_ROPE, "factor": 8.0}, tie_word_embeddings=False,
    ),
    "dense-2b": _config("LlamaForCausalLM", 25, 2560, 20, 4, 128, 6912, 49152),
    "qwen3-0.6b": _config("Qwen3ForCausalLM", 28, 1024, 16, 8, 128, 3072, 151936),
    "qwen3-1.7b": _config("Qwen3ForCausalLM", 28, 2048, 16, 8, 128, 6144, 151936),
    "qwen2.5-0.5b": _config("Qwen2ForCausalLM", 24, 896, 14, 2, 64, 4864, 151936, max_position_embeddings=32768),
    "qwen2.5-1.5b": _config("Qwen2ForCausalLM", 28, 1536, 12, 2, 128, 8960, 151936, max_position_embeddings=32768),
    "laneformer-32m": _config("LlamaForCausalLM", 8, 512, 8, 8, 64, 1280, 16384, max_position_embeddings=1024),
    "smollm2-135m": _config("LlamaForCausalLM", 30, 576, 9, 3, 64, 1536, 49152, max_position_embeddings=8192),
}  # fmt: skip

# Round shapes, to show the cost of odd widths: the same layers, and the same bytes per layer and head, to 2 %.
ROUND: dict[str, dict[str, Any]] = {
    "round-0.5b": _config("Qwen2ForCausalLM", 24, 1024, 16, 2, 64, 4096, 131072),
    "round-1.5b": _config("Qwen2ForCausalLM", 28, 2048, 16, 2, 128, 6144, 114688),
    "round-135m": _config("LlamaForCausalLM", 30, 512, 8, 4, 64, 1792, 55296),
}

#: Next to no bytes: of 132 workers 128 have one tile of `output` and of `down`, all a pair of `gate_up` and a tile of
#: qkv or two. A layer takes as long as the chain of stages.
BARE: dict[str, dict[str, Any]] = {
    "one-tile": _config("LlamaForCausalLM", 24, 1024, 14, 2, 64, 1056, 1056),
}


_OSS = {
    "num_experts_per_tok": 4, "sliding_window": 128, "swiglu_limit": 7.0, "attention_bias": True,
    "rope_theta": 150000.0, "tie_word_embeddings": False,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip
#: Mixtures of experts. gpt-oss is released with its experts in MXFP4: `--stored mxfp4`.
EXPERTS: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": _config(
        "GptOssForCausalLM", 24, 2880, 64, 8, 64, 2880, 201088, num_local_experts=32, **_OSS
    ),
    "gpt-oss-120b": _config(
        "GptOssForCausalLM", 36, 2880, 64, 8, 64, 2880, 201088, num_local_experts=128, **_OSS
    ),
    "qwen3-30b-a3b": _config(
        "Qwen3MoeForCausalLM", 48, 2048, 32, 4, 128, 6144, 151936, moe_intermediate_size=768, num_experts=128,
        num_experts_per_tok=8, norm_topk_prob=True, rope_theta=1000000.0, tie_word_embeddings=False,
        max_position_embeddings=40960,
    ),
    "mixtral-8x7b": _config(
        "MixtralForCausalLM", 32, 4096, 32, 8, 128, 14336, 32000, num_local_experts=8, num_experts_per_tok=2,
        rope_theta=1000000.0, tie_word_embeddings=False, max_position_embeddings=32768,
    ),
}  # fmt: skip


def all_shapes() -> dict[str, dict[str, Any]]:
    return SHAPES | ROUND | BARE | EXPERTS


MODEL_TYPES = {
    "LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3",
    "GptOssForCausalLM": "gpt_oss", "Qwen3MoeForCausalLM": "qwen3_moe", "MixtralForCausalLM": "mixtral",
}  # fmt: skip


def config_json(shape: str) -> dict[str, Any]:
    """A config.json of a shape for other engines. Its positions are plain ones: their scaling costs no time."""
    fields = {name: value for name, value in all_shapes()[shape].items() if name != "rope_scaling"}
    return {
        **fields,
        "model_type": MODEL_TYPES[fields["architectures"][0]],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


_POOL = (1 << 22) + 15  # values; odd, so that no two rows of a matrix start at the same one


class RandomCheckpoint:
    """Random bf16 weights of a shape without a file: every matrix is cut out of one small ring of random values.

    Value i of a tensor is value (hash of its name + i) of the ring, however it is read, and reading whole tensors
    costs no more than a copy: 16 GB of weights are there in a second. The scale keeps activations finite.

    Its routers choose about evenly among experts. With `skewed` ones a few experts are chosen most of the time.
    """

    def __init__(self, name: str, skewed: bool = False, **changes: Any) -> None:
        self.source, self._skewed = name, skewed
        self.config: Mapping[str, Any] = all_shapes()[name] | changes
        self.generation_config: Mapping[str, Any] = {}
        self.text = TextAssets()
        self._spec = spec_from_config(self.config)
        self._shapes = _tensor_shapes(self._spec)
        self._routers = frozenset(_router_names(self._spec))
        self._rings = {columns: _ring(columns) for columns in {shape[-1] for shape in self._matrices()}}

    def _matrices(self) -> list[tuple[int, ...]]:
        return [shape for shape in self._shapes.values() if len(shape) == 2]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def stored_as(self, name: str) -> str:
        return "bf16"

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        if len(self._shapes[name]) == 1:
            return np.ones(stop - start, np.float32)
        halves = self.half_rows(name, start, stop)
        assert halves is not None
        return (halves.astype(np.uint32) << 16).view(np.float32)

    def stored_matrix(self, name: str) -> None:
        """Its weights are floats."""

    def raw_matrix(self, name: str) -> None:
        """It lies in no file."""

    def integer_rows(self, name: str, start: int, stop: int) -> None:
        return None

    def half_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint16] | None:
        shape = self._shapes[name]
        if len(shape) == 1:
            return None
        columns, ring = shape[1], self._rings[shape[1]]
        first = (zlib.crc32(name.encode()) + start * columns) % _POOL
        count = (stop - start) * columns
        if self._skewed and name in self._routers:
            return _skewed(ring[first : first + count].reshape(-1, columns), start, shape[0])
        if count <= _POOL:
            return ring[first : first + count].reshape(-1, columns)
        return np.resize(ring[first : first + _POOL], count).reshape(-1, columns)

    def mapped_halves(self, name: str) -> None:
        return None

    def release(self, name: str) -> None:
        return None


def _ring(columns: int) -> NDArray[np.uint16]:
    """The ring twice over, so that any run of up to its length is one slice."""
    values = np.random.default_rng(columns).standard_normal(_POOL, np.float32) * np.float32(columns**-0.5)
    return np.tile((values.view(np.uint32) >> 16).astype(np.uint16), 2)


def _tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    shapes = {source.name: spec.shape_of(role) for role, source in spec.model_tensors.items()}
    for layer in range(spec.layers):
        for role, source in spec.layer_tensors.items():
            for expert in spec.experts_of(role):
                shapes[source.in_layer(layer, expert)] = spec.shape_of(role)
    return shapes


def _router_names(spec: ModelSpec) -> list[str]:
    source = spec.layer_tensors.get("router")
    return [source.in_layer(layer) for layer in range(spec.layers)] if source else []


def _skewed(halves: NDArray[np.uint16], start: int, experts: int) -> NDArray[np.uint16]:
    """The logits of the first experts spread most, so these are the highest of almost every token."""
    values = (halves.astype(np.uint32) << 16).view(np.float32)
    rank = np.arange(start, start + len(values), dtype=np.float32) / experts
    scaled = values * (4 * np.exp2(-4 * rank))[:, None]
    found: NDArray[np.uint16] = (scaled.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return found

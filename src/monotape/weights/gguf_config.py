"""A GGUF file's metadata as the config.json that the same model has on the hub."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from monotape.errors import CheckpointError, UnsupportedModel
from monotape.weights.gguf_header import GgufTensor
from monotape.weights.gguf_metadata import Metadata
from monotape.weights.gguf_names import (
    ARCHITECTURES,
    FAMILIES,
    GGUF_EMBEDDING,
    ROPE_FACTORS,
    ROPE_LONG,
    ROPE_SHORT,
    WITH_EXPERTS,
    layer_of,
)

#: Keys below "<architecture>." that are read here or say nothing about the numbers. Any other is an error.
_KNOWN = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base", "rope.scale_linear",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.attn_factor", "rope.scaling.finetuned", "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_log_multiplier", "expert_count", "expert_used_count", "tensor_data_layout",
}  # fmt: skip
#: Keys of architectures with experts, and the values with which they change nothing.
_OF_EXPERTS: dict[str, tuple[float, ...]] = {
    "expert_feed_forward_length": (),  # read here
    "expert_shared_count": (0,), "expert_shared_feed_forward_length": (0,), "expert_weights_scale": (0, 1),
    "expert_weights_norm": (True,), "expert_group_count": (0, 1), "expert_group_used_count": (0, 1),
    "expert_gating_func": (1, 3),  # a softmax over all logits, which is renormalised, or over the chosen ones
    "attention.sliding_window_pattern": (2,),
}  # fmt: skip
_WINDOWED = ("llama", "phi3", "gpt-oss")  # architectures whose files say how far a layer looks back
_NO_TOKEN = 0xFFFF_FFFF  # how some converters write "there is no such token"
_CONVERT = "The file is damaged or was converted by a faulty tool: fetch it again."

#: Reads a whole vector by its GGUF name.
ReadVector = Callable[[str], list[float]]


def hugging_face_config(
    source: str, metadata: Metadata, tensors: Mapping[str, GgufTensor], tied: bool, read_vector: ReadVector
) -> dict[str, Any]:
    """The config. An unknown architecture gives its bare name, for the model registry to refuse."""
    architecture = architecture_of(source, metadata)
    if architecture not in ARCHITECTURES:
        return {"architectures": [architecture], "model_type": architecture}
    if metadata.integer(f"{architecture}.expert_count") and architecture not in WITH_EXPERTS:
        return {"architectures": [f"{architecture} with experts"], "model_type": architecture}
    return _Translation(source, architecture, metadata, tensors, read_vector).config(tied)


def architecture_of(source: str, metadata: Metadata) -> str:
    architecture = metadata.text("general.architecture")
    if not architecture:
        raise CheckpointError(f"{source} does not say its general.architecture.", _CONVERT)
    return architecture


def sampling_settings(metadata: Metadata) -> dict[str, float | int]:
    """The sampling that the file recommends, in the words of generation_config.json."""
    named = {
        "temperature": metadata.number("general.sampling.temp"),
        "top_p": metadata.number("general.sampling.top_p"),
        "min_p": metadata.number("general.sampling.min_p"),
        "top_k": metadata.integer("general.sampling.top_k"),
        "repetition_penalty": metadata.number("general.sampling.penalty_repeat"),
    }
    return {name: value for name, value in named.items() if value is not None}


def token_id(metadata: Metadata, role: str) -> int | None:
    """The id of a special token ("bos", "eos", ...), if the file names one."""
    value = metadata.integer(f"tokenizer.ggml.{role}_token_id")
    return None if value in (-1, _NO_TOKEN) else value


class _Translation:
    """One file's metadata on its way to a config."""

    def __init__(
        self,
        source: str,
        architecture: str,
        metadata: Metadata,
        tensors: Mapping[str, GgufTensor],
        read_vector: ReadVector,
    ) -> None:
        self._source = source
        self._architecture = architecture
        self._metadata = metadata
        self._tensors = tensors
        self._read_vector = read_vector
        self._experts = metadata.integer(f"{architecture}.expert_count") or 0
        self._family = WITH_EXPERTS[architecture] if self._experts else FAMILIES[architecture]
        if not self._experts and self._family.experts is not None:
            raise CheckpointError(f"{source} has no {architecture}.expert_count.", _CONVERT)

    def config(self, tied: bool) -> dict[str, Any]:
        self._require_known_keys()
        width, layers = self._size("embedding_length"), self._size("block_count")
        heads = self._size("attention.head_count")
        kv_heads = self._size("attention.head_count_kv", heads)
        vocab = self._vocabulary_size(width)
        head_dim = self._head_dim(width, heads, kv_heads)
        self._require_layers(layers)
        eos, bos = token_id(self._metadata, "eos"), token_id(self._metadata, "bos")
        config: dict[str, Any] = {
            "architectures": [self._family.architecture],
            "model_type": self._family.name,
            "hidden_size": width,
            **(
                self._expert_sizes()
                if self._experts
                else {"intermediate_size": self._size("feed_forward_length")}
            ),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": vocab,
            "max_position_embeddings": self._size("context_length"),
            "rms_norm_eps": self._metadata.number(self._key("attention.layer_norm_rms_epsilon")),
            "rope_theta": self._metadata.number(self._key("rope.freq_base"), 10000.0),
            "rope_scaling": self._rope_scaling(head_dim),
            "hidden_act": "silu",
            "tie_word_embeddings": tied,
            "bos_token_id": bos,
            "eos_token_id": eos,
        }
        if config["rms_norm_eps"] is None:
            raise CheckpointError(
                f"{self._source} has no {self._key('attention.layer_norm_rms_epsilon')}.", _CONVERT
            )
        return config | self._particulars(width, heads, head_dim)

    def _expert_sizes(self) -> dict[str, Any]:
        names = self._family.experts
        assert names is not None
        # Files of llama and of gpt-oss give the width of an expert under either name.
        own = self._metadata.integer(self._key("expert_feed_forward_length"))
        found = {
            names.count[0]: self._experts,
            names.chosen[0]: self._size("expert_used_count"),
            names.inner: self._size("expert_feed_forward_length")
            if own is not None
            else self._size("feed_forward_length"),
        }
        # The files do not say it: every model of the family that was released renormalises.
        return found | ({"norm_topk_prob": True} if self._architecture == "qwen3moe" else {})

    def _particulars(self, width: int, heads: int, head_dim: int) -> dict[str, Any]:
        """Fields that only some families have, present only where they say something."""
        found: dict[str, Any] = {}
        if head_dim * heads != width or self._architecture in ("qwen3", "qwen3moe", "gpt-oss"):
            found["head_dim"] = head_dim
        rotating = self._size("rope.dimension_count", head_dim)
        if rotating != head_dim:
            found["partial_rotary_factor"] = rotating / head_dim
        if self._architecture != "qwen2" and "blk.0.attn_q.bias" in self._tensors:
            found["attention_bias"] = True
        window = self._key("attention.sliding_window")
        if self._architecture in _WINDOWED and window in self._metadata.keys:
            found["sliding_window"] = self._metadata.integer(window) or None
            if self._architecture == "llama" and not self._experts:
                found |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
        plain = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
        stored = self._tensors[GGUF_EMBEDDING].stored
        if stored in plain:
            found["torch_dtype"] = plain[stored]
        return found

    def _key(self, name: str) -> str:
        return f"{self._architecture}.{name}"

    def _size(self, name: str, default: int | None = None) -> int:
        value = self._metadata.integer(self._key(name), default)
        if value is None:
            raise CheckpointError(f"{self._source} has no {self._key(name)}.", _CONVERT)
        if not 0 < value < 1 << 31:
            raise CheckpointError(
                f"{self._source}: {self._key(name)} is {value}, which is no size.", _CONVERT
            )
        return value

    def _require_known_keys(self) -> None:
        for key in sorted(self._metadata.keys):
            below = key.removeprefix(f"{self._architecture}.")
            if below == key or below in _KNOWN:
                continue
            if below == "attention.sliding_window" and self._architecture in _WINDOWED:
                continue
            if self._experts and below in _OF_EXPERTS and self._changes_nothing(key, _OF_EXPERTS[below]):
                continue
            raise UnsupportedModel(
                f"{self._source} sets {key}, which Monotape does not know for {self._architecture}.",
                "It may change the model's results, so it is not ignored.",
            )

    def _changes_nothing(self, key: str, values: tuple[float, ...]) -> bool:
        return not values or self._metadata.scalar(key) in values

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self._tensors:
            raise CheckpointError(f"{self._source} has no tensor {name}.", _CONVERT)
        return self._tensors[name].shape

    def _contradiction(self, name: str, says: str) -> CheckpointError:
        shape = list(self._shape(name))
        return CheckpointError(
            f"{self._source}: tensor {name} has shape {shape}, but the metadata says {says}.", _CONVERT
        )

    def _vocabulary_size(self, width: int) -> int:
        shape = self._shape(GGUF_EMBEDDING)
        tokens = self._metadata.count("tokenizer.ggml.tokens")
        stated = self._size("vocab_size", shape[0])
        if len(shape) != 2 or shape != (stated, width):
            raise self._contradiction(GGUF_EMBEDDING, f"{stated} tokens of width {width}")
        if tokens > shape[0]:
            raise self._contradiction(GGUF_EMBEDDING, f"{tokens} tokens")
        return shape[0]

    def _head_dim(self, width: int, heads: int, kv_heads: int) -> int:
        """The size of a head, which the rows of a projection must bear out before anything is sized by it."""
        head_dim = self._size("attention.key_length", width // heads)
        if self._size("attention.value_length", head_dim) != head_dim:
            raise UnsupportedModel(
                f"{self._source} has values of another size than keys.", "Use another model."
            )
        fused = self._architecture == "phi3"
        name = "blk.0.attn_qkv.weight" if fused else "blk.0.attn_q.weight"
        rows = (heads + 2 * kv_heads if fused else heads) * head_dim
        if self._shape(name)[0] != rows:
            raise self._contradiction(name, f"{heads} heads and {kv_heads} key heads of {head_dim}")
        if head_dim % 2:
            raise UnsupportedModel(
                f"{self._source} has heads of the odd size {head_dim}.", "Use another model."
            )
        return head_dim

    def _require_layers(self, layers: int) -> None:
        found = {layer for name in self._tensors if (layer := layer_of(name)) is not None}
        if len(found) < layers:
            raise CheckpointError(
                f"{self._source} has tensors for {len(found)} layers, but its metadata says {layers}.",
                _CONVERT,
            )

    def _rope_scaling(self, head_dim: int) -> dict[str, Any] | None:
        kind = self._scaling_kind()
        rotating = self._size("rope.dimension_count", head_dim)
        if ROPE_SHORT in self._tensors or ROPE_LONG in self._tensors:
            self._require_only_scaling(ROPE_SHORT, kind, ("none", "longrope"))
            return self._long_rope(rotating)
        if ROPE_FACTORS in self._tensors:
            self._require_only_scaling(ROPE_FACTORS, kind, ("none",))
            return {"rope_type": "factors", "factors": self._factors(ROPE_FACTORS, rotating)}
        linear = self._metadata.number(self._key("rope.scale_linear"), 1.0)
        if kind == "none":
            return None if linear == 1.0 else {"rope_type": "linear", "factor": linear}
        # gpt-oss does not round the bounds of its ramp, which the files do not say.
        exact = {"truncate": False} if self._architecture == "gpt-oss" and kind == "yarn" else {}
        return {"rope_type": kind} | self._scaling_settings() | exact

    def _scaling_kind(self) -> str:
        """A factor without a rule's name means linear scaling, as in llama.cpp."""
        kind = self._metadata.text(self._key("rope.scaling.type"))
        factor = self._metadata.number(self._key("rope.scaling.factor"))
        return kind or ("none" if factor in (None, 0.0, 1.0) else "linear")

    def _require_only_scaling(self, name: str, kind: str, allowed: tuple[str, ...]) -> None:
        """Two rules for the rotary frequencies in one file: whichever were taken, the other would be ignored."""
        linear = self._metadata.number(self._key("rope.scale_linear"), 1.0)
        others = {
            f"{kind} scaling": kind not in allowed,
            self._key("rope.scale_linear"): linear != 1.0,
            ROPE_FACTORS: name != ROPE_FACTORS and ROPE_FACTORS in self._tensors,
        }
        for other, there in others.items():
            if there:
                raise UnsupportedModel(f"{self._source} has {name} and {other} too.", "Use another model.")

    def _scaling_settings(self) -> dict[str, Any]:
        """What the file says about its scaling, in Hugging Face's words; the family file decides on it."""
        number = self._metadata.number
        named = {
            "factor": number(self._key("rope.scaling.factor")),
            "original_max_position_embeddings": self._metadata.integer(
                self._key("rope.scaling.original_context_length")
            ),
            "attn_factor": number(self._key("rope.scaling.attn_factor")),
            "beta_fast": number(self._key("rope.scaling.yarn_beta_fast")),
            "beta_slow": number(self._key("rope.scaling.yarn_beta_slow")),
            "yarn_ext_factor": number(self._key("rope.scaling.yarn_ext_factor")),
            "yarn_attn_factor": number(self._key("rope.scaling.yarn_attn_factor")),
            "yarn_log_multiplier": number(self._key("rope.scaling.yarn_log_multiplier")),
        }
        return {name: value for name, value in named.items() if value is not None}

    def _long_rope(self, rotating: int) -> dict[str, Any]:
        found = {
            "rope_type": "longrope",
            "short_factor": self._factors(ROPE_SHORT, rotating),
            "long_factor": self._factors(ROPE_LONG, rotating),
            "original_max_position_embeddings": self._size("rope.scaling.original_context_length"),
        }
        magnitude = self._metadata.number(self._key("rope.scaling.attn_factor"))
        return found if magnitude is None else found | {"attention_factor": magnitude}

    def _factors(self, name: str, rotating: int) -> list[float]:
        if self._shape(name) != (rotating // 2,):
            raise self._contradiction(name, f"{rotating} rotating values a head")
        return self._read_vector(name)

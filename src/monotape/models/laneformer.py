"""Laneformer: a Llama whose ranks have residual streams of their own, trained for Delayed Tensor Parallelism."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from monotape.errors import UnsupportedModel
from monotape.models.dense import (
    MAX_LAYERS,
    Sizes,
    Windows,
    check_type,
    decoder_spec,
    read_heads,
    read_sizes,
)  # fmt: skip
from monotape.models.fields import FIXED, HARMLESS, Fields
from monotape.models.lanes import Lanes
from monotape.models.spec import MAX_POSITIONS, ModelSpec, TensorSource

MAX_LANES = 64
#: lm_head_type, and what Lanes calls it.
HEAD_TYPES = {"replicate": "mean", "lane": "concatenate", "vocab_parallel": "vocabulary"}
#: How its authors' trainer set itself up; no number of a forward pass depends on it.
TRAINING = frozenset(("multiple_of", "depth_init", "use_flex_attn"))
LAYER = "model.layers.{layer}."


@dataclass(frozen=True, slots=True)
class Laneformer:
    """The family under one of its names: the released one, or that of the trainer it comes from."""

    name: str
    architecture: str

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        """The ModelSpec of a config.json; a field that it does not know is an error."""
        from monotape.models.rope import read_rope  # takes NumPy, which knowing the families does not need

        fields = Fields(config)
        check_type(fields, self.name)
        # Its rotation is interleaved whether or not a file says so.
        fixed = {
            **FIXED,
            "rope_interleaved": (True,),
            "attn_mask_type": ("causal",),
            "attention_bias": (False,),
        }
        fields.fixed(fixed, self.architecture)
        sizes, tied = _read_sizes(fields), fields.flag("tie_word_embeddings", False)
        lanes = _read_lanes(fields, sizes)
        if tied and lanes.head != "mean":
            raise fields.wrong("tie_word_embeddings", "only a replicated head can be the embedding")
        fields.ids("pad_token_id", sizes.vocab, low=-1)
        rope = read_rope(fields, sizes.head_dim, sizes.context, ("default", "linear", "llama3"), False)
        spec = decoder_spec(
            fields,
            sizes,
            _read_windows(fields, sizes),
            family=self.name,
            architecture=self.architecture,
            norm_eps=_agreed_eps(fields),
            rope=dataclasses.replace(rope, interleaved=True),
            tied=tied,
            qkv_bias=False,
            qk_norm=False,
            layer_tensors=_layer_tensors(lanes),
            model_tensors=_model_tensors(lanes, tied),
            lanes=lanes,
        )
        fields.finish(self.architecture, HARMLESS | TRAINING)
        return spec


def _read_sizes(fields: Fields) -> Sizes:
    heads = read_heads(fields)
    if heads.width % heads.heads:
        raise fields.wrong("num_attention_heads", f"must divide hidden_size ({heads.width})")
    if heads.head_dim != heads.width // heads.heads:
        made = heads.width // heads.heads
        raise fields.wrong("head_dim", f"hidden_size over num_attention_heads makes it {made}")
    return read_sizes(fields, heads)


def _agreed_eps(fields: Fields) -> float:
    """norm_eps is its own name for it; a file that was written for other readers says rms_norm_eps."""
    own, other = (fields.optional_number(name, 0, 1) for name in ("norm_eps", "rms_norm_eps"))
    if own is not None and other is not None and own != other:
        raise fields.wrong("norm_eps", f"rms_norm_eps is {other:g}")
    return own or other or 1e-5


def _read_lanes(fields: Fields, sizes: Sizes) -> Lanes:
    count = fields.integer("num_lanes", 1, MAX_LANES)
    for name, value in (("num_attention_heads", sizes.heads), ("num_key_value_heads", sizes.kv_heads),
                        ("intermediate_size", sizes.ffn)):  # fmt: skip
        if value % count:
            raise fields.wrong("num_lanes", f"must divide {name} ({value})")
    delay = _read_delay(fields)
    talks = fields.flag("use_comm", True)
    attention = fields.flag("use_attention_comm", talks)
    feed_forward = fields.flag("use_mlp_comm", talks)
    head = _read_head(fields, sizes, count)
    ladder = fields.flag("ladder_residual", False)
    if ladder and count == 1:
        raise fields.wrong("ladder_residual", "a ladder needs at least two lanes")
    if ladder and not (attention and feed_forward and delay):
        raise fields.wrong(
            "ladder_residual", "a ladder needs sums with a delay of at least 1 from every module"
        )
    return Lanes(
        count=count,
        delay=delay if attention or feed_forward else None,
        early="sum" if fields.flag("use_early_comm", True) else "scale",
        early_modules=delay,
        own="with sum" if ladder else "now",
        attention=attention,
        feed_forward=feed_forward,
        head=head,
        own_norms=not fields.flag("replicated_rmsn_scale", True),
    )


def _read_delay(fields: Fields) -> int:
    """In modules. The released files count layers; ours may count modules, which are half a layer each."""
    in_layers = fields.optional_integer("broadcast_delay", 0, MAX_LAYERS)
    in_modules = fields.optional_integer("broadcast_delay_modules", 0, 2 * MAX_LAYERS)
    if in_layers is None and in_modules is None:
        return 2 * fields.integer("broadcast_delay", 0, MAX_LAYERS)  # says that the field is missing
    if in_layers is not None and in_modules not in (None, 2 * in_layers):
        raise fields.wrong("broadcast_delay_modules", f"broadcast_delay is {in_layers} layers")
    return 2 * in_layers if in_layers is not None else in_modules or 0


def _read_head(fields: Fields, sizes: Sizes, lanes: int) -> str:
    kind = fields.optional_text("lm_head_type") or "replicate"
    if kind not in HEAD_TYPES:
        raise UnsupportedModel(
            f"{fields.says('lm_head_type')}, which is not supported.", f"Supported: {', '.join(HEAD_TYPES)}."
        )
    if fields.flag("pre_norm_lane_agg", False):
        if kind != "replicate":
            raise fields.wrong("pre_norm_lane_agg", "only a replicated head adds up its lanes")
        return "sum"
    if kind == "vocab_parallel" and sizes.vocab % lanes:
        raise fields.wrong("num_lanes", f"must divide vocab_size ({sizes.vocab}) where lanes share the head")
    return HEAD_TYPES[kind]


def _read_windows(fields: Fields, sizes: Sizes) -> Windows:
    """Which layers slide is a list in the released files, and a count from either end in earlier ones."""
    window = fields.optional_integer("sliding_window", 1, MAX_POSITIONS)
    listed, free = _layer_list(fields, "swa_layers", sizes), _layer_list(fields, "unclamped_layers", sizes)
    count = fields.integer("sliding_window_n_layers", -sizes.layers, sizes.layers, 0)
    kinds = fields.texts("layer_types", sizes.layers)
    by_count = set(range(count)) if count >= 0 else set(range(sizes.layers + count, sizes.layers))
    sliding = (by_count if listed is None else set(listed)) - set(free or ())
    if listed is not None and count and set(listed) != by_count:
        raise fields.wrong("sliding_window_n_layers", "swa_layers lists other layers")
    if kinds is not None:
        named = {layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"}
        if set(kinds) - {"sliding_attention", "full_attention"} or (sliding and named != sliding):
            raise fields.wrong("layer_types", f"layers {sorted(sliding)} slide")
        sliding = named
    if sliding and window is None:
        raise fields.wrong("sliding_window", f"layers {sorted(sliding)} need one")
    return tuple(window if layer in sliding else None for layer in range(sizes.layers))


def _layer_list(fields: Fields, name: str, sizes: Sizes) -> tuple[int, ...] | None:
    values = fields.integers(name, 0, sizes.layers - 1)
    if values is not None and len(set(values)) != len(values):
        raise fields.wrong(name, "a layer is listed twice")
    return values


def _layer_tensors(lanes: Lanes) -> dict[str, TensorSource]:
    gain = "scale" if lanes.own_norms else "weight"
    rows = {"q": "attention.wq", "k": "attention.wk", "v": "attention.wv", "gate": "feed_forward.w1",
            "up": "feed_forward.w3"}  # fmt: skip
    columns = {"output": "attention.wo", "down": "feed_forward.w2"}
    return {
        "attention_norm": TensorSource(f"{LAYER}attention_norm.{gain}"),
        "ffn_norm": TensorSource(f"{LAYER}ffn_norm.{gain}"),
        **{role: TensorSource(f"{LAYER}{name}.weight", None, lanes.count) for role, name in rows.items()},
        **{
            role: TensorSource(f"{LAYER}{name}.weight", None, lanes.count, "columns")
            for role, name in columns.items()
        },
    }


def _model_tensors(lanes: Lanes, tied: bool) -> dict[str, TensorSource]:
    gain = "scale" if lanes.own_norms and lanes.head != "sum" else "weight"
    head = {
        "concatenate": TensorSource("lm_head.linear.weight"),
        "vocabulary": TensorSource("lm_head.weight", None, lanes.count),
    }.get(lanes.head, TensorSource("lm_head.weight"))
    tensors = {
        "embedding": TensorSource("model.tok_embeddings.weight"),
        "final_norm": TensorSource(f"model.norm.{gain}"),
    }
    return tensors if tied else {**tensors, "head": head}


LANEFORMER = Laneformer("laneformer", "LaneformerForCausalLM")
LANEFORMER_TP = Laneformer("laneformer_tp", "LaneformerTPForCausalLM")

"""Which architecture is counted how: those that the engine runs by their own description, others by a row here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from monotape.errors import UnsupportedModel
from monotape.models import dense as runnable
from monotape.models.dense import (
    MAX_LAYERS,
    Heads,
    Windows,
    all_positions,
    one_window,
    read_heads,
)
from monotape.models.registry import FAMILIES as RUNNABLE
from monotape.planner.attention import (
    MAX_WINDOW,
    Attention,
    compressed,
    gated_delta,
    grouped,
    kimi_delta,
    latent,
)
from monotape.planner.config_fields import ConfigFields
from monotape.planner.feedforward import (
    ExpertNames,
    FeedForward,
    chosen_experts,
    dense,
    experts,
    plain,
)
from monotape.planner.shape import FFN

DEEPSEEK = ExpertNames("n_routed_experts", "num_experts_per_tok", shared_count="n_shared_experts")
KIMI = ExpertNames("num_experts", "num_experts_per_token", shared_count="num_shared_experts")
QWEN = ExpertNames("num_experts", "num_experts_per_tok", shared_inner="shared_expert_intermediate_size")
MIXTRAL = ExpertNames("num_local_experts", "num_experts_per_tok", "intermediate_size")
GEMMA = ExpertNames("num_experts", "top_k_experts")
_ONE_WINDOW = one_window(None)


@dataclass(frozen=True, slots=True)
class Family:
    """How the layers of one architecture are made."""

    attention: Callable[[ConfigFields, int], Attention]
    feedforward: Callable[[ConfigFields, int], FeedForward]
    norms: int = 2  # vectors of the model's width in a layer
    norm_values: int = 1  # 2 where norms have biases
    tied: bool = False  # where the file does not say
    layer_vectors: Callable[[ConfigFields], int] = lambda fields: 0  # further vectors of a layer
    model_vectors: Callable[[ConfigFields], int] = lambda fields: 0  # further vectors beside the head
    heads: Callable[[ConfigFields], tuple[int, int] | None] = lambda fields: None  # as the engine reads them


def window_by_type(pattern: int) -> Callable[[ConfigFields, int], Windows]:
    """layer_types says it; else every `pattern`-th layer sees everything."""

    def windows(fields: ConfigFields, layers: int) -> Windows:
        kinds = layer_kinds(fields, "sliding_attention")
        every = fields.integer("sliding_window_pattern", 1, MAX_LAYERS, pattern)
        full = [
            (layer + 1) % every == 0 if kinds is None else kinds[layer] == "full_attention"
            for layer in range(layers)
        ]
        window = None if all(full) else fields.integer("sliding_window", 1, MAX_WINDOW)
        return tuple(None if sees_all else window for sees_all in full)

    return windows


def layer_kinds(fields: ConfigFields, other: str) -> tuple[str, ...] | None:
    """layer_types, where the file has it: each layer sees everything or is of the `other` kind."""
    kinds = fields.texts("layer_types", layer_count(fields))
    for kind in kinds or ():
        if kind not in ("full_attention", other):
            raise UnsupportedModel(
                f"config.json lists the layer type {kind!r}, which the planner cannot count here.",
                f"It knows full_attention and {other}.",
            )
    return kinds


def layer_count(fields: ConfigFields) -> int:
    return fields.integer("num_hidden_layers", 1, MAX_LAYERS)


def grouped_layer(
    windows: Callable[[ConfigFields, int], Windows] = all_positions, *, biases: str = "", head_norms: bool = False,
    sinks: bool = False, kv_heads: int | None = None, head_dim: int | None = None,
) -> Callable[[ConfigFields, int], Attention]:  # fmt: skip
    """Grouped-query attention; `kv_heads` and `head_dim` are the family's where the file does not say."""

    def attention(fields: ConfigFields, layer: int) -> Attention:
        heads = read_heads(fields, kv_heads, head_dim)
        biased = "qkvo" if fields.flag("attention_bias", False) else biases
        norms = 2 * heads.head_dim if head_norms else 0
        window = windows(fields, layer_count(fields))[layer]
        return grouped(heads, window, biases=biased, norms=norms, sinks=sinks)

    return attention


def _minimax(fields: ConfigFields, layer: int) -> Attention:
    heads = read_heads(fields)
    return grouped(heads, norms=(heads.heads + heads.kv_heads) * heads.head_dim)


def _starcoder(fields: ConfigFields, layer: int) -> Attention:
    return grouped(
        read_heads(fields),
        _ONE_WINDOW(fields, layer_count(fields))[layer],
        biases="qkvo" if fields.flag("use_bias", True) else "",
    )


def _gemma4(fields: ConfigFields, layer: int) -> Attention:
    """Layers that see everything have larger heads, fewer of them for k and v, and one projection for both."""
    for name in ("hidden_size_per_layer_input", "num_kv_shared_layers"):
        if fields.integer(name, 0, 1 << 20, 0):
            raise UnsupportedModel(
                f"{fields.says(name)}, which the planner cannot count yet.", "Set it to 0."
            )
    heads, window = read_heads(fields), window_by_type(6)(fields, layer_count(fields))[layer]
    if window is None:
        dim = fields.integer("global_head_dim", 1, 1 << 20, heads.head_dim)
        kv = (
            fields.optional_integer("num_global_key_value_heads", 1, 1 << 14, heads.kv_heads)
            or heads.kv_heads
        )
        heads = Heads(heads.width, heads.heads, kv, dim)
    shared = window is None and fields.flag("attention_k_eq_v", False)
    return grouped(heads, window, norms=2 * heads.head_dim, shared_kv=shared)


def _qwen_hybrid(fields: ConfigFields, layer: int) -> Attention:
    kinds = layer_kinds(fields, "linear_attention")
    every = fields.integer("full_attention_interval", 1, MAX_LAYERS, 4)
    if (layer + 1) % every if kinds is None else kinds[layer] == "linear_attention":
        return gated_delta(fields)
    heads = read_heads(fields)
    return grouped(heads, norms=2 * heads.head_dim, gated=True)


def _sparse_latent(fields: ConfigFields, layer: int) -> Attention:
    """DeepSeek sparse attention; a layer whose indexer_type is "shared" reuses another layer's choice."""
    kinds = fields.texts("indexer_types", layer_count(fields))
    top = fields.integer("index_topk", 1, MAX_WINDOW)
    return latent(fields, indexed=kinds is None or kinds[layer] == "full", top=top)


def _deepseek4(fields: ConfigFields, layer: int) -> Attention:
    ratios = fields.integers("compress_ratios", 0, MAX_WINDOW)
    if ratios is None or len(ratios) < layer_count(fields) or ratios[layer] not in (0, 4, 128):
        raise fields.wrong("compress_ratios", "must list 0, 4 or 128 for each layer")
    return compressed(fields, ratios[layer])


def _kimi_linear(fields: ConfigFields, layer: int) -> Attention:
    full = fields.inner("linear_attn_config").integers("full_attn_layers", 1, MAX_LAYERS)
    if full is None:
        raise fields.wrong("linear_attn_config", "must list full_attn_layers")
    if layer + 1 in full:  # counted from one
        return latent(fields, output_gate=fields.flag("mla_use_output_gate", False))
    return kimi_delta(fields)


def after_first(names: ExpertNames) -> Callable[[ConfigFields, int], FeedForward]:
    """Experts in all layers but the first few."""

    def feedforward(fields: ConfigFields, layer: int) -> FeedForward:
        every = fields.integer("moe_layer_freq", 1, MAX_LAYERS, 1)
        if layer < fields.integer("first_k_dense_replace", 0, MAX_LAYERS, 0) or layer % every:
            return dense(fields)
        latent_width = fields.optional_integer("routed_expert_hidden_size", 1, 1 << 20)
        return experts(fields, names, latent=latent_width)

    return feedforward


def _qwen_moe(fields: ConfigFields, layer: int) -> FeedForward:
    dense_layers = fields.integers("mlp_only_layers", 0, MAX_LAYERS) or ()
    step = fields.integer("decoder_sparse_step", 1, MAX_LAYERS, 1)
    if layer in dense_layers or (layer + 1) % step:
        return dense(fields)
    return experts(fields, QWEN, shared_gate=True)


def _gemma4_ffn(fields: ConfigFields, layer: int) -> FeedForward:
    """A dense block, and beside it experts where the model has them."""
    block = dense(fields)
    if not fields.flag("enable_moe_block", False):
        return block
    width = fields.integer("hidden_size", 1, 1 << 20)
    count = fields.integer("num_experts", 1, 1 << 16)
    moe = experts(fields, GEMMA, router_vectors=width + count)
    first = dataclasses.replace(block.parts[0], kind=FFN, vectors=3 * width)  # three norms between the two
    return FeedForward((first, *moe.parts), stages=moe.stages)


def _every(names: ExpertNames) -> Callable[[ConfigFields, int], FeedForward]:
    return lambda fields, layer: experts(fields, names)


def _hyper_connection(fields: ConfigFields) -> int:
    """DeepSeek-V4 mixes `hc_mult` residual streams twice a layer."""
    streams, width = fields.integer("hc_mult", 1, 64), fields.integer("hidden_size", 1, 1 << 20)
    mixes = (2 + streams) * streams
    return 2 * (mixes * streams * width + mixes + 3)


def _hyper_head(fields: ConfigFields) -> int:
    streams, width = fields.integer("hc_mult", 1, 64), fields.integer("hidden_size", 1, 1 << 20)
    return streams * streams * width + streams + 1


def _attention_residual(vectors: int) -> Callable[[ConfigFields], int]:
    """K3 weighs earlier blocks' outputs: a norm and a projection to one value each time."""

    def count(fields: ConfigFields) -> int:
        used = fields.optional_integer("attn_res_block_size", 1, MAX_LAYERS) is not None
        return vectors * fields.integer("hidden_size", 1, 1 << 20) if used else 0

    return count


def _dense_block(fields: ConfigFields, layer: int) -> FeedForward:
    return dense(fields)


def _as_run(family: runnable.Family) -> Family:
    """A family that the engine runs, counted by the description that it runs by."""
    biases = ("qkv" if family.qkv_bias else "") + ("o" if "output" in family.biases else "")
    attention = grouped_layer(
        family.windows,
        biases=biases,
        head_norms=family.qk_norm,
        sinks=family.sinks,
        kv_heads=family.kv_heads,
        head_dim=family.head_dim,
    )

    def heads(fields: ConfigFields) -> tuple[int, int]:
        found = read_heads(fields, family.kv_heads, family.head_dim)
        return found.heads, found.kv_heads

    names = family.experts
    if names is None:
        return Family(attention, _dense_block, heads=heads)

    def block(fields: ConfigFields, layer: int) -> FeedForward:
        fields.fixed(family.fixed, family.architecture)  # layers without experts, for one
        return chosen_experts(fields, names, biases="router" in family.biases)

    return Family(attention, block, heads=heads)


_DEEPSEEK_V3 = Family(lambda fields, layer: latent(fields), after_first(DEEPSEEK))
_SPARSE = Family(_sparse_latent, after_first(DEEPSEEK))

#: Architectures that are only counted; the engine's own are in models/registry.py.
FURTHER: Mapping[str, Family] = {
    "SmolLM3ForCausalLM": Family(grouped_layer(), _dense_block, tied=True),
    "Starcoder2ForCausalLM": Family(_starcoder, lambda fields, layer: plain(fields), norm_values=2, tied=True),
    "Gemma3ForCausalLM": Family(
        grouped_layer(window_by_type(6), head_norms=True), _dense_block, norms=4, tied=True
    ),
    "Gemma4ForConditionalGeneration": Family(_gemma4, _gemma4_ffn, norms=4, tied=True),
    "Qwen3NextForCausalLM": Family(_qwen_hybrid, _qwen_moe),
    "Qwen3_5MoeForConditionalGeneration": Family(_qwen_hybrid, _qwen_moe),
    "Qwen3_5ForConditionalGeneration": Family(_qwen_hybrid, _dense_block),
    "MiniMaxM2ForCausalLM": Family(_minimax, _every(MIXTRAL)),
    "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
    "KimiK25ForConditionalGeneration": _DEEPSEEK_V3,
    "DeepseekV32ForCausalLM": _SPARSE,
    "GlmMoeDsaForCausalLM": _SPARSE,
    "DeepseekV4ForCausalLM": Family(
        _deepseek4, _every(DEEPSEEK), layer_vectors=_hyper_connection, model_vectors=_hyper_head
    ),
    "KimiK3ForConditionalGeneration": Family(
        _kimi_linear, after_first(KIMI), layer_vectors=_attention_residual(4), model_vectors=_attention_residual(2)
    ),
}  # fmt: skip
FAMILIES: Mapping[str, Family] = {
    **{name: _as_run(family) for name, family in RUNNABLE.items() if isinstance(family, runnable.Family)},
    **FURTHER,
}

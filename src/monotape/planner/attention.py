"""The kinds of attention, each as its parameters, what it keeps of the past, and its stages."""

from __future__ import annotations

from dataclasses import dataclass

from monotape.models.dense import MAX_HEADS, MAX_WIDTH, Heads
from monotape.planner.config_fields import ConfigFields
from monotape.planner.shape import Cache

MAX_WINDOW = 1 << 32


@dataclass(frozen=True, slots=True)
class Attention:
    """One layer's attention."""

    matrices: int
    vectors: int
    caches: tuple[Cache, ...]
    stages: int
    score_flops: int


def grouped(
    heads: Heads, window: int | None = None, *, biases: str = "", norms: int = 0, sinks: bool = False,
    gated: bool = False, shared_kv: bool = False,
) -> Attention:  # fmt: skip
    """Grouped-query attention. `biases` names the biased projections out of "qkvo"; `norms` counts q/k norm values;
    a gate doubles q; with `shared_kv` one projection makes k and v, which are kept separately all the same."""
    q_rows, kv_rows = heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim
    rows = {"q": q_rows * (2 if gated else 1), "k": kv_rows, "v": 0 if shared_kv else kv_rows}
    bias_rows = sum(rows[name] for name in biases if name != "o") + (heads.width if "o" in biases else 0)
    return Attention(
        matrices=heads.width * (sum(rows.values()) + q_rows),
        vectors=bias_rows + norms + (heads.heads if sinks else 0),
        caches=(Cache(2 * kv_rows, window, heads=heads.kv_heads),),
        stages=3,  # qkv, attention, output
        score_flops=4 * q_rows,
    )


def latent(
    fields: ConfigFields, *, indexed: bool = False, output_gate: bool = False, top: int | None = None
) -> Attention:
    """Multi-head latent attention: low-rank queries, one latent and one rotary key for all heads.
    `top`: the number of positions that are read; `indexed`: this layer has the indexer that chooses them."""
    width = fields.integer("hidden_size", 1, MAX_WIDTH)
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    q_rank = fields.optional_integer("q_lora_rank", 1, MAX_WIDTH)
    kv_rank = fields.integer("kv_lora_rank", 1, MAX_WIDTH)
    rope = fields.integer("qk_rope_head_dim", 0, MAX_WIDTH)
    nope = fields.integer("qk_nope_head_dim", 1, MAX_WIDTH)
    value = fields.integer("v_head_dim", 1, MAX_WIDTH)
    q_rows = heads * (nope + rope)
    queries = width * q_rows if q_rank is None else q_rank * (width + q_rows)
    matrices = queries + width * (kv_rank + rope) + kv_rank * heads * (nope + value)
    matrices += width * heads * value * (2 if output_gate else 1)
    vectors = kv_rank + (q_rank or 0)
    caches = [Cache(kv_rank + rope, top=top)]
    stages = 5  # into the latents, out of them, attention, values, output
    if indexed:
        index = fields.integer("index_head_dim", 1, MAX_WIDTH)
        index_heads = fields.integer("index_n_heads", 1, MAX_HEADS)
        matrices += (q_rank or width) * index_heads * index + width * (index + index_heads)
        vectors += 2 * index  # a layer norm with a bias
        caches.append(Cache(index, scored=False))
        stages += 1
    return Attention(matrices, vectors, tuple(caches), stages, 2 * heads * (nope + rope + value))


def gated_delta(fields: ConfigFields) -> Attention:
    """Gated delta net (Qwen3-Next, Qwen3.5): a fixed state for each value head instead of a KV cache."""
    width = fields.integer("hidden_size", 1, MAX_WIDTH)
    key_dim = fields.integer("linear_key_head_dim", 1, MAX_WIDTH)
    value_dim = fields.integer("linear_value_head_dim", 1, MAX_WIDTH)
    keys = fields.integer("linear_num_key_heads", 1, MAX_HEADS) * key_dim
    value_heads = fields.integer("linear_num_value_heads", 1, MAX_HEADS)
    values = value_heads * value_dim
    kernel = fields.integer("linear_conv_kernel_dim", 1, 64)
    channels = 2 * keys + values
    return Attention(
        matrices=width * (channels + values + 2 * value_heads) + values * width,
        vectors=channels * kernel + 2 * value_heads + value_dim,
        caches=(Cache(state=value_heads * key_dim * value_dim + channels * (kernel - 1), heads=value_heads),),
        stages=3,
        score_flops=0,
    )


def kimi_delta(fields: ConfigFields) -> Attention:
    """Kimi delta attention: as above with a gate for every channel; `use_full_rank_gate` as in K3."""
    width = fields.integer("hidden_size", 1, MAX_WIDTH)
    linear = fields.inner("linear_attn_config")
    heads, dim = linear.integer("num_heads", 1, MAX_HEADS), linear.integer("head_dim", 1, MAX_WIDTH)
    kernel = linear.integer("short_conv_kernel_size", 1, 64)
    inner = heads * dim
    gate = width * inner if linear.flag("use_full_rank_gate", False) else dim * (width + inner)
    return Attention(
        matrices=4 * width * inner + gate + dim * (width + inner) + width * heads,
        vectors=3 * inner * kernel + inner + heads + dim,
        caches=(Cache(state=heads * dim * dim + 3 * inner * (kernel - 1), heads=heads),),
        stages=3,
        score_flops=0,
    )


def compressed(fields: ConfigFields, ratio: int) -> Attention:
    """DeepSeek-V4: one shared key-value of `head_dim` in a short window, and one for every `ratio` positions.
    At ratio 4 an indexer chooses which of these are read; at 0 there is only the window."""
    width = fields.integer("hidden_size", 1, MAX_WIDTH)
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    dim = fields.integer("head_dim", 1, MAX_WIDTH)
    q_rank = fields.integer("q_lora_rank", 1, MAX_WIDTH)
    out_rank = fields.integer("o_lora_rank", 1, MAX_WIDTH) * fields.integer("o_groups", 1, MAX_HEADS)
    out_in = heads * dim // fields.integer("o_groups", 1, MAX_HEADS)
    matrices = width * q_rank + q_rank * heads * dim + width * dim + out_rank * (out_in + width)
    vectors = q_rank + dim + heads
    caches = [Cache(dim, fields.integer("sliding_window", 1, MAX_WINDOW))]
    if ratio:
        indexed = ratio == 4
        copies = 2 if indexed else 1  # entries overlap: two projections for each
        matrices += 2 * width * copies * dim
        vectors += ratio * copies * dim + dim
        caches.append(
            Cache(dim, stride=ratio, top=fields.integer("index_topk", 1, MAX_WINDOW) if indexed else None)
        )
        if indexed:
            index = fields.integer("index_head_dim", 1, MAX_WIDTH)
            index_heads = fields.integer("index_n_heads", 1, MAX_HEADS)
            matrices += 4 * width * index + q_rank * index_heads * index + width * index_heads
            vectors += 2 * ratio * index + index
            caches.append(Cache(index, stride=ratio, scored=False))
    return Attention(matrices, vectors, tuple(caches), 5 if ratio else 4, 4 * heads * dim)

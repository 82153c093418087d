"""gpt-oss (20b, 120b): experts with biases and a clamped gate, attention sinks, every other layer with a window."""

from __future__ import annotations

from monotape.models.dense import Family, alternating_windows
from monotape.models.experts import ExpertNames, Gating
from monotape.models.fields import Fields
from monotape.models.layer import SPARSE
from monotape.models.tensors import LAYER, expert_tensors


def _gating(fields: Fields) -> Gating:
    return Gating(
        alpha=fields.number("swiglu_alpha", 0, 1e6, 1.702),
        limit=fields.number("swiglu_limit", 0, 1e6, 7.0),
        shift=1.0,
    )


GPT_OSS = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    windows=alternating_windows(128),
    fixed={"attention_bias": (True,)},
    unused=frozenset(("initial_context_length",)),  # of its rope rule, which has it under another name too
    # Files store the experts of a layer as one stack, gate and up row by row: weights/stacks.py takes it apart.
    projections=expert_tensors(f"{LAYER}mlp.router", f"{LAYER}mlp.experts.{{expert}}."),
    norm_eps=1e-5,
    kv_heads=8,
    head_dim=64,
    qkv_bias=True,
    biases=("output", "router", "gate", "up", "down"),
    sinks=True,
    gating=_gating,
    rope_rules=("yarn",),
    theta=150000.0,
    layer=SPARSE,
    experts=ExpertNames(
        ("num_local_experts", "num_experts"),
        ("num_experts_per_tok", "experts_per_token"),
        default_count=128,
        default_chosen=4,
    ),
)

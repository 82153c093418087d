"""Qwen3-MoE (30B-A3B, Coder-30B-A3B, 235B-A22B): Qwen3 with experts, of which a token passes eight."""

from __future__ import annotations

from monotape.models.dense import Family, all_positions
from monotape.models.experts import ExpertNames, Softmax
from monotape.models.fields import Fields
from monotape.models.layer import SPARSE
from monotape.models.tensors import LAYER, expert_tensors


def _softmax(fields: Fields) -> Softmax:
    return Softmax.CHOSEN if fields.flag("norm_topk_prob", False) else Softmax.ALL


QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    windows=all_positions,
    fixed={
        "attention_bias": (False,),
        "qkv_bias": (False,),
        "use_qk_norm": (True,),
        "use_sliding_window": (False,),
        # Layers without experts, and experts that every token passes: no released model has them.
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([],),
        "shared_expert_intermediate_size": (0,),
    },
    unused=frozenset(("intermediate_size", "sliding_window", "max_window_layers")),
    projections=expert_tensors(f"{LAYER}mlp.gate", f"{LAYER}mlp.experts.{{expert}}."),
    kv_heads=4,
    qk_norm=True,
    layer=SPARSE,
    experts=ExpertNames(
        ("num_experts", "num_local_experts"),
        ("num_experts_per_tok",),
        "moe_intermediate_size",
        default_count=128,
        default_chosen=8,
        softmax=_softmax,
    ),
)

"""Mixtral: Mistral with experts, of which a token passes two."""

from __future__ import annotations

from monotape.models.dense import Family, one_window
from monotape.models.experts import ExpertNames
from monotape.models.layer import SPARSE
from monotape.models.tensors import LAYER, expert_tensors

MOE = f"{LAYER}block_sparse_moe."
MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    windows=one_window(None),
    fixed={"attention_bias": (False,)},
    projections=expert_tensors(
        f"{MOE}gate", f"{MOE}experts.{{expert}}.", {"gate": "w1", "up": "w3", "down": "w2"}
    ),
    norm_eps=1e-5,
    kv_heads=8,
    theta=1e6,
    layer=SPARSE,
    experts=ExpertNames(("num_local_experts", "num_experts"), ("num_experts_per_tok",)),
)

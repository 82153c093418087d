"""Mistral 7B and its kin: Llama with one sliding window for all layers."""

from __future__ import annotations

from monotape.models.dense import Family, one_window

MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    windows=one_window(4096),
    fixed={"attention_bias": (False,)},
    kv_heads=8,
)

"""Llama 1 to 3.x, and models built like it: SmolLM2, TinyLlama, Yi."""

from __future__ import annotations

from monotape.models.dense import Family, all_positions

LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    windows=all_positions,
    fixed={"attention_bias": (False,)},  # true would also put a bias on the output projection
)

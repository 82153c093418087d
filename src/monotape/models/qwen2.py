"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v, and windows on the upper layers where switched on."""

from __future__ import annotations

from monotape.models.dense import Family, upper_windows

QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    windows=upper_windows,
    kv_heads=32,
    qkv_bias=True,
)

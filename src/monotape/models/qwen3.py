"""Qwen3: heads of their own size, with an RMSNorm on each q and k head before they rotate."""

from __future__ import annotations

from monotape.models.dense import Family, upper_windows

QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    windows=upper_windows,
    fixed={"attention_bias": (False,)},  # true would also put a bias on the output projection
    kv_heads=32,
    head_dim=128,
    qk_norm=True,
)

"""Phi-3, Phi-3.5-mini and Phi-4-mini: fused projections, partly rotated heads, longrope."""

from __future__ import annotations

from monotape.models.dense import Family, one_window
from monotape.models.tensors import fused_tensors

PHI3 = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    windows=one_window(None),
    # Switches of Microsoft's own code, off in every released model.
    fixed={"attention_bias": (False,), "full_attn_mod": (1,), "interpolate_factor": (1,)},
    projections=fused_tensors,
    norm_eps=1e-5,
    # The first files said "yarn" for a rule with other magnitudes than either rule has today.
    rope_rules=("default", "longrope", "factors"),
    partial_rope=True,
)

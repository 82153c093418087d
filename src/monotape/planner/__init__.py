"""Speed of light: how fast a model can run for one user on a machine, and what it would cost. Needs no GPU.

from monotape.planner.estimate import estimate
found = estimate("llama-3.2-1b", gpu="h200", context=4096)
found.token_bytes, found.ceilings, found.prediction
"""

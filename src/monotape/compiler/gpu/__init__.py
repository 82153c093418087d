"""Plan -> GpuPlan: a list of passes, each in a file of its own; lower.py puts them together."""

from monotape.compiler.gpu.lower import Tuning, gpu_plan, lower

__all__ = ["Tuning", "gpu_plan", "lower"]

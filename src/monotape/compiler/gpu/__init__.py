"""Plan -> GpuPlan: a list of passes, one per file; lower.py runs them."""

from monotape.compiler.gpu.lower import Tuning, drafting_plan, gpu_plan, lower

__all__ = ["Tuning", "drafting_plan", "gpu_plan", "lower"]

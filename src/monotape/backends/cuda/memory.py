"""How much of the GPU's memory a model will take, known before the first byte of it is taken."""

from __future__ import annotations

from dataclasses import dataclass

from monotape.errors import ResourceError
from monotape.models.spec import ModelSpec
from monotape.plan.types import Plan

_OTHER_BYTES = 64 << 20  # prompts, ids, logits of one row, the kernel's code, and what pools round up


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes, by what they hold."""

    weights: int  # tapes, norms, biases, position tables, an untied embedding
    kv_per_position: int
    context: int
    exchange: int
    other: int

    @property
    def kv(self) -> int:
        """The KV of one sequence that fills the context."""
        return self.kv_per_position * self.context

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.exchange + self.other

    def __str__(self) -> str:
        return (
            f"{self.total / 1e9:.2f} GB: weights {self.weights / 1e9:.2f}, KV of {self.context:,} positions "
            f"{self.kv / 1e9:.2f}, exchange {self.exchange / 1e9:.2f}, other {self.other / 1e9:.2f}"
        )


def memory_plan(spec: ModelSpec, plan: Plan, context: int, exchange: int | None = None) -> MemoryPlan:
    """For one conversation of `context` positions. `exchange` is what the backend will take, if it is known exactly."""
    rank = plan.ranks[0]
    if exchange is None:
        exchange = 2 * sum(buffer.bytes for buffer in rank.buffers)
    other = _OTHER_BYTES + 4 * spec.vocab
    return MemoryPlan(plan.weight_bytes, rank.kv.position_bytes, context, exchange, other)


def require_memory(needed: MemoryPlan, free: int) -> None:
    """Refuses a model that does not fit, with the numbers and the longest context that would."""
    if needed.total <= free:
        return
    left = free - (needed.total - needed.kv)
    fits = left // needed.kv_per_position if left > 0 else 0
    hint = (
        f"Use --max-model-len {fits // 256 * 256 or fits}, or free some of the GPU's memory."
        if fits > 0
        else "Use a smaller model, or free some of the GPU's memory."
    )
    raise ResourceError(f"The GPU has {free / 1e9:.2f} GB free, but the model needs {needed}.", hint)

"""How much of the GPU's memory a model will take, known before the first byte of it is taken."""

from __future__ import annotations

from dataclasses import dataclass

from monotape.backends.cuda.params import die_bytes, exchange_bytes
from monotape.backends.cuda.rank_view import rank_plan
from monotape.errors import ResourceError
from monotape.plan.gpu import UNIT_POSITIONS, GpuPlan

_OTHER_BYTES = 64 << 20  # prompts, ids, logits of one row, the kernel's code, and what pools round up


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes, by what they hold."""

    weights: int  # tapes, norms, biases, position tables, an untied embedding
    kv_per_position: int
    kv: int  # of one sequence that fills the context, in whole units
    context: int
    exchange: int  # between workers, of a prefill's rows, and of ranks
    other: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.exchange + self.other

    def __str__(self) -> str:
        return (
            f"{self.total / 1e9:.2f} GB: weights {self.weights / 1e9:.2f}, KV of {self.context:,} positions "
            f"{self.kv / 1e9:.2f}, exchange {self.exchange / 1e9:.2f}, other {self.other / 1e9:.2f}"
        )


def memory_plan(plan: GpuPlan, rank: int = 0, drafting: GpuPlan | None = None) -> MemoryPlan:
    """For one conversation that fills the context, on the GPU of one rank. `drafting`: a second kernel, for drafts."""
    own, context = plan.ranks[rank], plan.plan.context
    words, other = _kernel_bytes(plan, rank)
    if drafting is not None:
        more_words, more = _kernel_bytes(drafting, rank)
        words, other = words + more_words, other + more
    exchange = words + own.prefill.bytes + own.links.inbox_bytes
    other += _OTHER_BYTES
    weights = rank_plan(plan.plan, rank).weight_bytes
    position = own.kv.bytes(UNIT_POSITIONS) // UNIT_POSITIONS
    return MemoryPlan(weights, position, own.kv.bytes(context), context, exchange, other)


def _kernel_bytes(plan: GpuPlan, rank: int) -> tuple[int, int]:
    """What a kernel has for itself: words between workers, and what rows of drafts take."""
    own = plan.ranks[rank]
    words = exchange_bytes(own, plan.workers) + die_bytes(plan.machine, own, plan.workers)
    chains = own.chain_bytes * plan.workers if own.rows_a_pass > 1 else 0
    return words, 4 * own.rows_a_pass * own.dimensions.all_vocab + chains


def require_memory(needed: MemoryPlan, free: int, gpu: str = "The GPU") -> None:
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
    raise ResourceError(f"{gpu} has {free / 1e9:.2f} GB free, but the model needs {needed}.", hint)

"""Models that the kernel cannot run, refused by name before anything is compiled or loaded."""

from __future__ import annotations

from monotape.compiler.gpu.pages import BLOCK_BYTES, LEAST_PAGES, Room, page_blocks, prefill_ring
from monotape.errors import UnsupportedModel
from monotape.plan.gpu import BLOCK_K, HEAD_INPUTS, MOST_RANKS, Dimensions
from monotape.plan.gpu_formats import GPU_FORMATS
from monotape.plan.types import Plan, RankPlan

MOST_WIDTH = 8192  # a normalised input is held in registers: 4 words per lane of 8 warps
MOST_VOCAB = 1 << 18  # the sampler adds integer weights of all tokens, and the sum must fit 64 bits
MOST_CHOSEN, MOST_EXPERTS = 32, 512  # a lane for each; their lists' lengths in shared memory
_CPU = "use --backend cpu."


def check_model(dimensions: Dimensions, workers: int) -> None:
    """Heads, width and vocabulary that the kernel's registers and tables can hold."""
    d = dimensions
    if d.head_dim % 8 or d.head_dim > 128 or d.rope_dims % 16:
        raise UnsupportedModel(
            f"The GPU kernel does not run heads of {d.head_dim} values of which {d.rope_dims} rotate.",
            f"They must be a multiple of 8 up to 128, rotated in multiples of 16; {_CPU}",
        )
    if d.group > 8:
        raise UnsupportedModel(
            f"The GPU kernel does not run {d.group} query heads to a KV head.",
            f"At most 8 can share one; {_CPU}",
        )
    if d.width > MOST_WIDTH:
        raise UnsupportedModel(
            f"The GPU kernel does not run a residual stream of {d.width:,} values.",
            f"At most {MOST_WIDTH:,} fit its registers; {_CPU}",
        )
    if d.all_vocab > MOST_VOCAB:
        raise UnsupportedModel(
            f"The GPU kernel does not sample from a vocabulary of {d.all_vocab:,} tokens.",
            f"At most {MOST_VOCAB:,} can be told apart; {_CPU}",
        )
    if workers < d.kv_heads:
        raise UnsupportedModel(
            f"{workers} workers cannot share {d.kv_heads} KV heads.", "Use as many workers as KV heads."
        )


def check_plan(plan: Plan) -> None:
    """Ranks and formats that the kernel knows."""
    if len(plan.ranks) > MOST_RANKS:
        raise UnsupportedModel(
            f"The GPU kernel does not run {len(plan.ranks)} ranks.",
            f"Use --tp {MOST_RANKS} or fewer, or --backend cpu.",
        )
    if plan.head_input not in HEAD_INPUTS:
        raise UnsupportedModel(
            f"The GPU kernel does not run a head that reads the lanes' '{plan.head_input}'.",
            "Use --backend cpu.",
        )
    _check_experts(plan.ranks[0])
    for stage in plan.ranks[0].stages:
        if stage.format not in GPU_FORMATS:
            raise UnsupportedModel(
                f"The GPU kernel does not run {stage.format.value} weights yet.",
                "Use --dtype bf16 or f16, or --backend cpu.",
            )


def _check_experts(rank: RankPlan) -> None:
    if rank.library is None:
        return
    if rank.library.chosen > MOST_CHOSEN or rank.library.experts > MOST_EXPERTS:
        raise UnsupportedModel(
            f"The GPU kernel does not choose {rank.library.chosen} of {rank.library.experts} experts.",
            f"At most {MOST_CHOSEN} of {MOST_EXPERTS} can be; {_CPU}",
        )
    routed = [stage for stage in rank.layer_stages if stage.routed or stage.writes == "choice"]
    halves = {GPU_FORMATS[stage.format].half for stage in routed if stage.format in GPU_FORMATS}
    if len(halves) > 1:
        raise UnsupportedModel(
            "The GPU kernel does not run a router of float16 weights with experts of another kind.",
            f"Use --dtype bf16, or {_CPU}",
        )


def check_room(rank: RankPlan, room: Room) -> None:
    """A prefill needs the ring, and may also use the memory of a token's input."""
    blocks = page_blocks(rank, room)
    too_few = room.pages(blocks) < (LEAST_PAGES if room.gpu.ring else 1)
    if too_few or rows_bytes(room, blocks) < prefill_ring(room):
        raise UnsupportedModel(
            f"The GPU kernel has no room for inputs of {BLOCK_K * room.input_blocks:,} values beside its ring.",
            "Share the model among ranks with --tp, or use --backend cpu.",
        )


def rows_bytes(room: Room, blocks: int) -> int:
    """Bytes of shared memory for a prefill: the ring, plus the memory of a token's input if the ring is too small."""
    ring = room.pages(blocks) * blocks * BLOCK_BYTES
    if ring >= prefill_ring(room):
        return ring
    return ring + 2 * BLOCK_K * max(room.input_blocks, room.rows * room.row_blocks)

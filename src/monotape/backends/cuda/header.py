"""The one generated file of the kernel: the plan's dimensions as constants. The kernel's bodies are never generated."""

from __future__ import annotations

from dataclasses import dataclass

from monotape.backends.cuda.links import MOST_RANKS, keeps_own, row_slots, sends_of
from monotape.backends.cuda.rank_view import rank_plan, rank_spec
from monotape.errors import UnsupportedModel
from monotape.models.spec import ModelSpec
from monotape.plan.types import Format, Plan, RankPlan, Stage

SHARED_MEMORY = 227 * 1024  # what a block may have on Hopper
BLOCK_BYTES = 512  # 8 rows of 32 values
_WARPS, _BATCH_TILES, _BLOCK_K = 8, 16, 32
MOST_BLOCKS_AT_ONCE = 12  # kernels/matrix.h
_FAIR_BYTES_PER_TICK = 21.8  # of the memory's bandwidth, for each of an H200's 132 workers
_LEAD, _LONG_LAYER = 224 * 1024, 2 << 20  # bytes of a worker
_FINISHED_BLOCK = 135168  # kernels/rows_matrix.h: the largest block of a product, on its way out
_SELECT_SHARED = 9056  # kernels/select.h: SelectScratch
_OTHER_SHARED = 2048  # flags, barriers, the mailbox and the like
_HEAD_INPUTS = ("own", "mean", "sum")  # kernels/types.h: HeadInput


def plan_header(
    spec: ModelSpec,
    plan: Plan,
    *,
    rank: int = 0,
    link_delay: bool = False,
    trace: bool = False,
    in_flight: InFlight | None = None,
    units_per_split: int = 8,
    prefill: bool = True,
) -> str:
    """plan.h for one rank of this model. With `link_delay` words between ranks can be made late."""
    ranks = rank_constants(spec, plan)
    spec, plan = rank_spec(spec, plan, rank), rank_plan(plan, rank)
    check_supported(spec, plan)
    width_tiles = max(span.count for span in plan.ranks[0].layer_stages[1].spans)
    blocks = page_blocks(spec, plan)
    constants = {
        "kWorkers": plan.machine.workers, "kLayers": spec.layers, "kWidth": spec.width, "kHeads": spec.heads,
        "kKvHeads": spec.kv_heads, "kHeadDim": spec.head_dim, "kFfn": spec.ffn, "kVocab": spec.vocab,
        "kRopeDims": spec.rope.dims, "kMostWidthTiles": max(1, width_tiles), "kPageBlocks": blocks,
        "kRingPages": ring_pages(spec, plan, blocks), "kUnitsPerSplit": units_per_split,
        "kMostOwnWords": own_words(spec, plan), "kMostBlocks": most_blocks(plan), **ranks,
    }  # fmt: skip
    lines = [f"constexpr int {name} = {value};" for name, value in constants.items()]
    lines += [
        f"constexpr float kNormEps = {spec.norm_eps!r}f, kAttentionScale = {spec.attention_scale!r}f;",
        f"constexpr bool kQkvBias = {str(spec.qkv_bias).lower()}, kQkNorm = {str(spec.qk_norm).lower()};",
        f"constexpr bool kFloat16 = {str(plan.format is Format.F16).lower()};",
        *(in_flight or pages_in_flight(plan, blocks, ranks["kRanks"])).lines(),
        # Without: for a look at the decode path alone.
        f"constexpr bool kPrefill = {str(prefill).lower()};",
        f"constexpr bool kKeepsOwn = {str(keeps_own(plan)).lower()}, kLinkDelay = {str(link_delay).lower()};",
        f"constexpr bool kTrace = {str(trace).lower()}, kScattered = {str(leaves_workers_out(plan)).lower()};",
    ]
    return "#pragma once\nnamespace monotape {\n" + "\n".join(lines) + "\n}  // namespace monotape\n"


def leaves_workers_out(plan: Plan) -> bool:
    """Whether some worker has no part of the head, or neither of `down` nor of both stages that read the residual.

    Such a worker can be so far ahead of the others that words must be taken back sooner: kernels/housekeeping.h.
    """

    def takes_part(rank: RankPlan, worker: int) -> bool:
        qkv, _, gate_up, down = (stage.spans[worker].count > 0 for stage in rank.layer_stages)
        return rank.head.spans[worker].count > 0 and (down or (qkv and gate_up))

    return not all(takes_part(rank, worker) for rank in plan.ranks for worker in range(plan.machine.workers))


def rank_constants(spec: ModelSpec, plan: Plan) -> dict[str, int]:
    """What the kernel knows of its peers."""
    if len(plan.ranks) > MOST_RANKS:
        raise UnsupportedModel(
            f"The CUDA kernel does not run {len(plan.ranks)} ranks.",
            f"Use --tp {MOST_RANKS} or fewer, or --backend cpu.",
        )
    if plan.head_input not in _HEAD_INPUTS:
        raise UnsupportedModel(
            f"The CUDA kernel does not run a head that reads the lanes' '{plan.head_input}'.",
            "Use --backend cpu.",
        )
    return {
        "kRanks": len(plan.ranks), "kAllVocab": spec.vocab, "kSlots": max(1, plan.slots),
        "kRowSlots": row_slots(plan), "kSends": max(1, sends_of(plan)), "kSteps": max(1, len(plan.steps)),
        "kLateFolds": max(0, len(plan.steps) - 2 * plan.layers),
        "kHeadInputNumber": _HEAD_INPUTS.index(plan.head_input),
    }  # fmt: skip


def page_blocks(spec: ModelSpec, plan: Plan) -> int:
    """Blocks of a page: the size with which the ring holds most, and workers take the fewest steps.

    A step costs a worker the same whatever its size: as much as if it were twelve blocks longer. More room than a
    layer takes is of no use.
    """
    stages = plan.ranks[0].layer_stages
    total = sum(stage.tiles * blocks_of(stage) for stage in stages)
    layer = total * BLOCK_BYTES / plan.machine.workers

    def worth(size: int) -> float:
        handled = [pages_and_steps(stage, size) for stage in stages]
        pages, steps = sum(pages for pages, _ in handled), sum(steps for _, steps in handled)
        held = ring_pages(spec, plan, size) * BLOCK_BYTES * total / pages
        return min(held, layer) / SHARED_MEMORY - 12 * steps / total

    unit, ring = kv_unit_bytes(spec) // BLOCK_BYTES, prefill_ring(spec.head_dim)
    sizes = [size for size in range(24, 97, 8) if size >= unit]
    roomy = [size for size in sizes if ring_pages(spec, plan, size) * size * BLOCK_BYTES >= ring]
    return max(roomy or sizes, key=worth)


def blocks_of(stage: Stage) -> int:
    return stage.padded_k // _BLOCK_K


def pages_and_steps(stage: Stage, size: int) -> tuple[int, int]:
    """Pages that the tiles of a stage take, of all workers, and steps of their warps."""
    blocks = blocks_of(stage)
    if blocks > size:
        pages = stage.tiles * -(-blocks // size)
        return pages, pages
    in_page, at_once = size // blocks, tiles_at_once(blocks, size // blocks)
    shares = [span.count for span in stage.spans]
    return sum(-(-share // in_page) for share in shares), sum(-(-share // at_once) for share in shares)


def tiles_at_once(blocks: int, in_page: int) -> int:
    """Tiles that a warp multiplies together (kernels/matrix.h): part of a page, as its registers can hold them."""
    most = min(in_page, _BATCH_TILES // 2, max(1, MOST_BLOCKS_AT_ONCE // -(-blocks // _WARPS)))
    return max(tiles for tiles in range(1, most + 1) if in_page % tiles == 0)


@dataclass(frozen=True, slots=True)
class InFlight:
    """Pages that are being copied at once, by what the consumers do."""

    now: int  # they work, and need these pages
    ahead: int  # they work, and need others: other workers may need the memory more
    polling: int  # they poll words, which must not queue behind pages
    attending: int  # the same, while others attend: there is time to fill the ring
    ticks: int = 0  # of the GPU's clock, at least, between copies of what is not needed now
    lead: int = 0  # bytes that wait in the L2 for room in the ring

    def lines(self) -> list[str]:
        return [
            f"constexpr int kInFlightNow = {self.now}, kInFlightAhead = {self.ahead};",
            f"constexpr int kInFlightPolling = {self.polling}, kInFlightAttending = {self.attending};",
            f"constexpr int kPageTicks = {self.ticks};",
            f"constexpr int kLeadBytes = {self.lead};",
        ]


def pages_in_flight(plan: Plan, blocks: int, ranks: int) -> InFlight:
    """About 96 KB of what is needed now; of what is not, what the memory serves every worker in that time.

    One of several ranks reads so little that words which queue behind pages cost it more than late pages. And of long
    layers the memory has always something to read: nothing has to be brought ahead.
    """
    page = blocks * BLOCK_BYTES
    now = max(3, 98304 // page)
    if ranks > 1:
        return InFlight(now=now, ahead=1, polling=1, attending=2)
    lead = _LEAD if max(tape.layer_bytes for tape in plan.ranks[0].tapes) < _LONG_LAYER else 0
    ticks = int(page / _FAIR_BYTES_PER_TICK)
    return InFlight(now=now, ahead=2, polling=2, attending=now, ticks=ticks, lead=lead)


def kv_unit_bytes(spec: ModelSpec) -> int:
    """Bytes of 32 positions of one KV head: keys in blocks of 32 values, then values on their side."""
    return (4 * -(-spec.head_dim // _BLOCK_K) + spec.head_dim // 8) * BLOCK_BYTES


def most_blocks(plan: Plan) -> int:
    """Blocks of the longest input of a stage, which is in shared memory while the stage runs."""
    return max(stage.padded_k for stage in plan.ranks[0].stages) // _BLOCK_K


def own_words(spec: ModelSpec, plan: Plan) -> int:
    """The most words on a worker's list in kernels/housekeeping.h."""
    qkv, output = plan.ranks[0].layer_stages[:2]
    matrices = max(q.count + o.count for q, o in zip(qkv.spans, output.spans, strict=True))
    attention = spec.heads // spec.kv_heads * (spec.head_dim // 4 + 1)
    combined = -(-spec.heads // plan.machine.workers) * (spec.head_dim // 8)
    return matrices + attention + combined


def ring_pages(spec: ModelSpec, plan: Plan, blocks: int) -> int:
    """As many pages as shared memory holds beside everything else that ring.h keeps there."""
    group, head = spec.heads // spec.kv_heads, spec.head_dim
    sums = max(2 * _BATCH_TILES * _WARPS * 8 * 4, _SELECT_SHARED)
    inputs = max(64 * most_blocks(plan) + sums, 4 * _WARPS * group * (head + 4))  # or what warps attended to
    width_tiles = max(span.count for span in plan.ranks[0].layer_stages[1].spans)
    lists = 2 * 4 * own_words(spec, plan) + 4 * spec.layers
    rest = inputs + lists + 4 * 8 * width_tiles + 8 * head + _OTHER_SHARED
    if plan.steps:
        rest += 16 * len(plan.steps) + 4 * 8 * _BATCH_TILES  # steps, and sums that came early
    return (SHARED_MEMORY - rest) // (blocks * BLOCK_BYTES)


def prefill_ring(head_dim: int) -> int:
    """Bytes of the ring that a prefill needs: a finished block, or the queries and four steps of rows_attention.h."""
    blocks, value_tiles = -(-head_dim // _BLOCK_K), 8 if head_dim <= 64 else 16
    queries, step = 16 * blocks * BLOCK_BYTES, (8 * blocks + 2 * value_tiles) * BLOCK_BYTES
    return max(_FINISHED_BLOCK, queries + 4 * step)


def check_supported(spec: ModelSpec, plan: Plan) -> None:
    """Refuses by name what the kernel cannot run."""
    if spec.head_dim % 8 or spec.head_dim > 128 or spec.rope.dims % 16:
        raise UnsupportedModel(
            f"The CUDA kernel does not run heads of {spec.head_dim} values of which {spec.rope.dims} rotate.",
            "They must be a multiple of 8 up to 128, rotated in multiples of 16; use --backend cpu.",
        )
    if spec.heads // spec.kv_heads > 8:
        raise UnsupportedModel(
            f"The CUDA kernel does not run {spec.heads // spec.kv_heads} query heads to a KV head.",
            "At most 8 can share one; use --backend cpu.",
        )
    if plan.machine.workers < spec.kv_heads:
        raise UnsupportedModel(
            f"{plan.machine.workers} workers cannot share {spec.kv_heads} KV heads.",
            "Use as many workers as heads.",
        )
    blocks = page_blocks(spec, plan)
    if ring_pages(spec, plan, blocks) * blocks * BLOCK_BYTES < prefill_ring(spec.head_dim):
        raise UnsupportedModel(
            f"The CUDA kernel has no room for inputs of {32 * most_blocks(plan):,} values beside its ring.",
            "Share the model among ranks with --tp, or use --backend cpu.",
        )
    if plan.format not in (Format.BF16, Format.F16):
        raise UnsupportedModel(
            f"The CUDA kernel does not run {plan.format.value} weights yet.",
            "Use --dtype bf16 or fp16, or --backend cpu.",
        )

"""How weights lie in the ring's pages: the size of a page, how many there are, and how fast they come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from monotape.plan.formats import TILE_ROWS
from monotape.plan.gpu import BATCH_TILES, BLOCK_K, Dimensions, Pages, Product
from monotape.plan.gpu_formats import GPU_FORMATS
from monotape.plan.gpu_machines import HOPPER, WARPS, GpuMachine
from monotape.plan.types import RankPlan, Stage

BLOCK_BYTES = 512
LEAST_PAGES = 3  # copies in flight that keep the memory busy, one page each
_FAIR_BYTES_PER_TICK = 21.8  # one worker's share of the bandwidth, of an H200's 132 workers
_LEAD, _LONG_LAYER = 224 * 1024, 2 << 20  # bytes per worker
_NEARLY_HELD = 1.2  # a layer's bytes over the ring's: a scout does not help smaller layers
#: Blocks of codes of a whole tile in a warp: their inputs stay in registers, eight words each, four of integers.
_WHOLE_CODED, _WHOLE_INTEGERS = 6, 8
#: Blocks of a page at most. Of experts nothing is copied before the choice: smaller pages of codes follow it sooner.
_LARGEST_PAGE, _LARGEST_OF_EXPERTS = 96, 52
_PREFILL_BLOCKS = 8  # in units of which shared memory is given to a prefill, where there is no ring
#: Flags, barriers, the mailbox and the like; where a page more depends on it, counted closely.
_OTHER_SHARED, _OTHER_OF_ROWS = 2048, 1216
#: Tiles whose sums are kept for each of several rows, at most; and fewer, where that leaves room for a page more.
_ROW_BATCH, _SMALL_ROW_BATCH = 8, 6


@dataclass(frozen=True, slots=True)
class Room:
    """The sizes of everything in shared memory but the ring: see Shared in kernels/worker/shared.h."""

    dimensions: Dimensions
    input_blocks: int
    own_words: int
    residual_tiles: int
    steps: int  # of ranks
    rows: int = 1
    row_blocks: int = 0  # blocks of the longest input that is in shared memory for every row of a pass
    row_batch: int = _ROW_BATCH
    codes: bool = False  # whether some stages' weights are codes: their inputs have scales
    choice: int = 0  # bytes of the chosen experts
    gpu: GpuMachine = HOPPER

    @property
    def bytes(self) -> int:
        group, head = self.dimensions.group, self.dimensions.head_dim
        sums = max(2 * self._sum_tiles * WARPS * TILE_ROWS * 4, self._select)
        inputs = 2 * BLOCK_K * max(self.input_blocks, self.rows * self.row_blocks) + sums
        attended = 4 * WARPS * group * (head + 4)  # lies over the input and its sums
        if self.rows > 1:
            attended += self.rows * 2 * BLOCK_K * group * -(-head // BLOCK_K)  # queries of all rows
        lists = 2 * 4 * self.own_words + 4 * self.dimensions.layers
        rest = max(inputs, attended) + lists + 4 * TILE_ROWS * self.residual_tiles * self.rows + 8 * head
        if self.codes:
            rest += self.input_blocks
        rest += self.choice
        if self.steps:
            rest += 16 * self.steps + 4 * TILE_ROWS * BATCH_TILES  # steps, and sums that came early
        return rest + (_OTHER_SHARED if self.rows == 1 else _OTHER_OF_ROWS)

    @property
    def _sum_tiles(self) -> int:
        return BATCH_TILES if self.rows == 1 else max(BATCH_TILES, self.rows * self.row_batch)

    @property
    def _select(self) -> int:
        """kernels/sampling/cut.h: SelectScratch"""
        return 864 + 32 * self.gpu.consumers

    def pages(self, blocks: int) -> int:
        """As many pages as fit."""
        return (self.gpu.shared_memory - self.bytes) // (blocks * BLOCK_BYTES)


def blocks_of(stage: Stage) -> int:
    return stage.padded_k // BLOCK_K


def inputs_of(stage: Stage) -> int:
    """Experts that have an input of their own, because a worker has the same tiles of all; 0 where there are none."""
    return 0 if stage.dealt else stage.routed


def input_blocks_of(stage: Stage) -> int:
    """Blocks of all inputs of a stage."""
    return blocks_of(stage) * max(1, inputs_of(stage))


def row_blocks_of(stages: Sequence[Stage], width: int, gpu: GpuMachine = HOPPER) -> int:
    """Blocks of the longest input that a pass of several rows keeps in shared memory.

    A lane polls as many words of it as of a normalised input. Longer ones are read as they are needed.
    """
    each = -(-width // (BLOCK_K * gpu.parts))
    rounds = -(-each // TILE_ROWS)
    most = rounds * gpu.parts * TILE_ROWS
    return max(blocks for stage in stages if (blocks := blocks_of(stage)) <= most)


def product_of(
    stage: Stage, page: int, gpu: GpuMachine = HOPPER, rows: int = 1, row_batch: int = _ROW_BATCH
) -> Product:
    """How tiles of a stage lie in pages of `page` blocks, and how many a warp multiplies together."""
    k = stage.layout.k
    size = page * BLOCK_BYTES // stage.layout.block_bytes
    blocks = stage.padded_k // k * max(1, inputs_of(stage))
    half, words = stage.format.is_half, GPU_FORMATS[stage.format].words
    # Blocks in a warp's registers.
    at_once = (gpu.words_at_once if half else gpu.coded_words_at_once) // words
    if not gpu.ring:  # warps read the tape itself: nothing has to fit a page
        size = blocks * BATCH_TILES
    in_page, pages = max(1, size // blocks), -(-blocks // min(size, gpu.parts * at_once))
    whole = _WHOLE_INTEGERS if GPU_FORMATS[stage.format].integers else _WHOLE_CODED
    if not half and blocks > gpu.parts * whole:
        pages = max(2, pages)
    run = blocks if pages == 1 else _whole_warps(blocks, pages, gpu)
    while run > size:  # whole blocks for every warp may be too many
        pages += 1
        run = _whole_warps(blocks, pages, gpu)
    batch = BATCH_TILES if rows == 1 else row_batch
    most = min(in_page, batch // 2, max(1, at_once // -(-run // gpu.parts)))
    fitting = [tiles for tiles in range(1, most + 1) if in_page % tiles == 0]
    if stage.dealt:  # an expert's tiles may begin anywhere in a batch, but gate tiles have even numbers there
        fitting = [tiles for tiles in fitting if tiles == 1 or tiles % 2 == 0]
    return Product(stage.format, blocks, in_page, run, fitting[-1], inputs_of(stage), stage.dealt)


def _whole_warps(blocks: int, pages: int, gpu: GpuMachine) -> int:
    """Blocks of one of so many pages of a tile, as many for every warp."""
    each = -(-blocks // pages)
    return -(-each // gpu.parts) * gpu.parts


def with_row_batch(rank: RankPlan, room: Room) -> Room:
    """The room with the batch of rows that leaves the better pages; of two equal ones the larger batch."""
    if room.rows == 1:
        return room
    rooms = [replace(room, row_batch=batch) for batch in (_ROW_BATCH, _SMALL_ROW_BATCH)]
    return max(rooms, key=lambda room: _worth(rank, room, page_blocks(rank, room)))


def page_blocks(rank: RankPlan, room: Room) -> int:
    """Blocks of a page: the size with which the ring holds most and workers take the fewest steps.

    A step has a fixed cost, that of twelve more blocks. Room for more than a layer counts nothing. Tiles of codes come
    in odd sizes, so there pages do as well.
    """
    if not room.gpu.ring:
        return _PREFILL_BLOCKS
    stages = rank.layer_stages
    unit = _unit_blocks(room.dimensions.head_dim)
    halves = all(stage.format.is_half for stage in stages)
    finest, largest = (
        8 if halves else 2,
        _LARGEST_OF_EXPERTS if rank.library and not halves else _LARGEST_PAGE,
    )
    sizes = [size for size in range(24, largest + 1, finest) if size >= unit] or [unit]
    enough = prefill_ring(room)
    roomy = [size for size in sizes if room.pages(size) * size * BLOCK_BYTES >= enough]
    return max(roomy or sizes, key=lambda size: _worth(rank, room, size))


def _worth(rank: RankPlan, room: Room, size: int) -> float:
    """Of pages of that many blocks: the share of shared memory that they keep full, less what steps cost."""
    stages, workers = rank.layer_stages, len(rank.tapes)
    total = sum((stage.routed or 1) * stage.tiles * stage.tile_bytes for stage in stages) / BLOCK_BYTES
    layer = total * BLOCK_BYTES / workers
    handled = [_pages_and_steps(stage, size, room) for stage in stages]
    pages, steps = sum(pages for pages, _ in handled), sum(steps for _, steps in handled)
    held = room.pages(size) * BLOCK_BYTES * total / pages
    return min(held, layer) / room.gpu.shared_memory - 12 * steps / total


def _pages_and_steps(stage: Stage, page: int, room: Room) -> tuple[int, int]:
    """Pages that the tiles of a stage take in all workers, and the steps of their warps."""
    product = product_of(stage, page, room.gpu, room.rows, room.row_batch)
    if product.page_run < product.blocks:
        pages = (stage.dealt or 1) * stage.tiles * -(-product.blocks // product.page_run)
        return pages, pages
    shares = [span.count for span in stage.spans]
    pages = sum(-(-share // product.tiles_in_page) for share in shares)
    return pages, sum(-(-share // product.together) for share in shares)


def _unit_blocks(head_dim: int) -> int:
    """Blocks of a unit of KV."""
    return 4 * -(-head_dim // BLOCK_K) + head_dim // TILE_ROWS


def prefill_ring(room: Room) -> int:
    """Bytes of the ring that a prefill needs: a finished block, or the queries and four steps of rows/attention.h."""
    head_dim = room.dimensions.head_dim
    blocks, value_tiles = -(-head_dim // BLOCK_K), 8 if head_dim <= 64 else 16
    if not room.gpu.ring:  # queries in registers, two steps of one unit; three steps of a product
        return max(
            room.gpu.finished_block, 2 * (4 * blocks + value_tiles) * BLOCK_BYTES, 3 * 24 * BLOCK_BYTES
        )
    queries, step = 16 * blocks * BLOCK_BYTES, (8 * blocks + 2 * value_tiles) * BLOCK_BYTES
    return max(room.gpu.finished_block, queries + 4 * step)


def pages_for(rank: RankPlan, blocks: int, ring: int, ranks: int, gpu: GpuMachine = HOPPER) -> Pages:
    """About 96 KB in flight of pages that are needed now; later pages come at a worker's share of the bandwidth.

    A rank of several reads so little that words queueing behind pages cost it more than late pages do. Long layers keep
    the memory busy at all times, so they need no scout. Where the ring nearly holds a layer, or much of a layer of
    codes, a scout's loads only delay words. Of experts a scout does not know which ones come next.
    """
    page = blocks * BLOCK_BYTES
    if not gpu.ring:  # shared memory beside the inputs is for a prefill alone
        return Pages(blocks, ring, now=1, ahead=1, polling=1, attending=1, ticks=0, lead=0)
    now = max(LEAST_PAGES, 98304 // page)
    if ranks > 1:
        return Pages(blocks, ring, now, ahead=1, polling=1, attending=2, ticks=0, lead=0)
    layers = [tape.layer_bytes for tape in rank.tapes]
    short = max(layers) < _LONG_LAYER and sum(layers) > _NEARLY_HELD * ring * page * len(layers)
    known = all(stage.format.is_half and not stage.routed for stage in rank.layer_stages)
    lead = _LEAD if short and known else 0
    ticks = int(page / _FAIR_BYTES_PER_TICK)
    return Pages(blocks, ring, now, ahead=2, polling=2, attending=now, ticks=ticks, lead=lead)

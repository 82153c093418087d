"""How a prompt goes through the model in rows: the chunk, the memory between its parts, and how products are cut."""

from __future__ import annotations

from collections.abc import Iterator

from monotape.plan.formats import TILE_ROWS
from monotape.plan.gpu import (
    BLOCK_K,
    CUT_ROWS,
    Cut,
    Dimensions,
    MatrixStage,
    Routing,
    RowBuffer,
    RowPlan,
)
from monotape.plan.gpu_machines import HOPPER, GpuMachine

CHUNK = 2048  # rows of a pass: weights are read once for all of them, and every worker has blocks enough
_CHUNK_STEP = 128
_BLOCK_BYTES, _BLOCK_WORDS = 512, 32
_BEGINNING = 250  # fixed cost of a block of output, in blocks that a worker could read in that time


def chunk_for(context: int, most: int = CHUNK) -> int:
    """Rows of a chunk: whole blocks of 128, as many as a prompt can fill and at most `most`."""
    return min(CHUNK, most, -(-context // _CHUNK_STEP) * _CHUNK_STEP)


def row_plan(
    dimensions: Dimensions,
    stages: tuple[MatrixStage, ...],
    workers: int,
    chunk: int,
    gpu: GpuMachine = HOPPER,
    routing: Routing | None = None,
) -> RowPlan:
    cuts = tuple((stage.name, tuple(_cuts(stage, workers, gpu, routing))) for stage in stages)
    buffers = tuple(_buffers(dimensions, workers, chunk, routing))
    return RowPlan(
        chunk, buffers, cuts, _partial_values(dimensions, workers, chunk, routing) if routing else 0
    )


def _partial_values(dimensions: Dimensions, workers: int, chunk: int, routing: Routing | None) -> int:
    """A whole product in one piece, or one piece of 128 x 256 sums per worker, or all outputs of each row's experts.

    Results of attention are smaller: 128 rows of a head, with two more numbers each.
    """
    width, experts = -(-dimensions.width // 8) * 8, routing.chosen if routing else 1
    return max(chunk * max(experts * width, dimensions.qkv_rows), workers * 128 * 256) if chunk else 0


def _choice_values(chunk: int, routing: Routing | None) -> int:
    """kernels/rows/experts.h: the expert and the weight of each pair, and the lists of pairs with their lengths."""
    if routing is None:
        return 0
    values = 2 * max(1, chunk * routing.chosen) + routing.experts * (chunk + 1)
    return -(-values // 4) * 4  # whole words


def _buffers(
    dimensions: Dimensions, workers: int, chunk: int, routing: Routing | None
) -> Iterator[RowBuffer]:
    """Bytes of each buffer, by its name in kernels/plan/params.h: Rows."""

    def blocks(k: int, experts: int = 1) -> int:
        return experts * chunk // TILE_ROWS * -(-k // BLOCK_K) * _BLOCK_BYTES

    width, queries = -(-dimensions.width // 8) * 8, dimensions.heads * dimensions.head_dim
    partials = _partial_values(dimensions, workers, chunk, routing) + _choice_values(chunk, routing)
    yield RowBuffer("residual", 4 * chunk * width)
    yield RowBuffer("normed", blocks(dimensions.width))
    yield RowBuffer("queries", 2 * chunk * queries)
    yield RowBuffer("attended", blocks(queries))
    yield RowBuffer("activation", blocks(dimensions.ffn, routing.chosen if routing else 1))
    yield RowBuffer("partials", 4 * partials)


def _cuts(stage: MatrixStage, workers: int, gpu: GpuMachine, routing: Routing | None) -> Iterator[Cut]:
    """The fastest block shape for every number of rows of a chunk; equal neighbours are joined."""
    found: list[Cut] = []
    for rows in range(CUT_ROWS, CHUNK + 1, CUT_ROWS):
        shape, pieces = _best_cut(stage, workers, rows, gpu, routing if stage.routed else None)
        if found and (found[-1].row_tiles, found[-1].column_tiles, found[-1].pieces) == (*shape, pieces):
            found.pop()
        found.append(Cut(rows, *shape, pieces))
    yield from found


def _best_cut(
    stage: MatrixStage, workers: int, rows: int, gpu: GpuMachine = HOPPER, routing: Routing | None = None
) -> tuple[tuple[int, int], int]:
    """The cost of a cut: the reads of a block, a fixed cost per block, and pieces that are written and read again.

    Products are bound by reads from the L2. With fewer blocks of output than workers, k is cut into pieces too, if the
    next part adds the pieces up; gated values and logits have no such part. Of experts each has about as many rows.
    """
    blocks, matrices = -(-stage.k // BLOCK_K), 1
    if routing is not None:
        matrices = min(routing.experts, rows * routing.chosen)
        rows = -(-rows * routing.chosen // matrices)

    def cost(shape: tuple[int, int]) -> tuple[int, int]:
        row_tiles, column_tiles = shape
        items = matrices * -(-rows // (row_tiles * TILE_ROWS)) * -(-stage.tiles // column_tiles)
        most = max(1, min(workers // items, blocks // 4)) if leaves_pieces(stage) else 1
        each = -(-blocks // most)
        pieces = -(-blocks // each)  # none is empty
        sums = pieces * rows * stage.tiles * 2 // (_BLOCK_WORDS // 2 * workers)
        return -(-items * pieces // workers) * ((row_tiles + column_tiles) * each + _BEGINNING) + sums, pieces

    costs = [(*cost(shape), shape) for shape in gpu.shapes]
    _, pieces, shape = min(costs, key=lambda entry: entry[0])  # the first of equals
    return shape, pieces


def leaves_pieces(stage: MatrixStage) -> bool:
    """Whether the next part adds up pieces of k. Gated values and logits are not plain sums."""
    return stage.epilogue.value in ("publish", "residual", "choice") and not stage.routed

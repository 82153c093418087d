"""How a prompt goes through the model in rows: the chunk, the memory between its parts, and how products are cut."""

from __future__ import annotations

from collections.abc import Iterator

from monotape.plan.formats import TILE_ROWS
from monotape.plan.gpu import BLOCK_K, CUT_ROWS, Cut, Dimensions, MatrixStage, RowBuffer, RowPlan
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
) -> RowPlan:
    cuts = tuple((stage.name, tuple(_cuts(stage, workers, gpu))) for stage in stages)
    return RowPlan(chunk, tuple(_buffers(dimensions, workers, chunk)), cuts)


def _buffers(dimensions: Dimensions, workers: int, chunk: int) -> Iterator[RowBuffer]:
    """Bytes of each buffer, by its name in kernels/plan/params.h: Rows."""

    def blocks(k: int) -> int:
        return chunk // TILE_ROWS * -(-k // BLOCK_K) * _BLOCK_BYTES

    width, queries = -(-dimensions.width // 8) * 8, dimensions.heads * dimensions.head_dim
    # A whole product in one piece, or one piece of 128 x 256 sums per worker. Results of attention are smaller:
    # 128 rows of a head, with two more numbers each.
    partials = max(chunk * max(width, dimensions.qkv_rows), workers * 128 * 256) if chunk else 0
    yield RowBuffer("residual", 4 * chunk * width)
    yield RowBuffer("normed", blocks(dimensions.width))
    yield RowBuffer("queries", 2 * chunk * queries)
    yield RowBuffer("attended", blocks(queries))
    yield RowBuffer("activation", blocks(dimensions.ffn))
    yield RowBuffer("partials", 4 * partials)


def _cuts(stage: MatrixStage, workers: int, gpu: GpuMachine) -> Iterator[Cut]:
    """The fastest block shape for every number of rows of a chunk; equal neighbours are joined."""
    found: list[Cut] = []
    for rows in range(CUT_ROWS, CHUNK + 1, CUT_ROWS):
        shape, pieces = _best_cut(stage, workers, rows, gpu)
        if found and (found[-1].row_tiles, found[-1].column_tiles, found[-1].pieces) == (*shape, pieces):
            found.pop()
        found.append(Cut(rows, *shape, pieces))
    yield from found


def _best_cut(
    stage: MatrixStage, workers: int, rows: int, gpu: GpuMachine = HOPPER
) -> tuple[tuple[int, int], int]:
    """The cost of a cut: the reads of a block, a fixed cost per block, and pieces that are written and read again.

    Products are bound by reads from the L2. With fewer blocks of output than workers, k is cut into pieces too, if the
    next part adds the pieces up; gated values and logits have no such part.
    """
    blocks = -(-stage.k // BLOCK_K)

    def cost(shape: tuple[int, int]) -> tuple[int, int]:
        row_tiles, column_tiles = shape
        items = -(-rows // (row_tiles * TILE_ROWS)) * -(-stage.tiles // column_tiles)
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
    return stage.epilogue.value in ("publish", "residual")

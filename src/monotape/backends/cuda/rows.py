"""Memory for the rows of a prefill's chunk: activations between its stages, as kernels/types.h lays them out."""

from __future__ import annotations

from monotape.backends.cuda.driver import DeviceMemory
from monotape.backends.cuda.params import RowsStruct
from monotape.models.spec import ModelSpec

CHUNK = 2048  # rows of a pass: weights are read once for all of them, and every worker has blocks enough
_BLOCK_ROWS, _BLOCK_K, _BLOCK_BYTES = 8, 32, 512


def chunk_for(context: int, most: int = CHUNK) -> int:
    """Whole blocks of 128 rows, and no more of them than a prompt can fill, or than `most`."""
    return min(CHUNK, most, -(-context // 128) * 128)


def sizes(spec: ModelSpec, chunk: int, workers: int) -> dict[str, int]:
    """Bytes of each buffer, by its name in kernels/types.h: Rows."""

    def blocks(k: int) -> int:
        return chunk // _BLOCK_ROWS * -(-k // _BLOCK_K) * _BLOCK_BYTES

    width = -(-spec.width // 8) * 8
    # A whole product in one piece, or of each worker one piece of 128 x 256 sums: more than what it has attended to,
    # which is 128 rows of a head, and two numbers more of each.
    partials = max(chunk * max(width, spec.q_rows + 2 * spec.kv_rows), workers * 128 * 256) if chunk else 0
    return {
        "residual": 4 * chunk * width,
        "normed": blocks(spec.width),
        "queries": 2 * chunk * spec.q_rows,
        "attended": blocks(spec.q_rows),
        "activation": blocks(spec.ffn),
        "partials": 4 * partials,
    }


def allocate(spec: ModelSpec, chunk: int, workers: int) -> tuple[RowsStruct, list[DeviceMemory]]:
    """The buffers, zeroed: what pads a block is multiplied too, and must be a number."""
    rows, memories = RowsStruct(), []
    for name, count in sizes(spec, chunk, workers).items():
        memory = DeviceMemory(count)
        memory.fill(0)
        memories.append(memory)
        setattr(rows, name, memory.pointer)
    return rows, memories

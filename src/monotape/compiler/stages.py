"""First pass: which matrices a token passes, in order, and how their rows are grouped into units of ownership."""

from __future__ import annotations

from dataclasses import dataclass

from monotape.compiler.split import Share
from monotape.models.spec import ModelSpec
from monotape.plan.types import TILE_ROWS, Format, Machine, Part


@dataclass(frozen=True, slots=True)
class StageShape:
    """A stage before anybody owns a piece of it."""

    name: str
    parts: tuple[Part, ...]
    interleaved: bool
    k: int
    padded_k: int
    tiles: int
    unit: int
    reads: str
    writes: str
    first_k: int


def _tiles(rows: int) -> int:
    return -(-rows // TILE_ROWS)


def _padded(k: int, block: int) -> int:
    return -(-k // block) * block


def stage_shapes(
    spec: ModelSpec, fmt: Format, machine: Machine, share: Share, head_reads: str
) -> tuple[tuple[StageShape, ...], StageShape]:
    """The four matrix stages of a layer, and the head, as one rank has them.

    qkv: a unit is a whole head where its owner normalises and rotates it, else a tile. gate_up: a unit is a gate
    tile and the up tile beside it, because their owner multiplies them. Every part starts a tile of
    its own, so no tile mixes two tensors; rows that a tensor lacks to fill its last tile are zeros.
    """

    def shape(
        name: str, parts: tuple[Part, ...], columns: tuple[int, int], unit: int, reads: str, writes: str
    ) -> StageShape:
        k = columns[1] - columns[0]
        padded_k, tiles = _padded(k, max(fmt.block, machine.k_block)), sum(part.tiles for part in parts)
        return StageShape(
            name, parts, name == "gate_up", k, padded_k, tiles, unit, reads, writes, columns[0]
        )  # fmt: skip

    def part(role: str, rows: tuple[int, int], group: int | None = None) -> Part:
        return Part(role, rows[1] - rows[0], group or rows[1] - rows[0], rows[0])

    head_dim, width = spec.head_dim, (0, spec.width)
    queries = (share.heads[0] * head_dim, share.heads[1] * head_dim)
    keys = (share.kv_heads[0] * head_dim, share.kv_heads[1] * head_dim)
    group = head_dim if machine.whole_heads else None
    qkv = (part("q", queries, group), part("k", keys, group), part("v", keys, group))
    qkv_unit = _tiles(head_dim) if machine.whole_heads else 1
    layer = (
        shape("qkv", qkv, width, qkv_unit, "residual", "query"),
        shape("output", (part("output", width),), queries, 1, "attended", "residual"),
        shape(
            "gate_up", (part("gate", share.ffn), part("up", share.ffn)), width, 2, "residual", "activation"
        ),
        shape("down", (part("down", width),), share.ffn, 1, "activation", "residual"),
    )
    vocabulary = part("embedding" if spec.tied else "head", share.vocab)
    head = shape("head", (vocabulary,), (0, spec.head_width), 1, head_reads, "logits")
    return layer, head

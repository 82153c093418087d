"""First pass: which matrices a token passes, in order, and how their rows are grouped into units of ownership."""

from __future__ import annotations

from dataclasses import dataclass

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


def _tiles(rows: int) -> int:
    return -(-rows // TILE_ROWS)


def _padded(k: int, block: int) -> int:
    return -(-k // block) * block


def stage_shapes(spec: ModelSpec, fmt: Format, machine: Machine) -> tuple[tuple[StageShape, ...], StageShape]:
    """The four matrix stages of a layer, and the head.

    qkv: a unit is a whole head where its owner normalises and rotates it, else a tile. gate_up: a unit is a gate
    tile and the up tile beside it, because their owner multiplies them. Every part starts a tile of
    its own, so no tile mixes two tensors; rows that a tensor lacks to fill its last tile are zeros.
    """

    def shape(name: str, parts: tuple[Part, ...], k: int, unit: int, reads: str, writes: str) -> StageShape:
        tiles = sum(part.tiles for part in parts)
        return StageShape(
            name,
            parts,
            name == "gate_up",
            k,
            _padded(k, max(fmt.block, machine.k_block)),
            tiles,
            unit,
            reads,
            writes,
        )

    width, ffn, head_dim = spec.width, spec.ffn, spec.head_dim
    rows = {"q": spec.q_rows, "k": spec.kv_rows, "v": spec.kv_rows}
    qkv = tuple(Part(role, count, head_dim if machine.whole_heads else count) for role, count in rows.items())
    qkv_unit = _tiles(head_dim) if machine.whole_heads else 1
    gate_up = (Part("gate", ffn, ffn), Part("up", ffn, ffn))
    output, down = (Part("output", width, width),), (Part("down", width, width),)
    layer = (
        shape("qkv", qkv, width, qkv_unit, "residual", "query"),
        shape("output", output, spec.q_rows, 1, "attended", "residual"),
        shape("gate_up", gate_up, width, 2, "residual", "activation"),
        shape("down", down, ffn, 1, "activation", "residual"),
    )
    vocabulary = Part("embedding" if spec.tied else "head", spec.vocab, spec.vocab)
    head = shape("head", (vocabulary,), width, 1, "residual", "logits")
    return layer, head

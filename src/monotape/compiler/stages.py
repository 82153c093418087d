"""First pass: which matrices a token passes, in order, and how their rows are grouped into units of ownership."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from monotape.compiler.split import Share
from monotape.models.layer import Matrix
from monotape.models.spec import ModelSpec
from monotape.plan.formats import TILE_ROWS, Format, Layout
from monotape.plan.types import Machine, Part


@dataclass(frozen=True, slots=True)
class StageShape:
    """A stage before any worker owns a piece of it."""

    name: str
    parts: tuple[Part, ...]
    interleaved: bool
    k: int
    padded_k: int
    tiles: int
    unit: int
    reads: str
    writes: str
    format: Format
    layout: Layout
    first_k: int
    gain: str | None
    bias: str | None
    routed: int
    dealt: int

    @property
    def unit_bytes(self) -> int:
        """What a token reads of a unit, in all experts of which a worker has the same tiles."""
        experts = 1 if self.dealt else max(1, self.routed)
        return experts * self.unit * self.layout.tile_bytes(self.padded_k)


@dataclass(frozen=True, slots=True)
class Formats:
    """The format of each stage's weights: a default, and exceptions by name."""

    default: Format
    of_stages: Mapping[str, Format] = field(default_factory=dict)

    def of(self, stage: str) -> Format:
        return self.of_stages.get(stage, self.default)


def stage_shapes(
    spec: ModelSpec, formats: Formats, machine: Machine, share: Share, head_reads: str
) -> tuple[tuple[StageShape, ...], StageShape]:
    """The matrix stages of a layer, and the head, as one rank has them.

    A unit of qkv is a whole head where its owner normalises and rotates it, else a tile. A unit of gate_up is a gate
    tile and the up tile beside it, because their owner multiplies them. Every part starts a new tile, so no tile
    mixes two tensors; the last tile of a tensor is padded with zero rows.
    """
    shapes = _Shapes(spec, formats, machine, share)
    vocabulary = Matrix(
        "head", ("embedding" if spec.tied else "head",), head_reads, "logits", gain="final_norm"
    )
    return tuple(shapes.of(matrix) for matrix in spec.layer), shapes.of(vocabulary)


@dataclass(frozen=True, slots=True)
class _Shapes:
    spec: ModelSpec
    formats: Formats
    machine: Machine
    share: Share

    def of(self, matrix: Matrix) -> StageShape:
        columns, fmt = self._columns(matrix), self.formats.of(matrix.name)
        k, layout = columns[1] - columns[0], self.machine.layout(fmt)
        parts = tuple(self._part(role) for role in matrix.parts)
        chosen = self.spec.experts.chosen if self.spec.experts is not None and matrix.routed else 0
        # The owner of an element of the residual adds up all experts' rows of it.
        dealt = chosen if not self.machine.levels and matrix.writes != "residual" else 0
        return StageShape(
            name=matrix.name, parts=parts, interleaved=matrix.gated, k=k, padded_k=layout.padded(k),
            tiles=sum(part.tiles for part in parts), unit=self._unit(matrix), reads=matrix.reads,
            writes=matrix.writes, format=fmt, layout=layout, first_k=columns[0], gain=matrix.gain,
            bias=matrix.bias if self.spec.has_bias(matrix) else None, routed=chosen,
            dealt=dealt,
        )  # fmt: skip

    def _unit(self, matrix: Matrix) -> int:
        if matrix.gated:
            return 2
        return -(-self.spec.head_dim // TILE_ROWS) if self._whole_heads(matrix.parts[0]) else 1

    def _whole_heads(self, role: str) -> bool:
        return self.machine.whole_heads and role in ("q", "k", "v")

    def _part(self, role: str) -> Part:
        first, end = self._rows(role)
        return Part(role, end - first, self.spec.head_dim if self._whole_heads(role) else end - first, first)

    def _rows(self, role: str) -> tuple[int, int]:
        """The rows of a role's tensor that the rank has: its share, or all rows of a tensor that is not shared."""
        share, head_dim = self.share, self.spec.head_dim
        shared = {
            "q": (share.heads[0] * head_dim, share.heads[1] * head_dim),
            "k": (share.kv_heads[0] * head_dim, share.kv_heads[1] * head_dim),
            "gate": share.ffn,
            "embedding": share.vocab,
        }  # fmt: skip
        shared |= {"v": shared["k"], "up": shared["gate"], "head": shared["embedding"]}
        return shared.get(role) or (0, self.spec.shape_of(role)[0])

    def _columns(self, matrix: Matrix) -> tuple[int, int]:
        """The input columns that this rank computes itself."""
        whole = (0, self.spec.head_width if matrix.writes == "logits" else self.spec.width)
        return {"attended": self._rows("q"), "activation": self.share.ffn}.get(matrix.reads, whole)

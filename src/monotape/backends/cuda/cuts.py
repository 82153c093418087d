"""How tapes are cut into pieces that fit a slot of pinned memory: the same way in every layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from monotape.plan.types import Plan, Span, Stage, Tape


@dataclass(frozen=True, slots=True)
class TileSpan:
    """Consecutive tiles of one stage, and where they go in their cut."""

    stage: Stage
    span: Span
    at: int  # byte of the cut


@dataclass(frozen=True, slots=True)
class Cut:
    """A run of a worker's layer, or of its head."""

    first: int  # byte of the layer's run, or of the head's
    bytes: int
    spans: tuple[TileSpan, ...]

    def gaps(self) -> list[slice]:
        """The padding that alignment leaves."""
        ends = [0, *(item.at + item.span.count * item.stage.tile_bytes for item in self.spans)]
        starts = [*(item.at for item in self.spans), self.bytes]
        return [slice(end, start) for end, start in zip(ends, starts, strict=True) if end < start]


def layer_cuts(plan: Plan, tape: Tape, most: int) -> list[Cut]:
    """One worker's layer in cuts of at most `most` bytes."""
    rank = plan.ranks[0]
    offsets = [segment.offset for segment in tape.layer_segments]
    stages = zip(rank.taped_stages, offsets, strict=True)
    spans = [TileSpan(stage, stage.spans[tape.worker], offset) for stage, offset in stages]
    return list(_cut(plan, spans, tape.layer_bytes, most))


def head_cuts(plan: Plan, tape: Tape, most: int) -> list[Cut]:
    head = plan.ranks[0].head
    spans = [TileSpan(head, head.spans[tape.worker], 0)]
    return list(_cut(plan, spans, tape.bytes - tape.head_segment.offset, most))


def expert_cuts(plan: Plan, most: int) -> list[Cut]:
    """One expert's run of the library."""
    rank = plan.ranks[0]
    assert rank.library is not None, "a model without experts"
    spans = [
        TileSpan(stage, Span(0, stage.tiles), segment.offset)
        for stage, segment in zip(rank.routed_stages, rank.library.segments, strict=True)
    ]
    return list(_cut(plan, spans, rank.library.expert_bytes, most))


def layer_groups(layers: int, tapes: Sequence[Tape], most: int) -> Iterator[range]:
    """Layers that a piece takes at once: small ones follow each other on a tape, and every piece costs the same."""
    together = max(1, most // max(1, *(tape.layer_bytes for tape in tapes)))
    for first in range(0, layers, together):
        yield range(first, min(layers, first + together))


def _cut(plan: Plan, spans: list[TileSpan], total: int, most: int) -> Iterator[Cut]:
    """The padding behind a stage belongs to the cut before it."""
    chunks: list[TileSpan] = []
    for item in spans:
        tile_bytes, unit = item.stage.tile_bytes, item.stage.unit
        tiles = max(unit, (most - plan.machine.alignment) // tile_bytes // unit * unit)
        for first in range(0, item.span.count, tiles):
            span = Span(item.span.first + first, min(tiles, item.span.count - first))
            chunks.append(TileSpan(item.stage, span, item.at + first * tile_bytes))
    ends = [chunk.at for chunk in chunks[1:]] + [total]
    group: list[TileSpan] = []
    for chunk, end in zip(chunks, ends[: len(chunks)], strict=True):
        if group and end - group[0].at > most:
            yield _joined(group, chunk.at)
            group = []
        group.append(chunk)
    if group:
        yield _joined(group, total)


def _joined(group: list[TileSpan], end: int) -> Cut:
    first = group[0].at
    return Cut(first, end - first, tuple(TileSpan(item.stage, item.span, item.at - first) for item in group))

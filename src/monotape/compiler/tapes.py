"""Third pass: where every tile lies on its owner's tape, and the buffers between the stages."""

from __future__ import annotations

from monotape.compiler.split import Share
from monotape.models.spec import ModelSpec
from monotape.plan.formats import TILE_ROWS, Format
from monotape.plan.types import Buffer, KvLayout, Library, Machine, Segment, Stage, Tape

KV_BLOCK = 128  # positions; long enough to pay for its partial result, short enough to spread a short context


def _aligned(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def _segment(stage: Stage, worker: int, offset: int) -> Segment:
    return Segment(stage.name, offset, stage.owned_bytes(worker))


def lay_tapes(
    layer_stages: tuple[Stage, ...], head: Stage, layers: int, machine: Machine
) -> tuple[Tape, ...]:
    """One tape per worker: the segments of a layer, the same in every layer, then those of the head."""
    tapes = []
    for worker in range(machine.workers):
        segments, offset = [], 0
        for stage in layer_stages:
            if stage.routed:
                continue
            segments.append(_segment(stage, worker, offset))
            offset = _aligned(offset + segments[-1].bytes, machine.alignment)
        head_segment = _segment(head, worker, offset * layers)
        total = _aligned(head_segment.offset + head_segment.bytes, machine.alignment)
        tapes.append(Tape(worker, offset, tuple(segments), head_segment, total))
    return tuple(tapes)


def lay_library(spec: ModelSpec, layer_stages: tuple[Stage, ...], machine: Machine) -> Library | None:
    """An expert is one run: the tiles of its stages, in order."""
    if spec.experts is None:
        return None
    segments, offset, biases = [], 0, 0
    for stage in layer_stages:
        if not stage.routed:
            continue
        segments.append(Segment(stage.name, offset, stage.tiles * stage.tile_bytes))
        offset = _aligned(offset + segments[-1].bytes, machine.alignment)
        biases += 4 * stage.rows if stage.bias else 0
    return Library(
        spec.experts.count, spec.experts.chosen, spec.layers, offset, tuple(segments),
        biases * spec.layers * spec.experts.count,
    )  # fmt: skip


def exchange_buffers(
    spec: ModelSpec, share: Share, chunk: int, ranks: int, slots: int, head_reads: str
) -> tuple[Buffer, ...]:
    """The buffers between stages. The residual stays float32, and each element of it has one owner.

    With several ranks, all of them push partial sums into `arrivals`: one word is a value and the tag of its send. The
    head reads `combined` where it needs more than its own rank's residual.
    """

    def padded(width: int) -> int:
        return -(-width // TILE_ROWS) * TILE_ROWS

    def rows(bounds: tuple[int, int]) -> int:
        return bounds[1] - bounds[0]

    queries = rows(share.heads) * spec.head_dim
    vocab = spec.vocab if share.rank == 0 else rows(share.vocab)  # rank 0 chooses among the whole vocabulary
    chosen = 1 if spec.experts is None else spec.experts.chosen
    choice = () if spec.experts is None else (Buffer("choice", chunk, padded(spec.experts.count)),)
    buffers = (
        Buffer("residual", chunk, padded(spec.width)),
        Buffer("query", chunk, padded(queries)),
        Buffer("attended", chunk, padded(queries)),
        *choice,
        Buffer(
            "activation", chunk * chosen, padded(rows(share.ffn))
        ),  # a row for each expert that a row passes
        Buffer("logits", 1, padded(vocab)),
    )
    arrivals = Buffer("arrivals", slots * ranks * chunk, 2 * padded(spec.width))
    combined = Buffer("combined", 1, padded(spec.head_width))
    return (
        *buffers,
        *((arrivals,) if slots else ()),
        *((combined,) if head_reads == "combined" else ()),
    )


def kv_layout(spec: ModelSpec, share: Share, fmt: Format) -> KvLayout:
    return KvLayout(spec.layers, share.kv_heads[1] - share.kv_heads[0], spec.head_dim, fmt, KV_BLOCK)

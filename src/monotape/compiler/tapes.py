"""Third pass: where every tile lies on its owner's tape, and the buffers between the stages."""

from __future__ import annotations

from monotape.models.spec import ModelSpec
from monotape.plan.types import TILE_ROWS, Buffer, Format, KvLayout, Machine, Segment, Stage, Tape

KV_BLOCK = 128  # positions; long enough to pay for its partial result, short enough to spread a short context


def _aligned(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def _segment(stage: Stage, worker: int, offset: int, fmt: Format) -> Segment:
    return Segment(stage.name, offset, stage.spans[worker].count * fmt.tile_bytes(stage.padded_k))


def lay_tapes(
    layer_stages: tuple[Stage, ...], head: Stage, layers: int, fmt: Format, machine: Machine
) -> tuple[Tape, ...]:
    """One tape a worker: the layer's segments one after another, the same in every layer, then the head's."""
    tapes = []
    for worker in range(machine.workers):
        segments, offset = [], 0
        for stage in layer_stages:
            segments.append(_segment(stage, worker, offset, fmt))
            offset = _aligned(offset + segments[-1].bytes, machine.alignment)
        head_segment = _segment(head, worker, offset * layers, fmt)
        total = _aligned(head_segment.offset + head_segment.bytes, machine.alignment)
        tapes.append(Tape(worker, offset, tuple(segments), head_segment, total))
    return tuple(tapes)


def exchange_buffers(spec: ModelSpec, chunk: int) -> tuple[Buffer, ...]:
    """What stages pass to each other. The residual never leaves float32, and each element of it has one owner."""

    def padded(width: int) -> int:
        return -(-width // TILE_ROWS) * TILE_ROWS

    return (
        Buffer("residual", chunk, padded(spec.width)),
        Buffer("query", chunk, padded(spec.q_rows)),
        Buffer("attended", chunk, padded(spec.q_rows)),
        Buffer("activation", chunk, padded(spec.ffn)),
        Buffer("logits", 1, padded(spec.vocab)),
    )


def kv_layout(spec: ModelSpec, fmt: Format) -> KvLayout:
    return KvLayout(spec.layers, spec.kv_heads, spec.head_dim, fmt, KV_BLOCK)

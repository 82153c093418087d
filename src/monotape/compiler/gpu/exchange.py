"""The exchange: the buffers between stages, the owners of their words, and when each word is reset."""

from __future__ import annotations

from dataclasses import dataclass, replace

from monotape.plan.gpu import (
    ATTENTION,
    AttentionStage,
    Dimensions,
    Epilogue,
    ExchangeBuffer,
    MatrixStage,
    Reset,
    Source,
    chain_of,
)
from monotape.plan.gpu import Stage as AnyStage
from monotape.plan.gpu_formats import scale_name
from monotape.plan.gpu_machines import WORD_VALUES
from monotape.plan.types import RankPlan, Stage

START, FINAL = "residual", "final_residual"  # the inputs of a layer and of the head


def matrix_stages(
    rank: RankPlan, products: dict[str, int], published: tuple[str, ...] = ()
) -> tuple[tuple[MatrixStage, ...], MatrixStage]:
    """A layer's matrices and the head with the buffers they read and write.

    The plan has one residual stream. In the exchange each stage that adds to it publishes into its own buffer, so a
    reader need not know whether a word is from before or after the stage. The next layer reads the last one's buffer.
    """
    writers = [stage.name for stage in rank.layer_stages if stage.writes == "residual"]
    before, made = START, []
    for stage in rank.layer_stages:
        last = stage.name == writers[-1]
        writes = {"residual": START if last else f"after_{stage.name}", "query": "qkv"}.get(
            stage.writes, stage.writes
        )
        reads = before if stage.reads == "residual" else stage.reads
        made.append(_matrix(stage, reads, writes, products))
        before = writes if stage.writes == "residual" else before
    layer = tuple(
        replace(stage, source=Source.PUBLISHED) if stage.name in published else stage for stage in made
    )
    first = next((stage.name for stage in layer if stage.routed), None)
    choice = next((stage.writes for stage in layer if stage.epilogue is Epilogue.CHOICE), None)
    layer = tuple(replace(stage, also=choice) if stage.name == first else stage for stage in layer)
    return layer, _matrix(rank.head, FINAL, "logits", products)


def _matrix(stage: Stage, reads: str, writes: str, products: dict[str, int]) -> MatrixStage:
    epilogue = {
        "residual": Epilogue.RESIDUAL, "logits": Epilogue.LOGITS, "choice": Epilogue.CHOICE,
    }.get(stage.writes, Epilogue.PUBLISH)  # fmt: skip
    return MatrixStage(
        name=stage.name, reads=reads, writes=writes, gain=stage.gain, bias=stage.bias,
        scale=scale_name(stage) if stage.layout.row_scales else None,
        epilogue=Epilogue.GATED if stage.interleaved else epilogue, k=stage.k, tiles=stage.tiles,
        product=products[stage.name], source=Source.LIBRARY if stage.routed else Source.TAPE,
        routed=stage.routed, dealt=stage.dealt,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Exchange:
    """Buffers and resets of one rank."""

    buffers: tuple[ExchangeBuffer, ...]
    resets: tuple[Reset, ...]


def exchange_of(
    dimensions: Dimensions, layer: tuple[MatrixStage, ...], workers: int, splits: int, rows: int
) -> Exchange:
    width = -(-dimensions.width // WORD_VALUES)
    residual = [stage for stage in layer if stage.epilogue is Epilogue.RESIDUAL]
    head = dimensions.heads * dimensions.head_dim // WORD_VALUES
    parts = (
        dimensions.heads * splits * (dimensions.head_dim // 4 + 1)
    )  # float32 values, then (peak, sum, 0, 0)
    sized = [
        (START, width, residual[0].name),
        (FINAL, width, residual[0].name),
        *((stage.writes, width, stage.name) for stage in residual if stage.writes != START),
        *(
            (stage.writes, stage.words, stage.name)
            for stage in layer
            if stage.epilogue is not Epilogue.RESIDUAL
        ),
        ("partials", parts, ATTENTION),
        ("attended", head, ATTENTION),
    ]
    half = sum(words for _, words, _ in sized)
    buffers, start = [], 0
    for name, words, owner in sized:
        buffers.append(ExchangeBuffer(name, words, 2, start, half, owner))
        start += words
    # Rows of a pass follow each other, all buffers of one and then all of the next.
    candidates = ExchangeBuffer("candidates", rows * workers, 3, rows * 2 * half, rows * workers, "worker")
    return Exchange((*buffers, candidates), resets_of(layer))


def with_attention(layer: tuple[MatrixStage, ...], window: int | None) -> tuple[AnyStage, ...]:
    """A layer's matrices, with attention before the matrix that reads its result."""
    stages: list[AnyStage] = []
    for stage in layer:
        if stage.reads == "attended":
            stages.append(AttentionStage(ATTENTION, "qkv", "attended", window))
        stages.append(stage)
    return tuple(stages)


def resets_of(layer: tuple[MatrixStage, ...]) -> tuple[Reset, ...]:
    """Buffers whose readers are done when the layer's last stage has its input are reset there, all of them together.

    That takes a matrix between reader and last stage. The other buffers are reset in the next turn, by the stage that
    writes them, once it has its input. `gpu_rules.py` checks the result; ARCHITECTURE.md has the argument.
    """
    chain = chain_of(with_attention(layer, None))
    last = chain[-1].name
    found = []
    for stage in chain:
        reader = max((at for at, other in enumerate(chain) if other.needs(stage.writes)), default=-1)
        if any(other.reads_all for other in chain[reader + 1 : -1]):
            found.append(Reset(stage.writes, last, turns=0, listed=True))
        else:
            found.append(Reset(stage.writes, stage.name, turns=1))
    return (*found, Reset(FINAL, last, turns=1, first_layer=True))


def own_words(rank: RankPlan, dimensions: Dimensions, exchange: Exchange, rows: int = 1) -> int:
    """The most words that one worker resets together."""
    workers = len(rank.tapes)
    listed = {reset.buffer for reset in exchange.resets if reset.listed}
    owners = [
        buffer.owner for buffer in exchange.buffers if buffer.name in listed and buffer.owner != ATTENTION
    ]
    spans = {stage.name: (stage.spans, 2 if stage.interleaved else 1) for stage in rank.layer_stages}
    matrices = max(
        sum(spans[name][0][worker].count // spans[name][1] for name in owners) for worker in range(workers)
    )
    attention = dimensions.group * (dimensions.head_dim // 4 + 1)
    combined = -(-rows * dimensions.heads // workers) * (dimensions.head_dim // 8)
    return matrices + attention + combined


def is_scattered(rank: RankPlan) -> bool:
    """Whether some worker has so few stages that it can run far ahead of the others: kernels/exchange/janitor.h.

    A worker keeps step if it has tiles of the head and of the last matrix, which writes the residual stream. In a layer
    of four matrices that alternately read and write that stream, tiles of both that read it do as well.
    """
    layer = rank.layer_stages
    in_turn = len(layer) == 4 and [stage.reads == "residual" for stage in layer] == [True, False, True, False]

    def keeps_step(worker: int) -> bool:
        owns = [stage.spans[worker].count > 0 for stage in layer]
        takes_part = owns[-1] or (in_turn and owns[0] and owns[2])
        return takes_part and rank.head.spans[worker].count > 0

    return not all(keeps_step(worker) for worker in range(len(rank.tapes)))

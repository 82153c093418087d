"""The plan: everything about a token that is known before it is computed. Frozen, hashed, printable.

A plan names no weights and runs nothing. It says which stages a token passes, which rows of each stage a worker
owns, in which order those rows lie on the worker's tape, and which buffers carry activations between stages.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from monotape.errors import PlanError
from monotape.plan.formats import LAYOUTS, TILE_ROWS, Format, Layout


@dataclass(frozen=True, slots=True)
class Part:
    """A run of rows of a stage that comes from one tensor: groups of rows, each padded to whole tiles."""

    role: str
    rows: int
    group: int  # a head's rows in q, k and v; all rows elsewhere
    first: int = 0  # where they begin in the tensor: a rank has a share of its rows

    @property
    def tiles(self) -> int:
        return self.rows // self.group * -(-self.group // TILE_ROWS)


@dataclass(frozen=True, slots=True)
class Span:
    """The tiles of a stage that one worker owns."""

    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count


@dataclass(frozen=True, slots=True)
class Stage:
    """A matrix that all workers multiply together, each its own rows."""

    name: str
    parts: tuple[Part, ...]
    interleaved: (
        bool  # tiles alternate between the parts (gate, up, gate, up) instead of following each other
    )
    k: int  # values of the input
    padded_k: int  # k rounded up to whole blocks of its layout
    tiles: int
    unit: int  # tiles that must stay with one owner (a head, a gate tile and its up tile)
    spans: tuple[Span, ...]  # one a worker
    reads: str  # buffer
    writes: str  # buffer
    format: Format  # of its weights
    layout: Layout  # of that format on this machine's tapes
    first_k: int = 0  # where its input begins in the tensors' columns: a rank has a share of them
    gain: str | None = None  # the norm of its input
    bias: str | None = None
    routed: int = (
        0  # experts that a token passes, each with tiles like these in the library; 0: they are on the tapes
    )
    dealt: int = (
        0  # experts whose tiles are dealt out together: spans count on from one to the next; 0: none are
    )

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def tile_bytes(self) -> int:
        return self.layout.tile_bytes(self.padded_k)

    def owned_bytes(self, worker: int) -> int:
        """Bytes of one worker's tiles: of one expert where the stage is routed, or of all if they are dealt out."""
        return self.spans[worker].count * self.tile_bytes


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of a tape that holds one stage's tiles of one worker."""

    stage: str
    offset: int  # from the start of the layer's run, or of the tape for the head
    bytes: int


@dataclass(frozen=True, slots=True)
class Tape:
    """One worker's weights in reading order: `layers` equal runs, then the head."""

    worker: int
    layer_bytes: int
    layer_segments: tuple[Segment, ...]
    head_segment: Segment
    bytes: int


@dataclass(frozen=True, slots=True)
class Library:
    """The tiles of all experts, addressed by (layer, expert, tile): [layers][experts], each the segments of an expert.

    Every worker reads it. A routed stage's span says which tiles of *each* chosen expert a worker multiplies, or, where
    they are dealt out, which tiles of the chosen experts one after the other. So every choice of experts costs each
    worker the same bytes. The owner of an element of the residual has its row of all experts.
    """

    experts: int
    chosen: int  # by a token
    layers: int
    expert_bytes: int
    segments: tuple[Segment, ...]  # of an expert, in the order in which a token passes its stages
    bias_bytes: int = 0  # of all experts' biases, which lie beside it

    @property
    def bytes(self) -> int:
        return self.layers * self.experts * self.expert_bytes

    @property
    def token_bytes(self) -> int:
        """What a token reads: the experts that it passes."""
        return (self.bytes + self.bias_bytes) * self.chosen // self.experts

    def address(self, layer: int, expert: int, stage: str) -> int:
        """Where the first tile of a stage's matrix begins, in bytes."""
        segment = next(segment for segment in self.segments if segment.stage == stage)
        return (layer * self.experts + expert) * self.expert_bytes + segment.offset


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory through which stages pass activations: `rows` rows of `width` float32."""

    name: str
    rows: int
    width: int

    @property
    def bytes(self) -> int:
        return 4 * self.rows * self.width


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Where keys and values lie: [layer][kv head][position][head_dim], keys and values apart."""

    layers: int
    kv_heads: int
    head_dim: int
    format: Format
    block: int  # positions that one worker takes at a time; partial results are combined in block order

    @property
    def position_bytes(self) -> int:
        if self.format is Format.FP8:  # a byte a value, and one for a head's power of two
            return 2 * self.layers * self.kv_heads * (self.head_dim + 1)
        return 2 * self.layers * self.kv_heads * self.head_dim * (4 if self.format is Format.F32 else 2)


@dataclass(frozen=True, slots=True)
class Machine:
    """The properties of the hardware that a plan depends on."""

    kind: str  # "cpu", "cuda" or "hip"
    workers: int
    alignment: int = 64  # bytes; every segment starts on it
    whole_heads: bool = True  # a head has one owner, which normalises and rotates it; else attention does
    levels: bool = True  # the largest stage makes up for what is uneven before it; else every stage is even

    def layout(self, fmt: Format) -> Layout:
        """How weights of a format lie on its tapes."""
        layouts = LAYOUTS[self.kind]
        if fmt not in layouts:
            raise PlanError(f"Kernels of the {self.kind} backend do not read {fmt.value} weights.")
        return layouts[fmt]


@dataclass(frozen=True, slots=True)
class Step:
    """What a rank does with its partial output of one module (attention or feed-forward).

    In this order: the partial times `own` is added to the rank's residual, the partial is sent to every rank, and the
    sum of an earlier module (or of this one) is folded into the residual.
    """

    own: float
    sends: bool
    folds: int | None  # the module whose partials, summed in rank order, are added now
    whole: bool  # that sum holds the rank's own partial too; else only the others'


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One device's share of the plan."""

    rank: int
    layer_stages: tuple[Stage, ...]
    head: Stage
    tapes: tuple[Tape, ...]
    buffers: tuple[Buffer, ...]
    kv: KvLayout
    library: Library | None = None  # None: no stage is routed

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (*self.layer_stages, self.head)

    @property
    def taped_stages(self) -> tuple[Stage, ...]:
        """The stages of a layer whose tiles are on the tapes."""
        return tuple(stage for stage in self.layer_stages if not stage.routed)

    @property
    def routed_stages(self) -> tuple[Stage, ...]:
        return tuple(stage for stage in self.layer_stages if stage.routed)


@dataclass(frozen=True, slots=True)
class Plan:
    """A token's whole schedule."""

    model: str
    layers: int
    format: Format
    machine: Machine
    context: int
    chunk: int  # rows that one prefill pass computes
    ranks: tuple[RankPlan, ...]
    small_bytes: int  # norms and biases: every worker reads them, and they are on no tape
    table_bytes: int  # cos and sin of every position; a token reads one row
    embedding_bytes: int  # embedding tables; 0 when a single rank reads it off the head's tape
    # Of several ranks alone:
    steps: tuple[
        Step, ...
    ] = ()  # one per module, then one for each sum that is still in flight after the last
    slots: int = 0  # sends that an exchange buffer holds; the next one overwrites the oldest
    head_input: str = (
        "own"  # what a rank's head reads: its own residual, or the "mean", "sum" or "concatenate" of all
    )

    @property
    def digest(self) -> str:
        """Names the schedule: equal plans have equal digests, on every machine."""
        return digest_of(self)

    @property
    def modules(self) -> int:
        """Sums into the residual that a token passes."""
        return self.layers * sum(stage.writes == "residual" for stage in self.ranks[0].layer_stages)

    @property
    def formats(self) -> str:
        """The formats of the weights for a reader: those of the layers, and that of the head where it is another."""
        stages = self.ranks[0].layer_stages
        layers = " and ".join(dict.fromkeys(stage.format.value for stage in stages))
        head = self.ranks[0].head.format.value
        return layers if head == layers else f"{layers}, head {head}"

    @property
    def tape_bytes(self) -> int:
        return sum(tape.bytes for rank in self.ranks for tape in rank.tapes)

    @property
    def library_bytes(self) -> int:
        """Bytes of all experts in memory, with their biases."""
        return sum(rank.library.bytes + rank.library.bias_bytes for rank in self.ranks if rank.library)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory."""
        taped = self.tape_bytes + self.small_bytes + self.table_bytes + self.embedding_bytes
        return taped + self.library_bytes

    def token_bytes(self, context: int) -> int:
        """Bytes that one decoded token reads: every tape once, the small tensors, the experts that it passes, and the
        KV of `context` positions."""
        kv = sum(rank.kv.position_bytes for rank in self.ranks)
        experts = sum(rank.library.token_bytes for rank in self.ranks if rank.library)
        return self.tape_bytes + self.small_bytes + experts + kv * context


#: Fields that plans have had since there are experts. A plan without experts keeps the digest that it always had.
_WITHOUT_EXPERTS = {
    "routed": 0, "dealt": 0, "library": None, "also": None, "inputs": 0, "routing": None, "gate": None, "sinks": None,
    "partial_values": 0,
}  # fmt: skip


def digest_of(plan: Any) -> str:
    """A short name for all that a plan says."""

    def facts(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: facts(item)
                for key, item in value.items()
                if key not in _WITHOUT_EXPERTS or item != _WITHOUT_EXPERTS[key]
            }
        return [facts(item) for item in value] if isinstance(value, list | tuple) else value

    text = json.dumps(facts(dataclasses.asdict(plan)), sort_keys=True, default=lambda value: value.value)
    return hashlib.sha256(text.encode()).hexdigest()[:16]

"""The GPU plan: the monokernel's work on one GPU, as data. Frozen, hashed, printable, checked by gpu_rules.py.

`Plan` says what a token needs; this says how a GPU does it: which stages a layer passes and through which words they
exchange activations, when each word is reset, how weights lie in pages, how KV and rows of a prompt are cut. It is
lowered from a Plan by `compiler/gpu/`, and printed into plan.h, the kernel's one generated header. None of it needs a
GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from monotape.plan.formats import TILE_ROWS, Format
from monotape.plan.gpu_machines import GPU_MACHINES, WARPS, GpuMachine
from monotape.plan.types import Plan, digest_of

# The kernel's own sizes. plan.h repeats them as constants, so that they exist once.
BLOCK_K = 32  # values along k of a block, the unit of everything that tensor cores multiply
BATCH_TILES = 16  # tiles whose partial sums are kept before warps add them up
UNIT_POSITIONS = 32  # positions of a unit of KV
CUT_ROWS = 8  # row counts of a chunk are rounded up to a multiple of this before a cut is chosen
ATTENTION = "attention"  # the owner of words that attention publishes
SINKS = "sinks"  # the vector of attention sinks
MOST_RANKS = 8  # kernels/plan/params.h: kMostRanks
HEAD_INPUTS = ("own", "mean", "sum")  # kernels/plan/params.h: HeadInput


class Epilogue(Enum):
    """The last step of a stage, for each finished row."""

    PUBLISH = "publish"  # its value goes into the output buffer
    RESIDUAL = "residual"  # added to the owner's float32 residual, which goes into the output buffer
    GATED = "gated"  # gate and up become one, of a gate tile and the up tile beside it
    CHOICE = "choice"  # a router's: its float32 value goes into the output buffer
    LOGITS = "logits"  # kept for the sampler


class Source(Enum):
    """Where a stage's weights are played from."""

    TAPE = "tape"  # the worker's run of the layer
    PUBLISHED = "published"  # an address that the kernel publishes while it runs
    LIBRARY = "library"  # of the experts that the router chose


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Sizes of one rank's share of the model."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    all_vocab: int  # of all ranks
    rope_dims: int
    norm_eps: float
    attention_scale: float
    qk_norm: bool

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def qkv_rows(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class Product:
    """How warps multiply tiles of one length and format: stages that are alike share the code."""

    format: Format
    blocks: int  # of k, in a tile; where experts are added up, of all of them
    tiles_in_page: int  # short tiles share a page
    page_run: int  # blocks of a tile that are in one page; a long tile takes several pages
    together: int  # tiles that a warp multiplies at once
    inputs: int = 0  # experts that have an input of their own and are added up; 0: none
    dealt: int = 0  # experts whose tiles follow each other

    @property
    def batch(self) -> int:
        """Tiles whose sums are kept before warps add them up: an even number of steps."""
        return BATCH_TILES // (2 * self.together) * 2 * self.together


@dataclass(frozen=True, slots=True)
class MatrixStage:
    """A matrix that all workers multiply together."""

    name: str
    reads: str  # exchange buffer
    writes: str  # exchange buffer, or "logits"
    gain: str | None  # the vector that its normalised input is multiplied by
    bias: str | None
    scale: str | None  # the vector that its finished rows are multiplied by: a quantised format's
    epilogue: Epilogue
    k: int
    tiles: int
    product: int  # index into GpuRank.products
    source: Source = Source.TAPE
    also: str | None = None  # the buffer of a router's logits, if it is the first stage that needs them
    routed: int = 0  # experts that a token passes
    dealt: int = 0  # experts whose tiles are dealt out together

    @property
    def words(self) -> int:
        """Words that all workers publish: one a tile, one of a gate tile and its up tile, two of float32 values."""
        tiles = max(1, self.dealt) * self.tiles
        return {Epilogue.GATED: tiles // 2, Epilogue.CHOICE: 2 * tiles}.get(self.epilogue, tiles)


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of every layer: models/experts.py."""

    experts: int
    chosen: int  # by a token
    over_all: bool  # their weights are a softmax over all logits, not over those of the chosen
    expert_bytes: int  # of the library


@dataclass(frozen=True, slots=True)
class Gate:
    """gate * sigmoid(alpha * gate) * (up + shift), after gate <= limit and -limit <= up <= limit."""

    alpha: float
    limit: float
    shift: float


@dataclass(frozen=True, slots=True)
class AttentionStage:
    """Attention of a layer: units of KV, each seen by one worker; parts of several workers are combined in order."""

    name: str
    reads: str
    writes: str
    window: int | None  # positions that a token sees, itself included; None: all


Stage = MatrixStage | AttentionStage


@dataclass(frozen=True, slots=True)
class Passed:
    """A stage of the chain through which a layer's values pass, one exchange after another."""

    name: str
    reads: str
    writes: str
    reads_all: bool  # a matrix multiplies its whole input; attention reads the words of one head
    also: str | None = None

    def needs(self, buffer: str) -> bool:
        return buffer in (self.reads, self.also)


def chain_of(stages: Sequence[Stage]) -> list[Passed]:
    """Attention is two stages: workers attend to parts of the positions, and others combine what they have."""
    chain = []
    for stage in stages:
        if isinstance(stage, AttentionStage):
            chain += [
                Passed(stage.name, stage.reads, "partials", reads_all=False),
                Passed("combine", "partials", stage.writes, reads_all=False),
            ]
        else:
            chain.append(Passed(stage.name, stage.reads, stage.writes, reads_all=True, also=stage.also))
    return chain


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers that are alike: the stages that a token passes in one, in order."""

    name: str
    stages: tuple[Stage, ...]

    @property
    def matrices(self) -> tuple[MatrixStage, ...]:
        return tuple(stage for stage in self.stages if isinstance(stage, MatrixStage))

    @property
    def attention(self) -> AttentionStage:
        return next(stage for stage in self.stages if isinstance(stage, AttentionStage))


@dataclass(frozen=True, slots=True)
class ExchangeBuffer:
    """Words through which one stage passes values to the next. All ones: not yet."""

    name: str
    words: int  # of one copy
    copies: int  # used in turn: an old word is never polled for
    start: int  # word of the exchange at which its first copy begins
    stride: int  # words from one copy to the next: half of the exchange is of even turns, half of odd ones
    owner: str  # whose words they are: the stage that a worker's span is of, ATTENTION, or "worker" (one word each)


@dataclass(frozen=True, slots=True)
class Reset:
    """When a worker resets its words of a buffer: once it has the input of stage `at`, `turns` turns later."""

    buffer: str
    at: str
    turns: int  # 0: in the turn in which they were published
    first_layer: bool = False  # in a token's first layer alone, of what the token before has published
    listed: bool = False  # together with others, in one round trip


@dataclass(frozen=True, slots=True)
class Pages:
    """The ring of pages in shared memory, and how fast it is filled."""

    blocks: int  # 512-byte blocks of a page
    ring: int  # pages
    now: int  # copies in flight while consumers work and need these pages
    ahead: int  # while they work and need others: other workers may need the memory more
    polling: int  # while they poll words, which must not queue behind pages
    attending: int  # while others attend: there is time to fill the ring
    ticks: int  # of the GPU's clock, at least, between copies of what is not needed now
    lead: int  # bytes that the scout brings into the L2 ahead of the ring; 0: no scout

    @property
    def bytes(self) -> int:
        return self.blocks * 512


@dataclass(frozen=True, slots=True)
class KvUnits:
    """KV as it lies in memory: [layers][kv heads][units of 32 positions], keys in blocks, then values on their side."""

    layers: int
    kv_heads: int
    head_dim: int
    format: Format
    units_per_split: int  # one more worker for every this many units of a KV head
    splits: int  # workers that share a KV head, at most

    @property
    def narrow(self) -> bool:
        """Whether values have 8 bits."""
        return self.format is Format.FP8

    @property
    def unit_bytes(self) -> int:
        keys = UNIT_POSITIONS // TILE_ROWS * -(-self.head_dim // BLOCK_K)
        values = (keys + self.head_dim // TILE_ROWS) * TILE_ROWS * BLOCK_K
        if self.narrow:  # a power of two for each key and each value follows
            return values + 2 * UNIT_POSITIONS
        return 2 * values

    def bytes(self, positions: int) -> int:
        """Bytes of one conversation, in whole units."""
        return self.layers * self.kv_heads * -(-positions // UNIT_POSITIONS) * self.unit_bytes


@dataclass(frozen=True, slots=True)
class Cut:
    """How a product of up to `rows` rows is cut into blocks of work: tiles of a block, and pieces of k."""

    rows: int  # the last of a run of row counts that are cut alike
    row_tiles: int
    column_tiles: int
    pieces: int


@dataclass(frozen=True, slots=True)
class RowBuffer:
    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class RowPlan:
    """A prompt goes through the model in chunks of rows."""

    chunk: int
    buffers: tuple[RowBuffer, ...]
    cuts: tuple[tuple[str, tuple[Cut, ...]], ...]  # by stage

    partial_values: int = 0  # float32 numbers of partial sums behind which the choices of experts lie

    @property
    def bytes(self) -> int:
        return sum(buffer.bytes for buffer in self.buffers)


@dataclass(frozen=True, slots=True)
class InboxRegion:
    name: str
    bytes: int
    sender_bytes: int  # between one sender's part and the next one's; 0: no part of its own


@dataclass(frozen=True, slots=True)
class Links:
    """How a rank talks with its peers; of one rank alone there is nothing."""

    rank: int
    ranks: int
    first_id: int  # where its words begin in the vocabulary
    slots: int
    row_slots: int
    sends: int  # of a token
    steps: int
    late_folds: int
    head_input: str
    keeps_own: bool  # a rank needs its own partial again, later than it made it
    delayed: bool  # words say when they were sent, for experiments with slow links
    regions: tuple[InboxRegion, ...]

    @property
    def inbox_bytes(self) -> int:
        return sum(region.bytes for region in self.regions)


@dataclass(frozen=True, slots=True)
class GpuRank:
    """What one GPU does."""

    rank: int
    dimensions: Dimensions
    half: Format  # of activations, KV and words of the exchange
    rows_a_pass: int  # tokens that a decode pass computes, at most
    row_batch: int  # tiles whose sums are kept for each of several rows
    choices: int  # sets of weights that a published stage chooses among; 1: there is no such stage
    vectors: tuple[str, ...]  # norms and biases, in the order of the kernel's table
    products: tuple[Product, ...]
    kinds: tuple[LayerKind, ...]
    layer_kinds: tuple[int, ...]  # of each layer, its kind
    head: MatrixStage
    embedding: Format  # of the embedding: the head's where it is tied
    pages: Pages
    buffers: tuple[ExchangeBuffer, ...]
    resets: tuple[Reset, ...]
    scattered: bool  # some worker has so few stages that it must await a stage's own resets: kernels/exchange/janitor.h
    own_words: int  # words that a worker lists for one reset, at most
    residual_tiles: int  # tiles of the residual stream that a worker owns, at most
    input_blocks: int  # blocks of the longest input, which is in shared memory while its stage runs
    kv: KvUnits
    beside_ring: int  # bytes of shared memory that hold everything but the ring
    prefill_bytes: int  # of shared memory: the ring, and the place of an input where the ring is too small
    prefill: RowPlan
    sampler_words: int  # per worker in one copy of the sampler's words; there are three copies
    links: Links
    routing: Routing | None = None  # None: no stage is routed
    gate: Gate | None = None  # None: silu(gate) * up
    sinks: str | None = None  # the vector with one more logit for each query head's softmax

    @property
    def matrices(self) -> tuple[MatrixStage, ...]:
        """The matrices of a layer, then the head: their numbers are the kernel's."""
        return (*self.kinds[0].matrices, self.head)

    @property
    def stage_names(self) -> tuple[str, ...]:
        """By the kernel's number: matrices, then everything else that a worker may wait in."""
        return (*(stage.name for stage in self.matrices), *OTHER_STAGES)

    @property
    def stage_order(self) -> tuple[int, ...]:
        """For each of stage_names, where a token passes it; rows of a prompt come before all."""
        layer = [
            name
            for stage in self.kinds[0].stages
            for name in ((stage.name, "combine") if isinstance(stage, AttentionStage) else (stage.name,))
        ]
        order = ["rows", *layer, self.head.name, "sample"]
        return tuple(order.index(name) - 1 for name in self.stage_names)

    @property
    def row_words(self) -> int:
        """Words between those of a row of a pass and of the next row."""
        return 2 * self.buffers[0].stride

    @property
    def further_rows(self) -> int:
        """Words of all rows of a pass but the first: they follow the first row's, and candidates follow them."""
        return (self.rows_a_pass - 1) * self.row_words

    @property
    def row_logits(self) -> int:
        """Values between the logits of a row and of the next: kRowLogits in kernels/plan/params.h."""
        return -(-self.dimensions.all_vocab // 8) * 8

    @property
    def chain_bytes(self) -> int:
        """Of a worker: what its lanes keep of attention for every row while they wait for more units."""
        tiles = -(-self.dimensions.head_dim // (2 * TILE_ROWS))  # kernels/machine/hopper_unit.h: Running
        values = 2 + 4 * tiles
        return self.rows_a_pass * WARPS * 32 * 4 * values

    @property
    def exchange_words(self) -> int:
        """Words of all copies of all buffers, and of drafts that are offered: one for each copy of the candidates."""
        last = self.buffers[-1]
        offers = last.copies if self.rows_a_pass > 1 else 0
        return last.start + last.copies * last.stride + offers

    @property
    def products_of_stages(self) -> tuple[Product, ...]:
        return tuple(self.products[stage.product] for stage in self.matrices)

    def buffer(self, name: str) -> ExchangeBuffer:
        return next(buffer for buffer in self.buffers if buffer.name == name)


#: The other stages in which a worker may wait, in the order of the kernel's numbers.
OTHER_STAGES = (ATTENTION, "combine", "sample", "rows")


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """A Plan as GPUs run it, one a rank."""

    plan: Plan
    ranks: tuple[GpuRank, ...]

    @property
    def machine(self) -> GpuMachine:
        return GPU_MACHINES[self.plan.machine.kind]

    @property
    def digest(self) -> str:
        """Names what the kernels do: equal plans have equal digests, on every machine."""
        return digest_of(self)

    @property
    def workers(self) -> int:
        return self.plan.machine.workers

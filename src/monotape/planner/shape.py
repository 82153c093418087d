"""What a model costs a token, whatever its family: parameters by part, and what each layer keeps of the past."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

#: What parameters are for. Bytes per token are shown under the heading that KIND_GROUPS gives each.
ATTENTION, FFN, SHARED, ROUTED, ROUTER, HEAD, EMBEDDING = (
    "attention", "ffn", "shared", "routed", "router", "head", "embedding",
)  # fmt: skip
KIND_GROUPS = {
    ATTENTION: "attention",
    FFN: "dense_ffn",
    SHARED: "experts",
    ROUTED: "experts",
    ROUTER: "experts",
    HEAD: "head",
    EMBEDDING: "head",
}
GROUPS = ("attention", "dense_ffn", "experts", "head")
STATE_BYTES = 4  # recurrent states are kept in float32


@dataclass(frozen=True, slots=True)
class Part:
    """Parameters that are stored and read alike. Experts and embedding rows are copies, of which a token reads some."""

    kind: str
    matrices: int  # parameters of one copy that a weight format may shrink
    vectors: int = 0  # norms, biases, gates: never quantised
    copies: int = 1
    chosen: int = 1

    @property
    def total(self) -> int:
        return self.copies * (self.matrices + self.vectors)

    @property
    def active(self) -> int:
        return self.chosen * (self.matrices + self.vectors)


@dataclass(frozen=True, slots=True)
class Cache:
    """What one layer keeps of the past, in values: a KV cache, a compressed one, an index, or a fixed state."""

    values: int = 0  # of one entry
    window: int | None = None  # positions that are kept
    stride: int = 1  # positions that share an entry
    top: int | None = None  # entries that a token reads at most
    heads: int = 1  # over how many devices one entry can be split; the rest hold copies
    state: int = 0  # values of a recurrent state, float32, whatever the context
    scored: bool = True  # attention reads it; an index is only searched

    def entries(self, context: int) -> int:
        return (context if self.window is None else min(context, self.window)) // self.stride

    def stored_bytes(self, context: int, value_bytes: float) -> float:
        return self.entries(context) * self.values * value_bytes + self.state * STATE_BYTES

    def read_entries(self, context: int) -> int:
        entries = self.entries(context)
        return entries if self.top is None else min(entries, self.top)

    def read_bytes(self, context: int, value_bytes: float) -> float:
        return self.read_entries(context) * self.values * value_bytes + self.state * STATE_BYTES


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: its parameters, its memory of the past, and the steps that all workers take together."""

    parts: tuple[Part, ...]
    caches: tuple[Cache, ...]
    stages: int
    score_flops: int  # arithmetic of attention for one token and one position it sees


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model as the planner sees it."""

    architecture: str
    layers: tuple[Layer, ...]
    parts: tuple[Part, ...]  # outside the layers: embedding and head
    width: int
    context: int | None  # the longest that the config allows
    notes: tuple[str, ...] = ()  # what is not counted, and why
    heads: tuple[int, int] | None = None  # of queries and of KV, in a model that the engine runs
    kinds: tuple[tuple[Layer, int], ...] = field(
        init=False, repr=False
    )  # layers that are alike, and how many

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", tuple(Counter(self.layers).items()))

    def all_parts(self) -> Iterable[tuple[Part, int]]:
        """Every part, and how often it occurs."""
        for part in self.parts:
            yield part, 1
        for layer, times in self.kinds:
            for part in layer.parts:
                yield part, times

    def all_caches(self) -> Iterable[tuple[Cache, int]]:
        for layer, times in self.kinds:
            for cache in layer.caches:
                yield cache, times

    @property
    def total(self) -> int:
        """Every parameter of the text model, a tied embedding once."""
        return sum(times * part.total for part, times in self.all_parts())

    @property
    def active(self) -> int:
        """Parameters one token reads: the head counts, of the embedding one row."""
        return sum(times * part.active for part, times in self.all_parts())

    @property
    def stages(self) -> int:
        return sum(layer.stages for layer in self.layers) + 2  # head and sample

    def kv_read_bytes(self, context: int, value_bytes: float) -> float:
        """What one token reads of the past."""
        return sum(times * cache.read_bytes(context, value_bytes) for cache, times in self.all_caches())

    def kv_stored_bytes(self, context: int, value_bytes: float, devices: int = 1) -> float:
        """What one sequence occupies on one of `devices`: heads are split as far as there are heads."""
        return sum(
            times * cache.stored_bytes(context, value_bytes) / min(devices, cache.heads)
            for cache, times in self.all_caches()
        )

    def score_flops(self, context: int) -> float:
        """Arithmetic of attention for one token that sees `context` positions."""
        return float(
            sum(
                times * layer.score_flops * cache.read_entries(context)
                for layer, times in self.kinds
                for cache in layer.caches
                if cache.scored
            )
        )

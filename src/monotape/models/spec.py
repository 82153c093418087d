"""ModelSpec: what a model is, independent of any backend. Every family file produces one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from monotape.models.experts import SILU, Experts, Gating
from monotape.models.lanes import Lanes
from monotape.models.layer import DENSE, Matrix, modules_of

#: The tensors of one layer, by role. A role that a family does not have is absent from its table.
LAYER_ROLES = (
    "attention_norm", "q", "k", "v", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm", "sinks", "output",
    "output_bias", "ffn_norm", "router", "router_bias", "gate", "up", "down", "gate_bias", "up_bias", "down_bias",
)  # fmt: skip
#: The tensors outside the layers. A tied model has no "head".
MODEL_ROLES = ("embedding", "final_norm", "head")
MAX_POSITIONS = 1 << 24  # float32 counts exactly up to here


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Where a role's tensor lies: a name in the checkpoint, and its rows when several roles share one.

    A tensor may be stored lane by lane: as [lanes][rows / lanes][columns], or, where lanes share the columns, as
    [lanes][rows][columns / lanes].
    """

    name: str  # "{layer}" stands for the layer's number, "{expert}" for the expert's
    rows: tuple[int, int] | None = None  # None: all rows
    lanes: int = 0  # 0: stored as one matrix
    split: str = "rows"  # what lanes share: "rows" or "columns"

    @property
    def side_by_side(self) -> bool:
        """Whether a row of the matrix lies in pieces: several lanes, each with columns of its own."""
        return self.lanes > 1 and self.split == "columns"

    def in_layer(self, layer: int, expert: int | None = None) -> str:
        name = self.name.replace("{layer}", str(layer))
        return name if expert is None else name.replace("{expert}", str(expert))


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions: angle = position * frequency, for pairs (i, i + dims / 2) of a head's first `dims`.

    Every scaling rule (linear, llama3, longrope, ...) ends as one list of frequencies, so nothing after the
    family file needs to know the rule. Only longrope has two: contexts past `short_context` use the second.
    """

    dims: int  # how many values of a head rotate; the rest pass through
    frequencies: tuple[float, ...]  # dims / 2 of them
    magnitude: float = 1.0  # scales cos and sin
    short_context: int | None = None
    long_frequencies: tuple[float, ...] | None = None
    rule: str = "none"  # for people
    interleaved: bool = False  # pairs are (2 i, 2 i + 1) instead


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder: everything that decides its numbers, and where its tensors lie."""

    family: str
    architecture: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # of one expert, where there are experts
    vocab: int
    context: int
    norm_eps: float
    rope: Rope
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # per layer: how many positions it sees, itself included; None: all
    layer_tensors: dict[str, TensorSource]
    model_tensors: dict[str, TensorSource]
    bos_ids: tuple[int, ...] = ()
    eos_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"  # what the checkpoint says of itself
    notes: tuple[str, ...] = field(default=())  # choices a user should be able to see
    lanes: Lanes | None = None  # None: one residual stream, however many ranks compute it
    layer: tuple[Matrix, ...] = DENSE  # the matrices of every layer, in order
    experts: Experts | None = None  # None: no matrix of a layer is routed
    gating: Gating = SILU
    sinks: bool = False  # each query head has one more logit in its softmax, whose weight is dropped

    @property
    def q_rows(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def attention_scale(self) -> float:
        return math.pow(self.head_dim, -0.5)

    @property
    def own_gains(self) -> bool:
        """Whether each lane has gains of its own in the norms of its residual."""
        return self.lanes is not None and self.lanes.own_norms

    @property
    def _gains(self) -> int:
        return self.lanes.count if self.lanes is not None and self.lanes.own_norms else 1

    @property
    def head_width(self) -> int:
        """What the head reads."""
        concatenated = self.lanes is not None and self.lanes.head == "concatenate"
        return self.width * (self.lanes.count if self.lanes is not None and concatenated else 1)

    @property
    def parameters(self) -> int:
        """Total parameters, the tied embedding counted once."""
        summed = self.lanes is not None and self.lanes.head == "sum"
        return (
            self.vocab * (self.width + (0 if self.tied else self.head_width))
            + self.width * (1 if summed else self._gains)
            + self.layers * self.layer_parameters
        )

    @property
    def layer_parameters(self) -> int:
        return sum(self.copies_of(role) * math.prod(self.shape_of(role)) for role in self.layer_tensors)

    @property
    def active_parameters(self) -> int:
        """Parameters that a token reads: of the experts those that it passes, of an untied embedding one row."""
        idle = 0 if self.experts is None else self.experts.count - self.experts.chosen
        routed = sum(math.prod(self.shape_of(role)) for role in self.layer_tensors if self.is_routed(role))
        table = 0 if self.tied else (self.vocab - 1) * self.width
        return self.parameters - self.layers * idle * routed - table

    def is_routed(self, role: str) -> bool:
        """Does every expert have a tensor of this role?"""
        return any(matrix.routed and role.removesuffix("_bias") in matrix.parts for matrix in self.layer)

    def copies_of(self, role: str) -> int:
        """Tensors of this role in a layer: one for each expert, or one."""
        return self.experts.count if self.experts is not None and self.is_routed(role) else 1

    def experts_of(self, role: str) -> tuple[int | None, ...]:
        """The experts that have a tensor of this role; (None,) for one that all share."""
        return tuple(range(self.copies_of(role))) if self.is_routed(role) else (None,)

    def has_bias(self, matrix: Matrix) -> bool:
        if matrix.bias == "qkv_bias":
            return self.qkv_bias
        return matrix.bias is not None and f"{matrix.parts[0]}_bias" in self.layer_tensors

    @property
    def modules(self) -> int:
        """Sums into the residual that a token passes."""
        return self.layers * len(modules_of(self.layer))

    @property
    def layer_gains(self) -> tuple[str, ...]:
        """The norms of a layer's matrices."""
        return tuple(dict.fromkeys(matrix.gain for matrix in self.layer if matrix.gain))

    def shape_of(self, role: str) -> tuple[int, ...]:
        """The shape that a role's tensor must have."""
        matrices = {"embedding": (self.vocab, self.width), "head": (self.vocab, self.head_width)}
        for matrix in self.layer:
            matrices |= {part: self._matrix_shape(matrix, part) for part in matrix.parts}
        if role in matrices:
            return matrices[role]
        if role in ("q_norm", "k_norm"):
            return (self.head_dim,)
        if role == "sinks":
            return (self.heads,)
        if role.endswith("_bias"):
            return matrices[role.removesuffix("_bias")][:1]
        assert role in (*self.layer_gains, "final_norm"), f"a tensor called {role}"
        summed = role == "final_norm" and self.lanes is not None and self.lanes.head == "sum"
        return (self._gains, self.width) if self.own_gains and not summed else (self.width,)

    def _matrix_shape(self, matrix: Matrix, part: str) -> tuple[int, int]:
        sizes = {"residual": self.width, "attended": self.q_rows, "activation": self.ffn}
        if self.experts is not None:
            sizes["choice"] = self.experts.count
        rows = {"q": self.q_rows, "k": self.kv_rows, "v": self.kv_rows}
        return rows.get(part) or sizes[matrix.writes], sizes[matrix.reads]

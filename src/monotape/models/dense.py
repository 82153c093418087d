"""What the decoder families share: the fields of their configs, and the way to a ModelSpec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from monotape.errors import UnsupportedModel
from monotape.models.experts import SILU, ExpertNames, Gating
from monotape.models.fields import FIXED, HARMLESS, Fields
from monotape.models.layer import DENSE, Matrix
from monotape.models.spec import MAX_POSITIONS, ModelSpec, TensorSource
from monotape.models.tensors import (
    bias_tensors,
    head_norm_tensors,
    model_tensors,
    separate_tensors,
    sink_tensors,
)

Windows = tuple[int | None, ...]
Tensors = dict[str, TensorSource]

# Larger than any model's, and small enough that a product of three fits 63 bits.
MAX_LAYERS = 4096
MAX_WIDTH = 1 << 20
MAX_HEADS = 1 << 14
MAX_VOCAB = 1 << 24

DTYPES = ("float32", "float16", "bfloat16")
ROPE_RULES = ("default", "linear", "llama3", "longrope", "yarn", "factors")


@dataclass(frozen=True, slots=True)
class Sizes:
    """The dimensions that every decoder has."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # of one expert, where there are experts
    vocab: int
    context: int


@dataclass(frozen=True, slots=True)
class Heads:
    """The dimensions of grouped-query attention."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Family:
    """One family, as data. Defaults are those of transformers where a file leaves a field out."""

    name: str  # also the file's model_type
    architecture: str
    windows: Callable[[Fields, int], Windows]  # of the number of layers
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # accepted with these values only
    projections: Callable[[int, int, int], Tensors] = separate_tensors  # of q rows, kv rows, ffn
    norm_eps: float = 1e-6
    kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: width / heads
    qkv_bias: bool = False
    biases: tuple[str, ...] = ()  # roles of further matrices that have one
    qk_norm: bool = False
    sinks: bool = False
    gating: Callable[[Fields], Gating] = lambda fields: SILU
    experts: ExpertNames | None = None
    unused: frozenset[str] = frozenset()  # fields of these files that no forward pass needs
    theta: float | None = None  # of the rotary positions, where a file names none; None: that of transformers
    rope_rules: tuple[str, ...] = ROPE_RULES
    partial_rope: bool = False
    layer: tuple[Matrix, ...] = DENSE  # the matrices of every layer, in order

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        """The ModelSpec of a config.json of this family; a field that it does not know is an error."""
        from monotape.models.rope import read_rope  # takes NumPy, which knowing the families does not need

        fields = Fields(config)
        check_type(fields, self.name)
        fields.fixed({**FIXED, **self.fixed}, self.architecture)
        inner = "intermediate_size" if self.experts is None else self.experts.inner
        sizes = read_sizes(fields, read_heads(fields, self.kv_heads, self.head_dim), inner)
        tied = fields.flag("tie_word_embeddings", False)
        fields.ids("pad_token_id", sizes.vocab, low=-1)  # unused here, but a wrong value means a wrong file
        spec = decoder_spec(
            fields,
            sizes,
            self.windows(fields, sizes.layers),
            family=self.name,
            architecture=self.architecture,
            norm_eps=fields.number("rms_norm_eps", 0, 1, self.norm_eps),
            rope=read_rope(
                fields, sizes.head_dim, sizes.context, self.rope_rules, self.partial_rope, self.theta
            ),
            tied=tied,
            qkv_bias=self.qkv_bias,
            qk_norm=self.qk_norm,
            sinks=self.sinks,
            gating=self.gating(fields),
            experts=None if self.experts is None else self.experts.read(fields),
            layer_tensors=self.layer_tensors(sizes),
            model_tensors=model_tensors(tied),
            layer=self.layer,
        )
        fields.finish(self.architecture, HARMLESS | self.unused)
        return spec

    def layer_tensors(self, sizes: Sizes) -> Tensors:
        tensors = self.projections(sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim, sizes.ffn)
        return {
            **tensors,
            **bias_tensors((*(("q", "k", "v") if self.qkv_bias else ()), *self.biases), tensors),
            **(head_norm_tensors() if self.qk_norm else {}),
            **(sink_tensors() if self.sinks else {}),
        }


def decoder_spec(fields: Fields, sizes: Sizes, windows: Windows, **of_the_family: Any) -> ModelSpec:
    """A ModelSpec of what every decoder's config says in the same fields, and of what its family says."""
    return ModelSpec(
        **asdict(sizes),
        **of_the_family,
        windows=tuple(bounded(window, sizes.context) for window in windows),
        bos_ids=fields.ids("bos_token_id", sizes.vocab),
        eos_ids=fields.ids("eos_token_id", sizes.vocab),
        dtype=read_dtype(fields),
        notes=fields.notes(),
    )


def check_type(fields: Fields, name: str) -> None:
    model_type = fields.optional_text("model_type")
    if model_type not in (None, name):
        raise fields.wrong("model_type", f"the architecture is one of the {name} family")


def read_heads(
    fields: Fields, default_kv_heads: int | None = None, default_head_dim: int | None = None
) -> Heads:
    """The sizes of attention, with a family's defaults where the file leaves them out."""
    width = fields.integer("hidden_size", 1, MAX_WIDTH)
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    kv_heads = fields.optional_integer("num_key_value_heads", 1, MAX_HEADS, default_kv_heads) or heads
    head_dim = fields.optional_integer("head_dim", 2, MAX_WIDTH, default_head_dim)
    if heads % kv_heads:
        raise fields.wrong("num_key_value_heads", f"must divide num_attention_heads ({heads})")
    if head_dim is None and width % heads:
        raise fields.wrong(
            "num_attention_heads", f"must divide hidden_size ({width}) where no head_dim is given"
        )
    return Heads(width, heads, kv_heads, width // heads if head_dim is None else head_dim)


def read_sizes(fields: Fields, heads: Heads, inner: str = "intermediate_size") -> Sizes:
    """All sizes, where those of attention are known. `inner`: the field with the width of a feed-forward block."""
    return Sizes(
        width=heads.width,
        heads=heads.heads,
        kv_heads=heads.kv_heads,
        head_dim=heads.head_dim,
        layers=fields.integer("num_hidden_layers", 1, MAX_LAYERS),
        ffn=fields.integer(inner, 1, MAX_WIDTH),
        vocab=fields.integer("vocab_size", 1, MAX_VOCAB),
        context=fields.integer("max_position_embeddings", 1, MAX_POSITIONS),
    )


def read_dtype(fields: Fields) -> str:
    new, old = fields.optional_text("dtype"), fields.optional_text("torch_dtype")
    if new is not None and old is not None and new != old:
        raise fields.wrong("dtype", f"torch_dtype is {old}")
    dtype = new or old or "float32"  # PyTorch's default
    if dtype not in DTYPES:
        raise UnsupportedModel(
            f"config.json says dtype = {dtype}, which is not supported.", f"Supported: {', '.join(DTYPES)}."
        )
    return dtype


def bounded(window: int | None, context: int) -> int | None:
    """A window that covers the whole context hides nothing."""
    return None if window is None or window >= context else window


def all_positions(fields: Fields, layers: int) -> Windows:
    """Every layer sees everything before it."""
    return _by_type(fields, layers, ("full_attention",) * layers, None)


def one_window(default: int | None) -> Callable[[Fields, int], Windows]:
    """Every layer sees the last `sliding_window` positions; `default` where the file does not say."""

    def windows(fields: Fields, layers: int) -> Windows:
        window = fields.optional_integer("sliding_window", 1, MAX_POSITIONS, default)
        kind = "full_attention" if window is None else "sliding_attention"
        kinds = fields.texts("layer_types", layers)
        if kinds is not None and set(kinds) != {kind}:
            raise fields.wrong("layer_types", f"sliding_window = {window} makes every layer {kind}")
        return (window,) * layers

    return windows


def alternating_windows(default: int) -> Callable[[Fields, int], Windows]:
    """The first of every two layers slides, unless `layer_types` says it layer by layer."""

    def windows(fields: Fields, layers: int) -> Windows:
        window = fields.optional_integer("sliding_window", 1, MAX_POSITIONS, default)
        kinds = tuple("full_attention" if layer % 2 else "sliding_attention" for layer in range(layers))
        return _by_type(fields, layers, kinds, window)

    return windows


def upper_windows(fields: Fields, layers: int) -> Windows:
    """Layers from `max_window_layers` on slide, unless `layer_types` says it layer by layer."""
    on = fields.flag("use_sliding_window", False)
    window = fields.optional_integer("sliding_window", 1, MAX_POSITIONS, 4096)
    first = fields.integer("max_window_layers", 0, MAX_LAYERS, 28)
    slides = on and window is not None
    kinds = tuple(
        "sliding_attention" if slides and layer >= first else "full_attention" for layer in range(layers)
    )
    return _by_type(fields, layers, kinds, window if on else None)


def _by_type(fields: Fields, layers: int, kinds: tuple[str, ...], window: int | None) -> Windows:
    """Windows by layer type: as the file lists them, else as `kinds`."""
    listed = fields.texts("layer_types", layers)
    found: list[int | None] = []
    for kind in kinds if listed is None else listed:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModel(
                f"config.json lists the layer type {kind} in layer_types, which is not supported.",
                "Supported: full_attention, sliding_attention.",
            )
        if kind == "sliding_attention" and window is None:
            raise fields.wrong("layer_types", "no sliding window is switched on")
        found.append(window if kind == "sliding_attention" else None)
    return tuple(found)

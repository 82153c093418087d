"""Which format each stage's weights have on the tapes: the one they are stored in, or the one that was asked for.

A stage is several tensors of all layers, and has one format. Of the formats that hold all of them exactly and that the
backend's kernels read, the smallest is taken. Where there is none, weights are unpacked: to 16 bits on a GPU, to q8 on
a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from monotape.compiler.split import lanes_for, shares
from monotape.models.spec import ModelSpec
from monotape.plan.formats import LAYOUTS, Format
from monotape.plan.gpu_formats import GPU_FORMATS
from monotape.weights.checkpoint import Checkpoint, Quantised
from monotape.weights.coded import fits, unit_of
from monotape.weights.tapes import source_of, tensor_name

FLOATS = (Format.F32, Format.F16, Format.BF16)
_CODES = tuple(fmt for fmt in Format if fmt not in FLOATS)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The format of all stages but some, which on a GPU is that of activations, and what a user should know of it."""

    default: Format
    of_stages: dict[str, Format] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    kv: Format | None = None  # None: as the plan keeps it by itself


def has_kernels(backend: str, fmt: Format) -> bool:
    """Do the backend's kernels read weights of this format?"""
    return fmt in (GPU_FORMATS if backend in ("cuda", "hip") else LAYOUTS["cpu"])


def stage_tensors(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """The names of a stage's tensors in all layers, by stage; the head comes last."""
    names = {
        matrix.name: tuple(
            tensor_name(source_of(spec, role, layer), layer, expert)
            for role in matrix.parts
            for layer in range(spec.layers)
            for expert in spec.experts_of(role)
        )
        for matrix in spec.layer
    }
    return {**names, "head": (source_of(spec, "embedding" if spec.tied else "head", None).name,)}


def gpu_formats(
    spec: ModelSpec, checkpoint: Checkpoint, ranks: int | None = None, backend: str = "cuda"
) -> Chosen:
    """On a GPU 16-bit weights stay as they are stored, stage by stage. Others that no kernel reads become bf16."""
    stored = _stored_stages(spec, checkpoint)
    halves = {name: Format.F16 if part.labels == ("f16",) else Format.BF16 for name, part in stored.items()}
    layer = [halves[matrix.name] for matrix in spec.layer]
    activations = Format.F16 if set(layer) == {Format.F16} else Format.BF16
    found = {name: part.smallest(backend, _cuts(spec, name, ranks)) for name, part in stored.items()}
    chosen = {name: fmt or halves[name] for name, fmt in found.items()}
    return Chosen(
        activations,
        {name: fmt for name, fmt in chosen.items() if fmt is not activations},
        _notes(backend, stored, found, chosen),
    )


def cpu_formats(spec: ModelSpec, checkpoint: Checkpoint, ranks: int | None = None) -> Chosen:
    """On a CPU float weights stay as they are stored if all are alike. Codes that no kernel reads become q8."""
    stored = _stored_stages(spec, checkpoint)
    # A router often has a format of its own; the other stages need not be widened for it.
    main = [matrix for matrix in spec.layer if matrix.writes != "choice"]
    layers = {label for matrix in main for label in stored[matrix.name].labels}
    if layers <= {"f32", "f16", "bf16"}:
        default = Format(layers.pop()) if len(layers) == 1 else Format.F32
        if not mixes("cpu"):
            return Chosen(default)
    else:
        default = _table_format(spec, checkpoint) if mixes("cpu") else Format.Q8
    found = {name: part.smallest("cpu", _cuts(spec, name, ranks)) for name, part in stored.items()}
    if not mixes("cpu"):
        return Chosen(default, {}, _notes("cpu", stored, found, dict.fromkeys(stored, default)))
    chosen = {name: fmt or _float_of(stored[name], Format.Q8) for name, fmt in found.items()}
    return Chosen(
        default,
        {name: fmt for name, fmt in chosen.items() if fmt is not default},
        _notes("cpu", stored, found, chosen),
    )


def head_format(backend: str, spec: ModelSpec, checkpoint: Checkpoint) -> Format | None:
    """The format of codes that the head has as it is stored; None where it is one of floats."""
    return _stored_stages(spec, checkpoint)["head"].smallest(backend, [0])


def mixes(backend: str) -> bool:
    """Do the backend's kernels read stages of several formats? A CPU's do since they read codes."""
    return backend != "cpu" or Format.WIDE in LAYOUTS["cpu"]


def _table_format(spec: ModelSpec, checkpoint: Checkpoint) -> Format:
    """An embedding that is no head, beside layers of codes on a CPU: as it is stored, but for float32."""
    embedding = _Stored(checkpoint, (source_of(spec, "embedding", None).name,))
    if not spec.tied and embedding.labels[0] in ("f16", "bf16"):
        return Format(embedding.labels[0])
    return (None if spec.tied else embedding.smallest("cpu", [0])) or Format.Q8


def _float_of(part: _Stored, default: Format) -> Format:
    """The float format of a stage that has one; stages that mix floats and codes take the default."""
    if part.has_codes:
        return default
    return Format(part.labels[0]) if len(part.labels) == 1 else Format.F32


def _stored_stages(spec: ModelSpec, checkpoint: Checkpoint) -> dict[str, _Stored]:
    split = {
        matrix.name
        for matrix in spec.layer
        for source in (spec.layer_tensors[role] for role in matrix.parts)
        if source.side_by_side
    }
    return {
        name: _Stored(checkpoint, tensors, whole=name not in split)
        for name, tensors in stage_tensors(spec).items()
    }


class _Stored:
    """The tensors of a stage as the file has them."""

    def __init__(self, checkpoint: Checkpoint, names: Sequence[str], *, whole: bool = True) -> None:
        """`whole`: no lanes lie side by side along k, each with codes of its own."""
        self._whole = whole
        self._matrices: list[Quantised | None] = [checkpoint.stored_matrix(name) for name in names]
        self.labels = tuple(sorted({checkpoint.stored_as(name) for name in names}))

    @property
    def has_codes(self) -> bool:
        return any(matrix is not None for matrix in self._matrices)

    def smallest(self, backend: str, cuts: Sequence[int]) -> Format | None:
        """The smallest format that holds all of them exactly; None where none does."""
        matrices = [matrix for matrix in self._matrices if matrix is not None]
        if len(matrices) < len(self._matrices) or not self._whole:
            return None
        return next((fmt for fmt in _by_size(backend) if self._all_fit(backend, fmt, matrices, cuts)), None)

    def _all_fit(self, backend: str, fmt: Format, matrices: list[Quantised], cuts: Sequence[int]) -> bool:
        if any(cut % unit_of(fmt) for cut in cuts):
            return False
        row_scales = LAYOUTS[backend][fmt].row_scales
        return all(fits(fmt, matrix, row_scales=row_scales) for matrix in matrices)

    @property
    def label(self) -> str:
        sorted_columns = any(getattr(matrix, "group_of", None) is not None for matrix in self._matrices)
        return " and ".join(self.labels) + (" with columns sorted by activation" if sorted_columns else "")


def _notes(
    backend: str, stored: dict[str, _Stored], found: dict[str, Format | None], chosen: dict[str, Format]
) -> tuple[str, ...]:
    """A sentence for each format that is unpacked, with the stages that have it."""
    stages: dict[tuple[str, Format], list[str]] = {}
    for name, part in stored.items():
        if found[name] is None and part.has_codes:
            stages.setdefault((part.label, chosen[name]), []).append(name)
    return tuple(
        f"Weights stored as {label} are unpacked to {fmt.value} ({', '.join(names)}): the {backend} backend has no "
        "kernels that read them as they are."
        for (label, fmt), names in stages.items()
    )


def _by_size(backend: str) -> Iterator[Format]:
    """Formats of codes that the kernels read, the fewest bytes first."""
    layouts = LAYOUTS[backend]
    known = [fmt for fmt in _CODES if fmt in layouts and has_kernels(backend, fmt)]
    return iter(sorted(known, key=lambda fmt: layouts[fmt].bytes / layouts[fmt].k))


def _cuts(spec: ModelSpec, stage: str, ranks: int | None) -> list[int]:
    """The columns of a stage's tensors at which the ranks' shares begin."""
    split = shares(spec, lanes_for(spec, ranks).count)
    reads = next((matrix.reads for matrix in spec.layer if matrix.name == stage), "residual")
    if reads == "attended":
        return [share.heads[0] * spec.head_dim for share in split]
    return [share.ffn[0] for share in split] if reads == "activation" else [0]

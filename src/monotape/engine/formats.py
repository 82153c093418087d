"""Which format each stage's weights have on the tapes: the one they are stored in, or the one that was asked for.

A stage is several tensors of all layers, and has one format. Of the formats that hold all of them exactly and that the
backend's kernels read, the smallest is taken. Where no format of codes holds them, a GPU takes 16-bit floats, and a CPU
takes q8 or, where some of the tensors are floats, the float format that holds all of them, if it has 16 bits. A note
names the weights that are rounded, and those that take more memory than in the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
from numpy.typing import NDArray

from monotape.compiler.split import lanes_for, shares
from monotape.models.spec import ModelSpec
from monotape.plan.formats import LAYOUTS, Format
from monotape.plan.gpu_formats import GPU_FORMATS
from monotape.weights.checkpoint import Checkpoint, Quantised
from monotape.weights.coded import fits, unit_of
from monotape.weights.quantised.stored import StoredMatrix
from monotape.weights.tapes import source_of, tensor_name

FLOATS = (Format.F32, Format.F16, Format.BF16)
_CODES = tuple(fmt for fmt in Format if fmt not in FLOATS)
_SAMPLED_ROWS, _ALL_SAMPLED_ROWS = (
    32,
    8192,
)  # of a matrix, and of a stage, which may have thousands of experts


@dataclass(frozen=True, slots=True)
class Chosen:
    """The format of all stages but some, which on a GPU is that of activations, and what a user should know of it."""

    default: Format
    of_stages: dict[str, Format] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    kv: Format | None = None  # None: as the plan keeps it by itself
    packed: tuple[str, ...] = ()  # matrices that a CPU's packer rounds to q8 because no format holds them


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
    spec: ModelSpec, checkpoint: Checkpoint, ranks: int | None = None, backend: str = "cuda",
    head: Format | None = None,
) -> Chosen:  # fmt: skip
    """On a GPU 16-bit weights stay as they are stored, stage by stage. Others that no kernel reads become bf16.

    `head`: the format that was asked for the head; None: the one that its weights have.
    """
    stored = _stored_stages(spec, checkpoint)
    halves = {name: Format.F16 if part.labels == ("f16",) else Format.BF16 for name, part in stored.items()}
    layer = [halves[matrix.name] for matrix in spec.layer]
    activations = Format.F16 if set(layer) == {Format.F16} else Format.BF16
    found = {name: part.smallest(backend, _cuts(spec, name, ranks)) for name, part in stored.items()}
    return _chosen(spec, checkpoint, backend, activations, stored, found, halves, head)


def cpu_formats(
    spec: ModelSpec, checkpoint: Checkpoint, ranks: int | None = None, head: Format | None = None
) -> Chosen:
    """On a CPU float weights stay as they are stored if all are alike. Codes that no kernel reads become q8.

    `head`: the format that was asked for the head; None: the one that its weights have.
    """
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
    others = {name: part.on_cores for name, part in stored.items()}
    if not mixes("cpu"):
        others = dict.fromkeys(stored, default)
        found = {name: fmt if fmt is default else None for name, fmt in found.items()}
    return _chosen(spec, checkpoint, "cpu", default, stored, found, others, head)


def _chosen(
    spec: ModelSpec, checkpoint: Checkpoint, backend: str, default: Format, stored: Mapping[str, _Stored],
    found: Mapping[str, Format | None], others: Mapping[str, Format], head: Format | None,
) -> Chosen:  # fmt: skip
    """`found`: the format of codes that holds a stage; `others`: the one that it has where there is none."""
    chosen = {name: fmt or others[name] for name, fmt in found.items()}
    if head is not None:
        chosen["head"] = head
    parts = {name: part for name, part in stored.items() if name != "head" or head is None}
    of_stages = {name: fmt for name, fmt in chosen.items() if fmt is not default}
    held = {name for name in stored if found[name] is chosen[name]}
    if not spec.tied:  # a table of its own, which has the default
        table = parts["embedding"] = _Stored(checkpoint, (source_of(spec, "embedding", None).name,))
        chosen["embedding"] = default
        held |= {"embedding"} if table.smallest(backend, [0]) is default else set()
    rounded = [name for name in parts if name not in held and parts[name].changes(chosen[name])]
    packed = [name for stage in rounded if chosen[stage] is Format.Q8 for name in parts[stage].names]
    return Chosen(default, of_stages, _notes(backend, parts, chosen, rounded), packed=tuple(packed))


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
        self.names = tuple(names)
        self._checkpoint, self._whole = checkpoint, whole
        self._matrices: list[Quantised | None] = [checkpoint.stored_matrix(name) for name in names]
        self.labels = tuple(sorted({checkpoint.stored_as(name) for name in names}))

    @property
    def has_codes(self) -> bool:
        return any(matrix is not None for matrix in self._matrices)

    @property
    def has_floats(self) -> bool:
        return any(matrix is None for matrix in self._matrices)

    @property
    def exact_float(self) -> Format:
        """The smallest float format that holds all of them: float32 has room for a code times a scale of 16 bits."""
        floats = {fmt for fmt in FLOATS if fmt.value in self.labels}
        codes = [matrix for matrix in self._matrices if matrix is not None]
        if codes:
            floats.add(Format.BF16 if all(_has_powers(matrix) for matrix in codes) else Format.F32)
        return floats.pop() if len(floats) == 1 else Format.F32

    @property
    def on_cores(self) -> Format:
        """The format where none of codes holds them: exact, unless codes would take 32 bits for that."""
        if not self.has_floats:
            return Format.Q8
        exact = self.exact_float
        return Format.Q8 if self.has_codes and exact is Format.F32 else exact

    def changes(self, fmt: Format) -> bool:
        """Does the format round a number in a few rows of each matrix? It is one of floats, or q8."""
        if fmt is Format.F32:
            return False
        names = [name for name in self.names if self._checkpoint.stored_as(name) != fmt.value]
        each = max(1, min(_SAMPLED_ROWS, _ALL_SAMPLED_ROWS // max(1, len(names))))
        for name in names:
            rows = prod(self._checkpoint.shape(name)[:-1])
            for row in range(0, rows, -(-rows // each)):
                if not _holds(fmt, self._checkpoint.rows(name, row, row + 1)):
                    return True
        return False

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


def _has_powers(matrix: Quantised) -> bool:
    """Are its numbers codes of a few bits times powers of two? Those are exact in bfloat16."""
    return isinstance(matrix, StoredMatrix) and matrix.kind.is_float and matrix.scale_kind == "e8m0"


def _holds(fmt: Format, values: NDArray[np.float32]) -> bool:
    """Does a format of floats hold all values? Of q8, which is taken where nothing holds them, it says no."""
    if fmt is Format.BF16:
        return not (np.ascontiguousarray(values).view(np.uint32) & 0xFFFF).any()
    with np.errstate(over="ignore"):
        return fmt is Format.F32 or (
            fmt is Format.F16 and np.array_equal(values.astype(np.float16).astype(np.float32), values)
        )


def _notes(
    backend: str, stored: Mapping[str, _Stored], chosen: Mapping[str, Format], rounded: Sequence[str]
) -> tuple[str, ...]:
    """A sentence for each format that is rounded, or takes more memory than the file, with the stages that have it."""
    stages: dict[tuple[str, Format, bool], list[str]] = {}
    for name, part in stored.items():
        fmt = chosen[name]
        floats = fmt in FLOATS and (part.has_codes or (fmt is Format.F32 and part.labels != ("f32",)))
        if name in rounded or floats or fmt is Format.WIDE:
            stages.setdefault((part.label, fmt, name in rounded), []).append(name)
    return tuple(_note(backend, *key, names) for key, names in stages.items())


def _note(backend: str, label: str, fmt: Format, rounded: bool, stages: Sequence[str]) -> str:
    layout = LAYOUTS[backend][fmt]
    made = f"{fmt.value}, {8 * layout.bytes / layout.k:g} bits a weight ({', '.join(stages)})"
    if rounded:
        keep = "--dtype f32" if backend == "cpu" else "--backend cpu --dtype f32"
        return (
            f"Weights stored as {label} are rounded to {made} by the {backend} backend. Use {keep} to keep their "
            "numbers."
        )
    less = " Use --dtype q8 to round them to 8.5 bits." if backend == "cpu" and fmt in FLOATS else ""
    return (
        f"Weights stored as {label} become {made}: no smaller format that the {backend} backend reads holds them "
        f"exactly.{less}"
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

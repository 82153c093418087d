"""The quantization_config of compressed-tensors: groups of modules, each with a scheme for its weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from monotape.errors import CheckpointError, UnsupportedModel
from monotape.models.fields import Fields
from monotape.weights.quantised.compressed_matrix import (
    ENDS,
    FORMATS,
    WeightScheme,
    compressed_matrix,
    holds_matrix,
)
from monotape.weights.quantised.compressed_presets import PRESETS, Preset
from monotape.weights.quantised.method import ACTIVATIONS_NOTE, GROUP_LIMIT, Listed
from monotape.weights.quantised.names import REGULAR, matches_expression
from monotape.weights.quantised.stored import StoredMatrix
from monotape.weights.quantised.tensors import ModuleTensors

LINEAR = "Linear"  # the class of every matrix but the embedding
MX_FORM = "mxfp4-pack-quantized"
MIXED = "mixed-precision"  # each group names its own format
#: `provider` is AutoRound's, which writes this format too.
_HARMLESS = frozenset((
    "quant_method", "quantization_status", "global_compression_ratio", "version", "provider",
))  # fmt: skip
_HARMLESS_OF_WEIGHTS = frozenset(("observer", "observer_kwargs", "scale_dtype", "zp_dtype"))
_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")


@dataclass(frozen=True, slots=True)
class Group:
    """Modules by name, "re:" pattern or class, and how their weights are stored; None: as they are."""

    targets: tuple[str, ...]
    weights: WeightScheme | None

    def rank(self, module: str) -> int | None:
        """How closely a target names the module: by name, by pattern, by class; None: not at all."""
        ranks = [rank for target in self.targets if (rank := _rank(module, target)) is not None]
        return min(ranks, default=None)


def _rank(module: str, target: str) -> int | None:
    if target.startswith(REGULAR):
        return 1 if matches_expression(module, target) else None
    if target == module:
        return 0
    return 2 if target == LINEAR else None


@dataclass(frozen=True, slots=True)
class Compressed:
    """`parents`: entries of `ignore` without a pattern, as the starts of the names of modules below them."""

    groups: tuple[Group, ...]
    ignore: Listed
    parents: tuple[str, ...]
    activations: bool  # some are to be quantised, or the KV cache is

    name = "compressed-tensors"
    ends = ENDS

    @property
    def notes(self) -> tuple[str, ...]:
        return (ACTIVATIONS_NOTE,) if self.activations else ()

    def quantises(self, module: str) -> bool | None:
        """An ignored name is that of one module, and says nothing of the modules below it.

        The library leaves those quantised; vLLM reads experts as plain if their parent is ignored. The tensors decide.
        """
        if self.ignore.names(module) or self._scheme(module) is None:
            return False
        return None if module.startswith(self.parents) else True

    def stores(self, tensors: ModuleTensors) -> bool:
        return holds_matrix(tensors)

    def matrix(self, tensors: ModuleTensors, name: str) -> StoredMatrix:
        scheme = self._scheme(tensors.module)
        assert scheme is not None, f"{tensors.module} is not quantised"
        return compressed_matrix(scheme, tensors, name)

    def _scheme(self, module: str) -> WeightScheme | None:
        ranked = [(rank, group) for group in self.groups if (rank := group.rank(module)) is not None]
        if not ranked:
            return None
        best = min(rank for rank, _ in ranked)
        schemes = {group.weights for rank, group in ranked if rank == best}
        if len(schemes) > 1:
            raise CheckpointError(
                f"Two config_groups of the quantization_config claim {module}, and differ.",
                "The config contradicts itself: use another checkpoint.",
            )
        return schemes.pop()


def read_compressed(fields: Fields) -> Compressed:
    """The quantization_config of a compressed-tensors checkpoint; a field that it does not know is an error."""
    _require_compressed(fields)
    no_transforms: tuple[Any, ...] = ({}, {"config_groups": {}})
    fields.fixed({"transform_config": no_transforms, "moe_sparsity_config": ({},)}, "compressed-tensors")
    _require_dense(fields)
    form = fields.optional_text("format")
    if form not in (*FORMATS, MIXED):
        raise UnsupportedModel(
            f"{fields.says('format')}, which is not supported.", f"Supported: {', '.join(FORMATS)}."
        )
    groups, activations = [], fields.table("kv_cache_scheme") is not None
    for group, quantised in _read_groups(fields, None if form == MIXED else form):
        groups.append(group)
        activations |= quantised
    ignore = fields.names("ignore") or ()
    fields.finish("compressed-tensors", _HARMLESS)
    parents = tuple(f"{name}." for name in ignore if not name.startswith(REGULAR))
    return Compressed(tuple(groups), Listed(tuple(_exact(ignore))), parents, activations)


def _exact(names: tuple[str, ...]) -> Iterator[str]:
    """A name of this method is a whole one, or that of the class of all matrices; steps of a path are not."""
    for name in names:
        if name == LINEAR:
            yield f"{REGULAR}.*"
        else:
            yield name if name.startswith(REGULAR) else f"{REGULAR}{re.escape(name)}$"


def _require_compressed(fields: Fields) -> None:
    """Early files call themselves frozen and are compressed all the same; the weights have to be, in any case."""
    status = fields.optional_text("quantization_status")
    if status not in (None, "compressed", "frozen"):
        raise UnsupportedModel(
            f"{fields.says('quantization_status')}: its weights were never compressed.",
            "Save the model with compressed weights, or use another checkpoint.",
        )


def _require_dense(fields: Fields) -> None:
    """Sparse weights are stored in other ways; an empty section, or one of dense weights, says nothing."""
    sparsity = fields.table("sparsity_config")
    if sparsity is None:
        return
    form = sparsity.optional_text("format")
    if sparsity.keys() and form != "dense":
        raise UnsupportedModel(
            f"{fields.says('sparsity_config')}: sparse weights are not supported.",
            "Use a checkpoint that is quantised only.",
        )


def _read_groups(fields: Fields, form: str | None) -> Iterator[tuple[Group, bool]]:
    table = fields.table("config_groups")
    names = () if table is None else table.keys()
    if table is None or not names:
        raise fields.wrong("config_groups", "must name a group at least")
    for name in names:
        if isinstance(table.anything(name), list | tuple):
            yield _read_preset(table, name, form)
            continue
        if not isinstance(table.anything(name), Mapping):
            raise table.wrong(name, "must be an object, or the list of targets of a preset")
        group = table.table(name)
        assert group is not None, "an object"
        targets = group.names("targets")
        if not targets:
            raise group.wrong("targets", "must list modules")
        activations = [group.table(end) for end in ("input_activations", "output_activations")]
        own = group.optional_text("format")
        if own is not None and form is not None and own != form:
            raise group.wrong("format", f"the format of all groups is {form}")
        weights = group.table("weights")
        scheme = None if weights is None else _read_weights(weights, group, own or form)
        group.finish("compressed-tensors")
        yield Group(targets, scheme), activations != [None, None]


def _read_preset(table: Fields, name: str, form: str | None) -> tuple[Group, bool]:
    """A group whose name is that of a scheme, in any case, and whose value lists the targets."""
    preset: Preset | None = PRESETS.get(name.upper())
    if preset is None:
        raise UnsupportedModel(
            f"{table.says(name)}, and {name} is no preset that is supported.",
            f"Supported: {', '.join(PRESETS)}.",
        )
    targets = table.names(name)
    if not targets:
        raise table.wrong(name, "must list modules")
    if preset.weights is None:
        return Group(targets, None), preset.activations
    group = Fields({"format": form}, prefix=f"{table.label(name)}.")
    weights = Fields(preset.weights, prefix=f"{table.label(name)}.weights.")
    return Group(targets, _read_weights(weights, group, form)), preset.activations


def _read_weights(weights: Fields, group: Fields, form: str | None) -> WeightScheme:
    if form is None or form not in FORMATS:
        raise UnsupportedModel(
            f"{group.says('format')}, which is not supported.", f"Supported: {', '.join(FORMATS)}."
        )
    bits, kind = weights.integer("num_bits", 1, 16, 8), weights.optional_text("type") or "int"
    if (kind, bits) not in FORMATS[form]:
        known = " or ".join(f"{name} of {count} bits" for name, count in FORMATS[form])
        raise UnsupportedModel(
            f"{weights.says('num_bits')} and type = {kind}, which is not supported for {form}.",
            f"Supported: {known}.",
        )
    strategy, size = _read_strategy(weights)
    sides = _read_block(weights)
    if (strategy == "block") != (sides is not None):
        raise weights.wrong(
            "block_structure", "must be two numbers with the strategy block, and with no other"
        )
    # A draft of MXFP4, which AutoRound wrote, says here that scales are powers of two; the format says it since.
    weights.fixed({"dynamic": (False,), "is_mx": (form == MX_FORM,)}, form)
    symmetric = weights.flag("symmetric", True)
    if not symmetric and kind == "float":
        raise weights.wrong("symmetric", "floats have no zero points")
    scheme = WeightScheme(
        form, kind, bits, strategy, size, sides, symmetric, _read_order(weights),
    )  # fmt: skip
    weights.finish("compressed-tensors", _HARMLESS_OF_WEIGHTS)
    return scheme


def _read_block(weights: Fields) -> tuple[int, int] | None:
    """Rows and columns of a block: [128, 128], or as early versions of the library had it, "128x128"."""
    written: Any = weights.anything("block_structure")
    if isinstance(written, str):
        sides = re.fullmatch(r"([1-9]\d{0,6})x([1-9]\d{0,6})", written)
        found = None if sides is None else tuple(int(side) for side in sides.groups())
    else:
        found = weights.integers("block_structure", 1, GROUP_LIMIT)
    if written is None:
        return None
    if found is None or len(found) != 2:
        raise weights.wrong("block_structure", "must be two numbers, rows and columns")
    return found[0], found[1]


def _read_strategy(weights: Fields) -> tuple[str, int | None]:
    size = weights.optional_integer("group_size", -1, GROUP_LIMIT)
    strategy = weights.optional_text("strategy")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy not in _STRATEGIES:
        raise UnsupportedModel(
            f"{weights.says('strategy')}, which is not supported for weights.",
            f"Supported: {', '.join(_STRATEGIES)}.",
        )
    grouped = strategy in ("group", "tensor_group")
    if grouped != (size is not None and size > 0):
        raise weights.wrong("group_size", f"the strategy is {strategy}")
    return strategy, size if grouped else None


def _read_order(weights: Fields) -> bool:
    """Are the columns of a group scattered? Other orders changed only how the file was made."""
    order = weights.anything("actorder")
    if order in (None, False, "weight", "static"):
        return False
    if order in (True, "group", "dynamic"):
        return True
    raise weights.wrong("actorder", "must be null, weight, static, group or dynamic")

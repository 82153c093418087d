"""What every method of quantisation offers: which modules it quantises, and their matrices as stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from monotape.errors import CheckpointError, UnsupportedModel
from monotape.models.fields import Fields
from monotape.weights.quantised.names import HEAD_MODULE, REGULAR, listed, parts_of
from monotape.weights.quantised.stored import StoredMatrix
from monotape.weights.quantised.tensors import ModuleTensors

ACTIVATIONS_NOTE = "The stored quantisation of activations is not applied: activations keep 16 bits or more."
_SKIPPED = "-:"
#: What tools write of how they made an AWQ or a GPTQ file, and of how they carry out the product. GPTQModel keeps most
#: of it in `meta`; its early versions, AutoGPTQ and transformers write some of it beside the fields of the format.
_MADE = frozenset((
    "quant_method", "meta", "quantizer", "uri", "damp_percent", "damp_auto_increment", "static_groups",
    "true_sequential", "mse", "act_group_aware", "gptaq", "gptaq_alpha", "gptaq_memory_device", "failsafe", "pack_impl",
    "offload_to_disk", "offload_to_disk_path", "tokenizer", "dataset", "model_seqlen", "batch_size", "pad_token_id",
    "max_input_length", "cache_block_outputs", "block_name_to_quantize", "module_name_preceding_first_block",
    "exllama_config",
))  # fmt: skip
#: What AutoRound writes of its search into files of AWQ and GPTQ.
_SEARCH = frozenset((
    "provider", "autoround_version", "iters", "lr", "minmax_lr", "nsamples", "seqlen", "amp", "low_gpu_mem_usage",
    "enable_quanted_input", "enable_minmax_tuning", "enable_norm_bias_tuning", "gradient_accumulate_steps",
    "to_quant_block_names", "scale_dtype",
))  # fmt: skip
#: What it writes of activations, all of which say nothing where `act_bits` is 16.
_ACTIVATIONS = frozenset(("act_group_size", "act_sym", "act_dynamic", "act_data_type"))
GROUP_LIMIT = 1 << 20  # columns of a group: more than any matrix has


class Method(Protocol):
    """One quantization_config, understood."""

    @property
    def name(self) -> str:
        """The quant_method."""
        ...

    @property
    def ends(self) -> frozenset[str]:
        """How the names of tensors end that only this method stores."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know about how the file is read."""
        ...

    def quantises(self, module: str) -> bool | None:
        """Does the config say that this linear module is quantised? None: it leaves that to the tensors."""
        ...

    def stores(self, tensors: ModuleTensors) -> bool:
        """Are the module's tensors those of a quantised matrix?"""
        ...

    def matrix(self, tensors: ModuleTensors, name: str) -> StoredMatrix:
        """The matrix of a module that `stores` one, its headers checked."""
        ...


@dataclass(frozen=True, slots=True)
class Listed:
    """A list of modules that stay as they are."""

    patterns: tuple[str, ...]

    def names(self, module: str) -> bool:
        """Is the module in the list? A fused one is if all its parts are; a part alone cannot be."""
        if listed(module, self.patterns):
            return True
        parts = parts_of(module)
        named = [part for part in parts if listed(part, self.patterns)]
        if named and len(named) < len(parts):
            raise CheckpointError(
                f"The quantization_config leaves {named[0]} alone, which is only a part of {module}.",
                "A fused matrix is quantised as a whole or not at all: use another checkpoint.",
            )
        return bool(named)


def read_list(fields: Fields, *names: str) -> Listed:
    """The modules that stay as they are, under one of the list's names; without a list, the head alone.

    A flag `lm_head` says that the head is quantised too.
    """
    found = {name: value for name in names if (value := fields.names(name)) is not None}
    if len(set(found.values())) > 1:
        raise fields.wrong(names[0], f"{names[1]} says something else")
    patterns = next(iter(found.values()), (HEAD_MODULE,))
    if fields.flag("lm_head", False):
        patterns = tuple(name for name in patterns if name != HEAD_MODULE)
    return Listed(patterns)


def finish_integers(fields: Fields, method: str, harmless: frozenset[str]) -> None:
    """Refuses the fields of an AWQ or a GPTQ checkpoint that nothing has read and that may change its numbers.

    `harmless` names what only this method's files say; the names that both methods share are known here.
    """
    fields.fixed({"data_type": ("int",), "act_bits": (16,)}, method)
    fields.finish(method, harmless | _MADE | _SEARCH | _ACTIVATIONS)


def read_skipped(fields: Fields) -> tuple[str, ...]:
    """The patterns of modules that `dynamic`, a field of GPTQModel and AutoRound, leaves as they are.

    A key is an expression for the start of a name. After "-:" the modules are skipped; after "+:", or alone, they have
    other bits, or another group size.
    """
    table = fields.table("dynamic")
    if table is None:
        return ()
    found, names = [], table.keys()
    for name in names:
        if not name.startswith(_SKIPPED) or table.anything(name) not in (None, {}):
            raise UnsupportedModel(
                f"{table.says(name)}, which gives some modules a quantisation of their own.",
                f'Use a checkpoint with one quantisation for all modules; `dynamic` may skip some, after "{_SKIPPED}".',
            )
        found.append(f"{REGULAR}{name.removeprefix(_SKIPPED)}")
    return tuple(found)


def read_group_size(fields: Fields) -> int | None:
    """The columns of a group; None: all of them are one group."""
    size = fields.integer("group_size", -1, GROUP_LIMIT, 128)
    if size == 0:
        raise fields.wrong("group_size", "must be positive, or -1 for whole columns")
    return None if size == -1 else size


def group_count(tensors: ModuleTensors, columns: int, size: int | None) -> int:
    """The groups of a row of that many columns; a group that ends in the middle has no defined layout."""
    if size is None:
        return 1
    if columns % size:
        raise CheckpointError(
            f"{tensors.source}: {tensors.module} has {columns} columns, which groups of {size} do not divide.",
            "Use a checkpoint with another group_size.",
        )
    return columns // size

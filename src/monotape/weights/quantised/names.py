"""Which modules a quantisation leaves alone: the lists of names and patterns in a quantization_config."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence

from monotape.errors import ModelError

REGULAR = "re:"
#: Matrices that the kernels multiply as one, by the name of the fused one that some families store.
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),  # an expert's gate and up in Mixtral
}
#: Modules that are no linear layers of a block: methods leave them alone unless a config says otherwise.
EMBEDDING_MODULES = frozenset(("model.embed_tokens", "model.tok_embeddings"))
HEAD_MODULE = "lm_head"
_ROUTERS = (".mlp.gate", ".mlp.router", ".block_sparse_moe.gate")  # how the names of routers end


def may_be_plain(module: str) -> bool:
    """May the module be stored plain though no list leaves it alone?

    Embeddings and heads are no layers of a block. Writers keep a router as it is, and many do not list it, because
    no engine quantises one.
    """
    return module in EMBEDDING_MODULES or module == HEAD_MODULE or module.endswith(_ROUTERS)


def listed(module: str, patterns: Iterable[str]) -> bool:
    """Does a list name the module? Regular expressions after "re:", else names or globs of whole steps of its path."""
    return any(
        matches_expression(module, pattern) if pattern.startswith(REGULAR) else _has_steps(module, pattern)
        for pattern in patterns
    )


def matches_expression(module: str, pattern: str) -> bool:
    """Does the expression after "re:" match the start of the name, as compressed-tensors has it?"""
    try:
        return re.match(pattern.removeprefix(REGULAR), module) is not None
    except re.error as error:
        raise ModelError(
            f"config.json: quantization_config has the pattern {pattern!r}, which is no regular expression: {error}.",
            "The file is damaged or edited.",
        ) from error


def parts_of(module: str) -> tuple[str, ...]:
    """The names of the modules that a fused one stands for; its own name if it is none."""
    parent, _, last = module.rpartition(".")
    return tuple(f"{parent}.{part}" for part in FUSED.get(last, ())) or (module,)


def siblings_of(module: str) -> tuple[str, ...]:
    """The modules that the kernels multiply together with this one, itself included."""
    parent, _, last = module.rpartition(".")
    together = next((parts for parts in FUSED.values() if last in parts), ())
    return tuple(f"{parent}.{part}" for part in together) or (module,)


def _has_steps(module: str, pattern: str) -> bool:
    steps: Sequence[str] = module.split(".")
    wanted = [step for step in pattern.split(".") if step]  # "mlp.gate." is written for "mlp.gate"
    if not wanted:
        return False
    for start in range(len(steps) - len(wanted) + 1):
        window = steps[start : start + len(wanted)]
        if all(fnmatch.fnmatchcase(step, want) for step, want in zip(window, wanted, strict=True)):
            return True
    return False

"""The matrices of a layer, in order, and the buffer that each reads and writes.

Attention stands between the matrix that writes queries, keys and values and the one that reads its result. A family
whose layers have other matrices lists them in its own file; compiler, reference and kernel walk the list.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix of a layer. Its rows are those of its parts, one part after another."""

    name: str
    parts: tuple[str, ...]  # roles of its tensors
    reads: str  # "residual", "attended" or "activation"
    writes: str  # "query", "residual" or "activation"
    gain: str | None = None  # the norm of its input; None: the input is read as it is
    bias: str | None = None  # added where the model has one
    gated: bool = False  # two parts, gate and up: silu(gate) * up


DENSE: tuple[Matrix, ...] = (
    Matrix("qkv", ("q", "k", "v"), "residual", "query", gain="attention_norm", bias="qkv_bias"),
    Matrix("output", ("output",), "attended", "residual"),
    Matrix("gate_up", ("gate", "up"), "residual", "activation", gain="ffn_norm", gated=True),
    Matrix("down", ("down",), "activation", "residual"),
)


def modules_of(layer: tuple[Matrix, ...]) -> tuple[tuple[Matrix, ...], ...]:
    """The matrices of a layer in groups that end with a sum into the residual: attention, feed-forward, others."""
    modules: list[tuple[Matrix, ...]] = []
    begun: tuple[Matrix, ...] = ()
    for matrix in layer:
        begun = (*begun, matrix)
        if matrix.writes == "residual":
            modules.append(begun)
            begun = ()
    assert not begun, "a layer ends with a sum into the residual"
    return tuple(modules)

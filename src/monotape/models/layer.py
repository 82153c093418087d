"""What a layer is made of: the matrices that a token passes in it, in order, and what each reads and writes.

Attention stands between the matrix that writes queries, keys and values and the one that reads what was attended to. A
family whose layers have other matrices says so in its own file; everything after it walks this list.
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
    gated: bool = False  # two parts, a gate and what it lets through: silu(gate) * up


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

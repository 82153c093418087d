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
    writes: str  # "query", "choice", "residual" or "activation"
    gain: str | None = None  # the norm of its input; None: the input is read as it is
    bias: str | None = None  # added where the model has one
    gated: bool = False  # two parts, gate and up, which Gating makes one
    routed: bool = False  # every expert has one, and a token passes those that the router chose


DENSE: tuple[Matrix, ...] = (
    Matrix("qkv", ("q", "k", "v"), "residual", "query", gain="attention_norm", bias="qkv_bias"),
    Matrix("output", ("output",), "attended", "residual"),
    Matrix("gate_up", ("gate", "up"), "residual", "activation", gain="ffn_norm", gated=True),
    Matrix("down", ("down",), "activation", "residual"),
)

#: A layer whose feed-forward block is experts: experts.py says how a router's logits, the "choice", become weights.
SPARSE: tuple[Matrix, ...] = (
    Matrix("qkv", ("q", "k", "v"), "residual", "query", gain="attention_norm", bias="qkv_bias"),
    Matrix("output", ("output",), "attended", "residual", bias="output_bias"),
    Matrix("router", ("router",), "residual", "choice", gain="ffn_norm", bias="router_bias"),
    Matrix(
        "gate_up", ("gate", "up"), "residual", "activation", gain="ffn_norm", bias="gate_up_bias",
        gated=True, routed=True,
    ),
    Matrix("down", ("down",), "activation", "residual", bias="down_bias", routed=True),
)  # fmt: skip


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

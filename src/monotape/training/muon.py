"""Muon for the matrices of layers, Adam for the embedding and the norms' gains.

A step of Muon is the momentum with all its singular values brought near 1. A module's matrix is taken whole, all
lanes together, in every arm: so arms differ in how lanes talk and in nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from monotape.training.settings import Settings

#: An odd polynomial a x + b x^3 + c x^5 whose iterates carry (0, 1] close to 1; Keller Jordan's coefficients.
POLYNOMIAL = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
BETAS = (0.9, 0.95)
EPS = 1e-10
_ROW_SPLIT = ("wq", "wk", "wv", "w1", "w3")  # lanes hold rows; wo and w2: columns


def orthogonalised(matrices: Tensor) -> Tensor:
    """[count, rows, columns], each with singular values near 1, in the type of the input's products."""
    a, b, c = POLYNOMIAL
    x = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    made: Tensor = x.mT if matrices.shape[-2] > matrices.shape[-1] else x
    return made


class Optimizer:
    """All parameters of a model. `state` is all that a later process needs to go on with the same bits."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self._settings = settings
        named = dict(model.named_parameters())
        self._matrices = {name: value for name, value in named.items() if value.dim() == 3}
        self._others = {name: value for name, value in named.items() if value.dim() != 3}
        self._momenta = {name: torch.zeros_like(value) for name, value in self._matrices.items()}
        self._means = {name: torch.zeros_like(value) for name, value in self._others.items()}
        self._squares = {name: torch.zeros_like(value) for name, value in self._others.items()}
        self._groups = _by_shape(self._matrices)
        self._steps = 0

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One step with the gradients that are there, which are cleared."""
        self._steps += 1
        for names in self._groups.values():
            self._step_matrices(names, rate * self._settings.matrix_rate)
        self._step_others(rate * self._settings.embedding_rate)
        for value in (*self._matrices.values(), *self._others.values()):
            value.grad = None

    def _step_matrices(self, names: list[str], rate: float) -> None:
        momentum = self._settings.momentum
        updates = []
        for name in names:
            gradient, buffer = self._matrices[name].grad, self._momenta[name]
            assert gradient is not None
            buffer.lerp_(gradient, 1 - momentum)
            updates.append(whole(name, torch.lerp(gradient, buffer, momentum)))  # Nesterov's
        stacked = torch.stack(updates)
        turned = orthogonalised(stacked.to(torch.bfloat16) if stacked.is_cuda else stacked).to(stacked.dtype)
        rows, columns = turned.shape[-2:]
        scale = max(1.0, rows / columns) ** 0.5
        for name, update in zip(names, turned, strict=True):
            value = self._matrices[name]
            value.mul_(1 - rate * self._settings.matrix_decay).add_(
                by_lane(name, update, value), alpha=-rate * scale
            )

    def _step_others(self, rate: float) -> None:
        first, second = BETAS
        for name, value in self._others.items():
            gradient, mean, square = value.grad, self._means[name], self._squares[name]
            assert gradient is not None
            mean.lerp_(gradient, 1 - first)
            square.lerp_(gradient.square(), 1 - second)
            size = (square / (1 - second**self._steps)).sqrt_().add_(EPS)
            value.addcdiv_(mean, size, value=-rate / (1 - first**self._steps))

    def state(self) -> dict[str, Any]:
        return {
            "steps": self._steps,
            "momenta": self._momenta,
            "means": self._means,
            "squares": self._squares,
        }

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        self._steps = state["steps"]
        for kind, own in (("momenta", self._momenta), ("means", self._means), ("squares", self._squares)):
            for name, value in own.items():
                value.copy_(state[kind][name])


def whole(name: str, value: Tensor) -> Tensor:
    """The matrix [rows, columns] of all lanes, of one stored [lane, rows, columns]."""
    if name.split(".")[-2] in _ROW_SPLIT:
        return value.flatten(0, 1)
    return value.transpose(0, 1).flatten(1, 2)


def by_lane(name: str, matrix: Tensor, like: Tensor) -> Tensor:
    """What `whole` was given."""
    lanes, rows, columns = like.shape
    if name.split(".")[-2] in _ROW_SPLIT:
        return matrix.view(lanes, rows, columns)
    return matrix.view(rows, lanes, columns).transpose(0, 1)


def _by_shape(matrices: Mapping[str, Tensor]) -> dict[tuple[int, ...], list[str]]:
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, value in matrices.items():
        groups.setdefault(tuple(whole(name, value).shape), []).append(name)
    return groups

"""The tensors of one quantised module, taken by the ends of their names; dtypes and shapes are checked on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.errors import CheckpointError
from monotape.weights.quantised.codes import SCALE_KINDS, SCALE_WORDS, scales_as_float32
from monotape.weights.quantised.stored import DAMAGED

_WORDS = {**SCALE_WORDS, "i8": "|i1", "i32": "<i4", "i64": "<i8"}
FLOAT_SCALES = ("f32", "f16", "bf16")
_MISMATCH = "The weights and their quantization_config do not belong together: fetch the folder again."


@dataclass(frozen=True, slots=True)
class RawTensor:
    """One tensor of a file: its header, and its bytes when they are asked for."""

    name: str
    shape: tuple[int, ...]
    stored: str  # "f8_e4m3", "i32", ...
    bytes: Callable[[], NDArray[np.uint8]]

    def array(self) -> NDArray[Any]:
        """A view of the file in the dtype that it has."""
        return self.bytes().view(_WORDS.get(self.stored, "|u1")).reshape(self.shape)

    def refusal(self, rule: str) -> CheckpointError:
        shape = " x ".join(map(str, self.shape)) or "a single number"
        return CheckpointError(f"Tensor {self.name} is {self.stored}, {shape}, but {rule}.", _MISMATCH)

    def require(self, shape: Sequence[int], reason: str) -> None:
        if self.shape != tuple(shape):
            wanted = " x ".join(map(str, shape))
            raise self.refusal(f"{reason} asks for {wanted}")


class ModuleTensors:
    """The tensors of one module by the ends of their names: "weight", "weight_scale", ..."""

    def __init__(self, source: str, module: str, tensors: Mapping[str, RawTensor]) -> None:
        self.source, self.module = source, module
        self._tensors = tensors
        self._taken: set[str] = set()

    @property
    def ends(self) -> frozenset[str]:
        return frozenset(self._tensors)

    @property
    def taken(self) -> frozenset[str]:
        return frozenset(self._taken)

    def stored(self, end: str) -> str | None:
        tensor = self._tensors.get(end)
        return None if tensor is None else tensor.stored

    def take(self, end: str, dtypes: Sequence[str], dimensions: int | None = None) -> RawTensor:
        """The tensor of that name, of one of these dtypes."""
        tensor = self.optional(end, dtypes)
        if tensor is None:
            have = ", ".join(sorted(self._tensors))
            raise CheckpointError(
                f"{self.source}: {self.module} has no {end}, only {have}.",
                "A part of the quantised matrix is missing: fetch the folder again.",
            )
        if dimensions is not None and len(tensor.shape) != dimensions:
            raise tensor.refusal(f"it must have {dimensions} dimensions")
        if 0 in tensor.shape:
            raise tensor.refusal("it must not be empty")
        return tensor

    def optional(self, end: str, dtypes: Sequence[str]) -> RawTensor | None:
        tensor = self._tensors.get(end)
        if tensor is None:
            return None
        self._taken.add(end)
        if tensor.stored not in dtypes:
            raise tensor.refusal(f"it must be {' or '.join(dtypes)}")
        return tensor

    def refuse(self, end: str, reason: str) -> None:
        """No tensor of that name may be there."""
        if end in self._tensors:
            raise CheckpointError(f"{self.source}: {self.module} has {end}, but {reason}.", _MISMATCH)

    def check_numbers(self, ends: Sequence[str]) -> None:
        """Scales of activations: not used here, but a wrong one means a wrong file."""
        for end in ends:
            tensor = self.optional(end, FLOAT_SCALES)
            if tensor is not None:
                single_number(tensor)


def single_number(tensor: RawTensor) -> float:
    """The positive number that a tensor of one element holds."""
    if tensor.shape not in ((), (1,), (1, 1)):
        raise tensor.refusal("it must hold a single number")
    return float(positive_numbers(tensor)[0])


def positive_numbers(tensor: RawTensor) -> NDArray[np.float32]:
    """All numbers of a small tensor of scales."""
    if tensor.stored not in FLOAT_SCALES:
        raise tensor.refusal(f"it must be {' or '.join(FLOAT_SCALES)}")
    numbers = scales_as_float32(tensor.array().reshape(-1), SCALE_KINDS[tensor.stored])
    wrong = ~((numbers > 0) & (numbers < np.inf))
    if wrong.any():
        found = numbers[int(np.argmax(wrong))]
        raise CheckpointError(f"Tensor {tensor.name} holds {found}, which is no positive number.", DAMAGED)
    return numbers


def scale_rows(words: NDArray[Any], height: int, count: int) -> Callable[[int, int], NDArray[Any]]:
    """Reads one line of scales for each row, where `height` rows share one: [lines, groups] of the file."""
    if height == 1:
        return lambda start, stop: words[start:stop]
    if height >= count:
        return lambda start, stop: np.broadcast_to(words[:1], (stop - start, words.shape[1]))
    return lambda start, stop: words[np.arange(start, stop) // height]

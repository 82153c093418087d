"""gpt-oss keeps the experts of a layer in one tensor: here each expert's matrices have names and rows of their own.

`mlp.experts.gate_up_proj` has gate and up row by row: row 2 i is row i of gate, row 2 i + 1 that of up. As floats a
stack is [experts, k, rows], the other way round than every other matrix; as MXFP4 it is [experts, rows, k].
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.errors import CheckpointError
from monotape.models.gpt_oss import GPT_OSS
from monotape.weights.checkpoint import Checkpoint, Quantised
from monotape.weights.forwarding import ForwardingCheckpoint
from monotape.weights.quantised.stored import StoredMatrix
from monotape.weights.raw import RawMatrix

_STACK = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.)(gate_up_proj|down_proj)(_bias)?")
#: The matrices of a stack: names, and of every so many rows which one is theirs.
_PARTS = {"gate_up_proj": (("gate_proj", 0, 2), ("up_proj", 1, 2)), "down_proj": (("down_proj", 0, 1),)}
_DAMAGED = "The file is damaged or not this model's: fetch it again."


@dataclass(frozen=True, slots=True)
class _Member:
    """One expert's rows of a stack: `first`, `first` + `step`, ... of its `stack_rows`."""

    stack: str
    expert: int
    first: int
    step: int
    stack_rows: int
    columns: int  # 0: a bias

    @property
    def shape(self) -> tuple[int, ...]:
        rows = self.stack_rows // self.step
        return (rows, self.columns) if self.columns else (rows,)


def with_stacks(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint, with experts as matrices of their own where its family stacks them."""
    named = checkpoint.config.get("architectures")  # as the file has it, which nothing has checked yet
    ours = named == [GPT_OSS.architecture] or checkpoint.config.get("model_type") == GPT_OSS.name
    return ExpertStacks(checkpoint) if ours else checkpoint


class ExpertStacks(ForwardingCheckpoint):
    """A checkpoint (see checkpoint.py)."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._members: dict[str, _Member] = {}
        stacks = frozenset(name for name in checkpoint.names if _STACK.fullmatch(name))
        for name in sorted(stacks):
            self._members |= self._split(name)
        for name in sorted(self._members.keys() & checkpoint.names):
            raise CheckpointError(
                f"{self.source} has {name} twice, in a stack and by itself.", "Remove one of them."
            )
        self._names = (checkpoint.names - stacks) | self._members.keys()

    @property
    def names(self) -> frozenset[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        member = self._members.get(name)
        return self._checkpoint.shape(name) if member is None else member.shape

    def stored_as(self, name: str) -> str:
        member = self._members.get(name)
        return self._checkpoint.stored_as(name if member is None else member.stack)

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        member = self._members.get(name)
        if member is None:
            return self._checkpoint.rows(name, start, stop)
        if not member.columns:
            biases = self._checkpoint.rows(member.stack, member.expert, member.expert + 1)[0]
            return np.ascontiguousarray(biases[_range(member, start, stop)])
        matrix = self.stored_matrix(name)
        if matrix is not None:
            return matrix.dequantised(start, stop)
        halves = self.half_rows(name, start, stop)
        if halves is None:  # float32
            first = member.expert * member.columns
            whole = self._checkpoint.rows(member.stack, first, first + member.columns)
            return np.ascontiguousarray(whole[:, _range(member, start, stop)].T)
        if self.stored_as(name) == "bf16":
            return (halves.astype(np.uint32) << 16).view(np.float32)
        with np.errstate(invalid="ignore"):  # a signalling NaN is refused with its row
            return halves.view("<f2").astype(np.float32)

    def stored_matrix(self, name: str) -> Quantised | None:
        member = self._members.get(name)
        stack = self._checkpoint.stored_matrix(name if member is None else member.stack)
        if member is None or stack is None or not member.columns:
            return stack
        assert isinstance(stack, StoredMatrix), f"{name}: stacks have codes in groups"

        def some(read: Any) -> Any:
            def rows(start: int, stop: int) -> Any:
                first = member.expert * member.stack_rows + member.first + member.step * start
                last = max(first, first + member.step * (stop - start - 1) + 1)
                return read(first, last)[:: member.step]

            return rows

        return replace(
            stack, name=name, shape=member.shape, read_values=some(stack.read_values),
            read_scales=some(stack.read_scales),
        )  # fmt: skip

    def raw_matrix(self, name: str) -> RawMatrix | None:
        return None if name in self._members else self._checkpoint.raw_matrix(name)

    def integer_rows(
        self, name: str, start: int, stop: int
    ) -> tuple[NDArray[np.int8], NDArray[np.float16]] | None:
        return None if name in self._members else self._checkpoint.integer_rows(name, start, stop)

    def half_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint16] | None:
        member = self._members.get(name)
        if member is None:
            return self._checkpoint.half_rows(name, start, stop)
        words = self._checkpoint.mapped_halves(member.stack) if member.columns else None
        if words is None:
            return None
        first = member.expert * member.columns
        own = words[first : first + member.columns, _range(member, start, stop)]
        return np.ascontiguousarray(own.T)

    def mapped_halves(self, name: str) -> NDArray[np.uint16] | None:
        return None if name in self._members else self._checkpoint.mapped_halves(name)

    def release(self, name: str) -> None:
        member = self._members.get(name)
        self._checkpoint.release(name if member is None else member.stack)

    def _split(self, name: str) -> dict[str, _Member]:
        found = _STACK.fullmatch(name)
        assert found is not None
        (place, kind, bias), shape = found.groups(), self._checkpoint.shape(name)
        if len(shape) != (2 if bias else 3) or 0 in shape:
            raise CheckpointError(
                f"{self.source}: tensor {name} has shape {list(shape)}, but a stack of experts has "
                f"{'two' if bias else 'three'} dimensions.",
                _DAMAGED,
            )
        codes = self._checkpoint.stored_matrix(name) is not None
        rows = shape[1] if bias or codes else shape[2]
        columns = 0 if bias else shape[2] if codes else shape[1]
        parts = _PARTS[kind]
        if rows % len(parts):
            raise CheckpointError(
                f"{self.source}: tensor {name} has {rows} rows an expert, which gate and up cannot share.",
                _DAMAGED,
            )
        return {
            f"{place}{expert}.{part}.{'bias' if bias else 'weight'}": _Member(
                name, expert, first, step, rows, columns
            )
            for expert in range(shape[0])
            for part, first, step in parts
        }


def _range(member: _Member, start: int, stop: int) -> slice:
    """The rows of a stack's expert that are rows start..stop of the member."""
    assert 0 <= start <= stop <= member.shape[0], f"rows {start}..{stop} of {member}"
    return slice(member.first + member.step * start, member.first + member.step * stop, member.step)

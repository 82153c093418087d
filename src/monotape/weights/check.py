"""Do the weights fit the model? Every tensor that a spec names must be there, and none may be left over."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from monotape.errors import CheckpointError
from monotape.models.spec import ModelSpec, TensorSource
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.formats import is_readable, require_readable

Number = TypeVar("Number", np.float32, np.uint16)
Reader: TypeAlias = Callable[[int, int], NDArray[Number]]

#: Tensors that change nothing: position tables that some old files carry along.
_HARMLESS = re.compile(r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")
_NAMED_LEFTOVERS = 4
_MISMATCH = "The config and the weights come from different models, or the family is not quite this one."


def check_tensors(spec: ModelSpec, checkpoint: Checkpoint) -> None:
    """Refuses a checkpoint with a tensor that is missing, unused, or of another shape or format."""
    names = checkpoint.names
    expected: dict[str, list[int]] = {}
    for role, name, source in _sources(spec):
        if name not in names:
            raise CheckpointError(f"{checkpoint.source} has no tensor {name} ({role}).", _MISMATCH)
        require_readable(checkpoint.source, name, checkpoint.stored_as(name))
        shape = list(spec.shape_of(role))
        if source.rows is not None:
            assert source.rows[1] - source.rows[0] == shape[0], (
                f"{role} takes rows {source.rows}, needs {shape}"
            )
            shape[0] = max(source.rows[1], expected.get(name, [0])[0])
        if source.lanes:
            shape = _by_lane(shape, source)
        expected[name] = shape
    for name, shape in expected.items():
        found = list(checkpoint.shape(name))
        if found != shape:
            raise CheckpointError(
                f"{checkpoint.source}: tensor {name} has shape {found}, but the config asks for {shape}.",
                _MISMATCH,
            )
    _require_no_leftovers(spec, checkpoint, names - expected.keys())


def _by_lane(shape: list[int], source: TensorSource) -> list[int]:
    rows, columns = shape
    if source.split == "rows":
        return [source.lanes, rows // source.lanes, columns]
    return [source.lanes, rows, columns // source.lanes]


def _sources(spec: ModelSpec) -> Iterator[tuple[str, str, TensorSource]]:
    """Every (role, tensor name, source) of the model."""
    for role, source in spec.model_tensors.items():
        yield role, source.name, source
    for layer in range(spec.layers):
        for role, source in spec.layer_tensors.items():
            for expert in spec.experts_of(role):
                yield role, source.in_layer(layer, expert), source


def _require_no_leftovers(spec: ModelSpec, checkpoint: Checkpoint, unread: frozenset[str]) -> None:
    left = sorted(
        name for name in unread if not _HARMLESS.fullmatch(name) and not _is_zero_bias(checkpoint, name)
    )
    if left:
        shown = ", ".join(left[:_NAMED_LEFTOVERS]) + (", ..." if len(left) > _NAMED_LEFTOVERS else "")
        raise CheckpointError(
            f"{checkpoint.source} has {len(left)} tensors that a {spec.architecture} of {spec.layers} layers "
            f"does not use: {shown}.",
            _MISMATCH,
        )


def _is_zero_bias(checkpoint: Checkpoint, name: str) -> bool:
    """A bias of zeros adds nothing; writers of GPTQ files give one to every matrix."""
    if not name.endswith(".bias") or len(checkpoint.shape(name)) != 1:
        return False
    if not is_readable(checkpoint.stored_as(name)):
        return False
    return not checkpoint.rows(name, 0, checkpoint.shape(name)[0]).any()


def read_role(
    spec: ModelSpec, checkpoint: Checkpoint, role: str, layer: int | None, start: int, stop: int,
    expert: int | None = None,
) -> NDArray[np.float32]:  # fmt: skip
    """Rows start..stop of a role's tensor, finite, wherever they lie. `layer` is None outside the layers."""
    source = spec.model_tensors[role] if layer is None else spec.layer_tensors[role]
    name = source.name if layer is None else source.in_layer(layer, expert)
    rows = stored_rows(spec, role, source, partial(checkpoint.rows, name), start, stop)
    first = source.rows[0] if source.rows is not None else 0
    require_finite(name, rows, first + start)
    return rows


def stored_rows(
    spec: ModelSpec, role: str, source: TensorSource, read: Reader[Number], start: int, stop: int,
    columns: tuple[int, int] | None = None,
) -> NDArray[Number]:  # fmt: skip
    """Rows start..stop of a role's tensor, or some of their columns, whatever way it is stored.

    `read(first, last)` gives rows as they lie in the file: Checkpoint.rows, or another reader of the same tensor.
    """
    if not source.side_by_side:
        first = source.rows[0] if source.rows is not None else 0
        rows = read(first + start, first + stop)
        return rows if columns is None else rows[:, columns[0] : columns[1]]
    shape = spec.shape_of(role)
    count, width = shape[0], shape[1] // source.lanes  # of one lane's matrix
    low, high = columns or (0, shape[1])
    wanted = range(low // width, -(-high // width))
    pieces = [read(lane * count + start, lane * count + stop) for lane in wanted]
    return np.concatenate(pieces, axis=1)[:, low - wanted.start * width : high - wanted.start * width]


def require_finite(name: str, array: NDArray[np.float32], first_row: int) -> None:
    """Refuses rows with a NaN or an infinity. `array` starts with row `first_row` of the tensor."""
    finite = np.isfinite(array)
    if finite.all():
        return
    place = np.unravel_index(int(np.argmin(finite)), finite.shape)
    raise CheckpointError(
        f"Tensor {name} holds {array[place]} in row {first_row + int(place[0])}.",
        "The file is damaged or the training went wrong: fetch it again or use another checkpoint.",
    )

"""Columns that GPTQ has sorted by activation: `down` has them in the order of groups, and its input comes so too."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from backends.quantised_cases import WAYS, make_pair
from monotape.models.registry import spec_from_config
from monotape.models.spec import ModelSpec
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.open import open_checkpoint
from monotape.weights.quantised.stored import StoredMatrix
from monotape.weights.sorted_columns import SortedCheckpoint, with_sorted_columns

MLP = "model.layers.{}.mlp.{}_proj.weight"


def case(name: str, folder: Path) -> tuple[ModelSpec, Checkpoint]:
    opened = open_checkpoint(make_pair(WAYS[name].case, WAYS[name], folder)[0])
    return spec_from_config(opened.config), opened


def whole(checkpoint: Checkpoint, name: str) -> np.ndarray:
    return checkpoint.rows(name, 0, checkpoint.shape(name)[0])


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelSpec, Checkpoint, Checkpoint]:
    spec, opened = case("gptq-v2-sorted", tmp_path_factory.mktemp("sorted"))
    found = with_sorted_columns(spec, opened)
    assert isinstance(found, SortedCheckpoint)
    return spec, opened, found


def test_down_has_its_groups_in_order_and_gate_and_up_make_its_input_so(
    both: tuple[ModelSpec, Checkpoint, Checkpoint],
) -> None:
    spec, opened, found = both
    for layer in range(spec.layers):
        down = opened.stored_matrix(MLP.format(layer, "down"))
        assert isinstance(down, StoredMatrix) and down.order is not None
        np.testing.assert_array_equal(
            whole(found, down.name), whole(opened, down.name)[:, down.order], strict=True
        )
        in_order = found.stored_matrix(down.name)
        assert isinstance(in_order, StoredMatrix) and in_order.group_of is None
        for role in ("gate", "up"):
            name = MLP.format(layer, role)
            np.testing.assert_array_equal(whole(found, name), whole(opened, name)[down.order], strict=True)


def test_the_layer_computes_the_same(both: tuple[ModelSpec, Checkpoint, Checkpoint]) -> None:
    spec, opened, found = both
    given = np.random.default_rng(2).standard_normal(spec.width)

    def computed(checkpoint: Checkpoint) -> np.ndarray:
        gate, up, down = (
            whole(checkpoint, MLP.format(1, role)).astype(np.float64) for role in ("gate", "up", "down")
        )
        return down @ (np.tanh(gate @ given) * (up @ given))

    np.testing.assert_allclose(computed(found), computed(opened), rtol=1e-12)


def test_all_other_tensors_are_as_they_were(both: tuple[ModelSpec, Checkpoint, Checkpoint]) -> None:
    spec, opened, found = both
    changed = {MLP.format(layer, role) for layer in range(spec.layers) for role in ("gate", "up", "down")}
    assert changed < found.names == opened.names
    for name in found.names - changed:
        assert found.stored_as(name) == opened.stored_as(name)
        np.testing.assert_array_equal(whole(found, name), whole(opened, name), strict=True)


def test_parts_of_rows_are_read_by_many_threads_and_again_after_their_release(
    both: tuple[ModelSpec, Checkpoint, Checkpoint],
) -> None:
    _, _, found = both
    name = MLP.format(0, "up")
    expected = whole(found, name)
    cuts = list(range(0, len(expected), 7))
    for _ in range(2):
        found.release(name)
        with ThreadPoolExecutor(8) as pool:
            parts = list(pool.map(lambda start: found.rows(name, start, min(start + 7, len(expected))), cuts))
        np.testing.assert_array_equal(np.concatenate(parts), expected)


@pytest.mark.parametrize("name", ["gptq", "awq", "packed-4-phi3"])
def test_a_checkpoint_with_its_columns_in_order_stays_itself(tmp_path: Path, name: str) -> None:
    spec, opened = case(name, tmp_path)
    assert with_sorted_columns(spec, opened) is opened

"""Machines: ceilings, what fits, what launches cost, and the user's own figures."""

from __future__ import annotations

from typing import Any

import pytest

from monotape.errors import UsageError
from monotape.planner.box import ceilings, fit, launch_taxes
from planner.loads import box_of, load_of


def test_ceilings_are_bandwidth_over_bytes_for_all_devices() -> None:
    found = {one.name: one for one in ceilings(box_of("h200", 3), 2e9)}
    assert found["datasheet"].tokens_per_second == pytest.approx(3 * 4.8e12 / 2e9)
    assert found["effective"].tokens_per_second == pytest.approx(3 * 3.84e12 / 2e9)
    assert found["measured"].tokens_per_second == pytest.approx(3 * 4.58e12 / 2e9)
    assert "3 devices are taken to add up" in found["measured"].source


def test_an_unmeasured_device_has_two_ceilings_and_the_users_figure_makes_three() -> None:
    assert [one.name for one in ceilings(box_of("b200"), 1e9)] == ["datasheet", "effective"]
    own = ceilings(box_of("b200", bandwidth_tbs=7.1), 1e9)
    assert own[-1].name == "measured"
    assert own[-1].tokens_per_second == pytest.approx(7100)
    assert "your figure" in own[-1].source


def test_predictions_build_on_the_measured_bandwidth_else_on_the_effective() -> None:
    assert box_of("h200").best_bandwidth[0] == 4.58e12
    assert box_of("b200").best_bandwidth[0] == pytest.approx(6.4e12)
    assert box_of("mi300x").best_bandwidth[0] == 4.2e12


def test_what_fits() -> None:
    load = load_of("llama-3.1-70b")
    assert fit(load, box_of("h100"), 4096).fits is False
    assert fit(load, box_of("h100", 2), 4096).fits is True
    assert fit(load, box_of("h100", 2), 4096, sequences=30).fits is False
    assert fit(load, box_of("cpu", bandwidth_tbs=0.02), 4096).fits is None
    assert fit(load, box_of("cpu", bandwidth_tbs=0.02, memory_gb=200), 4096).fits is True
    two = fit(load, box_of("h100", 2), 1000)
    assert two.weights == load.weight_bytes / 2
    assert two.kv == load.shape.kv_stored_bytes(1000, 2) / 2


def test_launch_taxes_come_from_the_device_or_the_user() -> None:
    stream, graph = launch_taxes(box_of("h200", kernels_per_layer=7), 13)
    assert (stream.launch_us, graph.launch_us) == (3.75, 0.55)
    assert stream.token_us == 7 * 13 * 3.75
    assert stream.most_tokens_per_second == pytest.approx(1e6 / (7 * 13 * 3.75))
    (own,) = launch_taxes(box_of("m4-max", launch_us=2.0), 10)
    assert own.token_us == 200
    assert launch_taxes(box_of("m4-max"), 10) == ()


def test_links() -> None:
    assert box_of("h200").link[0] == 0
    assert box_of("h200", 8).link[0] == 3.84
    assert box_of("mi300x", 8).link[0] == 3.0
    assert box_of("rtx-4090", 2).link[0] is None
    assert box_of("rtx-4090", 2, link_us=11.0).link == (11.0, "your figure")


@pytest.mark.parametrize(
    "figures",
    [
        {"count": 0}, {"count": -3}, {"count": 10**18}, {"bandwidth_tbs": 0.0}, {"bandwidth_tbs": -1.0},
        {"memory_gb": 1e12}, {"link_us": 0.0}, {"launch_us": -4.5}, {"kernels_per_layer": 0},
    ],
)  # fmt: skip
def test_figures_that_cannot_be_are_refused(figures: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        box_of("h200", **figures)
    assert caught.value.hint


def test_a_cpu_needs_its_bandwidth() -> None:
    with pytest.raises(UsageError, match="monotape doctor"):
        box_of("cpu")

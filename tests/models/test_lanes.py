"""The steps that lanes take: the published formula, and the four settings of one mechanism."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monotape.models.lanes import Lanes, delayed, ladder, send_lag, silent, steps, tensor_parallel
from monotape.plan.types import Step


@pytest.mark.parametrize("lanes", [2, 4, 8])
@pytest.mark.parametrize("delay", [1, 2, 4])
def test_delayed_is_the_formula(lanes: int, delay: int) -> None:
    layers = 6
    made = steps(delayed(lanes, delay), 2 * layers)
    assert len(made) == 2 * layers
    for module, step in enumerate(made):
        sends = module < 2 * layers - delay
        if module < delay:
            assert step == Step(math.sqrt(lanes), sends, None, False)
        else:
            assert step == Step(1.0, sends, module - delay, False)


def test_tensor_parallel_waits_for_every_sum() -> None:
    assert steps(tensor_parallel(8), 6) == tuple(Step(0.0, True, module, True) for module in range(6))


def test_a_delay_of_nothing_is_tensor_parallel() -> None:
    assert steps(delayed(4, 0), 10) == steps(tensor_parallel(4), 10)


def test_ladder_reads_the_stream_one_module_late_and_loses_nothing() -> None:
    made = steps(ladder(4), 4)
    assert made == (
        Step(0.0, True, None, True), Step(0.0, True, 0, True), Step(0.0, True, 1, True), Step(0.0, True, 2, True),
        Step(0.0, False, 3, True),
    )  # fmt: skip


def test_silence_sends_nothing() -> None:
    assert steps(silent(4), 4) == (Step(2.0, False, None, False),) * 4


def test_early_sums_are_folded_at_once_and_again_later() -> None:
    made = steps(delayed(4, 2, "sum"), 6)
    assert made[:2] == (Step(0.0, True, 0, True), Step(0.0, True, 1, True))
    assert made[2] == Step(1.0, True, 0, False)


def test_silence_can_begin_with_sums() -> None:
    made = steps(Lanes(4, None, "sum", early_modules=2), 4)
    assert made[:2] == (Step(0.0, True, 0, True), Step(0.0, True, 1, True))
    assert made[2:] == (Step(2.0, False, None, False),) * 2


def test_lanes_differ_only_where_they_may() -> None:
    assert not tensor_parallel(4).apart
    assert not ladder(4).apart
    assert not delayed(1, 2).apart
    assert delayed(4, 2).apart
    assert silent(4).apart
    assert Lanes(4, 0, attention=False).apart


@given(
    lanes=st.integers(1, 8), delay=st.one_of(st.none(), st.integers(0, 9)), early=st.sampled_from(("scale", "sum")),
    own=st.sampled_from(("now", "with sum")), attention=st.booleans(), feed_forward=st.booleans(),
    layers=st.integers(1, 5),
)  # fmt: skip
def test_what_is_folded_was_sent_and_what_is_sent_is_folded(
    lanes: int, delay: int | None, early: str, own: str, attention: bool, feed_forward: bool, layers: int
) -> None:
    if own == "with sum" and (delay is None or not (attention and feed_forward)):
        own = "now"
    made = steps(Lanes(lanes, delay, early, None, own, attention, feed_forward), 2 * layers)
    assert len(made) >= 2 * layers
    folds = [(module, step.folds) for module, step in enumerate(made) if step.folds is not None]
    assert {source for _, source in folds} == {module for module, step in enumerate(made) if step.sends}
    assert all(source <= module for module, source in folds)
    assert send_lag(made) <= (delay or 0)

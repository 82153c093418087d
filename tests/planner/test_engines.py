"""Predictions: they give back the measurements they come from, and add up for several devices and users."""

from __future__ import annotations

import dataclasses

import pytest

from monotape.errors import UsageError
from monotape.planner.catalogue import table
from monotape.planner.compared import vllm_tokens
from monotape.planner.engines import (
    ROWS_PER_PASS,
    cpu_engine,
    find_engine,
    probe_points,
    share_engine,
    throughput_engine,
    unhidden_us,
)
from monotape.planner.load import Load, distinct_copies, power
from monotape.planner.precision import Precision
from monotape.planner.shape import FFN, ROUTED, Layer, ModelShape, Part
from planner.loads import box_of, load_of


def streaming_skeleton(layers: int, stages: int, size: float) -> Load:
    """A model like the probe's: matrices only."""
    part = Part(FFN, int(size / layers))
    shape = ModelShape("skeleton", (Layer((part,), (), stages, 0),) * layers, (), 1, None)
    return Load(shape, Precision("one byte", {FFN: 1.0}, 1.0, ""), 2.0)


@pytest.mark.parametrize(
    "point", table("peers")["streaming_probe"]["points"], ids=lambda point: point["shape"][:2]
)
def test_the_probe_is_given_back(point: dict[str, float]) -> None:
    """Speed and share of the ceiling as measured, but for the two stages (head and sample) that the probe lacks."""
    layers, stages = int(point["layers"]), int(point["stages_per_layer"])
    load = streaming_skeleton(layers, stages, point["gigabytes"] * 1e9)
    time = find_engine("monotape").time(load, box_of("h200"), 0, 1)
    more = (layers * stages + 2) / (layers * stages)
    assert 1e6 / (time.stream_us + time.exposed_us / more) == pytest.approx(
        point["tokens_per_second"], rel=0.002
    )
    share = time.stream_us / (time.stream_us + time.exposed_us / more)
    assert share == pytest.approx(point["ceiling_share"], abs=0.006)


def test_unhidden_time_lies_between_the_probes() -> None:
    (short, low), (middle, lowest), (long, high) = probe_points()
    assert unhidden_us(0) == unhidden_us(short) == low
    assert unhidden_us(middle) == lowest
    assert unhidden_us((middle + long) / 2) == pytest.approx((lowest + high) / 2)
    assert unhidden_us(1e9) == high


def test_a_stage_takes_its_bare_chain_even_without_weights() -> None:
    load = streaming_skeleton(10, 5, 10)
    time = find_engine("monotape").time(load, box_of("h200"), 0, 1)
    assert time.total_us == pytest.approx(52 * 1.9)


def test_the_assumption_is_labelled_a_prediction() -> None:
    text = find_engine("monotape").assumption(load_of("gpt-oss-20b"), box_of("b200"))
    assert "prediction from the streaming probe" in text
    assert "not a measurement" in text
    assert "NVIDIA B200" in text
    assert "does not run" not in find_engine("monotape").assumption(load_of("llama-3.2-1b"), box_of("h200"))


def test_vllm_is_given_back() -> None:
    """Of the version that the README compares with, where runs agree; an assumption names it."""
    found = vllm_tokens()
    assert len(found) >= 3
    for one in found:
        got = throughput_engine().pass_us(one.load, box_of("h200"), one.length)
        assert got == pytest.approx(one.seconds * 1e6, rel=0.02)
    text = throughput_engine().assumption(load_of("llama-3.1-8b"), box_of("h200"))
    assert "vLLM 0.26.0" in text and "reports/compare-h200-llama-3.1-8b.json" in text


def test_links_are_two_sums_a_layer() -> None:
    load = load_of("llama-3.1-8b")
    time = find_engine("monotape").time(load, box_of("h200", 8), 100, 1)
    assert time.link_us == 2 * 32 * 3.84
    single = find_engine("monotape").time(load, box_of("h200"), 100, 1)
    assert single.link_us == 0
    assert time.stream_us == pytest.approx(single.stream_us / 8)


def test_an_unknown_link_is_asked_for() -> None:
    with pytest.raises(UsageError, match="--link-us"):
        find_engine("monotape").pass_us(load_of("llama-3.1-8b"), box_of("rtx-5090", 4), 100)
    box = box_of("rtx-5090", 4, link_us=20.0)
    assert find_engine("monotape").time(load_of("llama-3.1-8b"), box, 100, 1).link_us == 2 * 32 * 20


def test_launching_stacks_pay_for_every_kernel() -> None:
    load, box = load_of("llama-3.2-1b"), box_of("h200", kernels_per_layer=6)
    assert find_engine("launches").time(load, box, 9, 1).exposed_us == pytest.approx(6 * 16 * 3.75)
    assert find_engine("graphs").time(load, box, 9, 1).exposed_us == pytest.approx(6 * 16 * 0.55)
    with pytest.raises(UsageError, match="--launch-us"):
        find_engine("graphs").pass_us(load, box_of("mi300x"), 9)


def test_a_share_counts_against_the_effective_bandwidth() -> None:
    load = load_of("llama-3.2-1b")
    got = share_engine(0.36).pass_us(load, box_of("mi300x", 8), 0)
    assert 1e6 / got == pytest.approx(0.36 * 33.6e12 / load.pass_bytes(0))
    for bad in (0.0, -0.1, 1.01):
        with pytest.raises(UsageError, match="share"):
            share_engine(bad)


def test_the_cpu_engine_reaches_the_measured_share_and_names_its_report() -> None:
    engine = cpu_engine([(32, 0.75), (1032, 0.625)], "reports/some.json")
    load, box = load_of("smollm2-135m", "q8"), box_of("cpu", bandwidth_tbs=0.02)
    for context, share in ((0, 0.75), (32, 0.75), (532, 0.6875), (1032, 0.625), (8000, 0.625)):
        rate = 1e6 / engine.pass_us(load, box, context)
        assert rate == pytest.approx(share * 0.02e12 / load.pass_bytes(context))
    text = engine.assumption(load, box)
    assert "75 % at 32, 62 % at 1,032; reports/some.json" in text
    assert "longer contexts reach less" in text


def test_rows_share_weights_but_not_kv() -> None:
    load = load_of("llama-3.2-1b")
    assert load.pass_bytes(1000, 5) == load.pass_bytes(0) + 5 * load.kv_read(1000)


def test_rows_beyond_a_pass_take_another() -> None:
    load, box, engine = load_of("llama-3.2-1b"), box_of("h200"), find_engine("monotape")
    full = engine.pass_us(load, box, 50, ROWS_PER_PASS)
    assert engine.pass_us(load, box, 50, 2 * ROWS_PER_PASS) == pytest.approx(2 * full)
    assert full < engine.pass_us(load, box, 50, ROWS_PER_PASS + 1) <= 2 * full


def test_rows_of_a_moe_model_read_more_experts() -> None:
    part = Part(ROUTED, 1, copies=10, chosen=2)
    assert distinct_copies(part, 1) == 2
    assert distinct_copies(part, 2) == pytest.approx(10 * (1 - 0.8**2))
    assert distinct_copies(part, 10**6) == pytest.approx(10)
    assert distinct_copies(dataclasses.replace(part, kind=FFN, copies=1, chosen=1), 9) == 1
    load = load_of("gpt-oss-120b")
    assert load.pass_bytes(0) < load.pass_bytes(0, 8) < load.weight_bytes


def test_power_is_multiplication() -> None:
    assert power(0.5, 0) == 1
    assert power(0.75, 13) == pytest.approx(0.75**13)


def test_an_unknown_engine_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="nearest names are vllm"):
        find_engine("vlm")

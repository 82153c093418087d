"""Traces from made-up clocks: the records, the table's arithmetic, and what Perfetto is given."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import numpy as np
import pytest

from monotape.backends.cuda.trace import (
    FIELDS,
    TraceRecords,
    records_of,
    stage_bytes_of,
    stage_times,
    table,
    token_s,
    write_chrome,
)
from monotape.compiler.compile import compile_plan
from monotape.models.registry import spec_from_config
from monotape.plan.formats import Format
from monotape.plan.types import Machine
from shapes import SHAPES

STAGES = ("qkv", "output", "head", "sample")
LAYERS, WORKERS, TOKENS = 3, 2, 2
ORIGIN = 10**18  # clocks count from long ago


@pytest.fixture
def trace() -> TraceRecords:
    """Each layer: qkv for 100 ns of which 30 + worker are waiting, 40 multiplying, 16 of them for pages, and 6
    meeting; then output for 50. The head 400, the sampler 20."""
    clocks = np.zeros((WORKERS, TOKENS, LAYERS * len(STAGES) + 2, len(FIELDS)), np.int64)
    for worker in range(WORKERS):
        for token in range(TOKENS):
            now = ORIGIN + 10_000 * token
            for layer in range(LAYERS):
                clocks[worker, token, layer * 4] = now, now + 30 + worker, now + 100, 40, 16, 6
                clocks[worker, token, layer * 4 + 1] = now + 100, 0, now + 150, 0, 0, 0
                now += 160  # 10 ns between layers
            clocks[worker, token, LAYERS * 4, :3] = now, now, now + 400
            clocks[worker, token, LAYERS * 4 + 1, :3] = now + 400, now + 405, now + 420
    return records_of(clocks, LAYERS, STAGES, {"qkv": 3_000, "output": 600, "head": 4_000})


def test_every_slot_that_was_written_is_a_record(trace: TraceRecords) -> None:
    assert trace.records.size == WORKERS * TOKENS * (2 * LAYERS + 2)
    head = trace.records[trace.records["stage"] == 2]
    assert set(head["layer"].tolist()) == {LAYERS}
    assert (head["end_ns"] - head["start_ns"]).tolist() == [400] * 4
    output = trace.records[trace.records["stage"] == 1]
    assert set(output["waited_ns"].tolist()) == {0}


def test_times_are_those_of_one_token(trace: TraceRecords) -> None:
    times = {item.stage: item for item in stage_times(trace)}
    assert list(times) == ["qkv", "output", "head", "sample"]
    assert times["qkv"].time_s == pytest.approx(300e-9)
    assert times["qkv"].waiting_s == pytest.approx(3 * 30.5e-9)
    assert times["qkv"].multiplying_s == pytest.approx(120e-9)
    assert times["qkv"].starved_s == pytest.approx(48e-9)
    assert times["qkv"].meeting_s == pytest.approx(18e-9)
    assert times["qkv"].finishing_s == pytest.approx(3 * 23.5e-9)
    assert times["output"].time_s == pytest.approx(150e-9)
    assert times["qkv"].streaming_s(2e10) == pytest.approx(150e-9)
    assert times["qkv"].share(2e10) == pytest.approx(0.5)
    assert times["sample"].share(2e10) == 0
    assert token_s(trace) == pytest.approx(900e-9)


def test_stages_come_in_their_order_although_some_workers_skip_one(trace: TraceRecords) -> None:
    """A worker without a part of a stage waits in the next one, which so begins first."""
    records = trace.records.copy()
    of_output = (records["stage"] == 1) & (records["token"] == 0) & (records["layer"] == 0)
    records["start_ns"][of_output] = records["start_ns"].min() - 10
    assert [item.stage for item in stage_times(replace(trace, records=records))] == [
        "qkv",
        "output",
        "head",
        "sample",
    ]


def test_the_table_adds_up(trace: TraceRecords) -> None:
    lines = {line[:14].strip(): line[14:].split() for line in table(trace, 2e10).splitlines()}
    assert lines["qkv"] == ["0.30", "0.09", "0.12", "0.05", "0.02", "0.07", "0.15", "50.0%"]
    assert lines["token"] == ["0.90", "0.10", "0.12", "0.05", "0.02", "0.64", "0.38", "42.2%"]
    assert lines["between stages"][0] == "0.03"


def test_perfetto_gets_a_bar_for_each_record_and_each_wait(trace: TraceRecords) -> None:
    file = io.StringIO()
    write_chrome(trace, file)
    events = json.loads(file.getvalue())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["worker 0", "worker 1"]
    bars = [event for event in events if event["ph"] == "X"]
    waits = [event for event in bars if event["name"] == "wait"]
    assert len(bars) - len(waits) == trace.records.size
    assert len(waits) == WORKERS * TOKENS * (LAYERS + 1)
    first = next(event for event in bars if event["name"] == "qkv")
    assert (first["ts"], first["dur"], first["args"]) == (0.0, 0.1, {"token": 0, "layer": 0, "waited_ns": 30})


def test_what_a_token_reads_is_read_in_its_stages() -> None:
    spec = spec_from_config(SHAPES["smollm2-135m"])
    machine = Machine("cuda", 132, alignment=128, whole_heads=False)
    plan = compile_plan(spec, machine, Format.BF16, context=64)
    found = stage_bytes_of(plan, 40)
    assert set(found) == {"qkv", "output", "gate_up", "down", "head", "attention"}
    assert sum(found.values()) == plan.token_bytes(40) - plan.small_bytes

"""The report of the chain of stages, without a GPU: what a trace becomes, and the picture of it."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chain
import chain_figure
import scaling
from backends.host_kernel import build, host_gpu
from monotape.backends.cuda.trace import FIELDS, TraceRecords, records_of
from scaling import Setup
from shapes import BARE

STAGES = ("qkv", "attention", "head", "sample")


def recorded() -> TraceRecords:
    """Two workers, two layers, a token: in each stage 100 ns of waiting, 300 of multiplying, 50 of meeting, 70 more."""
    clocks = np.zeros((2, 1, 2 * 2 + 2, len(FIELDS)), np.int64)
    for slot in range(clocks.shape[2]):
        began = 1000 + slot * 600  # of which 80 are between stages
        clocks[:, 0, slot] = (began, began + 100, began + 520, 300, 40, 50)
    return records_of(clocks, 2, STAGES, {})


def test_parts_of_a_layer() -> None:
    found = chain.chain_of(recorded(), layers=2)
    parts = {"waiting": 100.0, "multiplying": 300.0, "meeting": 50.0, "finishing": 70.0, "pages": 40.0}
    assert found["layer"] == {"qkv": parts, "attention": parts} and found["few"] == {}
    assert found["ending"] == {"head": parts, "sample": parts}
    assert found["between_ns"] == 5 * 80 / 2
    assert chain.layer_ns({"chain": found}) == 2 * 520 + 200


def test_a_stage_of_few_workers_is_as_long_as_it_is_for_them() -> None:
    trace = recorded()
    alone = trace.records[(trace.records["stage"] != 1) | (trace.records["worker"] == 0)]
    others = alone[alone["worker"] == 1]
    more = [others.copy() for _ in range(2)]
    for worker, records in enumerate(more, 2):
        records["worker"] = worker
    found = chain.chain_of(replace(trace, records=np.concatenate([alone, *more])), layers=2)
    parts = {"waiting": 100.0, "multiplying": 300.0, "meeting": 50.0, "finishing": 70.0, "pages": 40.0}
    assert found["few"] == {"attention": {"workers": 1, **parts}}
    assert found["layer"]["attention"]["multiplying"] == 300 / 4
    assert chain.bars({"chain": found})["attention (workers: 1)"]["multiplying"] == 300


def row(setup: Setup) -> dict[str, Any]:
    facts = {"model": setup.model, "ranks": setup.ranks, "setting": setup.setting}
    return {**facts, "chain": chain.chain_of(recorded(), layers=2)}


def test_the_table_and_the_picture(tmp_path: Path) -> None:
    rows = [row(setup) for setup in chain.SETUPS]
    lines = chain.markdown(rows).splitlines()
    assert "| dense-2b, one of 8 ranks, silent | attention | 100 | 300 | 50 | 70 | 40 |" in lines
    assert len({line.count("|") for line in lines}) == 1
    report = json.loads(json.dumps({"gpu": "h200", "results": rows}))
    for name in ("a.svg", "b.svg"):
        chain_figure.draw(report, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_workers_of_the_bare_shape_have_next_to_no_tiles() -> None:
    """But all of them have some: else they would wait for their resets, and that would be what is measured."""
    plan = Setup("one-tile", 1, "one").plan(132, 64)
    most = {stage.name: max(span.count for span in stage.spans) for stage in plan.plan.ranks[0].layer_stages}
    assert most == {"qkv": 2, "output": 1, "gate_up": 2, "down": 1}
    assert not plan.ranks[0].scattered


@pytest.mark.slow
def test_a_shape_is_traced_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {
        **BARE["one-tile"], "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64, "vocab_size": 128,
    }  # fmt: skip
    monkeypatch.setitem(BARE, "tiny", tiny)
    monkeypatch.setattr(scaling, "CONTEXT", 5)
    monkeypatch.setattr(chain, "processors", lambda: 1)
    monkeypatch.setattr(scaling, "compile_kernel", build)
    monkeypatch.setattr(chain, "TRACED_TOKENS", 2)
    with host_gpu():
        options = argparse.Namespace(tokens=6, requests=1)
        found = chain.measured(Setup("tiny", 1, "one"), options, bandwidth=1e9)
    assert set(found["chain"]["layer"]) == {"qkv", "attention", "output", "gate_up", "down"}
    assert found["chain"]["between_ns"] >= 0

"""The agent's loop: what is new is prefilled, decode at each speed, tools take what they take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from monotape.errors import UsageError
from monotape.planner.agent import SPEEDS, Step, Trace, read_trace, simulate
from monotape.planner.engines import find_engine
from monotape.planner.prefill import prefill_for, prefill_seconds
from monotape.planner.request import decode_seconds
from planner.loads import box_of, load_of

ENGINE = find_engine("monotape")


def test_the_built_in_trace_looks_real() -> None:
    trace = read_trace(None)
    assert 15 <= len(trace.steps) <= 60
    assert 10_000 < trace.output < 60_000
    assert trace.final_context < 128_000
    assert 30 < trace.tool_s < 300


def test_a_loop_is_prefill_decode_and_tools() -> None:
    trace = Trace("two steps", (Step(3000, 700, 1.5), Step(200, 1300, 0.25)))
    load, box = load_of("llama-3.1-8b"), box_of("h200")
    prefill = prefill_for(ENGINE, box)
    *fixed, own = simulate(trace, load, box, ENGINE, prefill)
    waiting = sum(prefill_seconds(load, box, 0, 3000, prefill)) + sum(
        prefill_seconds(load, box, 3700, 200, prefill)
    )
    assert [time.tokens_per_second for time in fixed] == list(SPEEDS)
    for time, speed in zip(fixed, SPEEDS, strict=True):
        assert time.total == pytest.approx(waiting + 2000 / speed + 1.75)
    decode = decode_seconds(load, box, ENGINE, 3000, 700) + decode_seconds(load, box, ENGINE, 3900, 1300)
    assert own.decode == pytest.approx(decode)
    assert own.tokens_per_second == pytest.approx(2000 / decode)


def test_50000_tokens_without_tools() -> None:
    trace = Trace("tokens only", (Step(0, 50_000, 0.0),))
    load, box = load_of("llama-3.1-8b"), box_of("h200")
    times = {
        time.tokens_per_second: time for time in simulate(trace, load, box, ENGINE, prefill_for(ENGINE, box))
    }
    assert times[100].total == 500
    assert times[3000].total < 17


def test_traces_are_read_from_files(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(
        json.dumps(
            {"name": "mine", "steps": [{"prompt": 5, "output": 6, "tool_s": 7}, {"prompt": 1, "output": 0}]}
        )
    )
    assert read_trace(str(path)) == Trace("mine", (Step(5, 6, 7.0), Step(1, 0, 0.0)))


@pytest.mark.parametrize(
    "content",
    [
        "{", "[]", "{}", '{"steps": []}', '{"steps": [3]}', '{"steps": [{"prompt": 1}]}',
        '{"steps": [{"prompt": -1, "output": 2}]}', '{"steps": [{"prompt": 1, "output": 2, "tool_s": -1}]}',
        '{"steps": [{"prompt": 1, "output": true}]}', '{"steps": [{"prompt": 1e18, "output": 2}]}',
        f'{{"steps": [{{"prompt": {10**18}, "output": 2}}]}}', '{"steps": [{"prompt": 1, "output": 2, "tool_s": NaN}]}',
    ],
)  # fmt: skip
def test_bad_traces_are_refused_with_the_shape_of_a_good_one(tmp_path: Path, content: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(UsageError) as caught:
        read_trace(str(path))
    assert str(path) in caught.value.message
    assert '"steps"' in caught.value.hint


def test_a_missing_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_trace(str(tmp_path / "none.json"))

"""The bench of drafts without a GPU: its tasks, its comparison of tokens, and its sums, on a scripted model."""

from __future__ import annotations

import ast
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import editing
import editing_tasks
import real_models
import report
from editing import Asked, Compared, compare, edits, line, measure, over_all, prose, sampled
from editing_tasks import EDITS, Task, beginning, task_of, tasks
from engine.scripted_model import GREEDY, make
from lookup import counted_drafts
from monotape.backends.protocol import Job
from monotape.engine.llm import LLM
from monotape.engine.outputs import CompletionOutput
from monotape.errors import UsageError
from prose_prompts import PROSE

FILE = '''"""Two functions."""

LIMIT = 7


def first(value):
    return value + LIMIT


class Second:
    def third(self):
        return first(1)

    def fourth(self):
        return first(2), "first_of_all"


LAST = 9
'''
TASK = Task("two", "first", "primary", FILE)
STORY = "hello world hello world"
TEXT = Asked("one", "hello", GREEDY)


def test_the_edits_are_twenty_files_of_about_150_lines() -> None:
    made = tasks()
    assert len(made) == len({task.module for task in made}) == 20
    for task in made:
        assert 100 <= task.lines <= 150, task.module
        assert task.new_name not in task.text and task.new_name in task.edited
        defined = [
            node.name for node in ast.walk(ast.parse(task.edited)) if isinstance(node, ast.FunctionDef)
        ]
        assert task.new_name in defined and task.function not in defined
        assert len(task.sha256) == 64
        assert f"`{task.function}` to `{task.new_name}`" in task.request and task.text in task.request


def test_a_text_ends_with_a_definition() -> None:
    whole = FILE.splitlines(keepends=True)
    assert beginning(FILE) == "".join(whole[:15])
    assert beginning(FILE, 14) == beginning(FILE, 12) == "".join(whole[:12])
    assert beginning(FILE, 11) == "".join(whole[:7])
    assert beginning(FILE, 3) == ""


def test_a_python_without_the_function_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(editing_tasks, "source_of", lambda module: FILE)
    assert task_of("two", "first", "primary").text == beginning(FILE)
    with pytest.raises(UsageError, match="two of this Python does not define fifth in its first 150 lines"):
        task_of("two", "fifth", "another")


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (TASK.edited, True), (f"Here it is:\n```python\n{TASK.edited}```\nDone.", True), (f"```\n{TASK.edited}", True),
        (FILE, False), (TASK.edited.replace("LIMIT", "MOST"), False), (TASK.edited[:-12], False), ("", False),
    ],
)  # fmt: skip
def test_an_answer_is_right_if_it_is_the_edited_file(answer: str, right: bool) -> None:
    assert TASK.is_done_by(answer) is right


def test_whole_names_are_replaced() -> None:
    assert TASK.edited.count("primary") == 3 and "first_of_all" in TASK.edited
    assert dataclasses.replace(TASK, text=TASK.edited).sha256 != TASK.sha256


def model(script: str = STORY) -> tuple[LLM, Any]:
    """One whose answers drafts are looked up in themselves, as a GPU looks them up in the prompt."""
    llm, backend = make(script, context=4000)

    def drafts(job: Job, output: Sequence[int]) -> tuple[int, int]:
        return counted_drafts(output, output) if job.drafts else (0, 0)

    backend.drafts = drafts
    return llm, backend


def test_both_ways_take_turns_and_are_compared() -> None:
    llm, backend = model()
    found = compare(llm, TEXT, runs=3)
    before, *jobs = backend.jobs
    assert (before.max_tokens, before.drafts) == (1, False)  # from then on the prompt's KV is kept
    assert [job.drafts for job in jobs] == [False, True, True, False, False, True]
    assert found.differs_at is None
    row = found.row()
    assert (row["task"], row["tokens"], row["finish_reason"]) == (
        "one",
        len(found.plain[0].token_ids),
        "stop",
    )
    assert 0 < row["accepted"] <= row["drafted"]
    assert row["times_as_fast"] == {"median": 1.0, "min": 1.0, "max": 1.0, "runs": 3}
    compare(llm, TEXT, runs=1, number=1)
    assert [job.drafts for job in backend.jobs[8:]] == [True, False]


@pytest.mark.parametrize(
    ("changed", "place"),
    [
        (lambda ids: [*ids[:2], ids[2] + 1, *ids[3:]], 2),
        (lambda ids: ids[:-1], -1),
        (lambda ids: [*ids, 1], None),
    ],
)
def test_a_token_that_differs_is_found(changed: Any, place: int | None) -> None:
    llm, _ = model()
    found = compare(llm, TEXT, runs=2)
    ids = found.plain[0].token_ids
    found.speculated[1] = dataclasses.replace(found.speculated[1], token_ids=changed(ids))
    expected = len(ids) if place is None else place % len(ids)
    assert found.differs_at == found.row()["differs_at"] == expected
    total = over_all([compare(llm, TEXT, runs=2), found])
    assert total["different"] == 1
    assert "DIFFERENT" in line(total) and "DIFFERENT" in line(found.row())


def test_the_sum_is_of_tokens_and_times() -> None:
    """Twice as fast on nine tokens and as fast on nine others is 18 tokens in 13.5 instead of 18 units of time."""
    llm, _ = model()
    one = compare(llm, TEXT, runs=1)

    def timed(answer: CompletionOutput, decode_s: float) -> CompletionOutput:
        tokens = answer.token_ids[:5] * 2
        speed = (len(tokens) - 1) / decode_s
        stats = dataclasses.replace(
            answer.stats,
            decode_s=decode_s,
            decode_tokens_per_second=speed,
            drafted_tokens=4,
            accepted_tokens=3,
        )
        return dataclasses.replace(answer, token_ids=tokens, stats=stats)

    slow, fast = timed(one.plain[0], 0.9), timed(one.plain[0], 0.45)
    total = over_all([Compared(TEXT, [slow], [fast]), Compared(TEXT, [slow], [slow])])
    assert (total["tokens"], total["drafted"], total["accepted"], total["different"]) == (20, 8, 6, 0)
    assert total["plain_tokens_per_second"]["median"] == pytest.approx(10)
    assert total["times_as_fast"]["median"] == pytest.approx(1.8 / 1.35)
    assert "right" not in total


def test_one_token_has_no_speed() -> None:
    llm, _ = model("")
    rows = measure(llm, [TEXT], 1)
    assert [row["tokens"] for row in rows] == [1, 1]
    assert all("times_as_fast" not in row for row in rows)


def test_prose_and_seeds() -> None:
    assert len(PROSE) == len(set(PROSE)) == 50
    greedy = prose(20)
    assert len(greedy) == 50 and all(one.params.temperature == 0 for one in greedy)
    drawn = sampled(20)
    assert {one.params.seed for one in drawn} == set(range(100))
    assert {one.params.temperature for one in drawn} == {0.8}


def test_an_edit_has_room_for_the_file_and_is_checked() -> None:
    llm, backend = model(TASK.edited)
    asked = edits(llm, [TASK])
    total, row = measure(llm, asked, 1)
    assert row["right"] is True and total["right"] == 1
    assert (row["lines"], row["sha256"]) == (TASK.lines, TASK.sha256)
    room = row["tokens"] - 1 + editing.MORE_TOKENS
    warm_up = editing.WARM_UP_TOKENS
    assert [job.max_tokens for job in backend.jobs] == [warm_up, warm_up, 1, room, room]
    wrong = dataclasses.replace(TASK, new_name="other")
    assert [row["right"] for row in measure(llm, edits(llm, [wrong]), 1)] == [0, False]


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(report, "REPORTS", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "name", "count"), [([], "editing", 2), (["--prose"], "prose", 2), (["--sampled"], "sampled", 2)]
)
def test_a_run_is_reported(
    monkeypatch: pytest.MonkeyPatch, published: Path, capsys: pytest.CaptureFixture[str], flags: list[str],
    name: str, count: int,
) -> None:  # fmt: skip
    llm, _ = model()
    monkeypatch.setattr(editing, "LLM", lambda *_, **__: llm)
    monkeypatch.setattr(
        editing, "tasks", lambda: [dataclasses.replace(TASK, module=edit[0]) for edit in EDITS]
    )
    arguments = [
        "editing.py",
        "--model",
        "some/Tiny.gguf",
        "--runs",
        "1",
        "--tasks",
        str(count),
        "--save",
        *flags,
    ]
    monkeypatch.setattr("sys.argv", arguments)
    assert editing.main() == 0
    saved = json.loads((published / f"{name}-cpu-tiny.json").read_text())
    assert (saved["kind"], saved["model"], len(saved["results"])) == (name, "Tiny.gguf", 1 + count)
    assert saved["machine"]["python"]
    assert json.loads(capsys.readouterr().out)["results"] == saved["results"]


def test_different_tokens_fail_the_run(
    monkeypatch: pytest.MonkeyPatch, published: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llm, backend = model()
    answer = backend.answer

    def wrong(job: Job, index: int) -> int:
        return answer(job, index) + (index == 2 and job.drafts)

    backend.answer = wrong
    monkeypatch.setattr(editing, "LLM", lambda *_, **__: llm)
    monkeypatch.setattr("sys.argv", ["editing.py", "--prose", "--runs", "1", "--tasks", "1"])
    assert editing.main() == 1
    captured = capsys.readouterr()
    assert "Tokens differ" in captured.err
    assert json.loads(captured.out)["results"][1]["differs_at"] == 2
    assert not list(published.iterdir())


@pytest.mark.slow
def test_a_real_model_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, published: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(real_models.embedded_model())
    arguments = ["--backend", "cpu", "--sampled", "--tasks", "2", "--runs", "1", "--max-tokens", "12"]
    monkeypatch.setattr("sys.argv", ["editing.py", "--model", path, "--max-model-len", "512", *arguments])
    assert editing.main() == 0
    total, *rows = json.loads(capsys.readouterr().out)["results"]
    assert total["tokens"] == sum(row["tokens"] for row in rows) > 12
    assert total["times_as_fast"]["median"] > 0

"""HumanEval without a model: the sandbox that judges samples, the choice of problems and the stop rule."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

import humaneval
from completions import STOPS, Completion, stopped
from humaneval import Run, compare, find_model
from humaneval_problems import PROBLEMS, all_problems, sample
from monotape.engine.stop import StopStrings
from monotape.errors import UsageError
from sandbox import Limits, run_program

pytestmark = pytest.mark.slow

SHORT = Limits(seconds=1.5)
ROOT = Path(__file__).resolve().parents[2]


def test_a_program_that_comes_to_its_end_passes() -> None:
    assert run_program("import math\nassert math.comb(7, 3) == 35") == "passed"


@pytest.mark.parametrize(
    "program",
    [
        "assert 1 + 1 == 3",
        "def f(:",  # no Python at all
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise KeyboardInterrupt",
        "exit()",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "def f(): return f()\nf()",
        "print('passed'); import sys; sys.stdout.flush(); raise ValueError",
        "import numpy",  # what happens to be installed must not decide
        "input()",
    ],
)
def test_everything_else_fails(program: str) -> None:
    assert run_program(program) == "failed"


@pytest.mark.parametrize(
    "program",
    [
        "print('x' * 2_000_000)",  # more than any pipe holds
        "import sys; sys.stdout.close(); sys.stderr.close()",
        "import os; os.close(1); os.close(2)",
        "import os; os.write(1, b'noise'); os.write(2, b'noise')",
        "open('left behind', 'w').write('x')",
    ],
)
def test_output_is_ignored(program: str) -> None:
    before = os.listdir()
    assert run_program(program) == "passed"
    assert os.listdir() == before


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(3600)",
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()",
        "try:\n    while True: pass\nexcept BaseException:\n    while True: pass",
    ],
)
def test_a_program_without_end_is_ended(program: str) -> None:
    assert run_program(program, SHORT) == "timed out"


def test_memory_is_limited() -> None:
    greedy = "blocks = []\nwhile True: blocks.append(bytearray(1 << 24))"
    assert run_program(greedy) == "failed"
    assert run_program("assert len(bytearray(1 << 26)) == 1 << 26") == "passed"
    small = Limits(memory_bytes=1 << 26)
    assert run_program("assert len(bytearray(1 << 26)) == 1 << 26", small) == "failed"


def test_files_are_limited() -> None:
    program = "with open('big', 'wb') as file:\n    file.write(bytes(1 << 20))"
    assert run_program(program, Limits(file_bytes=1 << 19)) == "failed"
    assert run_program(program, Limits(file_bytes=1 << 21)) == "passed"


def test_what_a_program_starts_ends_with_it(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    child = f"import time; time.sleep(1); open({str(mark)!r}, 'w')"
    program = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {child!r}])"
    assert run_program(program) == "passed"
    time.sleep(2)
    assert not mark.exists()


def test_canonical_solutions_pass_and_empty_ones_do_not() -> None:
    for problem in sample(9):
        assert run_program(problem.program(problem.canonical_solution)) == "passed", problem.task_id
        assert run_program(problem.program("    pass\n")) == "failed", problem.task_id


def test_the_forty_problems_are_always_the_same() -> None:
    chosen = [int(problem.task_id.removeprefix("HumanEval/")) for problem in sample(40)]
    assert chosen[:12] == [0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 41, 45]
    assert chosen[-1] == 159
    assert len(set(chosen)) == 40
    assert sample(PROBLEMS) == all_problems()


@pytest.mark.parametrize("count", [0, -1, 165])
def test_other_numbers_of_problems_are_refused(count: int) -> None:
    with pytest.raises(UsageError, match="from 1 to 164"):
        sample(count)


TEXTS = (
    "    return 1\n\n\ndef g():",
    "    return 1\n\nprint(f())\nif",
    "\ndef",
    "    # inside\n    if x:\n        return 2",
    "    return 3\n```\n# more",
    "    return 4\n\n",
    "\n\n\nclass A",
)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_the_stop_rule_is_the_engines(text: str, size: int) -> None:
    """The same text, cut into tokens in any way, ends at the same place under both implementations."""
    pieces = [text[start : start + size] for start in range(0, len(text), size)]

    def decode(ids: object) -> str:
        return "".join(pieces[index] for index in ids)  # type: ignore[attr-defined]

    tokens, got, end = stopped(range(len(pieces)), decode, frozenset(), len(pieces))
    stops = StopStrings(STOPS)
    said, used = "", 0
    for piece in pieces:
        said, used = said + stops.push(piece), used + 1
        if stops.matched is not None:
            break
    assert got == said + ("" if stops.matched else stops.flush())
    assert (len(tokens), end) == (used, "stop string" if stops.matched else "length")


def test_end_of_text_and_length_end_a_completion() -> None:
    def decode(ids: object) -> str:
        return "".join(map(chr, ids))  # type: ignore[call-overload]

    assert stopped([65, 66, 2, 67], decode, frozenset({2}), 9) == ((65, 66, 2), "AB", "end of text")
    assert stopped([65, 66, 67, 2], decode, frozenset({2}), 3) == ((65, 66, 67), "ABC", "length")


def test_differences_are_between_each_run_and_the_last() -> None:
    def run(name: str, tokens: tuple[int, ...], passed: bool) -> Run:
        completion = Completion("", tokens, 1.0, "length")
        return Run(name, {"a": completion}, {"a": "passed" if passed else "failed"})

    one, two, three = run("one", (1, 2), True), run("two", (1, 3), False), run("three", (1, 2), False)
    assert compare([one, two, three]) == [
        {"engines": ["one", "three"], "same_tokens": 1, "different_verdicts": {"a": ["passed", "failed"]}},
        {"engines": ["two", "three"], "same_tokens": 0, "different_verdicts": {}},
    ]
    assert compare([one]) == []
    assert one.results()["passed"] == 1
    assert two.results()["tokens_per_second"] == 2.0


@pytest.mark.parametrize(("flags", "ways"), [([], [True]), (["--both-ways"], [True, False])])
def test_monotape_runs_once_more_without_speculation(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], ways: list[bool]
) -> None:
    loaded: list[bool] = []

    def load(*_: object, speculation: bool = True) -> None:
        loaded.append(speculation)

    monkeypatch.setattr(humaneval, "monotape_engine", load)
    for each in humaneval.engines(humaneval.parser().parse_args(flags), Path("a"), 64, ()):
        each()
    assert loaded == ways


@pytest.mark.parametrize("name", ["a.gguf", "org/model:a.gguf"])
def test_a_file_in_the_cache_saves_the_download(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONOTAPE_CACHE", str(tmp_path))
    cached = tmp_path / "models" / "a.gguf"
    cached.parent.mkdir()
    cached.touch()
    assert find_model(name) == cached
    assert find_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere.gguf"], "'nowhere.gguf' is neither"),
        (["--model", "smollm2", "--problems", "400"], "400 problems cannot be chosen"),
        (["--model", "smollm2", "--engine", "other"], "invalid choice"),
        (["--model", "smollm2", "--colour", "red"], "unrecognized arguments"),
    ],
)
def test_mistakes_on_the_command_line_are_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    monkeypatch.setattr("sys.argv", ["humaneval.py", *arguments])
    try:
        code: object = humaneval.main()
    except SystemExit as ended:  # of the parser
        code = ended.code
    assert code == 2
    assert message in capsys.readouterr().err

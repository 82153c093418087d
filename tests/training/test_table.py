"""The comparison: a dry run in processes of their own, stopped and gone on with; its rows and its figure."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import lane_table
from monotape.errors import UsageError
from monotape.training import checkpoints, commands, table
from monotape.training.evaluation import difference
from monotape.training.settings import ARMS, Settings
from monotape.training.table import ORDER, noise, planned, predicted_s, rows, text, train_table
from training.tiny_corpus import SEQUENCE, tiny

BASE = tiny(tokens=6 * 8 * SEQUENCE)


def quiet(line: str) -> None:
    pass


def result(arm: str, lanes: int, seed: int, shift: float) -> dict[str, Any]:
    """A run's JSON with three groups of text, each `shift` bits a byte worse than TP's first seed."""
    groups = [[(1.0 + shift + 0.1 * place) * 1000, 1000] for place in range(3)]
    bits = sum(one for one, _ in groups) / 3000
    found = {"bits_per_byte": bits, "standard_error": 0.05, "bytes": 3000, "groups": groups}
    settings = tiny(arm=arm, lanes=lanes, seed=seed).saved()
    return {"settings": settings, "tokens": 1000, "tokens_per_second": 5.0, "validation": found}


@pytest.fixture
def results() -> dict[str, dict[str, Any]]:
    return {
        f"{arm}-{lanes}-seed{seed}": result(arm, lanes, seed, shift)
        for arm, lanes, seed, shift in [
            ("tp", 8, 1, 0.0), ("tp", 8, 2, 0.01), ("tp", 8, 3, -0.02), ("dtp1-scale", 8, 1, 0.03),
            ("dtp2-scale", 4, 1, 0.02), ("ladder", 8, 1, 0.05), ("silent", 8, 1, 0.2),
        ]
    }  # fmt: skip


def test_the_table_is_the_issues() -> None:
    """TP with three seeds; delays 1 and 2 with early modules both ways, Ladder, silence; lanes 4 and 8."""
    runs = {(run.settings.arm, run.settings.lanes, run.settings.seed) for run in planned(Settings())}
    assert len(runs) == len(ORDER) == 14
    assert {seed for arm, _, seed in runs if arm == "tp"} == {1, 2, 3} and {arm for arm, _, _ in runs} == set(
        ARMS
    )
    for arm in ("dtp1-scale", "dtp1-sum", "dtp2-scale", "dtp2-sum", "silent"):
        assert {lanes for name, lanes, _ in runs if name == arm} == {4, 8}
    base = Settings()
    assert (base.width, base.layers, base.tokens) == (512, 8, 245_000_000)
    shared = {name: value for name, value in base.saved().items() if name not in ("arm", "lanes", "seed")}
    assert all(shared.items() <= run.settings.saved().items() for run in planned(base))
    assert predicted_s(planned(base)) > 2 * predicted_s(planned(Settings(tokens=100_000_000)))


@pytest.mark.slow
def test_a_dry_run_in_several_calls(corpus_folder: Path, tmp_path: Path) -> None:
    order = (("tp", 2, 1), ("dtp1-sum", 4, 1))
    runs = planned(BASE, order)
    first = train_table(runs, corpus_folder, tmp_path, seconds=0.0, device="cpu", say=quiet)
    assert first.done == [] and len(first.left) == 2  # no time, nothing lost
    outcome = train_table(runs[:1], corpus_folder, tmp_path, seconds=600, device="cpu", say=quiet)
    assert outcome.done == ["tp-2-seed1"] and not outcome.failed
    kept = (tmp_path / "tp-2-seed1" / "run.json").read_bytes()
    said: list[str] = []
    outcome = train_table(runs, corpus_folder, tmp_path, seconds=600, device="cpu", say=said.append)
    assert outcome.done == [run.name for run in runs] and not outcome.left and not outcome.failed
    assert (tmp_path / "tp-2-seed1" / "run.json").read_bytes() == kept
    assert any("bits per byte" in line for line in said)
    found = json.loads((tmp_path / "results.json").read_text())
    assert list(found) == [run.name for run in runs]
    assert "| dtp1-sum | 4 | 1 |" in text(found)


@pytest.mark.slow
def test_a_run_that_fails_does_not_stop_the_others(corpus_folder: Path, tmp_path: Path) -> None:
    runs = planned(BASE, (("tp", 2, 1), ("ladder", 2, 1)))
    (tmp_path / "tp-2-seed1").mkdir()
    (tmp_path / "tp-2-seed1" / "checkpoint.pt").write_bytes(b"broken")
    outcome = train_table(runs, corpus_folder, tmp_path, seconds=600, device="cpu", say=quiet)
    assert (
        outcome.done == ["ladder-2-seed1"] and "is not a checkpoint of a run" in outcome.failed["tp-2-seed1"]
    )
    assert (tmp_path / "tp-2-seed1" / "checkpoint.pt").read_bytes() == b"broken"


@pytest.mark.slow
def test_an_interrupted_table_saves_the_run_that_trains(corpus_folder: Path, tmp_path: Path) -> None:
    """Its processes are told too, wherever the signal came from; only a run that trains has something to save."""
    given = ["--corpus", str(corpus_folder), "--into", str(tmp_path), "--device", "cpu", "--first", "2"]
    long = tiny(tokens=100_000 * 8 * SEQUENCE, lanes=8, heads=8).saved()
    for name in ("arm", "lanes", "seed"):
        del long[name]
    flags = [word for name, value in long.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "monotape.training", "table", *given, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        deadline = time.monotonic() + 120
        trains: list[str] = []  # whichever was ready first; the other one waits
        while not trains and time.monotonic() < deadline:
            trains = [log.parent.name for log in tmp_path.glob("*/log.txt") if "step 20/" in log.read_text()]
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and "what was trained is saved" in said
    (saved,) = tmp_path.glob("*/checkpoint.pt")
    assert [saved.parent.name] == trains and checkpoints.read(saved)["step"] >= 20


def test_runs_of_another_table_are_refused(results: dict[str, Any], tmp_path: Path) -> None:
    runs = planned(tiny(), (("tp", 8, 1),))
    (tmp_path / runs[0].name).mkdir()
    (tmp_path / runs[0].name / "run.json").write_text(json.dumps(results["tp-8-seed2"]))
    with pytest.raises(UsageError, match="has seed = 2, and the table asks for 1"):
        train_table(runs, tmp_path, tmp_path, seconds=1, device="cpu", say=quiet)


def test_rows_compare_with_the_first_seed(results: dict[str, Any]) -> None:
    found = {row["run"]: row for row in rows(results)}
    assert found["dtp1-scale-8-seed1"]["more_than_tp"] == pytest.approx(0.03)
    assert found["dtp1-scale-8-seed1"]["its_error"] == pytest.approx(
        0.0, abs=1e-12
    )  # all groups differ alike
    assert found["tp-8-seed1"]["lanes"] is None and found["dtp2-scale-4-seed1"]["lanes"] == 4
    assert noise(rows(results)) == pytest.approx((1.08, 1.11))
    del results["tp-8-seed2"], results["tp-8-seed3"]
    assert noise(rows(results)) is None
    with pytest.raises(UsageError, match="no finished run of tp"):
        rows({"silent": results["silent-8-seed1"]})


def test_a_difference_has_the_error_of_its_groups() -> None:
    one, two = result("tp", 8, 1, 0.0)["validation"], result("tp", 8, 1, 0.0)["validation"]
    two["groups"][0][0] += 90
    mean, error = difference(two, one)
    assert mean == pytest.approx(0.03) and error == pytest.approx(0.03)


def test_quality_and_speed_in_one_figure(results: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "results.json").write_text(json.dumps(results))
    speeds = [
        {
            "setting": setting,
            "ranks": ranks,
            "tokens_per_second": {"0": {"median": 5000.0}, "2": {"median": speed}},
        }
        for setting, ranks, speed in [
            ("tp", 8, 3000.0),
            ("dtp1", 8, 4800.0),
            ("dtp", 4, 4000.0),
            ("tp", 4, 3900.0),
        ]
    ]
    (tmp_path / "speeds.json").write_text(json.dumps({"results": speeds}))
    lane_table.split(tmp_path / "results.json", tmp_path / "runs")
    assert len(list((tmp_path / "runs").glob("*.json"))) == len(results)
    (tmp_path / "runs" / "corpus.json").write_text("{}")  # is no run
    joined = lane_table.joined(
        lane_table.read_runs(tmp_path / "runs"), lane_table.read_speeds(tmp_path / "speeds.json")
    )
    shown = lane_table.text(joined)
    assert "| 8 | delay 1, early scaled | 1 | 1.1300 | +0.0300 ± 0.0000 | 5,000 | 4,800 |" in shown
    assert "| 4 | tensor parallelism | 1 |" in shown and "not measured" in shown
    lane_table.draw(joined, tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "--corpus", "{}", "--into", "{}/run"], "is not a prepared corpus"),
        (
            ["corpus", "prepare", "--packages", "{}", "--tokenizer", "{}/none", "--into", "{}/c"],
            "is not a tokenizer",
        ),
        (["corpus", "fetch", "--packages", "{}/none", "--into", "{}/w"], "is not a file"),
        (["corpus", "pack", "--corpus", "{}", "--into", "{}/p"], "has no corpus.json"),
        (["corpus", "unpack", "--pieces", "{}", "--into", "{}/c"], "No pieces.json"),
        (["export", "--run", "{}", "--corpus", "{}", "--into", "{}/m"], "has no checkpoint.pt"),
        (["train", "--corpus", "{}", "--into", "{}/run", "--arm", "other"], "There is no arm 'other'"),
        (["train", "--corpus", "{}", "--into", "{}/run", "--device", "cuda"], "PyTorch sees no GPU"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], said: str, tmp_path: Path, capsys: Any) -> None:
    import torch

    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert commands.main([word.format(tmp_path) for word in arguments]) == 2
    errors = capsys.readouterr().err
    assert (
        said in errors and errors.startswith("monotape: ") and "hint:" in errors and "Traceback" not in errors
    )
    assert not list(tmp_path.iterdir()) or said == "No pieces.json"


def test_what_a_table_costs_is_told_before_it_starts(tmp_path: Path, capsys: Any) -> None:
    given = [
        "table",
        "--corpus",
        str(tmp_path),
        "--into",
        str(tmp_path),
        "--predict",
        "--tokens",
        "100000000",
    ]
    assert commands.main(given) == 0
    assert "14 runs of 100M tokens: about " in capsys.readouterr().out
    assert table.AT_ONCE == 2  # one trains, one compiles


def test_a_probe_chooses_the_rates(tmp_path: Path, capsys: Any) -> None:
    runs = table.probes(tiny(), tiny().tokens)
    assert [run.settings.matrix_rate for run in runs] == [0.01, 0.02, 0.04]
    found = {}
    for run, shift in zip(runs, (0.2, 0.0, 0.1), strict=True):
        found[run.name] = {**result("tp", 4, 1, shift), "settings": run.settings.saved()}
    (tmp_path / "results.json").write_text(json.dumps(found))
    assert table.best_rates(tmp_path) == {"matrix_rate": 0.02, "embedding_rate": 0.004}
    given = ["table", "--corpus", str(tmp_path), "--into", str(tmp_path), "--rates", str(tmp_path / "none")]
    assert commands.main(given) == 2 and "has no results of probes" in capsys.readouterr().err


def test_a_run_like_another(
    corpus_folder: Path, results: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    """Its settings are the defaults, and flags come before them."""
    (tmp_path / "first").mkdir()
    settings = tiny(arm="ladder", lanes=2, tokens=2 * 8 * SEQUENCE, matrix_rate=0.03).saved()
    (tmp_path / "first" / "run.json").write_text(json.dumps({**results["tp-8-seed1"], "settings": settings}))
    given = ["train", "--corpus", str(corpus_folder), "--into", str(tmp_path / "second"), "--device", "cpu"]
    assert commands.main([*given, "--like", str(tmp_path / "first"), "--seed", "5"]) == 0
    made = json.loads((tmp_path / "second" / "run.json").read_text())
    assert made["settings"] == {**settings, "seed": 5}
    assert commands.main([*given, "--like", str(tmp_path / "none")]) == 2
    assert "is not a finished run" in capsys.readouterr().err

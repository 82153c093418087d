"""A speed that is quoted was measured on today's sources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from report import MEASURED_SOURCES, REPORTS, ROOT, publish, sources_hash

SPEEDS = sorted(REPORTS.glob("decode-cpu-*.json"))
SERVED = sorted(REPORTS.glob("serve-*.json"))


def newest_of_each_kind(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the reports of GPUs: decode, prefill, startup and compare, one each. Older ones stay as history."""
    newest: dict[str, dict[str, Any]] = {}
    for report in sorted(reports, key=lambda report: str(report["date"])):
        if "gpu" in report:
            newest[report["name"].split("-")[0]] = report
    return list(newest.values())


GPU_REPORTS = newest_of_each_kind([json.loads(path.read_text()) for path in sorted(REPORTS.glob("*.json"))])


def test_there_is_a_speed_to_quote() -> None:
    assert SPEEDS


@pytest.mark.parametrize("path", SPEEDS, ids=lambda path: path.stem)
def test_a_speed_belongs_to_these_sources(path: Path) -> None:
    """If this fails the kernels or the plan have changed: measure again with --save, and quote the new figures."""
    assert json.loads(path.read_text())["sources"] == sources_hash()


def test_a_speed_of_a_gpu_belongs_to_these_sources() -> None:
    """The same for the newest report of each kind; there may be none yet."""
    today = sources_hash("cuda")
    assert [report["name"] for report in GPU_REPORTS if report["sources"] != today] == []


@pytest.mark.parametrize("path", SERVED, ids=lambda path: path.stem)
def test_what_was_measured_of_the_server_belongs_to_these_sources(path: Path) -> None:
    """Measure again with bench/serve.py and --save when this fails."""
    assert json.loads(path.read_text())["sources"] == sources_hash("server")


def test_the_newest_report_of_each_kind_counts() -> None:
    reports = [
        {"name": "decode-h200-a", "date": "2026-01-02", "gpu": "h200"},
        {"name": "decode-h200-b", "date": "2026-01-03", "gpu": "h200"},
        {"name": "prefill-h200-a", "date": "2026-01-01", "gpu": "h200"},
        {"name": "decode-cpu-a", "date": "2026-01-09"},
    ]
    assert [report["name"] for report in newest_of_each_kind(reports)] == ["prefill-h200-a", "decode-h200-b"]


def test_a_report_names_its_commit_sources_and_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("report.REPORTS", tmp_path)
    monkeypatch.setattr("sys.argv", [str(ROOT / "bench" / "decode.py"), "--model", "/somewhere/model.gguf"])
    publish("decode-h200-x", {"gpu": "h200"}, save=True)
    publish("decode-cpu-x", {}, save=False)
    publish("serve-x", {}, save=False, measured="server")
    gpu, cpu, served = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert gpu == json.loads((tmp_path / "decode-h200-x.json").read_text())
    assert gpu["command"] == "python bench/decode.py --model model.gguf"
    assert (gpu["sources"], cpu["sources"]) == (sources_hash("cuda"), sources_hash("cpu"))
    assert served["sources"] == sources_hash("server")
    assert gpu["commit"]
    assert [path.name for path in tmp_path.iterdir()] == ["decode-h200-x.json"]


def test_what_is_hashed_is_there() -> None:
    for folders in MEASURED_SOURCES.values():
        assert all((ROOT / folder).is_dir() for folder in folders)
    assert len({sources_hash(measured) for measured in MEASURED_SOURCES}) == len(MEASURED_SOURCES)

"""A report names how it came about, and is marked where its code has changed since."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import index
import marks
from claims import documents
from machine_code import Finding, Standing
from marks import Judged, Marks
from monotape.planner.reports import load_reports
from references import expanded
from report import MEASURED_SOURCES, REPORTS, ROOT, kind_of, publish, sources_hash

REMEDY = "run `python bench/index.py`, which writes the marks; nothing needs to be measured"


@pytest.fixture(scope="module")
def judged() -> Judged:
    """All reports: for each kernel of each GPU report its plan is made again, which takes seconds."""
    return marks.judge(load_reports(REPORTS))


def test_there_is_a_speed_to_quote() -> None:
    assert list(REPORTS.glob("decode-*.json"))


def reports_of(kind: str) -> dict[str, Any]:
    return {name: one for name, one in load_reports(REPORTS).items() if kind_of(one) == kind}


def check_marks(page: Marks, kind: str, judged: Judged) -> None:
    """Wrong marks fail; marks that were written before the last edit of the code are told of, and do not fail."""
    edited = page.written_for[kind] != sources_hash(kind)
    wrong = marks.wrong_marks(page, judged)
    if wrong and edited:
        pytest.skip(f"the sources of the {kind} were edited after the marks were written: {REMEDY}: {wrong}")
    assert wrong == [], REMEDY
    if judged.untold and edited:
        pytest.skip(f"cannot tell whether these are of today's kernel; {REMEDY}: {dict(judged.untold)}")


@pytest.mark.parametrize("kind", MEASURED_SOURCES)
def test_marks_are_true(kind: str, judged: Judged) -> None:
    names = reports_of(kind).keys()
    of_kind = (
        {name: words for name, words in found.items() if name in names}
        for found in (judged.of, judged.untold)
    )
    check_marks(marks.marks_on(index.PAGE.read_text("utf-8")), kind, Judged(*of_kind))


def test_an_edit_of_the_code_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = reports_of("cpu")
    page = Marks({"cpu": sources_hash("cpu")}, marks.judge(reports).of)
    check_marks(page, "cpu", marks.judge(reports))
    for module in ("marks", __name__):
        monkeypatch.setattr(f"{module}.sources_hash", lambda kind: "edited")
    monkeypatch.setattr(marks, "standing", lambda report, compiling: Finding(Standing.TODAY))
    with pytest.raises(pytest.skip.Exception, match=r"edited after .* run `python bench/index\.py`"):
        check_marks(page, "cpu", marks.judge(reports))


def test_what_cannot_be_told_is_said(monkeypatch: pytest.MonkeyPatch, judged: Judged) -> None:
    page = Marks({"cuda": "other sources"}, judged.of)
    unknown = Finding(Standing.UNKNOWN, "another compiler")
    monkeypatch.setattr(marks, "standing", lambda report, compiling: unknown)
    with pytest.raises(pytest.skip.Exception, match=r"cannot tell .*another compiler"):
        check_marks(page, "cuda", marks.judge(reports_of("cuda")))


def test_what_cannot_be_told_keeps_its_mark() -> None:
    page = Marks({"cuda": "old"}, {"a.json": "of an earlier kernel, commit 035ea7c"})
    written = marks.new_marks(page, marks.Judged({"b.json": ""}, {"a.json": "another compiler"}))
    assert written.of == {"a.json": "of an earlier kernel, commit 035ea7c", "b.json": ""}
    assert (written.written_for["cuda"], written.written_for["cpu"]) == ("old", sources_hash("cpu"))


@pytest.mark.parametrize("path", list(documents()), ids=lambda path: path.name)
def test_a_document_cites_a_report_with_its_mark(path: Path) -> None:
    """Write the marks with `python bench/index.py`."""
    page, text = marks.marks_on(index.PAGE.read_text("utf-8")), expanded(path.read_text("utf-8"))
    assert text == marks.with_marks(text, str(path.relative_to(ROOT)), page)


def cpu_report(sources: str) -> dict[str, str]:
    return {"name": "decode-cpu-x", "commit": "0123456789abcdef", "sources": sources}


def test_a_report_of_other_sources_is_an_earlier_one() -> None:
    today, other = cpu_report(sources_hash("cpu")), cpu_report("0000")
    assert [marks.standing(one).standing for one in (today, other)] == [Standing.TODAY, Standing.EARLIER]
    assert marks.mark(today, Standing.TODAY) == ""
    assert marks.mark(other, Standing.EARLIER) == "of earlier sources, commit 0123456"


def test_a_gpu_report_without_machine_code_is_of_an_earlier_kernel() -> None:
    report = {"name": "decode-h200-x", "gpu": "h200", "commit": "035ea7c", "sources": sources_hash("cuda")}
    assert marks.standing(report).standing is Standing.EARLIER
    assert marks.mark(report, Standing.EARLIER) == "of an earlier kernel, commit 035ea7c"


def test_the_page_tells_its_marks_again() -> None:
    reports = {"a.json": cpu_report("0000"), "b.json": cpu_report(sources_hash("cpu"))}
    written = marks.new_marks(Marks({}, {}), marks.judge(reports))
    assert written.of == {"a.json": "of earlier sources, commit 0123456", "b.json": ""}
    assert marks.marks_on(index.page(reports, written)) == written
    assert marks.wrong_marks(written, marks.judge(reports)) == []


def test_a_new_report_of_a_cpu_is_marked_without_a_compiler() -> None:
    reports = {"a.json": cpu_report("0000"), "b.json": cpu_report("0000"), "c.json": {"gpu": "h200"}}
    written = marks.new_marks(Marks({}, {}), Judged({"a.json": ""}, {}))
    found = marks.same_marks(index.page({"a.json": reports["a.json"]}, written), reports)
    assert found.of == {"a.json": "", "b.json": "of earlier sources, commit 0123456"}
    assert found.written_for == written.written_for


@pytest.mark.parametrize("found", [{}, {"a.json": ""}, {"a.json": "of earlier sources, commit 7654321"}])
def test_a_wrong_mark_is_found(found: dict[str, str]) -> None:
    (sentence,) = marks.wrong_marks(Marks({}, found), marks.judge({"a.json": cpu_report("0000")}))
    assert "a.json" in sentence and "of earlier sources, commit 0123456" in sentence


def test_a_mark_on_today_s_code_is_wrong_too() -> None:
    page = Marks({}, {"a.json": "of earlier sources, commit 0123456"})
    assert len(marks.wrong_marks(page, marks.judge({"a.json": cpu_report(sources_hash("cpu"))}))) == 1


OLD = Marks({}, {"old.json": "of an earlier kernel, commit 035ea7c", "new.json": ""})


EARLIER = "of an earlier kernel, commit 035ea7c"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("[report](reports/old.json)", f"[report {EARLIER}](reports/old.json)"),
        ("[r](reports/old.json#a[b=1].c)", f"[r {EARLIER}](reports/old.json#a[b=1].c)"),
        ("[r of an earlier kernel, commit abcdef0](reports/old.json)", f"[r {EARLIER}](reports/old.json)"),
        (f"[r {EARLIER}](reports/new.json)", "[r](reports/new.json)"),
        ("[r](reports/new.json)", "[r](reports/new.json)"),
        ("[r](other/old.json)", "[r](other/old.json)"),
    ],
)
def test_citations_get_and_lose_their_marks(before: str, after: str) -> None:
    assert marks.with_marks(f"a {before}, b", "README.md", OLD) == f"a {after}, b"
    assert marks.with_marks(f"a {after}, b", "README.md", OLD) == f"a {after}, b"
    below = after.replace("(reports", "(../reports")
    assert marks.with_marks(before.replace("(reports", "(../reports"), "docs/page.md", OLD) == below


def test_kinds_of_reports() -> None:
    kinds = {name: kind_of(report) for name, report in load_reports(REPORTS).items()}
    assert kinds["serve-rates.json"] == "server"
    assert {kind for name, kind in kinds.items() if "h200" in name} == {"cuda"}
    assert kinds["decode-cpu-qwen2.5-coder-0.5b-instruct-q4_k_m-q8.json"] == "cpu"


def test_a_report_names_its_commit_sources_and_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("report.REPORTS", tmp_path)
    monkeypatch.setattr("sys.argv", [str(ROOT / "bench" / "decode.py"), "--model", "/somewhere/model.gguf"])
    publish("decode-h200-x", {"gpu": "h200", "compiler": "13.0.88", "kernels": {"x": {}}}, save=True)
    publish("decode-cpu-x", {}, save=False)
    publish("serve-x", {}, save=False, measured="server")
    gpu, cpu, served = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert gpu == json.loads((tmp_path / "decode-h200-x.json").read_text())
    assert gpu["command"] == "python bench/decode.py --model model.gguf"
    assert "sources" not in gpu and gpu["compiler"] == "13.0.88"
    assert (cpu["sources"], served["sources"]) == (sources_hash("cpu"), sources_hash("server"))
    assert gpu["commit"]
    assert [path.name for path in tmp_path.iterdir()] == ["decode-h200-x.json"]


def test_a_report_of_a_gpu_without_kernels_is_refused() -> None:
    with pytest.raises(AssertionError, match="names its kernels"):
        publish("decode-h200-x", {"gpu": "h200"}, save=False)


def test_what_is_hashed_is_there() -> None:
    for folders in MEASURED_SOURCES.values():
        assert all((ROOT / folder).is_dir() for folder in folders)
    assert len({sources_hash(measured) for measured in MEASURED_SOURCES}) == len(MEASURED_SOURCES)

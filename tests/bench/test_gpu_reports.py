"""Benchmarks of a GPU from their command line to their report, with the kernel's sources on the host."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import collective
import compare
import decode
import machine_code
import measuring
import prefill
from backends.host_kernel import host_gpu
from energy import NoCounter
from machine_code import Standing, finding
from monotape.backends.cuda.bandwidth import HEADER
from monotape.backends.cuda.compilation import compile_kernel
from peer_task import Task
from recipes import Recipe, recipe_of
from shapes import SHAPES

TINY = {
    **SHAPES["dense-2b"], "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 128,
}  # fmt: skip
WORKERS = 5  # of the fake GPU


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The headers of the kernels that reports name, in place of the minutes that the compiler would take for them."""
    asked: list[str] = []
    cubin = compile_kernel(HEADER, "bandwidth.cu")

    def found(header: str, source: str) -> bytes:
        asked.append(header)
        return cubin

    monkeypatch.setattr(machine_code, "compile_kernel", found)
    monkeypatch.setattr(machine_code, "cached_path", lambda header, source: Path(__file__))
    return asked


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiled: list[str]) -> Iterator[Path]:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setattr("report.REPORTS", tmp_path / "reports")
    for module in (decode, prefill, compare):
        monkeypatch.setattr(module, "read_bandwidth", lambda backend: 1e9)
    monkeypatch.setattr(decode, "open_counter", lambda name: NoCounter("no NVML"))
    with host_gpu():
        yield tmp_path / "reports"


def run(main: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["bench/x.py", *arguments])
    main()


MODEL = ("--backend", "cuda", "--model", "tiny", "--requests", "1", "--save")


def checked(path: Path) -> dict[str, Any]:
    """A report that holds what makes its kernels again."""
    report: dict[str, Any] = json.loads(path.read_text())
    assert list(report["kernels"]) == [f"tiny bf16, {WORKERS} workers", "bandwidth.cu"]
    assert report["compiler"] == machine_code.compiler_here() and "sources" not in report
    assert finding(report, compiling=False).standing is Standing.TODAY
    recipe = recipe_of(report["kernels"][f"tiny bf16, {WORKERS} workers"])
    assert recipe.header() == Recipe(shape="tiny", workers=WORKERS, context=recipe.context).header()
    return report


def test_a_decode_report(reports: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run(decode.main, monkeypatch, *MODEL, "--contexts", "5", "--tokens", "4")
    report = checked(reports / "decode-h200-tiny-bf16.json")
    (row,) = report["results"]
    assert row["tokens_per_second"]["runs"] == 1
    assert (row["joules_per_token"], row["joules_missing"]) == (None, "no NVML")
    assert Recipe(shape="tiny", workers=WORKERS, context=9).header() in compiled


def test_a_prefill_report(reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(prefill.main, monkeypatch, *MODEL, "--prompts", "3,9", "--second-turn", "4,2")
    report = checked(reports / "prefill-h200-tiny-bf16.json")
    assert [row["prompt"] for row in report["prefill"]] == [3, 9, 6]


def test_our_own_part_of_a_comparison(reports: Path) -> None:
    task = Task("tiny", (5,), (3,), tokens=4, requests=1)
    answer, facts = compare.own_answer(argparse.Namespace(backend="cuda"), task)
    assert list(facts["kernels"]) == [f"tiny bf16, {WORKERS} workers", "bandwidth.cu"]
    assert set(answer.tokens_per_second) == {5} and set(answer.first_token_s) == {3}


def test_a_report_of_sums_over_ranks(reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "measure", lambda options: [])
    monkeypatch.setattr(collective, "nccl_rows", lambda options: [])
    run(collective.main, monkeypatch, "--ranks", "2,4", "--save")
    report = json.loads((reports / "collective-h200.json").read_text())
    assert list(report["kernels"]) == ["collective.cu, 2 ranks", "collective.cu, 4 ranks"]


def test_a_cpu_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cpu:
        name = "cpu"

    cpu: Any = Cpu()
    assert measuring.kernel_facts(cpu, "tiny", None) == {}

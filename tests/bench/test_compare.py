"""Engines side by side: what peers measured in their own processes, why they failed, one report of one machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import compare
import headline
import peer_child
import peer_task
from claims import Claim, claims_in
from fields import field_of
from index import page
from marks import Marks
from peer_task import Answer, Task, ask, read_answer
from shapes import SHAPES, config_json
from waiting import PATIENCE_S, until

TASK = Task("smollm2-135m", (5, 9), (3,), tokens=6, requests=2, device="cpu")
SPEED = {"median": 100.0, "min": 90.0, "max": 110.0, "runs": 2}


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """vllm is the stand-in, for this process and its children; the file is what it was asked."""
    package = tmp_path / "site" / "vllm"
    package.mkdir(parents=True)
    shutil.copy(Path(__file__).parent / "fake_vllm.py", package / "__init__.py")
    path = os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("FAKE_VLLM_LOG", str(tmp_path / "log"))
    return tmp_path / "log"


def entries(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_vllm_is_asked_for_what_the_others_are_asked_for(log: Path) -> None:
    answer = ask("vllm", TASK, 100)
    assert answer.error == ""
    assert answer.version == "9.9.9" and "prefix caching off" in answer.settings
    assert answer.start_s is not None
    assert {length: len(runs) for length, runs in answer.tokens_per_second.items()} == {5: 2, 9: 2}
    assert {length: len(runs) for length, runs in answer.first_token_s.items()} == {3: 2}
    start, *requests = entries(log)
    assert start["settings"]["enable_prefix_caching"] is False and start["settings"]["enforce_eager"] is False
    assert start["settings"]["max_num_seqs"] == 1 and start["settings"]["max_model_len"] >= 9 + 6
    assert start["config"] == config_json("smollm2-135m")
    assert all(one["temperature"] == 0 and one["ignore_eos"] for one in requests)
    first = [one["prompt"] for one in requests if len(one["prompt"]) == 3]
    assert (
        len({tuple(prompt) for prompt in first}) == len(first) == 4
    )  # a prompt twice would be found in a cache


@pytest.mark.parametrize(
    ("mode", "error"),
    [
        ("no memory", "RuntimeError: not enough memory for the KV cache"),
        ("dies in decode", 'ended with 7: File "worker.py": CUDA error'),
        ("hangs in decode", f"took longer than {PATIENCE_S:.0f} s"),
        ("stops early", "AssertionError: vLLM made 0 of 1 tokens"),
    ],
)
def test_a_peer_that_fails_leaves_its_error_and_what_it_had(
    log: Path, monkeypatch: pytest.MonkeyPatch, mode: str, error: str
) -> None:
    monkeypatch.setenv("FAKE_VLLM", mode)
    if mode.startswith("hangs"):
        monkeypatch.setattr(peer_task.subprocess, "run", from_decode_on(log))
    answer = ask("vllm", TASK, PATIENCE_S)
    assert answer.error.startswith(error)
    assert answer.tokens_per_second == {}
    assert set(answer.first_token_s) == ({3} if mode.endswith("in decode") else set())


def from_decode_on(log: Path) -> Callable[..., Any]:
    """subprocess.run, whose time is nearly over when a peer begins to decode: a start takes as long as it takes."""

    def run(command: list[str], *, timeout: float, capture_output: bool, check: bool, **more: Any) -> Any:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, **pipes, **more) as process:
            until(lambda: log.exists() and any(one.get("max_tokens", 0) > 1 for one in entries(log)))
            try:
                process.communicate(timeout=0.5)
            except subprocess.TimeoutExpired:
                raise subprocess.TimeoutExpired(command, timeout) from None
            finally:
                process.kill()

    return run


TINY = {
    **SHAPES["llama-3.1-8b"], "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 77,
}  # fmt: skip


@pytest.mark.parametrize(
    "engine",
    [
        "torch-eager",
        pytest.param("torch-compile-layer", marks=[pytest.mark.long, pytest.mark.wide]),
        "transformers",
        "transformers-static",
    ],
)
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of its compiler, about itself
def test_peers_of_pytorch_answer(engine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch

    import peers_gpu

    monkeypatch.setattr(peers_gpu, "DTYPE", torch.float32)  # bf16 is emulated on some CPUs, with a warning
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    path = tmp_path / "answer.json"
    task = json.dumps(asdict(replace(TASK, shape="tiny")))
    monkeypatch.setattr("sys.argv", ["peer_child.py", engine, task, str(path)])
    assert peer_child.main() == 0
    answer = read_answer(path)
    assert answer.error == ""
    assert set(answer.tokens_per_second) == {5, 9} and set(answer.first_token_s) == {3}
    assert "torch" in answer.version


def test_a_prefill_in_pytorch_is_its_steps() -> None:
    import torch

    from monotape.models.registry import spec_from_config
    from torch_model import TorchDecoder

    torch.manual_seed(2)
    model = TorchDecoder(spec_from_config(TINY), 20, torch.float32, "cpu")
    tokens = torch.arange(3, 14)
    with torch.no_grad():
        for place, token in enumerate(tokens):
            one = model(token[None], torch.tensor([place]))
        kept = model.kv[:, :, :, :, :11].clone()
        assert torch.equal(model.prefill(tokens), one)
        assert torch.allclose(model.kv[:, :, :, :, :11], kept, atol=1e-5)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs bench/compare.py with arguments, with engines that answer at once; returns the saved report."""
    for module in ("report", "compare"):
        monkeypatch.setattr(f"{module}.REPORTS", tmp_path)
    monkeypatch.setattr(compare, "available", lambda engine: engine != "torch-eager")
    monkeypatch.setattr(compare, "machine_facts", lambda options: {"gpu": "h200", "lease": "aaaa"})
    kernels = {"compiler": "13.0.88", "kernels": {"x": {"machine_code": "abcd"}}, "read_bandwidth": 4e12}
    own = Answer("", "", 1.0, {32: [1600.0, 1700.0]}, {32: [0.002, 0.004]})
    monkeypatch.setattr(
        compare, "own_answer", lambda options, task: (own, {**kernels, "ceilings": {32: 2000.0}})
    )
    peer = Answer("9.9", "some", 2.0, {32: [600.0, 500.0, 700.0]}, {32: [0.012]})
    monkeypatch.setattr(compare, "ask", lambda engine, task, timeout: peer)

    def run(*arguments: str) -> dict[str, Any]:
        monkeypatch.setattr(
            "sys.argv", ["bench/compare.py", "--shapes", "llama-3.2-1b", "--save", *arguments]
        )
        compare.main()
        found: dict[str, Any] = json.loads((tmp_path / "compare-h200-llama-3.2-1b.json").read_text())
        return found

    return run


def test_one_report_has_all_engines_beside_each_other(call: Callable[..., dict[str, Any]]) -> None:
    report = call("--engines", "monotape,vllm")
    (decode,), (first,) = report["decode"], report["first_token"]
    assert decode["tokens_per_second"]["monotape"]["median"] == 1650.0
    assert decode["tokens_per_second"]["vllm"] == {"median": 600.0, "min": 500.0, "max": 700.0, "runs": 3}
    assert decode["ceiling_tokens_per_second"] == 2000.0
    assert decode["monotape_times_as_fast"] == {"vllm": 1650 / 600}
    assert first["first_token_ms"]["vllm"]["median"] == 12.0
    assert first["monotape_times_as_fast"] == {"vllm": pytest.approx(4.0)}
    assert [(row["engine"], row.get("version")) for row in report["engines"]] == [
        ("monotape", None), ("vllm", "9.9"),
    ]  # fmt: skip
    assert report["kernels"] and report["compiler"] == "13.0.88" and "sources" not in report


def test_engines_join_in_further_calls(call: Callable[..., dict[str, Any]]) -> None:
    first = call("--engines", "monotape")
    second = call("--engines", "vllm", "--merge")
    third = call("--engines", "transformers,torch-eager", "--merge")
    assert [row["engine"] for row in third["engines"]] == ["monotape", "vllm", "transformers", "torch-eager"]
    assert third["engines"][:2] == second["engines"] and second["engines"][:1] == first["engines"]
    assert all(
        row["date"] and row["measured_in_s"] >= 0 and "compare.py" in row["command"]
        for row in third["engines"]
    )
    assert third["engines"][3]["error"] == "not installed here"
    assert set(third["decode"][0]["tokens_per_second"]) == {"monotape", "vllm", "transformers"}
    assert set(third["decode"][0]["monotape_times_as_fast"]) == {"vllm", "transformers"}
    again = call("--engines", "vllm", "--merge")
    assert [row["engine"] for row in again["engines"]] == ["monotape", "transformers", "torch-eager", "vllm"]


def test_what_was_measured_elsewhere_is_not_joined(
    call: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="Leave out --merge the first time"):
        call("--engines", "vllm", "--merge")
    with pytest.raises(SystemExit, match="measure monotape first"):
        call("--engines", "vllm")
    call("--engines", "monotape")
    with pytest.raises(SystemExit, match="has 256 as its tokens, not 64"):
        call("--engines", "vllm", "--merge", "--tokens", "64")
    monkeypatch.setattr(compare, "machine_facts", lambda options: {"gpu": "h200", "lease": "bbbb"})
    with pytest.raises(SystemExit, match=r"'aaaa' as its lease, not 'bbbb'\. Measure it all anew"):
        call("--engines", "vllm", "--merge")


def test_unknown_engines_are_named(call: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(SystemExit, match="Unknown: sglang"):
        call("--engines", "sglang")


def test_the_headline_shows_engines_of_one_run_and_names_its_fields(
    call: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call("--engines", "monotape")
    report = call("--engines", "vllm,torch-eager", "--merge")
    name = "compare-h200-llama-3.2-1b.json"
    before = f"# A\n\n{headline.BEGIN}old\n{headline.END}\n\nrest\n"
    text = headline.with_headline(before, {name: report, "compare-h200-dense-2b.json": report})
    assert "|  | Monotape | vLLM 9.9 | evidence |" in text
    assert "| llama-3.2-1b, decode at 32 | 1,650 tok/s | 600 tok/s | [report](reports/" in text
    assert "| llama-3.2-1b, first token after a prompt of 32 | 3.00 ms | 12.0 ms | [report](reports/" in text
    assert "dense-2b" not in text and "old" not in text and text.endswith("\n\nrest\n")
    assert headline.with_headline(text, {name: report}) == text
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / name).write_text(json.dumps(report))
    monkeypatch.setattr("claims.ROOT", tmp_path)
    found = list(claims_in("README.md", text))
    assert len(found) == 4 and all(isinstance(claim, Claim) for claim in found)
    assert [claim.complaint() for claim in found] == [None] * 4
    assert field_of(tmp_path / "reports" / name, "decode[0].monotape_times_as_fast.vllm").value == 1650 / 600


def test_the_headline_needs_vllm_and_says_where_runs_differ(call: Callable[..., dict[str, Any]]) -> None:
    name = "compare-h200-llama-3.2-1b.json"
    assert headline.headline({name: call("--engines", "monotape,transformers")}) == ""
    report = call("--engines", "monotape,vllm")
    for row, field in (
        (report["decode"][0], "tokens_per_second"),
        (report["first_token"][0], "first_token_ms"),
    ):
        for runs in row[field].values():
            runs |= {"min": 0.96 * runs["median"], "max": 1.04 * runs["median"]}
    assert "differ" not in headline.headline({name: report})
    report["decode"][0]["tokens_per_second"]["vllm"]["max"] = 640.0
    assert "Runs of vLLM differ by more than a tenth" in headline.headline({name: report})
    del report["first_token"][0]["first_token_ms"]["vllm"]
    assert "| 3.00 ms | not in time | [report](" in headline.headline({name: report})


def test_the_headline_says_that_decode_alone_was_measured_later(call: Callable[..., dict[str, Any]]) -> None:
    report = call("--engines", "monotape,vllm")
    name, alone = "compare-h200-llama-3.2-1b.json", "decode-h200-llama-3.2-1b-bf16.json"
    said = "[decode was measured again](docs/performance.md#decode) later"
    assert said in headline.headline({name: report, alone: {"gpu": "h200", "date": "9999-01-01"}})
    assert said not in headline.headline({name: report, alone: {"gpu": "h200", "date": "1999-01-01"}})
    assert said not in headline.headline({name: report})


def test_the_whole_comparison_has_every_engine_and_how_many_times_as_fast_monotape_is(
    call: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = call("--engines", "monotape,vllm,transformers")
    early = {
        "gpu": "h200", "context": 32, "engines": [
            {"engine": "monotape, tiny", "tokens_per_second": 1000.0},
            {"engine": "transformers, tiny", "tokens_per_second": 50.0, "monotape_over_it": 20.0},
        ],
    }  # fmt: skip
    reports = {"compare-h200-llama-3.2-1b.json": report, "compare-h200-tiny.json": early}
    text = headline.comparison(reports, folder="reports")
    assert "|  | Monotape | vLLM 9.9 | `transformers` | evidence |" in text
    assert (
        "| llama-3.2-1b, decode at 32 | 1,650 tok/s | 600 tok/s, 2.75x | 600 tok/s, 2.75x | [report](" in text
    )
    assert "| llama-3.2-1b, first token after a prompt of 32 | 3.00 ms | 12.0 ms, 4.00x |" in text
    assert "| tiny, decode at 32 | 1,000 tok/s |  | 50.0 tok/s, 20.0x | [report](" in text
    (tmp_path / "reports").mkdir()
    for name, one in reports.items():
        (tmp_path / "reports" / name).write_text(json.dumps(one))
    monkeypatch.setattr("claims.ROOT", tmp_path)
    assert [claim.complaint() for claim in claims_in("README.md", text)] == [None] * 13


def test_the_page_of_reports_shows_every_engine(call: Callable[..., dict[str, Any]]) -> None:
    report = call("--engines", "monotape,vllm")
    text = page({"x.json": report}, Marks({}, {"x.json": ""}))
    assert "| machine code of x | abcd |" in text and "| compiler | NVRTC 13.0.88 |" in text
    assert (
        "tokens per second at monotape 1,650 (1,600 to 1,700, 2 runs); tokens per second at vllm 600" in text
    )


def test_a_readme_without_a_place_for_it_is_told() -> None:
    with pytest.raises(SystemExit, match="no place for its headline"):
        headline.with_headline("# A\n", {})
    assert headline.headline({"decode-h200-x.json": {"gpu": "h200"}}) == ""


def test_our_own_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    import argparse

    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setattr(compare, "read_bandwidth", lambda backend: 1e9)
    task = Task("tiny", (5, 9), (3,), tokens=6, requests=2, device="cpu")
    answer, facts = compare.own_answer(argparse.Namespace(backend="cpu"), task)
    assert {length: len(runs) for length, runs in answer.tokens_per_second.items()} == {5: 2, 9: 2}
    assert {length: len(runs) for length, runs in answer.first_token_s.items()} == {3: 2}
    assert set(facts["ceilings"]) == {5, 9} and facts["read_bandwidth"] == 1e9


def test_a_lease_is_a_machine_since_it_started() -> None:
    assert compare.lease("gpu a") == compare.lease("gpu a") != compare.lease("gpu b")

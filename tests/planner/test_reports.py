"""Measured points: from reports of this engine and from its peers, each against its ceiling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from monotape.errors import UsageError
from monotape.planner.catalogue import DATA
from monotape.planner.compared import built_in_times, timed
from monotape.planner.estimate import estimate
from monotape.planner.reports import (
    built_in_points,
    built_in_table,
    cpu_shares,
    load_reports,
    own_points,
    peer_points,
    points_for,
)
from planner.loads import box_of
from shapes import ROUND


def decode_report(share: float = 0.66, **more: Any) -> dict[str, Any]:
    row = {
        "context": 32, "tokens_per_second": {"median": 25.0, "min": 24.0, "max": 26.5, "runs": 5},
        "bytes_per_token": 530_000_000, "bandwidth_share": share, "p99_over_p50": 1.07,
    }  # fmt: skip
    return {
        "name": "decode-cpu-some-q8", "command": "python bench/decode.py --save", "date": "2026-11-15T00:00:00+00:00",
        "commit": "0123456789abcdef", "uncommitted_changes": False, "sources": "feedbeef00112233",
        "machine": {"architecture": "aarch64", "processor": "Some CPU"}, "model": "some.gguf", "backend": "cpu",
        "dtype": "q8", "read_bandwidth": 2.1e10, "weight_bytes": 527_000_000, "results": [row],
        "peers": {"llama.cpp": {"median": 20.0, "min": 19.0, "max": 21.0, "runs": 5}}, **more,
    }  # fmt: skip


def write(folder: Path, name: str, report: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(report))
    return folder


def test_decode_reports_become_points_and_others_do_not(tmp_path: Path) -> None:
    write(tmp_path, "b.json", decode_report())
    write(tmp_path, "a.json", {"name": "humaneval", "runs": []})
    (point,) = own_points(load_reports(tmp_path))
    assert (point.label, point.machine, point.context, point.tokens_per_second) == (
        "Monotape, cpu",
        "Some CPU",
        32,
        25.0,
    )
    assert point.share == 0.66
    assert point.source == "reports/b.json"
    assert point.own


@pytest.mark.parametrize("shape", ROUND)
def test_shapes_for_comparison_are_no_models(tmp_path: Path, shape: str) -> None:
    write(tmp_path, "round.json", decode_report(gpu="h200", backend="cuda", model=shape, dtype="bf16"))
    assert own_points(load_reports(tmp_path)) == ()


def test_a_gpu_report_stands_beside_the_peers(tmp_path: Path) -> None:
    write(tmp_path, "gpu.json", decode_report(gpu="h200", backend="cuda", model="llama-3.2-1b", dtype="bf16"))
    points = points_for(box_of("h200"), "meta-llama/Llama-3.2-1B", "bf16", load_reports(tmp_path))
    assert [point.label for point in points if point.own] == ["Monotape, cuda"]
    assert len(points) > 10


def test_the_share_of_cpus_is_the_median_over_reports(tmp_path: Path) -> None:
    for number, share in enumerate((0.5, 0.7, 0.64)):
        write(tmp_path, f"{number}.json", decode_report(share))
    shares, source = cpu_shares(own_points(load_reports(tmp_path)))
    assert shares == [(32, 0.64)]
    assert all(f"some.gguf in q8 on Some CPU, reports/{number}.json" in source for number in range(3))


def test_the_points_that_the_package_carries_are_those_of_the_reports() -> None:
    """Write them anew with `python bench/index.py`."""
    reports = load_reports(Path(__file__).parents[2] / "reports")
    assert built_in_points() == own_points(reports)
    assert built_in_times() == timed(reports)
    assert (DATA / "measured.json").read_text("utf-8") == built_in_table(reports)


def test_runs_that_are_far_apart_and_quantised_weights_say_nothing_of_prompts() -> None:
    steady = {"median": 20.0, "min": 19.5, "max": 21.0, "runs": 5}
    row = {"prompt": 64, "first_token_ms": {"monotape": steady, "vllm": {**steady, "max": 23.0}}}
    report = {
        "gpu": "h200", "dtype": "bf16", "engines": [], "first_token": [row],
        "decode": [{"context": 32, "tokens_per_second": {"vllm": {**steady, "min": 15.0}}}],
    }  # fmt: skip
    (one,) = timed({"compare-h200-llama-3.2-1b.json": report})
    assert (one.engine, one.length, one.seconds) == ("monotape", 64, pytest.approx(0.02))
    assert timed({"compare-h200-llama-3.2-1b-int4.json": {**report, "dtype": "int4-g128"}}) == ()
    assert timed({"compare-h200-a-shape.json": report, "compare-cpu.json": {"dtype": "bf16"}}) == ()


def test_the_cpu_engine_predicts_from_reports(tmp_path: Path) -> None:
    write(tmp_path, "one.json", decode_report(0.66))
    found = estimate(
        "smollm2-135m", gpu="cpu", bandwidth_tbs=0.021, dtype="q8", engine="cpu", reports=tmp_path
    )
    assert found.prediction is not None
    assert 1e6 / found.prediction.total_us == pytest.approx(0.66 * 0.021e12 / found.token_bytes)
    assert "reports/one.json" in found.engine.assumption(found.load, found.box)


def test_reports_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no folder with reports"):
        load_reports(tmp_path / "none")
    with pytest.raises(UsageError, match="No report holds"):
        cpu_shares(own_points(load_reports(tmp_path)))
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(UsageError, match=r"broken\.json cannot be read"):
        load_reports(tmp_path)
    write(tmp_path, "broken.json", [1])
    with pytest.raises(UsageError, match="holds no report"):
        load_reports(tmp_path)


def test_peers_reach_the_shares_that_were_worked_out_for_them() -> None:
    shares = {(point.label, point.context, point.dtype, point.model): point.share for point in peer_points()}
    llama = "meta-llama/Llama-3.2-1B"
    assert shares["PyTorch + torch.compile", 32, "bf16", llama] == pytest.approx(0.44, abs=0.005)
    assert shares["Hazy Research Megakernels", 32, "bf16", llama] == pytest.approx(0.70, abs=0.005)
    assert shares["Hazy Research Megakernels", 8192, "bf16", llama] == pytest.approx(229 / 1672, abs=0.003)
    assert shares["llama.cpp b21e4de", 32, "int4", llama] == pytest.approx(1045 / 6590, abs=0.003)


def test_points_belong_to_one_model_one_format_and_one_device() -> None:
    model = "meta-llama/Llama-3.2-1B"
    assert {point.dtype for point in points_for(box_of("h200"), model, "bf16", {})} == {"bf16"}
    assert len(points_for(box_of("h200"), model, "q8", {})) == 1
    assert points_for(box_of("h200", 2), model, "bf16", {}) == ()
    assert points_for(box_of("h100"), model, "bf16", {}) == ()

"""What inspect and doctor say of GPUs: one that can be used, one that cannot, and none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backends.fake_cuda import FakeCuda, fake_gpu
from families import Case, make_checkpoint
from monotape.backends.cuda import detection
from monotape.backends.cuda.detection import Gpu
from monotape.cli import doctor
from monotape.cli.main import main


def test_inspect_prints_what_a_gpu_would_do_that_is_not_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two kinds of layers, on a GPU's pages, words, units and rows; nothing of a CPU's."""
    fields = {"head_dim": 16, "use_sliding_window": True, "sliding_window": 48, "max_window_layers": 1}
    folder = make_checkpoint(Case("inspected", "qwen2", fields), tmp_path, "bfloat16")
    arguments = ["inspect", str(folder), "--backend", "cuda", "--workers", "132"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "layers   full: 0 (" in shown and "window 48: 1-2 (" in shown
    assert "units of 32 positions" in shown and "256 rows a pass" in shown
    assert "reset at down, listed" in shown and "qkv_bias" in shown
    assert "GPU memory" in shown and "KV of 160 positions" in shown
    assert "float32" not in shown and "128 positions a block" not in shown
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plan"]["plan"]["machine"]["workers"] == 132
    assert found["plan"]["ranks"][0]["layer_kinds"] == [0, 1, 1]
    assert found["memory"]["kv_per_position"] == 3 * 2 * (32 + 16) * 2  # keys are padded to blocks of 32


def test_inspect_refuses_what_the_kernel_does_not_run(
    checkpoint: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["inspect", str(checkpoint("llama-tied")), "--backend", "cuda", "--workers", "132"]
    assert main(arguments) == 2
    assert "does not run heads of 10 values" in capsys.readouterr().err


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    def look(gpu: Gpu | None, importable: bool = True) -> list[Any]:
        monkeypatch.setattr(detection, "find_gpu", lambda: gpu)
        monkeypatch.setattr(detection, "_importable", lambda module: importable)
        return list(doctor._gpu())

    return look


def test_doctor_without_a_gpu(found: Callable[..., list[Any]]) -> None:
    (finding,) = found(None)
    assert finding.good and "models run on the CPU" in finding.found


def test_doctor_with_another_gpu(found: Callable[..., list[Any]]) -> None:
    (finding,) = found(Gpu("NVIDIA L4", (8, 9)))
    assert finding.good and not finding.fix
    assert "The GPU is a NVIDIA L4; the CUDA backend is written for Hopper" in finding.found


def test_doctor_with_a_hopper_whose_packages_are_missing(found: Callable[..., list[Any]]) -> None:
    (finding,) = found(Gpu("NVIDIA H200", (9, 0)), importable=False)
    assert not finding.good
    assert finding.fix == "pip install 'monotape[cuda]'"


def test_doctor_measures_a_hopper(
    found: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MONOTAPE_CACHE", str(tmp_path))
    monkeypatch.setattr("monotape.backends.cuda.bandwidth.measure_bandwidth", lambda: 4.5e12)
    with fake_gpu(FakeCuda(memory=141 * 10**9)):
        gpu, bandwidth = found(Gpu("NVIDIA H200", (9, 0)))
    assert gpu.found == "NVIDIA H200, 5 multiprocessors, 141.0 of 141.0 GB free"
    assert bandwidth.found == "4,500 GB/s read"
    assert list(tmp_path.iterdir())


def test_doctor_keeps_the_best_bandwidth_of_a_gpu(
    found: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from monotape.backends.cuda.bandwidth import known_bandwidth

    monkeypatch.setenv("MONOTAPE_CACHE", str(tmp_path))
    shown = []
    for today in (4.5e12, 2.0e12, 4.6e12):
        monkeypatch.setattr("monotape.backends.cuda.bandwidth.measure_bandwidth", lambda today=today: today)
        with fake_gpu(FakeCuda(memory=141 * 10**9)):
            shown.append(found(Gpu("NVIDIA H200", (9, 0)))[1].found)
            assert known_bandwidth() == max(4.5e12, today)
    assert shown[1] == "4,500 GB/s read; only 2,000 GB/s now: another program uses the GPU"
    assert shown[2] == "4,600 GB/s read"

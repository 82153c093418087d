"""`monotape trace`: from a model to a table and a file, on a backend that makes its records up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from backends.fake_cuda import FakeCuda, fake_gpu
from monotape.backends.cuda.trace import RECORD, TraceRecords
from monotape.cli.main import main
from monotape.errors import BackendUnavailable


class TracedBackend:
    """Two workers, one stage of 2 us a token."""

    spec = SimpleNamespace(vocab=100)

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], int]] = []
        self.closed = False

    def trace(self, prompt: Sequence[int], tokens: int) -> TraceRecords:
        self.asked.append((list(prompt), tokens))
        rows = [
            (w, t, 0, 0, 5000 * t, 500, 5000 * t + 2000, 900, 100, 50)
            for w in range(2)
            for t in range(tokens)
        ]
        return TraceRecords(np.array(rows, RECORD), ("qkv",), {"qkv": 4_000_000})

    def close(self) -> None:
        self.closed = True


def test_a_trace_is_written_and_summed_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = TracedBackend()
    asked: list[Any] = []

    def load(config: Any) -> Any:
        asked.append(config)
        return SimpleNamespace(backend=backend)

    monkeypatch.setattr("monotape.engine.startup.load", load)
    monkeypatch.setattr("monotape.backends.cuda.bandwidth.known_bandwidth", lambda: 4e12)
    out = tmp_path / "trace.json"
    assert main(["trace", "some-model", "--tokens", "3", "--context", "20", "--out", str(out)]) == 0
    assert (asked[0].backend, asked[0].max_model_len) == ("cuda", 24)
    assert [(len(prompt), tokens) for prompt, tokens in backend.asked] == [(20, 3)]
    assert max(backend.asked[0][0]) < 100
    assert backend.closed
    shown = capsys.readouterr().out
    (stage,) = [line.split() for line in shown.splitlines() if line.startswith("qkv")]
    assert stage[1:] == ["2.00", "0.50", "0.90", "0.10", "0.05", "0.55", "1.00", "50.0%"]
    assert "4,000 GB/s" in shown
    assert len(json.loads(out.read_text())["traceEvents"]) == 2 + 2 * 3 * 2


@pytest.mark.parametrize("flag", ["--tokens", "--context"])
def test_nothing_cannot_be_traced(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "some-model", flag, "0"]) == 2
    assert "at least one token" in capsys.readouterr().err


def test_another_gpu_is_refused_by_name(checkpoint: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_gpu(FakeCuda("NVIDIA L4", (8, 9))):
        assert main(["trace", str(checkpoint("llama-tied")), "--tokens", "1"]) == 2
    assert "The GPU is a NVIDIA L4" in capsys.readouterr().err


def test_without_a_gpu_no_other_backend_is_recommended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(config: Any) -> Any:
        raise BackendUnavailable("No NVIDIA GPU can be used here.", "Use --backend cpu.")

    monkeypatch.setattr("monotape.engine.startup.load", load)
    assert main(["trace", "some-model"]) == 2
    said = capsys.readouterr().err
    assert "No NVIDIA GPU can be used here." in said and "--backend" not in said


def test_what_can_be_installed_is_still_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a Hopper GPU without the packages the hint was that only a Hopper GPU is recorded."""

    def load(config: Any) -> Any:
        raise BackendUnavailable("The CUDA packages are not installed.", "pip install 'monotape[cuda]'")

    monkeypatch.setattr("monotape.engine.startup.load", load)
    assert main(["trace", "some-model"]) == 2
    assert "hint: pip install" in capsys.readouterr().err

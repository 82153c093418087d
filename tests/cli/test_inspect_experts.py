"""What `monotape inspect` says of a mixture of experts, and what is refused for want of memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from backends.host_setups import CASES as KERNEL_CASES
from families import make_checkpoint
from monotape.cli.main import main
from monotape.engine import loading
from monotape.engine.loading import load_backend
from monotape.errors import ResourceError
from monotape.models.registry import spec_from_config
from monotape.weights.open import open_checkpoint

Checkpoints = Callable[[str], Path]
Captured = pytest.CaptureFixture[str]


def test_inspect_shows_experts_library_and_active_parameters(
    checkpoint: Checkpoints, capsys: Captured
) -> None:
    assert main(["inspect", str(checkpoint("gpt-oss")), "--workers", "3", "--backend", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "4 of 11, weighed by a softmax over the chosen ones" in shown
    assert "qkv -> attention -> output -> router -> gate_up -> down" in shown
    assert "library  [3 layers][11 experts]" in shown
    assert main(["inspect", str(checkpoint("gpt-oss")), "--workers", "3", "--backend", "cpu", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    spec = spec_from_config(open_checkpoint(checkpoint("gpt-oss")).config)
    expert = 3 * 54 * 76 + 2 * 76 + 54
    idle = facts["model"]["parameters"] - facts["model"]["active_per_token"] - (spec.vocab - 1) * spec.width
    assert idle == 3 * (11 - 4) * expert
    library = facts["plan"]["ranks"][0]["library"]
    assert (library["experts"], library["chosen"], library["bias_bytes"]) == (
        11,
        4,
        3 * 11 * 4 * (2 * 76 + 54),
    )


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_memory_counts_all_experts(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """Enough for what a token reads, and not for the model."""
    opened = open_checkpoint(checkpoint("qwen3-moe"))
    spec = spec_from_config(opened.config)
    monkeypatch.setattr(loading, "available_memory", lambda: 4 * spec.active_parameters + 100_000)
    with pytest.raises(ResourceError, match=r"need 0\.00 GB of memory and 0\.00 GB are available"):
        load_backend(backend, spec, opened, context=160, workers=2)


def test_inspection_for_gpus(tmp_path: Path, capsys: Captured) -> None:
    folder = str(make_checkpoint(KERNEL_CASES["experts"], tmp_path / "model"))
    for backend, workers in (("cuda", "132"), ("hip", "304")):
        assert main(["inspect", folder, "--backend", backend, "--workers", workers]) == 0
        said = capsys.readouterr().out
        assert "every worker chooses 3 of 7 experts, weights by a softmax of the chosen logits" in said
        assert "of 3 experts, dealt out together" in said and "of each of 3 experts" in said


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b", "qwen3-30b-a3b", "mixtral-8x7b"])
def test_plan_knows_the_shapes_and_counts_active_experts(name: str, capsys: Captured) -> None:
    assert main(["plan", name, "--gpu", "h200", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    text = json.dumps(found)
    assert "experts" in text
    assert main(["plan", name, "--gpu", "rtx-4090", "--dtype", "bf16"]) == 0
    assert "does not fit" in " ".join(capsys.readouterr().out.split())

"""weights/summary.py and formats.py: how a model is stored, in a word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from monotape.cli.main import main
from monotape.weights.formats import stored_formats
from monotape.weights.open import open_checkpoint
from monotape.weights.summary import stored_summary
from weights.gguf_models import SHAPES, write_wide_model


def test_the_format_of_most_weights_of_a_gguf(tmp_path: Path) -> None:
    path = write_wide_model(tmp_path / "m.gguf", {**dict.fromkeys(SHAPES, Kind.Q4_K), "ffn_down": Kind.Q6_K})
    assert stored_summary(path) == stored_summary(tmp_path) == "q4_k"
    shares = stored_formats(open_checkpoint(path))
    assert list(shares) == ["q4_k", "q6_k", "f16", "f32"]
    assert sum(shares.values()) == pytest.approx(1)
    path.write_bytes(b"GGUF" + b"\xff" * 40)
    assert stored_summary(path) == ""


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "bfloat16"}, "bf16"), ({"torch_dtype": "float16"}, "f16"), ({}, ""),
        ({"dtype": "float16", "quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"dtype": "float16", "quantization_config": {"method": "gptq"}}, "gptq"),
    ],
)  # fmt: skip
def test_a_folder_says_it_in_its_config(tmp_path: Path, config: dict[str, object], expected: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert stored_summary(tmp_path) == expected


def test_inspect_shows_how_weights_are_stored_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_wide_model(tmp_path / "m.gguf", {**dict.fromkeys(SHAPES, Kind.Q4_K), "ffn_down": Kind.Q6_K})
    assert main(["inspect", str(path), "--backend", "cuda", "--workers", "3"]) == 0
    text = capsys.readouterr().out
    assert "stored as        q4_k 77.1 %, q6_k 22.0 %, f16 0.8 %" in text
    assert main(["inspect", str(path), "--backend", "cpu", "--workers", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["model"]["stored_as"]) == ["q4_k", "q6_k", "f16", "f32"]
    stages = found["plan"]["ranks"][0]["layer_stages"]
    assert [stage["format"] for stage in stages] == ["q4_k", "q4_k", "q4_k", "q6_k"]
    assert main(["inspect", str(path), "--backend", "cpu", "--workers", "2"]) == 0
    text = capsys.readouterr().out
    assert "weights  q4_k and q6_k, head f16: " in text
    assert any(
        line.split()[0] == "down" and line.endswith(" q6_k") for line in text.splitlines() if line.strip()
    )

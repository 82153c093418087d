"""Where configs come from: files here, the built-in table, the hub's cache; and what is said when there is none."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest

from monotape.errors import CheckpointError, UsageError
from monotape.planner.estimate import estimate
from monotape.planner.sources import find_source
from planner.loads import config_of
from weights.gguf_files import FFN, VOCAB, WIDTH, model_values, write_model


def write_config(folder: Path, name: str = "config.json", **changes: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(config_of("llama-3.2-1b", **changes)))
    return folder / name


def test_a_folder_and_its_config_are_the_same(tmp_path: Path) -> None:
    path = write_config(tmp_path / "mine", num_hidden_layers=3)
    assert find_source(str(tmp_path / "mine")) == find_source(str(path))
    found = estimate(str(path))
    assert found.source.name == "mine"
    assert len(found.shape.layers) == 3


def test_a_config_of_another_name(tmp_path: Path) -> None:
    assert find_source(str(write_config(tmp_path, "llama.json"))).name == "llama"


def test_a_path_goes_before_a_built_in_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(tmp_path / "llama-3.2-1b", num_hidden_layers=5)
    assert len(estimate("llama-3.2-1b").shape.layers) == 16
    monkeypatch.chdir(tmp_path)
    assert len(estimate("llama-3.2-1b").shape.layers) == 5


def test_a_gguf_file_is_planned_in_the_formats_it_has(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    matrices = [name for name, values in model_values("llama").items() if values.ndim == 2]
    write_model(path, "llama", kinds=dict.fromkeys(matrices, gguf.GGMLQuantizationType.Q8_0))
    found = estimate(str(path), context=16)
    assert found.load.precision.name == "as stored"
    parts = found.bytes_by_group
    assert parts["dense_ffn"] == 3 * (3 * WIDTH * FFN * 8.5 / 8 + WIDTH * 2)
    assert parts["head"] == pytest.approx(VOCAB * WIDTH * 8.5 / 8 + WIDTH * 2)
    assert (
        estimate(str(path), context=16, dtype="bf16").bytes_by_group["dense_ffn"]
        == 3 * (3 * WIDTH * FFN + WIDTH) * 2
    )


@pytest.mark.parametrize("content", ["{", "[]", '{"a": 1, "a": 2}', ""])
def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        estimate(str(tmp_path / "config.json"))


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no weights"):
        estimate(str(tmp_path))


@pytest.mark.parametrize("name", ["lama-3.2-1b", "no/such/path", "./config.json", "x" * 5000, "a\0b", ""])
def test_an_unknown_name_is_answered_with_the_nearest_three(name: str) -> None:
    with pytest.raises(UsageError, match="no model of the built-in table") as caught:
        find_source(name)
    assert caught.value.hint.count("/") >= 3
    assert len(caught.value.message) < 200


def test_the_nearest_name_comes_first() -> None:
    with pytest.raises(UsageError) as caught:
        find_source("lama-3.2-1b")
    assert caught.value.hint.startswith("The nearest names are meta-llama/Llama-3.2-1B, ")


def test_a_hub_id_is_read_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    write_config(repository / "snapshots" / "abc", num_hidden_layers=7)
    found = estimate("someone/tiny")
    assert len(found.shape.layers) == 7
    assert found.source.origin == "config.json of someone/tiny, from the hub's cache"


def test_an_unreachable_hub_is_said_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="cannot be reached") as caught:
        find_source("someone/lama-3.2-1b")
    assert "meta-llama/Llama-3.2-1B" in caught.value.hint

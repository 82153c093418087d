"""`monotape list` and `monotape rm`: what is in the caches, and nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from huggingface_hub import constants

from monotape.cli.main import main
from monotape.weights import wheel

Captured = pytest.CaptureFixture[str]
COMMIT = "0123456789abcdef"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and an empty one of Monotape's."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("MONOTAPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "hub"


def add(hub: Path, repo: str, files: dict[str, int], *, whole: bool = True) -> Path:
    """A repository in the layout of huggingface_hub: blobs, and links to them."""
    folder = hub / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    (folder / "blobs").mkdir(parents=True)
    (hub / ".locks" / folder.name).mkdir(parents=True)
    for name, size in files.items():
        blob = folder / "blobs" / f"blob-of-{name.replace('/', '-')}"
        blob.write_bytes(bytes(size))
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        os.symlink(os.path.relpath(blob, (snapshot / name).parent), snapshot / name)
    if whole:
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(COMMIT)
    return folder


def add_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache" / "models" / wheel.SMOLLM2.member
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(wheel.SMOLLM2.bytes)
    return path


def listed(capsys: Captured) -> dict[str, dict[str, object]]:
    assert main(["list", "--json"]) == 0
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)}


SAFETENSORS = {"config.json": 100, "model.safetensors": 5000, "tokenizer.json": 50}
GGUFS = {"m-q4.gguf": 3000, "Q8/m-q8.gguf": 6000}


def test_models_are_listed_with_their_sizes(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    add(hub, "org/whole", SAFETENSORS)
    add(hub, "org/several", GGUFS)
    add(hub, "org/one", {"only.gguf": 700})
    add(hub, "org/half", {"config.json": 9}, whole=False)
    add_wheel(tmp_path, monkeypatch)
    rows = listed(capsys)
    sizes = {name: row["bytes"] for name, row in rows.items()}
    assert sizes == {
        "org/whole": 5150, "org/several:m-q4.gguf": 3000, "org/several:Q8/m-q8.gguf": 6000, "org/one:only.gguf": 700,
        "org/half": 9, "smollm2": wheel.SMOLLM2.bytes,
    }  # fmt: skip
    assert [name for name, row in rows.items() if not row["complete"]] == ["org/half"]
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert "98.4 MB" in out and wheel.SMOLLM2.member in out and "not whole" in out
    assert main(["list", "--names"]) == 0
    assert "org/half" not in (names := capsys.readouterr().out.splitlines()) and "org/one:only.gguf" in names


def test_an_empty_cache_says_what_to_do(hub: Path, capsys: Captured) -> None:
    assert main(["list"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "" and "monotape pull" in captured.err


def test_what_is_named_is_removed_and_nothing_else(hub: Path, capsys: Captured) -> None:
    whole, several = add(hub, "org/whole", SAFETENSORS), add(hub, "org/several", GGUFS)
    other = add(hub, "org/whole-2", SAFETENSORS)
    assert main(["rm", "org/whole", "org/several:m-q4.gguf"]) == 0
    assert "removed org/whole, 5.2 kB" in capsys.readouterr().out
    assert not whole.exists() and not (hub / ".locks" / whole.name).exists()
    assert other.exists() and several.exists()
    assert not (several / "blobs" / "blob-of-m-q4.gguf").exists()
    assert set(listed(capsys)) == {"org/whole-2", "org/several:Q8/m-q8.gguf"}


def test_the_last_file_takes_its_repository_along(hub: Path, capsys: Captured) -> None:
    folder = add(hub, "org/several", GGUFS)
    assert main(["rm", "org/several:m-q4.gguf"]) == 0
    assert main(["rm", "org/several"]) == 0
    assert not folder.exists()


def test_a_short_name_stands_for_all_its_files(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    folder = add(hub, "HuggingFaceTB/SmolLM2-135M-Instruct", SAFETENSORS)
    path = add_wheel(tmp_path, monkeypatch)
    assert main(["rm", "smollm2"]) == 0
    assert not folder.exists() and not path.exists()


def test_half_a_download_can_be_removed(hub: Path) -> None:
    folder = add(hub, "org/half", {"config.json": 9}, whole=False)
    assert main(["rm", "org/half"]) == 0
    assert not folder.exists()


def test_what_is_not_there_is_not_removed(
    hub: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(hub, "org/whole", SAFETENSORS)
    assert main(["rm", "org/whle"]) == 2
    assert "Did you mean 'org/whole'?" in capsys.readouterr().err
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["rm", "mine"]) == 2
    assert "of yours" in capsys.readouterr().err
    assert (tmp_path / "mine").exists()
    for name in ("../hub", "/etc", "org/../..", "."):
        assert main(["rm", name]) == 2
    assert set(listed(capsys)) == {"org/whole"}


def test_a_model_without_its_organisation_is_suggested(hub: Path, capsys: Captured) -> None:
    add(hub, "Qwen/Qwen2.5-Coder-0.5B-Instruct", SAFETENSORS)
    assert main(["run", "hi", "--model", "qwen2.5-coder-0.5b"]) == 2
    assert "Did you mean 'Qwen/Qwen2.5-Coder-0.5B-Instruct'?" in capsys.readouterr().err

"""weights/open.py: what is accepted as a model, and what is said about the rest."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from monotape.errors import CheckpointError
from monotape.weights.gguf_file import GgufFile
from monotape.weights.open import open_checkpoint
from monotape.weights.safetensors_folder import SafetensorsFolder
from weights.gguf_files import write_model
from weights.safetensors_files import write_file, write_folder

TENSORS = {"m": ("F32", np.ones((3, 5), np.float32))}


def test_a_folder_of_safetensors(tmp_path: Path) -> None:
    assert isinstance(open_checkpoint(write_folder(tmp_path, TENSORS)), SafetensorsFolder)


def test_safetensors_win_over_what_lies_beside_them(tmp_path: Path) -> None:
    write_folder(tmp_path, TENSORS)
    write_model(tmp_path / "m.gguf")
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    assert isinstance(open_checkpoint(tmp_path), SafetensorsFolder)


def test_a_gguf_file_whatever_its_name(tmp_path: Path) -> None:
    assert isinstance(open_checkpoint(write_model(tmp_path / "m.gguf")), GgufFile)
    assert isinstance(open_checkpoint((tmp_path / "m.gguf").rename(tmp_path / "model.dat")), GgufFile)


def test_a_folder_with_one_gguf_file(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf")
    (tmp_path / "config.json").write_text("{}")
    assert open_checkpoint(tmp_path).source == str(tmp_path / "m.gguf")


def test_several_gguf_files_are_listed(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        write_model(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF files: a\.gguf, b\.gguf"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("notes.txt", b"hello", r"is no model: it starts with 'hell'.*GGUF file, or a Hugging Face folder"),
        ("empty.txt", b"", "is no model"),
        ("data", b"\x00\xffab", "it starts with the bytes 00 ff 61 62"),
        ("m.gguf", b"", "is empty"),
        ("m.gguf", b"<html>Not found</html>....", "is no GGUF file: it starts with '<htm'"),
        ("pytorch_model.bin", b"PK\x03\x04", "is a pickle file.*save the model as safetensors"),
        ("model.pth", b"\x80\x02", "is a pickle file"),
    ],
)
def test_files_that_are_no_model(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / name)


def test_one_safetensors_file_is_only_a_part(tmp_path: Path) -> None:
    file = write_file(tmp_path / "model.safetensors", TENSORS)
    with pytest.raises(CheckpointError, match=r"only part of a model.*folder"):
        open_checkpoint(file)


def test_folders_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no weights"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"in pytorch_model\.bin only, a pickle.*safetensors"):
        open_checkpoint(tmp_path)


def test_a_folder_with_safetensors_of_other_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    write_file(tmp_path / "consolidated.safetensors", TENSORS)
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        open_checkpoint(tmp_path)


def test_a_missing_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere does not exist.*GGUF"):
        open_checkpoint(tmp_path / "nowhere")


def test_neither_file_nor_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="neither a file nor a folder"):
        open_checkpoint(tmp_path / "pipe")

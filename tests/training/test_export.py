"""A trained checkpoint in the engine: the trainer's logits on every backend, the packed file, its card and tokens."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lane_logits
from backends.cpu_cases import cpu, distance, generate, ids, reference
from monotape.embedded import packed
from monotape.embedded.packed import PackedModel, dequantised, quantised, unpacked
from monotape.engine.tokenizer import Tokenizer
from monotape.errors import CheckpointError, ResourceError, UsageError
from monotape.training import export as exporting
from monotape.training.checkpoints import WEIGHTS
from monotape.training.data import Corpus
from monotape.training.evaluation import bits_per_byte
from monotape.training.export import export, pack, packed_quality, trained_model
from monotape.training.laneformer import Laneformer
from monotape.training.settings import ARMS
from monotape.training.trainer import Conduct, Trainer
from monotape.weights.open import open_checkpoint
from training.tiny_corpus import SEQUENCE, tiny

pytestmark = pytest.mark.slow  # a run of every arm comes first

CPU = torch.device("cpu")
ULP = float(np.finfo(np.float32).eps)
STEPS = 10


@pytest.fixture(scope="module")
def runs(corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of each arm."""
    folder, corpus = tmp_path_factory.mktemp("runs"), Corpus.load(corpus_folder, CPU)
    for arm in ARMS:
        settings = tiny(arm=arm, tokens=STEPS * 8 * SEQUENCE)
        Trainer(settings, corpus, folder / arm, CPU, Conduct(say=lambda line: None)).run()
    return folder


@pytest.fixture(scope="module")
def prompt(corpus_folder: Path) -> list[int]:
    return np.fromfile(corpus_folder / "validation.bin", "<u2")[:50].astype(int).tolist()


def logits(model: Laneformer, tokens: list[int], dtype: torch.dtype) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(model.to(dtype)(torch.tensor([tokens]))[0].double().numpy())


@pytest.mark.parametrize("arm", ARMS)
def test_backends_give_the_trainers_logits(
    arm: str, runs: Path, corpus_folder: Path, prompt: list[int], tmp_path: Path
) -> None:
    """The project's rule: no worse than twice an honest evaluation. Exact is PyTorch in float64, honest in float32."""
    export(runs / arm, corpus_folder, tmp_path / "model")
    model, _ = trained_model(runs / arm)
    honest = logits(model, prompt, torch.float32)
    exact = logits(Laneformer.load(tmp_path / "model"), prompt, torch.float64)
    bound = 2 * distance(honest, exact) + ULP
    by_numpy = reference(tmp_path / "model", context=SEQUENCE)
    assert distance(by_numpy.logits(prompt, by_numpy.new_sequence()), exact) <= bound
    with cpu(tmp_path / "model", context=SEQUENCE, workers=4) as backend:
        assert len(backend.plan.ranks) == 4
        assert distance(backend.logits(prompt, backend.new_sequence()), exact) <= bound
        greedy = ids(generate(backend, tuple(prompt[:20]), 12))
    assert greedy == ids(generate(by_numpy, tuple(prompt[:20]), 12))


def test_the_check_of_all_runs_tells_good_from_bad(
    runs: Path, corpus_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More tokens are asked for than the context has."""
    (row,) = lane_logits.judged(runs / "ladder", corpus_folder, ["reference"], 90, None)
    assert row["passes"] and row["run"] == "ladder" and 0 < row["distance"] <= row["bound"]
    right = lane_logits.backend_logits
    monkeypatch.setattr(lane_logits, "backend_logits", lambda *given: right(*given) * 1.001)
    (row,) = lane_logits.judged(runs / "ladder", corpus_folder, ["reference"], 90, None)
    assert not row["passes"]


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_a_finished_runs_weights_alone_are_the_model_that_was_evaluated(
    corpus_folder: Path, prompt: list[int], tmp_path: Path
) -> None:
    """They are a quarter of a checkpoint. A bf16 run rounds its matrices in every product: nothing more is lost."""
    corpus, run = Corpus.load(corpus_folder, CPU), tmp_path / "run"
    Trainer(tiny(precision="bf16"), corpus, run, CPU, Conduct(say=lambda line: None)).run()
    whole, settings = trained_model(run)
    checkpoint_bytes = (run / "checkpoint.pt").stat().st_size
    (run / "checkpoint.pt").unlink()
    alone, same = trained_model(run)
    assert same == settings and (run / WEIGHTS).stat().st_size < 0.3 * checkpoint_bytes
    assert not torch.equal(alone.model.tok_embeddings.weight, whole.model.tok_embeddings.weight)
    whole.compute = alone.compute = torch.bfloat16
    with torch.no_grad():
        assert torch.equal(alone(torch.tensor([prompt])), whole(torch.tensor([prompt])))
    found = bits_per_byte(alone, corpus, settings.micro_sequences)
    assert found == json.loads((run / "run.json").read_text())["validation"]
    export(run, corpus_folder, tmp_path / "model")
    exported, gains = Laneformer.load(tmp_path / "model").state_dict(), "model.norm.weight"
    assert torch.equal(exported[gains], whole.state_dict()[gains])
    (run / WEIGHTS).write_bytes(b"broken")
    with pytest.raises(CheckpointError, match="has no weights"):
        trained_model(run)


def test_a_run_of_tp_becomes_a_model_for_one_device(
    runs: Path, corpus_folder: Path, prompt: list[int], tmp_path: Path
) -> None:
    export(runs / "tp", corpus_folder, tmp_path / "model", one_lane=True)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["num_lanes"] == 1
    want = logits(trained_model(runs / "tp")[0], prompt, torch.float32)
    with cpu(tmp_path / "model", context=SEQUENCE) as backend:
        assert len(backend.plan.ranks) == 1
        assert distance(backend.logits(prompt, backend.new_sequence()), want) <= 1e-5
    with pytest.raises(UsageError, match="lanes of ladder are not one model"):
        export(runs / "ladder", corpus_folder, tmp_path / "other", one_lane=True)
    assert not (tmp_path / "other").exists()


@pytest.fixture(scope="module")
def packed_file(runs: Path, corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    export(runs / "dtp1-scale", corpus_folder, folder / "model")
    assert (
        pack(folder / "model", folder / "packed.safetensors")
        == (folder / "packed.safetensors").stat().st_size
    )
    return folder / "packed.safetensors"


def test_the_engine_opens_what_was_unpacked(packed_file: Path, prompt: list[int], tmp_path: Path) -> None:
    folder = unpacked(packed_file, tmp_path)
    assert unpacked(packed_file, tmp_path) == folder and list(tmp_path.iterdir()) == [folder]
    checkpoint = open_checkpoint(folder)
    assert checkpoint.stored_as("model.tok_embeddings.weight") == "bf16"
    exact = logits(Laneformer.load(packed_file.parent / "model"), prompt, torch.float32)
    backend = reference(folder, context=SEQUENCE)
    error = distance(backend.logits(prompt, backend.new_sequence()), exact)
    assert 0 < error < 0.2  # what 4 bits cost
    held = Laneformer.load(packed_file.parent / "model")
    for name, value in packed.read(packed_file).tensors.items():
        stored = held.state_dict()[name].numpy()
        assert value.shape == stored.shape
        bound = 0.0 if value.ndim < 2 else 0.005 if "tok_embeddings" in name else 0.12
        assert distance(value, stored) <= bound, name


def test_the_packed_model_is_measured(packed_file: Path, corpus_folder: Path, runs: Path) -> None:
    found = packed_quality(packed_file, Corpus.load(corpus_folder, CPU), 8, torch.float32)
    trained = json.loads((runs / "dtp1-scale" / "run.json").read_text())["validation"]
    assert found["bytes"] == trained["bytes"]
    assert found["bits_per_byte"] == pytest.approx(trained["bits_per_byte"], rel=0.05)
    assert found["bits_per_byte"] != trained["bits_per_byte"]


def test_the_tokenizer_fills_in_the_middle(packed_file: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(unpacked(packed_file, tmp_path))
    assert checkpoint.generation_config["eos_token_id"] == 0
    tokenizer = Tokenizer.from_assets(checkpoint.text)
    assert tokenizer is not None and tokenizer.eos_id == 0
    marked = tokenizer.encode("<|fim_prefix|>def f(<|fim_suffix|>):<|fim_middle|>", add_special=False)
    assert marked[0] == 1 and marked.count(3) == 1 and marked[-1] == 2
    assert tokenizer.decode(tokenizer.encode("def f(x):\n    return x\n")) == "def f(x):\n    return x\n"


def test_the_card_names_data_licences_and_quality(packed_file: Path, runs: Path) -> None:
    card = packed.read(packed_file).texts["README.md"]
    result = json.loads((runs / "dtp1-scale" / "run.json").read_text())
    assert f"{result['validation']['bits_per_byte']:.4f} bits per byte" in card and "arm `dtp1-scale`" in card
    assert "1.1: MIT" in card and "no assistant" in card and "Held out for validation: package" in card


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_the_nearest_of_their_scale(bits: int) -> None:
    values = np.random.default_rng(bits).standard_normal((6, 96)).astype(np.float32)
    values[2] = 0
    codes, scales = quantised(values, bits)
    assert codes.nbytes * 8 == bits * values.size and scales.dtype == np.float16
    back = dequantised(codes, scales, bits, values.shape)
    plain = np.abs(values.reshape(-1, 32)).max(1, keepdims=True) / (2 ** (bits - 1) - 1)
    rounded = np.rint(values.reshape(-1, 32) / np.where(plain > 0, plain, 1)) * plain
    assert distance(back, values) <= 1.01 * distance(rounded.reshape(values.shape), values)
    assert not back[2].any()


def test_a_model_that_is_too_large_for_the_wheel(
    packed_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "MAX_PACKED_BYTES", 10_000)
    with pytest.raises(UsageError, match=r"The packed model has .* bytes, and the wheel has room for 10,000"):
        pack(packed_file.parent / "model", tmp_path / "packed.safetensors")
    assert not list(tmp_path.iterdir())


def test_the_tables_model_fits_the_wheel() -> None:
    """Of the default settings, counted, not made: 4.5 bits a weight, 8.5 in the embedding."""
    from monotape.training.settings import Settings

    one = Settings()
    matrices = one.layers * (4 * one.width**2 + 3 * one.width * one.ffn)
    assert matrices * 4.5 / 8 + 16384 * one.width * 8.5 / 8 + 1_500_000 < exporting.MAX_PACKED_BYTES


@pytest.mark.parametrize(
    ("breakage", "said"),
    [
        ("cut", "is not a packed model"),
        ("other", "its format is None"),
        ("shape", "bytes for"),
        ("missing", "is not a packed"),
    ],
)
def test_a_broken_packed_file_is_one_sentence(
    breakage: str, said: str, packed_file: Path, tmp_path: Path
) -> None:
    from safetensors.numpy import save_file

    path = tmp_path / "packed.safetensors"
    if breakage == "cut":
        path.write_bytes(packed_file.read_bytes()[:-100])
    elif breakage == "other":
        save_file({"a": np.zeros(4, np.float32)}, str(path))
    elif breakage == "shape":
        tensors = {"a": np.zeros((4, 32), np.float32)}
        packed.write(path, PackedModel({}, tensors), {"a": 8})
        data = path.read_bytes()
        path.write_bytes(data.replace(b"[4, 32]", b"[8, 32]"))
    with pytest.raises(CheckpointError, match=said):
        packed.read(path)


PACK = "import sys; from pathlib import Path; from monotape.training.export import pack; pack(*map(Path, sys.argv[1:]))"


def test_a_model_is_packed_alike_in_a_locale_without_utf_8(packed_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(packed_file.parent / "model", folder)
    (folder / "README.md").write_text("Größe: 3 µm\n", encoding="utf-8")
    plain = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", PACK, str(folder), str(tmp_path / "there")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **plain})
    assert done.returncode == 0, done.stderr
    assert packed.read(tmp_path / "there").texts["README.md"] == "Größe: 3 µm\n"


@pytest.mark.parametrize("breakage", ["nothing", "no config", "list", "bf16"])
def test_what_was_not_exported_is_not_packed(breakage: str, packed_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    if breakage != "nothing":
        shutil.copytree(packed_file.parent / "model", folder, dirs_exist_ok=True)
    if breakage == "no config":
        (folder / "config.json").unlink()
    if breakage == "list":
        (folder / "config.json").write_text("[]")
    if breakage == "bf16":
        shutil.copy(unpacked(packed_file, tmp_path) / packed.WEIGHTS, folder)
    with pytest.raises(UsageError, match="is not an exported model") as caught:
        pack(folder, tmp_path / "packed.safetensors")
    assert "export" in caught.value.hint and not (tmp_path / "packed.safetensors").exists()


def test_no_room_to_unpack_or_export(
    packed_file: Path, runs: Path, corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **more: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(packed, "_write_bf16", full)
    with pytest.raises(ResourceError, match="cannot be unpacked"):
        unpacked(packed_file, tmp_path)
    monkeypatch.setattr(Laneformer, "save", full)
    with pytest.raises(ResourceError, match="The disk is full: the model could not be written"):
        export(runs / "tp", corpus_folder, tmp_path / "model")
    assert not list(tmp_path.iterdir())

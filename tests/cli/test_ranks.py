"""--tp and --emulate-ranks: what they do, and one sentence for each thing that cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from backends.cpu_cases import PROMPT
from backends.fake_cuda import FakeCuda, fake_gpu
from backends.rank_cases import make_eight
from cli.test_bad_input import change_config, run
from lane_models import make_laneformer
from monotape.cli.main import build_parser, main
from monotape.engine.config import EngineConfig
from monotape.engine.devices import check_devices
from monotape.engine.loading import load_backend
from monotape.errors import BackendUnavailable, UsageError
from monotape.models.registry import spec_from_config
from monotape.weights.open import open_checkpoint

Captured = pytest.CaptureFixture[str]
IDS = ",".join(map(str, PROMPT[:5]))


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_eight("llama", tmp_path_factory.mktemp("eight"))


@pytest.fixture
def laneformer(tmp_path: Path) -> Path:
    make_laneformer(tmp_path / "laneformer")
    return tmp_path / "laneformer"


def answer(capsys: Captured, folder: Path, *more: str) -> dict[str, object]:
    capsys.readouterr()
    arguments = ["run", "--prompt-ids", IDS, "--model", str(folder), "--json", "--temperature", "0"]
    assert main([*arguments, "--max-tokens", "12", *more]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_ranks_give_the_answer_of_one(capsys: Captured, eight: Path, backend: str) -> None:
    one = answer(capsys, eight, "--backend", backend)
    four = answer(capsys, eight, "--backend", backend, "--tp", "4", "--emulate-ranks")
    assert one["token_ids"] == four["token_ids"]
    assert isinstance(four["stats"], dict)
    assert four["stats"]["ranks"] == 4


def test_a_model_with_lanes_needs_no_flag(capsys: Captured, laneformer: Path) -> None:
    plain, said = answer(capsys, laneformer), answer(capsys, laneformer, "--tp", "4")
    assert plain["token_ids"] == said["token_ids"]
    assert isinstance(plain["stats"], dict)
    assert plain["stats"]["ranks"] == 4


def test_inspect_shows_ranks_and_steps(capsys: Captured, eight: Path, laneformer: Path) -> None:
    capsys.readouterr()
    assert main(["inspect", str(eight), "--tp", "2"]) == 0
    text = capsys.readouterr().out
    assert "2 ranks of cpu" in text
    assert "send, fold the sum at once" in text
    assert main(["inspect", str(laneformer)]) == 0
    text = capsys.readouterr().out
    assert "4, summed 2 modules late, head reads their mean" in text
    assert "add own x 1, send, fold the others' sum of module n - 2" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tp", "3"), "3 ranks cannot share 8 heads evenly."),
        (("--tp", "0"), "tp is 0."),
        (("--tp", "65"), "tp is 65."),
        (("--tp", "two"), "'two' is not a whole number."),
        (("--tp", "2", "--workers", "3"), "2 ranks cannot share 3 workers evenly."),
    ],
)
def test_ranks_that_cannot_be(capsys: Captured, eight: Path, flags: tuple[str, ...], message: str) -> None:
    assert message in run(capsys, eight, *flags)


@pytest.mark.parametrize("command", ["run", "chat", "serve"])
def test_every_command_with_an_engine_has_the_flags(command: str) -> None:
    options = build_parser()[1][command].parse_args(["--tp", "2", "--emulate-ranks"])
    assert (options.tp, options.emulate_ranks) == (2, True)
    options = build_parser()[1][command].parse_args([])
    assert (options.tp, options.emulate_ranks) == (None, False)


@pytest.mark.parametrize(
    ("gpu", "message"),
    [
        (FakeCuda(), "2 ranks were asked for, but this machine has 1 GPU."),
        (FakeCuda(devices=2, strangers=((1, 0),)), "GPU 1 cannot reach the memory of GPU 0"),
    ],
)
def test_gpus_that_cannot_be_the_ranks_are_refused_before_anything_is_loaded(
    eight: Path, gpu: FakeCuda, message: str
) -> None:
    checkpoint = open_checkpoint(eight)
    spec = spec_from_config(checkpoint.config)
    with fake_gpu(gpu), pytest.raises(BackendUnavailable, match=message) as caught:
        load_backend("cuda", spec, checkpoint, context=64, tp=2)
    assert caught.value.hint
    assert gpu.used == 0


def test_the_hint_lists_what_can_be(capsys: Captured, eight: Path) -> None:
    assert "For this model --tp can be 1, 2, 4, 8." in run(capsys, eight, "--tp", "5")


def test_ranks_that_contradict_the_lanes(capsys: Captured, laneformer: Path) -> None:
    said = run(capsys, laneformer, "--tp", "2")
    assert "2 ranks were asked for, but this model has 4 lanes" in said
    assert "Use --tp 4" in said


def test_lanes_that_contradict_the_weights(capsys: Captured, laneformer: Path) -> None:
    change_config(laneformer, num_lanes=8)
    said = run(capsys, laneformer)
    assert "wq.weight has shape [4, 12, 48], but the config asks for [8, 6, 48]" in said


@pytest.mark.parametrize(
    ("ranks", "devices", "peers", "message"),
    [
        (8, 2, lambda a, b: True, "8 ranks were asked for, but this machine has 2 GPUs."),
        (2, 1, lambda a, b: True, "2 ranks were asked for, but this machine has 1 GPU."),
        (2, 2, lambda a, b: (a, b) != (1, 0), "GPU 1 cannot reach the memory of GPU 0"),
        (1, 0, lambda a, b: True, "No NVIDIA GPU can be used here."),
    ],
)
def test_gpus_that_cannot_be_the_ranks(
    ranks: int, devices: int, peers: Callable[[int, int], bool], message: str
) -> None:
    with pytest.raises(BackendUnavailable, match=message) as caught:
        check_devices(ranks, devices, peers, emulated=False)
    assert caught.value.hint


def test_gpus_that_can() -> None:
    check_devices(8, 1, lambda a, b: False, emulated=True)
    check_devices(1, 1, lambda a, b: False, emulated=False)
    check_devices(4, 8, lambda a, b: True, emulated=False)


def test_the_engine_takes_them_too() -> None:
    assert EngineConfig(tp=4, emulate_ranks=True).tp == 4
    with pytest.raises(UsageError, match="tp is True"):
        EngineConfig(tp=True)
    with pytest.raises(UsageError, match="emulate_ranks is 'yes'"):
        EngineConfig(emulate_ranks="yes")  # type: ignore[arg-type]

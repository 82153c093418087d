"""A run on a tiny model: it learns, stops and goes on with the same bits, and loses nothing to bad input."""

from __future__ import annotations

import errno
import json
import math
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from monotape.errors import CheckpointError, NumericalFault, ResourceError, UsageError
from monotape.training import checkpoints
from monotape.training.checkpoints import LATEST, TRUNK
from monotape.training.data import Corpus
from monotape.training.machine import repeatable
from monotape.training.muon import Optimizer
from monotape.training.settings import Settings
from monotape.training.trainer import RESULT, Conduct, Trainer, new_model
from training.tiny_corpus import SEQUENCE, tiny

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def corpus(corpus_folder: Path) -> Corpus:
    repeatable(CPU)
    return Corpus.load(corpus_folder, CPU)


def quiet(**changes: Any) -> Conduct:
    return Conduct(**{"say": lambda line: None, "say_every_steps": 4, **changes})


def train(settings: Settings, corpus: Corpus, folder: Path, **changes: Any) -> dict[str, Any] | None:
    return Trainer(settings, corpus, folder, CPU, quiet(**changes)).run()


class StopAfter:
    """A clock for `until`: time is up after so many steps."""

    def __init__(self, steps: int) -> None:
        self.asked, self.steps = 0, steps

    def time(self) -> float:
        self.asked += 1
        return 2e9 if self.asked > self.steps else 0.0  # it is asked once before the first step

    def monotonic(self) -> float:
        return time.monotonic()


@pytest.mark.slow
def test_it_learns_and_says_so(corpus: Corpus, tmp_path: Path) -> None:
    lines: list[str] = []
    settings = tiny(tokens=60 * 8 * SEQUENCE)
    result = train(settings, corpus, tmp_path / "run", say=lines.append, say_every_steps=20)
    assert result is not None and json.loads((tmp_path / "run" / RESULT).read_text()) == result
    losses = [loss for _, loss in result["curve"]]
    assert losses[-1] < 0.6 * math.log(corpus.vocabulary) and losses[-1] < losses[0]
    assert result["validation"]["bits_per_byte"] < 4 and result["validation"]["standard_error"] > 0
    assert result["settings"] == settings.saved() and result["commit"] and result["training_s"] > 0
    assert all(word in lines[0] for word in ("step 20/60", "loss", "tok/s", "TFLOP/s", "left"))


@pytest.mark.parametrize("arm", ["tp", "dtp2-sum"])
def test_a_stopped_run_goes_on_with_the_same_bits(
    arm: str, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tiny(arm=arm)
    whole = train(settings, corpus, tmp_path / "whole")
    with monkeypatch.context() as patched:
        patched.setattr("monotape.training.trainer.time", StopAfter(5))
        assert train(settings, corpus, tmp_path / "cut", until=1e9) is None
    assert checkpoints.read(tmp_path / "cut" / LATEST)["step"] == 5
    cut = train(settings, corpus, tmp_path / "cut")
    assert whole is not None and cut is not None and cut["processes"] == 2
    one, two = (checkpoints.read(tmp_path / name / LATEST) for name in ("whole", "cut"))
    for kind in ("model", "optimizer"):
        _equal(one[kind], two[kind])
    assert whole["curve"] == cut["curve"] and whole["validation"] == cut["validation"]


def test_an_interrupt_in_the_middle_of_a_step_costs_no_bit(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes when the matrices are changed and the embedding is not: that step must not be saved half done."""
    whole = train(tiny(), corpus, tmp_path / "whole")
    right = Optimizer._step_others

    def interrupted(self: Optimizer, rate: float) -> None:
        if self._steps == 5:
            signal.raise_signal(signal.SIGINT)
        right(self, rate)

    with monkeypatch.context() as patched:
        patched.setattr(Optimizer, "_step_others", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(tiny(), corpus, tmp_path / "cut")
    assert checkpoints.read(tmp_path / "cut" / LATEST)["step"] == 5
    cut = train(tiny(), corpus, tmp_path / "cut")
    assert whole is not None and cut is not None
    assert whole["curve"] == cut["curve"] and whole["validation"] == cut["validation"]


def _equal(one: Any, two: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == two.keys()
        for name in one:
            _equal(one[name], two[name])
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, two)
    else:
        assert one == two


@pytest.mark.slow
def test_a_longer_run_goes_on_from_the_trunk_with_the_same_bits(corpus: Corpus, tmp_path: Path) -> None:
    """Until its rate falls a run does not depend on how long it will be."""
    short, long = tiny(), tiny(tokens=2 * tiny().tokens)
    train(short, corpus, tmp_path / "short", keep_trunk=True)
    assert checkpoints.read(tmp_path / "short" / TRUNK)["step"] == short.decay_start
    anew = train(long, corpus, tmp_path / "anew")
    grown = train(long, corpus, tmp_path / "grown", trunk=tmp_path / "short" / TRUNK)
    assert anew is not None and grown is not None and anew["validation"] == grown["validation"]


def test_one_graph_is_compiled_before_the_turn_comes(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second one would be compiled while the GPU waits: the first step must have the warm-up's shapes and types."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter, compiler = CompileCounterWithBackend("aot_eager"), torch.compile

    def counted(function: Any, *, options: Any, **how: Any) -> Any:  # options are those of the other backend
        return compiler(function, backend=counter, **how)

    monkeypatch.setattr(torch, "compile", counted)
    trainer = Trainer(tiny(compiled=True, tokens=3 * 8 * SEQUENCE), corpus, tmp_path, CPU, quiet())
    trainer._warm_up()
    assert counter.frame_count == 1
    assert all(value.grad is None for value in trainer.model.parameters())
    found = trainer.run()
    assert counter.frame_count == 1 and found is not None
    plain = train(tiny(tokens=3 * 8 * SEQUENCE), corpus, tmp_path / "plain")
    assert plain is not None
    assert found["validation"]["bits_per_byte"] == pytest.approx(
        plain["validation"]["bits_per_byte"], rel=1e-5
    )


def test_all_arms_start_from_the_same_weights(corpus: Corpus) -> None:
    first = new_model(tiny(arm="tp", lanes=2), corpus).state_dict()
    other = new_model(tiny(arm="silent", lanes=4), corpus).state_dict()
    for name, value in first.items():
        assert torch.equal(value.flatten(), other[name].flatten())
    assert not torch.equal(
        first["model.tok_embeddings.weight"],
        new_model(tiny(arm="tp", lanes=2, seed=2), corpus).state_dict()["model.tok_embeddings.weight"],
    )


def test_lanes_that_agree_are_one_model(corpus: Corpus, tmp_path: Path) -> None:
    """The table trains tp and ladder once for all numbers of lanes."""
    found = [train(tiny(arm="ladder", lanes=lanes), corpus, tmp_path / f"{lanes}") for lanes in (2, 4)]
    assert found[0] is not None and found[1] is not None
    assert found[0]["validation"]["bits_per_byte"] == pytest.approx(
        found[1]["validation"]["bits_per_byte"], rel=1e-4
    )


def test_the_order_is_a_function_of_seed_and_step(corpus: Corpus) -> None:
    settings = tiny()
    per_epoch = len(corpus.train) // settings.batch_sequences
    epochs = [
        torch.cat([corpus.batch(settings, step + start) for step in range(per_epoch)])
        for start in (0, per_epoch)
    ]
    assert not torch.equal(*epochs)
    rows = {tuple(row.tolist()) for row in epochs[0]}
    assert len(rows) >= 0.99 * len(epochs[0])  # no sequence twice in an epoch, but for those that are equal
    assert torch.equal(corpus.batch(settings, 3), epochs[0][24:32])
    assert not torch.equal(corpus.batch(tiny(seed=2), 3), epochs[0][24:32])


def test_the_rate_is_constant_then_falls_in_a_line() -> None:
    settings = tiny(tokens=100 * 8 * SEQUENCE)
    rates = [settings.rate(step) for step in range(100)]
    assert rates[:2] == [1 / 3, 2 / 3] and set(rates[2:61]) == {1.0}
    assert rates[60:] == pytest.approx([1 - step / 40 for step in range(40)])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"matrix_rate": 0.5}, "was trained with matrix_rate = 0.02, and this run asks for 0.5"),
        ({"arm": "tp"}, "was trained with arm = dtp1-scale"),
        ({"seed": 9}, "was trained with seed = 1"),
        ({"tokens": 20 * 8 * SEQUENCE}, "was trained with tokens = "),
    ],
)
def test_other_settings_are_refused(
    changes: dict[str, Any], said: str, corpus: Corpus, tmp_path: Path
) -> None:
    train(
        tiny(tokens=2 * 8 * SEQUENCE) if "tokens" in changes else tiny(tokens=12 * 8 * SEQUENCE),
        corpus,
        tmp_path,
    )
    before = (tmp_path / LATEST).read_bytes()
    with pytest.raises(UsageError, match=said):
        train(tiny(**changes), corpus, tmp_path)
    assert (tmp_path / LATEST).read_bytes() == before


def test_another_corpus_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    train(tiny(), corpus, tmp_path)
    record = {**corpus.record, "files": {**corpus.record["files"], "train.bin": {"sha256": "f" * 64}}}
    other = Corpus(record, corpus.train, corpus.validation, corpus.token_bytes, corpus.end)
    with pytest.raises(CheckpointError, match="another corpus"):
        train(tiny(), other, tmp_path)


def test_a_full_disk_loses_nothing(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tiny()
    with monkeypatch.context() as patched:
        patched.setattr("monotape.training.trainer.time", StopAfter(5))
        train(settings, corpus, tmp_path, until=1e9)
    before = (tmp_path / LATEST).read_bytes()

    def full(state: Any, path: Path) -> None:
        path.write_bytes(b"half a checkpoint")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", full)
        with pytest.raises(ResourceError, match="The disk is full: the checkpoint could not be written"):
            train(settings, corpus, tmp_path)
    assert (tmp_path / LATEST).read_bytes() == before and [path.name for path in tmp_path.iterdir()] == [
        LATEST
    ]
    assert train(settings, corpus, tmp_path) is not None


@pytest.mark.parametrize("content", [b"", b"not a checkpoint at all", b"broken", b"PK\x03\x04 half a file"])
def test_a_broken_checkpoint_is_said(content: bytes, corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / LATEST).write_bytes(content)
    with pytest.raises(CheckpointError, match="is not a checkpoint of a run"):
        train(tiny(), corpus, tmp_path)
    assert (tmp_path / LATEST).read_bytes() == content


def test_a_loss_that_is_no_number_is_said(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = torch.tensor(math.nan)
    monkeypatch.setattr(Trainer, "_step", lambda self, step: nothing)
    with pytest.raises(NumericalFault, match=r"loss of .* is nan at step 4"):
        train(tiny(), corpus, tmp_path)
    assert not (tmp_path / LATEST).exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"arm": "tpp"}, "no arm 'tpp'"),
        ({"tokens": 10}, "tokens is 10"),
        ({"micro_sequences": 3}, "batch_sequences is 8"),
        ({"precision": "fp8"}, "precision is 'fp8'"),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        tiny(**changes)


def test_a_corpus_that_does_not_fit_is_said(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="sequences of 64 tokens, and the run asks for 128"):
        train(tiny(context=128), corpus, tmp_path)
    with pytest.raises(UsageError, match=r"too small: .* a step takes 4000"):
        train(tiny(batch_sequences=4000, tokens=4000 * SEQUENCE), corpus, tmp_path)

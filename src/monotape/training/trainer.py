"""Trains one run in its folder: goes on from its checkpoint, saves every few minutes, ends with one JSON."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from monotape.errors import NumericalFault
from monotape.training import checkpoints
from monotape.training.checkpoints import LATEST, TRUNK, WEIGHTS, Progress
from monotape.training.corpus.prepare import TRAIN
from monotape.training.data import Corpus
from monotape.training.disk import replace_whole, told_if_full
from monotape.training.evaluation import bits_per_byte
from monotape.training.machine import described
from monotape.training.muon import Optimizer
from monotape.training.settings import Settings
from monotape.training.speed import Speed, peak_of, progress_line
from monotape.training.streams import IGNORED, StreamedLaneformer, token_losses

RESULT = "run.json"
LAST_MATRICES = ("wo.weight", "w2.weight")
#: What the compiler is asked. Sums over up to 16 lanes are written out; it does so for fewer than 8, and a reduction of
#: 8 took 2.5 ms where reading its input takes 0.13. A norm's gradient is written once, not computed for each reader.
COMPILED: dict[str, str | int | bool | Callable[..., Any]] = {
    "unroll_reductions_threshold": 17,
    "realize_reads_threshold": 3,
}


@dataclass(frozen=True, slots=True)
class Conduct:
    """What a run may do differently without other numbers."""

    save_every_s: float = 120.0
    say_every_steps: int = 20
    until: float = math.inf  # by time.time(): save and stop
    turn: Path | None = None  # a file that one process at a time holds while it trains
    keep_trunk: bool = False
    trunk: Path | None = None  # of a shorter run, to start from
    say: Callable[[str], None] = print


class Trainer:
    """One run on one device."""

    def __init__(
        self, settings: Settings, corpus: Corpus, folder: Path, device: torch.device, conduct: Conduct
    ) -> None:
        corpus.check(settings)
        self.settings, self.corpus, self.folder, self.device, self.conduct = (
            settings,
            corpus,
            folder,
            device,
            conduct,
        )
        self.model = new_model(settings, corpus).to(device)
        self.optimizer = Optimizer(self.model, settings)
        self._corpus_hash = str(corpus.record["files"][TRAIN]["sha256"])
        self.progress = self._resumed()
        self._micro_loss = (
            torch.compile(micro_loss, fullgraph=True, dynamic=False, options=COMPILED)
            if settings.compiled
            else micro_loss
        )
        self._compile_s = 0.0

    def _resumed(self) -> Progress:
        latest = self.folder / LATEST
        start = latest if latest.is_file() else self.conduct.trunk
        if start is None:
            return Progress()
        return checkpoints.load(
            start, self.model, self.optimizer, self.settings, self._corpus_hash, longer=start != latest
        )

    def run(self) -> dict[str, Any] | None:
        """Trains to the end and gives the result, or to `until` and gives None."""
        self._warm_up()
        with turn(self.conduct.turn):
            if time.time() >= self.conduct.until:
                return None  # others had the device all the time
            if self.conduct.turn is not None:
                self.conduct.say(f"{self.folder.name}: begins at step {self.progress.step}")
            with deferred_interrupt() as interrupted:
                finished = self._train(interrupted)
            if interrupted.is_set() and not finished:
                raise KeyboardInterrupt
            return self._finish() if finished else None

    def _warm_up(self) -> None:
        """Compiles, with the shapes of training and without a trace in any number, before the device's turn comes."""
        begin = time.monotonic()
        self._gradients(0)
        self.model.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        self._compile_s = time.monotonic() - begin

    def _train(self, interrupted: threading.Event) -> bool:
        settings, conduct, progress = self.settings, self.conduct, self.progress
        saved = said = time.monotonic()
        said_step = progress.step
        while progress.step < settings.steps:
            if progress.step == settings.decay_start and conduct.keep_trunk:
                self._save(TRUNK)
            begin = time.monotonic()
            loss = self._step(progress.step)
            progress.step += 1
            if progress.step % conduct.say_every_steps == 0 or progress.step == settings.steps:
                value = self._checked(loss)  # waits for the device
                now = time.monotonic()
                tokens = (progress.step - said_step) * settings.step_tokens
                speed = Speed.of(tokens, now - said, settings, self.corpus.vocabulary, peak_of(self.device))
                progress.curve.append([progress.step, round(value, 5)])
                conduct.say(
                    f"{self.folder.name}: "
                    + progress_line(settings, progress.step, value, settings.rate(progress.step - 1), speed)
                )
                said, said_step = now, progress.step
            progress.seconds += time.monotonic() - begin
            stopped = interrupted.is_set() or time.time() >= conduct.until
            if stopped or time.monotonic() - saved >= conduct.save_every_s:
                self._checked(loss)
                self._save(LATEST)
                saved = time.monotonic()
            if stopped and progress.step < settings.steps:
                conduct.say(f"{self.folder.name}: stops at step {progress.step} of {settings.steps}, saved")
                return False
        return True

    def _step(self, step: int) -> Tensor:
        loss = self._gradients(step)
        self.optimizer.step(self.settings.rate(step))
        return loss

    def _gradients(self, step: int) -> Tensor:
        """Adds a step's gradients to those that are there; its loss, in nats a token."""
        settings = self.settings
        rows = self.corpus.batch(settings, step)
        targets = self.corpus.targets(rows)
        scale = 1.0 / (targets != IGNORED).sum()
        total = torch.zeros((), device=self.device)
        for start in range(0, settings.batch_sequences, settings.micro_sequences):
            part = slice(start, start + settings.micro_sequences)
            loss = self._micro_loss(self.model, rows[part], targets[part], scale)[0]
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def _checked(self, loss: Tensor) -> float:
        value = float(loss)
        if not math.isfinite(value):
            raise NumericalFault(
                f"The loss of {self.folder.name} is {value} at step {self.progress.step}.",
                "Lower matrix_rate or embedding_rate; the checkpoint before it is kept.",
            )
        return value

    def _save(self, name: str) -> None:
        checkpoints.save(
            self.folder / name, self.model, self.optimizer, self.progress, self.settings, self._corpus_hash
        )

    def _finish(self) -> dict[str, Any]:
        self._save(LATEST)
        checkpoints.save_weights(self.folder / WEIGHTS, self.model, self.model.compute)
        found = bits_per_byte(self.model, self.corpus, self.settings.micro_sequences)
        tokens = self.settings.steps * self.settings.step_tokens
        peak = peak_of(self.device)
        speed = Speed.of(tokens, self.progress.seconds, self.settings, self.corpus.vocabulary, peak)
        result = {
            "run": self.folder.name, **described(self.device), "settings": self.settings.saved(),
            "corpus": self._corpus_hash,
            "parameters": sum(value.numel() for value in self.model.parameters()), "tokens": tokens,
            "training_s": round(self.progress.seconds, 2), "compile_s": round(self._compile_s, 2),
            "processes": self.progress.processes, "tokens_per_second": round(speed.tokens_per_second, 1),
            "utilisation": speed.utilisation, "validation": found, "curve": self.progress.curve,
        }  # fmt: skip
        self.conduct.say(
            f"{self.folder.name}: {found['bits_per_byte']:.4f} bits per byte, {tokens / 1e6:.1f}M tokens in "
            f"{self.progress.seconds:.0f} s"
        )
        with told_if_full(self.folder, "The result"):
            replace_whole(self.folder / RESULT, lambda path: _write_json(path, result))
        return result


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value) + "\n", "utf-8")


def micro_loss(model: StreamedLaneformer, rows: Tensor, targets: Tensor, scale: Tensor) -> tuple[Tensor]:
    """A share of a step's loss."""
    return (token_losses(model, rows, targets).sum() * scale,)


def new_model(settings: Settings, corpus: Corpus) -> StreamedLaneformer:
    """The first weights: the same in all arms and for every number of lanes, where the seed is the same."""
    torch.manual_seed(settings.seed)
    model = StreamedLaneformer(settings.config(corpus.vocabulary, corpus.end))
    model.compute = torch.bfloat16 if settings.precision == "bf16" else torch.float32
    with torch.no_grad():
        model.model.tok_embeddings.weight.normal_(0, 0.02)
        for name, value in model.named_parameters():
            if name.endswith(LAST_MATRICES):
                value.zero_()  # a module adds nothing until it has learned something
            elif value.dim() == 3:  # lanes hold rows of one matrix
                value.normal_(0, value.shape[-1] ** -0.5)
    return model


@contextmanager
def deferred_interrupt() -> Iterator[threading.Event]:
    """Set by an interrupt, which then waits for the end of a step: weights that are half changed are never saved."""
    asked = threading.Event()

    def ask(*_: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt  # asked twice: at once, and nothing is saved
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked  # signals go to the main thread
        return
    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def turn(file: Path | None) -> Iterator[None]:
    """Holds the file while it trains; others compile meanwhile and wait."""
    if file is None:
        yield
        return
    import fcntl  # not on every system

    with file.open("a", encoding="utf-8") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield

"""Reads a prepared corpus: which sequences a step takes is a function of the seed and the step alone."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from monotape.errors import UsageError
from monotape.training.corpus.prepare import RECORD, TOKENIZER, TRAIN, VALIDATION
from monotape.training.settings import Settings
from monotape.training.streams import IGNORED


@dataclass(slots=True)
class Corpus:
    """Sequences [count, length] of 16-bit tokens on the device that trains."""

    record: dict[str, Any]
    train: Tensor
    validation: Tensor
    token_bytes: Tensor  # of text, by token; 0 for marks
    end: int
    _orders: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # of one epoch, on the device

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> Corpus:
        """Checks what the record says against what is there."""
        if not (folder / RECORD).is_file():
            raise UsageError(
                f"{folder} is not a prepared corpus: it has no {RECORD}.",
                "Make one with `python -m monotape.training corpus prepare`.",
            )
        try:
            record = json.loads((folder / RECORD).read_text("utf-8"))
            length, files = record["preparation"]["sequence"], record["files"]
            counts = {name: files[name]["sequences"] for name in (TRAIN, VALIDATION)}
            end, vocabulary = record["end"], record["vocabulary"]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{folder / RECORD} cannot be read ({error!r}).", "Prepare the corpus again."
            ) from None
        rows = {name: _rows(folder / name, counts[name], length, vocabulary).to(device) for name in counts}
        token_bytes = torch.tensor(bytes_of_tokens(folder / TOKENIZER), dtype=torch.float64, device=device)
        return cls(record, rows[TRAIN], rows[VALIDATION], token_bytes, end)

    @property
    def vocabulary(self) -> int:
        return int(self.record["vocabulary"])

    def check(self, settings: Settings) -> None:
        """Whether a run fits: the length of its sequences, and at least one step."""
        if self.train.shape[1] != settings.context:
            raise UsageError(
                f"The corpus has sequences of {self.train.shape[1]} tokens, and the run asks for {settings.context}.",
                "Set context to that, or prepare the corpus with --sequence.",
            )
        if len(self.train) < settings.batch_sequences or not len(self.validation):
            raise UsageError(
                f"The corpus is too small: {len(self.train)} sequences to train on and {len(self.validation)} to "
                f"validate on, and a step takes {settings.batch_sequences}.",
                "Add packages, or take smaller steps (batch_sequences).",
            )

    def batch(self, settings: Settings, step: int) -> Tensor:
        """The sequences of a step, [batch_sequences, length]. Every epoch has an order of its own."""
        per_epoch = len(self.train) // settings.batch_sequences
        epoch, place = divmod(step, per_epoch)
        key = (settings.seed, epoch)
        if key not in self._orders:
            order = np.random.default_rng(list(key)).permutation(len(self.train))
            # Copied once an epoch: a copy in each step would make the host wait for the device in each step.
            self._orders = {key: torch.from_numpy(order).to(self.train.device)}
        start = place * settings.batch_sequences
        return self.train[self._orders[key][start : start + settings.batch_sequences]].long() & 0xFFFF

    def targets(self, rows: Tensor) -> Tensor:
        """The token after each; not the one after a sequence's last, nor the padding at its end."""
        targets = torch.full_like(rows, IGNORED)
        targets[:, :-1] = rows[:, 1:]
        padding = (rows == self.end) & (targets == self.end)
        return targets.masked_fill(padding, IGNORED)


def _rows(path: Path, count: int, length: int, vocabulary: int) -> Tensor:
    try:
        tokens = np.fromfile(path, "<u2")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error}.", "Prepare the corpus again.") from None
    if len(tokens) != count * length:
        raise UsageError(
            f"{path} has {len(tokens):,} tokens, and its record says {count * length:,}.",
            "Prepare or unpack it again.",
        )
    if len(tokens) and int(tokens.max()) >= vocabulary:
        raise UsageError(
            f"{path} has token {int(tokens.max())} of a vocabulary of {vocabulary}.",
            "It is no file of these tokens.",
        )
    return torch.from_numpy(tokens.view(np.int16).reshape(count, length))


def bytes_of_tokens(tokenizer_file: Path) -> list[int]:
    """How many bytes of text each token of a byte-level tokenizer stands for; 0 for marks.

    Read off the file: a machine that only trains needs no tokenizer.
    """
    try:
        stored = json.loads(tokenizer_file.read_text("utf-8"))
        marks = {entry["id"] for entry in stored["added_tokens"]}
        names = {number: name for name, number in stored["model"]["vocab"].items() if number not in marks}
        return [len(names.get(number, "")) for number in range(max([*names, *marks]) + 1)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{tokenizer_file} is not a tokenizer: {error!r}.", "Prepare the corpus again."
        ) from None

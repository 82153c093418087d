"""A model that does what its prompt says: `say:TEXT`, at a given speed, or with a given accident.

The last `say:` of a prompt decides; what stands between it and the end of that message is the answer. Before it may
stand `rate=N` (tokens a second), `repeat=N` (say it N times), `prefill=N` (milliseconds for a prompt of which none is
cached), `logits=N` (milliseconds before any), `hold=PATH` (no more than three tokens while that file is there), and
`kill`, `hang`, `fault` or `deadline` (what happens after the third token).
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.vocabularies import byte_level
from lookup import counted_drafts
from monotape.backends.protocol import Job, KvSequence
from monotape.engine.config import EngineConfig
from monotape.engine.llm import LLM
from monotape.engine.tokenizer import Tokenizer
from monotape.errors import CheckpointError, DeadlineFault, ModelError, NumericalFault, ResourceError
from monotape.server.engine.model_source import Text
from monotape.weights.checkpoint import TextAssets
from token_source import SourceGeneration, SourceSequence, TokenSource

CONTEXT = 20_000
_PARTS = 16  # in which a prompt is read
TEMPLATE = (
    "{# the model thinks between <think> and </think> #}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content or '' }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SCRIPT = re.compile(
    r"((?:(?:rate|repeat|prefill|logits)=\d+ |hold=\S+ |kill |hang |fault |deadline )*)say:(.*?)(?:<\|eot\|>|$)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Script:
    """What a prompt asks for."""

    ids: tuple[int, ...]
    rate: float = 0.0
    prefill_s: float = 0.0
    logits_s: float = 0.0
    hold: str = ""
    accident: str = ""


class ScriptedBackend(TokenSource):
    """Its answers are in its prompts."""

    name = "scripted"

    def __init__(self, tokenizer: Tokenizer, vocab: int, end_id: int) -> None:
        super().__init__(vocab=vocab, context=CONTEXT, eos_id=end_id, token_bytes=100)
        self._tokenizer, self._end = tokenizer, end_id
        self._script, self._began = Script(()), 0.0  # of the job that runs

    def script(self, prompt: Sequence[int]) -> Script:
        found = _SCRIPT.findall(self._tokenizer.decode(list(prompt), skip_special=False))
        options, text = found[-1] if found else ("", "ok")
        numbers = {
            name: int(value) for name, value in re.findall(r"(rate|repeat|prefill|logits)=(\d+)", options)
        }
        held = re.search(r"hold=(\S+) ", options)
        accident = re.search(r"\b(?:kill|hang|fault|deadline) ", options)
        ids = self._tokenizer.encode(text, add_special=False) * numbers.get("repeat", 1)
        return Script(
            (*ids, self._end),
            numbers.get("rate", 0),
            numbers.get("prefill", 0) / 1e3,
            numbers.get("logits", 0) / 1e3,
            held.group(1) if held else "",
            accident.group().strip() if accident else "",
        )

    def answer(self, job: Job, index: int) -> int:
        return self._script.ids[min(index, len(self._script.ids) - 1)]

    def drafts(self, job: Job, output: Sequence[int]) -> tuple[int, int]:
        return counted_drafts(job.prediction, output) if job.drafts else (0, 0)

    def wait(self, generation: SourceGeneration, index: int) -> None:
        if index < 0:
            self._script = self.script(generation.job.prompt)
            self._read(generation)
            self._began = time.monotonic()
            return
        if self._script.rate:
            time.sleep(max(0.0, self._began + index / self._script.rate - time.monotonic()))
        if index == 3 and self._script.hold:
            while Path(self._script.hold).exists() and not generation.cancelled.wait(0.01):
                pass
        if index == 3 and self._script.accident and not generation.cancelled.is_set():
            _have(self._script.accident)

    def _read(self, generation: SourceGeneration) -> None:
        """The prompt, in parts that take the same time. What is cached of it takes none."""
        job, sequence = generation.job, generation.sequence
        part_s = self._script.prefill_s * (1 - job.cached / len(job.prompt)) / _PARTS
        for part in range(1, _PARTS + 1):
            if generation.cancelled.wait(part_s):
                return
            end = job.cached + (len(job.prompt) - job.cached) * part // _PARTS
            sequence.tokens += job.prompt[sequence.length : end]

    def logits(self, tokens: Sequence[int], sequence: KvSequence) -> NDArray[np.float32]:
        """The scripted token is the most likely one wherever the text so far is the script's."""
        assert isinstance(sequence, SourceSequence)
        time.sleep(self.script([*sequence.tokens, *tokens]).logits_s)
        rows = []
        for token in tokens:
            sequence.tokens.append(token)
            text = self._tokenizer.decode(sequence.tokens, skip_special=False)
            said = self._tokenizer.encode(text.rpartition("<|assistant|>")[2], add_special=False)
            ids = self.script(sequence.tokens).ids
            row = np.random.default_rng(token).random(self.spec.vocab).astype(np.float32)
            if tuple(said) == ids[: len(said)] and len(said) < len(ids):
                row[ids[len(said)]] += 10
            rows.append(row)
        return np.stack(rows)


def _have(accident: str) -> None:
    if accident == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if accident == "hang":
        time.sleep(3600)
    if accident == "fault":
        raise NumericalFault("The logits at position 3 are not numbers.", "Nothing to be done.")
    raise DeadlineFault("Worker 1 waited too long for worker 0 in stage qkv.", "Nothing to be done.")


def _refuse(why: str) -> None:
    """What the file says about why the model cannot be loaded; an empty one only makes it wait."""
    faults = {
        "away": CheckpointError("model.safetensors is not there.", "Put it back."),
        "full": ResourceError("The model takes 9 GB, and 8 are free.", "Free some."),
        "memory": MemoryError(), "disk": OSError(5, "Input/output error"),
        "other": ModelError("config.json describes another model.", "Restart the server."),
    }  # fmt: skip
    if why == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if why == "crash":
        os._exit(139)
    if why:
        raise faults[why]


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_assets(TextAssets(vocabulary=byte_level()))
    assert tokenizer is not None
    return tokenizer


def load_text(config: EngineConfig) -> Text:
    return Text(_tokenizer(), config.chat_template or TEMPLATE, {})


def load_llm(config: EngineConfig, phase: Callable[[str], None]) -> LLM:
    if config.model == "broken":
        raise CheckpointError("model.safetensors is 3 bytes long.", "Download it again.")
    if config.model == "slow":
        time.sleep(2.0)
    gate = Path(config.model)  # a model that is the path of a file cannot be loaded while the file is there
    while gate.is_absolute() and gate.exists():
        _refuse(gate.read_text())
        time.sleep(0.01)
    vocabulary = byte_level()
    tokenizer = _tokenizer()
    backend = ScriptedBackend(tokenizer, len(vocabulary.tokens), vocabulary.tokens.index("<|end|>"))
    phase("weights")
    return LLM.from_parts(
        backend, context=CONTEXT, tokenizer=tokenizer, chat_template=TEMPLATE, config=config
    )

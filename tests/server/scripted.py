"""A model that does what its prompt says: `say:TEXT`, at a given speed, or with a given accident.

The last `say:` of a prompt decides; what stands between it and the end of that message is the answer. Before it may
stand `rate=N` (tokens a second), `repeat=N` (say it N times), `prefill=N` (milliseconds before the first token), and
`kill`, `hang`, `fault` or `deadline` (what happens after the third token).
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.fake_backend import FakeSequence
from engine.vocabularies import byte_level
from monotape.backends.protocol import FinishReason, Job, KvSequence, Token
from monotape.compiler.compile import compile_plan
from monotape.engine.config import EngineConfig
from monotape.engine.llm import LLM
from monotape.engine.tokenizer import Tokenizer
from monotape.errors import CheckpointError, DeadlineFault, NumericalFault
from monotape.models.registry import spec_from_config
from monotape.plan.types import Format, Machine
from monotape.server.model_source import Text
from monotape.weights.checkpoint import TextAssets

CONTEXT = 20_000
TEMPLATE = (
    "{# the model thinks between <think> and </think> #}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content or '' }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SCRIPT = re.compile(
    r"((?:(?:rate|repeat|prefill)=\d+ |kill |hang |fault |deadline )*)say:(.*?)(?:<\|eot\|>|$)", re.DOTALL
)


@dataclass(frozen=True)
class Script:
    """What a prompt asks for."""

    ids: tuple[int, ...]
    rate: float = 0.0
    prefill_s: float = 0.0
    accident: str = ""


class ScriptedBackend:
    """A backend without weights. Its KV remembers whose it is."""

    name = "scripted"

    def __init__(self, tokenizer: Tokenizer, vocab: int, end_id: int) -> None:
        config = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1,
            "hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 20,
            "vocab_size": vocab, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True, "hidden_act": "silu", "rope_theta": 10000.0, "eos_token_id": end_id,
            "torch_dtype": "float32",
        }  # fmt: skip
        self.spec = spec_from_config(config)
        self.plan = compile_plan(self.spec, Machine("cpu", 1), Format.F32, context=CONTEXT)
        self._tokenizer, self._end = tokenizer, end_id

    def script(self, prompt: Sequence[int]) -> Script:
        found = _SCRIPT.findall(self._tokenizer.decode(list(prompt), skip_special=False))
        options, text = found[-1] if found else ("", "ok")
        numbers = {name: int(value) for name, value in re.findall(r"(rate|repeat|prefill)=(\d+)", options)}
        accident = re.search(r"kill|hang|fault|deadline", options)
        ids = self._tokenizer.encode(text, add_special=False) * numbers.get("repeat", 1)
        return Script(
            (*ids, self._end),
            numbers.get("rate", 0),
            numbers.get("prefill", 0) / 1e3,
            accident.group() if accident else "",
        )

    def new_sequence(self) -> FakeSequence:
        return FakeSequence(token_bytes=100)

    def start(self, job: Job, sequence: KvSequence) -> ScriptedGeneration:
        assert isinstance(sequence, FakeSequence)
        assert tuple(sequence.tokens[: job.cached]) == job.prompt[: job.cached], (
            "the KV of another conversation"
        )
        sequence.truncate(job.cached)
        return ScriptedGeneration(self.script(job.prompt), job, sequence)

    def logits(self, tokens: Sequence[int], sequence: KvSequence) -> NDArray[np.float32]:
        """The scripted token is the most likely one wherever the text so far is the script's."""
        assert isinstance(sequence, FakeSequence)
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

    def close(self) -> None:
        pass


class ScriptedGeneration:
    """Tokens in time."""

    def __init__(self, script: Script, job: Job, sequence: FakeSequence) -> None:
        self.finish_reason: FinishReason | None = None
        self.start_ns = time.monotonic_ns()
        self._script, self._job, self._sequence = script, job, sequence
        self._cancelled = threading.Event()
        self._tokens = self._run()

    def __iter__(self) -> Iterator[Token]:
        return self._tokens

    def cancel(self) -> None:
        self._cancelled.set()

    def _run(self) -> Iterator[Token]:
        job, script, sequence = self._job, self._script, self._sequence
        self._cancelled.wait(script.prefill_s)
        sequence.tokens += job.prompt[job.cached :]
        began, previous = time.monotonic(), -1
        for index in range(job.max_tokens):
            if script.rate:
                wait = began + index / script.rate - time.monotonic()
                if wait > 0:
                    time.sleep(wait)
            if self._cancelled.is_set():
                self.finish_reason = "cancelled"
                return
            if index == 3 and script.accident:
                self._have(script.accident)
            token_id = script.ids[min(index, len(script.ids) - 1)]
            if index:
                sequence.tokens.append(previous)
            previous = token_id
            if token_id in job.stop_ids and index >= job.min_tokens:
                self.finish_reason = "stop"
            elif index == job.max_tokens - 1:
                self.finish_reason = "length"
            yield self._token(token_id)
            if self.finish_reason is not None:
                return

    def _token(self, token_id: int) -> Token:
        if self._job.logprobs is None:
            return Token(token_id, time.monotonic_ns())
        top = tuple((token_id + rank, -0.25 - rank) for rank in range(self._job.logprobs))
        return Token(token_id, time.monotonic_ns(), -0.25, top)

    def _have(self, accident: str) -> None:
        if accident == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if accident == "hang":
            time.sleep(3600)
        if accident == "fault":
            raise NumericalFault("The logits at position 3 are not numbers.", "Nothing to be done.")
        raise DeadlineFault("Worker 1 waited too long for worker 0 in stage qkv.", "Nothing to be done.")


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
    vocabulary = byte_level()
    tokenizer = _tokenizer()
    backend = ScriptedBackend(tokenizer, len(vocabulary.tokens), vocabulary.tokens.index("<|end|>"))
    phase("weights")
    return LLM.from_parts(
        backend, context=CONTEXT, tokenizer=tokenizer, chat_template=TEMPLATE, config=config
    )

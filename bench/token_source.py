"""A model that makes tokens at a fixed rate, for bench/serve.py: what is measured then is everything but the model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from monotape.backends.protocol import FinishReason, Job, KvSequence, Token
from monotape.compiler.compile import compile_plan
from monotape.engine.config import EngineConfig
from monotape.engine.llm import LLM
from monotape.engine.pieces import BYTE_OF_CHARACTER
from monotape.engine.tokenizer import Tokenizer
from monotape.models.registry import spec_from_config
from monotape.plan.types import Format, Machine
from monotape.server.model_source import Text
from monotape.weights.checkpoint import TextAssets, Vocabulary

CONTEXT = 131_072
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


class SourceSequence:
    """KV that only has a length."""

    def __init__(self) -> None:
        self.length = 0
        self.bytes = 0

    def truncate(self, length: int) -> None:
        self.length = length


class SourceGeneration:
    """Letters, each at its time."""

    def __init__(self, rate: float, job: Job, sequence: SourceSequence) -> None:
        self.finish_reason: FinishReason | None = None
        self.start_ns = time.monotonic_ns()
        self._rate, self._job, self._sequence = rate, job, sequence
        self._cancelled = threading.Event()
        self._tokens = self._run()

    def __iter__(self) -> Iterator[Token]:
        return self._tokens

    def cancel(self) -> None:
        self._cancelled.set()

    def _run(self) -> Iterator[Token]:
        began = time.monotonic()
        for index in range(self._job.max_tokens):
            wait = began + index / self._rate - time.monotonic()
            if wait > 0:
                time.sleep(wait)
            if self._cancelled.is_set():
                self.finish_reason = "cancelled"
                break
            if index == self._job.max_tokens - 1:
                self.finish_reason = "length"
            yield Token(97 + index % 26, time.monotonic_ns())
        self._sequence.length = len(self._job.prompt) + index


class SourceBackend:
    """A backend that computes nothing."""

    name = "token source"

    def __init__(self, rate: float) -> None:
        config = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1,
            "hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 20,
            "vocab_size": 256, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True, "hidden_act": "silu", "rope_theta": 10000.0, "torch_dtype": "float32",
        }  # fmt: skip
        self.spec = spec_from_config(config)
        self.plan = compile_plan(self.spec, Machine("cpu", 1), Format.F32, context=CONTEXT)
        self._rate = rate

    def new_sequence(self) -> SourceSequence:
        return SourceSequence()

    def start(self, job: Job, sequence: KvSequence) -> SourceGeneration:
        assert isinstance(sequence, SourceSequence)
        return SourceGeneration(self._rate, job, sequence)

    def logits(self, tokens: Sequence[int], sequence: KvSequence) -> NDArray[np.float32]:
        return np.zeros((len(tokens), self.spec.vocab), np.float32)

    def close(self) -> None:
        pass


def _tokenizer() -> Tokenizer:
    characters = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
    vocabulary = Vocabulary(
        model="gpt2", pre="gpt-2", tokens=tuple(characters[byte] for byte in range(256)), types=(1,) * 256,
        scores=(), merges=(), add_bos=False, add_space_prefix=False, bos_id=None, eos_id=None, unknown_id=None,
    )  # fmt: skip
    tokenizer = Tokenizer.from_assets(TextAssets(vocabulary=vocabulary))
    assert tokenizer is not None
    return tokenizer


def load_text(config: EngineConfig) -> Text:
    return Text(_tokenizer(), TEMPLATE, {})


def load_llm(config: EngineConfig, phase: Callable[[str], None]) -> LLM:
    """The model's name is its rate: "rate-3000"."""
    backend = SourceBackend(float(config.model.removeprefix("rate-")))
    return LLM.from_parts(
        backend, context=CONTEXT, tokenizer=_tokenizer(), chat_template=TEMPLATE, config=config
    )

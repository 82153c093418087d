"""A backend without weights, whose tokens a subclass decides: for tests of the engine and the server, and for
measuring everything but the model."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from monotape.backends.protocol import FinishReason, Job, KvSequence, Token
from monotape.compiler.compile import compile_plan
from monotape.models.registry import spec_from_config
from monotape.models.spec import ModelSpec
from monotape.plan.formats import Format
from monotape.plan.types import Machine


def smallest_spec(vocab: int, context: int, eos_id: int | None = None) -> ModelSpec:
    """A model that can be planned and loaded, and is never computed."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 24,
        "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 20, "vocab_size": vocab,
        "max_position_embeddings": context, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        "hidden_act": "silu", "rope_theta": 10000.0, "eos_token_id": eos_id, "torch_dtype": "float32",
    }  # fmt: skip
    return spec_from_config(config)


class SourceSequence:
    """KV that remembers whose it is: the tokens themselves."""

    def __init__(self, token_bytes: int) -> None:
        self.tokens: list[int] = []
        self._token_bytes = token_bytes

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def bytes(self) -> int:
        return self._token_bytes * len(self.tokens)

    def truncate(self, length: int) -> None:
        assert 0 <= length <= len(self.tokens)
        del self.tokens[length:]

    def reserve(self, positions: int) -> None:
        pass

    def copy_from(self, other: KvSequence, length: int) -> None:
        assert isinstance(other, SourceSequence) and not self.tokens and length <= other.length
        self.tokens = other.tokens[:length]


class TokenSource:
    """The backend. A subclass decides which tokens come (`answer`), when (`wait`, `time_ns`) and what fails."""

    name = "token source"

    def __init__(self, *, vocab: int, context: int, eos_id: int | None = None, token_bytes: int = 10) -> None:
        self.spec = smallest_spec(vocab, context, eos_id)
        self.plan = compile_plan(self.spec, Machine("cpu", 1), Format.F32, context=context)
        self._token_bytes = token_bytes

    def answer(self, job: Job, index: int) -> int:
        """The id of an answer's token, from 0 on."""
        raise NotImplementedError

    def wait(self, generation: SourceGeneration, index: int) -> None:
        """Returns when a token's time has come; -1 is the time of the prompt, which it may read in parts.

        Anything may happen here.
        """

    def time_ns(self, generation: SourceGeneration, index: int) -> int:
        """When a token came."""
        return time.monotonic_ns()

    def token(self, token_id: int, time_ns: int, top: int | None) -> Token:
        if top is None:
            return Token(token_id, time_ns)
        return Token(token_id, time_ns, -0.25, tuple((token_id + rank, -0.25 - rank) for rank in range(top)))

    def drafts(self, job: Job, output: Sequence[int]) -> tuple[int, int]:
        """How many drafts were checked for these tokens, and how many accepted."""
        return 0, 0

    def new_sequence(self) -> SourceSequence:
        return SourceSequence(self._token_bytes)

    def start(self, job: Job, sequence: KvSequence) -> SourceGeneration:
        assert isinstance(sequence, SourceSequence)
        assert 0 <= job.cached < len(job.prompt)
        assert tuple(sequence.tokens[: job.cached]) == job.prompt[: job.cached], (
            "the KV of another conversation"
        )
        sequence.truncate(job.cached)
        return SourceGeneration(self, job, sequence)

    def logits(self, tokens: Sequence[int], sequence: KvSequence) -> NDArray[np.float32]:
        assert isinstance(sequence, SourceSequence)
        sequence.tokens += tokens
        return np.zeros((len(tokens), self.spec.vocab), np.float32)

    def close(self) -> None:
        pass


class SourceGeneration:
    """A job that is computed as it is read, like the reference backend's."""

    def __init__(self, source: TokenSource, job: Job, sequence: SourceSequence) -> None:
        self.finish_reason: FinishReason | None = None
        self.start_ns = time.monotonic_ns()
        self.source, self.job, self.sequence = source, job, sequence
        self.cancelled = threading.Event()
        self.drafted = self.accepted = 0
        self._output: list[int] = []
        self._tokens = self._run()

    def __iter__(self) -> Iterator[Token]:
        return self._tokens

    @property
    def filled(self) -> int:
        return min(self.sequence.length, len(self.job.prompt))

    def cancel(self) -> None:
        self.cancelled.set()

    def _run(self) -> Iterator[Token]:
        job, source, previous = self.job, self.source, -1
        source.wait(self, -1)
        if self.cancelled.is_set():  # what was read until then stays
            self.finish_reason = "cancelled"
            return
        self.sequence.tokens += job.prompt[self.sequence.length :]
        for index in range(job.max_tokens):
            source.wait(self, index)
            if self.cancelled.is_set():
                self.finish_reason = "cancelled"
                return
            token_id = source.answer(job, index)
            if index:
                self.sequence.tokens.append(previous)
            previous = token_id
            self._output.append(token_id)
            if token_id in job.stop_ids and index >= job.min_tokens:
                self.finish_reason = "stop"
            elif index == job.max_tokens - 1:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                self.drafted, self.accepted = source.drafts(job, self._output)
            yield source.token(token_id, source.time_ns(self, index), job.logprobs)
            if self.finish_reason is not None:
                return

"""A backend without a model: it says what it is told, and checks that its KV is what the engine believes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from monotape.backends.protocol import FinishReason, Job, KvSequence, Token
from monotape.compiler.compile import compile_plan
from monotape.errors import NumericalFault
from monotape.models.registry import spec_from_config
from monotape.plan.types import Format, Machine

TICK_NS = 1_000_000  # the fake clock: a prefill takes one tick a token, so does every decoded token


class FakeSequence:
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


class FakeGeneration:
    """A job that is computed as it is read, like the reference backend's."""

    def __init__(self, backend: FakeBackend, job: Job, sequence: FakeSequence) -> None:
        self.finish_reason: FinishReason | None = None
        self.start_ns = 7 * TICK_NS
        self._backend, self._job, self._sequence = backend, job, sequence
        self.cancelled = threading.Event()
        self._tokens = self._run()

    def __iter__(self) -> Iterator[Token]:
        return self._tokens

    def cancel(self) -> None:
        self.cancelled.set()

    def _run(self) -> Iterator[Token]:
        job, backend = self._job, self._backend
        new = job.prompt[job.cached :]
        self._sequence.tokens += new
        backend.prefilled.append(len(new))
        time_ns = self.start_ns + TICK_NS * len(new)
        for index in range(job.max_tokens):
            if self.cancelled.is_set():
                self.finish_reason = "cancelled"
                return
            if index == backend.interrupt_at:
                backend.interrupt_at = None
                raise KeyboardInterrupt
            if index == backend.fault_at:
                self._sequence.tokens.append(-1)  # a fault leaves KV that nobody can trust
                raise NumericalFault("The logits at position 3 are not numbers.", "Nothing to be done.")
            token_id = backend.answer(job, index)
            if index:
                self._sequence.tokens.append(self._last)
            self._last = token_id
            if token_id in job.stop_ids:
                self.finish_reason = "stop"
            elif index == job.max_tokens - 1:
                self.finish_reason = "length"
            yield backend.token(token_id, time_ns, job.logprobs)
            if self.finish_reason is not None:
                return
            time_ns += TICK_NS


class FakeBackend:
    """Says `script`, then its first token for ever. Stop ids are passed over until `min_tokens` are out."""

    name = "fake"

    def __init__(
        self,
        script: Sequence[int],
        *,
        vocab: int,
        context: int = 97,
        eos_id: int | None = None,
        token_bytes: int = 10,
    ) -> None:
        config = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1,
            "hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 20,
            "vocab_size": vocab, "max_position_embeddings": context, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True, "hidden_act": "silu", "rope_theta": 10000.0, "eos_token_id": eos_id,
            "torch_dtype": "float32",
        }  # fmt: skip
        self.spec = spec_from_config(config)
        self.plan = compile_plan(self.spec, Machine("cpu", 1), Format.F32, context=context)
        self.script = list(script)
        self.fault_at: int | None = None
        self.interrupt_at: int | None = None
        self.jobs: list[Job] = []
        self.prefilled: list[int] = []  # prompt tokens that each job had to compute
        self.generations: list[FakeGeneration] = []
        self.closed = False
        self._token_bytes = token_bytes

    def answer(self, job: Job, index: int) -> int:
        script = self.script
        if index < job.min_tokens:
            script = [token for token in script if token not in job.stop_ids]
        return script[index] if index < len(script) else script[0]

    def token(self, token_id: int, time_ns: int, top: int | None) -> Token:
        if top is None:
            return Token(token_id, time_ns)
        ranked = sorted({token_id, 1, 2, 3, 4, 5})  # the chosen one is not always among the most likely
        likely = tuple((other, -0.5 - rank) for rank, other in enumerate(ranked))
        return Token(token_id, time_ns, dict(likely)[token_id], likely[:top])

    def new_sequence(self) -> FakeSequence:
        return FakeSequence(self._token_bytes)

    def start(self, job: Job, sequence: KvSequence) -> FakeGeneration:
        assert isinstance(sequence, FakeSequence)
        assert not self.closed
        assert all(generation.finish_reason for generation in self.generations), "one job at a time"
        assert 0 <= job.cached < len(job.prompt)
        assert tuple(sequence.tokens) == job.prompt[: job.cached], "the KV of another conversation"
        assert len(job.prompt) + job.max_tokens <= self.plan.context
        self.jobs.append(job)
        self.generations.append(FakeGeneration(self, job, sequence))
        return self.generations[-1]

    def logits(self, tokens: Sequence[int], sequence: KvSequence) -> NDArray[np.float32]:
        """Logits that depend on the token and its position, so that a mixed-up row shows."""
        assert isinstance(sequence, FakeSequence)
        start = sequence.length
        sequence.tokens += tokens
        rows = [[(token * 31 + (start + row) * 17 + column * 7) % 23 / 4 for column in range(self.spec.vocab)]
                for row, token in enumerate(tokens)]  # fmt: skip
        return np.array(rows, np.float32)

    def close(self) -> None:
        self.closed = True

"""What every backend offers: sequences that hold KV, and jobs that turn a prompt into tokens.

A job is one unit of work for the machine: prefill what is new, then decode until a stop id, the length or a
cancellation ends it. On a GPU it is one launch, on a CPU one call; nothing of Python runs between two tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from monotape.models.spec import ModelSpec
from monotape.plan.types import Plan

FinishReason = Literal["stop", "length", "cancelled"]
#: Which tokens may be chosen: bit i % 32 of word i / 32 is that of id i. Bits after the last id are zeros.
Bits = NDArray[np.uint32]
MASK_BITS = 32  # of a word


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. backends/reference/sampler.py is the definition; every backend must match it."""

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0  # 64 bits; the noise of a token is a function of (seed, position, token id)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Job:
    """One request as a backend sees it."""

    prompt: Sequence[int]  # the whole prompt, cached part included (penalties look at all of it); read-only
    cached: int  # how many leading prompt tokens the sequence's KV already holds; at least one token is left
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0  # stop ids cannot be chosen before this many tokens
    sampling: Sampling = field(default_factory=Sampling)
    logprobs: int | None = None  # None: none; n: the chosen token's and those of the n most likely
    masked: bool = False  # every choice waits for a mask: see TakesMasks
    drafts: bool = True  # several tokens a pass, where earlier text says what may follow: the same tokens
    prediction: Sequence[int] = ()  # a text that the output may repeat: drafts are looked up in it too


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. Log-probabilities are those of the model itself, before penalties and temperature."""

    id: int
    time_ns: int  # the backend's own steady clock
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


class KvSequence(Protocol):
    """The KV of one conversation. `length` positions of it are valid."""

    @property
    def length(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    def truncate(self, length: int) -> None:
        """Forgets everything from position `length` on."""
        ...

    def reserve(self, positions: int) -> None:
        """Makes room for so many positions and keeps those that are there. A job does so too, with a copy of them."""
        ...

    def copy_from(self, other: KvSequence, length: int) -> None:
        """An empty sequence gets the first `length` positions of another one of the same backend."""
        ...


class Generation(Protocol):
    """A running job. Iterating yields tokens as they come; the stop id, if one ended it, is the last of them.

    When it has ended, `finish_reason` is set and the sequence holds KV for the prompt and all tokens but the last.
    A job that was cancelled before its first token leaves `length` at the leading positions whose KV is complete, at
    least the cached ones: a job that begins with the same tokens continues there, with the bits of one that was never
    interrupted. How many positions that are depends on the backend: whole chunks on a CPU or a GPU, whole passes
    in the reference. A job that ended in a fault has no `finish_reason`; its KV is not used.
    """

    @property
    def finish_reason(self) -> FinishReason | None: ...
    @property
    def start_ns(self) -> int:
        """When the backend began, on the clock of Token.time_ns."""
        ...

    @property
    def filled(self) -> int:
        """How many leading positions of the prompt are known to have their KV by now; safe from any thread."""
        ...

    def __iter__(self) -> Iterator[Token]: ...
    def cancel(self) -> None:
        """Ends the job within one token; safe from any thread."""
        ...


@runtime_checkable
class CountsDrafts(Protocol):
    """A Generation that says how many drafts its passes have checked. Both counts are known when it has ended."""

    @property
    def drafted(self) -> int: ...
    @property
    def accepted(self) -> int:
        """Drafts that were the tokens chosen: each of them saved a pass."""
        ...


def drafts_of(generation: Generation) -> tuple[int, int]:
    """Drafts that were checked and drafts that were accepted; none of a backend that has none."""
    return (generation.drafted, generation.accepted) if isinstance(generation, CountsDrafts) else (0, 0)


class Backend(Protocol):
    """A loaded model that can run jobs, one at a time."""

    name: str
    spec: ModelSpec
    plan: Plan

    def new_sequence(self) -> KvSequence: ...
    def start(self, job: Job, sequence: KvSequence) -> Generation: ...
    def logits(self, tokens: Sequence[int], sequence: KvSequence) -> NDArray[np.float32]:
        """Appends `tokens` to the sequence and gives the logits after each: shape (len(tokens), vocab)."""
        ...

    def close(self) -> None: ...


class MaskedGeneration(Generation, Protocol):
    """A running job that waits for a mask before each choice. Another thread than the one that iterates gives them."""

    @property
    def masks_ahead(self) -> int:
        """That of token number n may be given when token number n - masks_ahead has been awaited."""
        ...

    def allow(self, bits: Bits) -> None:
        """The next mask, at least one bit of it set: the first call is about the first token."""
        ...

    def expect(self, ids: Sequence[int]) -> None:
        """Tokens that the masks from the next one on will allow, each alone: a pass may compute several of them.

        It changes no token, and each still needs its mask.
        """
        ...

    def end_masks(self, *, complete: bool) -> None:
        """In place of the next mask: the text is complete, or the job is to be cancelled. Later masks are ignored."""
        ...

    def await_token(self, index: int) -> int | None:
        """The id of token number `index`, once it has been chosen; None if the job ended or masks did before."""
        ...


@runtime_checkable
class TakesMasks(Protocol):
    """A backend that takes masks while a job runs. On others, a constraint costs one pass and one call a token."""

    def start_masked(self, job: Job, sequence: KvSequence) -> MaskedGeneration: ...

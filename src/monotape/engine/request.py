"""One completion to be computed: a prompt, its settings and everything that was left open, decided."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from monotape.backends.protocol import Job
from monotape.engine.drafts import Drafts
from monotape.engine.prompts import Prompt
from monotape.engine.sampling_params import SamplingParams
from monotape.errors import ContextOverflow

if TYPE_CHECKING:
    from monotape.engine.constraint import Constraint


@dataclass(frozen=True, slots=True)
class Request:
    """A request as the engine runs it."""

    id: str
    prompt: Prompt
    params: SamplingParams
    index: int  # which of its n completions
    seed: int
    max_tokens: int
    eos_ids: frozenset[int]  # empty when they are ignored
    vocab: int
    constraint: Constraint | None = None
    special_mark: str = ""  # before the text of each special token
    drafts: Drafts = field(default_factory=Drafts)

    @property
    def stop_ids(self) -> frozenset[int]:
        return self.eos_ids | frozenset(self.params.stop_token_ids or ())

    def job(self, cached: int) -> Job:
        """What the backend is to do, when the first `cached` tokens of the prompt have their KV already."""
        return Job(
            prompt=self.prompt.ids,
            cached=cached,
            max_tokens=self.max_tokens,
            stop_ids=tuple(sorted(self.stop_ids)),
            min_tokens=self.params.min_tokens,
            sampling=self.params.sampling(seed=self.seed, vocab=self.vocab),
            logprobs=self.params.logprobs,
            drafts=self.drafts.wanted,
            prediction=self.drafts.prediction,
        )


def room_for(prompt: Prompt, params: SamplingParams, context: int, model_context: int) -> int:
    """How many tokens the request may generate; an error when prompt and answer do not fit the context, which may be
    shorter than `model_context`, the model's own.
    """
    length = len(prompt.ids)
    room = context - length
    wanted = params.max_tokens if params.max_tokens is not None else max(1, params.min_tokens)
    if wanted <= room:
        return room if params.max_tokens is None else wanted
    larger = ", or load with a larger max_model_len" if context < model_context else ""
    least, name = ("at least ", "min_tokens") if params.max_tokens is None else ("", "max_tokens")
    if room > 0:
        asked = f"you requested {least}{wanted} output tokens and your prompt"
        fits = f"Ask for at most {room} output tokens ({name}), or shorten the prompt."
    else:  # however short the answer
        asked, fits = "your prompt", f"Shorten the prompt to at most {context - 1} tokens{larger}."
    raise ContextOverflow(
        f"This model's maximum context length is {context} tokens. However, {asked} contains {length} input tokens.",
        fits,
        prompt_tokens=length,
        context=context,
    )

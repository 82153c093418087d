"""Greedy continuations of a prompt by Monotape and by transformers, under one and the same stop rule."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from measuring import await_drafts
from monotape.engine.defaults import end_of_text_ids
from monotape.engine.llm import LLM
from monotape.engine.sampling_params import SamplingParams
from monotape.engine.tokenizer import Tokenizer
from monotape.errors import UsageError
from monotape.models.registry import spec_from_config
from monotape.weights.open import open_checkpoint
from recipes import Recipe, recipes_of

#: A function ends where the next thing at the left margin begins. The first five are those that HumanEval was
#: published with; the last is the end of a code block, which models made for chats like to write.
STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n```")

End = Literal["stop string", "end of text", "length"]


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine wrote: the text before the stop string, and every token it took to get there."""

    text: str
    token_ids: tuple[int, ...]
    seconds: float
    end: End


@dataclass(frozen=True, slots=True)
class Engine:
    """Something that continues token ids. `close` frees its memory."""

    name: str
    complete: Callable[[Sequence[int]], Completion]
    close: Callable[[], None] = field(default=lambda: None)
    recipes: tuple[Recipe, ...] = ()  # of the kernels that it runs on a GPU


def tokenizer_of(model: Path) -> Tokenizer:
    """The checkpoint's tokenizer: all engines are given the same ids."""
    tokenizer = Tokenizer.from_assets(open_checkpoint(model).text)
    if tokenizer is None:
        raise UsageError(
            f"{model} has no tokenizer.", "HumanEval is text: use a checkpoint with a tokenizer."
        )
    return tokenizer


def monotape_engine(
    model: Path, backend: str, dtype: str, context: int, max_tokens: int, *, speculation: bool = True
) -> Engine:
    """Monotape itself, through its public API."""
    llm = LLM(str(model), backend=backend, dtype=dtype, max_model_len=context, speculation=speculation)
    await_drafts(llm.backend)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop=STOPS)

    def complete(prompt: Sequence[int]) -> Completion:
        start = time.perf_counter()
        output = llm.generate({"prompt_token_ids": list(prompt)}, params)[0].outputs[0]
        seconds = time.perf_counter() - start
        end: End = "length" if output.finish_reason == "length" else "end of text"
        if isinstance(output.stop_reason, str):
            end = "stop string"
        return Completion(output.text, tuple(output.token_ids), seconds, end)

    name = f"monotape {llm.backend.name} {llm.backend.plan.format.value}" + ", no drafts" * (not speculation)
    kernels = (
        recipes_of(llm.backend, model.name, open_checkpoint(model).config)
        if llm.backend.name == "cuda"
        else []
    )
    return Engine(name, complete, llm.close, tuple(kernels))


def transformers_engine(
    model: Path, max_tokens: int, device: str, together: Sequence[Sequence[int]] = ()
) -> Engine:
    """The same weights in transformers: float32 on the CPU, bfloat16 on a GPU.

    Prompts given as `together` are rows of one batch, in float32. Each is said to have taken its share of the time.
    """
    from transformers_reference import TransformersModel

    checkpoint = open_checkpoint(model)
    tokenizer = tokenizer_of(model)
    ends = end_of_text_ids(spec_from_config(checkpoint.config), checkpoint.generation_config, tokenizer)
    dtype = "float32" if device == "cpu" or together else "bfloat16"
    reference = TransformersModel(checkpoint, device, dtype)

    def one(prompt: Sequence[int]) -> Completion:
        start = time.perf_counter()
        tokens, text, end = stopped(reference.greedy(prompt), tokenizer.decode, ends, max_tokens)
        return Completion(text, tokens, time.perf_counter() - start, end)

    @cache
    def batch() -> dict[tuple[int, ...], Completion]:
        start = time.perf_counter()

        def done(tokens: Sequence[int]) -> bool:
            text = tokenizer.decode(list(tokens))
            return tokens[-1] in ends or any(stop in text for stop in STOPS)

        rows = reference.greedy_together(together, done, max_tokens)
        share = (time.perf_counter() - start) / len(together)
        found = {}
        for prompt, row in zip(together, rows, strict=True):
            tokens, text, end = stopped(row, tokenizer.decode, ends, max_tokens)
            found[tuple(prompt)] = Completion(text, tokens, share, end)
        return found

    name = f"transformers {device} {'f32' if dtype == 'float32' else 'bf16'}" + ", together" * bool(together)
    return Engine(name, (lambda prompt: batch()[tuple(prompt)]) if together else one)


def stopped(
    tokens: Iterable[int], decode: Callable[[Sequence[int]], str], ends: frozenset[int], max_tokens: int
) -> tuple[tuple[int, ...], str, End]:
    """The stop rule, written out plainly: takes tokens until one of the three ends is reached."""
    taken: list[int] = []
    for token in tokens:
        taken.append(token)
        if token in ends:
            return tuple(taken), decode(taken[:-1]), "end of text"
        text = decode(taken)
        if found := [text.index(stop) for stop in STOPS if stop in text]:
            return tuple(taken), text[: min(found)], "stop string"
        if len(taken) == max_tokens:
            break
    return tuple(taken), decode(taken), "length"

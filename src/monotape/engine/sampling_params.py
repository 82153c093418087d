"""How a request wants its tokens chosen, with the names and the meaning that vLLM gives them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from monotape.backends.protocol import Sampling
from monotape.errors import RequestError, UsageError, did_you_mean

MAX_TOKENS = 2**31 - 1
MAX_COMPLETIONS = 128
MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
MAX_BIASES = 1024
SEED_BITS = 64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Immutable and checked: a value that cannot be served is refused here, by name and with its range."""

    n: int = 1  # completions; each but the first has the next seed
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    seed: int | None = None  # None: one is drawn, and reported in the output
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: to the end of the context
    min_tokens: int = 0
    logprobs: int | None = None  # the chosen token's, and those of this many of the most likely
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)

    def __new__(cls, *_positional: Any, **named: Any) -> SamplingParams:
        for name in named:
            if name not in cls.__dataclass_fields__:
                known = [item.name for item in dataclasses.fields(cls)]
                raise UsageError(
                    f"SamplingParams has no argument '{name}'.",
                    f"{did_you_mean(name, known)}It has: {', '.join(known)}.",
                )
        return object.__new__(cls)

    def __post_init__(self) -> None:
        self._check_numbers()
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise _refused(name, getattr(self, name), "true or false")
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refused("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        if self.stop and not self.detokenize:
            raise RequestError("stop needs text, but detokenize is off.", "Use stop_token_ids instead.")
        if self.n > 1 and self.temperature == 0:
            raise _refused("n", self.n, "1 when temperature is 0: greedy completions are all the same")

    def _check_numbers(self) -> None:
        _integer("n", self.n, 1, MAX_COMPLETIONS)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        if self.temperature != 0 or isinstance(self.temperature, bool):
            _number("temperature", self.temperature, 1e-6, 100, note="0 (greedy), or ")
        _number("top_p", self.top_p, 1e-6, 1)
        _integer("top_k", self.top_k, -1, MAX_TOKENS)
        _number("min_p", self.min_p, 0, 1)
        _integer("min_tokens", self.min_tokens, 0, MAX_TOKENS)
        for name, low, high in (
            ("seed", 0, 2**SEED_BITS - 1),
            ("max_tokens", 1, MAX_TOKENS),
            ("logprobs", 0, MAX_LOGPROBS),
            ("prompt_logprobs", 0, MAX_LOGPROBS),
        ):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), low, high)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        assert isinstance(self.stop, tuple)
        return self.stop

    def sampling(self, *, seed: int, vocab: int) -> Sampling:
        """The part of it that a backend computes with."""
        for token_id in (*(self.stop_token_ids or ()), *(self.logit_bias or ())):
            if token_id >= vocab:
                raise RequestError(
                    f"Token id {token_id} is not in the vocabulary, which has {vocab} tokens.",
                    "Check stop_token_ids and logit_bias.",
                )
        return Sampling(
            temperature=float(self.temperature),
            top_k=self.top_k if 0 < self.top_k < vocab else 0,
            top_p=float(self.top_p),
            min_p=float(self.min_p),
            repetition_penalty=float(self.repetition_penalty),
            presence_penalty=float(self.presence_penalty),
            frequency_penalty=float(self.frequency_penalty),
            logit_bias=tuple((self.logit_bias or {}).items()),
            seed=seed,
        )


def _refused(name: str, value: object, allowed: str) -> RequestError:
    try:  # as JSON writes it: most values come from a request or a flag
        shown = json.dumps(value) if isinstance(value, list | tuple | dict | bool) else repr(value)
    except (TypeError, ValueError):
        shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return RequestError(f"{name} is {shown}.", f"It must be {allowed}.")


def _integer(name: str, value: object, low: int, high: int, note: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _refused(name, value, f"{note}an integer from {low} to {high}")


def _number(name: str, value: object, low: float, high: float, note: str = "") -> None:
    finite = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not finite or not low <= value <= high:  # type: ignore[operator]
        raise _refused(name, value, f"{note}a number from {low:g} to {high:g}")


def _stop_strings(stop: object) -> tuple[str, ...]:
    given = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(given, Sequence) or not all(isinstance(item, str) for item in given):
        raise _refused("stop", stop, "a string or a list of strings")
    if len(given) > MAX_STOPS or not all(0 < len(item) <= MAX_STOP_LENGTH for item in given):
        raise _refused("stop", stop, f"at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters")
    return tuple(given)


def _token_ids(ids: object) -> tuple[int, ...]:
    given = () if ids is None else ids
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) > MAX_BIASES:
        raise _refused("stop_token_ids", ids, f"a list of at most {MAX_BIASES} token ids")
    for item in given:
        _integer("stop_token_ids", item, 0, MAX_TOKENS, note="a list; each entry ")
    return tuple(given)


def _biases(biases: object) -> dict[int, float] | None:
    if biases is None:
        return None
    if not isinstance(biases, Mapping) or len(biases) > MAX_BIASES:
        raise _refused("logit_bias", biases, f"a mapping from at most {MAX_BIASES} token ids to numbers")
    checked = {}
    for key, value in biases.items():
        token_id = _as_number(key)
        _integer("logit_bias", token_id, 0, MAX_TOKENS, note="a mapping; each key ")
        _number(f"logit_bias[{token_id}]", value, -100, 100)
        checked[token_id] = float(value)
    return checked


def _as_number(key: Any) -> Any:
    """A key as JSON has it. One with more digits than a token id is left as it is: of thousands Python makes none."""
    digits = isinstance(key, str) and len(key) <= len(str(MAX_TOKENS)) and key.isascii() and key.isdigit()
    return int(key) if digits else key

"""POST /v1/completions: text or token ids in, with echo, log-probabilities and fill-in-the-middle."""

from __future__ import annotations

import codecs
import contextlib
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

from monotape.backends.token_ids import TokenIds
from monotape.errors import RequestError
from monotape.server.api_error import ApiError, bad_request, from_engine_error
from monotape.server.apis.openai_frame import DONE, begin, failure, whole
from monotape.server.apis.progress import Reading
from monotape.server.apis.usage import finish_reason, openai_usage, token_bytes, token_text
from monotape.server.engine import wire
from monotape.server.http.endpoint import Stream
from monotape.server.http.replies import sse
from monotape.server.requests.openai import CompletionRequest
from monotape.server.requests.sampling import completions_of, sampling_params
from monotape.server.requests.structured import grammar_of
from monotape.server.service.clock import Clock, so_far
from monotape.server.service.gate import Turn
from monotape.server.service.service import Service, Work
from monotape.server.service.text_work import TextWork

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 256


@dataclass(frozen=True, slots=True)
class Prepared:
    """One prompt of a request."""

    work: Work
    echoed: str  # "" unless asked for


async def completions(service: Service, request: CompletionRequest, scope: Scope) -> dict[str, Any] | Stream:
    """Continues one prompt or several, given as text or token ids; echo, log-probabilities, suffix."""
    clock, head = begin(service, scope, request.model, "cmpl", "text_completion")
    with service.lining_up(clock) as turn:
        clock.answers = completions_of(request)
        prepared = await _prepare(service, request, clock)
    if request.stream:
        return Stream(_stream(service, request, prepared, head, turn), failure)
    async with turn:
        clock.entered()
        choices = [await _choice(service, request, *each) for each in _numbered(prepared, clock.answers)]
    return whole(head, choices, _usage(request, clock), clock)


def _numbered(prepared: list[Prepared], count: int) -> Iterator[tuple[Prepared, int, int]]:
    """Every completion: its prompt, which of the prompt's completions it is, and which of the request's."""
    for place, prompt in enumerate(prepared):
        for nth in range(count):
            yield prompt, nth, place * count + nth


def _usage(request: CompletionRequest, clock: Clock) -> dict[str, Any]:
    """Every prompt counts once, however many completions it has, and only tokens that the client gets."""
    firsts = clock.done[:: clock.answers]
    usage = openai_usage(clock.done)
    if request.max_tokens == 0:
        usage["completion_tokens"] = 0
    usage["prompt_tokens"] = sum(stats.prompt_tokens for stats in firsts)
    usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
    usage["prompt_tokens_details"] = {"cached_tokens": sum(stats.cached_tokens for stats in firsts)}
    return usage


async def _prepare(service: Service, request: CompletionRequest, clock: Clock) -> list[Prepared]:
    text, info = service.loaded()
    prompts = _prompts(request)
    asked = grammar_of(request)
    if asked is not None:
        await service.compile(asked.grammar, asked.param)
    if request.suffix and request.echo:
        raise bad_request("suffix and echo exclude each other.", "echo", "invalid_value")
    if request.suffix:
        prompts = [_with_hole(text, prompt, request.suffix) for prompt in prompts]
    scored = request.echo and request.logprobs is not None
    wanted = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    if wanted == 0 and not request.echo:
        raise bad_request(
            "max_tokens is 0. It must be at least 1 unless echo is true.", "max_tokens", "invalid_value"
        )
    decided = {"max_tokens": max(1, wanted), "logprobs": request.logprobs}
    if scored:
        decided["prompt_logprobs"] = request.logprobs
    params = sampling_params(request, service.engine.defaults, **decided)
    prepared = []
    for prompt in prompts:
        ids, echoed = await _tokens(text, prompt, request, info.context, clock)
        service.check(ids, params)
        grammar = None if asked is None else asked.grammar
        work = Work(ids, params, grammar, clock, progress=bool(request.stream))
        prepared.append(Prepared(work, echoed))
    return prepared


def _prompts(request: CompletionRequest) -> list[str | list[int]]:
    given: Any = request.prompt
    if isinstance(given, str):
        return [given]
    kinds = {type(item) for item in given}
    if len(kinds) > 1:
        raise bad_request("prompt mixes texts, token ids and lists of them.", "prompt", "invalid_value")
    prompts: list[str | list[int]] = [given] if kinds == {int} else given
    if len(prompts) > MAX_PROMPTS:
        raise bad_request(f"There are {len(prompts)} prompts; at most {MAX_PROMPTS} are allowed.", "prompt")
    return prompts


def _with_hole(text: TextWork, prompt: str | list[int], suffix: str) -> str:
    if not isinstance(prompt, str):
        raise bad_request("suffix needs a prompt that is text.", "suffix", "invalid_value")
    marked = text.fill_in(prompt, suffix)
    if marked is None:
        raise ApiError(
            400, "suffix is not supported: this model's tokenizer has no fill-in-the-middle tokens.",
            code="unsupported_parameter", param="suffix",
        )  # fmt: skip
    return marked


async def _tokens(
    text: TextWork, prompt: str | list[int], request: CompletionRequest, context: int, clock: Clock
) -> tuple[TokenIds, str]:
    if isinstance(prompt, str):
        try:
            special = request.add_special_tokens is not False
            ids, took = await text.encode(prompt, add_special=special, context=context)
        except RequestError as error:
            raise from_engine_error(error) from None
        clock.tokenize_ns += took
        return ids, prompt if request.echo else ""
    echoed = await text.decode(prompt) if request.echo and text.tokenizer is not None else ""
    return TokenIds.of(prompt), echoed


async def _choice(
    service: Service, request: CompletionRequest, prepared: Prepared, nth: int, index: int
) -> dict[str, Any]:
    parts, chosen = [prepared.echoed], []
    async with service.complete(prepared.work, nth) as messages:
        async for message in messages:
            parts.append(message.text)
            if isinstance(message, wire.Done):
                done = message
            else:
                chosen += message.chosen or []
    if request.max_tokens == 0:
        parts, chosen = parts[:1], []
    scores = done.prompt_scores or []
    places = _Places(_begin(service, prepared) if scores else 0)
    return {
        "index": index,
        "text": "".join(parts),
        "logprobs": _logprobs(service, [*scores, *chosen], prepared, places)
        if request.logprobs is not None
        else None,
        "finish_reason": "length" if request.max_tokens == 0 else finish_reason(done),
        "stop_reason": done.stop_reason,
    }


class _Places:
    """Where the tokens of a text stand in it, in characters, one after another; `begin` is the first one's.

    They are counted by the tokens, because text may be held back: a character's until its last token has come, and
    what may become a stop string. A token that is a part of a character stands where the character does.
    """

    def __init__(self, begin: int) -> None:
        self._next, self._characters = begin, codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, token: bytes) -> int:
        place = max(0, self._next)
        self._next += len(self._characters.decode(token))
        return place


def _logprobs(
    service: Service, chosen: list[wire.Chosen | None], prepared: Prepared, places: _Places
) -> dict[str, Any]:
    """Completions' log-probabilities: four lists. The first token of an echoed prompt has none."""
    shown: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in chosen:
        token_id = prepared.work.prompt[0] if token is None else token.id
        shown["tokens"].append(token_text(service, token_id))
        shown["token_logprobs"].append(None if token is None else token.logprob)
        shown["top_logprobs"].append(None if token is None else _likely(service, token))
        shown["text_offset"].append(places.of(token_bytes(service, token_id)))
    return shown


def _likely(service: Service, token: wire.Chosen) -> dict[str, float]:
    """The most likely tokens, best first; of those that read alike, as parts of characters do, the best one."""
    shown: dict[str, float] = {}
    for other, value in token.top:
        shown.setdefault(token_text(service, other), value)
    return shown


def _begin(service: Service, prepared: Prepared) -> int:
    """The place of a scored prompt's first token: before the text, where that does not show the token."""
    data = b"".join(token_bytes(service, int(token_id)) for token_id in prepared.work.prompt)
    return len(prepared.echoed) - len(data.decode("utf-8", "replace"))


async def _stream(
    service: Service, request: CompletionRequest, prepared: list[Prepared], head: dict[str, Any], turn: Turn
) -> AsyncGenerator[bytes, None]:
    clock = prepared[0].work.clock
    async with turn:
        clock.entered()
        for each in _numbered(prepared, clock.answers):
            async with contextlib.aclosing(_chunks(service, request, *each, head)) as chunks:
                async for chunk in chunks:
                    yield chunk
    if request.stream_options and request.stream_options.include_usage:
        figures = {"metrics": clock.metrics(), "timings": clock.timings()}
        yield sse({**head, "choices": [], "usage": _usage(request, clock), **figures})
    yield DONE


async def _chunks(
    service: Service,
    request: CompletionRequest,
    prepared: Prepared,
    nth: int,
    index: int,
    head: dict[str, Any],
) -> AsyncGenerator[bytes, None]:
    tokens, places = 0, _Places(len(prepared.echoed))
    clock = prepared.work.clock
    options = request.stream_options
    continuous = bool(options and options.continuous_usage_stats)
    reading = Reading(prepared.work, head if request.return_progress else None)

    def chunk(text: str, chosen: list[wire.Chosen | None], at: _Places = places, **more: Any) -> bytes:
        logprobs = None
        if request.logprobs is not None and chosen:
            logprobs = _logprobs(service, chosen, prepared, at)
        if continuous:
            prompt = len(prepared.work.prompt)
            more["usage"] = {
                "prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens
            }  # fmt: skip
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
        return sse({**head, "choices": [{**choice, **more.pop("choice", {})}], **more})

    if prepared.echoed:
        yield chunk(prepared.echoed, [])
    async with service.complete(prepared.work, nth) as messages:
        async for message in messages:
            silent = request.max_tokens == 0
            if isinstance(message, wire.Done):
                reason = "length" if silent else finish_reason(message)
                last = {"finish_reason": reason, "stop_reason": message.stop_reason}
                scores = message.prompt_scores or []
                yield chunk(
                    "" if silent else message.text,
                    scores,
                    _Places(_begin(service, prepared)) if scores else places,  # the prompt was echoed first
                    choice=last,
                    metrics=clock.metrics(),
                    timings=clock.timings(),
                )
                return
            if told := reading.told(message):
                yield told
            tokens += 0 if silent else len(message.token_ids)
            if (message.text or message.chosen) and not silent:
                more: dict[str, Any] = {}
                if request.timings_per_token:
                    more["timings"] = so_far(tokens, message.decode_ns)
                yield chunk(message.text, list(message.chosen or []), **more)

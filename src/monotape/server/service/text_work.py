"""Renders templates in a process and tokenises in threads, so that the event loop waits for neither."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from monotape.backends.token_ids import TokenIds
from monotape.engine.chat_template import ChatTemplate, Rendering, cut
from monotape.engine.drafts import check_length
from monotape.engine.incremental import IncrementalEncoder
from monotape.engine.tokenizer import Tokenizer
from monotape.errors import ContextOverflow, RequestError
from monotape.server.engine.model_source import Text
from monotape.server.service.template_channel import TemplateChannel

T = TypeVar("T")
_THREADS = 4
_AT_ONCE = 2000  # characters that are cut into tokens in less time than two threads need to meet twice

#: How models mark the parts of a text with a hole: before, after, where to write, and which of the two comes first.
FILL_IN_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "prefix first"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "prefix first"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>", "prefix first"),
    ("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>", "prefix first"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>", "prefix first"),
    ("[PREFIX]", "[SUFFIX]", "", "suffix first"),
)


@dataclass(frozen=True, slots=True)
class Written:
    """The prompt of a chat, and how long its text and its tokens took."""

    text: str
    ids: TokenIds
    render_ns: int
    tokenize_ns: int


class TextWork:
    """The model's tokenizer and template."""

    def __init__(self, text: Text) -> None:
        self.tokenizer, self.template = text.tokenizer, text.template
        named = {} if text.tokenizer is None else text.tokenizer.named_tokens
        self._chat = ChatTemplate(text.template, named)
        self._channel = TemplateChannel()
        self._channel.start()
        self._pool = ThreadPoolExecutor(_THREADS, "text")
        self._encoder = None if text.tokenizer is None else IncrementalEncoder(text.tokenizer)
        self.own_template = not text.given  # a template that a user gave is followed to the letter
        self._longest = 1 if text.tokenizer is None else _longest_token(text.tokenizer)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._channel.close()

    async def elsewhere(self, work: Callable[[], T]) -> tuple[T, int]:
        """The result of the work, done in a thread, and the nanoseconds it took."""
        began = time.monotonic_ns()
        result = await asyncio.get_running_loop().run_in_executor(self._pool, work)
        return result, time.monotonic_ns() - began

    async def write(
        self,
        messages: Sequence[Mapping[str, Any]],
        rendering: Rendering,
        *,
        ended: Callable[[str], str],
        context: int,
    ) -> Written:
        """The prompt of a chat: rendered, changed by `ended`, and cut into tokens."""
        began = time.monotonic_ns()
        source, context_of = self._chat.question(messages, rendering)
        text = ended(cut(await self._channel.render(source, context_of), rendering))
        rendered = time.monotonic_ns()
        encoder = self._required_encoder()
        self._check_length(len(text), context)
        if len(text) - encoder.known(text) <= _AT_ONCE:
            ids = encoder.encode(text)
        else:
            ids, _ = await self.elsewhere(partial(encoder.encode, text))
        return Written(text, ids, rendered - began, time.monotonic_ns() - rendered)

    async def encode(self, text: str, *, add_special: bool, context: int) -> tuple[TokenIds, int]:
        """The ids. A text that cannot fit the context in any way is refused before it is cut into tokens."""
        encoder = self._required_encoder()
        self._check_length(len(text), context)
        return await self.elsewhere(partial(encoder.encode, text, add_special=add_special))

    def _check_length(self, characters: int, context: int) -> None:
        least = characters // self._longest
        if least > context:
            raise ContextOverflow(
                f"This model's maximum context length is {context} tokens. However, your prompt contains at least "
                f"{least} input tokens.",
                "Shorten the prompt.",
                prompt_tokens=least,
                context=context,
                exact=False,
            )

    async def encode_spans(self, spans: Sequence[tuple[str, bool]], *, context: int) -> tuple[TokenIds, int]:
        """The ids of a prompt in which only marks, those with True, are special tokens."""
        encoder = self._required_encoder()
        self._check_length(sum(len(text) for text, _ in spans), context)
        return await self.elsewhere(partial(encoder.encode_spans, spans))

    async def predicted(self, text: str, *, context: int) -> tuple[TokenIds, int]:
        """The ids of a text that an answer may repeat, in which nothing is a special token."""
        encoder = self._required_encoder()
        check_length(len(text) // self._longest, context, exact=False)
        ids, took = await self.elsewhere(partial(encoder.encode_spans, [(text, False)]))
        check_length(len(ids), context)
        return ids, took

    async def decode(self, ids: Sequence[int]) -> str:
        tokenizer = self._required()
        return (await self.elsewhere(lambda: tokenizer.decode(ids, skip_special=False)))[0]

    def fill_in(self, prefix: str, suffix: str) -> str | None:
        """The prompt that asks for what stands between two texts; None when the tokenizer has no marks for that."""
        tokenizer = self._required()
        for before, after, middle, order in FILL_IN_MARKS:
            if all(tokenizer.id_of(mark) is not None for mark in (before, after, middle) if mark):
                if order == "suffix first":
                    return f"{after}{suffix}{before}{prefix}"
                return f"{before}{prefix}{after}{suffix}{middle}"
        return None

    def _required(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                "This checkpoint has no tokenizer, so it cannot read text.",
                "Give the prompt of /v1/completions as token ids.",
            )
        return self.tokenizer

    def _required_encoder(self) -> IncrementalEncoder:
        self._required()
        assert self._encoder is not None
        return self._encoder


def _longest_token(tokenizer: Tokenizer) -> int:
    return max((len(tokenizer.pieces.bytes_of(token_id)) for token_id in range(tokenizer.size)), default=1)

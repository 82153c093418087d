"""A conversation as the prompt that a model was trained to continue: written by its template, or in harmony."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from monotape.engine.chat_template import (
    ChatTemplate,
    Message,
    Rendering,
    check_ends,
    checked_tools,
    text_message,
)
from monotape.engine.harmony.marks import speaks_harmony
from monotape.engine.harmony.parser import Channels
from monotape.engine.harmony.prompt import Options, Span, opened_text, opening, spans, with_variables
from monotape.engine.incremental import IncrementalEncoder
from monotape.engine.prompts import Prompt, checked_ids, without_tokenizer
from monotape.errors import RequestError


class ChatPrompts:
    """The prompts of one model. `own_template`: the template is the model's, and was not given by the user."""

    def __init__(
        self, template: ChatTemplate, encoder: IncrementalEncoder | None, vocab: int, *, own_template: bool
    ) -> None:
        self._template, self._encoder, self._vocab = template, encoder, vocab
        self._tokenizer = None if encoder is None else encoder.tokenizer
        self._own_template = own_template

    @property
    def can_chat(self) -> bool:
        return self._template.source is not None or speaks_harmony(self._tokenizer, None)

    def text(self, messages: Sequence[Message], rendering: Rendering) -> str:
        """The prompt."""
        if self._is_native(rendering):
            return "".join(span.text for span in _spans(messages, rendering))
        return self._template.render(messages, rendering)

    def prompt(self, messages: Sequence[Message], rendering: Rendering) -> Prompt:
        """The prompt in tokens, and how answers to it are read."""
        channels = self._channels(rendering)
        if not self._is_native(rendering):
            # The template writes BOS itself where the model wants one.
            text = self._template.render(messages, rendering)
            ids = self._required_encoder().encode(text)
        else:
            made = _spans(messages, rendering)
            text = "".join(span.text for span in made)
            ids = self._required_encoder().encode_spans([(span.text, span.mark) for span in made])
        return Prompt(text, checked_ids(ids, self._vocab), channels)

    def _required_encoder(self) -> IncrementalEncoder:
        """Earlier turns of a conversation are not tokenised again."""
        if self._encoder is None:
            raise without_tokenizer()
        return self._encoder

    def _speaks_harmony(self, rendering: Rendering) -> bool:
        return speaks_harmony(self._tokenizer, rendering.chat_template or self._template.source)

    def _is_native(self, rendering: Rendering) -> bool:
        """Whether the prompt is written here. A template that a user gave is followed to the letter."""
        given = rendering.chat_template is not None or not self._own_template
        return not given and self._speaks_harmony(rendering)

    def _channels(self, rendering: Rendering) -> Channels | None:
        if not self._speaks_harmony(rendering):
            return None
        opened = opening("final") if rendering.continue_final_message else ()
        names = frozenset(function["name"] for function in _functions(rendering.tools))
        return Channels(opened_text(opened), names)


def _spans(messages: Sequence[Message], rendering: Rendering) -> list[Span]:
    """The prompt in harmony, where no template is given."""
    check_ends(messages, rendering)
    checked = [text_message(message, index) for index, message in enumerate(messages)]
    options = Options(prompted=rendering.add_generation_prompt, continued=rendering.continue_final_message)
    variables = rendering.chat_template_kwargs or {}
    return spans(checked, _functions(rendering.tools), with_variables(options, variables))


def _functions(tools: object) -> list[Mapping[str, Any]]:
    """The functions of OpenAI's tool descriptions."""
    functions = [tool.get("function", tool) for tool in checked_tools(tools) or ()]
    for function in functions:
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError("A tool is not a function with a name.", "See OpenAI's chat format.")
    return functions

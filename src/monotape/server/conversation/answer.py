"""How the answers to a request are read: where thoughts stand in them, and how calls are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from monotape.engine.answer import THINK, Answer, Parser, ReasoningSplitter
from monotape.engine.harmony.parser import Channels
from monotape.server.conversation.tool_formats import HARMONY, ToolFormat
from monotape.server.conversation.tool_parser import ToolParser
from monotape.server.conversation.xml_calls import XmlCallParser


def thinks(parser: str, template: str | None) -> bool:
    """Whether the model writes its thoughts between marks."""
    return parser not in ("auto", "none") or (parser == "auto" and THINK in (template or ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStyle:
    """How the answers to one prompt are read."""

    reasoning: bool
    open_in_prompt: bool  # the prompt has opened the thoughts
    calls: ToolFormat | None  # None: they are not looked for
    several: bool  # calls in one answer
    schemas: Mapping[str, Any]  # of the parameters of the functions that were offered
    channels: str | None = None  # harmony's: what the prompt has of the answer's first message

    def new_answer(self) -> Answer:
        if self.channels is not None:
            offered = frozenset(self.schemas if self.calls is not None else ())
            return Channels(self.channels, offered, self.several, self.reasoning).new_answer()
        splitter = ReasoningSplitter(open_in_prompt=self.open_in_prompt) if self.reasoning else None
        return Answer(splitter, self._parser())

    def _parser(self) -> Parser | None:
        if self.calls is None or self.calls is HARMONY:
            return None
        if self.calls.xml:
            return XmlCallParser(self.schemas, several=self.several)
        return ToolParser(self.calls, offered=self.schemas, several=self.several)

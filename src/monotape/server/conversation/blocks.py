"""An answer as a row of blocks (thoughts, text, calls), each opened, filled and closed, as newer interfaces have it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from monotape.engine.answer import CallArguments, CallBegins, Event

Kind = Literal["reasoning", "content", "call"]


@dataclass(slots=True)
class Block:
    """One block, complete or as far as it has come."""

    index: int
    kind: Kind
    text: str = ""  # of a call: its arguments
    id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """What happens to a block; `text` is what a delta adds."""

    what: Literal["open", "delta", "close"]
    block: Block
    text: str = ""


class Blocks:
    """Turns events into steps. White space alone opens no block."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None
        self._space = ""  # before the next text, if there is one

    def feed(self, events: list[Event]) -> list[Step]:
        steps: list[Step] = []
        for event in events:
            if isinstance(event, CallBegins):
                self._close(steps)
                self._begin(steps, Block(len(self.all), "call", id=event.id, name=event.name))
                self._space = ""
            elif isinstance(event, CallArguments) or (
                self._open is not None and self._open.kind == event.kind
            ):
                self._add(steps, event.text)
            elif event.text.strip():
                self._close(steps)
                self._begin(
                    steps, Block(len(self.all), "reasoning" if event.kind == "reasoning" else "content")
                )
                self._add(steps, self._space + event.text)
                self._space = ""
            else:
                self._space += event.text
        return steps

    def end(self) -> list[Step]:
        steps: list[Step] = []
        self._close(steps)
        return steps

    def _begin(self, steps: list[Step], block: Block) -> None:
        self._open = block
        self.all.append(block)
        steps.append(Step("open", block))

    def _add(self, steps: list[Step], text: str) -> None:
        assert self._open is not None
        self._open.text += text
        steps.append(Step("delta", self._open, text))

    def _close(self, steps: list[Step]) -> None:
        if self._open is not None:
            steps.append(Step("close", self._open))
            self._open = None

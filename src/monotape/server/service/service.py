"""What all interfaces share: the model's names and text, the queue, the engine, and one completion through them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import AsyncGenerator, Iterator, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from monotape.backends.token_ids import TokenIds
from monotape.engine.prompts import Prompt
from monotape.engine.request import room_for
from monotape.engine.sampling_params import SamplingParams
from monotape.errors import RequestError
from monotape.server.api_error import ApiError, bad_request, from_engine_error
from monotape.server.config import ServerConfig
from monotape.server.engine import wire
from monotape.server.engine.client import Engine, EngineFault
from monotape.server.engine.info import ModelInfo
from monotape.server.grammar.definition import Grammar
from monotape.server.service.clock import Clock
from monotape.server.service.gate import Gate, QueueFull, Turn
from monotape.server.service.metrics import Metrics
from monotape.server.service.text_work import TextWork
from monotape.weights.paths import local_path

RESTART_WAIT_S = (
    120.0  # how long requests that were waiting already wait for an engine that is being restarted
)


@dataclass(slots=True)
class Work:
    """One prompt, ready to run."""

    prompt: TokenIds
    params: SamplingParams
    grammar: Grammar | None = None
    clock: Clock = field(default_factory=Clock)
    special_mark: str = ""  # before the text of each special token of an answer
    progress: bool = False  # whether pieces say how much of the prompt has been read, before any token
    prediction: TokenIds | None = None  # a text that the answer may repeat


class Service:
    """The server without HTTP."""

    def __init__(
        self, config: ServerConfig, names: tuple[str, ...], engine: Engine, metrics: Metrics
    ) -> None:
        self.config, self.names, self.engine, self.metrics = config, names, engine, metrics
        self.gate = Gate(config.max_queue)
        self.text: TextWork | None = None
        self.closing = asyncio.Event()  # answers that are not complete end now, with an error
        self.created = int(time.time())

    @property
    def healthy(self) -> bool:
        return self.engine.ready.is_set() and self.text is not None

    def require_ready(self) -> tuple[TextWork, ModelInfo]:
        """The parts that every request needs; 503 while they are not there."""
        if self.engine.failure is not None:  # the log says why; it may name paths of this machine
            raise ApiError(503, "The model cannot be served; the server is ending.", code="engine_failed")
        if self.text is None or self.engine.info is None or not self.engine.ready.is_set():
            what = "is being restarted" if self.engine.restarts else "is loading"
            left_s = max(1, math.ceil((self.engine.retry_at or 0.0) - time.monotonic()))
            when = "in a moment" if left_s == 1 else f"in {left_s} s"
            raise ApiError(
                503, f"The engine {what}. Try again {when}.", code="engine_unavailable",
                headers={"retry-after": str(left_s)},
            )  # fmt: skip
        return self.text, self.engine.info

    def loaded(self) -> tuple[TextWork, ModelInfo]:
        """The parts that were there when a request was let in, even if the engine has died since: it waits then."""
        if self.text is None or self.engine.info is None:
            self.require_ready()
        assert self.text is not None and self.engine.info is not None
        return self.text, self.engine.info

    def check_model(self, name: str | None) -> str:
        """The name to answer with; 404 for a model that is not served here."""
        if name is not None and name not in self.names and not self.config.any_model_name:
            raise ApiError(
                404, f"The model '{name[:200]}' does not exist. Served: {', '.join(self.names)}. Start the server with "
                "--served-model-name to add names, or with --any-model-name to take every one.",
                code="model_not_found", param="model",
            )  # fmt: skip
        return name or self.names[0]

    def check_ids(self, ids: TokenIds, param: str) -> None:
        """An error for a token that the model does not have."""
        _, info = self.loaded()
        if len(ids) and ids.array.max() >= info.vocab:
            unknown = ids.array[ids.array >= info.vocab]
            raise ApiError(
                400, f"Token id {unknown[0]} is not in the vocabulary, which has {info.vocab} tokens.",
                code="invalid_value", param=param,
            )  # fmt: skip

    def check(self, prompt: TokenIds, params: SamplingParams) -> None:
        """An error when the engine would refuse the prompt or the params, so that no answer has begun by then."""
        _, info = self.loaded()
        self.check_ids(prompt, "prompt")
        if not len(prompt):
            raise ApiError(400, "The prompt is empty. It must have at least one token.", param="prompt")
        try:
            params.sampling(seed=0, vocab=info.vocab)
            room_for(Prompt(None, prompt), params, info.context, info.model_context)
        except RequestError as error:
            raise from_engine_error(error) from None

    def receive(self, state: MutableMapping[str, Any], model: str | None) -> tuple[Clock, str]:
        """Lets a request in: its clock, kept where the log finds it, and the name to answer with.

        429 when the queue is full, before anything else is checked.
        """
        clock: Clock = state.setdefault("clock", Clock())
        self.require_ready()
        with self._refusing():
            self.gate.check()
        return clock, self.check_model(model)

    @contextlib.contextmanager
    def lining_up(self, clock: Clock) -> Iterator[Turn]:
        """Lines up a request that is prepared inside the block; 429 when the queue is full. It takes its place first:
        rendering, tokenising and compiling for requests without a place would slow down those that have one.

        The endpoint gives the place back when the request has ended (Clock.leave).
        """
        self.require_ready()
        with self._refusing():
            clock.turn = turn = self.gate.admit()
        yield turn
        clock.reserved()
        turn.line_up()

    async def compile(self, grammar: Grammar, param: str) -> None:
        """Has a grammar compiled that the field `param` asks for: one that cannot be used is refused before the
        answer begins.
        """
        try:
            await self.engine.compile(grammar)
        except EngineFault as error:
            if error.kind != "request":
                raise
            raise bad_request(error.message, param, "invalid_value") from None

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except QueueFull as error:
            self.metrics.refused.inc()
            requests = "1 request" if error.taken == 1 else f"{error.taken} requests"
            raise ApiError(
                429,
                f"The server is busy: it has {requests} already and runs one at a time. Try again later.",
                code="rate_limit_exceeded",
                headers={"retry-after": str(error.retry_after_s)},
            ) from None

    def complete(
        self, work: Work, index: int = 0
    ) -> contextlib.aclosing[AsyncGenerator[wire.Piece | wire.Done, None]]:
        """Runs one completion, which of its request's is `index`; the caller's turn has come. Leaving the block early
        cancels it.
        """
        return contextlib.aclosing(self._complete(work, index))

    async def _complete(self, work: Work, index: int) -> AsyncGenerator[wire.Piece | wire.Done, None]:
        clock = work.clock
        if not self.engine.ready.is_set() and self.engine.failure is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.engine.ready.wait(), RESTART_WAIT_S)
        run = self.engine.generate(
            work.prompt,
            work.params,
            index,
            work.grammar,
            self.config.stream_interval,
            work.progress,
            work.special_mark,
            work.prediction,
        )
        counted = False
        try:
            async for message in run:
                if isinstance(message, wire.Started):
                    self._started(message, clock)
                    continue
                if isinstance(message, wire.Done):
                    counted = True
                    clock.done.append(message.stats)
                    self.metrics.completed(message.stats, message.finish_reason)
                yield message
        finally:
            try:
                await _to_the_end(run.close())
            finally:
                if run.done is not None and not counted:  # its client has left
                    clock.done.append(run.done.stats)
                    self.metrics.computed(run.done.stats)

    def _started(self, message: wire.Started, clock: Clock) -> None:
        clock.started(message.time_ns)
        if message.miss is not None:
            clock.miss = message.miss
            self.metrics.missed(message.miss, changed=message.changed is not None)
        if message.changed is not None:
            clock.changed = message.changed
            self.metrics.changed(*message.changed)


async def _to_the_end(work: Any) -> None:
    """Awaits even while being cancelled: the next request must find the engine idle."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError


def served_names(model: str, given: tuple[str, ...]) -> tuple[str, ...]:
    """What clients may call the model: never a path of this machine, and always one name without a slash."""
    names = list(given)
    if not names:
        here = local_path(model)  # perhaps ".", which has no name of its own
        path = Path(model if here is None else os.path.abspath(here))
        is_path = here is not None or path.suffix == ".gguf"
        names = [path.name.removesuffix(".gguf")] if is_path else [model]
    names += [name.rpartition("/")[2] for name in names if "/" in name]
    return tuple(dict.fromkeys(names))

"""The server's end of the engine process: starts it, talks to it, sees when it hangs or dies, starts it again."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from monotape.backends.token_ids import TokenIds
from monotape.engine.config import EngineConfig
from monotape.engine.sampling_params import SamplingParams
from monotape.engine.spawn import spawn
from monotape.server.engine import wire
from monotape.server.engine.info import ModelInfo, PhaseTime
from monotape.server.engine.prefill_log import PrefillLog
from monotape.server.engine.restarts import Restarts, died_of
from monotape.server.frames import HEADER, frame
from monotape.server.grammar.definition import Grammar

LOG = logging.getLogger("monotape.server")
BEAT_TIMEOUT_S = 10.0  # a process that says nothing for so long hangs
PROMPT_TOKEN_S = 0.05  # what a prompt's tokens add to the time without a new token that counts as a hang


class EngineFault(Exception):
    """The engine could not finish a completion. `kind` is "request", "model", "memory", "internal" or "engine"."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind, self.message = kind, message


class Run:
    """One completion under way. Iterating gives its messages; closing it early cancels it."""

    def __init__(
        self, run_id: int, prompt_tokens: int, limit_s: float, send: Callable[[wire.ToEngine], None]
    ) -> None:
        self.id, self._prompt_tokens, self._send = run_id, prompt_tokens, send
        self._prefill: PrefillLog | None = None  # while its prompt is being read
        self._messages: asyncio.Queue[wire.Started | wire.Piece | wire.Done | EngineFault] = asyncio.Queue()
        self._ended = asyncio.Event()
        self.limit_s = limit_s
        self.done: wire.Done | None = None

    def put(self, message: wire.Started | wire.Piece | wire.Done | EngineFault) -> None:
        self._messages.put_nowait(message)
        if isinstance(message, wire.Started):
            self._prefill = PrefillLog(self._prompt_tokens, message.cached, time.monotonic())
        elif not isinstance(message, wire.Piece) or message.read is None:  # the prompt has been read
            self._prefill = None
        if isinstance(message, wire.Done):
            self.done = message
        if isinstance(message, wire.Done | EngineFault):
            self._ended.set()

    def beat(self, filled: int) -> None:
        """The engine is alive; `filled` tokens of the prompt have been read."""
        if self._prefill is not None:
            self._prefill.look(time.monotonic(), filled)

    async def __aiter__(self) -> AsyncIterator[wire.Started | wire.Piece | wire.Done]:
        while True:
            message = await self._messages.get()
            if isinstance(message, EngineFault):
                raise message
            yield message
            if isinstance(message, wire.Done):
                return

    async def close(self) -> None:
        """Cancels what still runs and waits until the engine is idle."""
        if not self._ended.is_set():
            self._send(wire.Cancel(self.id))
            await self._ended.wait()


class Engine:
    """The engine process, whichever it is at the moment."""

    def __init__(
        self,
        config: EngineConfig,
        source: str,
        timeout_s: float,
        on_phase: Callable[[PhaseTime], None],
        grammar_timeout_s: float = 3.0,
    ) -> None:
        self._config, self._source, self._timeout_s, self._on_phase = config, source, timeout_s, on_phase
        self._grammar_timeout_s = grammar_timeout_s
        self.info: ModelInfo | None = None
        self.defaults: dict[str, Any] = {}
        self.startup: list[PhaseTime] = []
        self.ready = asyncio.Event()
        self.failure: str | None = None  # why it will not be started again
        self.failed = asyncio.Event()
        self.retry_at: float | None = (
            None  # when it will be, on the monotonic clock, after a start that failed
        )
        self.restarts = 0
        self._cause: wire.LoadFailed | None = None  # what the last process said about its end
        self._run: Run | None = None
        self._compiling: dict[int, asyncio.Future[None]] = {}
        self._ids = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self._last_beat = self._last_step = 0.0
        self._progress = 0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def busy(self) -> bool:
        return self._run is not None

    def start(self) -> None:
        self._task = asyncio.create_task(self._supervise(), name="engine")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await asyncio.to_thread(self._end_process)

    def generate(
        self,
        prompt: TokenIds,
        params: SamplingParams,
        index: int = 0,
        grammar: Grammar | None = None,
        interval: int | None = None,
        progress: bool = False,
        special_mark: str = "",
        prediction: TokenIds | None = None,
    ) -> Run:
        """Starts a completion; only one at a time."""
        assert self._run is None, "the gate lets one through"
        if not self.ready.is_set():
            raise EngineFault("engine", self.failure or "The engine is starting.")
        self._ids += 1
        self._run = run = Run(
            self._ids, len(prompt), self._timeout_s + PROMPT_TOKEN_S * len(prompt), self._send
        )
        self._last_step = time.monotonic()
        predicted = b"" if prediction is None else prediction.to_bytes()
        self._send(
            wire.Generate(
                run.id, prompt.to_bytes(), params, index, grammar, interval, special_mark, progress, predicted
            )
        )
        return run

    async def compile(self, grammar: Grammar) -> None:
        """Has a grammar compiled while a completion runs; an EngineFault says why not. Cancelling stops it."""
        if not self.ready.is_set():
            raise EngineFault("engine", self.failure or "The engine is starting.")
        self._ids += 1
        job_id = self._ids
        self._compiling[job_id] = compiled = asyncio.get_running_loop().create_future()
        self._send(wire.Compile(job_id, grammar))
        try:
            await compiled
        finally:
            del self._compiling[job_id]
            if compiled.cancelled():
                self._send(wire.Forget(job_id))

    def _send(self, message: wire.ToEngine) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(message))

    def fail(self, reason: str) -> None:
        """Gives up for good."""
        self.failure = self.failure or reason
        self.failed.set()

    async def _supervise(self) -> None:
        restarts = Restarts()
        while True:
            self._cause = None
            was_ready = await self._live()
            self._end_all(
                EngineFault("engine", "The engine process ended unexpectedly; it is being restarted.")
            )
            exit_code = None if self._process is None else self._process.returncode
            pause = restarts.after(was_ready, self._cause, exit_code)
            if isinstance(pause, str):
                self.fail(pause)  # the server ends with this sentence
                return
            self.restarts += 1
            why = died_of(exit_code) if self._cause is None else self._cause.message
            LOG.warning(
                "The engine process ended (%s); starting it again in %.0f s (restart %d).",
                why, pause, self.restarts,
            )  # fmt: skip
            self.retry_at = time.monotonic() + pause
            await asyncio.sleep(pause)

    def _end_all(self, fault: EngineFault) -> None:
        """Whatever the process was asked for will not come."""
        self._end_run(fault)
        for compiled in self._compiling.values():
            if not compiled.done():
                compiled.set_exception(fault)

    async def _live(self) -> bool:
        """One process from its start to its end. True: it had become ready."""
        here, there = socket.socketpair()
        spawned = time.monotonic_ns()
        with there:
            self._process = spawn(
                "monotape.server.engine.process", str(there.fileno()),
                pass_fds=[there.fileno()], stdin=subprocess.DEVNULL,
            )  # fmt: skip
        reader, self._writer = await asyncio.open_connection(sock=here, limit=1 << 26)
        configuration = {
            "source": self._source,
            "engine": dataclasses.asdict(self._config),
            "spawned_ns": spawned,
            "grammar_timeout": self._grammar_timeout_s,
        }
        self._writer.write(json.dumps(configuration).encode() + b"\n")
        self.startup = []
        watch = asyncio.create_task(self._watch(), name="engine watchdog")
        try:
            await self._read(reader)
        finally:
            was_ready = self.ready.is_set()
            self.ready.clear()
            watch.cancel()
            self._writer.close()
            self._writer = None
            await asyncio.to_thread(self._end_process)
        return was_ready

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                size = HEADER.unpack(await reader.readexactly(HEADER.size))[0]
                self._take(wire.from_engine.decode(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, OSError):
            return

    def _take(self, message: wire.FromEngine) -> None:
        self._last_beat = now = time.monotonic()
        if isinstance(message, wire.Piece | wire.Started):
            self._last_step = now
            if self._run is not None and self._run.id == message.id:
                self._run.put(message)
        elif isinstance(message, wire.Done | wire.Fault):
            if self._run is not None and self._run.id == message.id:
                is_fault = isinstance(message, wire.Fault)
                self._end_run(EngineFault(message.kind, message.message) if is_fault else message)  # type: ignore[union-attr, arg-type]
        elif isinstance(message, wire.Compiled):
            self._compiled(message)
        elif isinstance(message, wire.Beat):
            if message.progress != self._progress:  # tokens that are held back are progress too
                self._progress, self._last_step = message.progress, now
            if self._run is not None and self._run.id == message.running:
                self._run.beat(message.filled)
        elif isinstance(message, wire.Phase):
            self.startup.append(message.phase)
            self._on_phase(message.phase)
        elif isinstance(message, wire.Ready):
            self.info, self.defaults = message.info, message.defaults
            self.retry_at = None
            self.ready.set()
        elif isinstance(message, wire.LoadFailed):
            self._cause = message

    def _compiled(self, message: wire.Compiled) -> None:
        compiled = self._compiling.get(message.id)
        if compiled is None or compiled.done():
            return
        if message.kind is None:
            compiled.set_result(None)
        else:
            compiled.set_exception(EngineFault(message.kind, message.message))

    def _end_run(self, message: wire.Done | EngineFault) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.put(message)

    async def _watch(self) -> None:
        """Kills a process that hangs; that it ended is then seen where its messages are read."""
        while True:
            await asyncio.sleep(wire.BEAT_S)
            now = time.monotonic()
            silent = self.ready.is_set() and now - self._last_beat > BEAT_TIMEOUT_S
            stuck = self._run is not None and now - self._last_step > self._run.limit_s
            if (silent or stuck) and self._process is not None:
                LOG.error(
                    "The engine process %s; killing it.", "says nothing" if silent else "makes no progress"
                )
                self._process.kill()

    def _end_process(self) -> None:
        """Gives the process a moment to end by itself, then ends it."""
        process = self._process
        if process is None:
            return
        try:
            process.wait(2.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

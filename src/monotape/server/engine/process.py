"""The process that holds the model: runs one completion at a time and says twice a second that it is alive.

Started by `spawn` with FD, one end of a socket pair, as its argument. The first line on it is the configuration; after
that both ends speak wire.py. It ends when the other end does.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import queue
import socket
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO, NoReturn, cast

from monotape.backends.token_ids import TokenIds
from monotape.engine.config import EngineConfig
from monotape.engine.llm import LLM
from monotape.engine.sampling_params import SamplingParams
from monotape.engine.stream import TextStream
from monotape.errors import (
    BackendError,
    CheckpointError,
    MonotapeError,
    NumericalFault,
    RequestError,
    ResourceError,
)
from monotape.server.engine import wire
from monotape.server.engine.info import PhaseTime, describe
from monotape.server.engine.outbox import Outbox
from monotape.server.engine.to_wire import chosen_of, prompt_scores, stats_of
from monotape.server.frames import HEADER
from monotape.server.grammar.constraints import GrammarConstraint, Grammars
from monotape.server.grammar.definition import Grammar
from monotape.server.grammar.wire import GrammarLimits

LOG = logging.getLogger("monotape.server")
_AT_ONCE = 1 << 20  # bytes that are read at once: a prompt of 131,072 tokens is half of it
COMPILERS = 2  # grammars compiled at the same time: one that takes long must not hold up all others


class EngineProcess:
    """The model, the completion that runs and those that were cancelled before they began."""

    def __init__(self, llm: LLM, outbox: Outbox, grammars: Grammars | None) -> None:
        self._llm, self._outbox = llm, outbox
        self._jobs: queue.SimpleQueue[wire.Generate] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._cancelled: set[int] = set()
        self._running: int | None = None
        self._stream: TextStream | None = None
        self._progress = 0
        self._reported: int | None = None  # the completion whose client wants to know how its prompt is read
        self._told = 0  # tokens of that prompt that the client was told are read
        self._reading = threading.Event()  # set while a prompt is read whose client wants to know
        self._grammars = grammars
        self._compilers = ThreadPoolExecutor(COMPILERS, "grammar")
        self._compiling: dict[int, Future[None]] = {}

    def read(self, stream: BinaryIO) -> None:
        """Takes messages until the server closes its end, and then ends the process.

        A server that was killed does not close its end in good order: the last read may fail, or give half a message.
        """
        try:
            while len(header := stream.read(HEADER.size)) == HEADER.size:
                message = wire.to_engine.decode(stream.read(HEADER.unpack(header)[0]))
                if isinstance(message, wire.Generate):
                    self._jobs.put(message)
                elif isinstance(message, wire.Cancel):
                    self._cancel(message.id)
                elif isinstance(message, wire.Compile):
                    self._begin_compiling(message)
                elif isinstance(message, wire.Forget):
                    self._forget(message.id)
                else:
                    break
        finally:
            os._exit(0)  # the server is gone, or wants this process gone: nothing here is worth finishing

    def beat(self) -> None:
        """Says that the process is alive, and how far a prompt has been read as soon as another part of it has been."""
        last = -wire.BEAT_S
        while True:
            with self._lock:  # a stream is read only while its backend is alive
                stream, job_id = self._stream, self._running
                read = 0 if stream is None else stream.filled
                reading = stream is not None and job_id == self._reported and not stream.times_ns
                further = reading and read > self._told
                self._told = read if further else self._told
                if not reading:
                    self._reading.clear()
            if time.monotonic() - last >= wire.BEAT_S:
                last = time.monotonic()
                self._outbox.put(wire.Beat(job_id, self._progress + read, read))
            if further and job_id is not None:
                self._outbox.put(wire.Piece(job_id, "", [], 0, None, read))
            if reading:
                time.sleep(wire.PROGRESS_S)
            else:
                self._reading.wait(max(0.0, last + wire.BEAT_S - time.monotonic()))

    def run(self) -> NoReturn:
        """Runs completions in the order in which they come, until the backend fails."""
        while True:
            job = self._jobs.get()
            self._running = job.id
            try:
                self._complete(job)
            except RequestError as error:
                self._outbox.put(wire.Fault(job.id, "request", str(error)))
            except ResourceError as error:
                self._outbox.put(wire.Fault(job.id, "memory", str(error)))
            except NumericalFault as error:
                self._outbox.put(wire.Fault(job.id, "model", error.message))
            except (
                BackendError
            ) as error:  # the backend's state is unknown: the process ends and is started again
                self._outbox.put(wire.Fault(job.id, "model", error.message))
                raise
            finally:
                with self._lock:
                    self._running = self._stream = None
                    self._cancelled.discard(job.id)

    def _begin_compiling(self, message: wire.Compile) -> None:
        job_id = message.id
        self._compiling[job_id] = compiling = self._compilers.submit(self._compile, message)
        compiling.add_done_callback(lambda _: self._compiling.pop(job_id, None))

    def _compile(self, message: wire.Compile) -> None:
        """Compiles a grammar in a thread that only waits; the work is done in a process of its own."""
        answer = wire.Compiled(message.id)
        try:
            self._required_grammars().compile(message.id, message.grammar)
        except RequestError as error:
            answer = wire.Compiled(message.id, "request", str(error))
        except MonotapeError as error:
            answer = wire.Compiled(message.id, "memory", str(error))
        except Exception as error:  # its request waits for an answer, whatever it is
            LOG.error("A grammar could not be compiled.", exc_info=error)
            answer = wire.Compiled(message.id, "internal")
        self._outbox.put(answer)

    def _forget(self, job_id: int) -> None:
        compiling = self._compiling.get(job_id)
        if compiling is not None and not compiling.cancel():
            self._required_grammars().stop(job_id)

    def _cancel(self, job_id: int) -> None:
        with self._lock:
            if self._stream is not None and self._running == job_id:
                self._stream.cancel()
            else:
                self._cancelled.add(job_id)
                if self._grammars is not None:  # it may still be at its grammar
                    self._grammars.stop(job_id)
                if len(self._cancelled) > 1024:  # jobs that had ended already
                    self._cancelled = {job_id}

    def _complete(self, job: wire.Generate) -> None:
        with self._constraint(job.id, job.grammar) as constraint:
            self._generate(job, constraint)
        self._llm.trim_kv()  # after the last message of the answer, which would wait for it

    def _generate(self, job: wire.Generate, constraint: GrammarConstraint | None) -> None:
        started_ns = time.monotonic_ns()
        stream = self._llm.stream(
            {"prompt_token_ids": TokenIds.from_bytes(job.prompt)},
            job.params,
            index=job.index,
            constraint=constraint,
            special_mark=job.special_mark,
            prediction=TokenIds.from_bytes(job.prediction) if job.prediction else None,
        )
        with self._lock, contextlib.ExitStack() as undo:
            undo.callback(stream.close)
            self._stream = stream
            if job.id in self._cancelled:
                stream.cancel()
            undo.pop_all()
        with stream:
            self._outbox.begin(job.interval)
            cached = stream.completion.stats.cached_tokens
            change = stream.change
            changed = None if change is None else (change.at, change.again)
            self._outbox.put(wire.Started(job.id, started_ns, cached, stream.cache_miss, changed))
            if job.progress:
                self._outbox.put(wire.Piece(job.id, "", [], 0, None, cached))
                with self._lock:
                    self._reported, self._told = job.id, cached
                    self._reading.set()
            last = self._play(job.id, stream)
            completion = stream.completion
            scores = None if job.params.prompt_logprobs is None else prompt_scores(stream.output)
        self._outbox.put(
            wire.Done(
                job.id, last, completion.finish_reason or "abort", completion.stop_reason, completion.seed,
                stats_of(stream), scores,
            )
        )  # fmt: skip

    def _play(self, job_id: int, stream: TextStream) -> str:
        for delta in stream:
            if delta.finish_reason is not None:
                return delta.text
            self._progress += 1
            chosen = None if delta.logprobs is None else chosen_of(delta)
            self._outbox.put_piece(
                wire.Piece(job_id, delta.text, list(delta.token_ids), stream.decode_ns, chosen)
            )
        return ""

    def _constraint(
        self, job_id: int, grammar: Grammar | None
    ) -> contextlib.AbstractContextManager[GrammarConstraint | None]:
        if grammar is None:
            return contextlib.nullcontext()
        return self._required_grammars().constraint(job_id, grammar)

    def _required_grammars(self) -> Grammars:
        if self._grammars is None:
            raise RequestError("Structured output needs a tokenizer.", "This checkpoint has none.")
        return self._grammars


def load(configuration: dict[str, Any], outbox: Outbox) -> tuple[LLM, Grammars | None]:
    """Loads and warms up the model, reporting each phase; what it costs to start Python counts too."""
    last = configuration["spawned_ns"]

    def phase(name: str) -> None:
        nonlocal last
        now = time.monotonic_ns()
        outbox.put(wire.Phase(PhaseTime(name, (now - last) / 1e9)))
        last = now

    phase("start the engine process")
    compile_s = configuration["grammar_timeout"]
    limits = GrammarLimits(compile_s=compile_s)
    grammars = Grammars(
        configuration["source"], configuration["engine"], limits
    )  # reads the vocabulary meanwhile
    source = importlib.import_module(configuration["source"])
    llm: LLM = source.load_llm(EngineConfig(**configuration["engine"]), phase)
    with llm.stream({"prompt_token_ids": [0]}, SamplingParams(temperature=0, max_tokens=1)) as stream:
        for _ in stream:
            pass
    phase("warm-up token")
    if llm.tokenizer is None:
        grammars.close()
    else:
        grammars.prepare(llm.backend.spec.vocab, sorted(llm.eos_ids))
    phase("grammars")
    info = describe(llm)
    phase("memory bandwidth")
    gc.freeze()  # what is loaded stays: looking through it for garbage takes longer than a first token
    outbox.put(wire.Ready(info, recommended(llm)))
    return llm, None if llm.tokenizer is None else grammars


def recommended(llm: LLM) -> dict[str, Any]:
    """The sampling of a request that names none: what the engine itself decided (engine/defaults.py)."""
    given = llm.get_default_sampling_params()
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {name: getattr(given, name) for name in names}


def load_failed(error: MonotapeError | OSError | MemoryError, model: str) -> wire.LoadFailed:
    """Missing files and low memory may pass; a wrong model or a wrong setting lasts."""
    if not isinstance(error, MonotapeError):
        what = "there is too little memory" if isinstance(error, MemoryError) else str(error)
        return wire.LoadFailed(f"The model cannot be loaded: {what}.", "", lasting=False)
    away = os.path.isabs(model) and not os.path.exists(model)
    lasting = not away and not isinstance(error, CheckpointError | ResourceError | BackendError)
    return wire.LoadFailed(error.message, error.hint, lasting)


def main(descriptor: int) -> int:
    connection = socket.socket(fileno=descriptor)
    stream = cast("BinaryIO", connection.makefile("rb", _AT_ONCE))
    configuration = json.loads(stream.readline())
    outbox = Outbox(connection)
    try:
        llm, grammars = load(configuration, outbox)
    except (MonotapeError, OSError, MemoryError) as error:
        outbox.put(load_failed(error, configuration["engine"]["model"]))
        outbox.close()
        return 2
    engine = EngineProcess(llm, outbox, grammars)
    threading.Thread(target=engine.beat, name="beat", daemon=True).start()
    threading.Thread(target=engine.read, args=(stream,), name="read", daemon=True).start()
    try:
        engine.run()
    finally:
        outbox.close()  # with what the completion that failed has said


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    sys.stdout.flush()
    os._exit(code)  # daemon threads may be inside native code; there is nothing left to tidy up

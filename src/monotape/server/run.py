"""Runs the server: listens at once, loads the model meanwhile, prints the time of each phase, and ends cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import importlib
import logging
import math
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TextIO

import uvicorn
import uvloop
from starlette.types import ASGIApp

from monotape.engine.config import EngineConfig, with_model
from monotape.errors import MonotapeError, ResourceError, UsageError
from monotape.server.app import build
from monotape.server.config import ServerConfig
from monotape.server.engine.client import Engine
from monotape.server.engine.info import PhaseTime
from monotape.server.http.connection import limited
from monotape.server.http.limits import Limits, allow_open_files
from monotape.server.service.metrics import Metrics
from monotape.server.service.service import Service, served_names
from monotape.server.service.text_work import TextWork
from monotape.weights.paths import local_path

SOURCE = "monotape.server.engine.model_source"
LOG = logging.getLogger("monotape.server")
SHUTDOWN_S = 5
LAST_WORDS_S = 2  # for the error that ends an answer to reach its client


@contextlib.asynccontextmanager
async def running_service(
    config: ServerConfig, engine_config: EngineConfig, source: str, on_ready: Callable[[Service], None]
) -> AsyncIterator[Service]:
    """The service with its engine process; both end with the block."""
    names = served_names(engine_config.model, config.served_model_name)
    if (path := local_path(engine_config.model)) is not None:
        # A file that is away for a moment must not become the name of a model on the hub.
        engine_config = dataclasses.replace(engine_config, model=str(path.absolute()))
    metrics = Metrics()
    engine = Engine(
        engine_config, source, config.engine_timeout,
        lambda phase: LOG.info("%s: %.2f s", phase.phase, phase.seconds), config.grammar_timeout,
    )  # fmt: skip
    service = Service(config, names, engine, metrics)
    metrics.watch(
        running=lambda: service.gate.running,
        waiting=lambda: service.gate.waiting,
        restarts=lambda: engine.restarts,
    )
    loading = asyncio.ensure_future(_load_text(service, engine_config, source))
    engine.start()
    announcing = asyncio.ensure_future(_announce(service, loading, on_ready))
    try:
        yield service
    finally:
        announcing.cancel()
        loading.cancel()
        await engine.close()
        if service.text is not None:
            service.text.close()


async def _load_text(service: Service, config: EngineConfig, source: str) -> None:
    try:
        text = await asyncio.to_thread(lambda: TextWork(importlib.import_module(source).load_text(config)))
    except MonotapeError as error:  # of the model's files; it names the one
        service.engine.fail(str(error))
        return
    except Exception as error:  # whatever it is, /health must say so
        service.engine.fail(f"The tokenizer cannot be loaded: {error}")
        return
    service.text = text


async def _announce(
    service: Service, loading: asyncio.Future[None], on_ready: Callable[[Service], None]
) -> None:
    await loading
    await service.engine.ready.wait()
    gc.freeze()  # what is loaded stays: looking through it for garbage takes longer than a first token
    on_ready(service)


def serve(
    config: ServerConfig,
    engine_config: EngineConfig,
    source: str = SOURCE,
    out: TextIO | None = None,
    limits: Limits | None = None,
) -> int:
    """Serves until a signal ends it; 1 when the model could not be loaded."""
    limits = limits or Limits(connections=config.connections)
    if source == SOURCE:
        engine_config = with_model(engine_config)
    # uvloop takes half the time of asyncio's own loop between the parts of a request; uvicorn[standard] brings it.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, engine_config, source, out or sys.stderr, limits))


async def _serve(
    config: ServerConfig, engine_config: EngineConfig, source: str, out: TextIO, limits: Limits
) -> int:
    began = time.monotonic()
    listener = listen(config)
    scheme = "https" if config.ssl_certfile else "http"
    host = config.host if config.host not in ("0.0.0.0", "::") else "localhost"
    address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"

    def announce(service: Service) -> None:
        print(startup_table(service.engine.startup, time.monotonic() - began), file=out)
        print(f"{service.names[0]} is ready at {address}", file=out, flush=True)

    async with running_service(config, engine_config, source, announce) as service:
        server = make_server(build(service), config, service.closing, limits)
        print(f"Listening at {address}; loading {service.names[0]} ...", file=out, flush=True)
        watch = asyncio.ensure_future(_end_on_failure(service, server))
        await server.serve(sockets=[listener])
        watch.cancel()
        failed = service.engine.failure
    if failed is not None:
        print(f"monotape: {failed}", file=out)
        return 1
    return 0


async def _end_on_failure(service: Service, server: uvicorn.Server) -> None:
    """Where another try cannot help the server ends, so that its supervisor acts."""
    await service.engine.failed.wait()
    server.should_exit = True


def listen(config: ServerConfig) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        listener = socket.create_server((config.host, config.port), family=family, backlog=1024)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while")[0]  # Python adds the address to some
        raise ResourceError(
            f"Port {config.port} of {config.host} cannot be had: {why}.", "Choose another --port or --host."
        ) from None
    # Connections inherit it. Head and body are two writes, and without it the second waits 40 ms for the client.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def make_server(app: ASGIApp, config: ServerConfig, closing: asyncio.Event, limits: Limits) -> uvicorn.Server:
    allow_open_files(limits)
    try:
        settings = uvicorn.Config(
            app, lifespan="off", log_config=None, access_log=False, server_header=False, date_header=False,
            proxy_headers=False,  # nothing here depends on the client's address
            http=limited(limits), ws="none", timeout_keep_alive=math.ceil(limits.idle_s),
            ssl_keyfile=config.ssl_keyfile, ssl_certfile=config.ssl_certfile,
        )  # fmt: skip
        settings.load()
        return _Server(settings, closing)
    except OSError as error:
        raise UsageError(
            f"The TLS key or certificate cannot be read: {error}.", "Check both files."
        ) from None


class _Server(uvicorn.Server):
    """Ends in good order on a signal, where uvicorn would let the signal end the process."""

    def __init__(self, settings: uvicorn.Config, closing: asyncio.Event) -> None:
        super().__init__(settings)
        self._closing = closing

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answers have SHUTDOWN_S to end by themselves; then they end with an error; then connections are cut."""
        ending = asyncio.ensure_future(self._end_answers())
        await super().shutdown(sockets)
        await ending

    async def _end_answers(self) -> None:
        await self._wait(SHUTDOWN_S, unless=lambda: self.force_exit)
        self._closing.set()
        await self._wait(LAST_WORDS_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await self._wait(LAST_WORDS_S)  # for what they leave behind

    async def _wait(self, seconds: float, unless: Callable[[], bool] = lambda: False) -> None:
        """Until nothing is being answered, and no longer than so."""
        until = time.monotonic() + seconds
        while self.server_state.tasks and time.monotonic() < until and not unless():
            await asyncio.sleep(0.05)


def startup_table(phases: list[PhaseTime], total_s: float) -> str:
    """Seconds per phase, slowest visible at a glance."""
    rows = [*((phase.phase, phase.seconds) for phase in phases), ("total", total_s)]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name.ljust(width)}  {seconds:7.2f} s" for name, seconds in rows]
    return "\n".join([*lines[:-1], "-" * (width + 11), lines[-1]])

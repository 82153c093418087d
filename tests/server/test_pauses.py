"""The garbage collector does not look through what was loaded: that would take longer than a first token."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import time
from types import SimpleNamespace
from typing import Any

import pytest

from monotape.engine.config import EngineConfig
from monotape.server import run
from monotape.server.engine import process, wire


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What has happened so far, in place of a real freeze of the tests' own objects."""
    happened: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: happened.append("frozen"))
    return happened


def test_the_engine_freezes_what_it_loaded_before_it_is_ready(
    frozen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "Grammars", lambda *_: SimpleNamespace(prepare=lambda *_: None))

    def put(message: Any) -> None:
        if isinstance(message, wire.Ready):
            frozen.append("ready")

    engine = dataclasses.asdict(EngineConfig(model="scripted", progress=False))
    configuration = {
        "source": "server.scripted", "engine": engine, "spawned_ns": time.monotonic_ns(), "grammar_timeout": 3.0
    }  # fmt: skip
    llm, _ = process.load(configuration, SimpleNamespace(put=put))  # type: ignore[arg-type]
    llm.close()
    assert frozen == ["frozen", "ready"]


def test_the_server_does_too(frozen: list[str]) -> None:
    async def announced() -> None:
        ready = asyncio.Event()
        ready.set()
        loaded = asyncio.get_running_loop().create_future()
        loaded.set_result(None)
        service: Any = SimpleNamespace(engine=SimpleNamespace(ready=ready))
        await run._announce(service, loaded, lambda _: frozen.append("ready"))

    asyncio.run(announced())
    assert frozen == ["frozen", "ready"]

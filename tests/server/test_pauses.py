"""What takes long happens where no client waits for it: a search for garbage, and moving kept KV."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import time
from types import SimpleNamespace
from typing import Any

import pytest

from engine.fake_backend import FakeBackend
from engine.scripted_model import END, GREEDY, TOKENIZER, VOCAB, ids_of
from monotape.backends.token_ids import TokenIds
from monotape.engine.config import EngineConfig
from monotape.engine.llm import LLM
from monotape.server import run
from monotape.server.engine import process, wire
from token_source import SourceSequence


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


def test_kept_kv_is_moved_after_the_last_message_of_an_answer() -> None:
    happened: list[str] = []

    class Moving(SourceSequence):
        moved = False

        def shrink(self) -> bool:
            happened.append("moved")
            before, self.moved = self.moved, True
            return not before

    class MovingBackend(FakeBackend):
        def new_sequence(self) -> Moving:
            return Moving(token_bytes=10)

    backend = MovingBackend([*ids_of("hello world"), END], vocab=VOCAB)
    llm = LLM.from_parts(backend, context=97, tokenizer=TOKENIZER, config=EngineConfig(kv_bytes=1))
    outbox: Any = SimpleNamespace(
        begin=lambda interval: None,
        put=lambda message: happened.append(type(message).__name__),
        put_piece=lambda piece: None,
    )
    engine = process.EngineProcess(llm, outbox, None)
    for job_id, text in enumerate(("one", "two"), 1):
        prompt = TokenIds.of(ids_of(text)).to_bytes()
        engine._complete(wire.Generate(job_id, prompt, GREEDY))
    assert happened[:4] == ["Started", "Done", "Started", "Done"] and "moved" in happened[4:]
    assert len(llm._pool) == 1

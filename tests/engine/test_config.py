"""Settings: checked, documented, and a context that fits memory."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest

from engine.fake_backend import FakeBackend
from monotape.engine.config import EngineConfig, memory_bytes
from monotape.engine.kv_room import room_in_memory
from monotape.engine.loading import BACKENDS
from monotape.engine.startup import context_for
from monotape.errors import UsageError


@pytest.mark.parametrize(
    "fields",
    [
        {"workers": 0}, {"workers": True}, {"max_model_len": -1}, {"max_model_len": 1.5}, {"seed": -1},
        {"seed": 2**64}, {"max_sequences": 0}, {"max_sequences": None}, {"kv_bytes": -1}, {"model": ""},
        {"backend": None}, {"dtype": 7}, {"speculation": 1}, {"emulate_ranks": "yes"},
    ],
)  # fmt: skip
def test_a_setting_that_cannot_be_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"^{next(iter(fields))} is ") as caught:
        EngineConfig(**fields)
    assert caught.value.hint


def test_every_setting_has_a_help_text() -> None:
    for field in dataclasses.fields(EngineConfig):
        assert field.metadata["help"]
    named = {field.name: field.metadata["help"] for field in dataclasses.fields(EngineConfig)}
    assert all(backend in named["backend"] for backend in BACKENDS)


def test_the_context_is_the_models_unless_memory_or_the_user_says_otherwise(caplog: Any) -> None:
    spec = FakeBackend([1], vocab=300, context=5000).spec

    def context(**settings: Any) -> int:
        config = EngineConfig(**settings)
        return context_for(config, spec, room_in_memory(config, spec))

    assert context() == 5000
    assert context(max_model_len=33) == 33
    with pytest.raises(UsageError, match="5001, but the model was made for 5000"):
        context(max_model_len=5001)
    position_bytes = 2 * spec.layers * spec.kv_rows * 4
    with caplog.at_level(logging.WARNING):
        assert context(kv_bytes=position_bytes * 1000) == 768
        assert context(kv_bytes=0) == 256
    assert "768 of the model's 5000 tokens" in caplog.text


def test_the_kv_budget_is_part_of_memory() -> None:
    assert EngineConfig(kv_bytes=5).kv_budget == 5
    assert EngineConfig().kv_budget == memory_bytes() // 4 > 0

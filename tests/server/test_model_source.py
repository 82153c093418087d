"""What the server takes from a model: the file it says, and the sampling that its requests do not name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from monotape.engine.config import EngineConfig
from monotape.server.engine.model_source import load_llm, load_text
from monotape.server.requests.openai import ChatRequest
from monotape.server.requests.sampling import sampling_params

pytestmark = pytest.mark.slow

Checkpoint = Callable[[str], Path]


def test_the_log_says_which_file_a_name_stood_for(
    checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(checkpoint("llama"))
    with caplog.at_level(logging.INFO):
        load_text(EngineConfig(model=path, progress=False))
    assert f"{path} is {path}" in caplog.text


def test_the_engine_of_the_server_has_the_defaults_of_the_others(checkpoint: Checkpoint) -> None:
    path = str(checkpoint("llama"))
    with load_llm(EngineConfig(model=path, progress=False), lambda phase: None) as llm:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.top_p, llm.source) == (0.7, 0.9, path)


def test_an_explicit_field_wins_over_the_defaults() -> None:
    defaults = {"temperature": 0.2, "top_p": 0.9}
    messages = [{"role": "user", "content": "x"}]
    silent = sampling_params(ChatRequest(messages=messages), defaults)
    assert (silent.temperature, silent.top_p) == (0.2, 0.9)
    explicit = sampling_params(ChatRequest(messages=messages, temperature=1, top_p=1), defaults)
    assert (explicit.temperature, explicit.top_p) == (1, 1)


def test_a_seed_of_minus_one_is_none() -> None:
    """So clients of llama.cpp and vLLM ask for another answer each time."""
    seeds = {
        seed: sampling_params(ChatRequest(messages=[{"role": "user", "content": "x"}], seed=seed), {}).seed
        for seed in (-1, -2, 0, 7)
    }
    assert seeds == {-1: None, -2: 2**64 - 2, 0: 0, 7: 7}

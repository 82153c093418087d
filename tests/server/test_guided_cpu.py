"""Real grammars in processes of their own, whose masks the CPU backend takes while one job runs."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from backends.cpu_cases import cpu
from families import make_checkpoint, prompt
from monotape.backends.cpu.backend import CpuBackend
from monotape.backends.protocol import Job, Sampling
from monotape.engine.constrained import ConstrainedGeneration
from monotape.engine.guided import GuidedGeneration
from monotape.server.grammar import definition as grammar
from monotape.server.grammar.constraints import Grammars
from server.test_grammars import END, TOKENIZER, grammars, paths
from server.test_guided import CASE, SCHEMA

__all__ = ["grammars", "paths"]  # fixtures


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CpuBackend]:
    with cpu(make_checkpoint(CASE, tmp_path_factory.mktemp("guided"))) as loaded:
        yield loaded


@pytest.mark.parametrize("temperature", [0, 0.9])
@pytest.mark.parametrize("top", [None, 2])  # with log-probabilities nothing is forced
def test_a_schema_is_one_job_and_gives_the_same_text(
    backend: CpuBackend,
    grammars: Grammars,
    monkeypatch: pytest.MonkeyPatch,
    temperature: float,
    top: int | None,
) -> None:
    asked = grammar.from_json_schema(SCHEMA)
    sampling = Sampling(temperature=temperature, seed=3)
    job = Job(tuple(prompt(7)), 0, 90, stop_ids=(END,), sampling=sampling, logprobs=top)
    with grammars.constraint(1, asked) as constraint:
        single = ConstrainedGeneration(backend, job, backend.new_sequence(), constraint)
        expected = [token.id for token in single]
    monkeypatch.delattr(CpuBackend, "logits")  # a pass of a token alone
    with grammars.constraint(2, asked) as constraint:
        sequence = backend.new_sequence()
        generation = GuidedGeneration(backend, job, sequence, constraint, backend.spec.vocab)
        tokens = [token.id for token in generation]
    assert tokens == expected and generation.finish_reason == single.finish_reason == "stop"
    assert 7 <= sequence.length <= 7 + len(tokens)
    text = TOKENIZER.decode([token for token in tokens if token != END])
    assert set(json.loads(text)) == {"a_long_name", "kind"}

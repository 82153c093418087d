"""Real grammars in processes of their own, whose masks the monokernel takes while it runs on the host's machine."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

from backends.host_kernel import host_gpu
from families import Case, make_checkpoint, prompt
from monotape.backends.cuda.backend import CudaBackend
from monotape.backends.protocol import Job, Sampling
from monotape.compiler.gpu import Tuning, gpu_plan
from monotape.engine.constrained import ConstrainedGeneration
from monotape.engine.guided import GuidedGeneration
from monotape.errors import ResourceError
from monotape.models.registry import spec_from_config
from monotape.server.grammar import definition as grammar
from monotape.server.grammar.constraints import GrammarConstraint, Grammars
from monotape.weights.open import open_checkpoint
from server.test_grammars import END, TOKENIZER, grammars, paths, processes

__all__ = ["grammars", "paths"]  # fixtures

pytestmark = pytest.mark.slow

CASE = Case(
    "guided", "llama",
    {"head_dim": 16, "hidden_size": 56, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": TOKENIZER.size},
)  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {
        "a_long_name": {"type": "integer", "maximum": 99, "minimum": 0},
        "kind": {"enum": ["red", "green"]},
    },
    "required": ["a_long_name", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=[1, 4], ids=["one row a pass", "four rows"])
def backend(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[CudaBackend]:
    folder = make_checkpoint(CASE, tmp_path_factory.mktemp("guided"))
    with host_gpu():
        checkpoint = open_checkpoint(folder)
        spec = spec_from_config(checkpoint.config)
        loaded = CudaBackend.load(
            spec, gpu_plan(spec, 2, CASE.context, tuning=Tuning(rows=request.param)), checkpoint
        )
        yield loaded
        loaded.close()


def guided(backend: CudaBackend, job: Job, constraint: GrammarConstraint) -> GuidedGeneration:
    return GuidedGeneration(backend, job, backend.new_sequence(), constraint, backend.spec.vocab)


@pytest.mark.parametrize("temperature", [0, 0.9])
@pytest.mark.parametrize("top", [None, 2])  # with log-probabilities nothing is forced
def test_a_schema_takes_one_launch_and_gives_the_same_text(
    backend: CudaBackend, grammars: Grammars, temperature: float, top: int | None
) -> None:
    asked = grammar.from_json_schema(SCHEMA)
    sampling = Sampling(temperature=temperature, seed=3)
    job = Job(tuple(prompt(7)), 0, 90, stop_ids=(END,), sampling=sampling, logprobs=top)
    with grammars.constraint(1, asked) as constraint:
        before = backend.kernel.launches
        generation = guided(backend, job, constraint)
        tokens = [token.id for token in generation]
        assert backend.kernel.launches == before + 1
    if backend.gpu_rank.rows_a_pass == 1:
        assert generation.drafted == 0
    elif top is None:
        assert generation.accepted > 8, "keys and punctuation"
    with grammars.constraint(2, asked) as constraint:
        single = ConstrainedGeneration(backend, job, backend.new_sequence(), constraint)
        assert [token.id for token in single] == tokens
    assert generation.finish_reason == single.finish_reason == "stop"
    text = TOKENIZER.decode([token for token in tokens if token != END])
    assert set(json.loads(text)) == {"a_long_name", "kind"}


def test_a_grammar_whose_process_is_killed_is_an_error_and_the_next_one_works(
    backend: CudaBackend, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system kills it where memory is short: the grammar is not to blame."""
    job = Job(tuple(prompt(7)), 0, 60, stop_ids=(END,))
    seen: list[int] = []

    def accept(token_id: int) -> None:
        seen.append(token_id)
        if len(seen) == 3:
            for pid in processes(grammars):
                os.kill(pid, signal.SIGKILL)
        constraint._untold.append(token_id)

    with grammars.constraint(1, grammar.from_regex("[a-z]{80}")) as constraint:
        monkeypatch.setattr(constraint, "accept", accept)
        generation = guided(backend, job, constraint)
        with pytest.raises(ResourceError, match=r"killed from outside \(SIGKILL\)"):
            list(generation)
    assert generation.finish_reason == "cancelled" and len(seen) == 3
    with grammars.constraint(2, grammar.from_choice(["red", "green"])) as constraint:
        tokens = [token.id for token in guided(backend, job, constraint)]
    assert TOKENIZER.decode([token for token in tokens if token != END]) in ("red", "green")

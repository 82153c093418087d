"""The reference backend against transformers, family by family, and the way it runs a job."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from families import (
    BY_NAME,
    CASES,
    EXPERT_CASES,
    VOCAB,
    Case,
    prompt,
    transformers_greedy,
    transformers_logits,
)
from monotape.backends.protocol import Job, Sampling
from monotape.backends.reference.backend import PREFILL_ROWS, ReferenceBackend
from monotape.backends.reference.experts import silu
from monotape.backends.reference.model import visible
from monotape.backends.reference.sampler import choose, logprobs
from monotape.backends.reference.weights import ReferenceWeights, load_weights
from monotape.compiler.compile import compile_plan
from monotape.errors import CheckpointError, NumericalFault, RequestError, UsageError
from monotape.models.registry import spec_from_config
from monotape.plan.formats import Format
from monotape.plan.types import Machine
from monotape.weights.open import open_checkpoint

Checkpoints = Callable[[str], Path]
Floats = NDArray[np.float32]


def load(
    folder: Path,
    context: int,
    change: Callable[[ReferenceWeights], ReferenceWeights] = lambda weights: weights,
) -> ReferenceBackend:
    checkpoint = open_checkpoint(folder)
    spec = spec_from_config(checkpoint.config)
    plan = compile_plan(spec, Machine("cpu", 1), Format.F32, context=context)
    return ReferenceBackend(spec, plan, change(load_weights(spec, checkpoint)), context)


@pytest.fixture(scope="module")
def llama(checkpoint: Checkpoints) -> ReferenceBackend:
    return load(checkpoint("llama"), BY_NAME["llama"].context)


def agree(got: Floats, want: Floats) -> None:
    assert got.dtype == np.float32
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()
    assert np.linalg.norm(got - want) <= 1e-4 * np.linalg.norm(want)


@pytest.mark.parametrize("case", [*CASES, *EXPERT_CASES], ids=lambda case: case.name)
def test_logits_agree_with_transformers(case: Case, checkpoint: Checkpoints) -> None:
    folder, tokens = checkpoint(case.name), prompt(37, seed=1)
    backend = load(folder, case.context)
    agree(backend.logits(tokens, backend.new_sequence()), transformers_logits(folder, tokens))


@pytest.mark.parametrize("case", [*CASES, *EXPERT_CASES], ids=lambda case: case.name)
def test_64_greedy_tokens_are_those_of_transformers(case: Case, checkpoint: Checkpoints) -> None:
    folder, tokens = checkpoint(case.name), prompt(23, seed=2)
    backend = load(folder, case.context)
    generation = backend.start(Job(tuple(tokens), 0, 64), backend.new_sequence())
    got = [token.id for token in generation]
    assert got == transformers_greedy(folder, tokens, 64)
    assert len(set(got)) > 8, "a model that repeats itself would hide mistakes"
    assert generation.finish_reason == "length"


@pytest.mark.parametrize("case", [*CASES, *EXPERT_CASES], ids=lambda case: case.name)
def test_bits_do_not_depend_on_how_the_prompt_is_cut(case: Case, checkpoint: Checkpoints) -> None:
    """Single tokens, odd pieces, and a prefix of any length that was cached: the same bits as all at once."""
    backend, tokens = load(checkpoint(case.name), case.context), prompt(60, seed=3)
    at_once = backend.logits(tokens, backend.new_sequence())
    for cuts in ([0, 1, 2, 19, 31, 60], range(61)):
        sequence = backend.new_sequence()
        pieces = [backend.logits(tokens[start:end], sequence) for start, end in pairwise(cuts)]
        assert sequence.length == 60
        assert np.array_equal(np.concatenate(pieces), at_once)
    for cached in range(1, 60):
        sequence = backend.new_sequence()
        backend.logits(tokens, sequence)
        sequence.truncate(cached)
        assert np.array_equal(backend.logits(tokens[cached:], sequence), at_once[cached:]), cached


def test_a_prompt_longer_than_a_pass_gives_the_same_bits(checkpoint: Checkpoints) -> None:
    backend, tokens = load(checkpoint("qwen3-alternating"), 160), prompt(PREFILL_ROWS + 20, seed=4)
    at_once = backend.logits(tokens, backend.new_sequence())
    sequence = backend.new_sequence()
    backend.logits(tokens[:37], sequence)
    assert np.array_equal(backend.logits(tokens[37:], sequence), at_once[37:])


def test_a_prompt_longer_than_a_prefill_pass(checkpoint: Checkpoints) -> None:
    folder, tokens = checkpoint("mistral-window"), prompt(PREFILL_ROWS + 13, seed=4)
    backend = load(folder, 160)
    want = transformers_logits(folder, tokens)
    agree(backend.logits(tokens, backend.new_sequence()), want)
    first = next(iter(backend.start(Job(tuple(tokens), 0, 1), backend.new_sequence())))
    assert first.id == int(want[-1].argmax())


def test_a_second_turn_computes_only_what_is_new(llama: ReferenceBackend) -> None:
    turn, sequence = tuple(prompt(11, seed=5)), llama.new_sequence()
    answer = tuple(token.id for token in llama.start(Job(turn, 0, 9), sequence))
    assert sequence.length == len(turn) + len(answer) - 1
    longer = (*turn, *answer, *prompt(5, seed=6))
    kept = [token.id for token in llama.start(Job(longer, sequence.length, 12), sequence)]
    afresh = [token.id for token in llama.start(Job(longer, 0, 12), llama.new_sequence())]
    assert kept == afresh
    # Another continuation of the same prefix: what was cached after it is forgotten.
    other = (*turn, *prompt(7, seed=7))
    kept = [token.id for token in llama.start(Job(other, len(turn), 12), sequence)]
    assert kept == [token.id for token in llama.start(Job(other, 0, 12), llama.new_sequence())]
    assert sequence.bytes >= 2 * 4 * 3 * 2 * 10 * sequence.length


def test_a_stop_id_is_the_last_token(llama: ReferenceBackend) -> None:
    tokens = tuple(prompt(9, seed=8))
    free = [token.id for token in llama.start(Job(tokens, 0, 20), llama.new_sequence())]
    place = 5
    while free[place] in free[:place]:
        place += 1
    stop = free[place]
    generation = llama.start(Job(tokens, 0, 20, stop_ids=(VOCAB - 1, stop)), llama.new_sequence())
    assert [token.id for token in generation] == free[: place + 1]
    assert generation.finish_reason == "stop"
    late = llama.start(Job(tokens, 0, 20, stop_ids=(stop,), min_tokens=place + 1), llama.new_sequence())
    got = [token.id for token in late]
    assert got[:place] == free[:place]
    assert stop not in got[: place + 1]


def test_a_stop_id_at_the_very_end_counts_as_a_stop(llama: ReferenceBackend) -> None:
    tokens = tuple(prompt(9, seed=8))
    first = next(iter(llama.start(Job(tokens, 0, 1), llama.new_sequence()))).id
    generation = llama.start(Job(tokens, 0, 1, stop_ids=(first,)), llama.new_sequence())
    assert [token.id for token in generation] == [first]
    assert generation.finish_reason == "stop"


def test_cancel_from_another_thread(llama: ReferenceBackend) -> None:
    tokens, sequence = tuple(prompt(9, seed=9)), llama.new_sequence()
    generation = llama.start(Job(tokens, 0, 100), sequence)
    got = []
    for token in generation:
        got.append(token.id)
        if len(got) == 3:
            thread = threading.Thread(target=generation.cancel)
            thread.start()
            thread.join()
    assert len(got) == 3
    assert generation.finish_reason == "cancelled"
    assert sequence.length == len(tokens) + 2
    assert list(generation) == []


def test_cancel_before_the_first_token(llama: ReferenceBackend) -> None:
    sequence = llama.new_sequence()
    generation = llama.start(Job(tuple(prompt(9)), 0, 100), sequence)
    generation.cancel()
    assert list(generation) == []
    assert (generation.finish_reason, sequence.length) == ("cancelled", 0)


def test_leaving_the_loop_cancels(llama: ReferenceBackend) -> None:
    generation = llama.start(Job(tuple(prompt(9)), 0, 100), llama.new_sequence())
    tokens = iter(generation)
    next(tokens)
    assert generation.finish_reason is None
    tokens.close()  # type: ignore[attr-defined]
    assert generation.finish_reason == "cancelled"


def test_times_follow_each_other(llama: ReferenceBackend) -> None:
    generation = llama.start(Job(tuple(prompt(9)), 0, 4), llama.new_sequence())
    times = [generation.start_ns, *(token.time_ns for token in generation)]
    assert times == sorted(times)


def test_log_probabilities_are_those_of_the_model(llama: ReferenceBackend) -> None:
    tokens = tuple(prompt(9, seed=10))
    sampling = Sampling(temperature=0.7, top_k=5, repetition_penalty=1.3, seed=3)
    plain = list(llama.start(Job(tokens, 0, 6, sampling=sampling), llama.new_sequence()))
    asked = list(llama.start(Job(tokens, 0, 6, sampling=sampling, logprobs=3), llama.new_sequence()))
    assert [token.id for token in plain] == [token.id for token in asked]
    assert plain[0].logprob is None
    for place, token in enumerate(asked):
        before = [*tokens, *(earlier.id for earlier in asked[:place])]
        want, best = logprobs(llama.logits(before, llama.new_sequence())[-1], token.id, 3)
        assert token.logprob == pytest.approx(want, rel=1e-4)
        assert [pair[0] for pair in token.top_logprobs] == [pair[0] for pair in best]


def test_each_token_is_what_the_sampler_says_at_its_position(llama: ReferenceBackend) -> None:
    tokens = tuple(prompt(9, seed=11))
    sampling = Sampling(temperature=2.0, top_p=0.95, repetition_penalty=1.5, frequency_penalty=0.5, seed=12)
    job = Job(tokens, 0, 12, stop_ids=(4, 40), min_tokens=12, sampling=sampling)
    sequence, output = llama.new_sequence(), list[int]()
    logits = llama.logits(tokens, sequence)[-1]
    for token in llama.start(job, llama.new_sequence()):
        assert token.id == choose(logits, tokens, output, len(tokens) + len(output), sampling, (4, 40))
        output.append(token.id)
        logits = llama.logits([token.id], sequence)[-1]
    assert len(set(output)) > 6


def test_seeds_decide_the_tokens(llama: ReferenceBackend) -> None:
    def sampled(seed: int) -> list[int]:
        job = Job(tuple(prompt(9)), 0, 16, sampling=Sampling(temperature=1.5, seed=seed))
        return [token.id for token in llama.start(job, llama.new_sequence())]

    assert sampled(7) == sampled(7)
    assert sampled(7) != sampled(8)
    assert sampled(7) != sampled(7 + (1 << 32)), "the high half of a seed counts"


def test_a_nan_is_named_with_its_position(checkpoint: Checkpoints) -> None:
    def broken(weights: ReferenceWeights) -> ReferenceWeights:
        embedding = weights.model["embedding"].copy()
        embedding[77] = np.nan
        return ReferenceWeights({**weights.model, "embedding": embedding}, weights.layers)

    backend = load(checkpoint("llama"), 160, broken)
    sequence, tokens = backend.new_sequence(), [5, 6, 7, 77, 8]
    with pytest.raises(NumericalFault, match="position 3 "):
        backend.logits(tokens, sequence)
    assert sequence.length == 0
    assert np.isfinite(backend.logits([5, 6, 7], sequence)).all()
    with pytest.raises(NumericalFault, match="position 3 "):
        list(backend.start(Job((5, 6, 7, 77, 8), 3, 4), sequence))


def test_a_nan_in_a_checkpoint_is_refused(checkpoint: Checkpoints, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(checkpoint("llama") / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = np.nan
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((checkpoint("llama") / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path, 160)


def test_weights_can_be_changed(checkpoint: Checkpoints, llama: ReferenceBackend) -> None:
    def rounded(weights: ReferenceWeights) -> ReferenceWeights:
        return weights.changed(lambda role, tensor: tensor.astype(np.float16).astype(np.float32))

    tokens = prompt(9)
    exact = llama.logits(tokens, llama.new_sequence())
    backend = load(checkpoint("llama"), 160, rounded)
    close = backend.logits(tokens, backend.new_sequence())
    error = np.linalg.norm(close - exact) / np.linalg.norm(exact)
    assert 1e-5 < error < 1e-2


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (Job((), 0, 4), "prompt is empty"),
        (Job((3, VOCAB), 0, 4), f"Token id {VOCAB} is not in the vocabulary of {VOCAB}"),
        (Job((3, -1), 0, 4), "Token id -1"),
        (Job((3,) * 150, 0, 12), "needs 161 positions, but the context has 160"),
        (Job((3,), 0, 0), "0 tokens were asked for"),
    ],
)
def test_requests_that_cannot_be(job: Job, message: str, llama: ReferenceBackend) -> None:
    with pytest.raises(RequestError, match=message):
        llama.start(job, llama.new_sequence())


def test_the_last_position_can_be_used(llama: ReferenceBackend) -> None:
    sequence = llama.new_sequence()
    assert len(list(llama.start(Job((3,) * 150, 0, 11), sequence))) == 11
    assert sequence.length == 160
    with pytest.raises(RequestError, match="needs 161 positions"):
        llama.logits([1], sequence)


@pytest.mark.parametrize("context", [0, 161])
def test_the_context_is_bounded_by_the_model(context: int, checkpoint: Checkpoints) -> None:
    with pytest.raises(UsageError, match=f"context of {context} .* 160 positions"):
        load(checkpoint("llama"), context)


def test_windows_hide_what_is_too_far_back() -> None:
    seen = [visible(position, 3) for position in range(5)]
    assert seen == [slice(0, 1), slice(0, 2), slice(0, 3), slice(1, 4), slice(2, 5)]
    assert [visible(position, None) for position in (0, 4)] == [slice(0, 1), slice(0, 5)]


def test_silu_of_large_values() -> None:
    with np.errstate(over="raise", divide="raise", invalid="raise"):
        got = silu(np.array([-200.0, -1.0, 0.0, 200.0], np.float32))
    np.testing.assert_allclose(got, [0.0, -0.26894142, 0.0, 200.0], rtol=1e-6)

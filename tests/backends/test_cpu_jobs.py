"""Jobs on the CPU backend: stopping, cancelling, log-probabilities, sampling, faults, and one job at a time."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chisquare

from backends.cpu_cases import PROMPT, cpu, generate, ids, reference, take_until_cancelled
from monotape.backends.cpu.backend import CpuBackend
from monotape.backends.protocol import Job, Sampling
from monotape.backends.reference.sampler import reference_probabilities
from monotape.errors import BackendError, BackendUnavailable, NumericalFault, RequestError
from monotape.plan.formats import TILE_ROWS
from waiting import PATIENCE_S

Checkpoint = Callable[[str], Path]

EVERYTHING = Sampling(
    temperature=0.9, top_k=40, top_p=0.95, min_p=0.02, repetition_penalty=1.2, presence_penalty=0.3,
    frequency_penalty=0.2, logit_bias=((5, 1.5), (9, -2.0)), seed=2**63 + 11,
)  # fmt: skip
SETTINGS = {
    "greedy with penalties": Sampling(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4),
    "bias": Sampling(logit_bias=((7, 100.0),)),
    "temperature": Sampling(temperature=1.3, seed=5),
    "top-k": Sampling(temperature=1.0, top_k=7, seed=6),
    "top-p": Sampling(temperature=1.5, top_p=0.8, seed=7),
    "min-p": Sampling(temperature=2.0, min_p=0.1, seed=8),
    "everything": EVERYTHING,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_sampled_tokens_are_those_of_the_reference(checkpoint: Checkpoint, name: str) -> None:
    """Noise is a function of (seed, position, id), so equal logits give equal tokens, not just equal odds."""
    folder = checkpoint("qwen2")
    expected = ids(generate(reference(folder), count=60, sampling=SETTINGS[name]))
    with cpu(folder, "f32") as backend:
        assert ids(generate(backend, count=60, sampling=SETTINGS[name])) == expected


@pytest.mark.parametrize("name", ["temperature", "top-k", "top-p", "min-p", "everything"])
def test_sampled_frequencies_fit_the_reference_probabilities(checkpoint: Checkpoint, name: str) -> None:
    sampling = SETTINGS[name]
    prompt, draws = PROMPT[:6], 3000
    with cpu(checkpoint("llama-tied"), "q8") as backend:
        logits = backend.logits(prompt, backend.new_sequence())[-1]
        sequence = backend.new_sequence()
        counts = np.zeros(backend.spec.vocab)
        for seed in range(draws):
            changed = Sampling(**{f: getattr(sampling, f) for f in sampling.__slots__} | {"seed": seed})
            cached = min(sequence.length, len(prompt) - 1)
            counts[ids(list(backend.start(Job(prompt, cached, 1, sampling=changed), sequence)))[0]] += 1
    expected = reference_probabilities(logits, prompt, (), sampling)
    assert counts[expected == 0].sum() == 0
    likely = expected * draws >= 5  # the test needs a handful of expected draws a bin; the rest share one
    observed = np.append(counts[likely], counts[~likely].sum())
    wanted = np.append(expected[likely], expected[~likely].sum()) * draws
    keep = wanted > 0
    assert keep.sum() > 1
    assert chisquare(observed[keep], wanted[keep] * observed[keep].sum() / wanted[keep].sum()).pvalue > 1e-4


def test_seeds_repeat_and_differ(checkpoint: Checkpoint) -> None:
    with cpu(checkpoint("llama")) as backend:
        runs = [ids(generate(backend, sampling=Sampling(temperature=1.5, seed=seed))) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_stop_id_ends_the_job_and_is_its_last_token(checkpoint: Checkpoint) -> None:
    with cpu(checkpoint("llama")) as backend:
        free = ids(generate(backend))
        stop = free[10]
        first = free.index(stop)
        generation = backend.start(Job(PROMPT[:5], 0, 40, (stop,)), backend.new_sequence())
        assert ids(list(generation)) == free[: first + 1]
        assert generation.finish_reason == "stop"


def test_min_tokens_bans_the_stop_id_until_then(checkpoint: Checkpoint) -> None:
    with cpu(checkpoint("llama")) as backend:
        stop = ids(generate(backend))[0]
        tokens = ids(generate(backend, stop_ids=(stop,), min_tokens=6))
        assert stop not in tokens[:6]
        expected = ids(generate(reference(checkpoint("llama")), stop_ids=(stop,), min_tokens=6))
        assert tokens == expected


def test_logprobs_are_those_of_the_reference(checkpoint: Checkpoint) -> None:
    folder = checkpoint("qwen3")
    expected = generate(reference(folder), count=12, sampling=EVERYTHING, logprobs=4)
    with cpu(folder, "f32") as backend:
        got = generate(backend, count=12, sampling=EVERYTHING, logprobs=4)
        plain = generate(backend, count=12, sampling=EVERYTHING, logprobs=0)
        none = generate(backend, count=12, sampling=EVERYTHING)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [token for token, _ in mine.top_logprobs] == [token for token, _ in theirs.top_logprobs]
        np.testing.assert_allclose(
            [value for _, value in mine.top_logprobs], [value for _, value in theirs.top_logprobs], atol=1e-4
        )
    assert [token.logprob for token in plain] == [token.logprob for token in got]
    assert all(token.top_logprobs == () for token in plain)
    assert all(token.logprob is None for token in none)


@pytest.mark.parametrize("after", [0, 1, 30])
def test_cancel_ends_within_a_token_and_the_backend_goes_on(checkpoint: Checkpoint, after: int) -> None:
    with cpu(checkpoint("llama"), context=100_000) as backend:
        sequence = backend.new_sequence()
        generation = backend.start(Job(PROMPT[:5], 0, 90_000), sequence)
        seen = take_until_cancelled(generation, after)
        assert generation.finish_reason == "cancelled"
        assert seen < 90_000
        assert sequence.length == 5 + seen - 1 if seen else sequence.length in (0, 5)  # the chunk, or nothing
        assert len(generate(backend)) == 40


def looks_in_prefill(backend: CpuBackend) -> int:
    """How often one worker looks in one chunk of several rows, by the plan: meetings, tiles, rows; then a token."""
    spec, rank = backend.spec, backend.plan.ranks[0]
    qkv, output, gate_up, down = (stage.spans[0].count for stage in rank.layer_stages)
    heads = qkv // -(-spec.head_dim // TILE_ROWS)
    meetings = 9  # two a stage, since rows are shared out first, and one after attention
    rows = len(PROMPT[:20]) * spec.kv_heads
    tiles = heads + output + gate_up // 2 + down
    last = (
        tiles + 8
    )  # the last row goes on alone, which takes two meetings more and five fewer, and no look at rows
    # The embedding; settled after the chunk; the head, and settled on a token.
    return 1 + (spec.layers - 1) * (tiles + rows + meetings) + last + 1 + 2


def test_a_cancelled_prefill_stops_before_its_next_tile(checkpoint: Checkpoint) -> None:
    """Wherever the cancellation comes, not one tile more is computed; and what comes after has the same bits."""
    with cpu(checkpoint("llama"), workers=1) as backend:
        expected = ids(generate(backend, PROMPT[:20], 1))
        whole = backend.looks()
        assert whole == looks_in_prefill(backend)
        for look in (1, 2, 17, *range(40, whole, 97), whole - 2):
            backend.cancel_at(look)
            sequence = backend.new_sequence()
            generation = backend.start(Job(PROMPT[:20], 0, 9), sequence)
            assert list(generation) == []
            assert generation.finish_reason == "cancelled"
            assert sequence.length == (20 if look > whole - 3 else 0)  # the last looks come after the chunk
            assert backend.looks() == look
        backend.cancel_at(-1)
        assert ids(generate(backend, PROMPT[:20], 1)) == expected


@pytest.mark.parametrize(("workers", "tp"), [(3, None), (4, 2)])
def test_everybody_leaves_a_cancelled_prefill_by_the_next_meeting(
    checkpoint: Checkpoint, workers: int, tp: int | None
) -> None:
    with cpu(checkpoint("llama-tied"), workers=workers, tp=tp) as backend:
        expected = ids(generate(backend, PROMPT, 7))
        backend.cancel_at(10**9)
        assert ids(generate(backend, PROMPT, 7)) == expected
        stage = max(
            stage.spans[worker].count
            for rank in backend.plan.ranks
            for stage in (*rank.layer_stages, rank.head)
            for worker in range(len(stage.spans))
        )
        part = max(stage, len(PROMPT) * backend.spec.kv_heads)  # the most looks between two meetings
        for look in (1, 30, 111, 222):
            backend.cancel_at(look)
            generation = backend.start(Job(PROMPT, 0, 9), backend.new_sequence())
            assert list(generation) == []
            assert generation.finish_reason == "cancelled"
            assert look <= backend.looks() <= look + 2 * part
        backend.cancel_at(-1)
        assert ids(generate(backend, PROMPT, 7)) == expected


def test_a_cancellation_after_the_end_changes_nothing(checkpoint: Checkpoint) -> None:
    with cpu(checkpoint("llama"), workers=1) as backend:
        generate(backend, PROMPT[:20], 3)
        backend.cancel_at(
            backend.looks()
        )  # the last check: all workers know already that there is no next token
        generation = backend.start(Job(PROMPT[:20], 0, 3), backend.new_sequence())
        assert len(list(generation)) == 3
        assert generation.finish_reason == "length"


def test_one_job_at_a_time(checkpoint: Checkpoint) -> None:
    with cpu(checkpoint("llama"), context=100_000) as backend:
        running = backend.start(Job(PROMPT[:5], 0, 90_000), backend.new_sequence())
        with pytest.raises(BackendError, match="one job at a time"):
            backend.start(Job(PROMPT[:5], 0, 1), backend.new_sequence())
        running.cancel()
        assert len(list(running)) < 90_000
        assert running.finish_reason == "cancelled"


def test_an_abandoned_job_is_safe_to_close(checkpoint: Checkpoint) -> None:
    """The native side must not write into arrays that Python has freed."""
    with cpu(checkpoint("llama"), context=100_000) as backend:
        next(iter(backend.start(Job(PROMPT[:5], 0, 90_000), backend.new_sequence())))
        gc.collect()


START_AND_CLOSE = """
import sys
from pathlib import Path
from backends.cpu_cases import PROMPT, cpu
from monotape.backends.cpu import model
from monotape.backends.protocol import Job

model.DEADLINE_US = 3_600_000_000

for _ in range(12):
    with cpu(Path(sys.argv[1]), workers=5, context=1000) as backend:
        backend.start(Job(PROMPT[:5], 0, 900), backend.new_sequence())
"""


def test_closing_right_after_starting_leaves_nobody_waiting(checkpoint: Checkpoint) -> None:
    """A worker that wakes late still has to play the job: without it the others wait out their deadline, here an hour.

    In a process of its own, so that such a wait is a failure and not just a long test.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["src", "tests"])}
    command = [sys.executable, "-c", START_AND_CLOSE, str(checkpoint("llama"))]
    subprocess.run(command, check=True, timeout=PATIENCE_S, env=environment)


def test_interrupted_logits_end_before_their_arrays_go(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    from monotape.backends.cpu import backend as module

    real, calls = module._wait, []

    def interrupted(engine: int, seen: int) -> object:
        calls.append(seen)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return real(engine, seen)

    with cpu(checkpoint("llama"), context=160) as backend:
        monkeypatch.setattr(module, "_wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            backend.logits(PROMPT, backend.new_sequence())
        assert len(calls) > 1  # it waited for the workers before it let go
        assert len(generate(backend, count=4)) == 4


def test_more_threads_than_the_machine_gives_is_an_error_with_a_hint(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    from monotape.backends.cpu import backend as module
    from monotape.errors import ResourceError

    real = module.library

    class Refusing:
        def __getattr__(self, name: str) -> object:
            return (lambda *_: None) if name == "monotape_open" else getattr(real(), name)

    monkeypatch.setattr(module, "library", Refusing)
    with pytest.raises(ResourceError, match="no room for 2 workers"), cpu(checkpoint("llama")):
        pass


def test_cached_positions_are_not_computed_again(checkpoint: Checkpoint) -> None:
    with cpu(checkpoint("llama"), "q8") as backend:
        sequence = backend.new_sequence()
        first = ids(list(backend.start(Job(PROMPT[:20], 0, 10), sequence)))
        assert sequence.length == 29
        turn = (*PROMPT[:20], *first, *PROMPT[40:50])
        warm = ids(list(backend.start(Job(turn, 29, 10), sequence)))
        assert warm == ids(generate(backend, turn, 10))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8"])
def test_overflow_is_a_numerical_fault_and_the_backend_goes_on(checkpoint: Checkpoint, dtype: str) -> None:
    """In the 8-bit mode activations are integers, which cannot be NaN: their scale must carry it."""
    with cpu(checkpoint("llama"), dtype, context=64) as backend:
        sequence = backend.new_sequence()
        backend.logits(PROMPT[:4], sequence)
        sequence.ranks[0].values[:] = np.nan
        with pytest.raises(NumericalFault, match="position 5"):
            list(backend.start(Job(PROMPT[:5], 4, 3), sequence))
        assert len(generate(backend, count=8)) == 8


def test_a_context_can_be_filled_to_its_last_position(checkpoint: Checkpoint) -> None:
    with cpu(checkpoint("mistral-window"), context=160) as backend:
        generation = backend.start(Job(PROMPT, 0, 160 - len(PROMPT)), backend.new_sequence())
        assert len(list(generation)) == 160 - len(PROMPT)
        assert generation.finish_reason == "length"


def test_unknown_kernels_are_refused_by_name(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONOTAPE_ISA", "sse9")
    with pytest.raises(BackendUnavailable, match="sse9"), cpu(checkpoint("llama")):
        pass


def test_logits_that_were_cancelled_are_not_taken_for_whole_ones(checkpoint: Checkpoint) -> None:
    with cpu(checkpoint("llama")) as backend:
        sequence = backend.new_sequence()
        whole = backend.logits(PROMPT[:3], sequence)
        backend.cancel_at(40)
        with pytest.raises(RequestError, match="cancelled"):
            backend.logits(PROMPT[3:], sequence)
        backend.cancel_at(-1)
        assert sequence.length == 3
        sequence.truncate(0)
        assert np.array_equal(backend.logits(PROMPT[:3], sequence), whole)

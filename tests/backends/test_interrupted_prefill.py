"""A prefill that is cancelled half-way keeps what is complete, and a retry continues there with the same bits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from backends.cpu_cases import cpu, generate, ids, reference
from backends.rank_cases import make_eight
from lane_models import make_laneformer
from monotape.backends.cpu.backend import CpuBackend
from monotape.backends.cpu.sequence import CpuSequence
from monotape.backends.protocol import Job, Sampling, Token
from monotape.backends.reference import backend as reference_module
from monotape.errors import DeadlineFault
from real_models import embedded_model

pytestmark = pytest.mark.slow

Checkpoint = Callable[[str], Path]
PROMPT = tuple(np.random.default_rng(11).integers(3, 131, 151).tolist())  # several chunks, the last not full
SAMPLED = Sampling(temperature=0.9, top_p=0.9, repetition_penalty=1.2, seed=5)


def kv(sequence: CpuSequence, length: int) -> list[bytes]:
    """Every bit of the first `length` positions, rank by rank."""
    return [part[:, :, :length].tobytes() for rank in sequence.ranks for part in (rank.keys, rank.values)]


def answer(backend: CpuBackend, sequence: CpuSequence, cached: int) -> list[Token]:
    """What a client sees of a job, down to the last bit of the log-probabilities; times are left out."""
    job = Job(PROMPT, cached, 9, sampling=SAMPLED, logprobs=3)
    return [Token(token.id, 0, token.logprob, token.top_logprobs) for token in backend.start(job, sequence)]


def interrupted(backend: CpuBackend, look: int, cached: int = 0) -> CpuSequence | None:
    """A sequence whose prefill ended at this look of worker 0; None if the job had come to its answer by then."""
    sequence = backend.new_sequence()
    if cached:
        backend.logits(PROMPT[:cached], sequence)
    backend.cancel_at(look)
    generation = backend.start(Job(PROMPT, cached, 9), sequence)
    tokens = ids(list(generation))
    backend.cancel_at(-1)
    assert generation.finish_reason == "cancelled"
    return None if tokens else sequence


def check_every_stop(backend: CpuBackend, cached: int = 0, stops: int = 24) -> list[int]:
    """Cancels everywhere in a prefill: what is kept are whole chunks with the bits of an uninterrupted job."""
    whole = backend.new_sequence()
    if cached:
        backend.logits(PROMPT[:cached], whole)
    expected = answer(backend, whole, cached)
    generate(backend, PROMPT[cached:], 1)
    looks = backend.looks()
    lengths = []
    for look in np.linspace(1, looks, stops, dtype=int).tolist():
        if (sequence := interrupted(backend, look, cached)) is None:
            break
        done = sequence.length
        assert done == len(PROMPT) or (done - cached) % backend.plan.chunk == 0
        assert kv(sequence, done) == kv(whole, done)
        again = min(done, len(PROMPT) - 1)
        assert answer(backend, sequence, again) == expected
        assert kv(sequence, len(PROMPT) + 8) == kv(whole, len(PROMPT) + 8)
        lengths.append(done)
    assert len(lengths) > stops // 2
    assert lengths[0] == cached
    if len(backend.plan.ranks) == 1:  # with several ranks one may be behind by an unspecified amount
        assert lengths == sorted(lengths)
    return lengths


@pytest.mark.parametrize("cached", [0, 10])
@pytest.mark.parametrize(("dtype", "workers"), [("f32", 1), ("q8", 3)])
def test_whole_chunks_stay_wherever_it_ends(
    checkpoint: Checkpoint, dtype: str, workers: int, cached: int
) -> None:
    with cpu(checkpoint("qwen2"), dtype, workers, context=160) as backend:
        assert max(check_every_stop(backend, cached)) > cached


@pytest.mark.parametrize("ranks", [2, 4])
def test_of_several_ranks_the_slowest_says_what_stays(tmp_path: Path, ranks: int) -> None:
    """Words that come late let one rank end a chunk before another."""
    with cpu(make_eight("llama", tmp_path), workers=None, tp=ranks, context=160) as backend:
        backend.delay_words(300, seed=3)
        assert max(check_every_stop(backend, stops=12)) > 0


@pytest.mark.parametrize("speaks", [True, False])
def test_lanes_that_are_ahead_of_each_other(tmp_path: Path, speaks: bool) -> None:
    """Lanes that never exchange a sum meet only in the head: rank 0 may be a chunk ahead of the others."""
    make_laneformer(tmp_path, num_lanes=2, max_position_embeddings=160, use_comm=speaks)
    with cpu(tmp_path, workers=None, context=160) as backend:
        backend.delay_words(300 if speaks else 2_000_000, seed=4)
        check_every_stop(backend, stops=12)


def test_a_retry_computes_only_the_rest(checkpoint: Checkpoint) -> None:
    with cpu(checkpoint("llama"), workers=1, context=160) as backend:
        generate(backend, PROMPT, 1)
        all_looks = backend.looks()
        sequence = interrupted(backend, int(all_looks * 0.95))
        assert sequence is not None and sequence.length == 128
        list(backend.start(Job(PROMPT, sequence.length, 1), sequence))
        assert backend.looks() < all_looks / 2


def test_a_retry_may_be_interrupted_as_well(checkpoint: Checkpoint) -> None:
    with cpu(checkpoint("llama"), workers=2, context=160) as backend:
        whole = backend.new_sequence()
        expected = answer(backend, whole, 0)
        generate(backend, PROMPT[:64], 1)
        chunk = backend.looks()
        sequence = backend.new_sequence()
        lengths = [0]
        while sequence.length < 128:
            backend.cancel_at(chunk + 5)
            list(backend.start(Job(PROMPT, sequence.length, 9), sequence))
            lengths.append(sequence.length)
        backend.cancel_at(-1)
        assert lengths == [0, 64, 128]
        assert answer(backend, sequence, sequence.length) == expected


def test_a_cancellation_from_another_thread(checkpoint: Checkpoint) -> None:
    """As the server does it: whenever it comes, what is said to be there has the right bits."""
    with cpu(checkpoint("llama"), workers=2, context=4000) as backend:
        prompt = PROMPT * 20
        whole = backend.new_sequence()
        backend.logits(prompt, whole)
        sequence, kept = backend.new_sequence(), []
        for wait_s in (0.0, 0.002, 0.01, 0.02, 0.05):
            generation = backend.start(Job(prompt, sequence.length, 5), sequence)
            canceller = threading.Timer(wait_s, generation.cancel)
            canceller.start()
            tokens = list(generation)
            canceller.join()
            if tokens:
                break
            kept.append(sequence.length)
            assert kv(sequence, sequence.length) == kv(whole, sequence.length)
            sequence.truncate(min(sequence.length, len(prompt) - 1))
        assert kept == sorted(kept)


def test_how_far_it_has_come_is_known_on_the_way(checkpoint: Checkpoint) -> None:
    with cpu(checkpoint("llama"), workers=2, context=4000) as backend:
        prompt, sequence = PROMPT * 20, backend.new_sequence()
        backend.logits(prompt[:100], sequence)
        generation = backend.start(Job(prompt, 100, 2), sequence)
        seen = [generation.filled]
        while seen[-1] < len(prompt):
            if (now := generation.filled) != seen[-1]:
                seen.append(now)
        assert seen == sorted(seen) and seen[0] >= 100
        assert len(list(generation)) == 2
        assert generation.filled == len(prompt)
        judge = reference(checkpoint("llama"))
        plain = judge.start(Job(PROMPT[:9], 0, 2), judge.new_sequence())
        assert (plain.filled, len(list(plain)), plain.filled) == (0, 2, 9)


def test_a_fault_in_prefill_is_still_a_fault(tmp_path: Path) -> None:
    """KV that a stopped rank has written is not reused as a prefix."""
    with cpu(make_eight("llama", tmp_path), workers=None, tp=2, context=160) as backend:
        backend.stop_rank(1, 8, deadline_us=100_000)  # in the second chunk
        sequence = backend.new_sequence()
        generation = backend.start(Job(PROMPT, 0, 9), sequence)
        with pytest.raises(DeadlineFault):
            list(generation)
        assert (generation.finish_reason, sequence.length) == (None, 0)


class CancelAfter:
    """Counts the passes of a reference model and cancels the job in one of them."""

    def __init__(self, passes: int) -> None:
        self.left, self.cancel = passes, lambda: None

    def __call__(self, real: Callable[..., np.ndarray], tokens: Sequence[int], *more: object) -> np.ndarray:
        self.left -= 1
        if self.left == 0:
            self.cancel()
        return real(tokens, *more)


@pytest.fixture
def small_passes(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(reference_module, "PREFILL_ROWS", 32)
    return 32


@pytest.mark.parametrize("ranks", [None, 2])
@pytest.mark.parametrize("passes", [1, 2, 4])
def test_the_reference_keeps_whole_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_passes: int, passes: int, ranks: int | None
) -> None:
    backend = reference(make_eight("llama", tmp_path), context=160, tp=ranks)
    expected = [
        token.id for token in backend.start(Job(PROMPT, 0, 9, sampling=SAMPLED), backend.new_sequence())
    ]
    sequence = backend.new_sequence()
    generation = backend.start(Job(PROMPT, 0, 9, sampling=SAMPLED), sequence)
    counted, real = CancelAfter(passes), backend.step
    counted.cancel = generation.cancel
    monkeypatch.setattr(backend, "step", lambda tokens, *more: counted(real, tokens, *more))
    assert list(generation) == []
    assert (generation.finish_reason, sequence.length) == ("cancelled", passes * small_passes)
    rest = backend.start(Job(PROMPT, sequence.length, 9, sampling=SAMPLED), sequence)
    assert [token.id for token in rest] == expected


@pytest.mark.slow
def test_a_real_model_continues_with_the_same_bits() -> None:
    prompt = tuple(range(40, 300))
    with cpu(embedded_model(), "q8", 2, 512) as backend:
        whole = backend.new_sequence()
        expected = ids(list(backend.start(Job(prompt, 0, 8), whole)))
        generate(backend, prompt, 1)
        backend.cancel_at(backend.looks() * 2 // 3)
        sequence = backend.new_sequence()
        assert list(backend.start(Job(prompt, 0, 8), sequence)) == []
        backend.cancel_at(-1)
        assert 0 < sequence.length < len(prompt)
        assert kv(sequence, sequence.length) == kv(whole, sequence.length)
        assert ids(list(backend.start(Job(prompt, sequence.length, 8), sequence))) == expected
        assert kv(sequence, len(prompt)) == kv(whole, len(prompt))

"""Masks from the host while a job runs on the CPU: the tokens of one pass a token, forced ones computed together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from backends.cpu_cases import PROMPT, cpu
from backends.host_drafts import SAMPLINGS, predicting
from backends.host_masks import random_bits
from backends.rank_cases import make_eight
from backends.test_cpu_stored import MIXED
from lane_models import SETTINGS, make_laneformer
from monotape.backends.cpu.backend import CpuBackend, MaskedCpuGeneration
from monotape.backends.protocol import Bits, Job, KvSequence, Sampling, Token
from monotape.engine.constrained import ConstrainedGeneration
from monotape.engine.constraint import only, packed, unpacked
from monotape.engine.guided import GuidedGeneration
from monotape.errors import DeadlineFault
from weights.gguf_models import VOCAB as STORED_VOCAB
from weights.gguf_models import write_wide_model

Checkpoint = Callable[[str], Path]
VOCAB, TOKENS = 131, 40
FREE = {0, 7, 8, 9, 21}  # numbers of tokens that are chosen; the others are forced
DRAWN = Sampling(temperature=1.5, seed=3)


def choice(vocab: int, seed: int) -> Bits:
    """A third of the lower half."""
    half = unpacked(random_bits(vocab // 2, seed), vocab // 2)
    return packed(np.concatenate([half, np.zeros(vocab - vocab // 2, np.bool_)]))


class Script:
    """Forces tokens of the vocabulary's upper half; for some numbers it leaves a choice of the lower half."""

    def __init__(
        self,
        free: Sequence[int] | set[int] = FREE,
        vocab: int = VOCAB,
        *,
        length: int = 1000,
        late_s: float = 0,
    ) -> None:
        self.number = 0
        self._free, self._vocab, self._length, self._late_s = set(free), vocab, length, late_s

    def token(self, number: int) -> int:
        half = self._vocab // 2
        return half + 7 * number % half

    def forced(self) -> list[int]:
        end = min((free for free in self._free if free >= self.number), default=self._length)
        return [self.token(number) for number in range(self.number, min(end, self._length))]

    def allowed(self) -> Bits:
        time.sleep(self._late_s)
        if self.number >= self._length:
            return packed(np.zeros(self._vocab, np.bool_))
        if self.number in self._free:
            return choice(self._vocab, self.number)
        return only(self.token(self.number), self._vocab)

    def accept(self, token_id: int) -> None:
        self.number += 1

    def cancel(self) -> None:
        """Nothing takes long here."""


def guided(
    backend: CpuBackend, job: Job, script: Script, sequence: KvSequence | None = None
) -> tuple[list[Token], GuidedGeneration]:
    kept = backend.new_sequence() if sequence is None else sequence
    generation = GuidedGeneration(backend, job, kept, script, backend.spec.vocab)
    return list(generation), generation


def check(backend: CpuBackend, job: Job, vocab: int = VOCAB, **script: float) -> list[Token]:
    """Compares a guided job with one whose every token the reference's sampler chooses, off a pass of its own."""
    tokens, generation = guided(backend, job, Script(vocab=vocab, late_s=script.get("late_s", 0)))
    expected = ConstrainedGeneration(backend, job, backend.new_sequence(), Script(vocab=vocab))
    for token, other in zip(tokens, wanted := list(expected), strict=True):
        assert token.id == other.id
        if job.logprobs is not None:
            assert token.logprob == pytest.approx(other.logprob, rel=1e-5)
            assert [best for best, _ in token.top_logprobs] == [best for best, _ in other.top_logprobs]
    assert wanted and generation.finish_reason == expected.finish_reason
    return tokens


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("name", "dtype"), [("llama", "f32"), ("qwen2", "bf16"), ("llama-tied", "q8")])
def test_the_tokens_of_one_pass_a_token(checkpoint: Checkpoint, name: str, dtype: str, sampling: str) -> None:
    with cpu(checkpoint(name), dtype) as backend:
        check(backend, Job(PROMPT[:9], 0, TOKENS, **SAMPLINGS[sampling]))


@pytest.mark.parametrize("name", ["mistral-window", "qwen2-mixed-windows", "gpt-oss", "mixtral"])
def test_windows_sinks_and_experts(checkpoint: Checkpoint, name: str) -> None:
    with cpu(checkpoint(name), "f16") as backend:
        check(backend, Job(PROMPT[:9], 0, TOKENS, sampling=DRAWN))


@pytest.mark.parametrize("kinds", [kinds for kinds, _ in MIXED.values()])
def test_codes_as_they_are_stored(tmp_path: Path, kinds: dict[str, Kind]) -> None:
    prompt = tuple(token % STORED_VOCAB for token in PROMPT[:9])
    with cpu(write_wide_model(tmp_path / "model.gguf", kinds), "auto", context=64) as backend:
        check(backend, Job(prompt, 0, TOKENS, sampling=DRAWN), STORED_VOCAB)


def test_any_number_of_workers_and_late_masks(checkpoint: Checkpoint) -> None:
    job, found = Job(PROMPT, 0, TOKENS, sampling=DRAWN), []
    for workers, late_s in ((1, 0.0), (2, 0.02), (5, 0.0)):
        with cpu(checkpoint("llama"), "q8", workers) as backend:
            found.append([token.id for token in check(backend, job, late_s=late_s)])
    assert found[0] == found[1] == found[2]


def test_ranks(tmp_path: Path) -> None:
    folder = make_eight("llama", tmp_path)
    for ranks in (2, 4):
        with cpu(folder, workers=4, tp=ranks) as backend:
            backend.delay_words(20_000, seed=ranks)
            check(backend, Job(PROMPT[:9], 0, TOKENS, sampling=DRAWN))


@pytest.mark.parametrize("name", ["tensor parallel", "delay 3", "summed head", "concatenated head"])
def test_lanes(tmp_path: Path, name: str) -> None:
    make_laneformer(tmp_path, **SETTINGS[name] | {"num_lanes": 2})
    with cpu(tmp_path, workers=None) as backend:
        check(backend, Job(PROMPT[:9], 0, TOKENS, sampling=DRAWN))


def looks_of(backend: CpuBackend, tokens: int, *, forced: bool) -> int:
    """Of a job whose tokens are forced, told at once before the first is, or chosen among two each."""
    generation = backend.start_masked(Job(PROMPT, 0, tokens, drafts=False), backend.new_sequence())
    ids = [3 + number for number in range(tokens)]
    if forced:
        generation.expect(ids)
    for token_id in ids:
        generation.allow(only(token_id, VOCAB) | (0 if forced else only(100, VOCAB)))
    told = [token.id for token in generation]
    assert len(told) == tokens and (told == ids or not forced)
    assert generation.drafted == generation.accepted <= (tokens - 1 if forced else 0)
    return backend.looks()


def test_forced_tokens_share_a_pass(checkpoint: Checkpoint) -> None:
    """Passes are counted by what workers do in them: looks at the cancel flag, one for each tile."""
    with cpu(checkpoint("llama"), workers=1) as backend:
        prompt = looks_of(backend, 1, forced=True)
        one_by_one = looks_of(backend, TOKENS, forced=False) - prompt
        together = looks_of(backend, TOKENS, forced=True) - prompt
        assert 0 < together < one_by_one / 8


def test_runs_longer_than_a_pass_and_than_the_ring_of_masks(checkpoint: Checkpoint) -> None:
    script = {0, 101}
    with cpu(checkpoint("llama")) as backend:
        job = Job(PROMPT[:9], 0, 110, sampling=DRAWN)
        tokens, _ = guided(backend, job, Script(script))
        expected = ConstrainedGeneration(backend, job, backend.new_sequence(), Script(script))
        assert [token.id for token in tokens] == [token.id for token in expected]


@pytest.mark.parametrize("end", range(19, 26))
def test_it_ends_anywhere_and_its_cache_goes_on(checkpoint: Checkpoint, end: int) -> None:
    """By its length, by a forced stop id, and by a text that is complete."""
    with cpu(checkpoint("llama")) as backend:
        stop = Script().token(end - 1)
        for job, length in (
            (Job(PROMPT[:9], 0, end), 1000),
            (Job(PROMPT[:9], 0, TOKENS, stop_ids=() if end - 1 in FREE else (stop,)), end),
            (Job(PROMPT[:9], 0, TOKENS), end),
        ):
            sequence = backend.new_sequence()
            tokens, generation = guided(backend, job, Script(length=length), sequence)
            ids = [token.id for token in tokens]
            assert len(ids) == end and generation.finish_reason == ("length" if length == 1000 else "stop")
            assert len(PROMPT[:9]) <= sequence.length <= len(PROMPT[:9]) + end
            turn = (*PROMPT[:9], *ids, *PROMPT[:3])
            second = list(backend.start(Job(turn, sequence.length, 6), sequence))
            fresh = list(backend.start(Job(turn, 0, 6), backend.new_sequence()))
            assert [token.id for token in second] == [token.id for token in fresh]


@pytest.mark.parametrize("length", [0, 1, 3])
def test_a_text_that_is_complete_at_once(checkpoint: Checkpoint, length: int) -> None:
    with cpu(checkpoint("llama")) as backend:
        tokens, generation = guided(backend, Job(PROMPT[:9], 0, 9), Script(length=length))
        assert len(tokens) == length and generation.finish_reason == "stop"


def test_drafts_are_checked_under_masks(checkpoint: Checkpoint) -> None:
    free = range(0, 60, 2)
    job = Job(PROMPT[:9], 0, 60, sampling=DRAWN, logprobs=1)  # with log-probabilities nothing is forced
    with cpu(checkpoint("llama")) as backend:
        plain, _ = guided(backend, job, Script(free))
        backend.check_all_drafts()
        for wrong in (0.0, 0.3):
            predicted = predicting(job, [token.id for token in plain], wrong, VOCAB)
            tokens, generation = guided(backend, predicted, Script(free))
            told = [(token.id, token.logprob, token.top_logprobs) for token in tokens]
            assert told == [(token.id, token.logprob, token.top_logprobs) for token in plain]
            assert generation.accepted > 10


def test_cancelled_anywhere_it_keeps_the_tokens_told(checkpoint: Checkpoint) -> None:
    job = Job(PROMPT[:9], 0, TOKENS, sampling=DRAWN)
    with cpu(checkpoint("llama")) as backend:
        whole = [token.id for token in check(backend, job)]
        guided(backend, job, Script())
        for look in range(1, backend.looks(), 23):
            backend.cancel_at(look)
            sequence = backend.new_sequence()
            tokens, generation = guided(backend, job, Script(), sequence)
            backend.cancel_at(-1)
            ids = [token.id for token in tokens]
            assert ids == whole[: len(ids)]
            assert generation.finish_reason == ("length" if len(ids) == TOKENS else "cancelled")
            turn = (*job.prompt, *ids, *PROMPT[:3])
            second = list(backend.start(Job(turn, sequence.length, 3), sequence))
            assert [token.id for token in second] == [
                token.id for token in backend.start(Job(turn, 0, 3), backend.new_sequence())
            ]


def test_a_mask_that_never_comes_is_named_and_the_next_request_served(checkpoint: Checkpoint) -> None:
    with cpu(checkpoint("llama")) as backend:
        backend.wait_for_masks(500_000)
        generation = backend.start_masked(Job(PROMPT[:9], 0, 9), backend.new_sequence())
        assert isinstance(generation, MaskedCpuGeneration)
        generation.allow(only(5, VOCAB))
        generation.allow(random_bits(VOCAB, 1))
        with pytest.raises(DeadlineFault, match="no mask for the choice of a token, at position 11"):
            list(generation)
        assert generation.await_token(1) is not None and generation.await_token(2) is None
        assert len(list(backend.start(Job(PROMPT[:9], 0, 5), backend.new_sequence()))) == 5


def two_tokens(backend: CpuBackend, late_s: float) -> int:
    """Nanoseconds, from outside, of a job whose second mask is given that long after the first token."""
    began_ns = time.monotonic_ns()
    generation = backend.start_masked(Job(PROMPT[:9], 0, 2), backend.new_sequence())
    generation.allow(random_bits(VOCAB, 1))
    assert generation.await_token(0) is not None
    time.sleep(late_s)
    generation.allow(random_bits(VOCAB, 2))
    assert len(list(generation)) == 2
    return time.monotonic_ns() - began_ns


def test_a_pass_is_not_longer_because_its_mask_is_late(checkpoint: Checkpoint) -> None:
    """A job is longer than its pass and its waits together; a wait that counted as a pass would be counted twice."""
    for late_s in (0.1, 1, 10):  # until a loaded machine waits for masks most of the time
        with cpu(checkpoint("llama"), workers=1) as backend:
            took_ns = two_tokens(backend, late_s)
            alone_ns, _, waited_ns = backend.pass_times_ns()
        if 2 * waited_ns > took_ns:
            break
    assert 0 < alone_ns <= took_ns - waited_ns < waited_ns


def test_a_job_that_is_not_masked_needs_no_masks_after_one_that_is(checkpoint: Checkpoint) -> None:
    with cpu(checkpoint("llama")) as backend:
        job = Job(PROMPT[:9], 0, 12, sampling=DRAWN)
        before = [token.id for token in backend.start(job, backend.new_sequence())]
        guided(backend, job, Script(length=5))
        assert [token.id for token in backend.start(job, backend.new_sequence())] == before

"""Several rows a pass on the CPU: every token, log-probability and key is that of one row a pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from backends.cpu_cases import PROMPT, cpu
from backends.host_drafts import SAMPLINGS, Answer, choices_of, plain, predicting
from backends.rank_cases import make_eight
from backends.test_cpu_stored import MIXED, all_of
from lane_models import SETTINGS, make_laneformer
from monotape.backends.cpu.backend import CpuBackend
from monotape.backends.cpu.sequence import CpuSequence
from monotape.backends.protocol import Job, KvSequence, Sampling, drafts_of
from weights.gguf_models import VOCAB as STORED_VOCAB
from weights.gguf_models import write_wide_model

Checkpoint = Callable[[str], Path]
VOCAB, CONTEXT, TOKENS, ROWS = 131, 160, 30, 4
WRONG = (0.0, 0.2, 1.0)  # shares of a predicted text that are other tokens
DRAWN = Sampling(temperature=1.5, seed=3)  # repeats little, so that drafts come from the prediction


def answer(backend: CpuBackend, job: Job, sequence: KvSequence | None = None) -> Answer:
    generation = backend.start(job, backend.new_sequence() if sequence is None else sequence)
    tokens = list(generation)
    return Answer(choices_of(tokens), generation.finish_reason, *drafts_of(generation))


def check(backend: CpuBackend, job: Job, vocab: int = VOCAB, wrong: Sequence[float] = WRONG) -> Answer:
    """Compares answers with every draft checked to the one without drafts, which is returned."""
    expected = answer(backend, plain(job))
    assert (expected.drafted, expected.accepted) == (0, 0)
    backend.check_all_drafts()
    for share in wrong:
        got = answer(backend, predicting(job, expected.ids, share, vocab))
        assert got.told == expected.told, f"{share} of the prediction are wrong"
        assert got.drafted >= got.accepted >= (share == 0)
    return expected


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("name", "dtype"), [("llama", "f32"), ("qwen2", "bf16"), ("llama-tied", "q8")])
def test_drafts_change_no_token(checkpoint: Checkpoint, name: str, dtype: str, sampling: str) -> None:
    with cpu(checkpoint(name), dtype) as backend:
        check(backend, Job(PROMPT[:9], 0, TOKENS, **SAMPLINGS[sampling]))


@pytest.mark.parametrize("name", ["mistral-window", "qwen2-mixed-windows", "gpt-oss", "mixtral"])
def test_windows_sinks_and_experts(checkpoint: Checkpoint, name: str) -> None:
    with cpu(checkpoint(name), "f16") as backend:
        check(backend, Job(PROMPT[:9], 0, TOKENS, sampling=DRAWN, logprobs=1))


@pytest.mark.parametrize(
    "kinds", [all_of(Kind.Q4_0), all_of(Kind.Q5_K), *(kinds for kinds, _ in MIXED.values())]
)
def test_codes_as_they_are_stored(tmp_path: Path, kinds: dict[str, Kind]) -> None:
    prompt = tuple(token % STORED_VOCAB for token in PROMPT[:9])
    path = write_wide_model(tmp_path / "model.gguf", kinds)
    with cpu(path, "auto", context=64) as backend:
        check(backend, Job(prompt, 0, TOKENS, sampling=DRAWN, logprobs=1), STORED_VOCAB)


@pytest.mark.parametrize("start", range(124, 129))
def test_rows_on_both_sides_of_a_block_of_the_cache(checkpoint: Checkpoint, start: int) -> None:
    job = Job((PROMPT * 2)[:start], 0, 20, sampling=DRAWN, logprobs=0)
    for name in ("llama", "mistral-window"):
        with cpu(checkpoint(name)) as backend:
            check(backend, job, wrong=(0.0, 0.2))


def test_any_number_of_workers(checkpoint: Checkpoint) -> None:
    job, found = Job(PROMPT[:9], 0, TOKENS, sampling=DRAWN, logprobs=2), []
    for workers in (1, 2, 5):
        with cpu(checkpoint("llama"), "q8", workers) as backend:
            found.append(check(backend, job).told)
    assert found[0] == found[1] == found[2]


def test_ranks(tmp_path: Path) -> None:
    folder = make_eight("llama", tmp_path)
    for ranks, workers in ((2, 4), (4, 4)):
        with cpu(folder, workers=workers, tp=ranks) as backend:
            backend.delay_words(20_000, seed=ranks)
            check(backend, Job(PROMPT[:9], 0, 16, sampling=DRAWN, logprobs=2))


@pytest.mark.parametrize("name", ["tensor parallel", "delay 3", "summed head", "concatenated head"])
def test_lanes(tmp_path: Path, name: str) -> None:
    make_laneformer(tmp_path, **SETTINGS[name] | {"num_lanes": 2})
    with cpu(tmp_path, workers=None) as backend:
        check(backend, Job(PROMPT[:9], 0, 16, sampling=DRAWN, logprobs=2))


def test_a_right_prediction_saves_passes(checkpoint: Checkpoint) -> None:
    """Passes are counted by what workers do in them: looks at the cancel flag, one for each tile."""
    job = Job(PROMPT[:9], 0, 1 + 7 * ROWS, sampling=DRAWN)
    with cpu(checkpoint("llama"), workers=1) as backend:
        expected = check(backend, job, wrong=())
        passes = backend.looks()
        got = answer(backend, predicting(job, expected.ids, 0.0, VOCAB))
        assert got.told == expected.told
        assert got.drafted == got.accepted == 7 * (ROWS - 1)
        assert backend.looks() < passes / 2


def test_a_text_that_repeats_itself_needs_no_prediction(checkpoint: Checkpoint) -> None:
    with cpu(checkpoint("llama")) as backend:
        job = Job(
            PROMPT[:9], 0, 100, sampling=Sampling(logit_bias=((7, 100.0), (8, 99.0)), frequency_penalty=0.5)
        )
        expected = answer(backend, plain(job))
        backend.check_all_drafts()
        got = answer(backend, job)
        assert got.told == expected.told and got.accepted > 20


def test_ends_in_the_middle_of_a_pass(checkpoint: Checkpoint) -> None:
    job = Job(PROMPT[:9], 0, 40, sampling=DRAWN, logprobs=1)
    with cpu(checkpoint("llama")) as backend:
        whole = check(backend, job, wrong=())
        for end in range(20, 28):
            got = answer(backend, predicting(replace(job, max_tokens=end), whole.ids, 0.0, VOCAB))
            assert got.choices == whole.choices[:end] and got.finish_reason == "length" and got.accepted > 0
            first = whole.ids.index(whole.ids[end])
            stopping = replace(job, stop_ids=(whole.ids[end],))
            got = answer(backend, predicting(stopping, whole.ids, 0.0, VOCAB))
            assert got.choices == whole.choices[: first + 1] and got.finish_reason == "stop"


@pytest.mark.parametrize("start", range(CONTEXT - 9, CONTEXT))
def test_ends_with_the_context(checkpoint: Checkpoint, start: int) -> None:
    """No row goes past the last position but one: the last token has no row."""
    job = Job((PROMPT * 3)[:start], 0, CONTEXT - start, sampling=DRAWN)
    with cpu(checkpoint("llama"), context=CONTEXT) as backend:
        expected = answer(backend, plain(job))
        backend.check_all_drafts()
        sequence = backend.new_sequence()
        sequence.reserve(CONTEXT)
        for rank in sequence.ranks:
            rank.keys[:] = rank.values[:] = 7
        got = answer(backend, predicting(job, expected.ids, 0.0, VOCAB), sequence)
        assert got.told == expected.told and len(got.ids) == CONTEXT - start
        for rank in sequence.ranks:
            assert (rank.keys[:, :, CONTEXT - 1 :] == 7).all() and (
                rank.values[:, :, CONTEXT - 1 :] == 7
            ).all()
            assert (rank.keys[:, :, : CONTEXT - 1] != 7).any()


def test_the_cache_holds_what_one_row_a_pass_leaves(checkpoint: Checkpoint) -> None:
    """So a second turn, which begins with these positions, is the same too."""
    job = Job(PROMPT[:9], 0, TOKENS, sampling=DRAWN)
    with cpu(checkpoint("llama")) as backend:
        expected = check(backend, job, wrong=())
        kept: list[CpuSequence] = []
        for asked in (plain(job), *(predicting(job, expected.ids, share, VOCAB) for share in WRONG)):
            kept.append(backend.new_sequence())
            answer(backend, asked, kept[-1])
        length = len(job.prompt) + TOKENS - 1
        for sequence in kept:
            assert sequence.length == length
            for own, first in zip(sequence.ranks, kept[0].ranks, strict=True):
                assert np.array_equal(own.keys[:, :, :length], first.keys[:, :, :length])
                assert np.array_equal(own.values[:, :, :length], first.values[:, :, :length])
        second = Job((*job.prompt, *expected.ids[:-1], *PROMPT[:3]), length, 8, sampling=DRAWN)
        assert len({answer(backend, second, sequence).told for sequence in kept}) == 1


def test_cancelled_anywhere_it_keeps_the_tokens_told(checkpoint: Checkpoint) -> None:
    job = Job(PROMPT[:9], 0, TOKENS, sampling=DRAWN)
    with cpu(checkpoint("llama")) as backend:
        whole = check(backend, job, wrong=())
        predicted = predicting(job, whole.ids, 0.2, VOCAB)
        answer(backend, predicted)
        for look in range(1, backend.looks(), 17):
            backend.cancel_at(look)
            sequence = backend.new_sequence()
            got = answer(backend, predicted, sequence)
            backend.cancel_at(-1)
            assert got.choices == whole.choices[: len(got.ids)]
            if len(got.ids) == TOKENS:
                continue  # it had ended by itself
            assert got.finish_reason == "cancelled"
            rest = Job((*job.prompt, *got.ids), sequence.length, TOKENS - len(got.ids), sampling=DRAWN)
            assert answer(backend, rest, sequence).ids == whole.ids[len(got.ids) :]


def test_the_gate_changes_no_token(checkpoint: Checkpoint) -> None:
    """It goes by the clock, so runs differ in their drafts and in nothing else."""
    with cpu(checkpoint("llama"), "q8") as backend:
        for seed in range(4):
            job = Job(PROMPT[:9], 0, 60, sampling=Sampling(temperature=0.3, seed=seed), logprobs=1)
            expected = answer(backend, plain(job))
            for wrong in WRONG:
                assert answer(backend, predicting(job, expected.ids, wrong, VOCAB)).told == expected.told
            assert answer(backend, job).told == expected.told

"""The kernel's sampler without a GPU: its own headers, run by fibers in random order, agree with the reference."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from monotape.backends.cpu.build import find_compiler
from monotape.backends.cuda.compilation import KERNELS
from monotape.backends.cuda.sampling import MOST_LOGPROBS, has_penalties, is_plain, sampling_struct
from monotape.backends.protocol import Job, Sampling
from monotape.backends.reference.sampler import choose, logprobs
from monotape.errors import RequestError

Floats = NDArray[np.float32]
SOURCE = Path(__file__).parent / "sampler_on_host.cpp"
FLAGS = (
    "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-ffp-contract=off", "-shared", "-fPIC",
)  # fmt: skip
STEPS = 3

SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top-k": {"top_k": 4},
    "top-k of as many as workers": {"top_k": 5},
    "top-k of more than workers": {"top_k": 20},
    "top-k of more than are gathered": {"top_k": 97},
    "top-k of all but one": {"top_k": 1002},
    "top-p": {"top_p": 0.8},
    "top-p of nearly all": {"top_p": 0.9995, "temperature": 3.0},
    "top-p of one": {"top_p": 0.0001},
    "min-p": {"min_p": 0.05},
    "min-p of one": {"min_p": 1.0},
    "top-k and top-p": {"top_k": 5, "top_p": 0.9},
    "many top-k and top-p": {"top_k": 300, "top_p": 0.9, "temperature": 2.0},
    "all filters": {"top_k": 60, "top_p": 0.95, "min_p": 0.01},
    "cold": {"temperature": 0.02, "top_p": 0.99},
    "hot": {"temperature": 50.0, "top_k": 700, "top_p": 0.7},
    "greedy with penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    "penalties": {"repetition_penalty": 1.7, "presence_penalty": 0.4, "frequency_penalty": 0.3, "top_k": 7},
    "bias": {"logit_bias": ((990, 9.0), (9, -2.5), (4, 0.5), (4, 3.1), (1002, 1.0)), "top_p": 0.6},
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("sampler") / "sampler.so"
    command = [*(find_compiler() or ["c++"]), *FLAGS, f"-I{KERNELS}", str(SOURCE), "-o", str(path)]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(path))
    loaded.choose_on_host.restype = ctypes.c_char_p
    return loaded


class Chosen:
    """What the kernel's sampler makes of rows of logits."""

    def __init__(self, library: ctypes.CDLL, job: Job, logits: Floats, seed: int = 0) -> None:
        steps, vocab = logits.shape
        pairs = sorted(job.sampling.logit_bias, key=lambda pair: pair[0])
        adjusted, counts = np.full(vocab, np.nan, np.float32), np.full(vocab, 77, np.uint32)
        bias_ids, bias_values = (
            np.array([i for i, _ in pairs], np.int32),
            np.array([b for _, b in pairs], np.float32),
        )
        struct = sampling_struct(job, vocab)
        count = max(0, struct.top_logprobs)
        self.ids = np.full(steps, -1, np.int32)
        self.logprobs = np.full(steps, np.nan, np.float32)
        self.top_ids, self.top_values = (
            np.full((steps, count), -1, np.int32),
            np.zeros((steps, count), np.float32),
        )
        for name, array in (
            ("adjusted", adjusted), ("bias_ids", bias_ids), ("bias_values", bias_values),
            ("logprobs", self.logprobs), ("top_ids", self.top_ids), ("top_values", self.top_values),
        ):  # fmt: skip
            setattr(struct, name, array.ctypes.data)
        if has_penalties(job):
            struct.counts = counts.ctypes.data
        prompt, stops = np.array(job.prompt, np.int32), np.array(job.stop_ids, np.int32)
        rows, known = np.ascontiguousarray(logits), ctypes.c_int(0)
        fault = library.choose_on_host(
            ctypes.byref(struct), ctypes.c_void_p(rows.ctypes.data), vocab, steps,
            ctypes.c_void_p(prompt.ctypes.data), len(prompt), ctypes.c_void_p(stops.ctypes.data), len(stops),
            seed, ctypes.c_void_p(self.ids.ctypes.data), ctypes.byref(known),
        )  # fmt: skip
        assert fault is None, fault
        self.known = known.value  # steps after whose filters every worker knew the winner


def expected(job: Job, logits: Floats) -> list[int]:
    output: list[int] = []
    for step, row in enumerate(logits):
        banned = job.stop_ids if step < job.min_tokens else ()
        output.append(choose(row, job.prompt, output, len(job.prompt) + step, job.sampling, banned))
    return output


def logits_of(kind: str, vocab: int, steps: int = STEPS) -> Floats:
    random = np.random.default_rng(vocab + len(kind))
    values = random.standard_normal((steps, vocab)) * 3
    if kind == "one worker has the best":
        values[:, 8:60] += 9
    elif kind == "few values":
        values = np.round(values / 4)
    elif kind == "all equal":
        values[:] = -1.25
    elif kind == "huge":
        values *= 1e6
    elif kind == "banned":
        values[:, random.random(vocab) < 0.9] = -np.inf
    return values.astype(np.float32)


KINDS = ("normal", "one worker has the best", "few values", "all equal", "huge", "banned")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_it_chooses_what_the_reference_chooses(library: ctypes.CDLL, setting: str, kind: str) -> None:
    logits = logits_of(kind, 1003)
    sampling = Sampling(**{"temperature": 0.8, "seed": 0x1234567890ABCDEF, **SETTINGS[setting]})
    job = Job((3, 990, 12, 12), 0, STEPS, sampling=sampling)
    assert Chosen(library, job, logits).ids.tolist() == expected(job, logits)


@pytest.mark.parametrize(
    ("filters", "known"),
    [
        ({"top_k": 5}, STEPS),
        ({"top_k": 5, "top_p": 0.9}, STEPS),
        ({"top_p": 0.9, "temperature": 50.0}, 0),
        ({}, 0),
    ],
)
def test_who_has_gathered_all_that_is_left_needs_no_election(
    library: ctypes.CDLL, filters: dict[str, float], known: int
) -> None:
    job = Job((3,), 0, STEPS, sampling=Sampling(**{"temperature": 0.8, "seed": 5, **filters}))
    assert Chosen(library, job, logits_of("normal", 1003)).known == known


@pytest.mark.parametrize("vocab", [8, 22, 31, 40, 515])
def test_small_vocabularies_leave_workers_without_tokens(library: ctypes.CDLL, vocab: int) -> None:
    logits = logits_of("normal", vocab, 6)
    for top_k, top_p in ((3, 1.0), (4, 0.9), (5, 0.3), (7, 0.7), (0, 0.9)):
        job = Job((1,), 0, 6, sampling=Sampling(temperature=1.1, top_k=top_k, top_p=top_p, seed=vocab))
        assert Chosen(library, job, logits, seed=vocab).ids.tolist() == expected(job, logits)


def test_many_draws_from_one_row(library: ctypes.CDLL) -> None:
    logits = np.repeat(logits_of("normal", 1003, 1), 60, axis=0)
    job = Job((5,), 0, 60, sampling=Sampling(temperature=1.0, top_k=50, top_p=0.95, seed=9))
    ids = Chosen(library, job, logits).ids.tolist()
    assert ids == expected(job, logits)
    assert len(set(ids)) > 5


def test_a_range_may_end_exactly_at_the_cut(library: ctypes.CDLL) -> None:
    logits = np.full((2, 2480), -1.25, np.float32)
    logits[1, 121] -= 0.7
    job = Job((1, 2, 3, 4, 5), 0, 2, sampling=Sampling(temperature=1.0, top_k=1000, seed=3787584942126438584))
    assert Chosen(library, job, logits).ids.tolist() == expected(job, logits)


def test_stop_ids_cannot_be_chosen_too_early(library: ctypes.CDLL) -> None:
    logits = logits_of("normal", 203, 5)
    logits[:, [7, 200]] = 50
    for temperature in (0.0, 0.7):
        sampling = Sampling(temperature=temperature, top_p=0.9, repetition_penalty=1.1)
        job = Job((2, 7), 0, 5, stop_ids=(200, 7), min_tokens=3, sampling=sampling)
        ids = Chosen(library, job, logits).ids.tolist()
        assert ids == expected(job, logits)
        assert not set(ids[:3]) & {7, 200} and set(ids[3:]) <= {7, 200}


@pytest.mark.parametrize("kind", ["normal", "one worker has the best", "few values", "all equal"])
@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_log_probabilities(library: ctypes.CDLL, kind: str, count: int) -> None:
    logits = logits_of(kind, 1003)
    sampling = Sampling(temperature=0.9, top_k=3, presence_penalty=1.0, seed=3)
    chosen = Chosen(library, Job((3, 4), 0, STEPS, sampling=sampling, logprobs=count), logits)
    for step, token in enumerate(chosen.ids.tolist()):
        value, top = logprobs(logits[step], token, count)
        np.testing.assert_allclose(chosen.logprobs[step], value, rtol=2**-23)
        assert chosen.top_ids[step].tolist() == [token for token, _ in top]
        np.testing.assert_allclose(chosen.top_values[step], [value for _, value in top], rtol=2**-23)


def test_more_log_probabilities_than_tokens(library: ctypes.CDLL) -> None:
    logits = logits_of("normal", 21, 1)
    chosen = Chosen(library, Job((3,), 0, 1, logprobs=30), logits)
    assert chosen.top_ids[0].tolist() == [token for token, _ in logprobs(logits[0], 0, 30)[1]]


def test_plain_jobs_take_the_short_path() -> None:
    assert is_plain(Job((1,), 0, 5, sampling=Sampling(top_k=3, seed=4)))
    assert is_plain(Job((1,), 0, 5, min_tokens=4))
    assert not is_plain(Job((1,), 0, 5, stop_ids=(2,), min_tokens=4))
    assert not is_plain(Job((1,), 0, 5, logprobs=0))
    assert not is_plain(Job((1,), 0, 5, sampling=Sampling(logit_bias=((3, 1.0),))))
    assert not any(bytes(sampling_struct(Job((1,), 0, 5), 100)))


def test_too_many_log_probabilities_are_refused() -> None:
    with pytest.raises(RequestError, match="129 log-probabilities"):
        sampling_struct(Job((1,), 0, 5, logprobs=MOST_LOGPROBS + 1), 1000)

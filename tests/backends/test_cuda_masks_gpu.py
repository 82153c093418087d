"""Masks from the host on a Hopper GPU: python -m pytest -m gpu tests/backends/test_cuda_masks_gpu.py"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.cpu_cases import ids
from backends.host_masks import SAMPLINGS, check, random_bits
from families import Case, make_checkpoint
from monotape.backends.cuda.backend import DEADLINE_NS, CudaBackend
from monotape.backends.cuda.detection import why_not
from monotape.backends.cuda.driver import processors
from monotape.backends.cuda.generation import CudaGeneration, MaskedCudaGeneration
from monotape.backends.cuda.ranked import RankedCudaBackend
from monotape.backends.protocol import Bits, Job, Token
from monotape.compiler.gpu import gpu_plan
from monotape.engine.constrained import ConstrainedGeneration
from monotape.engine.guided import GuidedGeneration
from monotape.errors import DeadlineFault, RequestError
from monotape.models.registry import spec_from_config
from monotape.weights.open import open_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_not() is not None, reason=why_not() or "there is no GPU"),
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),
]

CONTEXT = 512
VOCAB = 4099
FIELDS = {"head_dim": 32, "hidden_size": 96, "vocab_size": VOCAB, "max_position_embeddings": 600}
PROMPT = tuple(np.random.default_rng(5).integers(3, 131, 40).tolist())
TOKENS = 120


class Listed:
    """A constraint whose masks are known ahead, each after `wait_s`; complete after `length` tokens."""

    def __init__(self, wait_s: float = 0, length: int | None = None, vocab: int = VOCAB) -> None:
        self._given, self._wait_s, self._length, self._vocab = 0, wait_s, length, vocab
        self.gone = threading.Event()

    def forced(self) -> list[int]:
        return []

    def allowed(self) -> Bits:
        if self.gone.wait(self._wait_s):
            raise RequestError("The grammar was stopped.")
        return random_bits(self._vocab, self._given) * np.uint32(self._given != self._length)

    def accept(self, token_id: int) -> None:
        self._given += 1

    def cancel(self) -> None:
        self.gone.set()


@dataclass(frozen=True)
class OneByOne:
    """A backend that takes prompts token by token: its logits then have the bits that tokens are drawn from."""

    inner: Any

    def start_masked(self, job: Job, sequence: Any) -> MaskedCudaGeneration:
        return MaskedCudaGeneration(self.inner, replace(job, masked=True), sequence, chunk=0)

    def logits(self, tokens: Any, sequence: Any) -> Any:
        return self.inner.logits(tokens, sequence, chunk=0)

    def start(self, job: Job, sequence: Any) -> Any:
        return CudaGeneration(self.inner, job, sequence, chunk=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(Case("masked", "llama", FIELDS), tmp_path_factory.mktemp("masked"))


@pytest.fixture(scope="module")
def backend(folder: Path) -> Iterator[CudaBackend]:
    spec = spec_from_config(open_checkpoint(folder).config)
    loaded = CudaBackend.load(spec, gpu_plan(spec, processors(), CONTEXT), open_checkpoint(folder))
    yield loaded
    loaded.close()


def guided(backend: Any, job: Job, constraint: Listed) -> tuple[list[Token], GuidedGeneration]:
    generation = GuidedGeneration(
        OneByOne(backend), job, backend.new_sequence(), constraint, backend.spec.vocab
    )
    return list(generation), generation


def masks(number: int) -> Bits:
    return random_bits(VOCAB, number)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("top", [None, 5])
def test_tokens_are_those_of_a_launch_for_each(backend: CudaBackend, sampling: str, top: int | None) -> None:
    job = Job(PROMPT, 0, TOKENS, sampling=SAMPLINGS[sampling], logprobs=top)
    before = backend.kernel.launches
    tokens, generation = guided(backend, job, Listed())
    assert backend.kernel.launches == before + 1
    assert generation.finish_reason == "length" and len(tokens) == TOKENS
    check(backend, job, masks, tokens)
    one_by_one: Any = OneByOne(backend)
    single = ConstrainedGeneration(one_by_one, job, backend.new_sequence(), Listed())
    assert ids(list(single)) == ids(tokens)


def test_after_rows_of_a_prompt(backend: CudaBackend) -> None:
    job = Job(PROMPT, 0, 30)
    tokens = list(GuidedGeneration(backend, job, backend.new_sequence(), Listed(), VOCAB))
    assert len(tokens) == 30
    assert all(masks(step)[token.id // 32] >> token.id % 32 & 1 for step, token in enumerate(tokens))


def test_late_masks_change_nothing(backend: CudaBackend) -> None:
    job = Job(PROMPT, 0, 12, sampling=SAMPLINGS["filtered"])
    quick, _ = guided(backend, job, Listed())
    slow, _ = guided(backend, job, Listed(wait_s=0.05))
    assert ids(slow) == ids(quick)


@pytest.mark.parametrize("length", [0, 7])
def test_a_complete_text_ends(backend: CudaBackend, length: int) -> None:
    tokens, generation = guided(backend, Job(PROMPT, 0, 30), Listed(length=length))
    assert generation.finish_reason == "stop" and len(tokens) == length


def test_cancelled_while_it_waits(backend: CudaBackend) -> None:
    generation = GuidedGeneration(
        OneByOne(backend), Job(PROMPT, 0, 30), backend.new_sequence(), Listed(wait_s=100), VOCAB
    )
    time.sleep(0.2)
    generation.cancel()
    assert list(generation) == [] and generation.finish_reason == "cancelled"
    assert len(guided(backend, Job(PROMPT, 0, 5), Listed())[0]) == 5


def test_a_grammar_that_dies_is_an_error_and_the_next_request_is_served(backend: CudaBackend) -> None:
    dead = Listed()
    dead.gone.set()
    with pytest.raises(RequestError, match="The grammar was stopped"):
        guided(backend, Job(PROMPT, 0, 30), dead)
    free = list(backend.start(Job(PROMPT, 0, 5), backend.new_sequence()))
    assert len(free) == 5


def test_a_mask_that_never_comes_is_named(backend: CudaBackend) -> None:
    backend._params.deadline_ns = 10_000_000
    try:
        generation = backend.start_masked(Job(PROMPT, 0, 30), backend.new_sequence())
        with pytest.raises(DeadlineFault, match="The host gave no mask"):
            list(generation)
    finally:
        backend._params.deadline_ns = DEADLINE_NS
    assert len(guided(backend, Job(PROMPT, 0, 5), Listed())[0]) == 5


def test_ranks_read_the_same_masks(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    fields = {**FIELDS, **heads, "vocab_size": 4096, "intermediate_size": 512}
    checkpoint = open_checkpoint(make_checkpoint(Case("masked-ranks", "llama", fields), tmp_path))
    spec = spec_from_config(checkpoint.config)
    plan = gpu_plan(spec, processors() // 2, CONTEXT, tp=2)
    ranked = RankedCudaBackend.load(spec, plan, checkpoint, devices=[0, 0])
    try:
        job = Job(PROMPT, 0, 20, sampling=SAMPLINGS["drawn"])
        tokens, generation = guided(ranked, job, Listed(vocab=4096))
        assert generation.finish_reason == "length"
        check(ranked, job, lambda number: random_bits(4096, number), tokens)
    finally:
        ranked.close()

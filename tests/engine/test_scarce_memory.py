"""Where memory runs out as a request begins, kept conversations give way: whichever way its job begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from backends.cpu_cases import reference
from engine.fake_backend import FakeBackend
from engine.scripted_model import END, GREEDY, TOKENIZER, VOCAB, ids_of
from engine.test_constrained import Anything
from monotape.backends.cpu.sequence import CpuSequence
from monotape.backends.protocol import KvSequence
from monotape.backends.reference.model import ReferenceModel, ReferenceSequence
from monotape.engine.llm import LLM
from monotape.engine.sampling_params import SamplingParams
from monotape.errors import ResourceError
from token_source import SourceSequence

KEPT = ids_of("he is here")
SCORED = SamplingParams(temperature=0, max_tokens=9, prompt_logprobs=1)


def scarce(llm: LLM, monkeypatch: pytest.MonkeyPatch, sequence: type) -> list[int]:
    """No sequence grows while a conversation is kept. Gives how often one tried to."""
    reserve, tried = sequence.reserve, []

    def reserve_alone(self: object, positions: int) -> None:
        if len(llm._pool):
            tried.append(positions)
            raise ResourceError("There is no memory left.", "Buy some.")
        reserve(self, positions)

    monkeypatch.setattr(sequence, "reserve", reserve_alone)
    return tried


class Growing(FakeBackend):
    """Reserves room in its sequence as it goes, as those with arrays do."""

    def logits(self, tokens: Sequence[int], sequence: KvSequence) -> NDArray[np.float32]:
        sequence.reserve(sequence.length + len(tokens))
        return super().logits(tokens, sequence)


def growing() -> LLM:
    backend = Growing([*ids_of("hello world"), END], vocab=VOCAB)
    return LLM.from_parts(backend, context=97, tokenizer=TOKENIZER)


def test_a_prompt_that_is_scored_gets_the_memory_of_kept_conversations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = growing()
    llm.generate([KEPT], GREEDY)
    tried = scarce(llm, monkeypatch, SourceSequence)
    output = llm.generate("hello world", SCORED)[0]
    assert output.prompt_logprobs is not None and tried
    assert len(llm._pool) == 1  # its own


@pytest.mark.parametrize("scored", [None, 1])
def test_a_grammar_gets_the_memory_of_kept_conversations(
    monkeypatch: pytest.MonkeyPatch,
    checkpoint: Callable[[str], Path],
    scored: int | None,
) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=scored)
    with LLM(str(checkpoint("qwen3")), backend="cpu", dtype="f32", progress=False) as llm:
        llm.generate([[5, 6, 7, 8]], params)
        tried = scarce(llm, monkeypatch, CpuSequence)
        with llm.stream([3, 1, 4, 1, 5], params, constraint=Anything(0)) as stream:
            assert [delta.finish_reason for delta in stream][-1] == "length"
        assert tried and len(llm._pool) == 1


def test_the_reference_reserves_the_room_of_an_answer_before_it_begins(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Callable[[str], Path]
) -> None:
    """Later nothing could give way any more: its tokens are computed as they are read."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(str(checkpoint("qwen3")), backend="reference", dtype="f32", progress=False) as llm:
        llm.generate([[5, 6, 7, 8]], params)
        tried = scarce(llm, monkeypatch, ReferenceSequence)
        with llm.stream([3, 1, 4, 1, 5], params) as stream:
            assert tried[0] >= 5 + 5 and not len(llm._pool)
            assert [delta.finish_reason for delta in stream][-1] == "length"


def test_logits_that_fail_for_want_of_memory_can_be_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Callable[[str], Path]
) -> None:
    backend = reference(checkpoint("llama"))
    sequence, tokens = backend.new_sequence(), list(range(3, 40))
    expected = backend.logits(tokens, backend.new_sequence())
    monkeypatch.setattr(ReferenceModel, "logits", lambda *_: np.empty(2**55))
    with pytest.raises(MemoryError):
        backend.logits(tokens, sequence)
    monkeypatch.undo()
    assert np.array_equal(backend.logits(tokens, sequence), expected) and sequence.length == len(tokens)


def test_a_sequence_of_the_reference_gives_back_what_it_does_not_use(
    checkpoint: Callable[[str], Path],
) -> None:
    backend = reference(checkpoint("llama"))
    sequence = backend.new_sequence()
    before = backend.logits([3, 1, 4, 1, 5], sequence)
    assert not sequence.shrink()
    used = sequence.bytes
    sequence.reserve(2000)
    assert sequence.bytes > 7 * used
    assert sequence.shrink() and sequence.bytes == used
    sequence.truncate(4)
    assert np.array_equal(backend.logits([5], sequence), before[4:])


def test_a_sequence_of_the_reference_that_is_too_long_is_refused(checkpoint: Callable[[str], Path]) -> None:
    sequence = reference(checkpoint("llama")).new_sequence()
    with pytest.raises(ResourceError, match="memory for the KV of"):
        sequence.reserve(2**50)


def test_without_anything_to_give_way_the_error_is_told_and_the_next_request_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = growing()

    def refused(self: object, positions: int) -> None:
        raise ResourceError("There is no memory left.", "Buy some.")

    monkeypatch.setattr(SourceSequence, "reserve", refused)
    with pytest.raises(ResourceError, match="no memory left"):
        llm.generate("hello world", SCORED)
    monkeypatch.undo()
    assert llm.generate("hello", GREEDY)[0].outputs[0].text == "hello world"

"""From a folder to an answer, on the real backends with small checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from monotape.backends.protocol import Generation, KvSequence, Token
from monotape.engine.llm import LLM
from monotape.engine.sampling_params import SamplingParams
from monotape.errors import CheckpointError, UsageError

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture(params=["cpu", "reference"])
def llm(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(str(checkpoint("llama-tied")), backend=request.param, dtype="f32", progress=False) as made:
        yield made


def test_a_folder_without_a_tokenizer_answers_in_ids(llm: LLM) -> None:
    first, second = llm.generate([PROMPT, PROMPT], LONG)
    assert len(first.outputs[0].token_ids) == 60
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, len(PROMPT) - 1)
    assert first.stats.decode_tokens_per_second


def test_a_conversation_goes_on_as_if_it_had_been_computed_at_once(llm: LLM) -> None:
    answer = llm.generate(PROMPT, LONG)[0].outputs[0].token_ids
    follow = llm.generate([*PROMPT, *answer, 7, 7, 7], LONG)[0]
    assert follow.num_cached_tokens == len(PROMPT) + len(answer) - 1
    llm.generate([9, 9, 9], LONG)
    scored = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, prompt_logprobs=0)
    afresh = llm.generate([*PROMPT, *answer, 7, 7, 7], scored)[0]
    assert afresh.num_cached_tokens == 0
    assert afresh.outputs[0].token_ids == follow.outputs[0].token_ids


def test_prompt_logprobs_agree_with_the_logprobs_of_generation(llm: LLM) -> None:
    answer = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=9, logprobs=2, ignore_eos=True))
    ids, generated = answer[0].outputs[0].token_ids, answer[0].outputs[0].logprobs
    scores = llm.generate([*PROMPT, *ids], SamplingParams(prompt_logprobs=2, max_tokens=1))[0].prompt_logprobs
    assert scores is not None
    assert generated is not None
    for token_id, ours, scored in zip(ids, generated, scores[len(PROMPT) :], strict=True):
        assert scored is not None
        assert set(ours) == set(scored)
        assert scored[token_id].logprob == pytest.approx(ours[token_id].logprob, abs=1e-4)
        assert scored[token_id].rank == ours[token_id].rank == 1


class Interrupted:
    """A generation whose reader meets Ctrl-C after five tokens, while the job goes on."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._interrupts = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generation, name)

    def __iter__(self) -> Iterator[Token]:
        for index, token in enumerate(self._generation):
            if index == 5 and self._interrupts:
                self._interrupts = False
                raise KeyboardInterrupt
            yield token


def test_an_interrupt_leaves_the_model_ready(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.generate(PROMPT, LONG)[0].outputs[0].token_ids
    start = llm.backend.start
    monkeypatch.setattr(llm.backend, "start", lambda job, sequence: Interrupted(start(job, sequence)))
    stream = llm.stream(PROMPT, LONG)
    with pytest.raises(KeyboardInterrupt):
        for _ in stream:
            pass
    assert stream.output.outputs[0].finish_reason == "abort"
    assert stream.output.outputs[0].token_ids == expected[:5]
    monkeypatch.undo()
    assert llm.generate(PROMPT, LONG)[0].outputs[0].token_ids == expected


def test_cancelling_leaves_the_model_ready(llm: LLM) -> None:
    expected = llm.generate(PROMPT, LONG)[0].outputs[0].token_ids
    for taken in (0, 1, 30):
        stream = llm.stream(PROMPT, LONG)
        for _ in range(taken):
            next(stream)
        stream.close()
        assert stream.output.outputs[0].token_ids == expected[:taken]
    assert llm.generate(PROMPT, LONG)[0].outputs[0].token_ids == expected


LONGER = [(7 * index) % 89 for index in range(139)]  # three pieces of a scoring


def cancel_after(pieces: int, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Cancels the stream that runs when so many pieces were scored. Gives what was: the list grows."""
    logits, scored = llm.backend.logits, []

    def counted(tokens: Sequence[int], sequence: KvSequence) -> Any:
        given = logits(tokens, sequence)
        scored.append(len(tokens))
        if len(scored) == pieces:
            stream = llm._latest()
            assert stream is not None
            stream.cancel()
        return given

    monkeypatch.setattr(llm.backend, "logits", counted)
    return scored


@pytest.mark.parametrize("pieces", [0, 1, 2, 3])
def test_a_scoring_is_cancelled_between_two_pieces(
    llm: LLM, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scoring = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, prompt_logprobs=2)
    expected = llm.generate(LONGER, scoring)[0]
    llm._pool.clear()
    scored = cancel_after(pieces, llm, monkeypatch)
    stream = llm.stream(LONGER, scoring)
    if not pieces:
        stream.cancel()
    assert [delta.finish_reason for delta in stream] == ["abort"]
    assert scored == [64, 64, 10][:pieces]
    assert stream.output.prompt_logprobs is None  # all of them, or none
    monkeypatch.undo()
    # What was scored is as good as any KV, and the next scoring has the same bits.
    plain = llm.generate(LONGER, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))[0]
    assert plain.num_cached_tokens == sum(scored)
    assert plain.outputs[0].token_ids == expected.outputs[0].token_ids
    again = llm.generate(LONGER, scoring)[0]
    assert again.prompt_logprobs == expected.prompt_logprobs
    assert again.outputs[0].token_ids == expected.outputs[0].token_ids


def test_an_interrupt_after_a_scoring_leaves_the_model_ready(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    scoring = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, prompt_logprobs=0)
    expected = llm.generate(PROMPT, scoring)[0].outputs[0].token_ids
    start = llm.backend.start
    monkeypatch.setattr(llm.backend, "start", lambda job, sequence: Interrupted(start(job, sequence)))
    stream = llm.stream(PROMPT, scoring)
    with pytest.raises(KeyboardInterrupt):
        for _ in stream:
            pass
    assert stream.output.outputs[0].token_ids == expected[:5]
    monkeypatch.undo()
    assert llm.generate(PROMPT, scoring)[0].outputs[0].token_ids == expected


def test_a_context_beyond_the_models_is_refused(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(UsageError, match=r"max_model_len is 10000000"):
        LLM(str(checkpoint("llama-tied")), max_model_len=10_000_000, progress=False)


def test_a_broken_tokenizer_is_found_at_load(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    for file in checkpoint("llama-tied").iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        LLM(str(tmp_path), progress=False)

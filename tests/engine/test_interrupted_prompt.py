"""A request that ends while its prompt is being read: the next one that begins alike continues where it stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from backends.rank_cases import make_eight
from engine.test_constrained import Anything
from monotape.backends.cpu.backend import CpuBackend
from monotape.backends.protocol import Generation, Job, KvSequence
from monotape.engine.llm import LLM
from monotape.engine.sampling_params import SamplingParams

PROMPT = [(7 * index) % 89 for index in range(139)]  # three chunks, the last one not full
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
SHARES = (0.02, 0.3, 0.5, 0.6, 0.8, 0.9)  # of a prefill


@pytest.fixture(params=[None, 2], ids=["one rank", "two ranks"])
def llm(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LLM]:
    folder = str(make_eight("llama-tied", tmp_path))
    with LLM(folder, backend="cpu", dtype="f32", tp=request.param, workers=2, progress=False) as made:
        yield made


def cpu_of(llm: LLM) -> CpuBackend:
    assert isinstance(llm.backend, CpuBackend)
    return llm.backend


def looks_of(llm: LLM) -> int:
    """How often a worker looks for a cancellation while this prompt is read."""
    llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=1))
    llm._pool.clear()
    return cpu_of(llm).looks()


def interrupt(llm: LLM, look: int) -> None:
    """Sends the prompt and cancels the request at this look."""
    cpu_of(llm).cancel_at(look)
    with llm.stream({"prompt_token_ids": PROMPT}, GREEDY) as stream:
        assert [delta.finish_reason for delta in stream] == ["abort"]
    assert stream.output.outputs[0].token_ids == []
    cpu_of(llm).cancel_at(-1)


def test_a_retry_continues_where_the_prompt_was_interrupted(llm: LLM) -> None:
    looks, chunk = looks_of(llm), llm.backend.plan.chunk
    expected = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    cached = []
    for share in SHARES:
        llm._pool.clear()
        interrupt(llm, int(looks * share))
        retry = llm.generate(PROMPT, GREEDY)[0]
        assert retry.outputs[0].token_ids == expected
        assert retry.num_cached_tokens % chunk == 0
        cached.append(retry.num_cached_tokens)
    assert cached[0] == 0 < max(cached) < len(PROMPT)


def test_one_interruption_after_another_comes_to_the_end(llm: LLM) -> None:
    """What Claude Code does: it sends the same again whenever its patience has run out."""
    looks = looks_of(llm)
    expected = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    llm._pool.clear()
    lengths = []
    for _ in range(2):
        interrupt(llm, int(looks * 0.45))  # more than a chunk, less than two
        lengths.append(llm._pool._kept[-1].sequence.length)
    assert 0 < lengths[0] < lengths[1]
    assert llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == expected


class Cancelled(Anything):
    """Cancels its request when the prompt has been read as far as it is going to be."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(99)
        start = llm.backend.start

        def started(job: Job, sequence: KvSequence) -> Generation:
            generation = start(job, sequence)
            for _ in generation:
                pass
            stream = llm._latest()
            assert stream is not None
            stream.cancel()
            return generation

        monkeypatch.setattr(llm.backend, "start", started)


def test_a_constrained_request_continues_too(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = looks_of(llm)
    expected = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    llm._pool.clear()
    cpu_of(llm).cancel_at(int(looks * 0.8))
    with llm.stream({"prompt_token_ids": PROMPT}, GREEDY, constraint=Cancelled(llm, monkeypatch)) as stream:
        assert [delta.finish_reason for delta in stream] == ["abort"]
    cpu_of(llm).cancel_at(-1)
    monkeypatch.undo()
    with llm.stream({"prompt_token_ids": PROMPT}, GREEDY, constraint=Anything(99)) as stream:
        for _ in stream:
            pass
    assert stream.completion.token_ids == expected
    assert stream.completion.stats.cached_tokens >= llm.backend.plan.chunk
    assert stream.cache_miss is None


def test_another_request_in_between_leaves_it_alone(llm: LLM) -> None:
    """An agent's small side requests begin with the same tokens of the template, and differ soon."""
    looks = looks_of(llm)
    interrupt(llm, int(looks * 0.8))
    kept = llm._pool._kept[-1].sequence.length
    other = llm.generate([*PROMPT[:5], 3, 3, 3], GREEDY)[0]
    assert other.num_cached_tokens == 5  # a copy of what is common
    assert llm.generate(PROMPT, GREEDY)[0].num_cached_tokens == kept > 0


def test_leaving_a_stream_while_the_prompt_is_read(llm: LLM) -> None:
    """From outside and at no particular time: what is kept is right, however much it is."""
    expected = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    for _ in range(5):
        llm._pool.clear()
        llm.stream({"prompt_token_ids": PROMPT}, GREEDY).close()
        retry = llm.generate(PROMPT, GREEDY)[0]
        assert retry.outputs[0].token_ids == expected


def test_what_differs_from_the_interrupted_prompt_is_computed(
    checkpoint: Callable[[str], Path],
) -> None:
    with LLM(str(checkpoint("llama-tied")), backend="cpu", dtype="f32", workers=1, progress=False) as llm:
        looks = looks_of(llm)
        interrupt(llm, int(looks * 0.9))
        assert llm._pool._kept[-1].sequence.length == 128
        other = [*PROMPT[:100], *range(30)]
        changed = llm.generate(other, GREEDY)[0]
        assert changed.num_cached_tokens == 100
        llm._pool.clear()
        assert llm.generate(other, GREEDY)[0].outputs[0].token_ids == changed.outputs[0].token_ids

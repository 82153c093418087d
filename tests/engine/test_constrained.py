"""Generation under a constraint: only what is allowed is chosen, by the rules of the sampler, on any backend."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from backends.host_kernel import host_gpu
from families import VOCAB, Case, make_checkpoint, prompt
from monotape import LLM, SamplingParams
from monotape.backends.cuda.backend import CudaBackend
from monotape.backends.protocol import Bits
from monotape.compiler.gpu import gpu_plan
from monotape.engine.constraint import packed
from monotape.errors import RequestError
from monotape.models.registry import spec_from_config
from monotape.weights.open import open_checkpoint


class Even:
    """Allows even ids only; after `length` tokens nothing."""

    def __init__(self, length: int, forced: dict[int, list[int]] | None = None) -> None:
        self.seen: list[int] = []
        self._length, self._forced = length, forced or {}

    def forced(self) -> list[int]:
        return self._forced.get(len(self.seen), [])

    def allowed(self) -> Bits:
        mask = np.zeros(VOCAB, np.bool_)
        if len(self.seen) < self._length:
            mask[::2] = True
        return packed(mask)

    def accept(self, token_id: int) -> None:
        self.seen.append(token_id)

    def cancel(self) -> None:
        """Nothing takes long here."""


class Anything(Even):
    """Allows everything."""

    def allowed(self) -> Bits:
        return packed(np.ones(VOCAB, np.bool_))


class Stuck(Anything):
    """Works at its second answer until it is cancelled, and then fails, as a process that is killed does."""

    def __init__(self) -> None:
        super().__init__(0)
        self.working, self.cancelled = threading.Event(), threading.Event()

    def allowed(self) -> Bits:
        if self.seen:
            self.working.set()
            self.cancelled.wait()
            raise RequestError("The grammar was stopped.")
        return super().allowed()

    def cancel(self) -> None:
        self.cancelled.set()


class Slow(Even):
    """Takes 50 ms for each answer, many times as long as a token."""

    def allowed(self) -> Bits:
        time.sleep(0.05)
        return super().allowed()


class Wrong(Anything):
    """Has a mistake that shows after two tokens."""

    def allowed(self) -> Bits:
        return packed(np.ones(VOCAB, np.bool_)) if len(self.seen) < 2 else packed(np.ones(1 // 0, np.bool_))


#: Heads that the kernel can do.
HEADS = Case("heads", "qwen3", {"head_dim": 16, "num_hidden_layers": 2, "num_attention_heads": 4})


@contextmanager
def on_kernel(folder: Path) -> Iterator[LLM]:
    """The monokernel on the host's machine, which takes masks from another thread while it runs."""
    with host_gpu():
        spec = spec_from_config(open_checkpoint(folder).config)
        plan = gpu_plan(spec, 2, HEADS.context)
        backend = CudaBackend.load(spec, plan, open_checkpoint(folder))
        try:
            yield LLM.from_parts(backend, context=plan.plan.context)
        finally:
            backend.close()


@pytest.fixture(scope="session")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(HEADS, tmp_path_factory.mktemp("heads"))


@pytest.fixture(params=["cpu", "reference", pytest.param("kernel", marks=pytest.mark.slow)])
def llm(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], heads: Path) -> Iterator[LLM]:
    with ExitStack() as stack:
        if request.param == "kernel":
            yield stack.enter_context(on_kernel(heads))
        else:
            yield LLM(str(checkpoint("qwen3")), backend=request.param, dtype="f32", progress=False)


def run(llm: LLM, ids: list[int], constraint: Even | None, **params: object) -> list[int]:
    settings = SamplingParams(**{"temperature": 0, "max_tokens": 11, "ignore_eos": True, **params})  # type: ignore[arg-type]
    with llm.stream({"prompt_token_ids": ids}, settings, constraint=constraint) as stream:
        for _ in stream:
            pass
        return stream.completion.token_ids


@pytest.mark.parametrize("length", [1, 2, 23])
@pytest.mark.parametrize("temperature", [0, 0.9])
def test_without_a_real_constraint_nothing_changes(llm: LLM, length: int, temperature: float) -> None:
    ids = prompt(length)
    settings = {"temperature": temperature, "seed": 3, "repetition_penalty": 1.2, "top_p": 0.9}
    plain = run(llm, ids, None, **settings)
    assert run(llm, ids, Anything(99), **settings) == plain


def test_only_what_is_allowed_is_chosen_and_the_end_ends_it(llm: LLM) -> None:
    constraint = Even(7)
    tokens = run(llm, prompt(9), constraint, temperature=1.5, seed=1)
    assert len(tokens) == 7 and all(token % 2 == 0 for token in tokens)
    assert constraint.seen == tokens


def test_the_best_allowed_token_wins(llm: LLM) -> None:
    ids = prompt(13)
    (first,) = run(llm, ids, Even(99), max_tokens=1)
    logits = llm.backend.logits(ids, llm.backend.new_sequence())[-1]
    assert first == 2 * int(np.argmax(logits[::2]))


@pytest.mark.parametrize(
    ("forced", "saved"), [({}, 0), ({2: [8, 9, 10]}, 3), ({0: [8, 9], 5: [11]}, 2), ({6: [8, 9, 10]}, 2)]
)
def test_a_forced_token_counts_as_a_draft_that_saved_a_pass(
    checkpoint: Callable[[str], Path], forced: dict[int, list[int]], saved: int
) -> None:
    """Else more bytes would be told than were read. The eighth token is the last."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(checkpoint("qwen3")), backend="reference", dtype="f32", progress=False) as llm:
        with llm.stream(prompt(9), params, constraint=Anything(99, forced)) as stream:
            list(stream)
        stats, one_pass = stream.completion.stats, llm.backend.plan.token_bytes(9 + 7 // 2)
    assert (stats.new_tokens, stats.drafted_tokens, stats.accepted_tokens) == (8, saved, saved)
    assert stats.bytes_per_token == one_pass * (7 - saved) // 7


def test_forced_tokens_are_taken_without_being_computed_one_by_one(llm: LLM) -> None:
    ids = prompt(5)
    forced = run(llm, ids, Anything(99, {2: [8, 9, 10]}))
    assert forced[2:5] == [8, 9, 10]
    free = run(llm, [*ids, *forced[:5]], None, max_tokens=6)
    assert forced[5:] == free  # what follows is what follows those tokens
    with_scores = run(llm, ids, Anything(99, {2: [8, 9, 10]}), logprobs=2)
    assert with_scores == run(llm, ids, None)  # log-probabilities of each token are requested


def test_kv_of_a_constrained_answer_is_kept(llm: LLM) -> None:
    ids = prompt(17)
    tokens = run(llm, ids, Even(5))
    with llm.stream(
        {"prompt_token_ids": [*ids, *tokens, 3]}, SamplingParams(temperature=0, max_tokens=2)
    ) as stream:
        for _ in stream:
            pass
    assert stream.completion.stats.cached_tokens >= len(ids) + len(tokens) - 1
    fresh = LLM.from_parts(llm.backend, context=llm.max_model_len)
    assert run(fresh, [*ids, *tokens, 3], None, max_tokens=2) == stream.completion.token_ids


def test_a_cancelled_one_ends(llm: LLM) -> None:
    settings = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    with llm.stream({"prompt_token_ids": prompt(7)}, settings, constraint=Anything(99)) as stream:
        next(stream)
        stream.cancel()
        rest = list(stream)
    assert len(rest) <= 3 and stream.completion.finish_reason == "abort"
    assert run(llm, prompt(7), None, max_tokens=2) == run(llm, prompt(7), Anything(9), max_tokens=2)


def test_a_constraint_at_work_ends_with_the_request(llm: LLM) -> None:
    stuck = Stuck()
    params = SamplingParams(temperature=0, max_tokens=11, ignore_eos=True)
    with llm.stream({"prompt_token_ids": prompt(5)}, params, constraint=stuck) as stream:
        thread = threading.Thread(target=lambda: (stuck.working.wait(), stream.cancel()))
        thread.start()
        for _ in stream:
            pass
        thread.join()
        assert stream.completion.finish_reason == "abort" and len(stream.completion.token_ids) == 1
    assert len(run(llm, prompt(5), None)) == 11  # and the next one runs


def test_a_constraint_that_fails_by_itself_is_an_error(llm: LLM) -> None:
    stuck = Stuck()
    stuck.cancelled.set()  # it does not wait
    with pytest.raises(RequestError, match="The grammar was stopped"):
        run(llm, prompt(5), stuck)
    assert len(run(llm, prompt(5), None)) == 11


def test_a_slow_constraint_is_waited_for(llm: LLM) -> None:
    quick = run(llm, prompt(9), Even(99), max_tokens=4, temperature=0.7, seed=2)
    assert run(llm, prompt(9), Slow(99), max_tokens=4, temperature=0.7, seed=2) == quick


def test_a_mistake_of_a_constraint_is_raised_and_the_next_request_served(llm: LLM) -> None:
    with pytest.raises(ZeroDivisionError):
        run(llm, prompt(5), Wrong(99))
    assert len(run(llm, prompt(5), Even(99))) == 11


def test_a_dropped_stream_ends_its_constraint(llm: LLM) -> None:
    stuck = Stuck()
    params = SamplingParams(temperature=0, max_tokens=11, ignore_eos=True)
    stream = llm.stream({"prompt_token_ids": prompt(5)}, params, constraint=stuck)
    del stream
    assert len(run(llm, prompt(5), Even(99), max_tokens=2)) == 2
    assert not [thread for thread in threading.enumerate() if thread.name == "guide"]


def test_a_minimum_of_tokens_bars_the_end(llm: LLM) -> None:
    barred = run(llm, prompt(6), Even(99), min_tokens=4, max_tokens=6, stop_token_ids=list(range(0, 60, 2)))
    assert all(token >= 60 for token in barred[:4])
    everything = run(llm, prompt(6), Even(99), min_tokens=4, max_tokens=6, stop_token_ids=list(range(VOCAB)))
    assert everything == []  # nothing is left to choose from

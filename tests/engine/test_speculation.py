"""Drafts in the Python API: asked for or not, looked up in a prediction, counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.scripted_model import END, GREEDY, VOCAB, ids_of, make
from families import Case, make_checkpoint
from lookup import counted_drafts
from monotape.backends.cpu.backend import CpuBackend, CpuGeneration
from monotape.compiler.gpu import drafting_plan
from monotape.engine import loading
from monotape.engine.llm import LLM
from monotape.engine.loading import load_backend, planned
from monotape.engine.sampling_params import SamplingParams
from monotape.errors import RequestError
from monotape.models.registry import spec_from_config
from monotape.plan.gpu import GpuPlan
from monotape.weights.open import open_checkpoint

TEXT = "hello world hello world hello"
PREDICTED = f"{TEXT} there"
DENSE = Case("dense", "llama", {"head_dim": 16})


@pytest.mark.parametrize(
    ("configured", "asked", "drafts"),
    [(True, True, True), (True, False, False), (False, True, False), (False, False, False)],
)
def test_a_request_has_drafts_where_the_engine_and_the_request_want_them(
    configured: bool, asked: bool, drafts: bool
) -> None:
    llm, backend = make(config={"speculation": configured})
    with llm.stream("hello", GREEDY, speculation=asked) as stream:
        list(stream)
    with llm.stream_chat([{"role": "user", "content": "hello"}], GREEDY, speculation=asked) as stream:
        list(stream)
    llm.generate("hello", GREEDY)
    assert [job.drafts for job in backend.jobs] == [drafts, drafts, configured]


def test_a_prediction_reaches_the_backend_in_tokens() -> None:
    llm, backend = make(TEXT)
    llm.generate(["a", "b"], GREEDY, prediction="hello world")
    llm.generate(["a", "b"], GREEDY, prediction=["hello world", None])
    llm.chat([{"role": "user", "content": "a"}], GREEDY, prediction="world")
    with llm.stream("a", GREEDY, prediction=[1, 2, 3]) as stream:
        list(stream)
    with llm.stream_chat([{"role": "user", "content": "a"}], GREEDY, prediction="") as stream:
        list(stream)
    both = ids_of("hello world")
    expected = [both, both, both, [], ids_of("world"), [1, 2, 3], []]
    assert [list(job.prediction) for job in backend.jobs] == expected


def test_special_tokens_of_a_prediction_are_text() -> None:
    llm, backend = make()
    llm.generate("a", GREEDY, prediction="hello<|end|>")
    assert END not in backend.jobs[0].prediction and len(backend.jobs[0].prediction) > len(ids_of("hello"))


@pytest.mark.parametrize(
    ("prediction", "said"),
    [
        (7, "prediction is a int"),
        (b"ab", "prediction is a bytes"),
        ([1, VOCAB], "a token that the model does not have"),
        ([-1], "a token that the model does not have"),
        ([True], "no token id"),
        (["a"], "no token id"),
        ([2**40], "no token id"),
        ([1] * 98, "prediction has 98 tokens, but the context has 97"),
        ("x" * 98, "prediction has 98 tokens, but the context has 97"),
    ],
)
def test_a_prediction_that_cannot_be_is_refused_by_name(prediction: Any, said: str) -> None:
    llm, backend = make()
    with pytest.raises(RequestError, match=said) as caught:
        llm.stream("hello", GREEDY, prediction=prediction)
    assert caught.value.hint and not backend.jobs


def test_predictions_must_be_as_many_as_prompts() -> None:
    llm, backend = make()
    with pytest.raises(RequestError, match="2 prompts but 3 predictions"):
        llm.generate(["a", "b"], GREEDY, prediction=["", "", ""])
    with pytest.raises(RequestError, match="no tokenizer"):
        make(text=False)[0].generate([[1]], GREEDY, prediction="hello")
    assert not backend.jobs


def test_drafts_are_counted_and_what_they_save_is_not_read() -> None:
    llm, backend = make(TEXT)
    plain = llm.generate("a", GREEDY)[0]
    predicted = llm.generate("a", GREEDY, prediction=PREDICTED)[0]
    output = predicted.outputs[0].token_ids
    drafted, accepted = counted_drafts(ids_of(PREDICTED), output)
    assert 0 < accepted < drafted  # the text ends before the prediction does
    assert (predicted.stats.drafted_tokens, predicted.stats.accepted_tokens) == (drafted, accepted)
    assert (plain.stats.drafted_tokens, plain.stats.accepted_tokens) == (0, 0)
    assert output == plain.outputs[0].token_ids
    decoded = len(output) - 1
    expected = plain.stats.bytes_per_token * (decoded - accepted) // decoded
    assert predicted.stats.bytes_per_token == expected < backend.plan.token_bytes(0)


def test_several_completions_add_their_drafts_up() -> None:
    llm, _ = make(TEXT)
    output = llm.generate("a", SamplingParams(n=2, max_tokens=40), prediction=PREDICTED)[0]
    each = [completion.stats.accepted_tokens for completion in output.outputs]
    assert each[0] == each[1] > 0
    assert output.stats.accepted_tokens == sum(each)
    assert output.stats.drafted_tokens == sum(part.stats.drafted_tokens for part in output.outputs)


def test_a_scored_prompt_counts_the_drafts_of_its_answer() -> None:
    llm, _ = make(TEXT)
    params = SamplingParams(temperature=0, max_tokens=40, prompt_logprobs=1)
    stats = llm.generate("hello", params, prediction=PREDICTED)[0].stats
    assert stats.accepted_tokens > 0


def test_every_backend_makes_the_same_tokens(tmp_path: Path) -> None:
    """Whatever is predicted. The reference has no drafts; the CPU counts those of a request that wants them."""
    folder = str(make_checkpoint(DENSE, tmp_path))
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=20)
    prompt, found = [3, 1, 4, 1, 5], []
    for backend in ("reference", "cpu"):
        with LLM(folder, backend=backend, progress=False) as llm:
            for speculation in (True, False):
                predicted = [*prompt, *found[0].token_ids] if found else [1, 5, 9, 2]
                with llm.stream(prompt, params, prediction=predicted, speculation=speculation) as stream:
                    list(stream)
                found.append(stream.completion)
    assert all(completion.token_ids == found[0].token_ids for completion in found)
    stats = [completion.stats for completion in found]
    assert [counted.drafted_tokens > 0 for counted in stats] == [False, False, True, False]
    assert 0 < stats[2].accepted_tokens <= stats[2].drafted_tokens
    assert stats[2].bytes_per_token < stats[3].bytes_per_token


def test_an_answer_that_is_left_early_holds_no_more_drafts_than_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuGeneration, "cancel", lambda generation: None)  # too late: the job has ended
    params, prompt = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), [3, 1, 4, 1, 5]
    with LLM(str(make_checkpoint(DENSE, tmp_path)), backend="cpu", progress=False) as llm:
        assert isinstance(llm.backend, CpuBackend)
        with llm.stream(prompt, params, speculation=False) as stream:
            list(stream)
        answer, plain = stream.completion.token_ids, stream.completion.stats
        llm.backend.check_all_drafts()
        for taken in (1, 2, 5, 20):
            with llm.stream(prompt, params, prediction=[*prompt, *answer]) as stream:
                for _ in range(taken):
                    next(stream)
            stats = stream.completion.stats
            assert (stats.new_tokens, stats.decoded_tokens) == (taken, 19)
            assert 0 <= stats.accepted_tokens <= taken - 1
            assert 0 < stats.bytes_per_token < plain.bytes_per_token
        assert stats.accepted_tokens > 2 * 19 // 3


@pytest.mark.parametrize("asked", [{}, {"speculation": True}, {"speculation": False}])
def test_a_gpu_loads_a_kernel_for_drafts_unless_they_are_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, bool]
) -> None:
    from monotape.backends.cuda import driver
    from monotape.backends.cuda.backend import CudaBackend
    from monotape.backends.cuda.drafting import DraftingBackend

    loaded: list[tuple[GpuPlan, ...]] = []
    monkeypatch.setattr(driver, "processors", lambda: 7)
    monkeypatch.setattr(loading, "_require_gpus", lambda *_: None)
    monkeypatch.setattr(CudaBackend, "load", lambda spec, plan, *_: loaded.append((plan,)))
    monkeypatch.setattr(
        DraftingBackend, "load_both", lambda spec, plan, drafting, *_: loaded.append((plan, drafting))
    )
    opened = open_checkpoint(make_checkpoint(DENSE, tmp_path, "bfloat16"))
    spec = spec_from_config(opened.config)
    load_backend("cuda", spec, opened, context=64, **asked)
    alone = planned("cuda", spec, opened, context=64, workers=7)
    assert isinstance(alone, GpuPlan)
    drafting = drafting_plan(spec, alone)
    assert drafting is not None and drafting.ranks[0].rows_a_pass > alone.ranks[0].rows_a_pass == 1
    assert loaded == [(alone, drafting) if asked.get("speculation", True) else (alone,)]

"""The Python API on a scripted backend: parameters, results, figures, errors."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np
import pytest

from engine.fake_backend import TICK_NS
from engine.scripted_model import END, GREEDY, VOCAB, ids_of, make
from monotape.engine.config import EngineConfig
from monotape.engine.defaults import default_sampling
from monotape.engine.llm import LLM
from monotape.engine.sampling_params import SamplingParams
from monotape.errors import CheckpointError, NumericalFault, RequestError, UsageError


def test_an_answer_ends_with_its_end_token_which_is_not_text() -> None:
    llm, backend = make()
    (output,) = llm.generate("hello", GREEDY)
    (completion,) = output.outputs
    assert completion.text == "hello world"
    assert completion.token_ids == [*ids_of("hello world"), END]
    assert (completion.finish_reason, completion.stop_reason, completion.index) == ("stop", None, 0)
    assert (output.prompt, output.prompt_token_ids, output.finished) == ("hello", ids_of("hello"), True)
    assert (completion.logprobs, completion.cumulative_logprob, output.prompt_logprobs) == (None, None, None)
    assert backend.jobs[0].stop_ids == (END,)


def test_length_ends_an_answer_too() -> None:
    completion = make()[0].generate("hello", SamplingParams(max_tokens=2))[0].outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("hello w", "length", None)


def test_each_prompt_may_have_its_own_params() -> None:
    llm, backend = make()
    llm.generate(["a", "b"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)])
    assert [job.max_tokens for job in backend.jobs] == [1, 2]
    with pytest.raises(RequestError, match="2 prompts but 1"):
        llm.generate(["a", "b"], [GREEDY])


def test_seeds_are_given_drawn_or_repeatable() -> None:
    llm, backend = make()
    given = llm.generate("a", SamplingParams(seed=7, n=3))[0]
    assert [completion.seed for completion in given.outputs] == [7, 8, 9]
    assert [completion.index for completion in given.outputs] == [0, 1, 2]
    assert [job.sampling.seed for job in backend.jobs] == [7, 8, 9]
    wrapped = llm.generate("a", SamplingParams(seed=2**64 - 1, n=2))[0]
    assert [completion.seed for completion in wrapped.outputs] == [2**64 - 1, 0]
    with llm.stream("a", SamplingParams(seed=7), index=2) as third:
        assert (third.completion.seed, third.completion.index) == (9, 2)
    drawn = {output.outputs[0].seed for output in llm.generate(["a"] * 5)}
    assert len(drawn) == 5

    def first_seed(seed: int) -> int:
        return make(config={"seed": seed})[0].generate("a")[0].outputs[0].seed

    assert first_seed(3) == first_seed(3) != first_seed(4)


def test_stop_ids_are_reported_and_end_of_text_can_be_ignored() -> None:
    stop = ids_of(" w")[0]
    llm, backend = make()
    completion = llm.generate("a", SamplingParams(stop_token_ids=[stop], max_tokens=9))[0].outputs[0]
    assert (completion.text, completion.stop_reason, completion.token_ids[-1]) == ("hello", stop, stop)
    shown = SamplingParams(stop_token_ids=[stop], max_tokens=9, include_stop_str_in_output=True)
    assert llm.generate("a", shown)[0].outputs[0].text == "hello w"
    endless = llm.generate("a", SamplingParams(ignore_eos=True, max_tokens=9))[0].outputs[0]
    assert (endless.finish_reason, len(endless.token_ids)) == ("length", 9)
    assert backend.jobs[-1].stop_ids == ()
    both = SamplingParams(ignore_eos=True, stop_token_ids=[END], max_tokens=9)
    assert llm.generate("a", both)[0].outputs[0].stop_reason == END


def test_min_tokens_come_before_any_stop() -> None:
    llm, _ = make()
    completion = llm.generate("a", SamplingParams(min_tokens=9, max_tokens=12))[0].outputs[0]
    assert len(completion.token_ids) >= 9
    params = SamplingParams(min_tokens=2, max_tokens=12, stop=["hello", "or"])
    completion = llm.generate("a", params)[0].outputs[0]
    assert (completion.text, completion.stop_reason) == ("hello w", "or")


def test_end_of_text_is_collected_from_every_file() -> None:
    llm, _ = make(generation_config={"eos_token_id": [5, END]})
    assert llm.eos_ids == {5, END}
    assert make(generation_config={"eos_token_id": 6})[0].eos_ids == {6, END}
    with pytest.raises(CheckpointError, match="eos_token_id"):
        make(generation_config={"eos_token_id": ["</s>"]})


@pytest.mark.parametrize(
    ("generation_config", "names", "temperature", "top_p", "source"),
    [
        ({}, [], 0.7, 0.9, "Monotape's own"),
        (
            {"eos_token_id": 2},
            ["models--HuggingFaceTB--SmolLM2-135M-Instruct"],
            0.2,
            0.9,
            "SmolLM2's authors",
        ),
        ({"repetition_penalty": 1.1}, ["smollm2"], 0.2, 0.9, "SmolLM2's authors"),
        ({"temperature": 0.6}, ["smollm2"], 0.6, 1.0, "model's files"),
        ({"top_k": 20}, [], 1.0, 1.0, "model's files"),
        ({"do_sample": False}, ["smollm2"], 0.0, 1.0, "model's files"),
        ({"do_sample": False, "temperature": 1.0, "top_p": 1.0}, [], 0.0, 1.0, "model's files"),
        ({"do_sample": True}, [], 0.7, 0.9, "Monotape's own"),
    ],
)
def test_a_model_that_names_no_sampling_does_not_draw_from_all_tokens(
    generation_config: dict[str, Any], names: list[str], temperature: float, top_p: float, source: str
) -> None:
    """It did, at temperature 1, and a small model answered gibberish."""
    found = default_sampling(generation_config, names)
    assert (found.params.temperature, found.params.top_p) == (temperature, top_p)
    assert source in found.source


def test_the_engine_and_the_server_use_the_same_defaults() -> None:
    from monotape.server.engine.process import recommended

    llm, backend = make(config={"model": "SmolLM2-135M"})
    llm.generate("a")
    assert (backend.jobs[0].sampling.temperature, backend.jobs[0].sampling.top_p) == (0.2, 0.9)
    assert {"temperature": 0.2, "top_p": 0.9}.items() <= recommended(llm).items()
    llm.generate("a", SamplingParams())  # explicit parameters keep vLLM's meaning
    assert (backend.jobs[1].sampling.temperature, backend.jobs[1].sampling.top_p) == (1.0, 1.0)


def test_recommended_sampling_is_the_default() -> None:
    llm, backend = make(
        generation_config={"temperature": 0.7, "top_k": 20, "max_new_tokens": 3, "do_sample": True}
    )
    assert llm.default_sampling_params == SamplingParams(temperature=0.7, top_k=20, max_tokens=3)
    assert llm.get_default_sampling_params() is llm.default_sampling_params
    llm.generate("a")
    assert (backend.jobs[0].sampling.temperature, backend.jobs[0].max_tokens) == (0.7, 3)
    with pytest.raises(CheckpointError, match=r"generation_config\.json .* top_p is 2"):
        make(generation_config={"top_p": 2})


def test_logprobs_have_vllms_shape() -> None:
    llm, _ = make()
    completion = llm.generate("a", SamplingParams(logprobs=2, max_tokens=3))[0].outputs[0]
    assert completion.logprobs is not None
    for token_id, shown in zip(completion.token_ids, completion.logprobs, strict=True):
        assert next(iter(shown)) == token_id
        assert len(shown) == 3
        assert shown[1].rank == 1
        assert shown[token_id].rank is None
        assert shown[token_id].decoded_token == llm.tokenizer.token_text(token_id)  # type: ignore[union-attr]
    total = sum(
        shown[token_id].logprob
        for token_id, shown in zip(completion.token_ids, completion.logprobs, strict=True)
    )
    assert completion.cumulative_logprob == total
    only_chosen = llm.generate("a", SamplingParams(logprobs=0, max_tokens=3))[0].outputs[0]
    assert [list(shown) for shown in only_chosen.logprobs or ()] == [
        [token] for token in only_chosen.token_ids
    ]


def test_prompt_logprobs_are_those_of_the_logits() -> None:
    llm, backend = make()
    prompt = [index * 7 % VOCAB for index in range(71)]  # more than one pass
    scores = llm.generate([prompt], SamplingParams(prompt_logprobs=3, max_tokens=1))[0].prompt_logprobs
    assert scores is not None
    assert scores[0] is None
    logits = backend.logits(prompt, backend.new_sequence()).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for position, shown in enumerate(scores[1:], start=1):
        assert shown is not None
        row = expected[position - 1]
        assert shown[prompt[position]].logprob == pytest.approx(row[prompt[position]])
        assert shown[prompt[position]].rank == (row > row[prompt[position]]).sum() + 1
        best = sorted((entry.logprob for entry in shown.values()), reverse=True)[:3]
        assert best == pytest.approx(sorted(row, reverse=True)[:3])
    assert backend.jobs[0].cached == 70


def test_ids_alone_need_no_tokenizer() -> None:
    llm, _ = make([5, 6, 7], text=False, generation_config={"eos_token_id": 7})
    completion = llm.generate([1, 2], SamplingParams(max_tokens=9, logprobs=1))[0].outputs[0]
    assert (completion.text, completion.token_ids) == ("", [5, 6, 7])
    assert (completion.logprobs or [{}])[0][5].decoded_token is None
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.generate("text", GREEDY)
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.generate([1], SamplingParams(stop="x"))


def test_detokenize_off_gives_ids_only() -> None:
    completion = make()[0].generate("a", SamplingParams(detokenize=False))[0].outputs[0]
    assert (completion.text, len(completion.token_ids)) == ("", 5)


def test_special_tokens_can_be_shown() -> None:
    llm, _ = make([END, *ids_of("hello")])
    params = SamplingParams(ignore_eos=True, skip_special_tokens=False, max_tokens=2)
    assert llm.generate("a", params)[0].outputs[0].text == "<|end|>hello"


def test_figures_come_from_the_backends_clock() -> None:
    llm, backend = make()
    stats = llm.generate([[1, 2, 3, 4, 5]], GREEDY)[0].stats
    assert (stats.prompt_tokens, stats.cached_tokens, stats.new_tokens) == (5, 0, 5)
    assert stats.ttft_s == pytest.approx(5 * TICK_NS / 1e9)
    assert stats.decode_s == pytest.approx(4 * TICK_NS / 1e9)
    assert stats.decode_tokens_per_second == pytest.approx(1e9 / TICK_NS)
    assert stats.bytes_per_token == backend.plan.token_bytes(7)
    single = llm.generate([[1, 2, 3, 4, 5]], SamplingParams(max_tokens=1))[0].stats
    assert (single.decode_tokens_per_second, single.decode_s, single.cached_tokens) == (None, 0.0, 4)
    several = llm.generate([[1, 2]], SamplingParams(n=3))[0]
    assert several.stats.new_tokens == 15
    assert several.stats.decode_tokens_per_second == pytest.approx(1e9 / TICK_NS)


def test_a_fault_drops_the_sequence_and_the_next_request_is_served() -> None:
    llm, backend = make()
    backend.fault_at = 2
    with pytest.raises(NumericalFault, match="not numbers"):
        llm.generate("hello world", GREEDY)
    backend.fault_at = None
    backend.generations.clear()
    output = llm.generate("hello world", GREEDY)[0]
    assert (output.outputs[0].text, output.num_cached_tokens) == ("hello world", 0)


def test_a_closed_model_says_so() -> None:
    llm, backend = make()
    with llm:
        llm.generate("hello", GREEDY)
    assert backend.closed
    llm.close()
    with pytest.raises(UsageError, match="closed"):
        llm.generate("hello", GREEDY)


def test_a_forked_process_is_told_that_it_has_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first request waited for ever: threads do not outlive a fork."""
    llm, _ = make()
    here = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    with pytest.raises(UsageError, match="was forked after the model was loaded"):
        llm.generate("hello", GREEDY)


def test_unknown_arguments_are_refused_and_harmless_ones_of_vllm_taken() -> None:
    with pytest.raises(UsageError, match=r"no argument 'max_model_length'.*mean 'max_model_len'"):
        LLM("anything", max_model_length=5)
    with pytest.raises(UsageError, match="tensor_parallel_size=2"):
        LLM("anything", tensor_parallel_size=2, trust_remote_code=False)
    with pytest.raises(UsageError, match="workers is 0"):
        LLM("anything", workers=0)


def test_the_arguments_of_llm_are_the_fields_of_its_config() -> None:
    import inspect

    parameters = inspect.signature(LLM.__init__).parameters
    fields = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    given = {
        name: parameter.default for name, parameter in parameters.items() if name not in ("self", "others")
    }
    assert given == fields

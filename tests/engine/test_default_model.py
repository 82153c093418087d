"""The default model from end to end: its tokenizer, its chat template, its conversations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.conversations import CONVERSATIONS
from monotape.engine.llm import LLM
from monotape.engine.sampling_params import SamplingParams

pytestmark = pytest.mark.slow

#: Texts and their ids as llama.cpp's tokenizer gives them for the same model.
KNOWN_IDS = {
    "Hello  world\n\n  indented\ttab ": [19556, 216, 905, 8866, 641, 6574, 197, 15999, 216],
    "don't WE'LL I'm they've": [12420, 982, 26587, 23, 16421, 339, 5248, 502, 3543],
    "In 2024, 3.14159 and 1,000,000": [
        788, 216, 34, 32, 34, 36, 28, 216, 35, 30, 33, 36, 33, 37, 41, 284, 216, 33, 28, 32, 32, 32,
        28, 32, 32, 32,
    ],
    "你好\uff0c世界\uff01日本語のテキスト 한국어": [
        18645, 250, 48392, 138, 12831, 7906, 240, 178, 239, 230, 8083, 219, 23274, 115, 40993, 179,
        120, 248, 26453, 11100, 224, 10391, 251, 10391, 134, 11100, 226, 216, 33085, 246, 181, 130,
        251, 183, 240, 129,
    ],
    "😀👨\u200d👩\u200d👧 ¡ñandú! ½ ²": [
        10813, 242, 218, 10813, 235, 118, 321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117,
        3351, 111, 10214, 397, 16148, 17, 216, 16738, 216, 19133,
    ],
    "e\u0301 a\u0308 ह्न्दी ไทย عربي": [
        85, 151, 219, 253, 151, 226, 12335, 134, 16525, 30658, 16525, 44757, 37189, 216, 31933, 222,
        10283, 241, 10283, 112, 45704, 20602, 31462, 23339,
    ],
    "def f(x):\n    return x ** 2  # ok\r\n": [
        1604, 275, 24, 104, 727, 472, 1003, 1792, 1903, 216, 34, 216, 907, 10907, 2738,
    ],
    "<|im_start|>user\nhi<|im_end|>\n": [1, 4093, 198, 6004, 2, 198],
    "<|endoftext|>a<|im_end|> b": [0, 81, 2, 278],
    " ": [216],
    "a\u00a0b\u3000c\u200b": [81, 15442, 82, 12109, 218, 83, 321, 229],
}  # fmt: skip


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=1024, progress=False) as made:
        yield made


@pytest.mark.parametrize(("text", "ids"), KNOWN_IDS.items())
def test_ids_are_those_of_an_independent_tokenizer(llm: LLM, text: str, ids: list[int]) -> None:
    assert llm.tokenizer is not None
    assert llm.tokenizer.encode(text) == ids
    assert llm.tokenizer.decode(ids, skip_special=False) == text


def test_the_models_own_template_renders_as_in_transformers(llm: LLM) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = llm.chat_template.source
    assert source is not None
    assert llm.tokenizer is not None
    for name in ("one question", "system", "three turns", "thoughts"):
        theirs, _ = render_jinja_template(
            [CONVERSATIONS[name]],
            chat_template=source,
            add_generation_prompt=True,
            **llm.tokenizer.named_tokens,
        )
        assert llm.render_chat(CONVERSATIONS[name]) == theirs[0]


def test_a_question_is_answered_and_the_next_turn_reuses_it(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=80)
    conversation = [{"role": "user", "content": "What is the capital of France?"}]
    first = llm.chat(conversation, params)[0]
    answer = first.outputs[0]
    assert "Paris" in answer.text
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
    conversation += [
        {"role": "assistant", "content": answer.text},
        {"role": "user", "content": "And of Italy?"},
    ]
    second = llm.chat(conversation, params)[0]
    assert second.num_cached_tokens == len(first.prompt_token_ids) + len(answer.token_ids) - 1
    fresh = SamplingParams(temperature=0, max_tokens=80, prompt_logprobs=0)
    assert llm.chat(conversation, fresh)[0].outputs[0].text == second.outputs[0].text


def test_it_samples_as_its_authors_recommend(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_p) == (0.2, 0.9)
    assert llm.source is not None and "SmolLM2" in llm.source


def test_a_stream_says_what_generate_says(llm: LLM) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=11, max_tokens=60, stop=["\n\n"])
    whole = llm.generate("Emoji story: 😀", params)[0].outputs[0]
    with llm.stream("Emoji story: 😀", params) as stream:
        text = "".join(delta.text for delta in stream)
    assert text == whole.text
    assert stream.output.outputs[0].token_ids == whole.token_ids
    assert "\n\n" not in text

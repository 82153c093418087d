"""The unmodified `openai` package against `monotape serve` with a real model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from server.running import RunningServer

pytestmark = pytest.mark.slow
MODEL = "test/smollm2"
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Oslo"]},
                "days": {"type": "integer"},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
LISTS: Any = [[], *([one, two] for one in (1, 2) for two in (1, 2)), [1], [2]]
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(smollm2: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{smollm2.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=24)
    choice = answer.choices[0]
    assert "Paris" in (choice.message.content or "")
    assert choice.message.role == "assistant"
    assert answer.usage is not None and answer.usage.completion_tokens == len(answer.choices) * (
        answer.usage.total_tokens - answer.usage.prompt_tokens
    )
    assert answer.model_extra is not None
    timings, metrics = answer.model_extra["timings"], answer.model_extra["metrics"]
    assert timings["predicted_n"] == answer.usage.completion_tokens
    assert timings["cache_n"] + timings["prompt_n"] == answer.usage.prompt_tokens
    assert metrics["decode_tokens_per_second"] > 0
    assert metrics["time_to_first_token_ms"] >= timings["prompt_ms"]
    assert [phase["phase"] for phase in timings["phases"]] == [
        "render",
        "tokenize",
        "queue",
        "prefill",
        "decode",
    ]


def test_a_stream_says_the_same_as_a_plain_answer(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=24)
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=QUESTION, temperature=0, max_tokens=24, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == plain.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    assert chunks[-2].choices[0].finish_reason == plain.choices[0].finish_reason
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and plain.usage is not None
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == plain.usage.prompt_tokens - 1


def test_a_prediction_changes_nothing_but_the_count_of_drafts(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=24)
    text = plain.choices[0].message.content or ""
    predicted = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=24,
        prediction={"type": "content", "content": text.replace("Paris", "Rome")},
    )  # fmt: skip
    assert predicted.choices[0].message.content == text
    assert predicted.usage is not None and predicted.usage.completion_tokens_details is not None
    details = predicted.usage.completion_tokens_details
    assert details.accepted_prediction_tokens is not None and details.rejected_prediction_tokens is not None
    assert 0 <= details.accepted_prediction_tokens < predicted.usage.completion_tokens
    assert details.rejected_prediction_tokens >= 0


def test_the_second_turn_finds_the_first_in_the_cache(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Name a colour of the rainbow, please."}]
    first = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=8)  # type: ignore[arg-type]
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content or ""},
        {"role": "user", "content": "More."},
    ]
    second = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=2)  # type: ignore[arg-type]
    assert (
        first.usage is not None
        and second.usage is not None
        and second.usage.prompt_tokens_details is not None
    )
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= first.usage.prompt_tokens


def test_two_answers_with_a_seed_repeat(client: openai.OpenAI) -> None:
    def ask() -> list[str | None]:
        answer = client.chat.completions.create(
            model=MODEL, messages=QUESTION, temperature=1.3, seed=-7, n=2, max_tokens=9
        )
        return [choice.message.content for choice in answer.choices]

    first = ask()
    assert len(set(first)) == 2
    assert ask() == first


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert "".join(token.token for token in content) == answer.choices[0].message.content
    assert len(content) == 4
    for token in content:
        assert token.logprob <= 0 and bytes(token.bytes or []).decode() == token.token
        assert [likely.logprob for likely in token.top_logprobs] == sorted(
            (likely.logprob for likely in token.top_logprobs), reverse=True
        )
        assert token.top_logprobs[0].logprob == token.logprob  # greedy


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_forced_tool_is_called_with_valid_arguments(client: openai.OpenAI, choice: Any) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "How is the weather in Paris?"}], temperature=0,
        tools=[WEATHER], tool_choice=choice, max_tokens=64,
    )  # fmt: skip
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function" and call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] == "Paris" and set(arguments) <= {"city", "days"}


def test_a_tool_call_streams(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=[{"role": "user", "content": "How is the weather in Oslo?"}], temperature=0,
        tools=[WEATHER], tool_choice="required", max_tokens=64,
    ) as stream:  # fmt: skip
        first = None
        for event in stream:
            if event.type == "chunk" and event.chunk.choices and event.chunk.choices[0].delta.tool_calls:
                first = first or event.chunk.choices[0].delta.tool_calls[0]
        final = stream.get_final_completion()
    assert (
        first is not None and first.id and first.function is not None and first.function.name == "get_weather"
    )
    (call,) = final.choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments)["city"] == "Oslo"


def test_a_conversation_with_tool_results_goes_on(client: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "user", "content": "How is the weather in Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
        ]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12 degrees, rain"},
    ]  # fmt: skip
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[WEATHER], temperature=0, max_tokens=12
    )
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls


class Person(BaseModel):
    """What structured output must become."""

    name: str
    age: int
    happy: bool


def test_structured_output_parses(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": "Ada is 36 and happy. Describe her as JSON."}],
        response_format=Person, temperature=0, max_tokens=80,
    )  # fmt: skip
    parsed = answer.choices[0].message.parsed
    assert parsed is not None and parsed.name == "Ada" and parsed.age == 36


@pytest.mark.parametrize(
    ("constraint", "holds"),
    [
        ({"regex": "[0-9]{3}-[a-f]{2}"}, lambda text: len(text) == 6 and text[3] == "-" and text[:3].isdigit()),
        ({"choice": ["violet", "indigo"]}, lambda text: text in ("violet", "indigo")),
        ({"grammar": 'start: "<" /[a-z]{1,5}/ ">"'}, lambda text: text[0] == "<" and text[-1] == ">"),
        ({"json": {"items": {"enum": [1, 2]}, "maxItems": 2, "type": "array"}}, lambda text: json.loads(text) in LISTS),
    ],
)  # fmt: skip
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_other_constraints_hold(
    client: openai.OpenAI, constraint: Any, holds: Any, temperature: float
) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=temperature, seed=5, max_tokens=60,
        extra_body={"structured_outputs": constraint},
    )  # fmt: skip
    assert answer.choices[0].finish_reason == "stop"
    assert holds(answer.choices[0].message.content)


def test_json_mode(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "A JSON object with one key."}], temperature=0,
        response_format={"type": "json_object"}, max_tokens=200, stop=["\n\n\n"],
    )  # fmt: skip
    text = answer.choices[0].message.content or ""
    assert text.startswith("{")
    assert answer.choices[0].finish_reason == "length" or isinstance(json.loads(text), dict)


def test_completions_echo_and_score(client: openai.OpenAI) -> None:
    prompt = "The capital of France is"
    answer = client.completions.create(
        model=MODEL, prompt=prompt, echo=True, logprobs=2, max_tokens=1, temperature=0
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.token_logprobs is not None
    assert answer.choices[0].text == prompt + " Paris" == "".join(logprobs.tokens)
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert logprobs.text_offset is not None and logprobs.text_offset[-1] == len(prompt)


def test_completions_take_token_ids_and_several_prompts(
    client: openai.OpenAI, smollm2: RunningServer
) -> None:
    texts = ["One, two,", "The sky is"]
    ids = [smollm2.post("/tokenize", {"prompt": text}).json()["tokens"] for text in texts]
    by_text = client.completions.create(model=MODEL, prompt=texts, max_tokens=5, temperature=0)
    by_ids = client.completions.create(model=MODEL, prompt=ids, max_tokens=5, temperature=0)
    assert [choice.text for choice in by_text.choices] == [choice.text for choice in by_ids.choices]
    assert [choice.index for choice in by_ids.choices] == [0, 1]
    assert by_ids.usage is not None and by_ids.usage.prompt_tokens == sum(map(len, ids))


def test_async_streams_do_not_mix(smollm2: RunningServer) -> None:
    async def ask(client: openai.AsyncOpenAI, word: str) -> str:
        stream = await client.completions.create(
            model=MODEL, prompt=f"{word} {word} {word}", max_tokens=6, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

    async def both() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{smollm2.url}/v1", api_key="none") as client:
            words = ["apple", "river", "stone"]
            together = await asyncio.gather(*(ask(client, word) for word in words))
            return list(together), [await ask(client, word) for word in words]

    together, alone = asyncio.run(both())
    assert together == alone


def test_a_response(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model=MODEL, instructions="Be brief.", input="What is the capital of France?", temperature=0,
        max_output_tokens=40,
    )  # fmt: skip
    assert "Paris" in response.output_text
    assert response.status in ("completed", "incomplete")
    assert response.usage is not None and response.usage.input_tokens > 10


def test_a_streamed_response(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model=MODEL, input="Ada is 36 and happy.", text_format=Person, temperature=0, max_output_tokens=60
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == "response.completed"
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == final.output_text != ""
    assert isinstance(final.output_parsed, Person)
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_a_response_that_is_cut_off_says_so(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model=MODEL, input="Say hello.", max_output_tokens=3, stream=True))
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details is not None
    assert last.response.incomplete_details.reason == "max_output_tokens"


def test_a_response_calls_a_function_and_parses_text(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **WEATHER["function"], "strict": True}
    response = client.responses.create(
        model=MODEL, input="How is the weather in Oslo?", tools=[tool], tool_choice="required", temperature=0
    )
    (call,) = [item for item in response.output if item.type == "function_call"]
    assert call.name == "get_weather" and json.loads(call.arguments)["city"] == "Oslo"
    again: Any = [
        {"role": "user", "content": "How is the weather in Oslo?"}, call.model_dump(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
    ]  # fmt: skip
    parsed = client.responses.parse(
        model=MODEL, input=again, text_format=Person, temperature=0, max_output_tokens=60
    )
    assert isinstance(parsed.output_parsed, Person)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, "smollm2"]
    assert client.models.retrieve("smollm2").model_extra == {"root": MODEL, "max_model_len": 8192}
    assert client.models.retrieve(MODEL).id == MODEL


def test_errors_have_the_classes_that_clients_catch(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-5", messages=QUESTION)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as overflow:
        client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=100_000)
    assert overflow.value.code == "context_length_exceeded"
    assert "This model's maximum context length is 8192 tokens." in overflow.value.message

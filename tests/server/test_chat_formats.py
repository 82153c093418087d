"""The unmodified `openai` and `anthropic` packages against harmony and XML calls, with the models' real tokenizers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from server.real_text import said
from server.running import RunningServer, scripted_server

pytestmark = pytest.mark.slow
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
ARGUMENTS = {"city": "Köln", "days": 2}
THINK = "<|channel|>analysis<|message|>The user wants das Wetter 🙂.<|end|><|start|>assistant"
THOUGHT = "The user wants das Wetter 🙂."
FINAL = f"{THINK}<|channel|>final<|message|>Es regnet <|\u200bend|> heute."
CALL = (
    f"{THINK}<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    f"{json.dumps(ARGUMENTS, ensure_ascii=False)}<|call|>"
)
CODER = (
    "I look it up.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)
HERMES = f"<think>\n{THOUGHT}\n</think>\n\n" + "".join(
    f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}", "days": 2}}}}\n</tool_call>\n'
    for city in ("Köln", "Oslo")
)


def _server(model: str, **settings: str) -> Iterator[RunningServer]:
    with scripted_server("server.real_text", engine={"model": model}, **settings) as server:
        yield server.wait()


@pytest.fixture(scope="module")
def gptoss() -> Iterator[RunningServer]:
    yield from _server("gptoss")


@pytest.fixture
def unsplit() -> Iterator[RunningServer]:
    yield from _server("gptoss", reasoning_parser="none")


@pytest.fixture(scope="module")
def coder() -> Iterator[RunningServer]:
    yield from _server("qwen3_coder")


@pytest.fixture(scope="module")
def qwen3() -> Iterator[RunningServer]:
    yield from _server("qwen3")


def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def asked(text: str) -> Any:
    return [{"role": "user", "content": said(text)}]


def streamed(server: RunningServer, text: str, **more: Any) -> tuple[str, str, list[Any], str | None]:
    """Thoughts, words, calls and the finish reason of a streamed chat."""
    thought, words, calls, reason = "", "", list[Any](), None
    with client(server) as made:
        for chunk in made.chat.completions.create(
            model=server.model, messages=asked(text), stream=True, temperature=0, **more
        ):
            for choice in chunk.choices:
                thought += getattr(choice.delta, "reasoning_content", None) or ""
                words += choice.delta.content or ""
                reason = choice.finish_reason or reason
                for call in choice.delta.tool_calls or []:
                    if call.id:
                        calls.append([call.function.name, ""])
                    calls[call.index][1] += call.function.arguments or ""
    return thought, words, calls, reason


def test_harmony_thoughts_and_answer(gptoss: RunningServer) -> None:
    with client(gptoss) as made:
        answer = made.chat.completions.create(model="gptoss", messages=asked(FINAL), temperature=0)
    message = answer.choices[0].message
    assert message.content == "Es regnet <|\u200bend|> heute."
    assert message.reasoning_content == message.reasoning == THOUGHT  # type: ignore[attr-defined]
    assert answer.choices[0].finish_reason == "stop"
    assert streamed(gptoss, FINAL) == (THOUGHT, "Es regnet <|\u200bend|> heute.", [], "stop")


def test_harmony_calls(gptoss: RunningServer) -> None:
    with client(gptoss) as made:
        answer = made.chat.completions.create(
            model="gptoss", messages=asked(CALL), temperature=0, tools=[WEATHER]
        )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert choice.message.reasoning_content == THOUGHT  # type: ignore[attr-defined]
    call: Any = (choice.message.tool_calls or [])[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", ARGUMENTS)
    thought, words, calls, reason = streamed(gptoss, CALL, tools=[WEATHER])
    assert (thought, words, reason) == (THOUGHT, "", "tool_calls")
    assert [(name, json.loads(text)) for name, text in calls] == [("get_weather", ARGUMENTS)]


def test_without_a_reasoning_parser_thoughts_are_text(unsplit: RunningServer) -> None:
    """As the text of other models then has their <think>: marked, so that a client can tell them apart itself."""
    analysis = f"<|channel|>analysis<|message|>{THOUGHT}<|end|>"
    assert streamed(unsplit, FINAL) == ("", f"{analysis}Es regnet <|\u200bend|> heute.", [], "stop")
    thought, words, calls, reason = streamed(unsplit, CALL, tools=[WEATHER])
    assert (thought, words, reason) == ("", analysis, "tool_calls")
    assert [(name, json.loads(text)) for name, text in calls] == [("get_weather", ARGUMENTS)]


def test_a_result_goes_back_with_the_thoughts_that_led_to_it(gptoss: RunningServer) -> None:
    """The second request's prompt begins with the first one's, its analysis included: the KV says so."""
    with client(gptoss) as made:
        messages = asked(CALL)
        first = made.chat.completions.create(
            model="gptoss", messages=messages, temperature=0, tools=[WEATHER]
        )
        message = first.choices[0].message
        call: Any = (message.tool_calls or [])[0]
        result = {"role": "tool", "tool_call_id": call.id, "content": said(FINAL)}
        kept = [*messages, message.model_dump(exclude_none=True), result]
        bare = message.model_dump(exclude_none=True, exclude={"reasoning_content", "reasoning"})
        second = made.chat.completions.create(model="gptoss", messages=kept, temperature=0, tools=[WEATHER])
        forgotten: Any = [*messages, bare, result]
        third = made.chat.completions.create(
            model="gptoss", messages=forgotten, temperature=0, tools=[WEATHER]
        )
        after: Any = [*kept, second.choices[0].message.model_dump(exclude_none=True), *asked("ok")]
        fourth = made.chat.completions.create(model="gptoss", messages=after, temperature=0, tools=[WEATHER])
        told: Any = [
            *forgotten,
            {"role": "assistant", "content": second.choices[0].message.content},
            *asked("ok"),
        ]
        fifth = made.chat.completions.create(model="gptoss", messages=told, temperature=0, tools=[WEATHER])
    assert second.choices[0].message.content and first.usage and second.usage and third.usage
    details = second.usage.prompt_tokens_details
    assert details is not None and (details.cached_tokens or 0) > first.usage.prompt_tokens
    assert second.usage.prompt_tokens > third.usage.prompt_tokens
    assert fourth.usage and fifth.usage  # after the answer nothing of the analysis is left
    assert fourth.usage.prompt_tokens == fifth.usage.prompt_tokens


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<|channel|>weird<|message|>seen", ("", "seen")),
        ("no marks at all", ("", "no marks at all")),
        ("<|channel|>final<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b", ("b", "a")),
        ("<|channel|>final<|message|>a<|reserved_200013|>b", ("", "a<|reserved_200013|>b")),
    ],
)
def test_what_a_model_gets_wrong_is_shown(gptoss: RunningServer, text: str, shown: tuple[str, str]) -> None:
    assert streamed(gptoss, text, tools=[WEATHER])[:2] == shown


def test_a_call_that_never_closes_is_given_as_far_as_it_came(gptoss: RunningServer) -> None:
    cut = streamed(gptoss, CALL, tools=[WEATHER], max_tokens=34)
    assert cut[3] == "length"
    assert cut[0] == THOUGHT
    assert cut[2] == [] or cut[2][0][0] == "get_weather"


def test_a_forced_call_and_structured_output_leave_no_room_for_thoughts(gptoss: RunningServer) -> None:
    script = f"get_weather <|constrain|>json<|message|>{json.dumps(ARGUMENTS, ensure_ascii=False)}"
    other: Any = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        _, _, calls, _ = streamed(gptoss, script, tools=[other, WEATHER], tool_choice=choice)
        assert [(name, json.loads(text)) for name, text in calls] == [("get_weather", ARGUMENTS)]
    schema = {"name": "w", "schema": WEATHER["function"]["parameters"]}
    shape = {"type": "json_schema", "json_schema": schema}
    thought, words, _, _ = streamed(gptoss, json.dumps(ARGUMENTS, ensure_ascii=False), response_format=shape)
    assert (thought, json.loads(words)) == ("", ARGUMENTS)


def test_no_tools_no_calls(gptoss: RunningServer) -> None:
    assert streamed(gptoss, CALL, tools=[WEATHER], tool_choice="none")[2] == []


def test_effort_is_part_of_the_prompt(gptoss: RunningServer) -> None:
    def text(**more: Any) -> str:
        body = {"messages": [{"role": "user", "content": "x"}], **more}
        response = gptoss.post("/tokenize", body).json()
        return str(gptoss.post("/detokenize", {"tokens": response["tokens"]}).json()["prompt"])

    assert "Reasoning: medium" in text()
    assert "Reasoning: high" in text(chat_template_kwargs={"reasoning_effort": "high"})
    with client(gptoss) as made, pytest.raises(openai.BadRequestError, match="reasoning_effort is 'huge'"):
        made.chat.completions.create(model="gptoss", messages=asked("x"), reasoning_effort="huge")  # type: ignore[call-overload]
    answer = gptoss.chat("x", reasoning_effort="low")
    assert (
        answer["usage"]["prompt_tokens"]
        == gptoss.chat("x", reasoning_effort="high")["usage"]["prompt_tokens"]
    )


def test_responses_have_reasoning_items_and_calls(gptoss: RunningServer) -> None:
    tool: Any = {"type": "function", "strict": True, **WEATHER["function"]}
    with client(gptoss) as made:
        events = list(made.responses.create(model="gptoss", input=said(CALL), tools=[tool], stream=True))
        final: Any = events[-1]
        assert [item.type for item in final.response.output] == ["reasoning", "function_call"]
        reasoning, call = final.response.output
        assert reasoning.content[0].text == THOUGHT
        assert json.loads(call.arguments) == ARGUMENTS
        assert final.response.usage.output_tokens_details.reasoning_tokens > 3
        items: Any = [
            {"role": "user", "content": said(CALL)},
            *(item.model_dump(exclude_none=True) for item in final.response.output),
            {"type": "function_call_output", "call_id": call.call_id, "output": said(FINAL)},
        ]
        second = made.responses.create(model="gptoss", input=items, tools=[tool])
    assert second.output_text == "Es regnet <|\u200bend|> heute."
    assert (
        second.usage and second.usage.input_tokens_details.cached_tokens > final.response.usage.input_tokens
    )


def test_messages_have_thinking_blocks_and_tool_use(gptoss: RunningServer) -> None:
    function = WEATHER["function"]
    tool: Any = {"name": function["name"], "input_schema": function["parameters"]}
    made = anthropic.Anthropic(base_url=gptoss.url, api_key="none", max_retries=0)
    with made, made.messages.stream(
        model="gptoss", max_tokens=500, messages=asked(CALL), tools=[tool],
        thinking={"type": "enabled", "budget_tokens": 1024},
    ) as stream:  # fmt: skip
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "tool_use"]
    thinking, use = message.content
    assert thinking.type == "thinking" and thinking.thinking == THOUGHT
    assert use.type == "tool_use" and use.input == ARGUMENTS
    assert message.stop_reason == "tool_use"


def test_tags_become_calls(coder: RunningServer) -> None:
    thought, words, calls, reason = streamed(coder, CODER, tools=[WEATHER])
    assert (thought, words, reason) == ("", "I look it up.\n", "tool_calls")
    assert [(name, json.loads(text)) for name, text in calls] == [("get_weather", ARGUMENTS)]
    two = CODER + "\n" + CODER.partition("\n")[2]
    assert len(streamed(coder, two, tools=[WEATHER])[2]) == 2
    assert len(streamed(coder, two, tools=[WEATHER], parallel_tool_calls=False)[2]) == 1
    assert streamed(coder, CODER)[1:3] == (CODER, [])  # no tools, no calls


def test_calls_as_tags_come_back_in_the_prompt(coder: RunningServer) -> None:
    with client(coder) as made:
        messages = asked(CODER)
        first = made.chat.completions.create(
            model="qwen3_coder", messages=messages, temperature=0, tools=[WEATHER]
        )
        message = first.choices[0].message
        call: Any = (message.tool_calls or [])[0]
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": said("It rains.")}
        second = made.chat.completions.create(
            model="qwen3_coder", messages=[*messages, message, result], temperature=0, tools=[WEATHER]  # type: ignore[list-item]
        )  # fmt: skip
    assert second.choices[0].message.content == "It rains."
    details = second.usage and second.usage.prompt_tokens_details
    assert details is not None and first.usage and (details.cached_tokens or 0) >= first.usage.prompt_tokens


def test_a_forced_call_of_a_model_with_tags_is_json(coder: RunningServer) -> None:
    script = '<tool_call>\n{"name": "get_weather", "arguments": ' + json.dumps(ARGUMENTS, ensure_ascii=False)
    _, _, calls, _ = streamed(coder, script + "}\n</tool_call>", tools=[WEATHER], tool_choice="required")
    assert [(name, json.loads(text)) for name, text in calls] == [("get_weather", ARGUMENTS)]


def test_qwen3s_own_template_thoughts_and_parallel_calls(qwen3: RunningServer) -> None:
    thought, words, calls, reason = streamed(qwen3, HERMES, tools=[WEATHER])
    assert (thought.strip(), words.strip(), reason) == (THOUGHT, "", "tool_calls")
    assert [json.loads(text)["city"] for _, text in calls] == ["Köln", "Oslo"]

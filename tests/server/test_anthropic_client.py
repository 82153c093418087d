"""The unmodified `anthropic` package, and langchain-openai, against `monotape serve` with a real model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from server.running import RunningServer
from waiting import PATIENCE_S

pytestmark = pytest.mark.slow
MODEL = "smollm2"
GREEDY = {"temperature": 0}  # newer clients have no argument for it
TOOL: Any = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def client(smollm2: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=smollm2.url, api_key="none", max_retries=0) as made:
        yield made


def ask(client: anthropic.Anthropic, text: str, **more: Any) -> Any:
    settings = {"max_tokens": 40, "extra_body": GREEDY, **more}
    return client.messages.create(model=MODEL, messages=[{"role": "user", "content": text}], **settings)


def test_a_message(client: anthropic.Anthropic) -> None:
    message = ask(client, "What is the capital of France?", system="Be brief.")
    assert message.type == "message" and message.role == "assistant"
    assert "Paris" in message.content[0].text
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert message.usage.output_tokens > 0


def test_cached_tokens_are_counted_apart(client: anthropic.Anthropic) -> None:
    first = ask(client, "Count to three in Latin.", max_tokens=3)
    again = ask(client, "Count to three in Latin.", max_tokens=3)
    total = first.usage.input_tokens + first.usage.cache_read_input_tokens
    assert again.usage.input_tokens == 1
    assert again.usage.cache_read_input_tokens == total - 1


def test_a_stream_has_the_whole_set_of_events(client: anthropic.Anthropic) -> None:
    plain = ask(client, "Say hello.", max_tokens=12)
    with client.messages.stream(
        model=MODEL, max_tokens=12, extra_body=GREEDY, messages=[{"role": "user", "content": "Say hello."}]
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert final.content[0].text == plain.content[0].text  # type: ignore[union-attr]
    assert final.stop_reason == plain.stop_reason
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    for kind in ("content_block_start", "content_block_delta", "content_block_stop", "message_delta"):
        assert kind in kinds


def test_a_tool_is_called_and_its_result_read(client: anthropic.Anthropic) -> None:
    with client.messages.stream(
        model=MODEL, max_tokens=64, extra_body=GREEDY, tools=[TOOL], tool_choice={"type": "any"},
        messages=[{"role": "user", "content": "How is the weather in Oslo?"}],
    ) as stream:  # fmt: skip
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use"
    (call,) = [block for block in message.content if block.type == "tool_use"]
    assert call.name == "get_weather" and call.input == {"city": "Oslo"}
    assert call.id.startswith("toolu_")
    messages: Any = [
        {"role": "user", "content": "How is the weather in Oslo?"},
        {"role": "assistant", "content": [block.model_dump() for block in message.content]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"}]},
    ]
    answer = client.messages.create(model=MODEL, max_tokens=8, messages=messages, tools=[TOOL])
    assert answer.usage.output_tokens > 0


def test_structured_output(client: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
    wanted: Any = {"format": {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}}
    message = ask(client, "The city is Rome.", output_config=wanted)
    assert json.loads(message.content[0].text) in ({"city": "Oslo"}, {"city": "Rome"})


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    message = ask(client, "Count: 1, 2, 3, 4, 5, 6", stop_sequences=[" "], max_tokens=30)
    assert message.stop_reason == "stop_sequence" and message.stop_sequence == " "


def test_tokens_are_counted_as_a_message_would(client: anthropic.Anthropic) -> None:
    messages: Any = [{"role": "user", "content": "How many tokens is this?"}]
    counted = client.messages.count_tokens(model=MODEL, messages=messages, system="Be brief.")
    message = client.messages.create(model=MODEL, messages=messages, system="Be brief.", max_tokens=1)
    assert counted.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def test_billing_headers_do_not_reach_the_prompt(client: anthropic.Anthropic) -> None:
    messages: Any = [{"role": "user", "content": "Hi."}]
    blocks: Any = [
        {"type": "text", "text": "x-anthropic-billing-header: 123"}, {"type": "text", "text": "Be brief."}
    ]  # fmt: skip
    with_header = client.messages.count_tokens(model=MODEL, messages=messages, system=blocks)
    without = client.messages.count_tokens(model=MODEL, messages=messages, system="Be brief.")
    assert with_header.input_tokens == without.input_tokens


def test_errors_have_the_classes_that_clients_catch(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(model="claude", max_tokens=1, messages=[{"role": "user", "content": "x"}])
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 8191 maximum"):
        ask(client, "one word " * 9000, max_tokens=5)


def test_models_have_the_shape_that_the_client_knows(
    client: anthropic.Anthropic, smollm2: RunningServer
) -> None:
    listed = client.models.list()
    assert [model.id for model in listed] == ["test/smollm2", "smollm2"] and not listed.has_more
    first = listed.data[0]
    assert (first.type, first.display_name, first.lifecycle) == ("model", "test/smollm2", "active")
    assert first.max_input_tokens == 8192 and first.created_at.year > 2020
    assert client.models.retrieve(MODEL) == next(model for model in listed if model.id == MODEL)
    paged = client.models.list(limit=1)
    assert paged.has_more and [model.id for model in paged] == ["test/smollm2", "smollm2"]
    assert [model.id for model in client.models.list(before_id="smollm2")] == ["test/smollm2"]
    with pytest.raises(anthropic.BadRequestError, match="limit is '0'"):
        client.models.list(limit=0)
    with pytest.raises(anthropic.NotFoundError, match="does not exist") as missing:
        client.models.retrieve("claude")
    assert missing.value.body["type"] == "error"  # type: ignore[index, call-overload]
    plain = smollm2.get("/v1/models").json()
    assert plain["object"] == "list" and plain["data"][0]["object"] == "model"


def test_langchain(smollm2: RunningServer) -> None:
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel, SecretStr

    class City(BaseModel):
        name: str

    with httpx.Client(timeout=PATIENCE_S) as web:
        model = ChatOpenAI(
            base_url=f"{smollm2.url}/v1", api_key=SecretStr("none"), model="smollm2", temperature=0, max_retries=0,
            http_client=web,
            max_completion_tokens=32,
        )  # fmt: skip
        assert "Paris" in str(model.invoke("What is the capital of France?").content)
        assert "Paris" in "".join(
            str(chunk.content) for chunk in model.stream("What is the capital of France?")
        )
        structured = model.with_structured_output(City, method="json_schema").invoke("The city is Oslo.")
        assert isinstance(structured, City)
        called = model.bind_tools([City], tool_choice="City").invoke("The city is Oslo.")
        assert called.tool_calls[0]["name"] == "City" and isinstance(
            called.tool_calls[0]["args"]["name"], str
        )

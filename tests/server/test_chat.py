"""/v1/chat/completions in detail, with a model that says what it is told."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from monotape.backends.token_ids import TokenIds
from monotape.engine.sampling_params import SamplingParams
from monotape.server.apis.completions import Prepared, _begin, _logprobs, _Places
from monotape.server.engine import wire
from monotape.server.service.service import Work
from server.running import RunningServer

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FIXED = {
    "type": "function",
    "function": {
        "name": "g",
        "parameters": {
            "properties": {"n": {"const": 7}},
            "required": ["n"],
            "additionalProperties": False,
            "type": "object",
        },
    },
}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "}"]}}\n</tool_call>'


def events(response: httpx.Response) -> list[Any]:
    """The data of a stream's events; the last is the text [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = [block for block in response.text.split("\n\n") if block and not block.startswith(":")]
    datas = [block.partition("data: ")[2] for block in blocks]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]


def stream(server: RunningServer, text: str, **more: Any) -> list[Any]:
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "stream": True, **more}
    return events(server.post("/v1/chat/completions", body))


def said(chunks: list[Any], field: str = "content") -> str:
    return "".join(chunk["choices"][0]["delta"].get(field, "") for chunk in chunks[:-1] if chunk["choices"])


def test_a_stream_from_its_first_chunk_to_its_last(scripted: RunningServer) -> None:
    chunks = stream(scripted, "say:hello wörld", stream_options={"include_usage": True})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert said(chunks) == "hello wörld"
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["choices"] == [] and chunks[-2]["usage"]["completion_tokens"] == 7
    assert chunks[-3]["choices"][0]["delta"] == {} and chunks[-3]["choices"][0]["finish_reason"] == "stop"
    assert {chunk["id"] for chunk in chunks[:-1]} == {chunks[0]["id"]}
    assert {chunk["object"] for chunk in chunks[:-1]} == {"chat.completion.chunk"}
    for figures in ("metrics", "timings"):
        assert chunks[-3][figures] == chunks[-2][figures]


def test_without_include_usage_there_is_no_usage_chunk(scripted: RunningServer) -> None:
    chunks = stream(scripted, "say:hi")
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert all("usage" not in chunk for chunk in chunks[:-1])


def test_tokens_are_sent_in_handfuls_the_first_and_last_at_once(scripted: RunningServer) -> None:
    chunks = stream(scripted, "rate=2000 repeat=500 say:x ")
    texts = [chunk["choices"][0]["delta"].get("content") for chunk in chunks[1:-2]]
    assert texts[0] in ("x", "x ")  # a token does not wait for others to be sent with it
    assert "".join(texts) == "x " * 500
    assert len(texts) < 400


def test_an_interval_fixes_the_size_of_the_handfuls() -> None:
    from server.running import scripted_server

    with scripted_server(stream_interval=7) as server:
        chunks = stream(server.wait(), "repeat=50 say:a")
    texts = [chunk["choices"][0]["delta"].get("content") for chunk in chunks[1:-2]]
    assert texts[0] == "a" and set(map(len, texts[1:-1])) == {7}


def test_characters_are_never_split(scripted: RunningServer) -> None:
    chunks = stream(scripted, "rate=150 say:äöü🙂é")
    assert said(chunks) == "äöü🙂é"
    assert not any("\ufffd" in json.dumps(chunk, ensure_ascii=False) for chunk in chunks)


def test_stop_strings_are_held_back(scripted: RunningServer) -> None:
    chunks = stream(scripted, "rate=300 say:one END two", stop=["END"])
    assert said(chunks) == "one "
    assert chunks[-2]["choices"][0]["stop_reason"] == "END"
    chunks = stream(scripted, "rate=300 say:one EN two", stop="END")
    assert said(chunks) == "one EN two"


def test_max_completion_tokens_beats_max_tokens(scripted: RunningServer) -> None:
    answer = scripted.chat("say:abcdefgh", max_tokens=7, max_completion_tokens=3)
    assert answer["choices"][0]["message"]["content"] == "abc"
    assert answer["choices"][0]["finish_reason"] == "length"


def test_content_may_be_parts_or_nothing(scripted: RunningServer) -> None:
    parts = [{"type": "text", "text": "say:yes"}]
    messages = [
        {"role": "developer", "content": "x"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": parts},
    ]
    answer = scripted.post("/v1/chat/completions", {"messages": messages, "temperature": 0}).json()
    assert answer["choices"][0]["message"]["content"] == "yes"


def test_unknown_fields_are_ignored(scripted: RunningServer) -> None:
    assert scripted.say("say:fine", some_future_field={"a": 1}, user="me", metadata={}) == "fine"


def test_thoughts_come_under_both_names(scripted: RunningServer) -> None:
    message = scripted.chat("say:<think>\nhm, so\n</think>\n\nyes")["choices"][0]["message"]
    assert message["content"] == "yes"
    assert message["reasoning"] == message["reasoning_content"] == "hm, so\n"
    chunks = stream(scripted, "rate=500 say:<think>\nhm, so\n</think>\n\nyes")
    assert said(chunks, "reasoning") == said(chunks, "reasoning_content") == "hm, so\n"
    assert said(chunks) == "yes"
    quiet = scripted.chat("say:<think>hm</think>yes", include_reasoning=False)["choices"][0]["message"]
    assert "reasoning" not in quiet and quiet["content"] == "yes"


def test_a_streamed_call_has_its_name_and_id_first(scripted: RunningServer) -> None:
    chunks = stream(scripted, f"rate=60 say:Well. {CALL}", tools=[TOOL])  # slower than a busy machine reads
    calls = [call for chunk in chunks[:-1] for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert calls[0]["function"] == {"name": "f", "arguments": ""} and calls[0]["id"].startswith("call_")
    assert calls[0]["type"] == "function"
    assert all("id" not in call and "name" not in call["function"] for call in calls[1:])
    assert len(calls) > 2
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"a": [1, "}"]}
    assert said(chunks) == "Well. "
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"


def test_two_calls_or_one(scripted: RunningServer) -> None:
    both = scripted.chat(f"say:{CALL}\n{CALL}", tools=[TOOL])["choices"][0]["message"]
    assert [call["function"]["name"] for call in both["tool_calls"]] == ["f", "f"]
    assert both["tool_calls"][0]["id"] != both["tool_calls"][1]["id"]
    one = scripted.chat(f"say:{CALL}\n{CALL}", tools=[TOOL], parallel_tool_calls=False)["choices"][0][
        "message"
    ]
    assert len(one["tool_calls"]) == 1


@pytest.mark.parametrize("tools", [{}, {"tools": [TOOL], "tool_choice": "none"}])
def test_without_tools_a_call_is_text(scripted: RunningServer, tools: dict[str, Any]) -> None:
    answer = scripted.chat(f"say:{CALL}", **tools)["choices"][0]
    assert answer["message"]["content"] == CALL
    assert answer["finish_reason"] == "stop"


def test_required_makes_a_call_of_anything(scripted: RunningServer) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 22]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "g", "parameters": schema}}
    answer = scripted.chat(
        "say:I would rather talk",
        tools=[TOOL, tool],
        tool_choice={"type": "function", "function": {"name": "g"}},
    )
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "g" and json.loads(call["function"]["arguments"])["n"] in (1, 22)


@pytest.mark.parametrize(
    ("parser", "written"),
    [
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]'),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1}}'),
    ],
)
def test_other_ways_to_write_calls(parser: str, written: str) -> None:
    from server.running import scripted_server

    with scripted_server(tool_call_parser=parser) as server:
        auto = server.wait().chat(f"say:{written}", tools=[TOOL])["choices"][0]
        forced = server.chat("say:nothing of that", tools=[FIXED], tool_choice="required")["choices"][0]
    assert auto["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert forced["message"]["tool_calls"][0]["function"] == {"name": "g", "arguments": '{"n": 7}'}
    assert auto["finish_reason"] == forced["finish_reason"] == "tool_calls"


def test_a_grammar_rules_the_answer(scripted: RunningServer) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert json.loads(scripted.say('say:{"ok": false}', response_format=wanted)) == {"ok": False}
    assert json.loads(scripted.say("say:no JSON at all", response_format=wanted)) in (
        {"ok": False},
        {"ok": True},
    )
    assert scripted.say("say:green", structured_outputs={"choice": ["red", "green"]}) == "green"
    assert scripted.say("say:blue", guided_choice=["red", "green"]) in ("red", "green")
    chunks = stream(scripted, "say:12-ab", structured_outputs={"regex": "[0-9]{2}-[a-z]{2}"}, logprobs=True)
    assert said(chunks) == "12-ab"


def test_timings_of_every_token_on_request(scripted: RunningServer) -> None:
    chunks = stream(scripted, "rate=300 repeat=20 say:a", timings_per_token=True)
    counts = [chunk["timings"]["predicted_n"] for chunk in chunks[1:-2]]
    times = [chunk["timings"]["predicted_ms"] for chunk in chunks[1:-2]]
    assert counts == sorted(counts) and counts[0] >= 1
    assert times == sorted(times) and times[0] == 0
    assert chunks[-2]["timings"]["predicted_n"] == 21


def test_the_progress_of_reading_the_prompt_on_request(scripted: RunningServer) -> None:
    text = f"{'a long way to read ' * 40} prefill=800 say:hi"
    chunks = stream(scripted, text, return_progress=True, stream_options={"include_usage": True})
    told = [chunk["prompt_progress"] for chunk in chunks[:-1] if "prompt_progress" in chunk]
    total = chunks[-2]["usage"]["prompt_tokens"]
    assert len(told) >= 2 and {step["total"] for step in told} == {total}
    assert told[0]["processed"] == told[0]["cache"] == chunks[-2]["timings"]["cache_n"]
    assert sorted({step["processed"] for step in told}) == list(
        dict.fromkeys(step["processed"] for step in told)
    )
    assert total >= told[-1]["processed"] > told[0]["cache"]
    assert all(chunk["choices"] == [] for chunk in chunks[:-1] if "prompt_progress" in chunk)
    places = [place for place, chunk in enumerate(chunks[:-1]) if "prompt_progress" in chunk]
    assert said(chunks) == "hi" and said(chunks[: places[-1] + 2]) == ""  # all of it before the first token
    assert not any(
        "prompt_progress" in chunk for chunk in stream(scripted, text)[:-1]
    )  # only where it is wanted


def test_an_echo_alone_has_no_tokens_of_its_own(scripted: RunningServer) -> None:
    body = {"prompt": "say:hi", "echo": True, "max_tokens": 0}
    answer = scripted.post("/v1/completions", body).json()
    chunks = events(
        scripted.post("/v1/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})
    )
    assert answer["choices"][0]["text"] == "say:hi"
    for usage in (answer["usage"], chunks[-2]["usage"]):
        assert usage["completion_tokens"] == 0 and usage["total_tokens"] == usage["prompt_tokens"] > 0


def test_a_streamed_echo_places_its_scores_where_the_prompt_is(scripted: RunningServer) -> None:
    body = {"prompt": "say:hi", "echo": True, "logprobs": 0, "max_tokens": 2, "temperature": 0}
    whole = scripted.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    chunks = events(scripted.post("/v1/completions", {**body, "stream": True}))[:-1]
    shown = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    *answered, prompt = [logprobs for logprobs in shown if logprobs is not None]
    offsets = [*prompt["text_offset"], *(offset for part in answered for offset in part["text_offset"])]
    assert offsets == whole["text_offset"] == [0, 1, 2, 3, 4, 5, 6, 7]


def test_offsets_count_characters_and_not_the_tokens_they_are_made_of(scripted: RunningServer) -> None:
    body = {"prompt": "say:😀h", "echo": True, "logprobs": 0, "temperature": 0, "max_tokens": 5}
    choice = scripted.post("/v1/completions", body).json()["choices"][0]
    assert choice["text"] == "say:😀h😀h"
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4, 4, 4, 4, 5, 6, 6, 6, 6, 7]


def test_a_streamed_token_has_its_offset_however_late_its_text_comes(scripted: RunningServer) -> None:
    """What may become a stop string is held back; its tokens all had the offset of its beginning."""
    body = {"prompt": "rate=200 say:a😀bcd", "stop": ["😀bx"], "logprobs": 0, "temperature": 0}
    whole = scripted.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    chunks = events(scripted.post("/v1/completions", {**body, "stream": True}))[:-1]
    shown = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    offsets = [offset for logprobs in shown if logprobs is not None for offset in logprobs["text_offset"]]
    assert offsets == whole["text_offset"] == [0, 1, 1, 1, 1, 2, 3, 4, 5]


def test_a_token_that_the_echo_does_not_show_moves_no_offset() -> None:
    """As the one with which many tokenizers begin every text."""
    pieces = SimpleNamespace(bytes_of={1: b"<s>", 2: b"ab", 3: b"c"}.get)
    service: Any = SimpleNamespace(text=SimpleNamespace(tokenizer=SimpleNamespace(pieces=pieces)))
    prepared = Prepared(Work(TokenIds.of([1, 2, 3]), SamplingParams()), "abc")
    scores = [None, wire.Chosen(2, -1.0, []), wire.Chosen(3, -1.0, [])]
    places = _Places(_begin(service, prepared))
    assert _logprobs(service, scores, prepared, places)["text_offset"] == [0, 0, 2]


def test_of_likely_tokens_that_read_alike_the_likeliest_is_shown() -> None:
    """Parts of characters are all the same sign; the most likely token is the largest value."""
    pieces = SimpleNamespace(bytes_of={1: b"a", 2: b"\xf0", 3: b"\xc3"}.get)
    service: Any = SimpleNamespace(text=SimpleNamespace(tokenizer=SimpleNamespace(pieces=pieces)))
    prepared = Prepared(Work(TokenIds.of([1]), SamplingParams()), "")
    chosen: list[wire.Chosen | None] = [wire.Chosen(2, -0.5, [(2, -0.5), (1, -1.0), (3, -2.0)])]
    assert _logprobs(service, chosen, prepared, _Places(0))["top_logprobs"] == [{"\ufffd": -0.5, "a": -1.0}]


def test_a_completion_counts_its_tokens_in_every_chunk_on_request(scripted: RunningServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "rate=200 say:abc", "stream": True, "stream_options": options, "temperature": 0}
    *chunks, last, _ = events(scripted.post("/v1/completions", body))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] >= 1
    assert counts[-1] == last["usage"]["completion_tokens"]
    assert all(chunk["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"] for chunk in chunks)


def test_a_chat_counts_its_tokens_in_every_chunk_on_request(scripted: RunningServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    messages = [{"role": "user", "content": "rate=200 say:abc"}]
    body = {"messages": messages, "stream": True, "stream_options": options, "temperature": 0}
    *chunks, last, _ = events(scripted.post("/v1/chat/completions", body))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert counts == sorted(counts) and counts[-1] == last["usage"]["completion_tokens"]
    assert all(chunk["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"] for chunk in chunks)


def test_a_request_id_is_echoed_or_made(scripted: RunningServer) -> None:
    assert scripted.get("/version", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = scripted.get("/version", headers={"x-request-id": "no spaces, please"}).headers["x-request-id"]
    assert len(made) == 16


def test_a_cached_prefix_is_reported_and_a_miss_explained(scripted: RunningServer) -> None:
    before = scripted.metric("monotape_prefix_cache_misses_total")
    first = scripted.chat("say:prefix one two three four five six seven")["usage"]
    again = scripted.chat("say:prefix one two three four five six seven")["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] == first["prompt_tokens"] - 1
    between = scripted.metric("monotape_prefix_cache_misses_total")
    assert between <= before + 1  # the same again is no miss
    scripted.chat("zzz and something quite different from everything before it, say:x")
    assert (
        scripted.metric("monotape_prefix_cache_misses_total") == between + 1
    )  # although the template is the same


def test_tokens_there_and_back(scripted: RunningServer) -> None:
    counted = scripted.post("/tokenize", {"prompt": "hello wörld", "return_token_strs": True}).json()
    assert (
        counted["count"] == len(counted["tokens"]) == len(counted["token_strs"])
        and counted["max_model_len"] == 20_000
    )
    assert scripted.post("/detokenize", {"tokens": counted["tokens"]}).json() == {"prompt": "hello wörld"}
    chat = scripted.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()
    assert (
        scripted.post("/detokenize", {"tokens": chat["tokens"]}).json()["prompt"]
        == "<|user|>hi<|eot|><|assistant|>"
    )


def test_the_small_routes(scripted: RunningServer) -> None:
    named = scripted.get("/tokenizer_info").json()
    assert named["eos_token"] == "<|end|>" and named["chat_template"].startswith("{#")
    assert scripted.get("/health").json() == {"status": "ok"}
    info = scripted.get("/monotape/info").json()
    assert info["model"] == "scripted" and info["context"] == 20_000 and info["backend"] == "scripted"
    assert info["sampling"]["temperature"] >= 0 and "top_p" in info["sampling"]
    assert info["bandwidth_bytes_per_second"] is None and info["bytes_per_token"]["kv_per_position"] > 0
    assert [phase["phase"] for phase in info["startup"]][-3:] == [
        "warm-up token",
        "grammars",
        "memory bandwidth",
    ]
    assert "vllm:generation_tokens_total" in scripted.get("/metrics").text
    page = scripted.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8" and "<html" in page.text.lower()
    assert "default-src 'none'" in page.headers["content-security-policy"]


def test_the_start_is_printed_as_a_table(scripted: RunningServer) -> None:
    table = [line for line in scripted.lines if line.endswith(" s") and not line.startswith("INFO")]
    assert [line.split("  ")[0].strip() for line in table] == [
        "start the engine process", "weights", "warm-up token", "grammars", "memory bandwidth", "total"
    ]  # fmt: skip


def test_a_request_of_opencode_with_its_defaults(scripted: RunningServer) -> None:
    """The shape in which its package sends tools, results without text, and what it knows of the provider."""
    parameters = {
        "$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "additionalProperties": False,
        "properties": {"command": {"description": "To run", "type": "string"}}, "required": ["command"],
    }  # fmt: skip
    body = {
        "max_tokens": 200, "temperature": 0, "top_p": 1, "stream": True, "stream_options": {"include_usage": True},
        "tool_choice": "auto", "reasoningEffort": "medium", "tools": [
            {"type": "function", "function": {"name": "bash", "description": "Runs.", "parameters": parameters}}
        ],
        "messages": [
            {"role": "system", "content": "You are an agent."}, {"role": "system", "content": "In a folder."},
            {"role": "user", "content": [{"type": "text", "text": "Go."}]},
            {"role": "assistant", "content": "", "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": '{"command":"ls"}'}}
            ]},
            {"role": "tool", "tool_call_id": "call_1", "content": ""},
            {"role": "user", "content": 'say:<tool_call>{"name": "bash", "arguments": {"command": "pwd"}}</tool_call>'},
        ],
    }  # fmt: skip
    response = scripted.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    chunks = [json.loads(line[6:]) for line in response.text.split("\n\n")[:-2]]
    calls = [
        call
        for chunk in chunks
        for choice in chunk["choices"]
        for call in choice["delta"].get("tool_calls", [])
    ]
    assert calls[0]["function"]["name"] == "bash" and calls[0]["id"]
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"command": "pwd"}
    assert chunks[-1]["usage"]["total_tokens"] > 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "TEXT"}]}),
        ("/v1/completions", {"prompt": "TEXT"}),
        ("/v1/responses", {"input": "TEXT"}),
        ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": "TEXT"}]}),
    ],
)
def test_a_long_prompt_shows_its_progress_in_comments(
    scripted: RunningServer, path: str, body: dict[str, Any]
) -> None:
    text = f"{path} {'a long way to read ' * 40} prefill=800 say:hi"
    sent = json.loads(json.dumps({**body, "stream": True}).replace("TEXT", text))
    raw = scripted.post(path, sent).text
    told = [line for line in raw.splitlines() if line.startswith(":") and "prompt tokens read" in line]
    counts = [int(line.split()[1]) for line in told]
    assert len(counts) >= 2 and counts == sorted(set(counts))
    assert "prompt_progress" not in raw
    again = scripted.post(path, sent).text  # all of it is cached: there is nothing to show
    assert not [
        line
        for line in again.splitlines()
        if "prompt tokens read" in line and int(line.split()[1]) < counts[0]
    ]


def test_a_completion_shows_its_progress_in_chunks_on_request(scripted: RunningServer) -> None:
    text = f"to be completed {'a long way to read ' * 40} prefill=800 say:hi"
    raw = scripted.post("/v1/completions", {"prompt": text, "stream": True, "return_progress": True}).text
    assert "prompt tokens read" not in raw
    chunks = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert len(told) >= 2 and told[-1]["processed"] == told[-1]["total"] > told[0]["processed"]
    first = next(place for place, chunk in enumerate(chunks) if chunk["choices"])
    assert not any("prompt_progress" in chunk for chunk in chunks[first:])


def test_the_last_step_of_the_progress_is_the_whole_prompt(scripted: RunningServer) -> None:
    chunks = stream(scripted, f"{'another long way ' * 40} prefill=300 say:hi", return_progress=True)
    told = [chunk["prompt_progress"] for chunk in chunks[:-1] if "prompt_progress" in chunk]
    assert told[-1]["processed"] == told[-1]["total"]


def test_a_header_that_changes_with_every_call_is_counted(scripted: RunningServer) -> None:
    rest = " ".join(f"rule {number * number}" for number in range(90))
    before = scripted.metric("monotape_changed_prefix_tokens_total")
    for stamp in ("17:04:11", "17:05:52", "17:06:20"):  # of three, two replicas read two
        body = [{"role": "system", "content": f"now {stamp}; {rest}"}, {"role": "user", "content": "say:ok"}]
        assert scripted.post("/v1/chat/completions", {"messages": body}).status_code == 200
    assert scripted.metric("monotape_changed_prefixes_total") >= 1
    assert scripted.metric("monotape_changed_prefix_tokens_total") - before > 400
    assert scripted.metric('monotape_prefix_cache_misses_total{reason="changed"}') >= 1

"""No field that changes the answer is dropped: each that a known server documents is served, refused or harmless."""

from __future__ import annotations

import json
from typing import Any

import anthropic.types
import anthropic.types.beta
import msgspec
import openai.types
import openai.types.chat
import openai.types.responses
import pytest

from monotape.server.apis.routes import ANSWERED, ROUTES
from monotape.server.requests.fields import IGNORED, REFUSED
from server.running import RunningServer

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
PLAIN: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "say:hi"}], "temperature": 0},
    COMPLETIONS: {"prompt": "say:hi", "temperature": 0},
    RESPONSES: {"input": "say:hi", "temperature": 0},
    MESSAGES: {"messages": [{"role": "user", "content": "say:hi"}], "max_tokens": 40, "temperature": 0},
}
#: What the clients of OpenAI and Anthropic can send.
SDK = [
    openai.types.chat.completion_create_params.CompletionCreateParamsBase,
    openai.types.completion_create_params.CompletionCreateParamsBase,
    openai.types.responses.response_create_params.ResponseCreateParamsBase,
    anthropic.types.message_create_params.MessageCreateParamsBase,
    anthropic.types.beta.message_create_params.MessageCreateParamsBase,
]
#: What the other servers document beyond these.
NAMES = {
    "vLLM": """use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids
    include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
    truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo
    add_special_tokens documents media_io_kwargs mm_processor_kwargs structured_outputs guided_json guided_regex
    guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern structural_tag priority request_id
    session_id return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets
    return_prompt_text return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs
    repetition_detection logits_processors thinking_token_budget prompt_embeds""",
    "llama.cpp": """verbose
    timings_per_token cache_prompt return_tokens return_progress sse_ping_interval n_predict n_indent
    n_keep n_discard n_cmpl n_cache_reuse t_max_predict_ms response_fields top_k top_p min_p top_n_sigma xtc_probability
    xtc_threshold typical_p dynatemp_range dynatemp_exponent repeat_last_n repeat_penalty dry_multiplier dry_base
    dry_allowed_length dry_penalty_last_n dry_sequence_breakers mirostat mirostat_tau mirostat_eta adaptive_target
    adaptive_decay seed n_probs min_keep backend_sampling post_sampling_probs lora json_schema grammar grammar_lazy
    grammar_triggers preserved_tokens reasoning_format generation_prompt parse_tool_calls reasoning_control
    reasoning_budget_tokens reasoning_budget_start_tag reasoning_budget_end_tag reasoning_budget_end_tags
    reasoning_budget_message logit_bias ignore_eos stop samplers image_data id_slot""",
    "Ollama": "options format think template raw images keep_alive num_ctx num_predict",
}


def decided(name: str) -> bool:
    """Served by a route, and so refused by those that do not serve it; or in one of the tables."""
    return name in (*REFUSED, *IGNORED) or any(name in body.__struct_fields__ for body in ANSWERED)


@pytest.mark.parametrize("params", SDK)
def test_every_field_of_the_official_clients_is_decided(params: type) -> None:
    undecided = [name for name in params.__annotations__ if not decided(name)]
    assert not undecided, "serve them, or enter them in fields.py"


@pytest.mark.parametrize("name", sorted({name for names in NAMES.values() for name in names.split()}))
def test_every_field_of_other_servers_is_decided(name: str) -> None:
    assert decided(name)


def test_a_field_has_one_fate() -> None:
    assert not REFUSED.keys() & IGNORED.keys()
    served_everywhere = set.intersection(*(set(body.__struct_fields__) for body in ANSWERED))
    assert not served_everywhere & (REFUSED.keys() | IGNORED.keys())


@pytest.mark.parametrize("route", [route for route in ROUTES if route.body in ANSWERED], ids=lambda r: r.path)
def test_null_asks_for_nothing(route: Any) -> None:
    names = [*REFUSED, *IGNORED, *(name for body in ANSWERED for name in body.__struct_fields__)]
    assert route.refuse is not None
    required = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "input": "x", "max_tokens": 5}
    own = set(route.body.__struct_fields__)
    given = {**dict.fromkeys(set(names) - own), **{name: required[name] for name in required.keys() & own}}
    route.refuse(msgspec.json.decode(json.dumps(given), type=route.wide))


#: A value of each that would change the answer.
CHANGES: dict[str, Any] = {
    "repeat_penalty": 1.3, "typical_p": 0.5, "mirostat": 2, "top_n_sigma": 1.0, "xtc_probability": 0.5,
    "dry_multiplier": 0.8, "dynatemp_range": 0.5, "n_predict": 5, "samplers": ["top_k"], "options": {"num_ctx": 9},
    "format": "json", "think": True, "thinking_token_budget": 5, "return_token_ids": True, "cache_salt": "x",
    "vllm_xargs": {"a": 1}, "parse_tool_calls": False, "detokenize": False, "reasoning_format": "none",
    "guided_whitespace_pattern": "[ ]*", "t_max_predict_ms": 5, "lora": [{"id": 0, "scale": 1}], "moderation": {"a": 1},
    "prompt_logprobs": 0, "bad_words": ["x"], "grammar_lazy": True, "functions": [{}], "best_of": 2,
}  # fmt: skip
#: What clients of these servers send when they want nothing.
NOTHING: dict[str, Any] = {
    "repeat_penalty": 1.0, "repeat_last_n": 64, "typical_p": 1, "mirostat": 0, "mirostat_tau": 5, "top_n_sigma": -1,
    "xtc_probability": 0.0, "xtc_threshold": 0.1, "dry_multiplier": 0, "dry_base": 1.75, "dynatemp_range": 0,
    "n_predict": -1, "n_keep": 0, "cache_prompt": True, "reasoning_format": "auto", "samplers": [],
    "grammar_lazy": False, "n_probs": 0,
    "length_penalty": 1.0, "use_beam_search": False, "best_of": 1, "bad_words": [], "user": "me",
    "metadata": {"a": "b"}, "service_tier": "auto", "prompt_cache_key": "k", "keep_alive": "5m", "store": True,
    "modalities": ["text"], "guided_decoding_backend": "xgrammar", "parse_tool_calls": True, "nobody_knows": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", list(CHANGES))
@pytest.mark.parametrize("path", list(PLAIN))
def test_what_changes_the_answer_is_refused_by_name(scripted: RunningServer, path: str, name: str) -> None:
    response = scripted.post(path, {**PLAIN[path], name: CHANGES[name]})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert f"{name} is not supported: " in error["message"]
    assert path == MESSAGES or (error["code"], error["param"]) == ("unsupported_parameter", name)


@pytest.mark.parametrize("path", list(PLAIN))
def test_what_asks_for_nothing_is_answered(scripted: RunningServer, path: str) -> None:
    response = scripted.post(path, {**PLAIN[path], **NOTHING})
    assert response.status_code == 200, response.text
    assert "hi" in response.text


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (RESPONSES, "grammar", 'root ::= "yes"'),
        (RESPONSES, "json_schema", {"type": "object"}),
        (RESPONSES, "response_format", {"type": "json_object"}),
        (RESPONSES, "seed", 0),
        (RESPONSES, "stop", ["x"]),
        (RESPONSES, "n", 2),
        (RESPONSES, "include", ["message.output_text.logprobs"]),
        (MESSAGES, "grammar", 'root ::= "yes"'),
        (MESSAGES, "guided_choice", ["a"]),
        (MESSAGES, "skip_special_tokens", False),
        (MESSAGES, "context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}),
        (COMPLETIONS, "tools", [{"type": "function", "function": {"name": "f"}}]),
        (COMPLETIONS, "messages", [{"role": "user", "content": "x"}]),
        (CHAT, "system", "Be brief."),
        (CHAT, "thinking", {"type": "disabled"}),
        (CHAT, "stop_sequences", ["x"]),
        (CHAT, "max_output_tokens", 5),
    ],
)  # fmt: skip
def test_a_field_of_another_route_is_refused(
    scripted: RunningServer, path: str, field: str, value: Any
) -> None:
    response = scripted.post(path, {**PLAIN[path], field: value})
    assert response.status_code == 400, response.text
    assert f"{field} is not supported: " in response.json()["error"]["message"]


def test_what_agents_send_is_answered(scripted: RunningServer) -> None:
    codex = {"include": ["reasoning.encrypted_content"], "store": False,
             "stream_options": {"include_obfuscation": False},
             "prompt_cache_key": "k", "client_metadata": {"a": "b"}, "text": {"verbosity": "low"},
             "reasoning": {"effort": "medium", "summary": "auto"}, "service_tier": "auto"}  # fmt: skip
    assert scripted.post(RESPONSES, {**PLAIN[RESPONSES], **codex}).status_code == 200
    claude = {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
              "metadata": {"user_id": "u"}, "output_config": {"effort": "high"}, "betas": ["x"], "speed": "fast",
              "thinking": {"type": "enabled", "budget_tokens": 1024}}  # fmt: skip
    assert scripted.post(MESSAGES, {**PLAIN[MESSAGES], **claude}).status_code == 200


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "asked",
    [
        {"json_schema": SCHEMA},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        {"grammar": 'root ::= "{\\"ok\\": " ("true" | "false") "}"'},
        {"grammar": 'start: "{\\"ok\\": " ("true" | "false") "}"'},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_grammar_is_honoured_however_it_is_asked_for(
    scripted: RunningServer, path: str, asked: dict[str, Any]
) -> None:
    response = scripted.post(path, {**PLAIN[path], **asked, "max_tokens": 60})
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    assert json.loads(text) in ({"ok": True}, {"ok": False})


def test_the_older_name_of_anthropics_format_is_honoured(scripted: RunningServer) -> None:
    asked = {"output_format": {"type": "json_schema", "schema": SCHEMA}}
    answer = scripted.post(MESSAGES, {**PLAIN[MESSAGES], **asked}).json()
    assert json.loads(answer["content"][0]["text"]) in ({"ok": True}, {"ok": False})


def test_a_schema_beside_json_object_is_honoured_in_responses(scripted: RunningServer) -> None:
    asked = {"text": {"format": {"type": "json_object", "schema": SCHEMA}}}
    answer = scripted.post(RESPONSES, {**PLAIN[RESPONSES], **asked}).json()
    assert json.loads(answer["output"][0]["content"][0]["text"]) in ({"ok": True}, {"ok": False})


def test_structured_outputs_as_vllm_writes_them_out(scripted: RunningServer) -> None:
    whole = {"json": None, "regex": None, "choice": ["red"], "grammar": None, "json_object": None,
             "disable_any_whitespace": False, "disable_fallback": False, "disable_additional_properties": False,
             "whitespace_pattern": None, "structural_tag": None}  # fmt: skip
    assert scripted.say("say:red", structured_outputs=whole) == "red"
    for name, value in (
        ("disable_additional_properties", True),
        ("whitespace_pattern", " "),
        ("structural_tag", {"a": 1}),
    ):
        response = scripted.post(CHAT, {**PLAIN[CHAT], "structured_outputs": {**whole, name: value}})
        assert response.status_code == 400
        assert f"structured_outputs.{name} is not supported" in response.json()["error"]["message"]


def test_an_empty_grammar_is_none(scripted: RunningServer) -> None:
    assert scripted.say("say:free text", grammar="") == "free text"


@pytest.mark.parametrize(
    ("asked", "param", "words"),
    [
        (
            {"guided_regex": "a", "guided_json": SCHEMA},
            "guided_json",
            "more than one way: guided_json, guided_regex",
        ),
        (
            {"grammar": 'root ::= "a"', "json_schema": SCHEMA},
            "grammar",
            "more than one way: grammar, json_schema",
        ),
        ({"guided_choice": []}, "guided_choice", "length >= 1"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "One of the choices is empty"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "length >= 1"),
        ({"guided_choice": ["a"] * 10_001}, "guided_choice", "<= 10000"),
        ({"grammar": "root ::= nowhere"}, "grammar", "Rule 'nowhere' not found"),
        ({"json_schema": "3"}, "json_schema", "is not a JSON schema"),
        ({"json_schema": {"type": "nonsense"}}, "json_schema", "The JSON schema cannot be used"),
    ],
)
def test_a_grammar_that_cannot_be_is_refused(
    scripted: RunningServer, asked: dict[str, Any], param: str, words: str
) -> None:
    for path in (CHAT, COMPLETIONS):
        response = scripted.post(path, {**PLAIN[path], **asked})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("invalid_value", param), error
        assert words in error["message"]


def test_ten_thousand_choices_are_honoured(scripted: RunningServer) -> None:
    choices = [f"number {index} of many" for index in range(10_000)]
    assert scripted.say("say:number 9999 of many", guided_choice=choices) == choices[9999]
    assert scripted.say("say:none of them", structured_outputs={"choice": choices}, max_tokens=60) in choices

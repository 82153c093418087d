"""The bodies of OpenAI's completions and chat completions, with the further fields that vLLM takes.

What becomes of fields that are not listed here is in fields.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from monotape.server.grammar.definition import MAX_CHOICES

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Real = Annotated[float, Meta(ge=-1e6, le=1e6)]

Choices = Annotated[list[str], Meta(min_length=1, max_length=MAX_CHOICES)]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class JsonSchema(msgspec.Struct):
    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | bool | None = None  # where llama.cpp's clients put it


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    json: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None  # JSON is written in one way
    disable_fallback: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    structural_tag: Any = None


class FunctionTool(msgspec.Struct):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    type: Literal["function"]
    function: FunctionTool


class NamedFunction(msgspec.Struct):
    name: str


class NamedTool(msgspec.Struct):
    type: Literal["function"]
    function: NamedFunction


class Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None  # thoughts are given whole


class PredictedText(msgspec.Struct):
    type: Literal["text"]
    text: str


class Prediction(msgspec.Struct):
    """A text that the answer will repeat in large parts: it can change the speed, never the answer."""

    type: Literal["content"]
    content: str | list[PredictedText]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class Sampled(msgspec.Struct, kw_only=True):
    """How tokens are chosen, in both kinds of completion. Fields that a request leaves out have the model's values."""

    model: str | None = None
    temperature: Real | None = None
    top_p: Real | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Real | None = None
    repetition_penalty: Real | None = None
    presence_penalty: Real | None = None
    frequency_penalty: Real | None = None
    logit_bias: dict[str, Real] | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    n: Positive | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    structured_outputs: StructuredOutputs | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | bool | str | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    response_format: ResponseFormat | None = None
    timings_per_token: bool | None = None


class ChatRequest(Sampled, kw_only=True):
    """POST /v1/chat/completions"""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=10_000)]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=1024)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    reasoning: Reasoning | None = None
    verbosity: str | None = None
    include_reasoning: bool | None = None
    return_progress: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    prediction: Prediction | None = None


class CompletionRequest(Sampled, kw_only=True):
    """POST /v1/completions"""

    prompt: (
        str
        | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1, max_length=1_000_000)]
    )  # fmt: skip
    suffix: str | None = None
    max_tokens: Count | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    add_special_tokens: bool | None = None
    return_progress: bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize"""

    tokens: Annotated[list[TokenId], Meta(max_length=10_000_000)]
    model: str | None = None

"""Every field that OpenAI, Anthropic, llama.cpp, vLLM and Ollama document and that no body here has: its fate.

A field that changes the answer is served, which makes it part of a body, or refused by name. A field that changes
nothing about the answer is ignored. A field of one route that is sent to another is refused there. Undocumented names
are ignored, as clients expect. docs/api.md shows both tables.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from monotape.server.api_error import unsupported

_TEXT_ONLY = "this model reads and writes text only."
_NO_STATE = "this server keeps nothing between requests; send the whole conversation."
_SAMPLERS = "the samplers are temperature, top_k, top_p, min_p and the penalties."


def _are(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


_empty = _are(False, [], {}, "")  # and 0, which equals False


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a field is refused, and which of its values ask for nothing; null always does."""

    why: str
    asks_for_nothing: Callable[[Any], bool] = _empty

    def refuses(self, value: Any) -> bool:
        return value is not None and not self.asks_for_nothing(value)


def _at_most_zero(value: Any) -> bool:
    return isinstance(value, int | float) and value <= 0


def _keeps_all(value: Any) -> bool:
    """Anthropic's context_management with edits that remove nothing, as Claude Code sends it."""
    edits = value.get("edits") if isinstance(value, dict) else None
    return not edits or all(isinstance(edit, dict) and edit.get("keep") == "all" for edit in edits)


def _without_logprobs(value: Any) -> bool:
    return isinstance(value, list) and "message.output_text.logprobs" not in value


REFUSED: dict[str, Refused] = {
    # OpenAI
    "functions": Refused("use tools."),
    "function_call": Refused("use tool_choice.", _are("none", "auto")),
    "audio": Refused(_TEXT_ONLY),
    "image": Refused(_TEXT_ONLY),
    "modalities": Refused('only ["text"] is.', _are([], ["text"])),
    "web_search_options": Refused("this server does not search the web."),
    "moderation": Refused("this server does not moderate."),
    "best_of": Refused("ask for n completions instead.", _are(1)),
    "include": Refused("for log-probabilities use /v1/chat/completions.", _without_logprobs),
    "access_programs": Refused("it belongs to OpenAI's own service."),
    # OpenAI's and Anthropic's state and context
    "context_management": Refused("nothing is cut out of a conversation.", _keeps_all),
    "compaction": Refused("nothing is cut out of a conversation."),
    "thread": Refused(_NO_STATE),
    "fallbacks": Refused("this server has one model."),
    # vLLM
    "use_beam_search": Refused("this server samples."),
    "length_penalty": Refused("it belongs to beam search.", _are(1)),
    "bad_words": Refused("use logit_bias."),
    "allowed_token_ids": Refused("use structured_outputs."),
    "truncate_prompt_tokens": Refused("nothing is cut off silently."),
    "prompt_logprobs": Refused("use /v1/completions with echo and logprobs.", _are()),
    "logprob_token_ids": Refused("use top_logprobs."),
    "logits_processors": Refused("no code of requests is run."),
    "documents": Refused("put them into the messages."),
    "echo": Refused("use /v1/completions, or continue_final_message."),
    "prompt_embeds": Refused("give the prompt as text or token ids."),
    "structural_tag": Refused("use tools, or structured_outputs with a grammar."),
    "guided_whitespace_pattern": Refused("JSON is written with one space after commas and colons."),
    "thinking_token_budget": Refused("thoughts have no limit of their own.", _are(-1)),
    "repetition_detection": Refused("use repetition_penalty."),
    "watermarking": Refused("this server leaves no watermarks."),
    "return_tokens_as_token_ids": Refused("use /tokenize."),
    "return_token_ids": Refused("use /tokenize."),
    "return_prompt_text": Refused("use /tokenize with messages and then /detokenize."),
    "cache_salt": Refused("requests share the cache of prompts; run a server for each tenant."),
    "kv_transfer_params": Refused("the cache stays on this machine."),
    "ec_transfer_params": Refused(_TEXT_ONLY),
    "mm_processor_kwargs": Refused(_TEXT_ONLY),
    "media_io_kwargs": Refused(_TEXT_ONLY),
    "vllm_xargs": Refused("there are no extensions."),
    "detokenize": Refused("answers are text.", _are(True)),
    # llama.cpp
    "n_predict": Refused("use max_tokens.", _are(-1)),
    "n_cmpl": Refused("use n.", _are(1)),
    "n_indent": Refused("use structured_outputs with a grammar."),
    "n_probs": Refused("use logprobs."),
    "post_sampling_probs": Refused("use logprobs."),
    "min_keep": Refused(_SAMPLERS),
    "typical_p": Refused(_SAMPLERS, _are(1)),
    "top_n_sigma": Refused(_SAMPLERS, _at_most_zero),
    "dynatemp_range": Refused(_SAMPLERS),
    "xtc_probability": Refused(_SAMPLERS),
    "top_a": Refused(_SAMPLERS),
    "tfs_z": Refused(_SAMPLERS, _are(1)),
    "dry_multiplier": Refused("use repetition_penalty."),
    "repeat_penalty": Refused("use repetition_penalty.", _are(1)),
    "mirostat": Refused(_SAMPLERS),
    "adaptive_target": Refused(_SAMPLERS, _at_most_zero),
    "samplers": Refused("their order is fixed: penalties, temperature, min_p, top_k, top_p."),
    "t_max_predict_ms": Refused("use max_tokens.", _at_most_zero),
    "grammar_lazy": Refused("a grammar holds from the first token."),
    "grammar_triggers": Refused("a grammar holds from the first token."),
    "lora": Refused("adapters are not applied."),
    "image_data": Refused(_TEXT_ONLY),
    "return_tokens": Refused("use /tokenize."),
    "response_fields": Refused("answers have all their fields."),
    "reasoning_format": Refused("thoughts are in reasoning_content.", _are("auto", "deepseek")),
    "reasoning_budget_tokens": Refused("thoughts have no limit of their own.", _are(-1)),
    "thinking_budget_tokens": Refused("thoughts have no limit of their own.", _are(-1)),
    "reasoning_budget_message": Refused("thoughts have no limit of their own."),
    "generation_prompt": Refused("use continue_final_message."),
    "parse_tool_calls": Refused("leave tools out instead.", _are(True)),
    # Ollama
    "options": Refused(
        "give temperature, max_tokens and the others as fields; the context is --max-model-len."
    ),
    "format": Refused("use response_format."),
    "think": Refused("use reasoning_effort."),
    "template": Refused("use chat_template."),
    "raw": Refused("use /v1/completions."),
    "images": Refused(_TEXT_ONLY),
    "num_ctx": Refused("the context is set when the server starts, with --max-model-len."),
    "num_predict": Refused("use max_tokens.", _are(-1)),
}

_BILLING, _SPEED, _OTHER = (
    "about accounts and bills",
    "about speed or order",
    "belongs to a field that is refused",
)
_CACHE = "prompts are cached without being asked"
IGNORED: dict[str, str] = {
    # OpenAI
    "metadata": _BILLING, "user": _BILLING, "safety_identifier": _BILLING, "service_tier": _SPEED,
    "store": "nothing is kept", "prompt_cache_key": _CACHE, "prompt_cache_retention": _CACHE,
    "prompt_cache_options": _CACHE, "stream_options": "of /v1/responses: streams are not padded",
    "client_metadata": _BILLING,
    # Anthropic
    "cache_control": _CACHE, "inference_geo": _BILLING, "speed": _SPEED, "user_profile_id": _BILLING,
    "workspace_id": _BILLING, "betas": "names interfaces, not answers", "diagnostics": _BILLING,
    "anthropic_version": "names interfaces, not answers", "anthropic_beta": "names interfaces, not answers",
    "fallback_credit_token": _BILLING, "billing_policy": _BILLING,
    # vLLM
    "priority": _SPEED, "request_id": _BILLING, "session_id": _BILLING,
    "spaces_between_special_tokens": "tokenizers here add no spaces of their own",
    "guided_decoding_backend": "there is one", "truncation_side": _OTHER,
    "return_token_offsets": "of another route", "return_mm_kwargs": "of another route",
    "routed_experts_prompt_start": _OTHER,
    # llama.cpp
    "cache_prompt": _CACHE, "n_cache_reuse": _CACHE, "id_slot": _SPEED,
    "n_keep": "a conversation that does not fit is refused", "n_discard": "a conversation that does not fit is refused",
    "dynatemp_exponent": _OTHER, "xtc_threshold": _OTHER, "dry_base": _OTHER, "dry_allowed_length": _OTHER,
    "dry_penalty_last_n": _OTHER, "dry_sequence_breakers": _OTHER, "repeat_last_n": _OTHER, "mirostat_tau": _OTHER,
    "mirostat_eta": _OTHER, "adaptive_decay": _OTHER, "backend_sampling": _SPEED, "sse_ping_interval": _SPEED,
    "verbose": "about diagnostics", "preserved_tokens": _OTHER, "reasoning_control": _OTHER,
    "reasoning_budget_start_tag": _OTHER, "reasoning_budget_end_tag": _OTHER, "reasoning_budget_end_tags": _OTHER,
    # Ollama
    "keep_alive": "the model stays loaded",
}  # fmt: skip


class Unserved:
    """Refuses the fields of one route's bodies that change the answer and that the route does not serve."""

    def __init__(self, body: type[msgspec.Struct], path: str, others: Iterable[type[msgspec.Struct]]) -> None:
        own = set(body.__struct_fields__)
        elsewhere = {name for other in others for name in other.__struct_fields__}
        names = ((elsewhere - set(IGNORED)) | set(REFUSED)) - own
        self._rules = {
            name: REFUSED.get(name, Refused(f"POST {path} does not take it.", _ELSEWHERE.get(name, _empty)))
            for name in sorted(names)
        }
        fields: list[tuple[str, Any, Any]] = [(name, Any | UnsetType, UNSET) for name in self._rules]
        self._values: Callable[[Any], tuple[Any, ...]] = operator.attrgetter(*self._rules)
        #: The body with those fields too, so that it is decoded once.
        self.wide = msgspec.defstruct(body.__name__, fields, bases=(body,), kw_only=True)

    def check(self, request: msgspec.Struct) -> None:
        values = self._values(request)
        if values.count(UNSET) == len(values):  # of most requests
            return
        for (name, rule), value in zip(self._rules.items(), values, strict=True):
            if value is not UNSET and rule.refuses(value):
                raise unsupported(name, rule.why)


#: Values of another route's fields that ask for what every route does.
_ELSEWHERE: dict[str, Callable[[Any], bool]] = {
    "n": _are(1), "seed": _are(), "top_k": _are(0, -1), "repetition_penalty": _are(1), "include_reasoning": _are(True),
    "skip_special_tokens": _are(True), "add_generation_prompt": _are(True), "parallel_tool_calls": _are(True),
    "tool_choice": _are("auto", "none"), "response_format": _are({"type": "text"}), "truncation": _are("disabled"),
}  # fmt: skip

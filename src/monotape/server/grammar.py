"""Structured output: what a request asks for as a grammar of llguidance, and that grammar as a constraint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance
import numpy as np
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from monotape.engine.constrained import Mask
from monotape.engine.tokenizer import Tokenizer
from monotape.errors import RequestError

MAX_GRAMMAR_CHARACTERS = 1 << 20
#: One way to write white space: a small model that may choose would go on for ever.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def from_json_schema(schema: Mapping[str, Any] | bool) -> str:
    """Text that is JSON of this schema."""
    return _checked(_json_grammar(schema), "The JSON schema")


def _json_grammar(schema: Mapping[str, Any] | bool) -> str:
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=_JSON_STYLE)  # type: ignore[arg-type]
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The JSON schema cannot be used: {error}.", "See json-schema.org.") from None


def from_regex(pattern: str) -> str:
    return _checked(llguidance.LLMatcher.grammar_from_regex(pattern), "The regular expression")


def from_choice(choices: Sequence[str]) -> str:
    """Exactly one of these texts."""
    return from_lark("start: " + " | ".join(map(json.dumps, choices)))


def from_lark(grammar: str) -> str:
    """A grammar in Lark's syntax, or in the EBNF of GBNF."""
    if "::=" in grammar:
        try:
            grammar = llguidance.gbnf_to_lark.gbnf_to_lark(grammar)
        except Exception as error:  # a parser of its own, which raises what it likes
            raise RequestError(f"The grammar cannot be used: {error}.", "Give Lark or GBNF.") from None
    return _checked(llguidance.LLMatcher.grammar_from_lark(grammar), "The grammar")


def from_tool(begin: str, name_key: str, arguments_key: str, end: str, tools: Mapping[str, Any]) -> str:
    """One call of one of these functions, written as the model's template wants it."""
    calls = []
    for name, parameters in tools.items():
        schema = parameters if isinstance(parameters, Mapping) else {"type": "object"}
        fields = {name_key: {"const": name}, arguments_key: schema}
        call = {"type": "object", "properties": fields, "required": [name_key, arguments_key]}
        calls.append(
            "%json " + json.dumps({**call, "additionalProperties": False, "x-guidance": _JSON_STYLE})
        )
    rules = [f"call_{index}: {call}" for index, call in enumerate(calls)]
    names = " | ".join(f"call_{index}" for index in range(len(calls)))
    parts = " ".join(filter(None, (_literal(begin), "call", _literal(end))))
    return _checked(
        llguidance.LLMatcher.grammar_from_lark("\n".join([f"start: {parts}", f"call: {names}", *rules])),
        "The schema of a tool",
    )


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


def _checked(grammar: str, what: str) -> str:
    if len(grammar) > MAX_GRAMMAR_CHARACTERS:
        raise RequestError(
            f"{what} is {len(grammar)} characters long.", f"At most {MAX_GRAMMAR_CHARACTERS} are allowed."
        )
    if problem := llguidance.LLMatcher.validate_grammar(grammar):
        if problem.startswith("WARNING"):
            return grammar
        first = problem.strip().splitlines()[0].rstrip(".")
        raise RequestError(f"{what} cannot be used: {first}.", "Simplify it; see llguidance's documentation.")
    return grammar


class _Wrapped:
    """Our tokenizer as llguidance wants to see one."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, end_id: int) -> None:
        self.eos_token_id, self.bos_token_id = end_id, tokenizer.bos_id
        self.tokens = [tokenizer.pieces.bytes_of(token_id) for token_id in range(vocab)]
        self.special_token_ids = sorted(tokenizer.pieces.special)
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        given = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(given, add_special=False)


class GrammarEngine:
    """A vocabulary prepared for masks; made once a model, when the first grammar comes."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, eos_ids: Sequence[int]) -> None:
        ends = sorted(eos_ids) or [0]
        wrapped = llguidance.TokenizerWrapper(_Wrapped(tokenizer, vocab, ends[0]))
        self._tokenizer = llguidance.LLTokenizer(wrapped, n_vocab=vocab, eos_token=ends)
        self._vocab = vocab

    def constraint(self, grammar: str) -> GrammarConstraint:
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise RequestError(f"The grammar cannot be used: {matcher.get_error()}", "Simplify it.")
        return GrammarConstraint(matcher, self._vocab)


class GrammarConstraint:
    """One text in the making, checked against its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab: int) -> None:
        self._matcher, self._vocab = matcher, vocab
        self._bits = allocate_token_bitmask(1, vocab)

    def forced(self) -> list[int]:
        return [] if self._matcher.is_stopped() else list(self._matcher.compute_ff_tokens())

    def allowed(self) -> Mask:
        if self._matcher.is_stopped() and not self._matcher.is_error():
            return np.zeros(self._vocab, np.bool_)
        fill_next_token_bitmask(self._matcher, self._bits)
        self._check()
        bits = np.unpackbits(self._bits.view(np.uint8)[0], count=self._vocab, bitorder="little")
        return bits.astype(np.bool_)

    def accept(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            first = self._matcher.get_error().strip().splitlines()[0].rstrip(".")
            raise RequestError(f"The grammar cannot be followed: {first}.", "Simplify it.")

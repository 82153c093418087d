"""llguidance as the grammar processes use it: a vocabulary prepared once, and one grammar followed token by token."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance
from llguidance import gbnf_to_lark

from monotape.engine.tokenizer import Tokenizer
from monotape.errors import RequestError
from monotape.server.grammar.definition import NAMES, Grammar

#: One way to write white space: a small model that may choose would go on for ever.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
#: Rows are wider than by default, for objects with thousands of optional properties; CPU time is limited anyway.
_PARSER_LIMITS = llguidance.LLParserLimits(
    max_items_in_row=20_000, step_max_items=200_000, verbose_errors=False
)
_TRIED_TOKENS = 3  # a grammar that breaks after its first tokens is refused before an answer has begun
_LONGEST_REASON = 200  # characters of llguidance's words that are passed on
_TYPES = "null, boolean, object, array, number, integer and string"
#: What to do about a grammar that is wrong rather than too large, by words of llguidance.
_HINTS = {
    "Invalid type": f"JSON schemas have the types {_TYPES}.",
    "Unimplemented keys": "Leave them out.",
    "Pointer '": "Correct the $ref, or add what it points at.",
}
_GBNF_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([\[\]])|.)", re.DOTALL
)


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


def prepared(tokenizer: Tokenizer, vocab: int, eos_ids: Sequence[int]) -> llguidance.LLTokenizer:
    """A vocabulary ready for masks."""
    ends = sorted(eos_ids) or [0]
    wrapped = llguidance.TokenizerWrapper(_Wrapped(tokenizer, vocab, ends[0]))
    return llguidance.LLTokenizer(wrapped, n_vocab=vocab, eos_token=ends)


class Matcher:
    """One grammar and the text in the making. Every problem is a RequestError of one sentence and a hint."""

    def __init__(self, vocabulary: llguidance.LLTokenizer, grammar: Grammar) -> None:
        self._what = NAMES[grammar.kind]
        self._matcher = llguidance.LLMatcher(
            vocabulary, self._source(grammar), log_level=0, limits=_PARSER_LIMITS
        )
        self._check("cannot be used")
        self._try(vocabulary)

    def consume(self, tokens: Sequence[int]) -> None:
        for token_id in tokens:
            self._matcher.consume_token(token_id)
        self._check("cannot be followed")

    def forced(self) -> list[int]:
        """The tokens that can only come next."""
        return [] if self._matcher.is_stopped() else list(self._matcher.compute_ff_tokens())

    def mask(self) -> bytes:
        """A bit for each token that may come next; nothing when the text is complete."""
        if self._matcher.is_stopped() and not self._matcher.is_error():
            return b""
        bits = self._matcher.compute_bitmask()
        self._check("cannot be followed")
        return bits

    def restart(self) -> None:
        self._matcher.reset()

    def _try(self, vocabulary: llguidance.LLTokenizer) -> None:
        for _ in range(_TRIED_TOKENS):
            allowed = int.from_bytes(self.mask(), "little")
            for end_id in vocabulary.eos_tokens:
                allowed &= ~(1 << end_id)
            if not allowed:
                break
            self.consume([(allowed & -allowed).bit_length() - 1])
        self.restart()

    def _check(self, verdict: str) -> None:
        if self._matcher.is_error():
            raise self._refused(verdict, self._matcher.get_error())

    def _refused(self, verdict: str, problem: str) -> RequestError:
        """llguidance's first line, or the one where its regex parser says what it is. A panic says nothing of use."""
        lines = [line.strip() for line in problem.strip().splitlines()] or [""]
        named = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        first = (named or lines)[0].rstrip(".")
        hint = next((hint for words, hint in _HINTS.items() if words in first), "Simplify it.")
        if first.startswith("panic") or not first:
            first = "it is too large or too deep"
        if len(first) > _LONGEST_REASON:
            first = f"{first[:_LONGEST_REASON]}..."
        return RequestError(f"{self._what} {verdict}: {first}.", hint)

    def _source(self, grammar: Grammar) -> str:
        """What a request gave as a grammar of llguidance."""
        try:
            if grammar.kind == "json":
                return llguidance.LLMatcher.grammar_from_json_schema(grammar.text, defaults=_JSON_STYLE)  # type: ignore[arg-type]
            if grammar.kind == "regex":
                return llguidance.LLMatcher.grammar_from_regex(grammar.text)
            writers = {"choice": _choice, "tool": _tool, "channels": _channels, "lark": _lark}
            made = writers[grammar.kind](grammar.text)
        except Exception as error:  # of parsers that raise what they like
            raise self._refused("cannot be used", str(error)) from None
        return llguidance.LLMatcher.grammar_from_lark(made)


def _choice(text: str) -> str:
    """One terminal for all of them: as rules they would all be open at once, and a row of items has its limit."""
    return "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, json.loads(text)))


def _tool(text: str) -> str:
    call: Mapping[str, Any] = json.loads(text)
    rules = []
    for index, (name, parameters) in enumerate(call["tools"].items()):
        schema = parameters if isinstance(parameters, Mapping) else {"type": "object"}
        fields = {call["name_key"]: {"const": name}, call["arguments_key"]: schema}
        shape = {"type": "object", "properties": fields, "required": list(fields)}
        written = json.dumps({**shape, "additionalProperties": False, "x-guidance": _JSON_STYLE})
        rules.append(f"call_{index}: %json {written}")
    names = " | ".join(f"call_{index}" for index in range(len(rules)))
    parts = " ".join(filter(None, (_literal(call["begin"]), "call", _literal(call["end"]))))
    return "\n".join([f"start: {parts}", f"call: {names}", *rules])


def _channels(text: str) -> str:
    rules = []
    for index, (name, parameters) in enumerate(json.loads(text).items()):
        schema = parameters if isinstance(parameters, Mapping) else {"type": "object"}
        written = json.dumps({**schema, "x-guidance": _JSON_STYLE})
        header = f'{json.dumps(name + " ")} <|constrain|> "json" <|message|>'
        rules.append(f"call_{index}: {header} arguments_{index}\narguments_{index}: %json {written}")
    return "\n".join(["start: " + " | ".join(f"call_{index}" for index in range(len(rules))), *rules])


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


def _lark(text: str) -> str:
    if "::=" not in text or gbnf_to_lark.is_lark_syntax(text):
        return text
    return gbnf_to_lark.gbnf_to_lark(_GBNF_ESCAPE.sub(_unescaped, text))


def _unescaped(match: re.Match[str]) -> str:
    """An escape that the converter and Lark read alike: the character itself, or \\x for one of ASCII."""
    digits = match[1] or match[2] or match[3]
    if digits is None:
        return f"\\x{ord(match[4]):02x}" if match[4] else match[0]
    code = int(digits, 16)
    return f"\\x{code:02x}" if code < 0x80 else chr(code)

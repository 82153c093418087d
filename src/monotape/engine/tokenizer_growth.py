"""How much longer a tokenizer.json can make a text, read off the file before the tokenizers library gets it.

Steps are chained, and each may write more than it reads: 26 that double a letter make 64 million of one, at the first
prompt or while the file is loaded, when its added tokens are normalised. A file that can do that is refused.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from monotape.errors import CheckpointError

GROWTH_LIMIT = 256  # NFKC (18) before byte-level (4) and a few replacements stay below
STEP_LIMIT = 64
BYTES_LIMIT = 200_000_000  # the longest honest files have about 35 MB
_HINT = "The file is damaged or made to exhaust this machine: use the tokenizer.json of the model's authors."

#: The most characters that a step makes of one. Unicode's own tables give those of its normal forms.
_NORMALIZERS = {
    "NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Nmt": 1, "Strip": 1, "StripAccents": 1, "Lowercase": 2,
    "BertNormalizer": 24, "ByteLevel": 4,
}  # fmt: skip
_PRE_TOKENIZERS = {
    "ByteLevel": 4, "Metaspace": 2, "Split": 1, "Whitespace": 1, "WhitespaceSplit": 1, "BertPreTokenizer": 1,
    "CharDelimiterSplit": 1, "Punctuation": 1, "Digits": 1, "UnicodeScripts": 1, "FixedLength": 1,
}  # fmt: skip
_UNKNOWN = 18  # a step that a later version of the library brings


def check_growth(path: Path) -> None:
    """Refuses a tokenizer.json that can make a text longer than makes sense."""
    steps = list(_steps(_pipeline(path)))
    if len(steps) > STEP_LIMIT:
        raise CheckpointError(
            f"{path.name} puts a text through {len(steps)} steps; at most {STEP_LIMIT} make sense.", _HINT
        )
    growth = 1
    for step in steps:
        growth *= step
        if growth > GROWTH_LIMIT:
            raise CheckpointError(
                f"{path.name} has {len(steps)} steps that can make a text more than {GROWTH_LIMIT} times as long.",
                _HINT,
            )


def _pipeline(path: Path) -> Mapping[str, Any]:
    """What happens to a text before it becomes tokens; the model itself, most of the file, is stepped over."""
    import msgspec

    class Pipeline(msgspec.Struct):
        normalizer: Any = None
        pre_tokenizer: Any = None

    try:
        size = path.stat().st_size
        if size > BYTES_LIMIT:
            raise CheckpointError(f"{path.name} has {size} bytes; at most {BYTES_LIMIT} make sense.", _HINT)
        found = msgspec.json.decode(path.read_bytes(), type=Pipeline)
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(
            f"{path.name} cannot be read: {error}.", "Download the checkpoint's tokenizer.json again."
        ) from None
    return {"normalizers": found.normalizer, "pretokenizers": found.pre_tokenizer}


def _steps(pipeline: Mapping[str, Any]) -> Iterator[int]:
    for step in _flat(pipeline["normalizers"], "normalizers"):
        yield _of_normalizer(step)
    for step in _flat(pipeline["pretokenizers"], "pretokenizers"):
        yield _PRE_TOKENIZERS.get(str(step.get("type")), _UNKNOWN)


def _flat(step: Any, inner: str) -> Iterator[Mapping[str, Any]]:
    """A sequence's steps, in order. A step of another kind counts too, whatever list it carries along."""
    waiting = [step]
    while waiting:
        step = waiting.pop()
        if not isinstance(step, dict):
            continue  # the library refuses it, by its own rules
        listed = step.get(inner)
        if isinstance(listed, list):
            waiting += reversed(listed)
        if step.get("type", "Sequence") != "Sequence" or not isinstance(listed, list):
            yield step


def _of_normalizer(step: Mapping[str, Any]) -> int:
    kind = str(step.get("type"))
    if kind == "Replace":
        return _of_replacement(step.get("pattern"), str(step.get("content", "")))
    if kind == "Prepend":
        return 1 + len(str(step.get("prepend", "")))
    if kind == "Precompiled":
        return _longest_entry(str(step.get("precompiled_charsmap", "")))
    return _NORMALIZERS.get(kind, _UNKNOWN)


def _of_replacement(pattern: Any, content: str) -> int:
    """A text is found at most once in its own length; an expression may match nothing at all, before every letter."""
    text = pattern.get("String") if isinstance(pattern, dict) else None
    if isinstance(text, str) and text:
        return max(1, -(-len(content) // len(text)))
    return len(content) + 1


def _longest_entry(encoded: str) -> int:
    """A SentencePiece map is the length of a trie, the trie, and the texts that it leads to, each ended by a NUL."""
    try:
        table = base64.b64decode(encoded)
    except (binascii.Error, ValueError):
        return 1  # the library says what is wrong with it
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return max(1, *(len(text.decode("utf-8", "replace")) for text in texts.split(b"\0")))

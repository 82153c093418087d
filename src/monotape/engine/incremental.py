"""Tokenises the new part of a conversation: the ids of text between two special tokens are kept and used again.

An added token ends what stands before it: the tokenizers library cuts a text there first, and encodes the parts by
themselves. So the ids of the parts, joined, are those of the text. Files for which that may not hold are not cut.

The next turn of a conversation begins with the text of the last one. Its ids up to there are kept as one array, which
one comparison of two texts finds. Where the beginning is another, the parts are looked up one by one.
"""

from __future__ import annotations

import collections
import itertools
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from monotape.backends.token_ids import TokenIds
from monotape.engine.tokenizer import Tokenizer

KEPT_CHARACTERS = (
    32 << 20
)  # of parts whose ids are kept, and as many of beginnings; the least recent go first
_MOST_BEGINNINGS = 64
_COST = 100  # characters that each entry counts for in addition to its text
_SAMPLES = ("a b", " c d ", "\n e")


@dataclass(frozen=True, slots=True)
class _Beginning:
    """The ids of the first `cut` characters of every text that begins with `text`."""

    text: str
    cut: int
    ids: NDArray[np.int32]


_NOTHING = _Beginning("", 0, np.empty(0, np.int32))


class IncrementalEncoder:
    """One tokenizer and the parts that it has encoded. Safe from any thread."""

    def __init__(self, tokenizer: Tokenizer, kept_characters: int = KEPT_CHARACTERS) -> None:
        self.tokenizer, self._limit = tokenizer, kept_characters
        self._lock = threading.Lock()
        self._known: collections.OrderedDict[tuple[str, bool], NDArray[np.int32]] = collections.OrderedDict()
        self._characters = 0
        self._beginnings: list[_Beginning] = []  # the most recent last

    @cached_property
    def _cuts(self) -> re.Pattern[str] | None:
        return _cuts(self.tokenizer)

    @cached_property
    def _longest(self) -> int:
        return max((len(token.content) for token in self.tokenizer.added_tokens), default=0)

    @cached_property
    def _frame(self) -> tuple[list[int], list[int]]:
        """The special tokens that are added before and after a text, whatever it says."""
        bare, whole = self.tokenizer.encode("a", add_special=False), self.tokenizer.encode("a")
        at = next(at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
        return whole[:at], whole[at + len(bare) :]

    def encode(self, text: str, *, add_special: bool = False) -> TokenIds:
        """The ids of a text in which special tokens count, as Tokenizer.encode gives them."""
        ids = self._encode(text)
        if not add_special:
            return ids
        before, after = self._frame
        framed = TokenIds.joined(before, ids, after) if before or after else ids
        bos = self.tokenizer.bos_id
        return framed[1:] if framed[:2] == [bos, bos] else framed  # a rendered chat template brings its own

    def _encode(self, text: str) -> TokenIds:
        known = self._beginning(text)
        bounds = self._bounds(text, known.cut)
        encode = partial(self.tokenizer.encode, add_special=False)
        parts = [self._ids(text[start:end], True, encode) for start, end in itertools.pairwise(bounds)]
        ids = np.concatenate([known.ids, *parts])
        self._keep(text, bounds, ids, parts, known)
        return TokenIds(ids)

    def known(self, text: str) -> int:
        """How many of its first characters were encoded before."""
        return self._beginning(text).cut

    def _beginning(self, text: str) -> _Beginning:
        with self._lock:
            found = [kept for kept in self._beginnings if text.startswith(kept.text)]
        return max(found, key=lambda kept: kept.cut, default=_NOTHING)

    def _bounds(self, text: str, start: int) -> list[int]:
        """Where the rest of a text is cut: each part begins at a special token and ends before the next."""
        found = () if self._cuts is None else self._cuts.finditer(text, start)
        bounds = [start, *(cut for match in found if (cut := match.start()) > start)]
        return bounds if start == len(text) else [*bounds, len(text)]

    def _keep(
        self,
        text: str,
        bounds: list[int],
        ids: NDArray[np.int32],
        parts: list[NDArray[np.int32]],
        old: _Beginning,
    ) -> None:
        """Keeps the ids up to the last cut that no continuation of the text can move, for those of `old`.

        What follows a cut decides which token is found there, so a text must be the same for the length of the longest.
        """
        count = len(ids)
        for cut, part in zip(reversed(bounds[:-1]), reversed(parts), strict=True):
            count -= len(part)
            if cut + self._longest <= len(text):
                break
        else:
            return
        if not cut:
            return
        kept = _Beginning(text[: cut + self._longest], cut, ids[:count])
        with self._lock:
            others = [other for other in self._beginnings if other is not old and other.text != kept.text]
            self._beginnings = [*others, kept][-_MOST_BEGINNINGS:]
            while self._beginnings and sum(len(other.text) for other in self._beginnings) > self._limit:
                del self._beginnings[0]

    def encode_spans(self, spans: Sequence[tuple[str, bool]]) -> TokenIds:
        """The ids of a list of (text, special): text holds no special token, special is the name of one."""
        parts = [np.empty(0, np.int32)]
        for text, special in spans:
            if special:
                token_id = self.tokenizer.id_of(text)
                assert token_id is not None, text
                parts.append(np.array([token_id], np.int32))
            else:
                parts.append(self._ids(text, False, self.tokenizer.encode_text))
        return TokenIds(np.concatenate(parts))

    def _ids(self, part: str, marked: bool, encode: Callable[[str], list[int]]) -> NDArray[np.int32]:
        key = (part, marked)
        with self._lock:
            if (known := self._known.get(key)) is not None:
                self._known.move_to_end(key)
                return known
        made = np.array(encode(part), np.int32)
        if len(part) <= self._limit:
            with self._lock:
                if self._known.setdefault(key, made) is made:
                    self._characters += _COST + len(part)
                while self._characters > self._limit:
                    self._characters -= _COST + len(self._known.popitem(last=False)[0][0])
        return made


def _cuts(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Finds the tokens at which a text is cut, as the library finds them: the leftmost, and the longest of those."""
    plain = [token for token in tokenizer.added_tokens if not token.normalized]
    if not plain or any(token.single_word or token.lstrip for token in plain):
        return None  # such a token depends on the characters before it, which a cut would remove
    longest = sorted(plain, key=lambda token: -len(token.content))
    first, last = min(token.content for token in plain), max(token.content for token in plain)
    size = next((at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), 0)
    common = first[:size]  # of all tokens: the search skips to it, ten times as fast
    rests = "|".join(re.escape(token.content[len(common) :]) for token in longest)
    found = re.compile(f"{re.escape(common)}(?:{rests})")
    sample = longest[0].content.join(_SAMPLES)
    whole = tokenizer.encode(sample, add_special=False)
    parts = [_SAMPLES[0], *(longest[0].content + text for text in _SAMPLES[1:])]
    cut = [token_id for part in parts for token_id in tokenizer.encode(part, add_special=False)]
    return found if cut == whole else None

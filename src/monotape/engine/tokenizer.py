"""Text to ids and back, from a tokenizer.json or from the vocabulary of a GGUF file."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monotape.engine.detokenizer import Detokenizer, decode
from monotape.engine.pieces import WORD_START, Pieces, Spelling
from monotape.engine.tokenizer_growth import check_growth
from monotape.errors import CheckpointError, RequestError
from monotape.weights.checkpoint import TextAssets, Vocabulary

if TYPE_CHECKING:
    import tokenizers

#: The tokens that a tokenizer_config.json names and a chat template may write.
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """What a model reads and writes. `add_bos` None leaves that to the file's own post-processor."""

    __slots__ = ("_add_bos", "_core", "_specials", "named_tokens", "pieces")

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        pieces: Pieces,
        *,
        named_tokens: Mapping[str, str],
        add_bos: bool | None = None,
    ) -> None:
        self._core = core
        self._add_bos = add_bos
        self._specials: re.Pattern[str] | None = None
        self.pieces = pieces
        self.named_tokens = dict(named_tokens)  # "bos_token": "<s>", ...

    @classmethod
    def from_assets(cls, assets: TextAssets) -> Tokenizer | None:
        """The checkpoint's tokenizer; None when it has none (ids in, ids out)."""
        if assets.vocabulary is not None:
            return cls._from_vocabulary(assets.vocabulary)
        if assets.tokenizer_json is not None:
            return cls._from_json(assets.tokenizer_json, assets.tokenizer_config or {})
        return None

    @classmethod
    def _from_vocabulary(cls, vocabulary: Vocabulary) -> Tokenizer:
        from monotape.engine.gguf_tokenizer import build

        core, pieces = build(vocabulary)
        ids = {
            "bos_token": vocabulary.bos_id, "eos_token": vocabulary.eos_id, "unk_token": vocabulary.unknown_id
        }  # fmt: skip
        named = {name: vocabulary.tokens[index] for name, index in ids.items() if index is not None}
        return cls(core, pieces, named_tokens=named, add_bos=vocabulary.add_bos)

    @classmethod
    def _from_json(cls, path: Path, config: Mapping[str, Any]) -> Tokenizer:
        import tokenizers

        check_growth(path)
        try:
            core = tokenizers.Tokenizer.from_buffer(path.read_bytes())
        except Exception as error:  # the library raises plain Exception for everything
            raise CheckpointError(
                f"{path.name} cannot be read: {error}.", "Download the checkpoint's tokenizer.json again."
            ) from None
        core.no_truncation()  # a length that was convenient in training would cut prompts silently
        core.no_padding()
        special = frozenset(
            index for index, token in core.get_added_tokens_decoder().items() if token.special
        )
        pieces = Pieces(core.id_to_token, _spelling(core.decoder, path), special)
        return cls(core, pieces, named_tokens=_named_tokens(config))

    @property
    def bos_id(self) -> int | None:
        return self._id_of("bos_token")

    @property
    def eos_id(self) -> int | None:
        return self._id_of("eos_token")

    def _id_of(self, name: str) -> int | None:
        token = self.named_tokens.get(name)
        return None if token is None else self.id_of(token)

    def id_of(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it; None when it is not in it."""
        found: int | None = self._core.token_to_id(token)
        return found

    @property
    def added_tokens(self) -> list[tokenizers.AddedToken]:
        """Tokens that are found in a text before it is cut into others."""
        return list(self._core.get_added_tokens_decoder().values())

    @property
    def size(self) -> int:
        """Tokens in the vocabulary; a model's own table may be padded beyond it."""
        return int(self._core.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """The ids of a text. Special tokens written in it count; a BOS that it starts with is not doubled."""
        _checked(text)
        by_processor = add_special and self._add_bos is None
        # Of the library's ways to encode, this one lets other threads run meanwhile and counts no offsets.
        ids: list[int] = self._core.encode_batch_fast([text], add_special_tokens=by_processor)[0].ids
        if not add_special:
            return ids
        bos = self.bos_id
        if self._add_bos and bos is not None:
            ids = [bos, *ids]
        if bos is not None and ids[:2] == [bos, bos]:
            return ids[1:]  # a rendered chat template brings its own
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return decode(self.pieces, ids, skip_special=skip_special)

    def encode_text(self, text: str) -> list[int]:
        """The ids of a text in which nothing is a special token, whatever it spells: such a spelling is cut in two."""
        if self._specials is None:
            listed = [
                token.content for token in self.added_tokens if token.special and len(token.content) > 1
            ]
            self._specials = re.compile("|".join(map(re.escape, listed)) or r"(?!)")
        _checked(text)
        cuts = [
            0,
            *(found.start() + min(2, len(found[0]) - 1) for found in self._specials.finditer(text)),
            len(text),
        ]
        parts = [text[start:end] for start, end in itertools.pairwise(cuts)]
        found = self._core.encode_batch_fast(parts, add_special_tokens=False)
        return [token_id for part in found for token_id in part.ids]

    def detokenizer(
        self, *, skip_special: bool, prompt: Sequence[int], special_mark: str = ""
    ) -> Detokenizer:
        """For the text that continues `prompt`."""
        return Detokenizer(self.pieces, skip_special=skip_special, prompt=prompt, special_mark=special_mark)

    def token_text(self, token_id: int) -> str:
        """One token by itself, for people: incomplete characters show as replacement characters."""
        return self.pieces.bytes_of(token_id).decode("utf-8", "replace")


def _checked(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"The text has half of a surrogate pair at character {error.start}.", "Decode it as UTF-8 first."
        ) from None
    return text


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The named tokens of a tokenizer_config.json, which has them as text or as an object with `content`."""
    named = {}
    for name in NAMED_TOKENS:
        value = config.get(name)
        content = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(content, str):
            named[name] = content
    return named


def _spelling(decoder: Any, path: Path) -> Spelling:
    """How the tokens of a tokenizer.json are spelled, read off its decoder."""
    import json

    steps = _steps(json.loads(decoder.__getstate__())) if decoder is not None else []
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return Spelling(byte_level=True)
    space = {"type": "Replace", "pattern": {"String": WORD_START}, "content": " "}
    if steps[:1] == [space] and kinds[1:3] == ["ByteFallback", "Fuse"]:
        strips = steps[3:]
        if not strips:
            return Spelling(False, byte_fallback=True)
        if kinds[3:] == ["Strip"] and strips[0].get("content") == " " and strips[0].get("stop") == 0:
            return Spelling(False, byte_fallback=True, leading_spaces=int(strips[0]["start"]))
    raise CheckpointError(
        f"{path.name} has a decoder that is not supported ({' + '.join(kinds) or 'none'}).",
        "Supported: ByteLevel, and SentencePiece with byte fallback.",
    )


def _steps(decoder: Mapping[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _steps(inner)]
    return [dict(decoder)]

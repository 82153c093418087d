"""Builds a tokenizer from the vocabulary inside a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from monotape.engine.pieces import WORD_START, Pieces, Spelling
from monotape.errors import CheckpointError
from monotape.weights.checkpoint import Vocabulary

if TYPE_CHECKING:
    import tokenizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_CONTRACTION = r"'s|'t|'re|'ve|'m|'ll|'d"
_SPACES = r"\s+(?!\S)|\s+"
_GPT2 = rf"{_CONTRACTION}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words_and_lines(digits: str) -> str:
    """Letters with one leading mark, `digits`, marks with the line ends that follow, line ends, spaces."""
    word = r"[^\r\n\p{L}\p{N}]?\p{L}+"
    return rf"(?i:{_CONTRACTION})|{word}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"


def _cased_words(digits: str, ending: str) -> str:
    """The same, but a word also ends where lower case turns to upper case."""
    mark = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{mark}{_UPPER}*{_LOWER}+{ending}|{mark}{_UPPER}+{_LOWER}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_SPACES}"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """What happens to a text before byte-level BPE sees it."""

    splits: tuple[str, ...]  # each cuts what the ones before have left
    ignore_merges: bool = False  # a word that is in the vocabulary is one token, whatever the merges say
    nfc: bool = False


_LLAMA3 = _words_and_lines(r"\p{N}{1,3}")
_QWEN2 = _words_and_lines(r"\p{N}")
_DIGITS_APART = PreTokenizer((r"\p{N}", _GPT2))

PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer((_GPT2,)),
    "smollm": _DIGITS_APART,
    "starcoder": _DIGITS_APART,
    "refact": _DIGITS_APART,
    "llama-bpe": PreTokenizer((_LLAMA3,), ignore_merges=True),
    "llama3": PreTokenizer((_LLAMA3,), ignore_merges=True),
    "llama-v3": PreTokenizer((_LLAMA3,), ignore_merges=True),
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "dbrx": PreTokenizer((_LLAMA3,)),
    "qwen2": PreTokenizer((_QWEN2,), nfc=True),
    "deepseek-r1-qwen": PreTokenizer((_QWEN2,)),
    "tekken": PreTokenizer((_cased_words(r"\p{N}", ""),), ignore_merges=True),
    "gpt-4o": PreTokenizer((_cased_words(r"\p{N}{1,3}", f"(?i:{_CONTRACTION})?"),)),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
    ),
}


def build(vocabulary: Vocabulary) -> tuple[tokenizers.Tokenizer, Pieces]:
    """The tokenizer that the vocabulary describes, and the bytes of its tokens."""
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if vocabulary.model not in builders:
        raise CheckpointError(
            f"The GGUF file's tokenizer is of the kind '{vocabulary.model}', which is not supported.",
            f"Supported kinds: {', '.join(sorted(builders))}.",
        )
    try:
        core = builders[vocabulary.model](vocabulary)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises plain Exception for a merge without a token and the like
        raise CheckpointError(
            f"The GGUF file's vocabulary cannot be used: {error}.", "Convert the model again."
        ) from None
    _add_special_tokens(core, vocabulary)
    return core, _pieces(vocabulary)


def _pieces(vocabulary: Vocabulary) -> Pieces:
    tokens = [
        None if kind == UNUSED else token
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
    ]
    special = frozenset(index for index, kind in enumerate(vocabulary.types) if kind in (CONTROL, UNKNOWN))
    if vocabulary.model == "gpt2":
        spelling = Spelling(byte_level=True)
    else:
        spelling = Spelling(False, byte_fallback=True, leading_spaces=int(vocabulary.add_space_prefix))
    return Pieces(
        lambda token_id: tokens[token_id] if 0 <= token_id < len(tokens) else None, spelling, special
    )


def _byte_level(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    if vocabulary.pre not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"The GGUF file's pre-tokenizer '{vocabulary.pre}' is not known.",
            f"Known: {', '.join(sorted(PRE_TOKENIZERS))}. The model's Hugging Face folder may work.",
        )
    pre = PRE_TOKENIZERS[vocabulary.pre]
    core = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(vocabulary.tokens)},
            merges=[_pair(merge) for merge in vocabulary.merges],
            ignore_merges=pre.ignore_merges,
        )
    )
    if pre.nfc:
        core.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.splits]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    return core


def _pair(merge: str) -> tuple[str, str]:
    left, separator, right = merge.partition(" ")
    if not (left and separator and right):
        raise CheckpointError(f"The GGUF file's merge {merge!r} is not a pair.", "Convert the model again.")
    return left, right


def _sentencepiece(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, models, normalizers

    if len(vocabulary.scores) != len(vocabulary.tokens):
        raise CheckpointError(
            f"The GGUF file has {len(vocabulary.tokens)} tokens but {len(vocabulary.scores)} scores.",
            "Convert the model again.",
        )
    unknown = None if vocabulary.unknown_id is None else vocabulary.tokens[vocabulary.unknown_id]
    core = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(vocabulary.tokens)},
            merges=merges_from_scores(vocabulary.tokens, vocabulary.scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", WORD_START)
    prefix = [normalizers.Prepend(WORD_START)] if vocabulary.add_space_prefix else []
    core.normalizer = normalizers.Sequence([*prefix, spaces])
    return core


def merges_from_scores(tokens: tuple[str, ...], scores: tuple[float, ...]) -> list[tuple[str, str]]:
    """The merges that build every token out of two others, the best score first.

    SentencePiece always joins the two neighbours whose union has the best score, so each way to cut a token
    in two known parts is a merge of that token's rank; among equals the longer left part comes first.
    """
    index_of = {token: index for index, token in enumerate(tokens)}
    found: list[tuple[float, int, int, int, int]] = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = index_of.get(token[:cut]), index_of.get(token[cut:])
            if left is not None and right is not None:
                found.append((-score, -cut, cut - len(token), left, right))
    return [(tokens[left], tokens[right]) for *_, left, right in sorted(found)]


def _add_special_tokens(core: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
    """Control and user-defined tokens are found in a text before anything else looks at it."""
    from tokenizers import AddedToken

    # Phi-3's turn marks swallow the spaces and line ends after them. No field of the file says so.
    swallows = vocabulary.model == "llama" and "<|placeholder1|>" in vocabulary.tokens
    keeps = {"<unk>", "<s>", "<|endoftext|>"}
    control, user_defined = [], []
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        rstrip = swallows and token not in keeps
        if token and kind in (CONTROL, UNKNOWN):
            control.append(AddedToken(token, special=True, normalized=False, rstrip=rstrip))
        elif token and kind == USER_DEFINED:
            user_defined.append(AddedToken(token, special=False, normalized=False, rstrip=rstrip))
    core.add_special_tokens(control)
    core.add_tokens(user_defined)

"""The tokenizer and chat template inside a GGUF file, built only when text is asked for."""

from __future__ import annotations

from monotape.errors import CheckpointError
from monotape.weights.checkpoint import TextAssets, Vocabulary
from monotape.weights.gguf_config import token_id
from monotape.weights.gguf_metadata import Metadata

_TOKENS, _TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
_CONTROL, _NORMAL = 3, 1
#: What SentencePiece files mean when they do not say.
_SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}
#: Byte-level BPE files of these pre-tokenizers begin a text with BOS even when they do not say so.
_BEGIN_WITH_BOS = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
#: Control tokens that end a text in the supported families. Files name one `eos`; chat models use several.
_ENDINGS = frozenset(
    {"<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "</s>"}
)
#: Harmony, the format of gpt-oss, is known by its channels. There the end of a message is not that of an answer: the
#: model's thoughts are one message, its answer another. gpt-oss's own generation_config.json lists the same tokens.
_CHANNEL, _MESSAGE_END = "<|channel|>", "<|end|>"
_HARMONY_ENDINGS = (_ENDINGS - {_MESSAGE_END}) | {"<|return|>", "<|call|>"}


def text_assets(source: str, metadata: Metadata) -> TextAssets:
    """Vocabulary and special tokens, as far as the file has them."""
    template = metadata.text("tokenizer.chat_template")
    return TextAssets(vocabulary=_vocabulary(source, metadata), chat_template=template)


def ending_ids(metadata: Metadata, vocabulary: Vocabulary | None) -> list[int]:
    """Every token that ends a generation: those the file names, then control tokens with a known text."""
    ids = [named for role in ("eos", "eot", "eom") if (named := token_id(metadata, role)) is not None]
    if vocabulary is not None:
        harmony = _CHANNEL in vocabulary.tokens
        endings = _HARMONY_ENDINGS if harmony else _ENDINGS
        kinds = zip(vocabulary.tokens, vocabulary.types, strict=True)
        ids += [index for index, (token, kind) in enumerate(kinds) if kind == _CONTROL and token in endings]
        if harmony:  # a converter may have named the end of a message as `eot`
            ids = [index for index in ids if vocabulary.tokens[index : index + 1] != (_MESSAGE_END,)]
    return list(dict.fromkeys(ids))


def _vocabulary(source: str, metadata: Metadata) -> Vocabulary | None:
    count = metadata.count(_TOKENS)
    model = metadata.text("tokenizer.ggml.model")
    if not count or model is None:
        return None
    sentencepiece = model == "llama"
    types = metadata.numbers(_TYPES).tolist() or [_NORMAL] * count
    scores = metadata.numbers("tokenizer.ggml.scores").tolist()
    for key, length in ((_TYPES, len(types)), ("tokenizer.ggml.scores", len(scores) or count)):
        if length != count:
            raise CheckpointError(
                f"{source} has {count} tokens but {length} entries of {key}.", "Convert it again."
            )
    pre = metadata.text("tokenizer.ggml.pre") or "default"
    ids = {role: token_id(metadata, role) for role in ("bos", "eos", "unknown")}
    if sentencepiece:
        ids = {role: _SENTENCEPIECE_IDS[role] if value is None else value for role, value in ids.items()}
    for role, value in ids.items():
        if value is not None and not 0 <= value < count:
            raise CheckpointError(
                f"{source}: the {role} token is {value}, but there are {count}.", "Convert it again."
            )
    return Vocabulary(
        model=model,
        pre=pre,
        tokens=metadata.texts(_TOKENS),
        types=tuple(types),
        scores=tuple(scores),
        merges=metadata.texts("tokenizer.ggml.merges"),
        add_bos=metadata.flag("tokenizer.ggml.add_bos_token", sentencepiece or pre in _BEGIN_WITH_BOS),
        add_space_prefix=metadata.flag("tokenizer.ggml.add_space_prefix", sentencepiece),
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        unknown_id=ids["unknown"],
    )

"""The tokenizer of a checkpoint: from tokenizer.json or GGUF, with BOS exactly once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from engine.vocabularies import byte_level, changed, sentencepiece
from monotape.engine.tokenizer import Tokenizer
from monotape.errors import CheckpointError, RequestError
from monotape.weights.checkpoint import TextAssets, Vocabulary

WORDS = ["<s>", "</s>", "<unk>", "a", "b", "ab", "\u0120a", "\u0120", "\u00c3", "\u00a9"]


def library(decoder: Any = None, **settings: Any) -> Library:
    """A small tokenizer in the library's own terms."""
    made = Library(
        models.BPE({word: index for index, word in enumerate(WORDS)}, [("a", "b"), ("\u0120", "a")])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel() if decoder is None else decoder
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    for name, value in settings.items():
        setattr(made, name, value)
    return made


def from_json(made: Library, folder: Path, config: dict[str, Any] | None = None) -> Tokenizer:
    (folder / "tokenizer.json").write_text(made.to_str())
    tokenizer = Tokenizer.from_assets(TextAssets(folder / "tokenizer.json", config or {"bos_token": "<s>"}))
    assert tokenizer is not None
    return tokenizer


def from_gguf(vocabulary: Vocabulary) -> Tokenizer:
    tokenizer = Tokenizer.from_assets(TextAssets(vocabulary=vocabulary))
    assert tokenizer is not None
    return tokenizer


def test_a_tokenizer_json_adds_what_its_own_post_processor_says(tmp_path: Path) -> None:
    tokenizer = from_json(library(), tmp_path)
    assert tokenizer.encode("ab") == [0, 5]
    assert tokenizer.encode("ab", add_special=False) == [5]
    assert tokenizer.encode("<s>ab") == [0, 5]
    assert tokenizer.encode("<s><s>ab", add_special=False) == [0, 0, 5]
    assert tokenizer.decode([0, 5, 6, 1]) == "ab a"
    assert tokenizer.decode([0, 5, 6, 1], skip_special=False) == "<s>ab a</s>"


def test_a_gguf_adds_bos_when_its_flag_says_so() -> None:
    bos = byte_level().bos_id
    for add_bos, expected in ((True, [bos]), (False, [])):
        tokenizer = from_gguf(byte_level(add_bos=add_bos))
        assert tokenizer.encode("") == expected
        assert tokenizer.encode("hello")[: len(expected)] == expected
        assert tokenizer.encode("<|bos|>hello").count(bos or 0) == 1
        assert tokenizer.encode("hello", add_special=False)[:1] != [bos]


def test_named_tokens_come_as_text_or_as_objects(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "pad_token": None}
    tokenizer = from_json(library(), tmp_path, config)
    assert tokenizer.named_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.size) == (0, 1, len(WORDS))
    assert from_gguf(sentencepiece()).named_tokens == {
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"
    }  # fmt: skip


def test_a_length_limit_in_the_file_does_not_cut_prompts(tmp_path: Path) -> None:
    made = library()
    made.enable_truncation(4)
    made.enable_padding(length=3)
    tokenizer = from_json(made, tmp_path)
    assert len(tokenizer.encode("ab" * 50)) == 51
    assert len(tokenizer.encode("ab")) == 2


def test_a_checkpoint_without_text_has_no_tokenizer() -> None:
    assert Tokenizer.from_assets(TextAssets()) is None


SPELLINGS = {
    "byte level": decoders.ByteLevel(),
    "byte fallback": decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    ),
    "byte fallback, strip": decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
}
SPOKEN = ["\u2581a", "\u2581\u2581", "b", "<s>", "é", "\u00c3\u00a9", "<0x41>", "x y", "<0xZZ>", "\u2581"]


@pytest.mark.parametrize("spelling", SPELLINGS)
@given(ids=st.lists(st.integers(0, len(SPOKEN) - 1), max_size=7), skip=st.booleans())
def test_text_is_what_the_library_decodes(
    spelling: str, ids: list[int], skip: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = Library(models.BPE({word: index for index, word in enumerate(SPOKEN)}, []))
    made.add_special_tokens(["<s>"])
    made.decoder = SPELLINGS[spelling]
    tokenizer = from_json(made, tmp_path_factory.mktemp("spelling"))
    assert tokenizer.decode(ids, skip_special=skip) == made.decode(ids, skip_special_tokens=skip)


def test_sentencepiece_text_survives_the_round_trip() -> None:
    tokenizer = from_gguf(sentencepiece())
    for text in (" ab  cé", "abc中\n😀 ", "", "a"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_half_of_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(RequestError, match="character 1"):
        from_gguf(byte_level()).encode("a\ud83d")


@pytest.mark.parametrize("content", ["", "{", "{}", '{"version": "1.0", "model": {"type": "Dream"}}'])
def test_a_broken_file_is_one_clear_error(content: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read") as caught:
        Tokenizer.from_assets(TextAssets(path))
    assert caught.value.hint


@pytest.mark.parametrize(
    ("decoder", "name"),
    [
        (decoders.WordPiece(), "WordPiece"),
        (decoders.Metaspace(), "Metaspace"),
        (
            decoders.Sequence([decoders.Replace("_", " "), decoders.ByteFallback(), decoders.Fuse()]),
            "Replace",
        ),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Strip("x", 1, 1)]), r"ByteLevel \+ Strip"),
    ],
    ids=["word piece", "metaspace", "replace", "strip"],
)
def test_a_decoder_that_is_not_understood_is_refused(decoder: Any, name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=name):
        from_json(library(decoder), tmp_path)


def test_a_file_without_a_decoder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    library().save(str(path))
    path.write_text(json.dumps({**json.loads(path.read_text()), "decoder": None}))
    with pytest.raises(CheckpointError, match="none"):
        Tokenizer.from_assets(TextAssets(path))


def test_a_normalizer_of_the_file_is_used(tmp_path: Path) -> None:
    assert from_json(library(normalizer=normalizers.Lowercase()), tmp_path).encode("AB") == [0, 5]


def test_a_gguf_token_that_is_not_in_the_list_has_no_name() -> None:
    tokenizer = from_gguf(changed(byte_level(), bos_id=None, eos_id=None))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.named_tokens) == (None, None, {})


def test_a_file_below_a_folder_whose_name_is_not_utf_8(tmp_path: Path) -> None:
    folder = tmp_path / "a\udcff"
    folder.mkdir()
    made = Library(models.BPE({word: index for index, word in enumerate(SPOKEN)}, []))
    made.decoder = next(iter(SPELLINGS.values()))
    assert from_json(made, folder).pieces.bytes_of(0)

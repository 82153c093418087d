"""engine/tokenizer_growth.py: files whose steps would make a text explode are refused before the library sees them."""

from __future__ import annotations

import base64
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import normalizers, pre_tokenizers

from engine.test_tokenizer import from_json, library
from monotape.engine.tokenizer import Tokenizer
from monotape.engine.tokenizer_growth import _NORMALIZERS, check_growth
from monotape.errors import CheckpointError
from monotape.weights.checkpoint import TextAssets

DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
EMPTY = {"type": "Replace", "pattern": {"Regex": "b*"}, "content": "aaa"}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
HONEST = {
    "llama": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    "qwen": normalizers.NFC(),
    "t5": normalizers.Sequence(
        [normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
    ),
    "clip": normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(tokenizers.Regex(r"\s+"), " "), normalizers.Lowercase()]
    ),
    "bert": normalizers.BertNormalizer(),
}  # fmt: skip


def _write(folder: Path, normalizer: Any = None, pre_tokenizer: Any = None, tail: str = "}") -> Path:
    """A tokenizer.json of these steps; `tail` may add a key behind its model."""
    content = json.loads(library().to_str())
    content["added_tokens"][0]["normalized"] = True
    if normalizer is not None:
        content["normalizer"] = normalizer
    if pre_tokenizer is not None:
        content["pre_tokenizer"] = pre_tokenizer
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(content)[:-1] + tail)
    return path


def _sequence(*steps: Any, inner: str = "normalizers") -> dict[str, Any]:
    return {"type": "Sequence", inner: list(steps)}


def _charsmap(text: bytes) -> str:
    return base64.b64encode((4).to_bytes(4, "little") + bytes(4) + b"\0" + text + b"\0").decode()


EXPLOSIVE = {
    "26 doublings": {"normalizer": _sequence(*[DOUBLE] * 26)},
    "nested": {"normalizer": _sequence(_sequence(DOUBLE, _sequence(*[DOUBLE] * 12)), *[DOUBLE] * 12)},
    "matches of nothing": {"normalizer": _sequence(*[EMPTY] * 10)},
    "prepended": {"normalizer": {"type": "Prepend", "prepend": "x" * 1000}},
    "compatibility forms": {"normalizer": _sequence(*[{"type": "NFKC"}] * 3)},
    "a long entry": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": _charsmap(b"x" * 999)}},
    "bytes of bytes": {"pre_tokenizer": _sequence(*[BYTES] * 26, inner="pretokenizers")},
    "both": {
        "normalizer": _sequence(*[DOUBLE] * 6),
        "pre_tokenizer": _sequence(*[BYTES] * 3, inner="pretokenizers"),
    },
    "a list that does not count": {
        "normalizer": _sequence(*[DOUBLE | {"normalizers": []}] * 26),
    },
    "behind the model": {"tail": ',"normalizer":' + json.dumps(_sequence(*[DOUBLE] * 26)) + "}"},
    "an escaped key": {"tail": ',"normali\\u007aer":' + json.dumps(_sequence(*[DOUBLE] * 26)) + "}"},
    "steps without end": {"normalizer": _sequence(*[{"type": "Strip"}] * 65)},
}


@pytest.mark.parametrize("name", EXPLOSIVE)
def test_steps_that_explode_are_refused_before_they_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = _write(tmp_path, **EXPLOSIVE[name])
    monkeypatch.setattr(tokenizers.Tokenizer, "from_file", lambda path: pytest.fail("the library has it"))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json .*(times as long|make sense)\.") as caught:
        Tokenizer.from_assets(TextAssets(path, {}))
    assert caught.value.hint


@pytest.mark.parametrize("name", HONEST)
def test_the_normalizers_of_known_models_pass(tmp_path: Path, name: str) -> None:
    for pre_tokenizer in (pre_tokenizers.ByteLevel(), pre_tokenizers.Metaspace()):
        made = from_json(library(normalizer=HONEST[name], pre_tokenizer=pre_tokenizer), tmp_path)
        assert made.encode("ab")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"normalizer": ' + "[" * 100_000])
def test_a_file_that_is_no_object_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        check_growth(tmp_path / "tokenizer.json")


def test_a_file_of_more_bytes_than_make_sense_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(200_000_001)
    with pytest.raises(CheckpointError, match="200000001 bytes"):
        check_growth(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
def test_the_growth_of_normal_forms_is_that_of_unicode(form: Any) -> None:
    longest = max(
        len(unicodedata.normalize(form, chr(code))) for code in range(0x110000) if not 0xD800 <= code < 0xE000
    )
    assert _NORMALIZERS[form] == longest

"""Which tokens of a GGUF file end an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from monotape.weights.gguf_file import GgufFile
from weights.gguf_files import VOCAB, write_model

_NORMAL, _CONTROL = 1, 3
HARMONY = (
    "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>", "<|endoftext|>",
)  # fmt: skip


def endings(path: Path, marks: tuple[str, ...], **named: int) -> set[str]:
    """The texts of the tokens that end an answer, where `marks` are the last tokens of the vocabulary."""
    words = VOCAB - len(marks)
    tokens = [*(f"t{index}" for index in range(words)), *marks]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [_NORMAL] * words + [_CONTROL] * len(marks),
        "tokenizer.ggml.eos_token_id": named.pop("eos", None),
        **{f"tokenizer.ggml.{role}_token_id": token for role, token in named.items()},
    }
    opened = GgufFile(write_model(path / "m.gguf", metadata=metadata))
    return {tokens[token] for token in opened.generation_config["eos_token_id"]}


def test_in_harmony_the_end_of_a_message_does_not_end_the_answer(tmp_path: Path) -> None:
    """As generation_config.json of openai/gpt-oss-20b: 200002, 199999 and 200012."""
    ends = {"<|return|>", "<|call|>", "<|endoftext|>"}
    named = VOCAB - len(HARMONY) + HARMONY.index("<|return|>")
    assert endings(tmp_path, HARMONY, eos=named) == ends
    middle = VOCAB - len(HARMONY) + HARMONY.index("<|end|>")
    assert endings(tmp_path, HARMONY, eos=named, eot=middle) == ends


@pytest.mark.parametrize(
    ("marks", "ends"),
    [
        (("<|user|>", "<|end|>", "<|endoftext|>"), {"<|end|>", "<|endoftext|>"}),
        (("<|im_start|>", "<|im_end|>"), {"<|im_end|>"}),
        (("<|return|>", "<|call|>", "</s>"), {"</s>"}),
    ],
    ids=["phi", "chatml", "no channels"],
)
def test_elsewhere_it_does(tmp_path: Path, marks: tuple[str, ...], ends: set[str]) -> None:
    assert endings(tmp_path, marks) == ends
    assert endings(tmp_path, marks, eos=7) == {"t7", *ends}

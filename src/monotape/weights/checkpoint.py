"""What a weight file offers, whichever format it has: checked names, shapes and rows, never a whole copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from monotape.weights.quantised.k_matrix import KMatrix
from monotape.weights.quantised.stored import StoredMatrix
from monotape.weights.raw import RawMatrix

Quantised = StoredMatrix | KMatrix


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer as a GGUF file holds it."""

    model: str  # "gpt2" (byte-level BPE) or "llama" (SentencePiece)
    pre: str  # the name of the pre-tokenizer
    tokens: tuple[str, ...]
    types: tuple[int, ...]  # 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte
    scores: tuple[float, ...]  # SentencePiece only
    merges: tuple[str, ...]  # BPE only
    add_bos: bool
    add_space_prefix: bool
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None


@dataclass(frozen=True, slots=True)
class TextAssets:
    """What turns text into ids and back. Exactly one of `tokenizer_json` and `vocabulary` is set, or neither."""

    tokenizer_json: Path | None = None
    tokenizer_config: Mapping[str, Any] | None = None  # tokenizer_config.json, {} when there is none
    vocabulary: Vocabulary | None = None
    chat_template: str | None = None


class Checkpoint(Protocol):
    """Mapped weight files with Hugging Face tensor names and a Hugging Face shaped config."""

    @property
    def source(self) -> str:
        """What the user called it, for messages."""
        ...

    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def generation_config(self) -> Mapping[str, Any]: ...
    @property
    def text(self) -> TextAssets: ...
    @property
    def names(self) -> frozenset[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def stored_as(self, name: str) -> str:
        """The stored format: "f32", "f16", "bf16", "q8_0", "q4_k", ..."""
        ...

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """Rows start..stop of a matrix (or values of a vector) as exact float32, dequantised if need be."""
        ...

    def stored_matrix(self, name: str) -> Quantised | None:
        """The codes and scales that a quantised matrix is stored as; None for one of floats, and for a vector."""
        ...

    def raw_matrix(self, name: str) -> RawMatrix | None:
        """All rows as they lie in the file, where native code can read them."""
        ...

    def integer_rows(
        self, name: str, start: int, stop: int
    ) -> tuple[NDArray[np.int8], NDArray[np.float16]] | None:
        """The same rows as int8 and an f16 scale per 32, where the file stores just that (q8_0, q5_0, q4_0)."""
        ...

    def half_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint16] | None:
        """The same rows as the 16-bit words that the file stores, where `stored_as` says "bf16" or "f16"."""
        ...

    def mapped_halves(self, name: str) -> NDArray[np.uint16] | None:
        """All rows as `half_rows` gives them, where the file has them in just that order: a view that costs nothing."""
        ...

    def release(self, name: str) -> None:
        """Lets the operating system drop the tensor's mapped pages: they have been read."""
        ...

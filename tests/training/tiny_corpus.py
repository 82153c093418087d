"""A corpus and settings that two cores train on in seconds: made-up packages, a tokenizer of 400 tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from monotape.training.corpus.prepare import Preparation, prepare
from monotape.training.settings import Settings

SEQUENCE = 64
HOW = Preparation(sequence=SEQUENCE, held_out_share=0.4, least_tokens=2000)
_NAMES = ("total", "first", "value", "items", "count", "rows", "result", "width")
_VERBS = ("add", "take", "find", "join", "split", "count")


def source(seed: int, functions: int = 12) -> str:
    """Python that a program wrote: regular enough to be learned in a minute."""
    chosen = random.Random(seed)
    parts = ['"""Made for a test."""\n\nimport math\n']
    for number in range(functions):
        one, two = chosen.sample(_NAMES, 2)
        verb = chosen.choice(_VERBS)
        parts.append(
            f"\n\ndef {verb}_{one}_{number}({one}, {two}={chosen.randrange(100)}):\n"
            f"    if {one} > {two}:\n        return math.sqrt({one} + {chosen.randrange(9)})\n"
            f"    return {two} * {chosen.randrange(9)}\n"
        )
    return "".join(parts)


def make_packages(folder: Path, count: int = 9, files: int = 6, licence: str = "MIT") -> Path:
    """Folders of sources with their metadata."""
    for package in range(count):
        place = folder / f"package{package}"
        place.mkdir(parents=True, exist_ok=True)
        (place / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: package{package}\nVersion: 1.{package}\nLicense-Expression: {licence}\n"
        )
        for file in range(files):
            (place / f"module{file}.py").write_text(source(100 * package + file))
    return folder


def make_tokenizer(path: Path, texts: list[str], vocabulary: int = 400) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))
    return path


def make_corpus(folder: Path, **changes: Any) -> Path:
    """A prepared corpus in folder/prepared; its packages and tokenizer beside it."""
    packages = make_packages(folder / "packages")
    tokenizer = make_tokenizer(folder / "tokenizer.json", [source(seed) for seed in range(20)])
    how = Preparation(**{**{name: getattr(HOW, name) for name in HOW.__slots__}, **changes})
    prepare(packages, tokenizer, folder / "prepared", how, say=lambda line: None)
    return folder / "prepared"


def tiny(**changes: Any) -> Settings:
    """A model of 50,000 weights."""
    fields: dict[str, Any] = {
        "arm": "dtp1-scale", "lanes": 4, "layers": 2, "width": 32, "heads": 4, "ffn": 64, "context": SEQUENCE,
        "tokens": 12 * 8 * SEQUENCE, "batch_sequences": 8, "micro_sequences": 4, "warmup_steps": 2, "precision": "f32",
        "compiled": False,
    }  # fmt: skip
    return Settings(**{**fields, **changes})

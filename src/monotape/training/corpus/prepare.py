"""From a folder of packages to the files that training reads: sequences of tokens and a record of their sources.

Held-out packages come first, so that a training file which repeats one of theirs is dropped, not the other way round.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from monotape.errors import UsageError
from monotape.training.corpus.cleaning import clean
from monotape.training.corpus.duplicates import Seen
from monotape.training.corpus.licences import is_permissive
from monotape.training.corpus.packages import Package, read_packages
from monotape.training.corpus.sequences import END, MIDDLE, PREFIX, SUFFIX, Packer
from monotape.training.disk import told_if_full

RECORD, TRAIN, VALIDATION, TOKENIZER = "corpus.json", "train.bin", "validation.bin", "tokenizer.json"
BATCH = 256  # files that are tokenised at once


@dataclass(frozen=True, slots=True)
class Preparation:
    """How a corpus is made; all of it is kept in its record."""

    sequence: int = 1024  # tokens
    package_bytes: int = 20_000_000  # of text, the most that one package gives
    held_out_share: float = 0.04  # of the packages, chosen by their names
    held_out_bytes: int = 400_000  # of text, the most that one held-out package gives
    filled_share: float = 0.5  # of the pieces are rearranged to fill in the middle; none of the held-out ones
    seed: int = 1
    least_tokens: int = 1_000_000


@dataclass(slots=True)
class Taken:
    """What became of one package."""

    name: str
    version: str
    licence: str
    held_out: bool
    files: int = 0
    bytes: int = 0
    tokens: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  # files, by the reason

    def drop(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1


def held_out(name: str, share: float) -> bool:
    """Whether a package is kept for validation: by its name alone, so that a larger corpus keeps the same ones."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") < share * 2**32


def prepare(
    sources: Path, tokenizer_file: Path, folder: Path, how: Preparation, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Writes the corpus into `folder`, whole or not at all, and gives its record."""
    tokenizer = load_tokenizer(tokenizer_file)
    packages = read_packages(sources)
    kept = [package for package in packages if is_permissive(package.licence)]
    refused = [package for package in packages if not is_permissive(package.licence)]
    if not kept:
        raise UsageError(
            f"None of the {len(packages)} packages in {sources} names a permissive licence.",
            "A package names its licence in METADATA: License-Expression, License or a classifier.",
        )
    if not any(held_out(package.name, how.held_out_share) for package in kept):
        raise UsageError(
            f"None of the {len(kept)} packages in {sources} is held out for validation.",
            f"A share of {how.held_out_share:g} is, by name: give more packages, or a larger --held-out-share.",
        )
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        with told_if_full(folder, "The corpus"):
            unfinished.mkdir(parents=True)
            record = _write(unfinished, kept, refused, tokenizer, how, say)
            shutil.copyfile(tokenizer_file, unfinished / TOKENIZER)
            (unfinished / RECORD).write_text(json.dumps(record, indent=1) + "\n", "utf-8")
            if folder.exists():
                shutil.rmtree(folder)
            unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return record


def load_tokenizer(file: Path) -> Any:
    """A tokenizer.json that has the marks of filling in the middle and fits into 16 bits."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise UsageError(f"{file} is not a tokenizer: {error}.", "Give a tokenizer.json.") from None
    lacking = [mark for mark in (END, PREFIX, MIDDLE, SUFFIX) if tokenizer.token_to_id(mark) is None]
    if lacking:
        raise UsageError(
            f"{file} has no {lacking[0]}.", "Training needs a tokenizer with fill-in-the-middle marks."
        )
    if tokenizer.get_vocab_size() > 2**16:
        raise UsageError(
            f"{file} has {tokenizer.get_vocab_size()} tokens.", "At most 65,536 fit into 16 bits."
        )
    return tokenizer


def _write(
    folder: Path, kept: list[Package], refused: list[Package], tokenizer: Any, how: Preparation,
    say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    seen, parts = Seen(), {}
    for file, is_validation in ((VALIDATION, True), (TRAIN, False)):
        chosen = [package for package in kept if held_out(package.name, how.held_out_share) == is_validation]
        with (folder / file).open("wb") as out:
            parts[file] = _Part(tokenizer, how, is_validation, seen, out, say).run(chosen)
    tokens = sum(taken.tokens for taken in parts[TRAIN])
    if (
        tokens < how.least_tokens
        or not parts[VALIDATION]
        or not sum(taken.tokens for taken in parts[VALIDATION])
    ):
        files = sum(taken.files for taken in [*parts[TRAIN], *parts[VALIDATION]])
        raise UsageError(
            f"The corpus is too small: {len(kept)} packages give {files} files of Python text and {tokens:,} tokens to "
            f"train on, {sum(taken.tokens for taken in parts[VALIDATION]):,} to validate on.",
            f"It needs {how.least_tokens:,} and at least one held-out package; nothing was written.",
        )
    lengths = _file_facts(folder, how.sequence)
    return {
        "preparation": asdict(how), "vocabulary": tokenizer.get_vocab_size(), "end": tokenizer.token_to_id(END),
        "tokenizer_sha256": hashlib.sha256(tokenizer.to_str().encode()).hexdigest(), "files": lengths,
        "packages": [asdict(taken) for file in (VALIDATION, TRAIN) for taken in parts[file]],
        "left_out": [{"name": one.name, "version": one.version, "licence": one.licence} for one in refused],
    }  # fmt: skip


def _file_facts(folder: Path, sequence: int) -> dict[str, dict[str, Any]]:
    facts = {}
    for file in (TRAIN, VALIDATION):
        with (folder / file).open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        facts[file] = {"sequences": (folder / file).stat().st_size // (2 * sequence), "sha256": digest}
    return facts


class _Part:
    """One of the two files, from its packages."""

    def __init__(
        self,
        tokenizer: Any,
        how: Preparation,
        validation: bool,
        seen: Seen,
        out: BinaryIO,
        say: Callable[[str], None],
    ) -> None:
        self._tokenizer, self._how, self._validation, self._seen, self._out = (
            tokenizer,
            how,
            validation,
            seen,
            out,
        )
        self._say = say
        self._packer = Packer(tokenizer, how.sequence, how.seed, 0.0 if validation else how.filled_share)

    def run(self, packages: list[Package]) -> list[Taken]:
        result: list[Taken] = []
        for number, package in enumerate(packages):
            taken = Taken(package.name, package.version, package.licence, self._validation)
            for batch in _batches(self._texts(package, taken), BATCH):
                self._add(batch, taken)
            result.append(taken)
            if number % 20 == 19 or number + 1 == len(packages):
                total = sum(one.tokens for one in result)
                self._say(f"{'validation' if self._validation else 'training'}: {number + 1} of {len(packages)} "
                          f"packages, {total / 1e6:.1f}M tokens")  # fmt: skip
        self._write(last=True)
        return result

    def _texts(self, package: Package, taken: Taken) -> Iterator[str]:
        limit = self._how.held_out_bytes if self._validation else self._how.package_bytes
        for _, data in package.sources():
            if taken.bytes >= limit:
                taken.drop("over the package's share")
                continue
            text = clean(data)
            if text is None:
                taken.drop("not a person's text")
            elif self._seen.same(text):
                taken.drop("duplicate")
            else:
                taken.bytes += len(text.encode())
                yield text

    def _add(self, texts: list[str], taken: Taken) -> None:
        for text, encoding in zip(texts, self._tokenizer.encode_batch(texts), strict=True):
            tokens = np.array(encoding.ids, np.uint16)
            if self._seen.similar(tokens):
                taken.drop("near duplicate")
                taken.bytes -= len(text.encode())
                continue
            taken.files += 1
            taken.tokens += len(tokens)
            self._packer.add(text, encoding, tokens)
        self._write()

    def _write(self, *, last: bool = False) -> None:
        for row in self._packer.rows(last=last):
            self._out.write(row.astype("<u2").tobytes())


def _batches(items: Iterable[str], size: int) -> Iterator[list[str]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch

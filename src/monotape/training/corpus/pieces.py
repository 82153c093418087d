"""A prepared corpus as compressed files of a bounded size, to carry it to a machine without a network.

xz with two-byte alignment halves the tokens' size twice over. Each piece is a whole xz file, so all cores can work.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from monotape.errors import UsageError
from monotape.training.corpus.prepare import RECORD, TOKENIZER, TRAIN, VALIDATION
from monotape.training.disk import told_if_full

PIECE_BYTES = 50_000_000
CHUNK = 32 * 2**20  # bytes of tokens that one xz stream holds
INDEX = "pieces.json"
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 32 * 2**20,
             "lc": 0, "lp": 1, "pb": 1}]  # fmt: skip


def pack(
    corpus: Path, folder: Path, *, workers: int = 2, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Writes pieces of at most PIECE_BYTES, each a row of xz streams, and their index."""
    _need(corpus, (RECORD, TOKENIZER, TRAIN, VALIDATION))
    with told_if_full(folder, "The pieces"):
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob("piece-*"):
            stale.unlink()
        streams = _write_streams(corpus, folder, workers, say)
        count = streams[-1]["piece"] + 1
        index = {
            "streams": streams,
            "pieces": [_digest(folder / f"piece-{number:02d}") for number in range(count)],
            "record": json.loads((corpus / RECORD).read_text("utf-8")),
            "tokenizer": (corpus / TOKENIZER).read_text("utf-8"),
        }
        (folder / INDEX).write_bytes(lzma.compress(json.dumps(index).encode()))
    return index


def _write_streams(
    corpus: Path, folder: Path, workers: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    chunks = [
        (file, start)
        for file in (VALIDATION, TRAIN)
        for start in range(0, (corpus / file).stat().st_size, CHUNK)
    ]
    streams: list[dict[str, Any]] = []
    sizes = [0]
    with ThreadPoolExecutor(workers) as pool:
        packed = pool.map(lambda chunk: _compressed(corpus, *chunk), chunks)
        for (file, start), data in zip(chunks, packed, strict=True):
            if sizes[-1] + len(data) > PIECE_BYTES:
                sizes.append(0)
            piece = len(sizes) - 1
            with (folder / f"piece-{piece:02d}").open("ab") as out:
                out.write(data)
            streams.append(
                {"file": file, "start": start, "piece": piece, "at": sizes[-1], "bytes": len(data)}
            )
            sizes[-1] += len(data)
            say(f"{file}: {start / 1e6:.0f} MB on, {sum(sizes) / 1e6:.1f} MB packed")
    return streams


def unpack(folders: Sequence[Path], corpus: Path, *, workers: int = 16) -> None:
    """Puts pieces from one or several folders together again and checks every byte against the record."""
    found = {path.name: path for folder in folders for path in folder.glob("piece*")}
    if INDEX not in found:
        raise UsageError(f"No {INDEX} in {', '.join(map(str, folders))}.", "It comes with the first piece.")
    index = json.loads(lzma.decompress(found[INDEX].read_bytes()))
    names = [f"piece-{number:02d}" for number in range(len(index["pieces"]))]
    for name, digest in zip(names, index["pieces"], strict=True):
        if name not in found or _digest(found[name]) != digest:
            state = "differs from what was packed" if name in found else "is missing"
            raise UsageError(f"{name} {state}.", f"The corpus has {len(names)} pieces; bring it over again.")
    with told_if_full(corpus, "The corpus"):
        corpus.mkdir(parents=True, exist_ok=True)
        length = index["record"]["preparation"]["sequence"]
        for file in (TRAIN, VALIDATION):
            with (corpus / file).open("wb") as out:
                out.truncate(index["record"]["files"][file]["sequences"] * length * 2)

        def write(stream: dict[str, Any]) -> None:
            with found[f"piece-{stream['piece']:02d}"].open("rb") as opened:
                opened.seek(stream["at"])
                data = lzma.decompress(opened.read(stream["bytes"]))
            with (corpus / stream["file"]).open("r+b") as out:
                out.seek(stream["start"])
                out.write(data)

        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(write, index["streams"]))
        (corpus / TOKENIZER).write_text(index["tokenizer"], "utf-8")
        for file in (TRAIN, VALIDATION):
            if _digest(corpus / file) != index["record"]["files"][file]["sha256"]:
                raise UsageError(f"{corpus / file} differs from its record.", "Pack the corpus again.")
        (corpus / RECORD).write_text(json.dumps(index["record"], indent=1) + "\n", "utf-8")


def _compressed(corpus: Path, file: str, start: int) -> bytes:
    with (corpus / file).open("rb") as opened:
        opened.seek(start)
        return lzma.compress(opened.read(CHUNK), format=lzma.FORMAT_XZ, filters=_FILTERS)


def _digest(path: Path) -> str:
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _need(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        if not (folder / name).is_file():
            raise UsageError(
                f"{folder} has no {name}.", "Make it with `python -m monotape.training corpus prepare`."
            )

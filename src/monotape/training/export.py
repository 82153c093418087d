"""From a run's checkpoint to a folder that the engine opens, and to one packed file for the wheel."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from monotape.embedded.packed import GROUP, PackedModel, read, write
from monotape.errors import UsageError
from monotape.training import checkpoints
from monotape.training.card import model_card
from monotape.training.checkpoints import LATEST
from monotape.training.corpus.prepare import RECORD, TOKENIZER
from monotape.training.corpus.sequences import END
from monotape.training.data import Corpus
from monotape.training.disk import replace_whole, told_if_full
from monotape.training.evaluation import bits_per_byte
from monotape.training.muon import whole
from monotape.training.settings import Settings, from_saved
from monotape.training.streams import StreamedLaneformer
from monotape.training.trainer import RESULT

MAX_PACKED_BYTES = 24_000_000
WEIGHTS, CARD = "model.safetensors", "README.md"
#: How a small model writes code best: nearly greedy.
GENERATION = {"temperature": 0.2, "top_p": 0.95, "do_sample": True}
#: It knows no turns: a conversation is one text that grows, and what chats send is completed.
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def trained_model(run: Path) -> tuple[StreamedLaneformer, Settings]:
    """The model of a run's newest checkpoint, or of a finished run's weights alone, in float32 on the CPU."""
    if (run / LATEST).is_file():
        state = checkpoints.read(run / LATEST)
        saved, weights = state["settings"], state["model"]
    elif (run / checkpoints.WEIGHTS).is_file() and (run / RESULT).is_file():
        saved = json.loads((run / RESULT).read_text(encoding="utf-8"))["settings"]
        weights = checkpoints.read_weights(run / checkpoints.WEIGHTS)
    else:
        raise UsageError(
            f"{run} has no {LATEST}.",
            f"Give the folder of a run, or {checkpoints.WEIGHTS} and {RESULT} of one.",
        )
    settings = from_saved(saved)
    model = StreamedLaneformer(settings.config(weights["model.tok_embeddings.weight"].shape[0], end=0))
    model.load_state_dict(weights)
    return model.eval(), settings


def as_one_lane(model: StreamedLaneformer, settings: Settings) -> tuple[StreamedLaneformer, Settings]:
    """The same model with one lane, for one device. Only lanes that always agree can become one."""
    if settings.arm != "tp":
        raise UsageError(
            f"The lanes of {settings.arm} are not one model.", "Only a run of tp can have one lane."
        )
    plain = replace(settings, lanes=1)
    merged = StreamedLaneformer(plain.config(model.spec.vocab, end=0))
    state = {
        name: whole(name, value)[None] if value.dim() == 3 else value
        for name, value in model.state_dict().items()
    }
    merged.load_state_dict(state)
    return merged.eval(), plain


def export(run: Path, corpus: Path, folder: Path, *, one_lane: bool = False) -> None:
    """config.json, float32 weights, tokenizer, sampling and model card. The folder appears whole."""
    model, settings = trained_model(run)
    if one_lane:
        model, settings = as_one_lane(model, settings)
    record = json.loads((corpus / RECORD).read_text(encoding="utf-8"))
    model.config = settings.config(record["vocabulary"], record["end"]) | {"dtype": "float32"}
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        with told_if_full(folder, "The model"):
            model.save(unfinished)
            shutil.copyfile(corpus / TOKENIZER, unfinished / TOKENIZER)
            end = record["end"]
            texts = {
                "tokenizer_config.json": {
                    "bos_token": None,
                    "eos_token": END,
                    "add_bos_token": False,
                    "chat_template": TEMPLATE,
                },
                "generation_config.json": GENERATION | {"eos_token_id": end},
            }
            for name, content in texts.items():
                (unfinished / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            found = (run / RESULT).is_file()
            result = json.loads((run / RESULT).read_text(encoding="utf-8")) if found else None
            (unfinished / CARD).write_text(model_card(settings, record, result), encoding="utf-8")
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def bits_of(tensors: Mapping[str, Any], embedding_bits: int = 8) -> dict[str, int]:
    """4 bits for the matrices of layers, 8 for the embedding, which is the head too; gains stay as they are."""
    bits = {}
    for name, value in tensors.items():
        small = value.ndim < 2 or value.size % GROUP
        bits[name] = 32 if small else embedding_bits if "tok_embeddings" in name else 4
    return bits


def pack(folder: Path, path: Path, embedding_bits: int = 8) -> int:
    """Packs an exported folder into one file and gives its size, which the wheel bounds."""
    tensors, texts, config = _exported(folder)
    texts["config.json"] = json.dumps(config | {"dtype": "bfloat16"}, indent=2) + "\n"
    floats = {name: np.asarray(value, np.float32) for name, value in tensors.items()}

    def written(unfinished: Path) -> None:
        write(unfinished, PackedModel(texts, floats), bits_of(floats, embedding_bits))
        size = unfinished.stat().st_size
        if size > MAX_PACKED_BYTES:
            raise UsageError(
                f"The packed model has {size:,} bytes, and the wheel has room for {MAX_PACKED_BYTES:,}.",
                "Pack the embedding into 4 bits (--embedding-bits 4), or train a smaller model.",
            )

    with told_if_full(path.parent, "The packed model"):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_whole(path, written)
    return path.stat().st_size


def _exported(folder: Path) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
    """The tensors and the texts that `export` wrote, and its config."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        tensors = load_file(str(folder / WEIGHTS))
        texts = {
            name.name: name.read_text(encoding="utf-8")
            for name in sorted(folder.iterdir())
            if name.suffix in (".json", ".md")
        }
        config = json.loads(texts["config.json"])
        if not isinstance(config, dict):
            raise ValueError("config.json is no JSON object")
    except (
        OSError,
        SafetensorError,
        ValueError,
        KeyError,
        TypeError,
    ) as error:  # NumPy has no bf16: TypeError
        raise UsageError(
            f"{folder} is not an exported model ({error!r}).",
            "Make one with `python -m monotape.training export`.",
        ) from None
    return tensors, texts, config


def packed_quality(path: Path, corpus: Corpus, micro_sequences: int, compute: torch.dtype) -> dict[str, Any]:
    """Bits per byte of a packed model, to be held against those of the run that it came from."""
    packed = read(path)
    model = StreamedLaneformer(json.loads(packed.texts["config.json"])).to(corpus.train.device)
    model.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in packed.tensors.items()})
    model.compute = compute
    return bits_per_byte(model, corpus, micro_sequences)

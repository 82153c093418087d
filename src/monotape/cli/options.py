"""Flags that commands share, derived from the engine's own configuration so that names and defaults cannot drift."""

from __future__ import annotations

import argparse
import dataclasses
import math
from typing import Any

from monotape.engine.config import DEFAULT_MODEL_TEXT, EngineConfig
from monotape.engine.recommended import default_text
from monotape.errors import UsageError

_INTEGERS = {"max_model_len", "workers", "tp", "seed", "max_sequences", "kv_bytes"}
_SWITCHES: dict[str, str | type[argparse.Action]] = {
    "emulate_ranks": "store_true",
    "speculation": argparse.BooleanOptionalAction,
}
_HIDDEN = {"model", "progress", "seed"}  # a flag of their own, or none


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """--model and every other setting of EngineConfig."""
    fields = {field.name: field for field in dataclasses.fields(EngineConfig)}
    parser.add_argument(
        "--model", "-m", default=fields["model"].default, metavar="MODEL",
        help=f"{fields['model'].metadata['help']} (default: {DEFAULT_MODEL_TEXT})",
    )  # fmt: skip
    for name, field in fields.items():
        if name not in _HIDDEN:
            add_setting(parser, field)


def add_setting(parser: argparse.ArgumentParser, field: dataclasses.Field[Any]) -> None:
    """One setting of EngineConfig as a flag."""
    flag, text = "--" + field.name.replace("_", "-"), field.metadata["help"]
    if field.name in _SWITCHES:
        parser.add_argument(flag, action=_SWITCHES[field.name], default=field.default, help=text)
        return
    parser.add_argument(
        flag,
        default=field.default,
        type=integer if field.name in _INTEGERS else str,
        metavar=field.metadata.get("metavar", "N"),
        help=text,
    )


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen. Settings that are not given come from the model's own recommendation."""
    parser.add_argument(
        "--max-tokens", type=integer, metavar="N", help="longest answer (default: 256 for run, none for chat)"
    )
    parser.add_argument(
        "--temperature", type=real, metavar="T", help=f"0 for greedy {default_text('temperature')}"
    )
    parser.add_argument(
        "--top-p", type=real, metavar="P",
        help=f"smallest set of tokens that holds this probability {default_text('top_p')}",
    )  # fmt: skip
    parser.add_argument("--top-k", type=integer, metavar="K", help="only the K most likely tokens")
    parser.add_argument(
        "--min-p", type=real, metavar="P", help="only tokens this likely, relative to the likeliest"
    )
    parser.add_argument(
        "--repetition-penalty", type=real, metavar="R", help="above 1 discourages what was said before"
    )
    parser.add_argument("--seed", type=integer, metavar="N", help="makes sampling repeatable")
    parser.add_argument(
        "--stop",
        action="append",
        type=utf8,
        metavar="TEXT",
        help="end the answer before this text; may be repeated",
    )


def sampling_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The sampling flags that were given."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop")
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def engine_config(options: argparse.Namespace) -> EngineConfig:
    names = [
        field.name for field in dataclasses.fields(EngineConfig) if field.name not in ("progress", "seed")
    ]
    return EngineConfig(**{name: getattr(options, name) for name in names})


def integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"'{text}' is not a whole number.", "Write it in digits alone.") from None


def real(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"'{text}' is not a number.", "Write it like 0.8.") from None
    if not math.isfinite(value):
        raise UsageError(f"'{text}' is not a finite number.", "Write it like 0.8.")
    return value


def names(text: str) -> tuple[str, ...]:
    """a,b,c"""
    return tuple(name.strip() for name in utf8(text).split(",") if name.strip())


def utf8(text: str) -> str:
    """What is read as text, not as a path: bytes that are none arrive as halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{text!r} is not UTF-8 text.", "Convert it, for example with iconv.") from None
    return text


def token_ids(text: str) -> list[int]:
    """1,2,3"""
    parts = text.split(",")
    try:
        return [int(part) for part in parts]
    except ValueError:
        raise UsageError(f"'{text}' is not a list of token ids.", "Write them like 1,2,3.") from None

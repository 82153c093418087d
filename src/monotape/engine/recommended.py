"""Sampling for models whose files name none: data alone, so that the command line's help can quote it at no cost."""

from __future__ import annotations

from collections.abc import Mapping

#: What authors recommend on a model's page, by a part of the model's name.
BY_AUTHORS: Mapping[str, Mapping[str, float]] = {"SmolLM2": {"temperature": 0.2, "top_p": 0.9}}
#: For all other models. Temperature 1 without truncation draws from the long tail of unlikely tokens, and a small model
#: does not recover from one of those; authors who do recommend something are near these values.
FALLBACK: Mapping[str, float] = {"temperature": 0.7, "top_p": 0.9}


def default_text(name: str) -> str:
    """The default of a setting, for its help."""
    special = ", ".join(f"{settings[name]:g} for {model}" for model, settings in BY_AUTHORS.items())
    return f"(default: what the model's files say; {special}; else {FALLBACK[name]:g})"

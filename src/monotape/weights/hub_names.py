"""Names of models: ids of the hub, and the short name of the built-in model."""

from __future__ import annotations

import re
from dataclasses import dataclass

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
SHORT_NAMES = {"smollm2": DEFAULT_MODEL}
_ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)([:/](?P<file>[^:]+\.gguf))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository on the hub, and the one GGUF file in it that is meant, if the user named one."""

    repo: str
    file: str | None = None

    def __str__(self) -> str:
        return self.repo if self.file is None else f"{self.repo}:{self.file}"


def parsed(model: str) -> HubName | None:
    """A hub id ("org/name", "org/name:file.gguf", "org/name/file.gguf") or a short name; None for anything else."""
    match = _ID.fullmatch(SHORT_NAMES.get(model, model))
    if match is None or match["repo"].endswith((".gguf", ".safetensors")) or ".." in model:
        return None
    return HubName(match["repo"], match["file"])

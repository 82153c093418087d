"""All that a run needs to go on: weights, optimiser, step and time, in one file that is replaced whole.

A finished run also leaves its weights alone, a quarter of that, in the type in which training multiplied them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from monotape.errors import CheckpointError
from monotape.training.disk import replace_whole, told_if_full
from monotape.training.muon import Optimizer
from monotape.training.settings import LONGER, Settings, check_same

LATEST, TRUNK, WEIGHTS = "checkpoint.pt", "trunk.pt", "weights.safetensors"


@dataclass(slots=True)
class Progress:
    """How far a run is."""

    step: int = 0
    seconds: float = 0.0  # of training, over all processes
    curve: list[list[float]] = field(default_factory=list)  # [step, loss in nats a token]
    processes: int = 1


def save(
    path: Path, model: nn.Module, optimizer: Optimizer, progress: Progress, settings: Settings, corpus: str
) -> None:
    """Replaces the checkpoint. If that fails, the one before is still there."""
    state = {
        "settings": settings.saved(), "corpus": corpus, "model": model.state_dict(), "optimizer": optimizer.state(),
        "step": progress.step, "seconds": progress.seconds, "curve": progress.curve, "processes": progress.processes,
    }  # fmt: skip
    with told_if_full(path.parent, "The checkpoint"):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_whole(path, lambda unfinished: torch.save(state, unfinished))


def load(
    path: Path, model: nn.Module, optimizer: Optimizer, settings: Settings, corpus: str, *, longer: bool
) -> Progress:
    """Goes on where the file stops. `longer`: it is the trunk of a shorter run."""
    state = read(path)
    check_same(state["settings"], settings, path, LONGER if longer else frozenset())
    if state["corpus"] != corpus:
        raise CheckpointError(
            f"{path} was trained on another corpus ({state['corpus'][:12]}; this is {corpus[:12]}).",
            "Give that corpus, or another folder; nothing was changed.",
        )
    if state["step"] > settings.decay_start and longer:
        raise CheckpointError(
            f"{path} stands at step {state['step']}, and this run's rate falls from step {settings.decay_start} on.",
            "Ask for more tokens.",
        )
    model.load_state_dict(state["model"])
    optimizer.load(state["optimizer"])
    return Progress(state["step"], state["seconds"], state["curve"], state["processes"] + 1)


def read(path: Path) -> dict[str, Any]:
    """A checkpoint's contents, which are tensors and plain values: no code is run."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        wanted = {"settings", "corpus", "model", "optimizer", "step", "seconds", "curve", "processes"}
        if not isinstance(state, dict) or set(state) != wanted:
            raise ValueError("it holds other things")
    except Exception as error:  # a broken stream makes the unpickler raise nearly anything
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{path} is not a checkpoint of a run: {said}.", "Remove it to start anew."
        ) from None
    return state


def save_weights(path: Path, model: nn.Module, compute: torch.dtype) -> None:
    """The model as it was evaluated: matrices are rounded as its products round them, gains stay in float32."""
    stored = {
        name: value.detach().to("cpu", compute if value.dim() > 1 else torch.float32).contiguous()
        for name, value in model.state_dict().items()
    }
    with told_if_full(path.parent, "The weights"):
        replace_whole(path, lambda unfinished: save_file(stored, str(unfinished), metadata={"format": "pt"}))


def read_weights(path: Path) -> dict[str, Tensor]:
    """What `save_weights` wrote, in float32."""
    try:
        return {name: value.float() for name, value in load_file(str(path)).items()}
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{path} has no weights: {error}.", "Bring it over again.") from None

"""The device that trains: its settings for repeatable numbers, and what a record says about it."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.utils import deterministic

from monotape.config import told_commit
from monotape.errors import BackendUnavailable


def chosen_device(name: str) -> torch.device:
    """The device by name; "auto" is the first GPU, or the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise BackendUnavailable("PyTorch sees no GPU here.", "Train with --device cpu.")
    return torch.device(name)


def repeatable(device: torch.device) -> None:
    """Fixed orders of summation everywhere: a run that goes on has the bits of one that never stopped."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)  # its backward pass has no fixed order
    torch.use_deterministic_algorithms(True)
    # A debugging aid that writes every new tensor twice.
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def described(device: torch.device) -> dict[str, Any]:
    """Commit, machine and time, for a run's JSON."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    told = told_commit() or _git()
    return {
        "commit": told.rstrip("+") or "unknown", "uncommitted_changes": told.endswith("+"), "device": name,
        "torch": torch.__version__, "python": platform.python_version(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def _git() -> str:
    """The checkout's commit, with a + if it was changed; "" where there is none."""
    folder = Path(__file__).parent

    def asked(*arguments: str) -> str:
        try:
            return subprocess.run(
                ["git", *arguments], cwd=folder, capture_output=True, text=True
            ).stdout.strip()
        except OSError:
            return ""

    commit = asked("rev-parse", "HEAD")
    return commit + ("+" if commit and asked("status", "--porcelain", "--untracked-files=no") else "")

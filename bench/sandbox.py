"""Runs a program that a model wrote in a process of its own, with limits, and says whether it got to its end.

This keeps accidents away from the benchmark: endless loops, memory, prints, exits, files left behind. It is
no wall against a program that means harm, which may use the network and whatever files its user may read.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Verdict = Literal["passed", "failed", "timed out"]

_CHILD = Path(__file__).resolve().parent / "sandbox_child.py"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use."""

    seconds: float = 10.0
    memory_bytes: int = 1 << 30  # of address space
    file_bytes: int = 1 << 24  # of each file that it writes


def run_program(program: str, limits: Limits | None = None) -> Verdict:
    """Runs the program to its end, or to its limit; "passed" only if its last line was reached.

    The child says so, after the program has ended, with a number that is drawn for this run and kept from the
    program: one that leaves early by exit(0), or prints whatever it likes, does not pass.
    """
    limits = limits or Limits()
    nonce = secrets.token_hex(16)
    request = json.dumps({"program": program, "nonce": nonce, **asdict(limits)}).encode()
    # Isolated and without site-packages: the verdict depends on the standard library alone.
    command = [sys.executable, "-I", "-S", str(_CHILD)]
    with tempfile.TemporaryDirectory(prefix="sample-", ignore_cleanup_errors=True) as folder:
        child = subprocess.Popen(
            command, cwd=folder, env={"HOME": folder, "TMPDIR": folder}, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            answer, _ = child.communicate(request, timeout=limits.seconds)
        except subprocess.TimeoutExpired:
            return "timed out"
        finally:
            _end(child)
    return "passed" if answer == nonce.encode() else "failed"


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kills the child and everything that it started and left in its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # no process is left
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

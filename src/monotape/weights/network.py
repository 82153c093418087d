"""Whether there is a network at all, found without a connection."""

from __future__ import annotations

import os
from pathlib import Path

_UP = 0x0001  # RTF_UP of the kernel's routes
_ROUTES, _ROUTES_6 = Path("/proc/net/route"), Path("/proc/net/ipv6_route")


def missing_network() -> str | None:
    """Why nothing can be fetched; None where a fetch is worth a try."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE is set"
    return "this machine has no network" if _routes() == set() else None


def _routes() -> set[str] | None:
    """Interfaces that lead to other machines; None where the system does not say."""
    try:
        lines = [line.split() for line in _ROUTES.read_text("utf-8").splitlines()[1:]]
        lines_6 = (
            [line.split() for line in _ROUTES_6.read_text("utf-8").splitlines()] if _ROUTES_6.exists() else []
        )
        found = {line[0] for line in lines if int(line[3], 16) & _UP}
        found |= {line[9] for line in lines_6 if int(line[8], 16) & _UP and not line[0].startswith("fe80")}
    except (OSError, ValueError, IndexError):
        return None
    return found - {"lo"}

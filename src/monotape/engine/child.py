"""Runs a module or a script in a process that ends with its parent, even if the parent is killed.

    python -P child.py PARENT MODULE [ARGUMENT ...]
    python -P child.py PARENT SCRIPT.py [ARGUMENT ...]

PARENT is the parent's process id; `spawn.py` writes the command. Nothing of Monotape is imported for a script, because
the template's process must hold nothing of it.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1  # from Linux's prctl.h
_POLL_S = 0.5
_ORPHANED = 3  # exit status
#: Where Monotape itself is: none of the usual folders if its parent found it in the current one.
_PACKAGES = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def end_with_parent(parent: int) -> None:
    """From here on this process ends when `parent` does. It ends at once if that has happened already."""
    if not _kernel_kills_orphan():
        threading.Thread(target=_watch, args=(parent,), name="parent", daemon=True).start()
    # The parent may have died before the kernel knew what to do about it. This must come after: in the other order
    # a death between the two steps would go unseen.
    if os.getppid() != parent:
        os._exit(_ORPHANED)


def _kernel_kills_orphan() -> bool:
    """Asks Linux to send SIGKILL when the parent dies. False where there is no such thing, as on macOS."""
    if sys.platform != "linux":
        return False
    import ctypes

    try:
        return ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) == 0  # type: ignore[no-any-return]
    except (OSError, AttributeError):  # a C library without prctl
        return False


def _watch(parent: int) -> None:
    """An orphan gets another parent, on every Unix."""
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os._exit(_ORPHANED)


def main() -> None:
    parent, name = int(sys.argv[1]), sys.argv[2]
    end_with_parent(parent)
    sys.argv = [name, *sys.argv[3:]]
    if name.endswith(".py"):
        runpy.run_path(name, run_name="__main__")
    else:
        sys.path.append(_PACKAGES)
        runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

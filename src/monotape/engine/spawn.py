"""Starts child processes that end with this one, whichever way it ends and whichever thread asked for them."""

from __future__ import annotations

import concurrent.futures
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

_CHILD = Path(__file__).with_name("child.py")
_Order = tuple[list[str], dict[str, Any], "concurrent.futures.Future[subprocess.Popen[bytes]]"]


def spawn(program: str | Path, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """A process that runs a module, or a script that imports nothing of Monotape; `options` are Popen's.

    Its session is its own: Ctrl-C is for this process, which ends its children in its own time.
    """
    # -P: neither files of the current folder nor modules of ours beside the script may stand before the library's.
    command = [sys.executable, "-P", str(_CHILD), str(os.getpid()), str(program), *arguments]
    return _SPAWNER.run(command, {"start_new_session": True, **options})


class _Spawner:
    """A thread that starts processes and lives as long as this process.

    Linux kills a child when the *thread* that started it ends (PR_SET_PDEATHSIG), so a child started in a short-lived
    thread would die while it is still needed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, command: list[str], options: dict[str, Any]) -> subprocess.Popen[bytes]:
        started: concurrent.futures.Future[subprocess.Popen[bytes]] = concurrent.futures.Future()
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # the first time, and after a fork
                self._orders = queue.SimpleQueue()
                self._thread = threading.Thread(target=self._work, args=(self._orders,), daemon=True)
                self._thread.start()
            self._orders.put((command, options, started))
        return started.result()

    @staticmethod
    def _work(orders: queue.SimpleQueue[_Order]) -> None:
        while True:
            command, options, started = orders.get()
            try:
                process: Any = subprocess.Popen(command, **options)
                started.set_result(process)
            except BaseException as error:
                started.set_exception(error)


_SPAWNER = _Spawner()

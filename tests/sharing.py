"""Hooks of pytest: how several processes share the tests. Whole files, the longest first, and single tests at the end.

pytest-xdist has `--dist loadfile` for whole files and `--dist loadgroup` for groups. The first deals out files by
the number of their tests, so the slowest files come last and one process runs alone at the end. The second does
nothing from pytest 9.2 on, where it writes the group into a field that is no longer read.
"""

from __future__ import annotations

from contextlib import suppress

import pytest
from xdist.scheduler import LoadScopeScheduling

#: Parts of the suite that take longest, in that order. A path that ends in "/" is a folder whose
#: files share a process: those of cluster/ each start Ray, which takes the same ports.
LONGEST = (
    "tests/cluster/",
    "tests/engine/test_real_models.py",
    "tests/backends/test_cuda_build.py",
    "tests/backends/test_hip_build.py",
    "tests/training/test_table.py",
    "tests/training/test_trainer.py",
    "tests/backends/test_cpu_ranks.py",
    "tests/server/test_playground.py",
    "tests/test_install.py",
    "tests/backends/test_reference.py",
    "tests/server/test_faults.py",
    "tests/server/test_playground_conversations.py",
    "tests/server/test_chat_formats.py",
    "tests/server/test_attacks.py",
    "tests/server/test_grammar_attack.py",
    "tests/server/test_restarts.py",
    "tests/bench/test_scaling.py",
)

#: Files whose tests go to any process, one by one: they share checkpoints, which take a second to make, and libraries,
#: which backends/host_kernel.py shares among processes. They come after whole files, so that no process is left alone
#: with a long file at the end.
SINGLY = "tests/backends/test_kernel_"

#: Ranks on a CPU meet at every step, and beside another process they take ten times as long: after all others.
LAST = "tests/backends/test_cpu_ranks.py::test_words_that_come_late_never_change_a_bit_in_many_schedules"


class SharedFiles(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types here
    """Gives each process a file at a time, or a folder of LONGEST, so that a fixture of a module is made once.

    Of files of SINGLY a test at a time.
    """

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(SINGLY):
            return nodeid
        path: str = nodeid.split("::", 1)[0]
        return next((part for part in LONGEST if part.endswith("/") and path.startswith(part)), path)


def pytest_xdist_setupnodes() -> None:
    """Builds the native library on all cores, before there are processes that would each build it at the same time."""
    from monotape.backends.cpu.bridge import library
    from monotape.errors import BackendUnavailable

    with suppress(BackendUnavailable):  # tests that need it say so
        library()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest parts first, in each of the processes."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: rank(item.nodeid))


def rank(path: str) -> int:
    """Where a test stands in the order: its file's place in LONGEST, or after all of them, single tests last."""
    if path == LAST:
        return len(LONGEST) + 2
    if path.startswith(SINGLY):
        return len(LONGEST) + 1
    return next((place for place, part in enumerate(LONGEST) if path.startswith(part)), len(LONGEST))


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> SharedFiles:
    config.option.loadscopereorder = False  # the order is that of the items
    return SharedFiles(config, log)

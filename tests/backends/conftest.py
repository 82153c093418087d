"""How the kernel is compiled for the host."""

from __future__ import annotations

import pytest

from backends.host_kernel import HostKernel


@pytest.fixture
def compiled_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """For kernels that few tests share: compiling takes two thirds of the time, and running half as much again."""
    monkeypatch.setattr(HostKernel, "optimised", "-Og")

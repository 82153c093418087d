"""One tiny corpus for all tests of training, and one thread: threads that wait for each other's core are slow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from training.tiny_corpus import make_corpus


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    import torch

    before, sums = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch.use_deterministic_algorithms(sums)

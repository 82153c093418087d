"""A model with two kernels: one computes a token a pass, the other also checks drafts in passes of several rows.

Both give the same bits, and share weights and KV. The code for rows makes a token alone up to 4 % slower, so the kernel
of a request is chosen before its launch: by what drafts were worth in the requests before (worth.py).
"""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from monotape.backends.cuda.backend import CudaBackend
from monotape.backends.cuda.compilation import cached_path
from monotape.backends.cuda.driver import memory_free_and_total
from monotape.backends.cuda.generation import CudaGeneration, MaskedCudaGeneration
from monotape.backends.cuda.header import plan_header
from monotape.backends.cuda.launch import require_idle
from monotape.backends.cuda.loading import LoadedModel
from monotape.backends.cuda.memory import memory_plan
from monotape.backends.cuda.sequence import CudaSequence
from monotape.backends.cuda.worth import Worth
from monotape.backends.protocol import Job, KvSequence, Token
from monotape.errors import MonotapeError
from monotape.models.spec import ModelSpec
from monotape.plan.gpu import GpuPlan
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.tapes import Progress

_log = logging.getLogger("monotape")
_PACKAGES = Path(__file__).parents[3]
#: The folder that holds this package comes last: it is new where the package is in the current folder only.
_COMPILE = """
import os, sys
sys.path.append(sys.argv[1])
from monotape.backends.cuda.compilation import cached_path, compile_kernel
from monotape.errors import MonotapeError
os.nice(10)
header = sys.stdin.read()
try:
    compile_kernel(header)
except MonotapeError as error:
    sys.exit(error.message)
if not cached_path(header).exists():
    sys.exit(1)  # the warning has said why
"""


class Compiling:
    """A kernel that another process compiles into the cache. It ends by itself if this process ends before it."""

    def __init__(self, header: str) -> None:
        self._path = cached_path(header)
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - that process writes it while requests run
        if self._path.exists():
            return
        with tempfile.TemporaryFile() as told:  # a pipe would make this process wait for the other one
            told.write(header.encode())
            told.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _COMPILE, str(_PACKAGES)],
                stdin=told, stdout=subprocess.DEVNULL, stderr=self._errors, start_new_session=True,
            )  # fmt: skip

    def code(self) -> bytes | None:
        """The machine code, once it is there."""
        return self._path.read_bytes() if self._path.exists() else None

    @property
    def failure(self) -> str | None:
        """Why it did not compile, in that process's own words."""
        if self._process is None or self._process.poll() in (None, 0):
            return None
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip(" \0\n")
        return said or f"the compiler's process ended with status {self._process.returncode}"

    def close(self) -> None:
        """The process goes on: another start may find its kernel in the cache."""
        self._errors.close()


class _Watched(CudaGeneration):
    """Says what came of it when it has ended."""

    def __init__(
        self, backend: CudaBackend, job: Job, sequence: CudaSequence,
        ended: Callable[[CudaBackend, Job, list[Token], int], None],
    ) -> None:  # fmt: skip
        self._ended = partial(ended, backend, job)
        super().__init__(backend, job, sequence)

    def __iter__(self) -> Iterator[Token]:
        yield from super().__iter__()
        self._ended(self._launch.tokens, self.accepted)


class DraftingBackend(CudaBackend):
    """Itself the backend of the kernel for a token alone. `drafting` is that of the other, once that is compiled."""

    compiling: ClassVar[Callable[[str], Compiling]] = Compiling
    drafting: CudaBackend | None = None
    _coming: tuple[GpuPlan, Compiling] | None = None

    def __init__(
        self, spec: ModelSpec, gpu_plan: GpuPlan, model: LoadedModel, cubin: bytes, *, rank: int = 0
    ) -> None:
        super().__init__(spec, gpu_plan, model, cubin, rank=rank)
        self._worth = Worth()

    @classmethod
    def load_both(
        cls, spec: ModelSpec, plan: GpuPlan, drafting: GpuPlan, checkpoint: Checkpoint,
        progress: Progress | None = None,
    ) -> CudaBackend:  # fmt: skip
        """The second kernel is compiled while requests run already. Without it where memory is too short for both."""
        if memory_plan(plan, drafting=drafting).total > memory_free_and_total()[0]:
            return CudaBackend.load(spec, plan, checkpoint, progress)
        backend = cls.load(spec, plan, checkpoint, progress)
        assert isinstance(backend, cls)
        backend._coming = drafting, cls.compiling(plan_header(drafting))
        return backend

    def start(self, job: Job, sequence: KvSequence) -> CudaGeneration:
        assert isinstance(sequence, CudaSequence), "a sequence of another backend"
        backend = self._backend_for(job)
        return _Watched(backend, job, sequence, self._learn)

    def start_masked(self, job: Job, sequence: KvSequence) -> MaskedCudaGeneration:
        """Tokens that a grammar forces are drafts that are always right, so it takes the kernel that checks them."""
        assert isinstance(sequence, CudaSequence), "a sequence of another backend"
        backend = (self._ready() if job.drafts else None) or self
        return MaskedCudaGeneration(backend, replace(job, masked=True), sequence)

    def _backend_for(self, job: Job) -> CudaBackend:
        drafting = self._ready() if job.drafts else None
        if drafting is None or not (job.prediction or self._worth.pays):
            return self
        return drafting

    @property
    def pending(self) -> bool:
        """Whether a second kernel may still come."""
        return self._coming is not None

    def _ready(self) -> CudaBackend | None:
        """The backend that checks drafts. It is made when nothing runs on the GPU: loading code waits for that."""
        if self.drafting is None and self._coming is not None:
            plan, compiling = self._coming
            if (cubin := compiling.code()) is not None:
                require_idle(self._latest.launch)
                self._expect_no_more()
                self.drafting = self._second(plan, cubin)
            elif (why := compiling.failure) is not None:
                self._expect_no_more()
                _log.warning("There is no kernel for drafts, so none are checked: %s", why)
        return self.drafting

    def _expect_no_more(self) -> None:
        if self._coming is not None:
            self._coming[1].close()
        self._coming = None

    def _second(self, plan: GpuPlan, cubin: bytes) -> CudaBackend | None:
        """None where the GPU has no room for it, or refuses it. Every request can do without, so none fails for it."""
        try:
            return CudaBackend(self.spec, plan, self.model, cubin, beside=self)
        except (MonotapeError, MemoryError) as error:
            _log.warning("The kernel for drafts cannot be loaded, so none are checked: %s", error)
            return None

    def _learn(self, backend: CudaBackend, job: Job, tokens: list[Token], accepted: int) -> None:
        if backend is not self:
            self._worth.learn(tokens, accepted)
        elif self.drafting is not None and job.drafts:
            self._worth.learn_alone(job.prompt, tokens, self.drafting.gpu_rank.rows_a_pass)

    def close(self) -> None:
        self._expect_no_more()
        if self.drafting is not None:
            self.drafting.close()
        super().close()

"""The HIP backend: the host side of the CUDA backend, on AMD's runtime, with a kernel compiled for CDNA3.

Compiled and simulated, never run on hardware: docs/amd.md says what is known and what is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from monotape.backends.cuda import driver
from monotape.backends.cuda.backend import CudaBackend
from monotape.backends.cuda.driver import DeviceMemory
from monotape.backends.cuda.ranked import RankedCudaBackend
from monotape.backends.hip.compilation import compile_kernel
from monotape.backends.hip.runtime import hip_runtime
from monotape.models.spec import ModelSpec
from monotape.plan.gpu import GpuPlan
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.tapes import Progress


class HipBackend(CudaBackend):
    """A model on one MI300X."""

    name = "hip"

    @classmethod
    def compile(cls, header: str) -> bytes:
        return compile_kernel(header)

    @classmethod
    def load(
        cls, spec: ModelSpec, plan: GpuPlan, checkpoint: Checkpoint, progress: Progress | None = None, *,
        rank: int = 0, shared: Mapping[str, DeviceMemory] | None = None,
    ) -> HipBackend:  # fmt: skip
        use_hip()
        backend = super().load(spec, plan, checkpoint, progress, rank=rank, shared=shared)
        assert isinstance(backend, cls)
        return backend


class RankedHipBackend(RankedCudaBackend):
    """A model on several of them."""

    name = "hip"
    rank_type = HipBackend

    @classmethod
    def load(
        cls, spec: ModelSpec, plan: GpuPlan, checkpoint: Checkpoint, progress: Progress | None = None, *,
        devices: Sequence[int],
    ) -> RankedHipBackend:  # fmt: skip
        use_hip()
        backend = super().load(spec, plan, checkpoint, progress, devices=devices)
        assert isinstance(backend, cls)
        return backend


def use_hip() -> None:
    """From here on this process's GPUs are AMD's."""
    driver.use_runtime(hip_runtime())


def processors() -> int:
    """Compute units of the first AMD GPU: the number of workers."""
    use_hip()
    return driver.processors()

"""The fake GPU has no call that cuda-core and cuda.bindings do not have, so what runs on it can run on a real one."""

from __future__ import annotations

import gc

import pytest

from backends.fake_cuda import FakeCuda, Stream, fake_gpu

USED = {
    "Device": (
        "set_current",
        "create_stream",
        "create_event",
        "sync",
        "name",
        "compute_capability",
        "properties",
    ),
    "Stream": ("sync", "record", "handle"),
    "Event": ("sync", "is_done"),
    "Buffer": ("from_handle", "copy_from", "fill", "close", "handle"),
    "DeviceMemoryResource": ("allocate", "attributes"),
    "DeviceMemoryResourceOptions": (),
    "LegacyPinnedMemoryResource": ("allocate",),
    "ObjectCode": ("from_cubin", "get_kernel"),
    "Kernel": ("handle",),
    "Program": ("compile",),
    "ProgramOptions": ("name", "arch", "std", "include_path"),
}
BINDINGS = (
    "CUfunction", "CUkernel", "cuKernelSetAttribute", "cuLaunchCooperativeKernel", "cuMemGetInfo", "cuMemcpy2DAsync",
    "CUDA_MEMCPY2D", "CUmemorytype",
)  # fmt: skip


@pytest.mark.parametrize("name", USED)
def test_cuda_core_has_what_we_call(name: str) -> None:
    import cuda.core

    found = getattr(cuda.core, name)
    assert [wanted for wanted in USED[name] if not hasattr(found, wanted)] == []


def test_a_pool_says_what_it_holds() -> None:
    from cuda.core._memory._memory_pool import _MemPoolAttributes

    assert hasattr(_MemPoolAttributes, "reserved_mem_current")
    assert hasattr(_MemPoolAttributes, "used_mem_current")


def test_cuda_bindings_has_what_we_call() -> None:
    from cuda.bindings import driver

    assert [name for name in BINDINGS if not hasattr(driver, name)] == []
    kinds = driver.CUfunction_attribute
    assert hasattr(kinds, "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES")
    for field in (
        "srcDevice",
        "srcPitch",
        "dstDevice",
        "dstPitch",
        "WidthInBytes",
        "Height",
        "srcMemoryType",
    ):
        assert hasattr(driver.CUDA_MEMCPY2D, field)


def test_a_structure_cannot_be_an_argument_of_cuda_cores_launch() -> None:
    """When this fails, driver.Kernel.launch can go through cuda-core like everything else."""
    import ctypes

    from cuda.core._kernel_arg_handler import ParamHolder

    class Parameters(ctypes.Structure):
        _fields_ = (("numbers", ctypes.c_int64 * 50),)

    with pytest.raises(TypeError, match="unsupported type"):
        ParamHolder((Parameters(),))


def test_memory_of_a_gpu_that_is_gone_is_no_longer_listed() -> None:
    """The pseudo-GPU copies all that is listed: an address that is not mapped any more ended the process."""
    with fake_gpu(FakeCuda()) as gpu:
        address = gpu.DeviceMemoryResource(gpu.Device(0), None).allocate(64, stream=Stream()).handle
        assert address in FakeCuda.device_memory
        gpu.kept[address].itself = gpu  # in a circle, which lives until it is looked for
    del gpu
    gc.collect()
    assert address not in FakeCuda.device_memory

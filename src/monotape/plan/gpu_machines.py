"""Kinds of GPU that the kernel is written for: what a plan, its pages and its header take from each."""

from __future__ import annotations

from dataclasses import dataclass

# Of every machine, and what Hopper has. plan.h repeats them as constants, so that they exist once.
WARPS = 8  # consumer warps of a worker
WORDS_AT_ONCE = 48  # words of 32 bits of weights that fit a lane's registers
CODED_WORDS_AT_ONCE = 40  # where they are codes, which take further registers
WORD_BYTES, WORD_VALUES = 16, 8  # of the exchange
SHARED_MEMORY = 227 * 1024  # bytes that a block may have on Hopper
#: Row and column tiles of a block of a prefill's product.
BLOCK_SHAPES = ((8, 16), (16, 16), (16, 24), (16, 32))


@dataclass(frozen=True, slots=True)
class GpuMachine:
    """What the kernel knows of a kind of GPU: see the machine's header in kernels/machine/."""

    name: str
    header: str  # of kernels/machine/
    lanes: int  # of a warp, or wave
    shared_memory: int  # bytes that a worker may have
    word_bytes: int  # what one access of the exchange stores and loads at once
    dies: int  # parts of the GPU with an L2 of their own
    words_at_once: int  # words of 32 bits of weights that fit a lane's registers
    coded_words_at_once: int  # where they are codes, which take further registers
    shapes: tuple[tuple[int, int], ...]  # row and column tiles of a block of a prefill's product
    finished_block: int  # bytes of the largest of those, staged for the store
    ring: bool  # bulk copies fill a ring of pages; else warps read the tape themselves
    standing: str = ""  # what a user must know of a machine that has not run the kernel

    @property
    def side(self) -> int:
        """Blocks that a warp multiplies side by side: 32 lanes have one."""
        return self.lanes // 32

    @property
    def parts(self) -> int:
        """Shares of k: blocks that the warps of a worker multiply at once."""
        return WARPS * self.side

    @property
    def threads(self) -> int:
        """Of a worker: its consumer warps, and four others."""
        return (WARPS + 4) * self.lanes

    @property
    def consumers(self) -> int:
        """Threads that compute."""
        return WARPS * self.lanes


HOPPER = GpuMachine(
    "NVIDIA Hopper", "hopper", 32, SHARED_MEMORY, WORD_BYTES, 1, WORDS_AT_ONCE, CODED_WORDS_AT_ONCE, BLOCK_SHAPES,
    135168, ring=True,
)  # fmt: skip
NEVER_RUN = "compiled and simulated, never run on hardware"
#: Of an MI300X.
CDNA3 = GpuMachine(
    "AMD CDNA3", "cdna3", 64, 64 * 1024 - 128, 8, 8, 24, 12, ((8, 16),), 34816, ring=False, standing=NEVER_RUN
)
#: By the backend that a plan is for.
GPU_MACHINES = {"cuda": HOPPER, "hip": CDNA3}

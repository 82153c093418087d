"""Memory for the rows of a prefill's chunk: activations between its parts."""

from __future__ import annotations

from monotape.backends.cuda.driver import DeviceMemory
from monotape.backends.cuda.params import RowsStruct
from monotape.plan.gpu import RowPlan


def allocate(prefill: RowPlan) -> tuple[RowsStruct, list[DeviceMemory]]:
    """The buffers, zeroed: the padding of a block is multiplied too, and must not be a NaN."""
    rows, memories = RowsStruct(), []
    for buffer in prefill.buffers:
        memory = DeviceMemory(buffer.bytes)
        memory.fill(0)
        memories.append(memory)
        setattr(rows, buffer.name, memory.pointer)
    return rows, memories

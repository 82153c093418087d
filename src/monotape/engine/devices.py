"""Whether this machine's GPUs can be the ranks that were asked for, in a sentence each where they cannot."""

from __future__ import annotations

from collections.abc import Callable

from monotape.errors import BackendUnavailable

_CONNECTED = {
    "NVIDIA": "Use GPUs that NVLink or one PCIe switch connects (`nvidia-smi topo -m` shows them), or --tp 1.",
    "AMD": "Use GPUs that Infinity Fabric connects (`rocm-smi --showtopo` shows them), or --tp 1.",
}


def check_devices(
    ranks: int, devices: int, peers: Callable[[int, int], bool], *, emulated: bool, vendor: str = "NVIDIA"
) -> None:
    """One rank a GPU, each with access to every other's memory; emulated, one GPU is enough for all.

    `peers(a, b)`: whether GPU a can write into the memory of GPU b.
    """
    if devices == 0:
        raise BackendUnavailable(f"No {vendor} GPU can be used here.", "Use --backend cpu.")
    if ranks == 1 or emulated:
        return
    if ranks > devices:
        raise BackendUnavailable(
            f"{ranks} ranks were asked for, but this machine has {devices} GPU{'s' if devices > 1 else ''}.",
            f"Use --tp {devices} or fewer"
            + (", or --emulate-ranks, where ranks share one GPU." if vendor == "NVIDIA" else "."),
        )
    for one in range(ranks):
        for other in range(ranks):
            if one != other and not peers(one, other):
                raise BackendUnavailable(
                    f"GPU {one} cannot reach the memory of GPU {other}, and ranks talk in no other way.",
                    _CONNECTED[vendor],
                )

"""The speeds that Kog projected for MoE models, and whether they follow from the stated sizes or from real configs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from monotape.planner.accounting import shape_from_config
from monotape.planner.box import TERA, Box
from monotape.planner.catalogue import find_gpu, models, table
from monotape.planner.load import Load
from monotape.planner.precision import kv_bytes_for, precision_for

TOLERANCE = 0.05
NODE = 8
GPUS = ("h200", "mi300x")


@dataclass(frozen=True, slots=True)
class Projection:
    """One claim for one node, beside what the share of the bandwidth gives."""

    label: str
    gpu: str
    claimed: float
    nominal: float  # from the active parameters and the precision that the row states
    configured: float  # from the model's config, in the formats that its checkpoint has
    configured_gb: float
    note: str

    @property
    def follows_nominal(self) -> bool:
        return abs(self.claimed / self.nominal - 1) <= TOLERANCE

    @property
    def follows_config(self) -> bool:
        return abs(self.claimed / self.configured - 1) <= TOLERANCE

    @property
    def verdict(self) -> str:
        """In one sentence, whether the row follows and from what."""
        if self.follows_nominal and self.follows_config:
            return "follows, from the stated size and from the config"
        if self.follows_nominal:
            return (
                f"follows from the stated size only; the config makes it {self.configured_gb:.2f} GB a token"
            )
        if self.follows_config:
            return (
                f"DOES NOT FOLLOW from the stated size ({self.claimed / self.nominal - 1:+.0%}); it does from the"
                f" config, whose mixed formats make it {self.configured_gb:.2f} GB a token"
            )
        return (
            f"DOES NOT FOLLOW: {self.claimed / self.nominal - 1:+.0%} against the stated size,"
            f" {self.claimed / self.configured - 1:+.0%} against the config ({self.configured_gb:.2f} GB a token)"
        )


def projections() -> tuple[Projection, ...]:
    data = table("peers")["projections"]
    found = []
    for row in data["rows"]:
        config = models()[row["model"]].config
        load = Load(shape_from_config(config), precision_for(row["dtype"], config), kv_bytes_for("bf16"))
        token_bytes = load.pass_bytes(0)
        for name in GPUS:
            bandwidth = effective_bandwidth(Box(find_gpu(name), NODE))
            found.append(
                Projection(
                    label=row["label"],
                    gpu=name,
                    claimed=row[name],
                    nominal=data["mbu"] * bandwidth / (row["active"] * row["nominal_bytes"]),
                    configured=data["mbu"] * bandwidth / token_bytes,
                    configured_gb=token_bytes / 1e9,
                    note=row["note"],
                )
            )
    return tuple(found)


def effective_bandwidth(box: Box) -> float:
    """Bytes a second of all devices together, as far as they can be had in practice."""
    return next(tbs for name, tbs, _ in box.bandwidths() if name == "effective") * box.count * TERA


def nominal_ceiling(box: Box, active: float, weight_bytes: float) -> float:
    """Tokens a second at the effective bandwidth, from a number of active weights alone."""
    return effective_bandwidth(box) / (active * weight_bytes)


def projections_json(found: tuple[Projection, ...]) -> list[dict[str, Any]]:
    """The table as data for programs."""
    return [
        {
            "row": one.label, "gpu": one.gpu, "count": NODE, "claimed": one.claimed, "from_stated_size": one.nominal,
            "from_config": one.configured, "gigabytes_per_token": one.configured_gb, "verdict": one.verdict,
            "note": one.note,
        }
        for one in found
    ]  # fmt: skip

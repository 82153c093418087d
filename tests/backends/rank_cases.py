"""The small checkpoints of families.py with eight heads, so that up to eight ranks can share them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from families import CASES, Case, make_checkpoint


def eight_heads(case: Case) -> Case:
    fields = {**case.fields, "num_attention_heads": 8}
    if fields.get("num_key_value_heads") == 6:
        fields["num_key_value_heads"] = 8
    fields["hidden_size"] = 80 if "hidden_size" in case.fields else 56
    return replace(case, name=f"{case.name}-8-heads", fields=fields)


EIGHT = {case.name: eight_heads(case) for case in CASES}
assert set(EIGHT) == {case.name for case in CASES}


def make_eight(name: str, folder: Path) -> Path:
    return make_checkpoint(EIGHT[name], folder)

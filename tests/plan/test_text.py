"""The committed text of some plans: a change of schedule shows up as a diff."""

import pytest

from monotape.plan.text import dump
from plan.plans import GOLDEN, golden_plans


@pytest.mark.parametrize("name", golden_plans())
def test_plan_text_is_the_committed_one(name: str) -> None:
    expected = (GOLDEN / f"{name}.txt").read_text()
    assert dump(golden_plans()[name]) == expected, (
        "if intended: python tests/plan/plans.py, and review the diff"
    )


def test_every_golden_file_belongs_to_a_plan() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(golden_plans())

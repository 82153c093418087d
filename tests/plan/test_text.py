"""The committed text of some plans: a change of schedule shows up as a diff."""

import pytest

from plan.plans import GOLDEN, golden_texts


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return golden_texts()


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*.txt")))
def test_plan_text_is_the_committed_one(texts: dict[str, str], name: str) -> None:
    expected = (GOLDEN / f"{name}.txt").read_text()
    assert texts[name] == expected, "if intended: python tests/plan/plans.py, and review the diff"


def test_every_plan_has_a_golden_file(texts: dict[str, str]) -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(texts)

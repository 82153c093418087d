"""The gate before drafts on the CPU, by itself: what drafts may cost, and how soon they are found to pay."""

from __future__ import annotations

import numpy as np
import pytest

from monotape.backends.cpu.bridge import library

ALONE_NS, SURE, DRAFTS = 10_000_000, 8, 3
COSTS = {"weights from memory": 1.2, "codes": 2.2, "more than drafts can save": 4.5}


class Text:
    """A text as the gate sees it: how many equal tokens come before each pass, and how many drafts are right."""

    def __init__(self, evidence: list[int], right: list[int]) -> None:
        self.evidence, self.right = np.array(evidence, np.int32), np.array(right, np.int32)

    def share_of_speed(self, cost: float, *, predicted: bool = False) -> float:
        """Tokens a second, of those without drafts. A pass with drafts takes `cost` times as long."""
        drafted = np.zeros(self.evidence.size, np.uint8)
        library().monotape_gate(
            drafted.size, self.evidence.ctypes.data, self.right.ctypes.data, predicted,
            ALONE_NS, round(ALONE_NS * cost), drafted.ctypes.data,
        )  # fmt: skip
        tokens = drafted.size + int(self.right[drafted > 0].sum())
        return tokens / (drafted.size + (cost - 1) * int(drafted.sum()))


def prose(passes: int) -> Text:
    """A few equal tokens before every second pass, and what followed them never follows again."""
    evidence = np.random.default_rng(1).choice([0, 0, 0, 2, 3, 5], passes)
    return Text(evidence.tolist(), [0] * passes)


@pytest.mark.parametrize("passes", [32, 128, 512, 4096])
@pytest.mark.parametrize("cost", COSTS)
def test_text_without_repetitions_is_not_slower(cost: str, passes: int) -> None:
    assert prose(passes).share_of_speed(COSTS[cost]) > 0.99


@pytest.mark.parametrize("cost", COSTS)
def test_repetitions_that_never_go_on_cost_little(cost: str) -> None:
    assert Text([SURE] * 4096, [0] * 4096).share_of_speed(COSTS[cost]) > 0.97


@pytest.mark.parametrize("cost", ["weights from memory", "codes"])
def test_a_copied_text_is_found_to_pay(cost: str) -> None:
    copied = Text([*range(SURE), *[SURE] * 92], [DRAFTS] * 100)
    best = (1 + DRAFTS) / COSTS[cost]
    assert copied.share_of_speed(COSTS[cost]) > 0.85 * best
    assert copied.share_of_speed(COSTS[cost], predicted=True) > 0.9 * best


@pytest.mark.parametrize("cost", ["weights from memory", "codes"])
def test_a_copy_after_long_prose_is_found_too(cost: str) -> None:
    before, after = prose(2000), Text([SURE] * 100, [DRAFTS] * 100)
    both = Text([*before.evidence, *after.evidence], [*before.right, *after.right])
    gained = 2100 / both.share_of_speed(COSTS[cost])
    assert both.share_of_speed(COSTS[cost]) > 1.02 and gained < 2100


def test_drafts_that_cannot_pay_are_given_up() -> None:
    assert Text([SURE] * 4096, [DRAFTS] * 4096).share_of_speed(COSTS["more than drafts can save"]) > 0.97

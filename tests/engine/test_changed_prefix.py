"""A header that changes with every call is found, and nothing else is taken for one."""

from __future__ import annotations

import random

import pytest

from monotape.backends.token_ids import TokenIds
from monotape.engine.changed_prefix import Change, change_between
from monotape.engine.kv_pool import KvPool
from token_source import SourceSequence

RANDOM = random.Random(5)
INSTRUCTIONS = [RANDOM.randrange(5000) for _ in range(700)]


@pytest.mark.parametrize(
    ("old", "new"), [([1], [2]), ([1, 2, 3], [4, 5]), ([], [9] * 20), ([7] * 90, [8] * 3)]
)
@pytest.mark.parametrize("before", [0, 5])
def test_a_header_is_found(old: list[int], new: list[int], before: int) -> None:
    top = [6000 + index for index in range(before)]
    kept, prompt = [*top, *old, *INSTRUCTIONS], [*top, *new, *INSTRUCTIONS, 1, 2]
    found = change_between(TokenIds.of(kept), TokenIds.of(prompt))
    assert found is not None and found.at == before
    assert 570 <= found.again <= 700  # the first few tokens after the change may be missing


def test_other_prompts_are_no_change() -> None:
    other = [RANDOM.randrange(5000) for _ in range(700)]
    for prompt in ([*INSTRUCTIONS, 5, 6], INSTRUCTIONS, other, [1, 2, 3], [3, *INSTRUCTIONS[:60]]):
        assert change_between(TokenIds.of(INSTRUCTIONS), TokenIds.of(prompt)) is None


def test_the_pool_says_so() -> None:
    kept = KvPool(lambda: SourceSequence(10), max_sequences=4, max_bytes=10**6)

    def ask(header: int) -> Change | None:
        prompt = [4, 5, header, *INSTRUCTIONS]
        lease = kept.lease(prompt)
        assert isinstance(lease.sequence, SourceSequence)
        lease.sequence.tokens += prompt[lease.cached :]
        kept.give_back(lease, prompt)
        return lease.findings.change

    assert ask(1) is None
    assert (ask(2), ask(2)) == (Change(2, 697), None)

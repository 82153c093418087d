"""Kept KV: what is reused, what gives way, and what is never trusted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monotape.backends.protocol import KvSequence
from monotape.backends.token_ids import TokenIds, common_prefix
from monotape.engine import cache_misses, kv_pool
from monotape.engine.kv_pool import KvPool, Lease
from monotape.errors import ResourceError
from token_source import SourceSequence


def pool(max_sequences: int = 3, max_bytes: int = 10**6) -> KvPool:
    return KvPool(lambda: SourceSequence(token_bytes=10), max_sequences=max_sequences, max_bytes=max_bytes)


def run(kept: KvPool, prompt: list[int], answer: list[int], *, trimmed: bool = True) -> Lease:
    """A request: computes what is not cached, as a backend would. `trimmed`: its last message has been sent."""
    lease = kept.lease(prompt)
    sequence = lease.sequence
    assert isinstance(sequence, SourceSequence)
    assert sequence.tokens == prompt[: lease.cached]
    sequence.tokens += [*prompt[lease.cached :], *answer[:-1]]
    kept.give_back(lease, [*prompt, *answer])
    if trimmed:
        kept.trim()
    return lease


def test_a_second_turn_finds_the_first() -> None:
    kept = pool()
    first = run(kept, [1, 2, 3, 4], [5, 6])
    second = run(kept, [1, 2, 3, 4, 5, 6, 7, 8], [9])
    assert second.sequence is first.sequence
    assert second.cached == 5  # the last token of an answer has no KV yet
    assert len(kept) == 1


def test_at_least_one_token_is_left_to_compute() -> None:
    kept = pool()
    run(kept, [1, 2, 3], [4, 5, 6])
    assert kept.lease([1, 2, 3]).cached == 2


def test_a_diverging_turn_keeps_what_is_common() -> None:
    kept = pool()
    run(kept, [1, 2, 3, 4, 5], [6, 7])
    edited = run(kept, [1, 2, 3, 4, 99, 98], [5])
    assert edited.cached == 4
    assert run(kept, [1, 2, 3, 4, 5, 6, 7, 8], [9]).cached == 6  # what it diverged from can go on too


def test_another_conversation_does_not_destroy_the_first() -> None:
    kept = pool()
    long = list(range(100, 150))
    first = run(kept, [1, 2, *long], [7])
    other = run(kept, [1, 2, 3, 4, 5], [6])  # a common opening is copied
    assert (other.sequence is not first.sequence, other.cached) == (True, 2)
    again = run(kept, [1, 2, *long, 7, 8], [9])
    assert (again.sequence is first.sequence, again.cached) == (True, 52)


def test_conversations_with_the_same_instructions_all_go_on() -> None:
    kept, instructions = pool(max_sequences=8), list(range(100, 140))
    spoken = {number: [*instructions, number] for number in range(8)}
    for turn in range(4):
        for number, tokens in spoken.items():
            lease = run(kept, tokens, [50 + turn, 60 + number])
            assert lease.cached == (len(tokens) - 2 if turn else 40 * (number > 0)), f"{number}, turn {turn}"
            spoken[number] = [*tokens, 50 + turn, 60 + number, 70]


def test_an_early_turn_that_is_answered_again_leaves_the_later_ones() -> None:
    kept, long = pool(), list(range(1000, 2000))
    run(kept, long, [1, 2, 3])
    again = run(kept, long[:100], [4])
    assert (again.cached, len(kept)) == (99, 2)
    went_on = run(kept, [*long, 1, 2, 5], [6])
    assert (went_on.cached, went_on.findings.miss) == (1002, None)


@pytest.mark.parametrize("shorter", [0, 5])
def test_a_prompt_that_is_answered_again_takes_the_place_of_its_answer(shorter: int) -> None:
    kept, prompt, answer = pool(), list(range(1000, 1100)), list(range(100, 160))
    first = run(kept, prompt, answer)
    asked = prompt[: 100 - shorter]
    again = run(kept, asked, [4])
    assert (again.sequence is first.sequence, again.cached, len(kept)) == (True, len(asked) - 1, 1)
    lost = run(kept, [*prompt, *answer, 5], [6])
    assert lost.cached == len(asked)
    assert (
        lost.findings.miss
        == "159 tokens of it were kept and dropped: an earlier prompt of it was answered again"
    )


def test_what_an_early_turn_destroys_for_want_of_memory_is_remembered() -> None:
    made: list[SourceSequence] = []

    def only_one() -> SourceSequence:
        if made:
            raise ResourceError("There is no memory left.")
        made.append(SourceSequence(token_bytes=10))
        return made[0]

    kept, long = KvPool(only_one, max_sequences=3, max_bytes=10**6), list(range(1000, 2000))
    run(kept, long, [1, 2, 3])
    assert run(kept, long[:100], [4]).cached == 99
    later = run(kept, [*long, 1, 2, 5], [6])
    assert (later.cached, later.sequence is made[0]) == (100, True)
    assert later.findings.miss == "1002 tokens of it were kept and dropped: its memory was needed"


def test_where_no_copy_fits_the_kept_sequence_is_taken() -> None:
    made: list[SourceSequence] = []

    def only_one() -> SourceSequence:
        if made:
            raise ResourceError("There is no memory left.")
        made.append(SourceSequence(token_bytes=10))
        return made[0]

    kept = KvPool(only_one, max_sequences=3, max_bytes=10**6)
    run(kept, [1, 2, 3, 4], [5, 6])
    other = run(kept, [1, 2, 9], [8])
    assert (other.sequence is made[0], other.cached) == (True, 2)


class RoomySequence(SourceSequence):
    """Remembers the room that it had when it was filled."""

    room = filled_room = 0

    def reserve(self, positions: int) -> None:
        self.room = max(self.room, positions)

    def copy_from(self, other: KvSequence, length: int) -> None:
        super().copy_from(other, length)
        self.filled_room = self.room


def test_a_copy_has_the_room_of_its_request_before_it_is_filled() -> None:
    kept = KvPool(lambda: RoomySequence(token_bytes=10), max_sequences=3, max_bytes=10**6)
    run(kept, [1, 2, 3, 4], [5, 6])
    branch = kept.lease([1, 2, 3, 9, 9], room=70).sequence
    assert isinstance(branch, RoomySequence) and branch.filled_room == 70


def test_the_least_recent_gives_way() -> None:
    kept = pool(max_sequences=2)
    run(kept, [1, 1, 1], [1])
    run(kept, [2, 2, 2], [2])
    run(kept, [1, 1, 1, 1], [1])
    run(kept, [3, 3, 3], [3])
    assert len(kept) == 2
    assert kept.lease([1, 1, 1, 1, 1]).cached == 4
    assert kept.lease([2, 2, 2]).cached == 0


def test_bytes_are_counted_but_the_newest_always_stays() -> None:
    kept = pool(max_sequences=9, max_bytes=95)
    run(kept, [1, 1, 1, 1], [1])
    run(kept, [2, 2, 2, 2], [2])
    assert (len(kept), kept.bytes) == (2, 80)
    run(kept, [3, 3, 3], [3])
    assert (len(kept), kept.bytes) == (2, 70)
    run(kept, list(range(50)), [3])
    assert (len(kept), kept.bytes) == (1, 500)


class Reserving(SourceSequence):
    """Keeps the room that a request reserved, as arrays do, until it is told to shrink."""

    CONTEXT = 100

    def __init__(self) -> None:
        super().__init__(token_bytes=10)
        self.room, self.shrunk = self.CONTEXT, 0

    @property
    def bytes(self) -> int:
        return 10 * self.room

    def reserve(self, positions: int) -> None:
        self.room = max(self.room, positions)

    def shrink(self) -> bool:
        if 2 * self.length >= self.room:
            return False
        self.room, self.shrunk = self.length, self.shrunk + 1
        return True


def test_room_that_is_reserved_and_not_used_costs_no_conversation() -> None:
    kept = KvPool(Reserving, max_sequences=64, max_bytes=2000)
    sequences = [run(kept, [number, *range(1000, 1008)], [7]).sequence for number in range(50)]
    assert len(kept) == 22  # 9 positions each: as many as 2,000 bytes hold
    shrunk = [sequence.shrunk for sequence in sequences if isinstance(sequence, Reserving)]
    assert max(shrunk) == 1 and kept.bytes <= 2000
    assert kept.lease([49, *range(1000, 1008), 7, 8]).cached == 9


def test_only_what_others_need_is_given_back_the_least_recent_first() -> None:
    kept = KvPool(Reserving, max_sequences=64, max_bytes=2500)
    sequences = [run(kept, [number] * 9, [7]).sequence for number in range(2)]
    assert [sequence.bytes for sequence in sequences] == [1000, 1000]
    sequences.append(run(kept, [2] * 9, [7]).sequence)
    assert [sequence.bytes for sequence in sequences] == [90, 1000, 1000]


def test_the_end_of_an_answer_waits_for_no_limit() -> None:
    """Moving KV into less memory takes a while: it comes after the answer, or before the next one."""
    kept = KvPool(Reserving, max_sequences=64, max_bytes=1500)
    sequences = [run(kept, [number] * 9, [7], trimmed=False).sequence for number in range(2)]
    assert [sequence.bytes for sequence in sequences] == [1000, 1000]
    kept.trim()
    assert [sequence.bytes for sequence in sequences] == [90, 1000]
    run(kept, [2] * 9, [7], trimmed=False)
    assert kept.bytes == 90 + 1000 + 1000
    kept.lease([3] * 9)
    assert kept.bytes == 90 + 90 + 1000


def test_a_sequence_that_is_mostly_used_is_dropped_instead() -> None:
    kept = KvPool(Reserving, max_sequences=64, max_bytes=2000)
    for number in range(3):
        run(kept, [number] * 60, [7])
    assert (len(kept), kept.bytes) == (2, 2000)


def test_memory_that_is_not_used_is_given_back_before_a_conversation() -> None:
    kept = KvPool(Reserving, max_sequences=64, max_bytes=10**6)
    run(kept, [1] * 9, [7])
    run(kept, [2] * 9, [7])
    assert [kept.make_room() for _ in range(2)] == [True, True]
    assert (len(kept), kept.bytes) == (2, 180)
    assert [kept.make_room() for _ in range(3)] == [True, True, False]
    assert len(kept) == 0


def test_where_no_smaller_copy_fits_conversations_are_dropped() -> None:
    class Stuck(Reserving):
        def shrink(self) -> bool:
            raise ResourceError("There is no memory left.")

    kept = KvPool(Stuck, max_sequences=64, max_bytes=2000)
    for number in range(3):
        run(kept, [number] * 9, [7])
    assert (len(kept), kept.bytes) == (2, 2000)


def test_a_lease_that_never_comes_back_is_forgotten() -> None:
    kept = pool()
    run(kept, [1, 2, 3], [4])
    kept.lease([1, 2, 3, 4])
    assert len(kept) == 0
    assert kept.lease([1, 2, 3, 4]).cached == 0


def test_positions_whose_tokens_are_unknown_are_not_kept() -> None:
    kept = pool()
    lease = kept.lease([1, 2, 3])
    assert isinstance(lease.sequence, SourceSequence)
    lease.sequence.tokens += [1, 2, 3, 77, 78]
    kept.give_back(lease, [1, 2, 3])
    assert kept.lease([1, 2, 3, 77, 78, 79]).cached == 3


def test_a_request_without_reuse_gets_an_empty_sequence() -> None:
    kept = pool()
    run(kept, [1, 2, 3], [4])
    assert kept.lease([1, 2, 3, 4], reuse=False).sequence.length == 0


def test_when_memory_runs_out_earlier_conversations_go_first() -> None:
    room = [2]

    def new_sequence() -> SourceSequence:
        if len(kept) >= room[0]:
            raise ResourceError("There is no memory left.", "Buy some.")
        return SourceSequence(10)

    kept = KvPool(new_sequence, max_sequences=9, max_bytes=10**6)
    for token in (1, 2, 3):
        run(kept, [token] * 3, [token])
    assert len(kept) == 2
    assert kept.lease([2, 2, 2, 2]).cached == 3
    assert kept.lease([3, 3, 3, 3]).cached == 3
    assert kept.lease([1, 1, 1, 1]).cached == 0


def test_a_copy_takes_the_memory_of_the_least_recent() -> None:
    def new_sequence() -> SourceSequence:
        if len(kept) >= 2:
            raise ResourceError("There is no memory left.", "Buy some.")
        return SourceSequence(10)

    kept = KvPool(new_sequence, max_sequences=9, max_bytes=10**6)
    run(kept, [1, 1, 1], [1])
    run(kept, [2, 2, 2, 5, 6], [2])
    assert run(kept, [2, 2, 2, 7, 8], [2]).cached == 3
    assert kept.lease([2, 2, 2, 5, 6, 2]).cached == 5
    assert kept.lease([1, 1, 1, 1]).cached == 0


def test_fifty_conversations_stay_and_the_oldest_goes_first() -> None:
    kept = pool(max_sequences=64, max_bytes=10 * 50 * 107)  # 50 conversations of the length of these fit
    opening = list(range(1000, 1100))
    for number in range(50):
        run(kept, [*opening, number, 1, 2, 3, 4], [9, 9])
    assert [run(kept, [*opening, number, 1, 2, 3, 4, 9, 9], [8]).cached for number in range(50)] == [106] * 50
    run(kept, [*opening, 77, 1, 2, 3, 4], [9, 9])
    assert len(kept) == 50
    assert kept.lease([*opening, 0, 1, 2, 3, 4, 9, 9, 8]).cached == 100


tokens = st.integers(0, 2)


@given(
    st.lists(st.tuples(st.lists(tokens, min_size=1, max_size=8), st.lists(tokens, min_size=1, max_size=4)))
)
def test_reuse_never_serves_the_kv_of_other_tokens(requests: list[tuple[list[int], list[int]]]) -> None:
    kept = pool(max_sequences=2, max_bytes=150)
    for prompt, answer in requests:
        run(kept, prompt, answer)  # checks the sequence against the prompt
        assert 1 <= len(kept) <= 2


@given(
    st.lists(st.tuples(st.lists(tokens, min_size=1, max_size=8), st.lists(tokens, min_size=1, max_size=4)))
)
def test_the_longest_common_beginning_is_found(requests: list[tuple[list[int], list[int]]]) -> None:
    kept = pool(max_sequences=5)
    for prompt, answer in requests:
        longest = max((common_prefix(entry.tokens, prompt) for entry in kept._kept), default=0)
        assert run(kept, prompt, answer).cached == min(longest, len(prompt) - 1)


def test_what_two_conversations_share_is_forgotten_with_the_one_between() -> None:
    kept, opening = pool(), list(range(100, 150))
    run(kept, [*opening, 1], [2, 3])
    run(kept, [*opening, 4], [5, 6])
    run(kept, [7, 7, 7], [8])
    kept.lease([*opening, 4, 5, 6])  # and never given back
    assert kept.lease([*opening, 1, 2, 3]).cached == 52


def test_a_beginning_that_many_conversations_share_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0

    def counted(left: TokenIds, right: TokenIds, known: int = 0) -> int:
        nonlocal compared
        length = common_prefix(left, right, known)
        compared += length - known + 1
        return length

    kept, opening = pool(max_sequences=64), list(range(1000, 3000))
    for number in range(50):
        run(kept, [*opening, number, 1, 2], [9])
    run(kept, [*opening, 25, 1, 2, 9, 8], [7])  # from the middle to the end
    monkeypatch.setattr(kv_pool, "common_prefix", counted)
    assert kept.lease([*opening, 30, 1, 2, 9, 8]).cached == 2003
    assert compared < 2000 + 4 * 51


@given(st.lists(tokens), st.lists(tokens), st.integers(0, 4))
def test_tokens_that_are_known_to_agree_are_not_compared(
    left: list[int], right: list[int], known: int
) -> None:
    known = min(known, common_prefix(left, right))
    unread = [7] * known  # of another value: a look at them would show
    assert common_prefix([*unread, *left[known:]], right, known) == common_prefix(left, right)


@given(st.lists(tokens), st.lists(tokens))
def test_common_prefix(left: list[int], right: list[int]) -> None:
    length = common_prefix(tuple(left), tuple(right))
    assert left[:length] == right[:length]
    assert left[length : length + 1] != right[length : length + 1] or length == min(len(left), len(right))


def test_a_miss_says_why() -> None:
    pool = KvPool(lambda: SourceSequence(10), max_sequences=2, max_bytes=10**6)

    def use(tokens: list[int]) -> str | None:
        lease = pool.lease(tokens)
        sequence = lease.sequence
        assert isinstance(sequence, SourceSequence)
        sequence.tokens[:] = tokens
        pool.give_back(lease, tokens)
        return lease.findings.miss

    first, second, third = ([number, *range(100, 140)] for number in (1, 2, 3))
    assert use(first) == "nothing is kept yet"
    assert use(first) is None
    assert use(second) == "no kept conversation begins like it"
    assert use(third) == "no kept conversation begins like it"
    assert use(first) == "41 tokens of it were kept and dropped: only 2 conversations are kept"
    assert pool.lease(third, reuse=False).findings.miss == "the request wants figures for its whole prompt"


def test_a_template_that_all_conversations_share_hides_no_miss() -> None:
    template, other = list(range(900, 910)), "no kept conversation begins like it"
    kept = pool(max_sequences=2)

    def miss(*ends: int) -> str | None:
        return run(kept, [*template, *ends], [7, 8]).findings.miss

    assert miss(1, 2, 3) == "nothing is kept yet"
    assert miss(4, 5, 6) == other  # ten tokens are cached, which say nothing about it
    assert miss(4, 5, 6, 7, 8, 9) is None  # its second turn, which is short
    assert miss(4, 5, 6, 7, 8, 9) is None


def test_a_conversation_that_was_dropped_is_missed_although_its_instructions_are_cached() -> None:
    instructions, long = list(range(900, 950)), list(range(100, 160))
    kept = pool(max_sequences=2)
    for first in (1, 2, 3):
        run(kept, [*instructions, first, *long], [7])
    again = run(kept, [*instructions, 1, *long, 7, 8], [9])
    assert again.cached == 50
    assert again.findings.miss == "111 tokens of it were kept and dropped: only 2 conversations are kept"


def test_no_reason_is_looked_for_before_the_job_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, looked = pool(), []
    monkeypatch.setattr(cache_misses, "change_between", lambda *given: looked.append(given))
    monkeypatch.setattr(cache_misses, "common_prefix", lambda *given: looked.append(given) or 0)
    run(kept, list(range(300)), [1])
    lease = run(kept, [5, *range(300)], [1])
    assert not looked
    assert lease.findings.change is None and looked

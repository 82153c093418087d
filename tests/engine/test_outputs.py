"""What is counted of a request: of its completion the tokens said, of its speed all that its job did."""

from __future__ import annotations

import pytest

from engine.scripted_model import GREEDY, VOCAB, ids_of, make
from monotape.compiler.compile import compile_plan
from monotape.engine.outputs import GenerationStats, combined, measured
from monotape.engine.sampling_params import SamplingParams
from monotape.plan.formats import Format
from monotape.plan.types import Machine
from token_source import SourceGeneration, smallest_spec

PLAN = compile_plan(smallest_spec(VOCAB, 997), Machine("cpu", 1), Format.F32, context=997)
PASS_NS = 1_000_000


def counted(
    said: list[int], unsaid: list[int], drafts: tuple[int, int], prompt_tokens: int = 5
) -> GenerationStats:
    """`said` and `unsaid`: the pass that made each token."""
    said_ns, unsaid_ns = ([number * PASS_NS for number in numbers] for numbers in (said, unsaid))
    return measured(
        PLAN, prompt_tokens=prompt_tokens, cached_tokens=0, start_ns=-PASS_NS,
        times_ns=said_ns, unsaid_ns=unsaid_ns, drafts=drafts,
    )  # fmt: skip


def read_per_pass(stats: GenerationStats) -> float:
    """Bytes read in the time of one pass."""
    assert stats.decode_tokens_per_second is not None
    return stats.decode_tokens_per_second * stats.bytes_per_token * PASS_NS / 1e9


@pytest.mark.parametrize(
    ("said", "unsaid", "drafts", "accepted"),
    [
        ([0, 1, 1, 1, 1, 2], [], (6, 3), 3),
        ([0, 1], [1, 1, 1], (3, 3), 0),  # the stop string came with the first token of a pass of four
        ([0, 1, 1, 1], [1], (3, 3), 2),
        ([0, 1, 1, 1, 1, 2], [3, 4, 5], (6, 3), 0),  # maybe the job's last tokens
        ([0, 1, 2], [3, 4, 5], (0, 0), 0),
        ([0], [1, 1, 1], (2, 2), 0),
        ([], [0, 1, 1], (2, 1), 0),
    ],
)
def test_a_completion_holds_its_accepted_drafts_and_a_job_reads_its_passes(
    said: list[int], unsaid: list[int], drafts: tuple[int, int], accepted: int
) -> None:
    stats = counted(said, unsaid, drafts)
    assert (stats.new_tokens, stats.drafted_tokens, stats.accepted_tokens) == (
        len(said),
        drafts[0] - drafts[1] + accepted,  # rejected ones are the job's
        accepted,
    )
    assert stats.decoded_tokens == len(said + unsaid) - 1
    assert stats.decode_s == (said[-1] * PASS_NS / 1e9 if said else 0)
    assert stats.bytes_per_token > 0
    one_pass = PLAN.token_bytes(5 + stats.decoded_tokens // 2)
    assert read_per_pass(stats) == pytest.approx(one_pass, rel=0.001)


def test_one_token_has_no_speed() -> None:
    for said, unsaid in (([0], []), ([], [])):
        stats = counted(said, unsaid, (0, 0))
        assert stats.decode_tokens_per_second is None
        assert stats.bytes_per_token == PLAN.token_bytes(5)


def test_several_completions_read_what_their_jobs_read() -> None:
    parts = [
        counted([0, 1, 1, 1], [1, 2], (3, 3)),
        counted([0, 1, 2, 3, 4, 5, 6, 7], [], (0, 0)),
        counted([0], [], (0, 0)),
    ]
    total = combined(parts)
    assert (total.new_tokens, total.decoded_tokens, total.accepted_tokens) == (13, 12, 1)
    assert read_per_pass(total) == pytest.approx(PLAN.token_bytes(9), rel=0.01)
    assert total.decode_s == pytest.approx(8 * PASS_NS / 1e9)


def test_a_stop_string_within_a_pass_leaves_no_more_accepted_than_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pass after the first makes all other tokens, as where every draft is right."""
    llm, backend = make("ab=cd")
    text = ids_of("ab=cd")

    def time_ns(generation: SourceGeneration, index: int) -> int:
        return generation.start_ns + PASS_NS * (1 + min(index, 1))

    monkeypatch.setattr(backend, "time_ns", time_ns)
    monkeypatch.setattr(backend, "drafts", lambda job, output: (len(output) - 1, len(output) - 2))
    monkeypatch.setattr(
        SourceGeneration, "cancel", lambda generation: None
    )  # too late: the pass runs already
    whole = llm.generate("a", GREEDY)[0].stats
    assert (whole.new_tokens, whole.accepted_tokens) == (len(text) + 1, len(text) - 1)
    stopped = llm.generate("a", SamplingParams(temperature=0, max_tokens=40, stop="="))[0].stats
    assert stopped.new_tokens < whole.new_tokens
    assert stopped.drafted_tokens - stopped.accepted_tokens == whole.drafted_tokens - whole.accepted_tokens
    assert 0 <= stopped.accepted_tokens < stopped.new_tokens
    assert stopped.bytes_per_token == whole.bytes_per_token > 0
    assert stopped.decode_tokens_per_second == whole.decode_tokens_per_second
    with llm.stream("a", GREEDY) as stream:
        next(stream)
    left = stream.output.stats
    assert (left.new_tokens, left.accepted_tokens, left.bytes_per_token) == (1, 0, whole.bytes_per_token)

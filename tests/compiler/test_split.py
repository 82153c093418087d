"""How a model is shared among ranks, and what cannot be."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monotape.compiler.compile import compile_plan
from monotape.compiler.split import lanes_for, possible_ranks, shares
from monotape.errors import UsageError
from monotape.models.lanes import Lanes
from monotape.models.spec import ModelSpec
from monotape.plan.formats import CPU_LAYOUTS, Format
from monotape.plan.rules import violations
from monotape.plan.types import Machine
from plan.plans import spec


def model(heads: int = 8, kv_heads: int = 2, ffn: int = 76, vocab: int = 131) -> ModelSpec:
    return spec("LlamaForCausalLM", 3, 54, heads, kv_heads, 10, ffn, vocab)


def test_heads_columns_and_words_are_shared() -> None:
    first, second = shares(model(kv_heads=4, ffn=200), 2)
    assert (first.heads, first.kv_heads, first.ffn, first.vocab) == ((0, 4), (0, 2), (0, 96), (0, 64))
    assert (second.heads, second.kv_heads, second.ffn, second.vocab) == ((4, 8), (2, 4), (96, 200), (64, 131))


def test_kv_heads_are_repeated_when_they_are_fewer_than_ranks() -> None:
    assert [share.kv_heads for share in shares(model(), 8)] == [(0, 1)] * 4 + [(1, 2)] * 4


def test_few_columns_are_shared_one_by_one() -> None:
    assert [end - start for start, end in (share.ffn for share in shares(model(ffn=11), 8))] == [
        1,
        1,
        2,
        1,
        1,
        2,
        1,
        2,
    ]


@pytest.mark.parametrize(
    ("ranks", "given_model", "message"),
    [
        (3, model(), "3 ranks cannot share 8 heads evenly. For this model --tp can be 1, 2, 4, 8."),
        (
            6,
            model(heads=12, kv_heads=4),
            "6 ranks cannot share 4 KV heads: neither number divides the other.",
        ),
        (8, model(ffn=7), "8 ranks are more than 7 columns or 131 words can be shared among."),
        (0, model(), "0 ranks cannot be."),
        (65, model(), "65 ranks cannot be."),
    ],
)
def test_what_cannot_be_shared_is_named(ranks: int, given_model: ModelSpec, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        shares(given_model, ranks)
    assert str(caught.value).startswith(message)


def test_lanes_are_the_models_own_choice() -> None:
    lanes = dataclasses.replace(model(kv_heads=4, ffn=200), lanes=Lanes(4, 2))
    assert lanes_for(lanes, None).count == 4
    assert [share.ffn for share in shares(lanes, 4)] == [(0, 50), (50, 100), (100, 150), (150, 200)]
    with pytest.raises(UsageError, match="2 ranks were asked for, but this model has 4 lanes"):
        lanes_for(lanes, 2)
    assert lanes_for(model(), None).count == 1


@settings(max_examples=40, deadline=None)
@given(
    groups=st.integers(1, 4), kv_heads=st.integers(1, 8), head_dim=st.integers(1, 20), width=st.integers(1, 90),
    ffn=st.integers(8, 300), vocab=st.integers(64, 700), tied=st.booleans(), fmt=st.sampled_from(list(CPU_LAYOUTS)),
    workers=st.integers(1, 5), pick=st.integers(0, 99),
)  # fmt: skip
def test_every_possible_number_of_ranks_gets_a_plan_that_breaks_no_rule(
    groups: int, kv_heads: int, head_dim: int, width: int, ffn: int, vocab: int, tied: bool, fmt: Format,
    workers: int, pick: int,
) -> None:  # fmt: skip
    shape = spec("L", 2, width, groups * kv_heads, kv_heads, 2 * head_dim, ffn, vocab, tied=tied)
    ranks = possible_ranks(shape)
    plan = compile_plan(shape, Machine("cpu", workers), fmt, context=64, ranks=ranks[pick % len(ranks)])
    assert violations(plan) == []
    single = compile_plan(shape, Machine("cpu", workers), fmt, context=64)
    rows = {
        part.role: sum(p.rows for rank in plan.ranks for p in rank.layer_stages[index].parts if p.role == part.role)
        for index in (0, 2) for part in single.ranks[0].layer_stages[index].parts
    }  # fmt: skip
    assert rows["q"] == shape.q_rows
    assert rows["gate"] == rows["up"] == ffn
    assert rows["k"] == rows["v"] == max(shape.kv_heads, len(plan.ranks)) * shape.head_dim


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_gpu_plans_of_ranks_read_their_share_and_no_more(ranks: int) -> None:
    """Llama 3.1 8B: all of a rank's matrices are 1 / ranks of the model's, but for what padding adds."""
    llama = spec("LlamaForCausalLM", 32, 4096, 32, 8, 128, 14336, 128256, tied=False)
    machine = Machine("cuda", 132, alignment=128, whole_heads=False)
    whole = compile_plan(llama, machine, Format.BF16, context=4096).tape_bytes
    plan = compile_plan(llama, machine, Format.BF16, context=4096, ranks=ranks)
    for rank in plan.ranks:
        own = sum(tape.bytes for tape in rank.tapes)
        assert whole / ranks <= 1.001 * own <= 1.002 * whole / ranks
        assert rank.kv.kv_heads == 8 // ranks

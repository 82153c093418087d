"""The compiler on shapes it was not written for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monotape.compiler.balance import even_shares, levelling_shares
from monotape.compiler.compile import compile_plan, default_kv_format
from monotape.plan.formats import CPU_LAYOUTS, TILE_ROWS, Format
from monotape.plan.rules import violations
from monotape.plan.types import Machine
from monotape.weights.tapes import tile_runs
from plan.plans import spec

formats = st.sampled_from(list(CPU_LAYOUTS))


@st.composite
def models(draw: st.DrawFn) -> object:
    kv_heads = draw(st.integers(1, 5))
    return spec(
        "LlamaForCausalLM", draw(st.integers(1, 4)), draw(st.integers(1, 300)),
        kv_heads * draw(st.integers(1, 4)), kv_heads, 2 * draw(st.integers(1, 40)),
        draw(st.integers(1, 500)), draw(st.integers(1, 2000)), tied=draw(st.booleans()),
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(model=models(), fmt=formats, workers=st.integers(1, 140))
def test_any_dense_shape_gets_a_plan_that_breaks_no_rule(model: object, fmt: Format, workers: int) -> None:
    plan = compile_plan(model, Machine("cpu", workers), fmt, context=64)  # type: ignore[arg-type]
    assert violations(plan) == []


@settings(max_examples=60, deadline=None)
@given(model=models(), fmt=formats, workers=st.integers(1, 9))
def test_tile_runs_put_every_tile_of_every_part_somewhere_once(
    model: object, fmt: Format, workers: int
) -> None:
    plan = compile_plan(model, Machine("cpu", workers), fmt, context=64)  # type: ignore[arg-type]
    for stage in plan.ranks[0].stages:
        placed: list[tuple[str, int]] = []
        for span in stage.spans:
            at = []
            for run in tile_runs(stage, span):
                at += [run.at + i * run.step for i in range(run.count)]
                placed += [(run.part.role, run.first_tile + i) for i in range(run.count)]
            assert sorted(at) == list(range(span.count))
        assert sorted(placed) == sorted(
            (part.role, tile) for part in stage.parts for tile in range(part.tiles)
        )


@given(units=st.integers(0, 500), workers=st.integers(1, 140))
def test_even_shares_are_even(units: int, workers: int) -> None:
    shares = even_shares(units, workers)
    assert sum(shares) == units
    assert max(shares) - min(shares) <= 1


@given(loads=st.lists(st.integers(0, 3000), min_size=1, max_size=30), units=st.integers(1, 2000))
def test_levelling_never_gives_a_negative_share_and_gives_everything(loads: list[int], units: int) -> None:
    shares = levelling_shares(units, 100, loads)
    assert sum(shares) == units
    assert min(shares) >= 0


def test_bytes_per_worker_are_level_over_a_layer_though_stages_are_not() -> None:
    """Nine query and six KV heads do not divide by four; gate_up makes up for it."""
    plan = compile_plan(
        spec("LlamaForCausalLM", 30, 576, 9, 3, 64, 1536, 49152), Machine("cpu", 4), Format.Q8, context=512
    )
    qkv = plan.ranks[0].layer_stages[0]
    assert len({span.count for span in qkv.spans}) > 1
    loads = [tape.layer_bytes for tape in plan.ranks[0].tapes]
    assert max(loads) <= 1.02 * min(loads)


@pytest.mark.parametrize("fmt", CPU_LAYOUTS)
def test_tape_bytes_are_the_weights_and_little_else(fmt: Format) -> None:
    """Padding may add tiles and blocks, never tapes."""
    model = spec("Qwen2ForCausalLM", 24, 896, 14, 2, 64, 4864, 151936, qkv_bias=True)
    plan = compile_plan(model, Machine("cpu", 16), fmt, context=512)
    matrices = model.vocab * model.width + model.layers * (
        model.width * (model.q_rows + 2 * model.kv_rows + model.q_rows + 3 * model.ffn)
    )
    exact = matrices * CPU_LAYOUTS[fmt].tile_bytes(model.width) // (TILE_ROWS * model.width)
    assert exact <= plan.tape_bytes <= 1.001 * exact


def test_float32_weights_keep_float32_kv() -> None:
    cpu = Machine("cpu", 2)
    assert default_kv_format(cpu, Format.F32) is Format.F32
    assert default_kv_format(cpu, Format.Q8) is Format.F16

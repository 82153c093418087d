"""weights/coded_run.py: the codes of a run of tiles stand for the rows that the plan puts there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from backends.quantised_cases import WAYS, make_pair
from monotape.compiler.compile import compile_plan
from monotape.models.registry import spec_from_config
from monotape.models.spec import ModelSpec
from monotape.plan.formats import GPU_LAYOUTS, TILE_ROWS, Format, Layout
from monotape.plan.types import Machine, Plan, Stage
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.coded_run import coded_run
from monotape.weights.open import open_checkpoint
from monotape.weights.tapes import TileRun, in_tiles, part_rows, rows_of, source_of, tensor_name, tile_runs
from weights.coded_values import values_of
from weights.gguf_models import SHAPES, write_wide_model


def plan_of(spec: ModelSpec, fmt: Format, ranks: int, monkeypatch: pytest.MonkeyPatch) -> Plan:
    if fmt not in GPU_LAYOUTS:
        monkeypatch.setitem(GPU_LAYOUTS, fmt, Layout(128, 128))
    machine = Machine("cuda", 3, alignment=128, whole_heads=False)
    stages = dict.fromkeys(("qkv", "output", "gate_up", "down"), fmt)
    return compile_plan(spec, machine, Format.BF16, context=48, ranks=ranks, stage_formats=stages)


def runs_of(plan: Plan) -> Iterator[tuple[Stage, TileRun]]:
    for rank in plan.ranks:
        for stage in rank.layer_stages:
            for span in stage.spans:
                for run in tile_runs(stage, span):
                    yield stage, run


def check(spec: ModelSpec, opened: Checkpoint, plan: Plan) -> None:
    seen = 0
    for stage, run in runs_of(plan):
        found = coded_run(spec, opened, stage, run, 1)
        assert found is not None
        assert found.codes.shape == (run.count * TILE_ROWS, stage.padded_k)
        assert found.row_scales is None or found.row_scales.shape == (run.count * TILE_ROWS,)
        source, (start, stop) = source_of(spec, run.part.role, 1), rows_of(run)
        name = tensor_name(source, 1)
        values = part_rows(
            spec, stage, run.part, source, lambda a, b, name=name: opened.rows(name, a, b), start, stop
        )  # type: ignore[misc]
        np.testing.assert_array_equal(
            values_of(stage.format, found)[:, : stage.k], in_tiles(values, run, stage.k), f"{stage.name}"
        )
        seen += stop - start
    assert seen > 0


@pytest.mark.parametrize(
    ("name", "fmt", "ranks"),
    [
        ("autofp8", Format.FP8, 1), ("autofp8", Format.FP8, 2), ("awq", Format.INT4_G32Z, 1),
        ("awq", Format.INT4_G32Z, 2), ("gptq", Format.INT4_G32, 2), ("mxfp4", Format.MXFP4, 1),
        ("packed-4-phi3", Format.INT4_G128, 1), ("packed-8-qwen2", Format.INT8, 2), ("gptq-8-bits", Format.WIDE, 2),
    ],
)  # fmt: skip
def test_runs_of_quantised_safetensors(
    tmp_path: Path, name: str, fmt: Format, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_checkpoint(make_pair(WAYS[name].case, WAYS[name], tmp_path)[0])
    spec = spec_from_config(opened.config)
    check(spec, opened, plan_of(spec, fmt, ranks, monkeypatch))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("kind", "fmt"),
    [
        (Kind.Q4_0, Format.INT4_G32), (Kind.Q4_1, Format.Q4_1), (Kind.Q5_0, Format.Q8), (Kind.Q8_0, Format.Q8),
        (Kind.Q4_K, Format.Q4_K), (Kind.Q5_K, Format.K_MIXED), (Kind.Q6_K, Format.Q6_K), (Kind.Q6_K, Format.WIDE),
    ],
    ids=lambda value: value.name,
)  # fmt: skip
def test_runs_of_ggufs(
    tmp_path: Path, kind: Kind, fmt: Format, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_checkpoint(write_wide_model(tmp_path / "m.gguf", dict.fromkeys(SHAPES, kind)))
    spec = spec_from_config(opened.config)
    check(spec, opened, plan_of(spec, fmt, ranks, monkeypatch))


def test_floats_have_no_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_checkpoint(write_wide_model(tmp_path / "m.gguf", {}))
    spec = spec_from_config(opened.config)
    stage, run = next(runs_of(plan_of(spec, Format.FP8, 1, monkeypatch)))
    assert coded_run(spec, opened, stage, run, 0) is None

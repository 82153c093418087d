"""The scaling study without a GPU: shares that fit, weights that settings have in common, what a delay costs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

import lane_table
import scaling
from backends.host_kernel import build, host_gpu
from monotape.errors import BackendError
from monotape.plan.gpu_rules import violations
from monotape.planner.reports import own_points
from monotape.training.settings import Settings
from recipes import Recipe
from scaling import SETTINGS, Setup, loss, print_table, setups
from scaling_figure import draw
from shapes import SHAPES

MODELS = ("dense-2b", "llama-3.1-8b")
WORKERS = 132


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_settings_of_a_shape_have_the_same_weights(model: str, ranks: int) -> None:
    plans = [Setup(model, ranks, setting).plan(WORKERS, 96) for setting in SETTINGS]
    assert all(not violations(plan) for plan in plans)
    shares = [plan.plan.ranks[0] for plan in plans]
    assert all(share.tapes == shares[0].tapes for share in shares)
    assert [stage.parts for stage in shares[0].stages] == [stage.parts for stage in shares[1].stages]
    assert len({Setup(model, ranks, setting).header(WORKERS, 96) for setting in SETTINGS}) == 3


def test_heads_that_do_not_divide_are_padded() -> None:
    assert Setup("dense-2b", 8, "tp").changes == {"num_attention_heads": 24, "num_key_value_heads": 8}
    assert Setup("dense-2b", 4, "tp").changes == {}
    rank = Setup("dense-2b", 8, "dtp").plan(WORKERS, 96).plan.ranks[0]
    assert (rank.layer_stages[0].parts[0].rows, rank.kv.kv_heads) == (3 * 128, 1)


def test_one_rank_is_measured_once() -> None:
    found = setups(MODELS, [1, 8])
    assert [setup.setting for setup in found if setup.ranks == 1] == ["one", "one"]
    assert len(found) == 2 + 2 * len(SETTINGS)


def row(setting: str, ranks: int, *speeds: float) -> dict[str, Any]:
    by_delay = {str(delay): {"median": speed} for delay, speed in zip((0, 2), speeds, strict=False)}
    return {
        "model": "dense-2b", "ranks": ranks, "setting": setting, "tokens_per_second": by_delay,
        "ceiling_tokens_per_second": 3000.0,
    }  # fmt: skip


def test_a_loss_is_a_share_of_the_speed_without_delay(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row("one", 1, 800.0), row("tp", 8, 2000.0, 1500.0), row("dtp", 8, 2100.0, 2079.0)]
    assert loss(rows[1], 2) == pytest.approx(0.25)
    print_table(rows, [0, 2])
    said = capsys.readouterr().out
    assert "loses 25.0 % at 2 us" in said
    assert "loses 1.0 % at 2 us" in said
    assert "An emulation: one rank alone" in said


def test_the_picture_is_the_same_for_the_same_report(tmp_path: Path) -> None:
    report = {"gpu": "h200", "results": [row("one", 1, 800.0), row("dtp", 8, 2100.0, 2079.0)]}
    for name in ("a.svg", "b.svg"):
        draw(report, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def broken(self: scaling.Alone, *arguments: int) -> list[float]:
    raise BackendError("A rank is gone.", "Look for it.")


@pytest.mark.slow
def test_a_study_of_a_tiny_shape_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it but the compiler and the clock of a GPU: the kernel's sources run on the host."""
    tiny = {
        **SHAPES["dense-2b"], "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 3, "head_dim": 16,
        "num_key_value_heads": 1, "intermediate_size": 64, "vocab_size": 128,
    }  # fmt: skip
    monkeypatch.setitem(SHAPES, "tiny", tiny)
    monkeypatch.setattr(scaling, "CONTEXT", 5)
    monkeypatch.setattr(scaling, "processors", lambda: 1)
    monkeypatch.setattr(scaling, "compile_kernel", build)
    monkeypatch.setattr(scaling, "compile_all", lambda *arguments: None)
    options = argparse.Namespace(
        models="tiny", ranks=[2], delays=[0, 2], tokens=6, requests=1, settings=["dtp"]
    )
    with host_gpu():
        (found,) = scaling.measure(options, bandwidth=1e9)
        monkeypatch.setattr(scaling.Alone, "speeds", broken)
        (other,) = scaling.measure(options, bandwidth=1e9)
    assert other["fault"] == "A rank is gone. Look for it."
    assert not other["tokens_per_second"]
    assert (found["ranks"], found["setting"], found["padded_heads"]) == (
        2, "dtp", {"num_attention_heads": 4, "num_key_value_heads": 2},
    )  # fmt: skip
    assert set(found["tokens_per_second"]) == {"0", "2"}
    assert found["trace"]["delay_us"] == 2
    assert found["trace"]["limited_by"] in found["trace"]["stages"]


def test_the_planner_takes_no_point_from_a_study(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its speeds are of one rank of several, so they are not decode speeds of a model."""
    published: list[dict[str, Any]] = []
    monkeypatch.setattr(scaling, "publish", lambda name, results, save: published.append(results))
    monkeypatch.setattr(scaling, "measure", lambda options, bandwidth: [row("dtp", 8, 2100.0, 2079.0)])
    monkeypatch.setattr(scaling, "measure_bandwidth", lambda: 4e12)
    monkeypatch.setattr(scaling, "device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(scaling, "processors", lambda: WORKERS)
    asked: list[Recipe] = []
    monkeypatch.setattr(scaling, "evidence", lambda recipes: asked.extend(recipes) or {"kernels": {}})
    monkeypatch.setattr("sys.argv", ["scaling.py", "--delays", "0,2"])
    scaling.main()
    assert published[0]["gpu"] == "h200"
    assert len({recipe.label for recipe in asked}) == len(asked) == 2 * (1 + 3 * 3 + 2) + 1
    assert own_points({"scaling-h200.json": published[0]}) == ()


def test_the_settings_of_trained_lanes() -> None:
    """Every arm of the table has a setting, and each is another schedule; tokens are the same for all."""
    found = setups(["laneformer-32m"], [4, 8], scaling.settings("all"))
    assert len({(setup.ranks, setup.lanes) for setup in found}) == len(found) == 14
    assert len({setup.recipe(WORKERS, 96).label for setup in found}) == 14
    assert set(scaling.ALL_SETTINGS) == set(lane_table.SETTING.values())
    with pytest.raises(argparse.ArgumentTypeError, match="no setting 'dtp9'"):
        scaling.settings("tp,dtp9")
    plans = [setup.plan(WORKERS, 96) for setup in found if setup.ranks == 8]
    assert all(not violations(plan) for plan in plans)


def test_the_measured_shape_is_the_trained_one() -> None:
    shape, trained = SHAPES["laneformer-32m"], Settings().config(16384, 0)
    for name in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
    ):
        assert shape[name] == trained[name]

"""The arithmetic of Kog's announcement and of the posts about it, figure by figure."""

from __future__ import annotations

import pytest

from monotape.planner.box import LaunchTax, balance, flops_per_byte
from monotape.planner.catalogue import table
from monotape.planner.engines import share_engine
from monotape.planner.projections import effective_bandwidth, nominal_ceiling, projections
from monotape.planner.request import MARKET
from monotape.planner.tables import describe_projections
from monotape.planner.text import duration
from planner.loads import box_of, load_of


def rounded(value: float, digits: int = 2) -> float:
    """To so many leading digits, as announcements write."""
    return float(f"{value:.{digits}g}")


def test_effective_bandwidth_of_a_node() -> None:
    assert effective_bandwidth(box_of("h200", 8)) / 1e12 == pytest.approx(30.7, abs=0.05)
    assert effective_bandwidth(box_of("mi300x", 8)) / 1e12 == pytest.approx(33.6)


@pytest.mark.parametrize(("gpu", "said"), [("h200", 7700), ("mi300x", 8400)])
def test_a_2b_model_in_fp16_on_eight_gpus(gpu: str, said: int) -> None:
    assert rounded(nominal_ceiling(box_of(gpu, 8), 2e9, 2)) == said


def test_32b_active_in_fp4_is_bounded_near_2000() -> None:
    assert nominal_ceiling(box_of("h200", 8), 32e9, 0.5) == pytest.approx(2000, rel=0.05)


def test_4b_active_in_fp8_is_a_2b_model_in_fp16() -> None:
    box = box_of("h200", 8)
    assert nominal_ceiling(box, 4e9, 1) == nominal_ceiling(box, 2e9, 2)


@pytest.mark.parametrize(("size", "flops"), [(2, 1), (1, 2), (0.5, 4)])
def test_flops_a_byte(size: float, flops: float) -> None:
    assert flops_per_byte(size) == flops


def test_the_h200_can_do_about_400_flops_a_byte() -> None:
    value = balance(box_of("h200"), fp8=True)
    assert value is not None
    assert rounded(value, 1) == 400


def test_the_launch_tax() -> None:
    launch_us = box_of("mi300x").gpu.launch_us
    assert launch_us == 4.5
    ten, five = LaunchTax(10, 25, launch_us, ""), LaunchTax(5, 25, launch_us, "")
    assert ten.token_us == 1125
    assert rounded(ten.most_tokens_per_second) == 890
    assert rounded(five.most_tokens_per_second) == 1800


def test_mbu_of_the_announced_speeds() -> None:
    shares = {}
    for claim in table("peers")["claims"]:
        box = box_of(claim["gpu"], claim["count"])
        ceiling = nominal_ceiling(box, claim["active"], claim["bytes_per_weight"])
        shares[claim["gpu"]] = claim["tokens_per_second"] / ceiling
    assert round(shares["mi300x"], 2) == 0.36
    assert round(shares["h200"], 2) == 0.27


def test_the_budget_of_a_token_at_3000() -> None:
    assert round(1e6 / 3000) == 333


def test_50000_tokens() -> None:
    assert duration(50_000 / 100) == "8 min 20 s"
    assert 16 < 50_000 / 3000 < 17
    assert duration(50_000 / 3000) == "16.7 s"


def test_the_market_offers_ten_times_the_speed_at_twenty_to_fifty_times_the_price() -> None:
    assert MARKET == (10, 20, 50)


def test_a_49b_class_model_on_the_next_generation() -> None:
    """About 1,000 tok/s at 36 %: four times the H200's bandwidth, or a Rubin as announced."""
    load = load_of("deepseek-v4-pro")
    assert 0.36 * 4 * effective_bandwidth(box_of("h200", 8)) / load.pass_bytes(0) == pytest.approx(
        1000, rel=0.2
    )
    assert 1e6 / share_engine(0.36).pass_us(load, box_of("rubin", 8), 0) == pytest.approx(1000, rel=0.35)


def test_the_projected_table_and_which_of_its_rows_follow() -> None:
    rows = {(row.label.split(" (")[0], row.gpu): row for row in projections()}
    assert len(rows) == 8
    follows = {key: (row.follows_nominal, row.follows_config) for key, row in rows.items()}
    for gpu in ("h200", "mi300x"):
        assert follows["Qwen3-Coder-Next", gpu] == (True, False)  # the config has 3.6B active, not 3B
        assert follows["GPT-OSS-120B", gpu] == (True, True)
        assert follows["DeepSeek-V4-Flash", gpu] == (False, False)
        assert follows["Kimi-K2.6", gpu] == (False, True)  # only the routed experts are INT4
    assert [row.claimed for row in projections() if row.gpu == "h200"] == [3650, 2200, 1160, 325]
    assert [row.claimed for row in projections() if row.gpu == "mi300x"] == [4000, 2400, 1270, 355]
    assert rows["Kimi-K2.6", "h200"].nominal == pytest.approx(691, abs=1)


def test_the_output_says_where_a_row_does_not_follow() -> None:
    text = describe_projections(projections())
    kimi = text.index("Kimi-K2.6")
    assert "DOES NOT FOLLOW from the stated size (-53%)" in text[kimi:]
    flash = text[text.index("DeepSeek-V4-Flash") : kimi]
    assert "DOES NOT FOLLOW" in flash
    assert "DOES NOT FOLLOW" not in text[: text.index("DeepSeek-V4-Flash")]


@pytest.mark.parametrize(
    ("name", "dtype", "context", "said"),
    [
        ("llama-3.2-1b", "bf16", 32, 1855), ("llama-3.2-1b", "bf16", 1024, 1829), ("llama-3.2-1b", "bf16", 8192, 1672),
        ("llama-3.1-8b", "bf16", 32, 305), ("llama-3.2-1b", "q8", 32, 3490), ("llama-3.2-1b", "int4", 32, 6590),
        ("qwen3-0.6b", "bf16", 1, 3840),
    ],
)  # fmt: skip
def test_the_speeds_of_light_beside_the_peers(name: str, dtype: str, context: int, said: int) -> None:
    measured = box_of("h200").gpu.measured_tbs
    assert measured == 4.58
    assert measured * 1e12 / load_of(name, dtype).pass_bytes(context) == pytest.approx(said, rel=0.003)

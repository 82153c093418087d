"""What a request costs: times that add up, prices that follow, and the comparison with a throughput stack."""

from __future__ import annotations

import pytest

from monotape.errors import UsageError
from monotape.planner.compared import OWN, PROMPT, VLLM, built_in_times
from monotape.planner.engines import Engine, cpu_engine, find_engine, throughput_engine
from monotape.planner.prefill import prefill_assumption, prefill_for, prefill_seconds
from monotape.planner.request import Costing, Request, cost, decode_seconds, parse_request
from planner.loads import box_of, load_of

ENGINE, STACK = find_engine("monotape"), throughput_engine()


def costing(price: float | None = 3.5, users: int = 16, stack_users: int = 64, **figures: float) -> Costing:
    box = box_of("h200", 2)
    return cost(
        load_of("llama-3.1-8b"), box, ENGINE, STACK, Request(8000, 7000, 2000),
        prefill_for(ENGINE, box, **figures), prefill_for(STACK, box), users=users, stack_users=stack_users, price=price,
    )  # type: ignore[arg-type]  # fmt: skip


def test_requests_are_read() -> None:
    assert parse_request("prompt=8000,cached=7000,output=2000") == Request(8000, 7000, 2000)
    assert parse_request(" output=3 , prompt=0 ") == Request(0, 0, 3)


@pytest.mark.parametrize(
    "text",
    [
        "", "prompt", "prompt=1", "output=5", "prompt=1,output=x", "prompt=1,output=2,speed=3", "prompt=-1,output=2",
        "prompt=10,cached=11,output=2", "prompt=10,output=0", f"prompt={10**18},output=1", f"prompt=1,output={10**18}",
        "prompt=1.5,output=2",
    ],
)  # fmt: skip
def test_requests_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_request(text)
    assert caught.value.message.startswith("--request")
    assert caught.value.hint


def test_decode_takes_the_sum_of_its_tokens() -> None:
    load, box = load_of("llama-3.2-1b"), box_of("h200")
    exact = sum(ENGINE.pass_us(load, box, context) for context in range(5000, 5700)) / 1e6
    assert decode_seconds(load, box, ENGINE, 5000, 700) == pytest.approx(exact, rel=1e-3)
    assert decode_seconds(load, box, ENGINE, 77, 1) == ENGINE.pass_us(load, box, 77) / 1e6


def test_cached_tokens_are_read_and_new_ones_computed() -> None:
    load, box = load_of("llama-3.1-8b"), box_of("h200")
    prefill = prefill_for(ENGINE, box, rows=128, share=0.5)
    cache_s, extend_s = prefill_seconds(load, box, 7000, 1000, prefill)
    assert cache_s == pytest.approx(8 * load.kv_read(7000) / 4.58e12)  # 1,000 tokens are eight passes of 128
    reading = 8 * (load.pass_bytes(0) / 4.58e12 + 32 * prefill.speed.layer_us * 1e-6)
    computing = 1000 * load.flops(7500) / (0.5 * 989.4e12)
    assert extend_s == pytest.approx(max(reading, computing))
    assert prefill_seconds(load, box, 0, 0, prefill) == (0.0, 0.0)
    assert prefill_seconds(load, box, 0, 1000, prefill)[0] == 0


def test_cached_kv_may_lie_elsewhere() -> None:
    load, box = load_of("llama-3.1-8b"), box_of("h200")
    cache_s, _ = prefill_seconds(load, box, 7000, 1000, prefill_for(ENGINE, box, cache_bandwidth=50e9))
    assert cache_s == pytest.approx(7000 * 131072 / 50e9)


@pytest.mark.parametrize(("name", "engine"), [(OWN, ENGINE), (VLLM, STACK)])
def test_prefill_agrees_with_measured_times_to_first_token(name: str, engine: Engine) -> None:
    """Each engine with its own: vLLM computes long prompts faster, and needs longer for short ones."""
    box = box_of("h200")
    found = [one for one in built_in_times() if (one.engine, one.what) == (name, PROMPT)]
    assert len(found) >= 5
    for one in found:
        _, extend_s = prefill_seconds(one.load, box, 0, one.length, prefill_for(engine, box))
        assert extend_s == pytest.approx(one.seconds, rel=0.12)


def test_fp8_weights_are_multiplied_by_16_bit_activations_here_and_by_8_bits_in_vllm() -> None:
    box, plain, fp8 = box_of("h200"), load_of("llama-3.1-8b"), load_of("llama-3.1-8b", "fp8")
    for engine, times in ((ENGINE, 1.0), (STACK, 0.5)):
        prefill = prefill_for(engine, box)
        _, slow = prefill_seconds(plain, box, 0, 8192, prefill)
        _, found = prefill_seconds(fp8, box, 0, 8192, prefill)
        assert found == pytest.approx(times * slow, rel=1e-3)


def test_prefill_says_where_its_figures_are_from() -> None:
    box = box_of("h200")
    own, stack = (prefill_assumption(prefill_for(one, box), box) for one in (ENGINE, STACK))
    assert "this engine in bf16 on one H200: reports/compare-h200-llama-3.1-8b.json" in own
    assert "vLLM 0.26.0 in bf16 on one H200: reports/" in stack
    yours = prefill_assumption(prefill_for(ENGINE, box, share=0.4), box)
    assert "at 40 % of the dense peak" in yours and "(your share; " in yours


def test_computing_that_is_not_counted_is_said() -> None:
    box = box_of("cpu", bandwidth_tbs=0.03)
    prefill = prefill_for(cpu_engine([(32, 0.7)], "a report"), box)
    assert prefill.speed.layer_us == 0
    assert "computing is not counted" in prefill_assumption(prefill, box)


def test_parts_add_up_and_decode_can_improve_its_share() -> None:
    found = costing()
    time = found.offers[0].time
    assert time.total == time.cache_read + time.prefill_extend + time.decode
    assert found.decode_share == time.decode / time.total
    assert 1 < found.best_speedup < 1 / (1 - found.decode_share)


def test_prices_follow_the_time_of_the_devices() -> None:
    one, several, stack = costing(price=3.5).offers
    assert one.request_dollars == pytest.approx(2 * 3.5 * one.time.total / 3600)
    assert one.million_dollars == pytest.approx((one.request_dollars or 0) / 2000 * 1e6)
    assert several.device_seconds == pytest.approx(
        several.time.cache_read + several.time.prefill_extend + several.time.decode / 16
    )
    assert (stack.million_dollars or 0) < (several.million_dollars or 0) < (one.million_dollars or 0)
    assert stack.user_speed < several.user_speed < one.user_speed


def test_without_a_price_there_are_no_dollars_but_still_ratios() -> None:
    found = costing(price=None)
    assert all(offer.million_dollars is None for offer in found.offers)
    priced = costing(price=11.0)
    assert found.price_ratio == priced.price_ratio
    first, last = priced.offers[0], priced.offers[-1]
    assert priced.price_ratio == pytest.approx((first.million_dollars or 0) / (last.million_dollars or 1))
    assert priced.speed_ratio == pytest.approx(first.user_speed / last.user_speed)


def test_offers_say_whether_the_users_fit() -> None:
    assert [offer.fits for offer in costing(stack_users=64).offers] == [True, True, True]
    assert costing(stack_users=400).offers[-1].fits is False
    assert len(costing(users=1).offers) == 2


def test_bad_figures_are_refused() -> None:
    for bad in ({"price": -1.0}, {"users": 0}, {"stack_users": 10**18}):
        with pytest.raises(UsageError):
            costing(**bad)  # type: ignore[arg-type]
    for figures in ({"rows": 0}, {"share": 0.0}, {"share": 2.0}, {"cache_bandwidth": -1.0}):
        with pytest.raises(UsageError):
            prefill_for(ENGINE, box_of("h200"), **figures)  # type: ignore[arg-type]

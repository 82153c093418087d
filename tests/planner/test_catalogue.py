"""The built-in facts: all there, each with its source, found however people write their names."""

from __future__ import annotations

import dataclasses

import pytest

from monotape.errors import UsageError
from monotape.planner.catalogue import find_gpu, find_model, gpus, models, nearest_names, short_names, table

WANTED = (
    "a100", "h100", "h200", "b200", "gb200", "mi300x", "mi325x", "mi355x", "rtx-3090", "rtx-4090", "rtx-5090",
    "rtx-pro-6000", "l40s", "m1", "m2-max", "m3-ultra", "m4-pro", "m5", "rubin", "mi450",
)  # fmt: skip


@pytest.mark.parametrize("name", WANTED)
def test_the_gpu_is_there_with_figures(name: str) -> None:
    gpu = gpus()[name]
    assert gpu.bandwidth_tbs
    assert gpu.memory_gb
    assert gpu.announced == (name in ("rubin", "mi450"))


@pytest.mark.parametrize("name", gpus())
def test_every_figure_has_a_source(name: str) -> None:
    gpu = gpus()[name]
    assert len(gpu.source) > 15
    assert len(gpu.link_source) > 15
    assert len(gpu.launch_source) > 15
    for figure, source in (
        (gpu.effective_tbs, gpu.effective_source), (gpu.measured_tbs, gpu.measured_source),
        (gpu.bf16_tflops, gpu.flops_source), (gpu.fp8_tflops, gpu.flops_source),
    ):  # fmt: skip
        assert figure is None or (source is not None and len(source) > 15)


@pytest.mark.parametrize("name", models())
def test_every_model_has_sources(name: str) -> None:
    known = models()[name]
    assert len(known.source) > 15
    assert len(known.published_source) > 9


def test_peers_have_their_conditions() -> None:
    data = table("peers")
    assert "one H200" in data["conditions"]
    for point in data["decode"]:
        assert point["model"] in models()
        assert point["gpu"] in gpus()
        assert point["context"] >= 1
    assert {row["tokens_per_second"] for row in data["decode"] if row["stack"] == "vllm"} == {
        666,
        701,
        695,
        205,
    }


def test_measured_is_below_the_datasheet() -> None:
    for gpu in gpus().values():
        for figure in (gpu.effective_tbs, gpu.measured_tbs):
            assert figure is None or figure < (gpu.bandwidth_tbs or 0)


@pytest.mark.parametrize("written", ["H200", "h-200", "h200-sxm", "H 200"])
def test_gpus_are_found_however_they_are_written(written: str) -> None:
    assert find_gpu(written).name == "h200"


def test_rtx_names_may_be_short() -> None:
    assert find_gpu("4090") == find_gpu("RTX 4090") == find_gpu("rtx4090")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("llama-3.2-1b", "meta-llama/Llama-3.2-1B"), ("LLAMA-3.1-8B", "meta-llama/Meta-Llama-3.1-8B"),
        ("qwen3-0.6b", "Qwen/Qwen3-0.6B"), ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("gpt-oss-120b", "openai/gpt-oss-120b"), ("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1"),
        ("gemma-3-1b", "google/gemma-3-1b-it"), ("tinyllama-1.1b", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
    ],
)  # fmt: skip
def test_models_are_found_by_short_names(written: str, meant: str) -> None:
    known = find_model(written)
    assert known is not None
    assert known.name == meant


def test_no_short_name_means_two_models() -> None:
    names = [short for model in models() for short in short_names(model)]
    assert len(names) == len(set(names))
    taken = [alias for gpu in gpus().values() for alias in (gpu.name, *gpu.aliases)]
    assert len(taken) == len(set(taken))


def test_an_unknown_gpu_is_answered_with_the_nearest_names() -> None:
    with pytest.raises(UsageError, match="no GPU 'h2000'") as caught:
        find_gpu("h2000")
    assert caught.value.hint.startswith("The nearest names are h200, ")


def test_nearest_names_are_three_and_the_best_first() -> None:
    assert nearest_names("mi355", gpus())[0] == "mi355x"
    assert nearest_names("lama-3.2-3b", models())[0] == "meta-llama/Llama-3.2-3B-Instruct"
    assert len(nearest_names("x", gpus())) == 3


def test_facts_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        gpus()["h200"].measured_tbs = 9.9  # type: ignore[misc]

"""Every parameter is counted: against what was published, against transformers, against this engine's own specs."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from monotape.errors import ModelError, UnsupportedModel
from monotape.models.dense import Family
from monotape.models.registry import FAMILIES as RUNNABLE
from monotape.models.registry import spec_from_config
from monotape.planner.accounting import shape_from_config
from monotape.planner.catalogue import models
from monotape.planner.families import FAMILIES, FURTHER
from planner.loads import config_of, load_of

#: One model of each architecture, the smallest there is.
ONE_EACH = {model.config["architectures"][0]: name for name, model in reversed(models().items())}
#: What transformers counts beside the text model.
VISION = {
    "KimiK25ForConditionalGeneration": ("vision_tower", "mm_projector"),
    "Gemma4ForConditionalGeneration": ("vision",),
}


def test_there_are_43_models() -> None:
    assert len(models()) == 43


AGREES_WITHIN_SHARE = 0.02


@pytest.mark.parametrize("name", models())
def test_totals_agree_with_the_published_sizes_within_two_percent(name: str) -> None:
    """Names that round (gpt-oss-120b: 116.8B, K2: 1.04T) are compared with the exact figure of the card or the
    report; files that also hold MTP layers or a vision tower with the text model's own figure. Exceptions say why."""
    known = models()[name]
    difference = shape_from_config(known.config).total / known.published_total - 1
    assert (abs(difference) <= AGREES_WITHIN_SHARE) is (known.exception is None)
    assert abs(difference) < 0.03


def test_there_is_one_exception() -> None:
    """StarCoder2-7B: published as 7B, and nowhere more exactly."""
    assert [name for name, known in models().items() if known.exception] == ["bigcode/starcoder2-7b"]
    assert shape_from_config(models()["bigcode/starcoder2-7b"].config).total == 7_173_923_840


@pytest.mark.parametrize("name", [name for name, model in models().items() if model.published_active])
def test_active_parameters_are_about_what_was_published(name: str) -> None:
    """Published figures round and differ in whether the embedding counts (Qwen3 30B: 3.3B with it, 3.0B without);
    Qwen3-Next calls 3.6B "A3B"."""
    known = models()[name]
    assert shape_from_config(known.config).active == pytest.approx(known.published_active, rel=0.2)


@pytest.mark.parametrize(("given", "kv_heads"), [({}, 8), ({"num_key_value_heads": None}, 32)])
def test_heads_are_those_that_the_engine_reads(given: dict[str, Any], kv_heads: int) -> None:
    """A file that names no KV heads has the family's number; null is as many as there are heads."""
    config = dict(models()["mistralai/Mixtral-8x7B-v0.1"].config)
    del config["num_key_value_heads"]
    assert shape_from_config({**config, **given}).heads == (32, kv_heads)


@pytest.mark.parametrize("name", ["openai/gpt-oss-20b", "openai/gpt-oss-120b"])
def test_gpt_oss_agrees_to_the_last_published_digit(name: str) -> None:
    known, shape = models()[name], shape_from_config(models()[name].config)
    assert round(shape.total / 1e9, 2) == known.published_total / 1e9
    assert round(shape.active / 1e9, 2) == (known.published_active or 0) / 1e9


def few_layers(config: dict[str, Any]) -> dict[str, Any]:
    """The config with twelve layers: enough for every kind of layer, quick to build."""
    small = copy.deepcopy(config)
    text = small.get("text_config", small)
    text["num_hidden_layers"] = min(12, text["num_hidden_layers"])
    for key in ("layer_types", "indexer_types", "mlp_layer_types", "compress_ratios", "no_rope_layers"):
        if key in text:
            text[key] = text[key][: text["num_hidden_layers"]]
    for part in (small, text):
        part.pop("quantization_config", None)
        part.pop("rope_scaling", None)  # it sizes nothing, and the table leaves out its longest lists
    return small


@pytest.mark.parametrize("architecture", sorted(set(ONE_EACH) - {"KimiK3ForConditionalGeneration"}))
def test_counts_are_those_of_transformers_to_the_last_parameter(architecture: str) -> None:
    """K3 is not in transformers; its published total and active figures above stand for it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = few_layers(dict(models()[ONE_EACH[architecture]].config))
    kind = "deepseek_v3" if config["model_type"] == "kimi_k2" else config["model_type"]
    made = CONFIG_MAPPING[kind].from_dict(copy.deepcopy(config))
    with torch.device("meta"):
        vision = architecture in VISION
        model = (AutoModelForImageTextToText if vision else AutoModelForCausalLM).from_config(made)
    skipped = VISION.get(architecture, ())
    counted = sum(
        p.numel() for name, p in model.named_parameters() if not any(part in name for part in skipped)
    )
    assert shape_from_config(config).total == counted


def test_every_architecture_of_the_table_is_used_by_a_model() -> None:
    assert set(ONE_EACH) == set(FAMILIES)


@pytest.mark.parametrize("name", [n for n, m in models().items() if m.config["architectures"][0] in RUNNABLE])
def test_counts_are_those_of_the_engine_itself(name: str) -> None:
    config = models()[name].config
    if config["model_type"] == "phi3":  # the table leaves out its lists of factors, which size nothing
        config = {**config, "rope_scaling": None}
    config = {**config, "quantization_config": None}
    assert shape_from_config(config).total == spec_from_config(config).parameters


DENSE = [name for name, family in RUNNABLE.items() if isinstance(family, Family)]


def test_a_family_stands_in_one_table() -> None:
    assert FURTHER.keys().isdisjoint(RUNNABLE)
    assert FAMILIES.keys() == {*DENSE, *FURTHER}


@pytest.mark.parametrize("architecture", DENSE)
def test_what_a_file_leaves_out_is_as_when_the_model_runs(architecture: str) -> None:
    """Each family has defaults of its own for the sizes of heads, and for windows."""
    config: dict[str, Any] = {
        "architectures": [architecture], "hidden_size": 4096, "num_attention_heads": 64, "num_hidden_layers": 31,
        "intermediate_size": 5000, "vocab_size": 999, "max_position_embeddings": 32768,
    }  # fmt: skip
    if architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        config["use_sliding_window"] = True
    if architecture == "Qwen3MoeForCausalLM":
        config["moe_intermediate_size"] = 500
    if architecture == "GptOssForCausalLM":
        config["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 4096,
        }
    spec, caches = spec_from_config(config), [layer.caches[0] for layer in shape_from_config(config).layers]
    assert {cache.values for cache in caches} == {2 * spec.kv_heads * spec.head_dim}
    assert tuple(cache.window for cache in caches) == spec.windows


def test_a_tied_table_is_counted_once_and_read_whole() -> None:
    tied = shape_from_config(config_of("llama-3.2-1b"))
    untied = shape_from_config(config_of("llama-3.2-1b", tie_word_embeddings=False))
    assert untied.total - tied.total == 128256 * 2048
    assert untied.active - tied.active == 2048  # one row of the embedding
    assert tied.active == tied.total


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["LlamaForCausalLLM"]}, "nearest it knows is LlamaForCausalLM"),
        ({"architectures": None}, "names no architecture"),
        ({"architectures": ["A", "B"]}, "must list one name"),
        ({"hidden_size": None}, "no field hidden_size"),
        ({"hidden_size": -5}, "hidden_size is -5"),
        ({"hidden_size": 10**18}, "hidden_size"),
        ({"num_hidden_layers": "16"}, 'num_hidden_layers is "16"'),
        ({"num_attention_heads": 7, "num_key_value_heads": 7, "head_dim": None}, "must divide hidden_size"),
        ({"num_attention_heads": 30}, "must divide num_attention_heads (30)"),
        ({"vocab_size": 1.5}, "vocab_size"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_a_config_that_cannot_be_understood_is_refused_in_one_sentence(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError) as caught:
        shape_from_config(config_of("llama-3.2-1b", **changes))
    assert said in caught.value.message
    assert caught.value.message.endswith(".")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("model", "changes", "said"),
    [
        ("gpt-oss-20b", {"num_experts_per_tok": 33, "experts_per_token": 33}, "only 32 experts"),
        ("gpt-oss-20b", {"num_experts_per_tok": 3}, "experts_per_token is 4"),
        ("gpt-oss-20b", {"layer_types": ["full_attention"]}, "layer_types"),
        ("gpt-oss-20b", {"layer_types": ["mamba"] * 24}, "layer type mamba"),
        ("qwen3-next-80b-a3b", {"layer_types": ["sliding_attention"] * 48}, "layer type 'sliding_attention'"),
        ("deepseek-v4-flash", {"compress_ratios": [0, 4]}, "compress_ratios"),
        ("deepseek-v4-flash", {"compress_ratios": [5] * 44}, "0, 4 or 128"),
        ("qwen3-30b-a3b", {"mlp_only_layers": "none"}, "mlp_only_layers"),
        ("qwen3-30b-a3b", {"mlp_only_layers": [3]}, "mlp_only_layers"),
        ("kimi-k2.5", {"text_config": 3}, "text_config"),
    ],
)
def test_contradictions_in_moe_configs_are_named(model: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError) as caught:
        shape_from_config(config_of(model, **changes))
    assert said in caught.value.message


def test_what_cannot_be_counted_is_refused_by_name() -> None:
    text = {**config_of("gemma-4-26b-a4b")["text_config"], "num_kv_shared_layers": 20}
    with pytest.raises(UnsupportedModel, match="num_kv_shared_layers = 20"):
        shape_from_config(config_of("gemma-4-26b-a4b", text_config=text))
    with pytest.raises(ModelError, match="must hold an object"):
        shape_from_config([])  # type: ignore[arg-type]


def test_kv_of_grouped_latent_and_windowed_attention() -> None:
    llama = load_of("llama-3.2-1b").shape
    assert llama.kv_read_bytes(1001, 2) == 1001 * 16 * 2 * 8 * 64 * 2
    deepseek = load_of("deepseek-v3").shape
    assert deepseek.kv_read_bytes(1001, 2) == 1001 * 61 * (512 + 64) * 2
    gemma = load_of("gemma-3-1b").shape  # every sixth of 26 layers sees everything, the others 512 positions
    assert gemma.kv_read_bytes(1001, 2) == (4 * 1001 + 22 * 512) * 2 * 256 * 2
    oss = load_of("gpt-oss-20b").shape
    assert oss.kv_read_bytes(1001, 2) == (12 * 1001 + 12 * 128) * 2 * 8 * 64 * 2


def test_qwen_windows_are_switched_on_from_a_layer_or_by_type() -> None:
    def read(**changes: Any) -> float:
        config = config_of("qwen2.5-3b", sliding_window=100, **changes)
        return shape_from_config(config).kv_read_bytes(1001, 2) / (2 * 2 * 128 * 2)

    assert read() == 36 * 1001
    assert read(use_sliding_window=True, max_window_layers=30) == 30 * 1001 + 6 * 100
    kinds = ["sliding_attention"] * 35 + ["full_attention"]
    assert read(use_sliding_window=True, layer_types=kinds) == 35 * 100 + 1001
    assert read(layer_types=["full_attention"] * 36) == 36 * 1001


def test_sparse_attention_reads_the_chosen_positions_and_the_whole_index() -> None:
    shape = load_of("deepseek-v3.2").shape
    assert shape.kv_read_bytes(1001, 2) == 61 * 1001 * (576 + 128) * 2  # fewer than the 2,048 it would choose
    assert shape.kv_read_bytes(9001, 2) == 61 * (2048 * 576 + 9001 * 128) * 2
    assert shape.kv_stored_bytes(9001, 2) == 61 * 9001 * (576 + 128) * 2
    glm = load_of("glm-5.3").shape
    full = sum(len(layer.caches) == 2 for layer in glm.layers)
    assert 0 < full < len(glm.layers) == 78  # most layers share an index


def test_compressed_kv_is_as_published() -> None:
    """DeepSeek-V4-Pro: 9.62 GiB at one million tokens in bf16."""
    assert round(load_of("deepseek-v4-pro").shape.kv_stored_bytes(1 << 20, 2) / 2**30, 2) == 9.62


def test_linear_attention_keeps_a_state_of_fixed_size() -> None:
    shape = load_of("qwen3-next-80b-a3b").shape
    states = 36 * (32 * 128 * 128 + (2 * 2048 + 4096) * 3) * 4
    assert shape.kv_read_bytes(0, 2) == states
    assert shape.kv_read_bytes(1001, 2) - states == 12 * 1001 * 2 * 2 * 256 * 2


def test_kv_is_split_over_devices_as_far_as_there_are_heads() -> None:
    llama, deepseek = load_of("llama-3.2-1b").shape, load_of("deepseek-v3").shape
    assert llama.kv_stored_bytes(77, 2, 4) == llama.kv_stored_bytes(77, 2) / 4
    assert llama.kv_stored_bytes(77, 2, 32) == llama.kv_stored_bytes(77, 2) / 8
    assert deepseek.kv_stored_bytes(77, 2, 8) == deepseek.kv_stored_bytes(77, 2)

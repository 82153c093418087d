"""models/rope.py against the frequencies and tables of transformers, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from families import CASES, Case
from monotape.errors import ModelError, UnsupportedModel
from monotape.models.dense import ROPE_RULES
from monotape.models.fields import Fields
from monotape.models.registry import spec_from_config
from monotape.models.rope import position_tables, read_rope
from monotape.models.spec import Rope

DIMS, CONTEXT = 14, 4000
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.7, 2.0, 2.5], "long_factor": [1.0, 2, 3, 4.5, 6, 8, 11]}
RULES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.5},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 500,
    },
    "longrope": {"original_max_position_embeddings": 500, **FACTORS},
    "longrope-factor": {"original_max_position_embeddings": 500, "factor": 3.0, **FACTORS},
    "longrope-attention": {"original_max_position_embeddings": 500, "attention_factor": 1.25, **FACTORS},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 500},
    "yarn-betas": {
        "factor": 8.0,
        "original_max_position_embeddings": 500,
        "beta_fast": 20,
        "beta_slow": 2.5,
        "truncate": False,
        "attention_factor": 0.75,
    },
    "yarn-mscale": {
        "factor": 8.0,
        "original_max_position_embeddings": 500,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
    },
}


def read(**config: Any) -> Rope:
    fields = Fields(config)
    rope = read_rope(fields, DIMS, CONTEXT, ROPE_RULES, partial=False)
    fields.finish("test")
    return rope


def transformers_tables(config: Any, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin as transformers makes them for a sequence of so many positions."""
    import torch
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    module = (Phi3RotaryEmbedding if config.model_type == "phi3" else LlamaRotaryEmbedding)(config)
    cosines, sines = module(torch.zeros(1, dtype=torch.float32), torch.arange(positions)[None])
    half = cosines.shape[-1] // 2
    return cosines[0, :, :half].numpy(), sines[0, :, :half].numpy()


def agree(got: tuple[np.ndarray, np.ndarray], want: tuple[np.ndarray, np.ndarray], positions: int) -> None:
    """To one unit in the last place of a frequency, which a position multiplies."""
    tolerance = 2.0**-23 * (np.arange(positions)[:, None] + 4) * 2
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == np.float32
        assert ours.shape == theirs.shape
        assert (np.abs(ours - theirs) <= tolerance).all()


@pytest.mark.parametrize("positions", [499, 1201])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("theta", [10000.0, 500000])
def test_tables_agree_with_transformers(name: str, theta: float, positions: int) -> None:
    from transformers import LlamaConfig

    kind = name.split("-")[0]
    parameters = {"rope_type": kind, "rope_theta": theta, **RULES[name]}
    config = LlamaConfig(head_dim=DIMS, max_position_embeddings=CONTEXT, rope_parameters=dict(parameters))
    rope = read(rope_parameters=parameters)
    agree(position_tables(rope, positions), transformers_tables(config, positions), positions)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tables_of_every_family_agree_with_transformers(case: Case) -> None:
    config = case.config()
    spec = spec_from_config(config.to_dict() | {"architectures": [config_architecture(case)]})
    agree(position_tables(spec.rope, case.context), transformers_tables(config, case.context), case.context)


def config_architecture(case: Case) -> str:
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "phi3": "Phi3"}
    return f"{names[case.family]}ForCausalLM"


def test_old_and_new_words_mean_the_same() -> None:
    settings = RULES["llama3"]
    new = read(rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **settings})
    assert read(rope_theta=500000, rope_scaling={"type": "llama3", **settings}) == new
    assert read(rope_theta=500000, rope_scaling={"rope_type": "llama3", "type": "llama3", **settings}) == new
    beside = {name: value for name, value in settings.items() if name != "original_max_position_embeddings"}
    assert (
        read(
            rope_theta=500000.0,
            original_max_position_embeddings=500,
            rope_scaling={"rope_type": "llama3", **beside},
        )
        == new
    )


def test_su_is_the_first_name_of_longrope() -> None:
    settings = RULES["longrope"]
    assert read(rope_scaling={"type": "su", **settings}) == read(
        rope_scaling={"type": "longrope", **settings}
    )


def test_factors_divide_the_frequencies() -> None:
    plain = read(rope_theta=10000.0)
    factors = [1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 11.0]
    divided = read(rope_theta=10000.0, rope_scaling={"rope_type": "factors", "factors": factors})
    np.testing.assert_allclose(np.array(divided.frequencies) * factors, plain.frequencies, rtol=1e-7)


def test_the_context_of_the_engine_picks_the_long_list() -> None:
    rope = read(rope_scaling={"type": "longrope", **RULES["longrope"]})
    assert rope.short_context == 500
    short, long = position_tables(rope, 500)[0], position_tables(rope, 501)[0]
    assert not np.allclose(short, long[:500])


def test_long_tables_are_made_in_pieces_that_fit_together() -> None:
    rope = read()
    whole, _ = position_tables(rope, 4099)
    assert whole.shape == (4099, DIMS // 2)
    angles = np.float32(4097) * np.array(rope.frequencies, np.float32)
    np.testing.assert_array_equal(whole[4097], np.cos(angles.astype(np.float64)).astype(np.float32))


@pytest.mark.parametrize(
    ("kind", "near"),
    [("dynamic", "yarn"), ("llama4", "llama3"), ("proportional", "longrope"), ("mrope", "longrope")],
)
def test_other_rules_are_refused_by_name(kind: str, near: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        read(rope_scaling={"rope_type": kind, "factor": 2.0})
    assert f"the rope rule {kind}" in caught.value.message
    assert any(rule in caught.value.message for rule in ROPE_RULES)
    assert near in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}},
            r"rope_theta is 6.0, but rope_theta is 5",
        ),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn"}}, 'rope_type is "yarn"'),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "default"}},
            "contradict each other",
        ),
        ({"rope_scaling": {"type": "linear"}}, r"no field rope_scaling\.factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, r"rope_scaling\.factor is 0"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1]}}, r"rope_scaling\.mrope_section = \[1\]"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            r"rope_parameters\.full_attention",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "original_max_position_embeddings is missing"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1}},
            "is 1, but",
        ),
        (
            {"rope_scaling": {"type": "longrope", **RULES["longrope"], "long_factor": [1.0]}},
            "must list 7 numbers",
        ),
        (
            {"rope_scaling": {"type": "llama3", **RULES["llama3"], "high_freq_factor": 1.0}},
            "above low_freq_factor",
        ),
        ({"rope_scaling": "linear"}, "must be an object"),
        ({"rope_theta": True}, "rope_theta is true"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
    ],
)
def test_contradictions_and_unknown_fields_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(**config)


@pytest.mark.parametrize("factor", [0.5, 0.05])
def test_values_must_rotate_in_pairs(factor: float) -> None:
    with pytest.raises(ModelError, match="rotate in pairs"):
        read_rope(Fields({"partial_rotary_factor": factor}), DIMS, CONTEXT, ROPE_RULES, partial=True)

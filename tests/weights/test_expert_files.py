"""Experts as files store them: stacks of GGUF and of gpt-oss, MXFP4; files that contradict themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file, save_file

from backends.cpu_cases import PROMPT, cpu, distance, generate, ids, reference
from backends.test_cpu_stored import middle_distance
from families import Case, make_checkpoint
from monotape.errors import CheckpointError, MonotapeError
from monotape.models.registry import spec_from_config
from monotape.plan.formats import Format
from monotape.weights.check import check_tensors
from monotape.weights.open import open_checkpoint
from monotape.weights.quantised.stored import StoredMatrix
from weights.expert_files import honest_limit, mxfp4_blocks, to_mxfp4, write_gguf_of

Checkpoints = Callable[[str], Path]
#: gpt-oss with sizes that blocks of 32 divide, and nothing else does.
WIDE = Case(
    "gpt-oss-wide",
    "gpt_oss",
    {
        "hidden_size": 96, "intermediate_size": 160, "head_dim": 10, "num_local_experts": 7, "num_experts_per_tok": 3,
        "sliding_window": 7, "num_hidden_layers": 2,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 40,
            "truncate": False,
        },
    },
)  # fmt: skip


def open_and_check(path: Path) -> None:
    opened = open_checkpoint(path)
    check_tensors(spec_from_config(opened.config), opened)


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return to_mxfp4(make_checkpoint(WIDE, tmp_path_factory.mktemp("mxfp4"), "float16"))


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-moe", "mixtral", "mixtral-window"])
def test_a_gguf_file_is_the_model_that_it_was_made_of(
    checkpoint: Checkpoints, tmp_path: Path, name: str
) -> None:
    folder = checkpoint(name)
    original = open_checkpoint(folder)
    window = {"llama.attention.sliding_window": 9} if name == "mixtral-window" else {}
    path = write_gguf_of(tmp_path / "m.gguf", original, window)
    opened = open_checkpoint(path)
    assert opened.names == original.names
    spec, want = spec_from_config(opened.config), spec_from_config(original.config)
    for field in (
        "architecture",
        "experts",
        "gating",
        "sinks",
        "windows",
        "ffn",
        "head_dim",
        "layer_tensors",
    ):
        assert getattr(spec, field) == getattr(want, field), field
    assert np.allclose(spec.rope.frequencies, want.rope.frequencies, rtol=1e-6)
    check_tensors(spec, opened)
    for tensor in original.names:
        count = original.shape(tensor)[0]
        assert np.array_equal(opened.rows(tensor, 0, count), original.rows(tensor, 0, count)), tensor
    slow, expected = reference(path), reference(folder)
    got = slow.logits(PROMPT[:20], slow.new_sequence())
    assert distance(got, expected.logits(PROMPT[:20], expected.new_sequence())) <= 1e-6


def test_mxfp4_experts_of_gpt_oss(mxfp4: Path, tmp_path: Path) -> None:
    """The same numbers as floats, stored the way that transformers stores floats: the same logits."""
    opened = open_checkpoint(mxfp4)
    spec = spec_from_config(opened.config)
    check_tensors(spec, opened)
    plain = make_checkpoint(WIDE, tmp_path, "float16")
    weights = load_file(plain / "model.safetensors")
    for stack in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        place = stack.rpartition(".")[0]
        for expert in range(7):
            if stack.endswith("down_proj"):
                values = opened.rows(f"{place}.{expert}.down_proj.weight", 0, 96)
                weights[stack][expert] = values.T
                continue
            for first, part in enumerate(("gate_proj", "up_proj")):
                name = f"{place}.{expert}.{part}.weight"
                assert opened.stored_as(name) == "mxfp4" and opened.shape(name) == (160, 96)
                weights[stack][expert][:, first::2] = opened.rows(name, 0, 160).T
    save_file(weights, plain / "model.safetensors", {"format": "pt"})
    codes, floats = reference(mxfp4), reference(plain)
    got = codes.logits(PROMPT, codes.new_sequence())
    assert np.array_equal(got, floats.logits(PROMPT, floats.new_sequence()))


def test_mxfp4_runs_on_the_cpu_as_it_is_stored(mxfp4: Path) -> None:
    slow = reference(mxfp4)
    want = slow.logits(PROMPT, slow.new_sequence())
    with cpu(mxfp4, "auto", 3) as backend:
        formats = {stage.name: stage.format for stage in backend.plan.ranks[0].stages}
        assert (formats["gate_up"], formats["down"], formats["qkv"]) == (
            Format.MXFP4,
            Format.MXFP4,
            Format.F16,
        )
        library = backend.plan.ranks[0].library
        assert library is not None and library.segments[1].bytes == 96 * 160 * 17 // 32
        together = backend.logits(PROMPT, backend.new_sequence())
        sequence = backend.new_sequence()
        alone = np.concatenate([backend.logits((token,), sequence) for token in PROMPT])
        assert np.array_equal(together, alone)
        assert ids(generate(backend, PROMPT[:9], 40)) == ids(generate(slow, PROMPT[:9], 40))
    limit = honest_limit(mxfp4, want)
    assert middle_distance(together, want) <= limit
    with cpu(mxfp4, "auto", 4, tp=2) as backend:  # 160 columns are five blocks of 32
        assert middle_distance(backend.logits(PROMPT, backend.new_sequence()), want) <= limit


def test_mxfp4_of_gguf_holds_the_same_numbers(mxfp4: Path, tmp_path: Path) -> None:
    opened = open_checkpoint(mxfp4)
    stacks: dict[str, tuple[Kind, Any]] = {}
    for layer in range(2):
        for part in ("gate", "up", "down"):
            experts = []
            for expert in range(7):
                name = f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
                matrix = opened.stored_matrix(name)
                assert isinstance(matrix, StoredMatrix)
                experts.append(mxfp4_blocks(matrix.values(0, matrix.rows), matrix.scales(0, matrix.rows)))
            stacks[f"blk.{layer}.ffn_{part}_exps.weight"] = (Kind.MXFP4, np.stack(experts))
    halves = {"token_embd.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}
    stacks |= {
        theirs: (Kind.F16, opened.rows(ours, 0, opened.shape(ours)[0]).astype(np.float16))
        for theirs, ours in halves.items()
    }
    path = write_gguf_of(tmp_path / "m.gguf", opened, None, stacks)
    found = open_checkpoint(path)
    for name in sorted(opened.names):
        count = opened.shape(name)[0]
        assert np.array_equal(found.rows(name, 0, count), opened.rows(name, 0, count)), name
    slow = reference(path)
    want = slow.logits(PROMPT, slow.new_sequence())
    with cpu(path, "auto") as backend:
        assert {stage.format for stage in backend.plan.ranks[0].routed_stages} == {Format.MXFP4}
        assert middle_distance(backend.logits(PROMPT, backend.new_sequence()), want) <= honest_limit(
            path, want
        )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("model.layers.0.mlp.experts.down_proj_scales"), "down_proj has no _scales"),
        (
            lambda w: w.pop("model.layers.1.mlp.experts.down_proj_bias"),
            "no tensor .*experts.0.down_proj.bias",
        ),
        (lambda w: w.pop("model.layers.1.self_attn.sinks"), "no tensor .*sinks"),
        (
            lambda w: w.update(
                {"model.layers.0.mlp.experts.gate_up_proj_bias": np.zeros((7, 319), np.float32)}
            ),
            "319 rows an expert, which gate and up cannot share",
        ),
        (
            lambda w: w.update({"model.layers.0.mlp.experts.gate_up_proj_bias": np.zeros(7, np.float32)}),
            "has two dimensions",
        ),
        (
            lambda w: w.update({"model.layers.0.mlp.experts.down_proj_bias": np.zeros((6, 96), np.float32)}),
            "no tensor .*experts.6.down_proj.bias",
        ),
        (
            lambda w: w.update({"model.layers.0.mlp.experts.down_proj_bias": np.ones((9, 96), np.float32)}),
            "2 tensors that a GptOssForCausalLM of 2 layers does not use",
        ),
        (
            lambda w: w.update({"model.layers.0.mlp.experts.3.gate_proj.bias": np.zeros(160, np.float32)}),
            "twice, in a stack and by itself",
        ),
    ],
)
def test_stacks_that_do_not_fit_are_refused_in_one_sentence(
    mxfp4: Path, tmp_path: Path, change: Callable[[dict[str, Any]], Any], words: str
) -> None:
    weights = load_file(mxfp4 / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((mxfp4 / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=words) as refused:
        open_and_check(tmp_path)
    assert "\n" not in refused.value.message and refused.value.hint


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"qwen3moe.expert_count": 12}, "no stack of 12 experts"),
        ({"qwen3moe.expert_count": None}, "no qwen3moe.expert_count"),
        ({"qwen3moe.expert_used_count": None}, "no qwen3moe.expert_used_count"),
        ({"qwen3moe.expert_used_count": 14}, "only 13 experts"),
        ({"qwen3moe.expert_feed_forward_length": 45}, "the config asks for"),
        ({"qwen3moe.expert_shared_count": 1}, "expert_shared_count"),
        ({"qwen3moe.expert_weights_scale": 2.5}, "expert_weights_scale"),
        ({"qwen3moe.expert_gating_func": 2}, "expert_gating_func"),
        ({"qwen3moe.expert_surprise": 1}, "expert_surprise"),
    ],
)
def test_gguf_metadata_that_contradicts_the_experts_is_refused(
    checkpoint: Checkpoints, tmp_path: Path, metadata: dict[str, Any], words: str
) -> None:
    path = write_gguf_of(tmp_path / "m.gguf", open_checkpoint(checkpoint("qwen3-moe")), metadata)
    with pytest.raises(MonotapeError, match=words):
        open_and_check(path)


def test_what_changes_nothing_in_gguf_metadata_is_accepted(checkpoint: Checkpoints, tmp_path: Path) -> None:
    metadata = {
        "qwen3moe.expert_shared_count": 0, "qwen3moe.expert_weights_norm": True, "qwen3moe.expert_gating_func": 1,
        "qwen3moe.expert_weights_scale": 1.0,
    }  # fmt: skip
    path = write_gguf_of(tmp_path / "m.gguf", open_checkpoint(checkpoint("qwen3-moe")), metadata)
    spec_from_config(open_checkpoint(path).config)


@pytest.mark.parametrize("named", [3, {}, ["GptOssForCausalLM", 1], [["x"]], None])
def test_a_config_that_names_no_family_is_refused_by_the_registry(
    mxfp4: Path, tmp_path: Path, named: Any
) -> None:
    """What stacks experts is known by its name, whatever a file has in place of one."""
    config = json.loads((mxfp4 / "config.json").read_text()) | {
        "architectures": named,
        "model_type": "nothing",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((mxfp4 / "model.safetensors").read_bytes())
    with pytest.raises(MonotapeError):
        spec_from_config(open_checkpoint(tmp_path).config)


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_a_truncated_file_is_refused_in_one_sentence(mxfp4: Path, tmp_path: Path, kind: str) -> None:
    if kind == "gguf":
        path = opened = write_gguf_of(tmp_path / "m.gguf", open_checkpoint(mxfp4))
    else:
        opened, path = tmp_path, tmp_path / "model.safetensors"
        path.write_bytes((mxfp4 / "model.safetensors").read_bytes())
        (tmp_path / "config.json").write_bytes((mxfp4 / "config.json").read_bytes())
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(CheckpointError) as refused:
        open_checkpoint(opened)
    assert "\n" not in refused.value.message

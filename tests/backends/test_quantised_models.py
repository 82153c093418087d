"""Small models quantised in every way: they generate what a plain checkpoint of the dequantised weights does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from backends.cpu_cases import PROMPT, cpu, generate, ids, reference
from backends.fake_cuda import FakeCuda, fake_gpu
from backends.quantised_cases import EVEN, WAYS, by_awq, is_linear, make_pair
from backends.test_cuda_loading import check, gpu_plan, load_model
from families import Case
from monotape.compiler.compile import compile_plan
from monotape.engine.loading import planned
from monotape.errors import CheckpointError
from monotape.models.registry import spec_from_config
from monotape.plan.formats import Format
from monotape.plan.types import Machine
from monotape.weights.check import check_tensors
from monotape.weights.coded import Coded
from monotape.weights.filling import load_tapes
from monotape.weights.open import open_checkpoint
from weights.quantised_files import Floats, in_module
from weights.safetensors_files import write_file


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    made: dict[str, tuple[Path, Path]] = {}

    def folders(name: str) -> tuple[Path, Path]:
        if name not in made:
            made[name] = make_pair(WAYS[name].case, WAYS[name], tmp_path_factory.mktemp(name))
        return made[name]

    return folders


Pair = Callable[[str], tuple[Path, Path]]


@pytest.mark.parametrize("name", WAYS)
def test_the_reference_computes_what_the_format_says(pair: Pair, name: str) -> None:
    quantised, plain = pair(name)
    opened = open_checkpoint(quantised)
    spec = spec_from_config(opened.config)
    check_tensors(spec, opened)
    labels = {opened.stored_as(tensor) for tensor in opened.names if is_linear(tensor)}
    assert labels == {WAYS[name].label}
    ours, theirs = reference(quantised), reference(plain)
    logits = ours.logits(PROMPT, ours.new_sequence())
    np.testing.assert_array_equal(logits, theirs.logits(PROMPT, theirs.new_sequence()))
    assert ids(generate(ours)) == ids(generate(theirs))


@pytest.mark.parametrize("name", WAYS)
def test_the_cores_run_it(pair: Pair, name: str) -> None:
    quantised, plain = pair(name)
    with cpu(quantised, "f32") as ours, cpu(plain, "f32") as theirs:
        assert ids(generate(ours)) == ids(generate(theirs))
    with cpu(quantised, "auto") as ours:
        assert ours.plan.format is Format.Q8
        assert len(generate(ours, count=7)) == 7


def test_columns_sorted_by_activation_are_no_less_exact_than_eight_bits(pair: Pair) -> None:
    """`down` has the file's own codes, the other stages eight bits: the exact logits are those of the reference."""
    quantised, plain = pair("gptq-v2-sorted")
    exact = reference(plain)
    expected = exact.logits(PROMPT, exact.new_sequence())
    with cpu(quantised, "auto") as ours, cpu(plain, "q8") as eight_bits:
        assert {stage.name: stage.format for stage in ours.plan.ranks[0].layer_stages}[
            "down"
        ] is Format.INT4_G32Z
        errors = [
            np.abs(backend.logits(PROMPT, backend.new_sequence()) - expected).max()
            for backend in (ours, eight_bits)
        ]
    assert errors[0] <= 2 * errors[1] + np.finfo(np.float32).eps


class _Recording:
    """A packer that only looks at what it is given."""

    def __init__(self) -> None:
        self.floats, self.integers = 0, 0

    def pack(self, fmt: Format, rows: Floats, out: NDArray[np.uint8]) -> int:
        self.floats += rows.size
        return -1

    def pack_integers(self, integers: NDArray[np.int8], scales: NDArray[np.float16], out: Any) -> int:
        assert scales.shape == (integers.shape[0], integers.shape[1] // 32)
        self.integers += integers.size
        return -1

    def pack_coded(self, fmt: Format, rows: Coded, out: Any) -> int:
        raise AssertionError("a plan of q8 has no other codes")

    def reads_raw(self, fmt: Format, kind: str) -> bool:
        return False

    def pack_raw(self, *_: Any) -> int:
        raise AssertionError("it reads no blocks")


@pytest.mark.parametrize(("name", "exact"), [("awq", True), ("gptq", True), ("gptq-v2-sorted", False)])
def test_integers_in_groups_of_32_reach_the_8_bit_format_unrounded(
    pair: Pair, name: str, exact: bool
) -> None:
    opened = open_checkpoint(pair(name)[0])
    spec = spec_from_config(opened.config)
    plan = compile_plan(spec, Machine("cpu", 1), Format.Q8, context=160)
    packer = _Recording()
    load_tapes(spec, plan, opened, packer)
    matrices = sum(int(np.prod(opened.shape(tensor))) for tensor in opened.names if is_linear(tensor))
    assert packer.integers == (matrices if exact else 0)
    assert packer.floats >= (0 if exact else matrices)


@pytest.mark.parametrize("name", ["fp8-rows", "awq", "gptq-v2-sorted", "mxfp4"])
def test_a_gpu_gets_the_numbers_in_16_bits(pair: Pair, name: str) -> None:
    opened = open_checkpoint(pair(name)[0])
    spec = spec_from_config(opened.config)
    plan = gpu_plan(spec, Format.BF16)
    with fake_gpu(FakeCuda()):
        check(load_model(spec, plan, opened), spec, plan, opened, 2**-8)


def test_formats_of_a_backend(pair: Pair) -> None:
    opened = open_checkpoint(pair("awq")[0])
    spec = spec_from_config(opened.config)
    plan = planned("cuda", spec, opened, context=160, workers=3)
    assert plan.plan.format is Format.BF16
    stages = {stage.name: stage.format for stage in plan.plan.ranks[0].stages}
    assert stages.pop("head") is Format.BF16 and set(stages.values()) == {Format.INT4_G32Z}


def test_a_quantised_head_is_used_where_the_config_ties_it(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    case = Case("tied", "llama", {**EVEN.fields, "tie_word_embeddings": True, "vocab_size": 136})
    quantised, plain = make_pair(case, WAYS["awq"], tmp_path)
    made = load_file(quantised / "model.safetensors")
    head = np.random.default_rng(0).normal(0, 0.2, (136, 64)).astype(np.float32)
    tensors, numbers = by_awq(head)
    dtypes = {"int32": "I32", "uint32": "I32", "float16": "F16", "float32": "F32"}
    stored = {name: (dtypes[str(values.dtype)], values) for name, values in made.items()}
    write_file(quantised / "model.safetensors", stored | in_module("lm_head", tensors))
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = []
    (quantised / "config.json").write_text(json.dumps(config))
    values = load_file(plain / "model.safetensors")
    write_file(
        plain / "model.safetensors",
        {name: ("F32", value) for name, value in {**values, "lm_head.weight": numbers}.items()},
    )
    ours, theirs = reference(quantised), reference(plain)
    assert not ours.spec.tied and any("ties the head" in note for note in ours.spec.notes)
    assert ids(generate(ours)) == ids(generate(theirs))


def test_biases_of_zeros_are_passed_over_and_others_are_not(pair: Pair, tmp_path: Path) -> None:
    """GPTQ's first tools wrote one for every matrix."""
    from safetensors.numpy import load_file

    quantised = pair("gptq")[0]
    made = load_file(quantised / "model.safetensors")
    made["model.layers.0.mlp.down_proj.bias"] = np.zeros(64, np.float16)
    dtypes = {"int32": "I32", "uint32": "I32", "float16": "F16", "float32": "F32"}
    (tmp_path / "config.json").write_text((quantised / "config.json").read_text())
    for value in (0.0, 0.5):
        made["model.layers.0.mlp.down_proj.bias"][3] = value
        write_file(
            tmp_path / "model.safetensors",
            {name: (dtypes[str(values.dtype)], values) for name, values in made.items()},
        )
        opened = open_checkpoint(tmp_path)
        spec = spec_from_config(opened.config)
        if value == 0.0:
            check_tensors(spec, opened)
        else:
            with pytest.raises(
                CheckpointError, match=r"does not use: model\.layers\.0\.mlp\.down_proj\.bias"
            ):
                check_tensors(spec, opened)

"""engine/formats.py: a stage gets the smallest format that holds its weights exactly and that kernels read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file

from backends.quantised_cases import WAYS, make_pair
from families import BY_NAME, make_checkpoint
from monotape.engine.asked import Asked, formats_for
from monotape.engine.formats import Chosen, cpu_formats, gpu_formats
from monotape.engine.loading import load_backend
from monotape.models.registry import spec_from_config
from monotape.plan import formats as plan_formats
from monotape.plan.formats import CPU_LAYOUTS, GPU_LAYOUTS, Format, Layout
from monotape.plan.gpu_formats import GPU_FORMATS
from monotape.weights.open import open_checkpoint
from weights.expert_files import gguf_tensors, write_gguf_of
from weights.gguf_models import SHAPES, write_wide_model
from weights.safetensors_files import to_bf16, write_file

#: Bytes of a row's block of 128 values, for a machine whose kernels read everything.
SIZES = {
    Format.FP8: 128, Format.FP8_BLOCK: 132, Format.INT8: 128, Format.MXFP4: 68, Format.Q8: 136, Format.Q4_1: 80,
    Format.INT4_G32: 72, Format.INT4_G64: 68, Format.INT4_G128: 66, Format.INT4_G32Z: 80, Format.INT4_G64Z: 72,
    Format.INT4_G128Z: 68, Format.Q5_0: 88, Format.Q4_K: 76, Format.Q5_K: 92, Format.Q6_K: 106,
    Format.K_MIXED: 116, Format.WIDE: 192,
}  # fmt: skip
ROW_SCALES = {fmt for fmt in Format if fmt.value.startswith("int") or fmt is Format.FP8}
Q4_K_M = {"ffn_down": Kind.Q6_K, "attn_v": Kind.Q6_K, "token_embd": Kind.Q6_K}


@pytest.fixture
def all_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of both machines read every format."""
    layouts = {fmt: Layout(128, size, row_scales=fmt in ROW_SCALES) for fmt, size in SIZES.items()}
    half = GPU_FORMATS[Format.BF16]
    monkeypatch.setattr(plan_formats, "GPU_LAYOUTS", GPU_LAYOUTS)
    for known, more in ((GPU_LAYOUTS, layouts), (GPU_FORMATS, dict.fromkeys(SIZES, half))):
        for fmt, value in more.items():
            monkeypatch.setitem(known, fmt, value)  # type: ignore[arg-type]
    for fmt in set(SIZES) - {Format.FP8, Format.FP8_BLOCK, Format.INT8, Format.MXFP4, Format.Q8}:
        monkeypatch.setitem(CPU_LAYOUTS, fmt, Layout(128, SIZES[fmt]))


@pytest.fixture
def few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels read floats, and on a CPU q8."""
    for known in (GPU_LAYOUTS, GPU_FORMATS, CPU_LAYOUTS):
        for fmt in set(known) - {Format.F32, Format.F16, Format.BF16, Format.Q8}:
            monkeypatch.delitem(known, fmt)
    for known in (GPU_LAYOUTS, GPU_FORMATS):
        if Format.Q8 in known:
            monkeypatch.delitem(known, Format.Q8)


def chosen_for(path: Path, backend: str = "cuda", ranks: int | None = None) -> Chosen:
    opened = open_checkpoint(path)
    choose = gpu_formats if backend == "cuda" else cpu_formats
    return choose(spec_from_config(opened.config), opened, ranks)


@pytest.mark.usefixtures("all_kernels")
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Kind.Q4_0, Format.INT4_G32), (Kind.Q4_1, Format.Q4_1), (Kind.Q5_0, Format.Q5_0), (Kind.Q8_0, Format.Q8),
        (Kind.Q4_K, Format.Q4_K), (Kind.Q5_K, Format.Q5_K), (Kind.Q6_K, Format.Q6_K),
    ],
    ids=lambda value: value.name,
)  # fmt: skip
@pytest.mark.parametrize("backend", ["cuda", "cpu"])
def test_a_gguf_of_one_format_keeps_it(tmp_path: Path, kind: Kind, expected: Format, backend: str) -> None:
    path = write_wide_model(tmp_path / "m.gguf", dict.fromkeys(SHAPES, kind))
    chosen = chosen_for(path, backend)
    stages = dict.fromkeys(("qkv", "output", "gate_up", "down"), expected)
    if backend == "cpu":
        assert chosen.default is Format.Q8
        stages = {name: fmt for name, fmt in stages.items() if fmt is not Format.Q8}
    assert chosen.of_stages == {**stages, "head": Format.F16}
    assert not chosen.notes


@pytest.mark.usefixtures("all_kernels")
@pytest.mark.parametrize("backend", ["cuda", "cpu"])
def test_mixtures_have_the_smallest_format_that_holds_all(tmp_path: Path, backend: str) -> None:
    kinds = {**dict.fromkeys(SHAPES, Kind.Q4_K), **Q4_K_M, "1.ffn_down": Kind.Q4_K, "attn_output": Kind.Q5_K}
    path = write_wide_model(tmp_path / "m.gguf", kinds)
    assert chosen_for(path, backend).of_stages == {
        "qkv": Format.K_MIXED, "output": Format.Q5_K, "gate_up": Format.Q4_K, "down": Format.K_MIXED,
        "head": Format.Q6_K,
    }  # fmt: skip
    kinds = {
        "attn_q": Kind.Q4_0, "attn_k": Kind.Q8_0, "attn_v": Kind.Q5_0, "ffn_gate": Kind.Q4_1, "ffn_up": Kind.Q6_K,
        "ffn_down": Kind.Q4_0, "0.ffn_down": Kind.Q5_0, "attn_output": Kind.Q4_0, "1.attn_output": Kind.F16,
    }  # fmt: skip
    chosen = chosen_for(write_wide_model(tmp_path / "other.gguf", kinds), backend)
    stages = {
        name: chosen.of_stages.get(name, chosen.default) for name in ("qkv", "gate_up", "down", "output")
    }
    rounded = Format.BF16 if backend == "cuda" else Format.Q8
    assert stages == {"qkv": Format.Q8, "gate_up": Format.WIDE, "down": Format.Q5_0, "output": rounded}
    of_output, of_gate_up = chosen.notes
    how = "bf16, 16" if backend == "cuda" else "q8, 8.5"
    assert of_output.startswith(f"Weights stored as f16 and q4_0 are rounded to {how} bits a weight (output)")
    assert of_gate_up.startswith(
        "Weights stored as q4_1 and q6_k become wide, 12 bits a weight (gate_up): no smaller"
    )
    outputs = tuple(f"model.layers.{layer}.self_attn.o_proj.weight" for layer in range(2))
    assert chosen.packed == (() if backend == "cuda" else outputs)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = make_pair(WAYS[name].case, WAYS[name], tmp_path_factory.mktemp(name))[0]
        return made[name]

    return folder


@pytest.mark.usefixtures("all_kernels")
@pytest.mark.parametrize(
    ("name", "gpu", "cpu"),
    [
        ("autofp8", Format.FP8, None), ("fp8-rows", Format.FP8, None), ("awq", Format.INT4_G32Z, Format.INT4_G32Z),
        ("gptq", Format.INT4_G32, Format.INT4_G32), ("gptq-8-bits", Format.WIDE, Format.WIDE),
        ("packed-4", Format.INT4_G128Z, Format.INT4_G128Z), ("packed-8-qwen2", Format.INT8, Format.Q8),
        ("packed-4-phi3", Format.INT4_G128, Format.INT4_G128), ("mxfp4", Format.MXFP4, Format.MXFP4),
        ("fp8-blocks", None, None), ("gptq-v2-sorted", None, None),
    ],
)  # fmt: skip
def test_quantised_safetensors_keep_their_format(
    quantised: Callable[[str], Path], name: str, gpu: Format | None, cpu: Format | None
) -> None:
    for backend, expected in (("cuda", gpu), ("cpu", cpu)):
        chosen = chosen_for(quantised(name), backend)
        found = {
            chosen.of_stages.get(stage, chosen.default) for stage in ("qkv", "output", "gate_up", "down")
        }
        assert found == {expected or (Format.BF16 if backend == "cuda" else Format.Q8)}
        told = [note for note in chosen.notes if "(qkv" in note]
        assert len(told) == (expected in (None, Format.WIDE))
        assert all(("are rounded" in note) == (expected is None) for note in told)
        assert any(name.endswith("q_proj.weight") for name in chosen.packed) == (
            backend == "cpu" and expected is None
        )
        if name == "gptq-v2-sorted":
            assert told[0].startswith(
                "Weights stored as int4-g32 with columns sorted by activation are rounded"
            )


@pytest.mark.usefixtures("all_kernels")
@pytest.mark.parametrize("backend", ["cuda", "cpu"])
def test_columns_sorted_by_activation_keep_their_format_where_their_input_can_be_sorted(
    quantised: Callable[[str], Path], backend: str
) -> None:
    opened = open_checkpoint(quantised("gptq-v2-sorted"))
    source, chosen = formats_for(backend, Asked(), spec_from_config(opened.config), opened)
    assert source is not opened
    unpacked = Format.BF16 if backend == "cuda" else Format.Q8
    found = {
        stage: chosen.of_stages.get(stage, chosen.default) for stage in ("qkv", "output", "gate_up", "down")
    }
    assert found == {"qkv": unpacked, "output": unpacked, "gate_up": unpacked, "down": Format.INT4_G32Z}
    (note,) = (note for note in chosen.notes if "(qkv" in note)
    assert "with columns sorted by activation are rounded to" in note and "(qkv, output, gate_up)" in note


@pytest.mark.usefixtures("all_kernels")
def test_a_rank_that_begins_within_a_group_gets_smaller_groups(tmp_path: Path) -> None:
    """The shares of down begin at multiples of 16 columns with 32 ranks, of 128 with 4."""
    kinds = dict.fromkeys(SHAPES, Kind.Q4_K)
    path = write_wide_model(tmp_path / "m.gguf", kinds)
    assert chosen_for(path, ranks=4).of_stages["down"] is Format.Q4_K
    assert chosen_for(path, ranks=4).of_stages["output"] is Format.WIDE  # 64 of 256 columns each
    path = write_wide_model(tmp_path / "4.gguf", dict.fromkeys(SHAPES, Kind.Q4_0))
    assert chosen_for(path, ranks=4).of_stages["output"] is Format.INT4_G32


@pytest.mark.usefixtures("few_kernels")
def test_formats_without_kernels_are_rounded_with_a_note(tmp_path: Path) -> None:
    path = write_wide_model(tmp_path / "m.gguf", {**dict.fromkeys(SHAPES, Kind.Q4_K), **Q4_K_M})
    for backend, fmt in (("cuda", Format.BF16), ("cpu", Format.Q8)):
        chosen = chosen_for(path, backend)
        assert (chosen.default, chosen.of_stages) == (fmt, {})
        assert len(chosen.notes) == 3
        bits = "16" if backend == "cuda" else "8.5"
        told = f"rounded to {fmt.value}, {bits} bits a weight (output, gate_up) by the {backend} backend."
        assert told in "".join(chosen.notes)
    exact = write_wide_model(tmp_path / "5.gguf", dict.fromkeys((*SHAPES, "token_embd"), Kind.Q5_0))
    assert chosen_for(exact, "cpu") == Chosen(Format.Q8)


@pytest.mark.usefixtures("all_kernels")
def test_a_type_that_is_asked_for_is_for_all_weights(tmp_path: Path) -> None:
    path = write_wide_model(tmp_path / "m.gguf", dict.fromkeys(SHAPES, Kind.Q4_K))
    opened = open_checkpoint(path)
    spec = spec_from_config(opened.config)
    for backend, dtype, fmt in (
        ("cuda", "bf16", Format.BF16),
        ("cpu", "q8", Format.Q8),
        ("cpu", "f32", Format.F32),
    ):
        source, chosen = formats_for(backend, Asked(dtype), spec, opened)
        assert source is opened and chosen == Chosen(fmt)


UNLIKE = {**dict.fromkeys(SHAPES, Kind.Q8_0), "0.attn_q": Kind.BF16, "1.ffn_down": Kind.F16}


def test_cores_say_that_they_round_a_stage_of_codes_and_floats(tmp_path: Path) -> None:
    """One 16-bit tensor among codes, as in the larger files of some publishers. All of it in 32 bits would be slow."""
    opened = open_checkpoint(write_wide_model(tmp_path / "m.gguf", UNLIKE))
    spec = spec_from_config(opened.config)
    chosen = cpu_formats(spec, opened)
    assert (chosen.default, chosen.of_stages) == (Format.Q8, {"head": Format.F16})
    assert chosen.notes == tuple(
        f"Weights stored as {label} are rounded to q8, 8.5 bits a weight ({stage}) by the cpu backend. Use --dtype f32 "
        "to keep their numbers."
        for label, stage in (("bf16 and q8_0", "qkv"), ("f16 and q8_0", "down"))
    )
    assert len(chosen.packed) == 2 * 4  # q, k, v and down of both layers: their error is told
    cores = load_backend("cpu", spec, opened, context=64, dtype="f32")  # as the note says
    exact = load_backend("reference", spec, opened, context=64)
    tokens = [5, 9, 33, 3]
    ours, theirs = (each.logits(tokens, each.new_sequence()) for each in (cores, exact))
    cores.close()
    assert np.linalg.norm(ours - theirs) < 2e-3 * np.linalg.norm(theirs)


def test_a_gpu_says_that_it_rounds_a_stage_of_codes_and_floats(tmp_path: Path) -> None:
    chosen = chosen_for(write_wide_model(tmp_path / "m.gguf", UNLIKE))
    assert chosen.of_stages == {"output": Format.Q8, "gate_up": Format.Q8, "head": Format.F16}
    assert chosen.notes == tuple(
        f"Weights stored as {label} are rounded to bf16, 16 bits a weight ({stage}) by the cuda backend. Use --backend "
        "cpu --dtype f32 to keep their numbers."
        for label, stage in (("bf16 and q8_0", "qkv"), ("f16 and q8_0", "down"))
    )


def test_powers_of_two_beside_bf16_stay_in_16_bits(quantised: Callable[[str], Path], tmp_path: Path) -> None:
    """MXFP4 in one layer and bf16 in another: both are exact in bf16, and nothing is rounded."""
    folder = tmp_path / "mixed"
    shutil.copytree(quantised("mxfp4"), folder)
    opened = open_checkpoint(folder)
    name = "model.layers.1.mlp.down_proj"
    rows = opened.rows(f"{name}.weight", 0, opened.shape(f"{name}.weight")[0])
    tensors = {
        key: ({"uint8": "U8", "float32": "F32"}[values.dtype.name], values)
        for key, values in load_file(folder / "model.safetensors").items()
        if not key.startswith(f"{name}.")
    }
    write_file(folder / "model.safetensors", {**tensors, f"{name}.weight": ("BF16", to_bf16(rows))})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["lm_head", name]
    (folder / "config.json").write_text(json.dumps(config))
    for backend in ("cuda", "cpu"):
        chosen = chosen_for(folder, backend)
        assert chosen.of_stages.get("down", chosen.default) is Format.BF16
        (note,) = (note for note in chosen.notes if "(down)" in note)
        assert note.startswith(
            "Weights stored as bf16 and mxfp4 become bf16, 16 bits a weight (down): no smaller"
        )


@pytest.mark.parametrize("rounds", [True, False])
def test_a_router_is_told_of_where_a_gpu_rounds_it(tmp_path: Path, rounds: bool) -> None:
    """Converters store routers as float32. One that came from a bf16 model loses nothing, and nothing is said."""
    opened = open_checkpoint(make_checkpoint(BY_NAME["qwen3-moe"], tmp_path / "hf", "bfloat16"))
    routers = {name: values for name, values in gguf_tensors(opened).items() if "ffn_gate_inp" in name}
    changed = {name: (Kind.F32, values * np.float32(1.001)) for name, values in routers.items()}
    path = write_gguf_of(tmp_path / "m.gguf", opened, tensors=changed if rounds else None)
    (*told,) = chosen_for(path).notes
    assert (
        told
        == [
            "Weights stored as f32 are rounded to bf16, 16 bits a weight (router) by the cuda backend. Use --backend "
            "cpu --dtype f32 to keep their numbers."
        ]
        * rounds
    )
    assert not chosen_for(path, "cpu").notes


@pytest.mark.parametrize(
    ("kinds", "gpu", "cpu"),
    [
        ({"0.attn_q": Kind.BF16}, "bf16 and f16 are rounded to bf16, 16 bits a weight (qkv)", "(qkv, "),
        (
            dict.fromkeys((*SHAPES, "token_embd"), Kind.F32),
            "f32 are rounded to bf16, 16 bits a weight (qkv, ",
            None,
        ),
        (dict.fromkeys((*SHAPES, "token_embd"), Kind.BF16), None, None),
        ({}, None, None),
    ],
)
def test_floats_that_are_rounded_are_told_of(
    tmp_path: Path, kinds: dict[str, Kind], gpu: str | None, cpu: str | None
) -> None:
    path = write_wide_model(tmp_path / "m.gguf", kinds)
    told = chosen_for(path).notes
    assert len(told) == (gpu is not None)
    assert gpu is None or gpu in told[0]
    on_cores = chosen_for(path, "cpu").notes
    assert not any("rounded" in note for note in on_cores)
    assert len(on_cores) == (cpu is not None)

"""engine/asked.py and loading.py: precision that is asked for, what is told of it, and what cannot be."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from backends.fake_cuda import FakeCuda, fake_gpu
from backends.quantised_cases import WAYS, make_pair
from families import BY_NAME, Case, make_checkpoint
from lane_models import make_laneformer
from monotape.backends.cuda.loading import load_model
from monotape.backends.cuda.rank_view import rank_plan
from monotape.backends.reference.model import ReferenceSequence
from monotape.backends.reference.narrow_kv import TOKENS
from monotape.compiler.gpu import gpu_plan
from monotape.engine.asked import Asked, dtype_format, formats_for
from monotape.engine.formats import Chosen, stage_tensors
from monotape.engine.loading import load_backend
from monotape.errors import UsageError
from monotape.models.registry import spec_from_config
from monotape.plan.formats import Format
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.open import open_checkpoint
from monotape.weights.rounded import RoundedCheckpoint
from weights.gguf_models import SHAPES, write_wide_model

LAYER = ("qkv", "output", "gate_up", "down")
HEAD = "lm_head.weight"


@pytest.fixture
def opened(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(make_checkpoint(BY_NAME["llama"], tmp_path, "bfloat16"))


def asked(
    opened: Checkpoint, backend: str = "cuda", ranks: int | None = None, **names: str
) -> tuple[Checkpoint, Chosen]:
    return formats_for(backend, Asked(**names), spec_from_config(opened.config), opened, ranks)


def test_nothing_is_rounded_that_nobody_asked_for(opened: Checkpoint) -> None:
    for backend in ("cuda", "cpu", "reference"):
        source, chosen = asked(opened, backend)
        assert source is opened and chosen == Chosen(Format.BF16)


@pytest.mark.parametrize(("dtype", "fmt"), [("fp8", Format.FP8), ("int4", Format.INT4_G128)])
def test_layers_are_rounded_and_the_head_stays(opened: Checkpoint, dtype: str, fmt: Format) -> None:
    source, chosen = asked(opened, dtype=dtype)
    assert isinstance(source, RoundedCheckpoint)
    assert (chosen.default, chosen.of_stages) == (Format.BF16, dict.fromkeys(LAYER, fmt))
    assert source.stored_matrix(HEAD) is None and source.stored_as(HEAD) == "bf16"


@pytest.mark.parametrize(
    ("names", "layers", "head"),
    [
        ({"head_dtype": "fp8"}, Format.BF16, Format.FP8),
        ({"dtype": "int4", "head_dtype": "fp8"}, Format.INT4_G128, Format.FP8),
        ({"dtype": "f16", "head_dtype": "int4"}, Format.F16, Format.INT4_G128),
        ({"dtype": "fp8", "head_dtype": "f16"}, Format.FP8, Format.F16),
        ({"dtype": "bf16", "head_dtype": "f16"}, Format.BF16, Format.F16),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_the_head_has_a_type_of_its_own(
    tmp_path: Path, names: dict[str, str], layers: Format, head: Format, tied: bool
) -> None:
    case = Case("head", "llama", {"head_dim": 10, "tie_word_embeddings": tied})
    opened = open_checkpoint(make_checkpoint(case, tmp_path, "bfloat16"))
    source, chosen = asked(opened, **names)
    assert {chosen.of_stages.get(stage, chosen.default) for stage in LAYER} == {layers}
    assert chosen.of_stages.get("head", chosen.default) is head
    name = "model.embed_tokens.weight" if tied else HEAD
    assert (source.stored_matrix(name) is not None) == (head not in (Format.F16, Format.BF16))


def test_weights_of_the_kind_that_is_asked_for_stay_as_they_are(tmp_path: Path) -> None:
    opened = open_checkpoint(write_wide_model(tmp_path / "m.gguf", dict.fromkeys(SHAPES, Kind.Q4_0)))
    source, chosen = asked(opened, dtype="int4")
    assert source is opened and chosen.of_stages["down"] is Format.INT4_G32


def test_weights_that_are_codes_already_are_not_rounded_again(tmp_path: Path) -> None:
    opened = open_checkpoint(write_wide_model(tmp_path / "m.gguf", dict.fromkeys(SHAPES, Kind.Q4_K)))
    with pytest.raises(UsageError, match=r"q_proj\.weight is stored as q4_k: rounding it again") as error:
        asked(opened, dtype="int4")
    assert error.value.hint.startswith("Leave out --dtype")


def test_columns_that_groups_do_not_fit_are_refused(tmp_path: Path) -> None:
    make_laneformer(tmp_path)
    opened = open_checkpoint(tmp_path)
    with pytest.raises(UsageError, match=r"^The matrix output cannot be read as int4"):
        asked(opened, dtype="int4")


@pytest.mark.parametrize(
    ("backend", "names", "message"),
    [
        ("cuda", {"dtype": "f32"}, "The cuda backend has no kernels for f32 weights."),
        ("cpu", {"dtype": "fp8"}, "The cpu backend has no kernels for fp8 weights."),
        ("cuda", {"head_dtype": "float32"}, "The cuda backend has no kernels for float32 weights."),
        ("cuda", {"dtype": "int5"}, "There is no dtype 'int5'."),
        ("cuda", {"head_dtype": "fp9"}, "There is no head dtype 'fp9'."),
        ("cuda", {"kv_dtype": "int4"}, "There is no KV dtype 'int4'."),
        ("cpu", {"kv_dtype": "fp8"}, "The cpu backend keeps keys and values in 16 bits or more, not in fp8."),
        ("hip", {"kv_dtype": "fp8"}, "The hip backend keeps keys and values in 16 bits or more, not in fp8."),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(
    opened: Checkpoint, backend: str, names: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError) as error:
        asked(opened, backend, **names)
    assert error.value.message == message and error.value.hint


def test_the_reference_computes_what_was_rounded_and_the_cost_is_told(
    opened: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    spec = spec_from_config(opened.config)
    with caplog.at_level(logging.WARNING):
        plain = load_backend("reference", spec, opened, context=64)
        assert not caplog.messages
        rounded = load_backend("reference", spec, opened, dtype="int4", head_dtype="fp8", context=64)
    first, second = caplog.messages
    assert first.startswith("Rounded ") and "weights to int4-g128 at load: 4." in first
    assert "to fp8 at load: 8.59 bits a weight, relative error 2." in second
    tokens = [5, 9, 77, 3]
    ours, theirs = (each.logits(tokens, each.new_sequence()) for each in (rounded, plain))
    assert 0.01 < np.linalg.norm(ours - theirs) / np.linalg.norm(theirs) < 0.7


@pytest.mark.parametrize("tied", [False, True])
def test_what_q8_costs_is_told_on_the_cores_too(
    tmp_path: Path, tied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {"hidden_size": 162, "intermediate_size": 320, "head_dim": 32, "tie_word_embeddings": tied}
    opened = open_checkpoint(make_checkpoint(Case("cores", "llama", fields), tmp_path, "bfloat16"))
    spec = spec_from_config(opened.config)
    with caplog.at_level(logging.WARNING):
        load_backend("cpu", spec, opened, context=64).close()
        assert not caplog.messages
        load_backend("cpu", spec, opened, dtype="q8", context=64).close()
    (told,) = caplog.messages
    words = re.fullmatch(
        r"Rounded ([\d,]+) weights to q8 at load: (8\.\d\d) bits a weight, "
        r"relative error (\d\.\d\d) % by a sample of rows\.",
        told,
    )
    assert words is not None, told
    names = [name for names in stage_tensors(spec).values() for name in names]
    exact = [opened.rows(name, 0, opened.shape(name)[0]) for name in names]
    assert int(words[1].replace(",", "")) == sum(rows.size for rows in exact)
    # Groups of 32 along a row, the largest value of each at 127: the error is a third of half a step, squared.
    padded = [np.pad(rows, ((0, 0), (0, -rows.shape[1] % 32))).reshape(-1, 32) for rows in exact]
    errors = sum(float(np.square(np.abs(groups).max(1) / 127).sum()) * 32 / 12 for groups in padded)
    expected = (errors / sum(float(np.square(rows).sum()) for rows in exact)) ** 0.5
    assert 0.8 < float(words[3]) / (100 * expected) < 1.2


def test_what_no_format_holds_is_rounded_and_its_cost_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A CPU's kernels read no FP8. The cost names just the matrices that q8 rounds, and is the true one."""
    opened = open_checkpoint(make_pair(WAYS["fp8-rows"].case, WAYS["fp8-rows"], tmp_path)[0])
    spec = spec_from_config(opened.config)
    with caplog.at_level(logging.WARNING):
        load_backend("cpu", spec, opened, context=64).close()
    words = re.fullmatch(
        r"Rounded ([\d,]+) weights to q8 at load: .* relative error (\d\.\d\d) %.*", caplog.messages[-1]
    )
    assert words is not None, caplog.messages
    stages = stage_tensors(spec)
    del stages["head"]  # of float32, as it is stored
    names = [*(name for names in stages.values() for name in names), "model.embed_tokens.weight"]
    rounded = RoundedCheckpoint(opened, dict.fromkeys(names, Format.Q8))
    exact, made = (
        [checkpoint.rows(name, 0, opened.shape(name)[0]) for name in names]
        for checkpoint in (opened, rounded)
    )
    assert int(words[1].replace(",", "")) == sum(rows.size for rows in exact)
    errors = sum(float(np.square(ours - rows).sum()) for ours, rows in zip(made, exact, strict=True))
    expected = (errors / sum(float(np.square(rows).sum()) for rows in exact)) ** 0.5
    assert 0.8 < float(words[2]) / (100 * expected) < 1.2
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        load_backend("cpu", spec, opened, dtype="f32", context=64).close()
    assert not caplog.messages  # as the note says, nothing is rounded then


def test_a_head_that_is_asked_for_needs_no_note(tmp_path: Path) -> None:
    kinds = dict.fromkeys(SHAPES, Kind.BF16)
    opened = open_checkpoint(write_wide_model(tmp_path / "m.gguf", kinds, Kind.F32))
    _, chosen = asked(opened)
    assert len(chosen.notes) == 1 and "(head)" in chosen.notes[0]
    _, chosen = asked(opened, head_dtype="f16")
    assert chosen.of_stages == {"head": Format.F16} and not chosen.notes


@pytest.mark.parametrize(
    "names", [{"dtype": "int4"}, {"dtype": "int4", "head_dtype": "q8"}, {"head_dtype": "int4"}]
)
@pytest.mark.parametrize("tied", [False, True])
def test_the_cores_compute_what_was_rounded(tmp_path: Path, names: dict[str, str], tied: bool) -> None:
    fields = {"hidden_size": 162, "intermediate_size": 320, "head_dim": 32, "tie_word_embeddings": tied}
    opened = open_checkpoint(make_checkpoint(Case("cores", "llama", fields), tmp_path, "bfloat16"))
    spec = spec_from_config(opened.config)
    cores, exact = (load_backend(name, spec, opened, context=64, **names) for name in ("cpu", "reference"))
    layers, head = (names.get(name, "bf16").replace("int4", "int4-g128") for name in ("dtype", "head_dtype"))
    assert cores.plan.formats == f"{layers}, head {head}"
    tokens = [5, 9, 77, 3]
    ours, theirs = (each.logits(tokens, each.new_sequence()) for each in (cores, exact))
    cores.close()
    assert np.linalg.norm(ours - theirs) < 2e-3 * np.linalg.norm(theirs)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_tied_head_of_codes_loads_onto_gpus(tmp_path: Path, ranks: int) -> None:
    """One GPU reads the embedding off the packed head; several have it as a table of the same numbers, in 16 bits."""
    kinds = {**dict.fromkeys(SHAPES, Kind.Q4_0), "token_embd": Kind.Q8_0}
    opened = open_checkpoint(write_wide_model(tmp_path / "m.gguf", kinds))
    spec = spec_from_config(opened.config)
    _, chosen = formats_for("cuda", Asked(), spec, opened, ranks)
    assert chosen.of_stages["head"] is Format.Q8
    plan = gpu_plan(spec, 3, 64, chosen.default, ranks, stage_formats=chosen.of_stages).plan
    with fake_gpu(FakeCuda()):
        for rank in range(ranks):
            loaded = load_model(spec, rank_plan(plan, rank), opened)
            assert ("embedding" in loaded.memories) == (ranks > 1)
            if ranks > 1:
                words = loaded.memories["embedding"].read(np.empty((spec.vocab, spec.width), np.uint16))
                table = (words.astype(np.uint32) << 16).view(np.float32)
                exact = opened.rows("model.embed_tokens.weight", 0, spec.vocab)
                np.testing.assert_allclose(table, exact, rtol=2**-8)


def test_what_narrow_kv_costs_is_measured_at_load(
    opened: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """By the first layer: the reference that keeps what the message speaks of has that error there."""
    spec = spec_from_config(opened.config)
    count = min(TOKENS, spec.vocab, spec.context)
    tokens = [spec.vocab * i // count for i in range(count)]
    kept = []
    with caplog.at_level(logging.WARNING):
        for name in ("auto", "fp8"):
            backend = load_backend(
                "reference", spec, opened, dtype="f32", kv_dtype=name, context=spec.context
            )
            sequence = backend.new_sequence()
            backend.logits(tokens, sequence)
            assert isinstance(sequence, ReferenceSequence)
            kept.append((sequence.keys[0, :, :count], sequence.values[0, :, :count]))
    (told,) = caplog.messages
    errors = [
        100 * np.linalg.norm(narrow - wide) / np.linalg.norm(wide) for wide, narrow in zip(*kept, strict=True)
    ]
    assert f"relative error {errors[0]:.2f} % of keys and {errors[1]:.2f} % of values" in told
    assert 1.5 < errors[0] < 4 and 1.5 < errors[1] < 4


@pytest.mark.parametrize(
    ("given", "hint"), [("foo", "Known: auto, f32"), ("int5", "Did you mean 'int8'? Known: ")]
)
def test_a_name_that_is_far_from_all_is_not_guessed(given: str, hint: str) -> None:
    """`--dtype foo` was asked whether it meant float32."""
    with pytest.raises(UsageError) as caught:
        dtype_format(given)
    assert caught.value.hint.startswith(hint)

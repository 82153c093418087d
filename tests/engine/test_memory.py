"""engine/memory.py: a model that does not fit is refused with the numbers, and the hint names a way that does fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from families import BY_NAME, Case, make_checkpoint
from monotape import LLM
from monotape.engine import loading
from monotape.engine.loading import load_backend
from monotape.engine.memory import Need, require_memory
from monotape.errors import ResourceError
from monotape.models.registry import spec_from_config
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.open import open_checkpoint
from weights.gguf_models import SHAPES, write_wide_model

NEED = Need(weights=10 * 10**9, position=10**6, context=8192)


def refusal(need: Need, available: int, *others: tuple[str, Need]) -> ResourceError:
    with pytest.raises(ResourceError) as caught:
        require_memory(need, available, others)
    return caught.value


def test_what_fits_is_not_refused_and_no_other_setting_is_looked_at() -> None:
    def others() -> object:
        raise AssertionError

    for available in (None, NEED.weights + NEED.kv):
        require_memory(NEED, available, (others() for _ in range(1)))  # type: ignore[misc]


def test_too_long_a_context_is_refused_with_one_that_fits() -> None:
    error = refusal(NEED, NEED.weights + NEED.kv - 1, ("Use --dtype q8", Need(5 * 10**9, 10**6, 8192)))
    assert error.message == (
        "Weights and KV need 18.19 GB of memory and 18.19 GB are available: weights 10.00, KV of 8,192 positions 8.19."
    )
    assert error.hint == "Use --max-model-len 7936, or free some memory."


@pytest.mark.parametrize(
    ("weights", "hint"),
    [
        ((20, 9, 1), "Use a: the weights take 1.00 GB then. Or free some memory."),
        ((20, 4, 1), "Use b and --max-model-len 768: the weights take 4.00 GB then. Or free some memory."),
        ((4, 3, 1), "Leave: the weights take 4.00 GB then. Or free some memory."),
        ((20, 19, 18), "Use a smaller model, or free some memory."),
        ((10, 10, 10), "Use a smaller model, or free some memory."),
    ],
)
def test_a_type_is_proposed_only_where_the_model_fits_with_it(weights: tuple[int, ...], hint: str) -> None:
    """The first that fits; one that takes more memory than now is never proposed."""
    positions = (1, 10**6, 1)
    others = [
        (name, Need(size * 10**9, position, 8192))
        for name, size, position in zip(("Leave", "Use b", "Use a"), weights, positions, strict=True)
    ]
    assert refusal(NEED, 5 * 10**9, *others).hint == hint


def refused(
    monkeypatch: pytest.MonkeyPatch, available: int, opened: Checkpoint, backend: str = "cpu", **more: object
) -> str:
    monkeypatch.setattr(loading, "available_memory", lambda: available)
    with pytest.raises(ResourceError) as caught:
        load_backend(backend, spec_from_config(opened.config), opened, workers=2, **more)  # type: ignore[arg-type]
    return caught.value.hint


def test_codes_of_four_bits_are_not_told_to_take_eight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_checkpoint(write_wide_model(tmp_path / "m.gguf", dict.fromkeys(SHAPES, Kind.Q4_K)))
    backend = load_backend("cpu", spec_from_config(opened.config), opened, context=64, workers=2)
    weights = Need.of(backend.plan).weights  # type: ignore[arg-type]
    backend.close()
    for available in (1000, weights - 1):
        hint = refused(monkeypatch, available, opened, context=64)
        assert hint == "Use a smaller model, or free some memory."


@pytest.mark.parametrize(
    ("dtype", "remedy", "setting"),
    [
        ("auto", "q8", "Use --dtype q8"),
        ("f32", "auto", "Leave out --dtype"),
        ("q8", "int4", "Use --dtype int4"),
    ],
)
def test_the_remedy_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, remedy: str, setting: str
) -> None:
    """Just the memory that the remedy needs: then it is what the hint names, and it loads."""
    fields = {"hidden_size": 162, "intermediate_size": 320, "head_dim": 32}
    opened = open_checkpoint(make_checkpoint(Case("memory", "llama", fields), tmp_path, "bfloat16"))
    spec = spec_from_config(opened.config)
    backend = load_backend("cpu", spec, opened, context=96, workers=2, dtype=remedy)
    need = Need.of(backend.plan)  # type: ignore[arg-type]
    backend.close()
    available = need.weights + need.kv
    hint = refused(monkeypatch, available, opened, context=96, dtype=dtype)
    assert hint.startswith(f"{setting}: the weights take ")
    load_backend("cpu", spec, opened, context=96, workers=2, dtype=remedy).close()
    assert setting not in refused(monkeypatch, available - 1, opened, context=96, dtype=dtype)


def test_the_kv_of_the_context_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("long", "llama", {"head_dim": 32, "max_position_embeddings": 4096})
    opened = open_checkpoint(make_checkpoint(case, tmp_path))
    spec = spec_from_config(opened.config)
    for backend in ("cpu", "reference"):
        position = 2 * 4 * spec.layers * spec.kv_heads * spec.head_dim
        weights = 4 * spec.parameters
        if backend == "cpu":
            loaded = load_backend("cpu", spec, opened, context=4096, workers=2)
            weights = Need.of(loaded.plan).weights  # type: ignore[arg-type]
            loaded.close()
        hint = refused(monkeypatch, weights + 1100 * position, opened, backend, context=4096)
        assert hint == "Use --max-model-len 1024, or free some memory."
        load_backend(backend, spec, opened, context=1024, workers=2).close()


def test_a_context_that_nobody_asked_for_refuses_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its KV is taken as conversations grow."""
    case = Case("long", "llama", {"head_dim": 32, "max_position_embeddings": 4096})
    folder = make_checkpoint(case, tmp_path)
    needs = {}
    for asked in (None, 512):
        with LLM(str(folder), backend="cpu", workers=2, max_model_len=asked, progress=False) as llm:
            needs[asked] = Need.of(llm.backend.plan, 256)
    available = needs[None].weights + needs[None].kv
    monkeypatch.setattr(loading, "available_memory", lambda: available)
    with LLM(str(folder), backend="cpu", workers=2, progress=False) as llm:
        assert llm.max_model_len == 4096
    available -= 1
    with pytest.raises(ResourceError, match="KV of 256 positions"):
        LLM(str(folder), backend="cpu", workers=2, progress=False)
    available = needs[512].weights + needs[512].kv
    with pytest.raises(ResourceError, match="KV of 512 positions"):
        LLM(str(folder), backend="cpu", workers=2, max_model_len=512, progress=False)


def test_the_reference_is_told_of_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_checkpoint(make_checkpoint(BY_NAME["llama"], tmp_path, "bfloat16"))
    spec = spec_from_config(opened.config)
    hint = refused(monkeypatch, 4 * spec.parameters - 1, opened, "reference", context=64)
    assert hint.startswith("Use --backend cpu: the weights take ")

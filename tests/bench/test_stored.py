"""Files as they are stored: ways of loading them, the peer's process, and the tables that are made of a report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from claims import claims_in
from llamacpp import LlamaCpp
from monotape.weights.open import open_checkpoint
from stored import STORED, WAYS, Settings, Unpacked, Way, chosen_ways, load, speeds, with_ceiling
from stored_table import BEGIN, END, stored_cpu, summary, with_stored
from weights.gguf_models import SHAPES, write_wide_model

FAKE = """
llama_token = __import__("ctypes").c_int32
__version__ = "1.2.3"
chosen = []
def _nothing(*arguments): return 1
llama_backend_init = llama_model_load_from_file = llama_get_memory = llama_sampler_init_greedy = _nothing
llama_model_default_params = llama_memory_clear = _nothing
class _Settings: pass
llama_context_default_params = _Settings
def llama_init_from_model(model, settings):
    assert (settings.n_ctx, settings.n_threads) == (3 + 5 + 16, 2)
    return 1
def llama_batch_get_one(ids, count): return list(ids)
def llama_decode(context, batch):
    assert batch == ([4, 5, 6] if len(chosen) % 5 == 0 else [len(chosen)]), (batch, chosen)
    return 0
def llama_sampler_sample(sampler, context, index):
    chosen.append(index)
    return len(chosen)
def llama_print_system_info(): return b"AVX2 = 1 | "
"""


def test_the_peer_decodes_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama_cpp.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    peer = LlamaCpp(Path(sys.executable), Path("model.gguf"), (4, 5, 6), tokens=5, threads=2)
    assert peer.facts == {"version": "1.2.3", "system": "AVX2 = 1 |"}
    assert peer.speed() > 0 and peer.speed() > 0
    peer.close()


def test_a_peer_that_is_not_installed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama_cpp.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"llama\.cpp ended with status 1"):
        LlamaCpp(Path(sys.executable), Path("model.gguf"), (4, 5, 6), tokens=5, threads=2)


def result(weights: str, **more: Any) -> dict[str, Any]:
    row = {
        "model": "SmolLM2-135M-Instruct.Q4_1.gguf", "weights": weights, "formats": "q4_1, head q8",
        "bytes_per_token": 100_000_000, "perplexity": 20.125, "same_token_share": 0.975, "divergence_nats": 0.00123,
        "tokens_per_second": {"median": 150.0, "min": 140.0, "max": 155.0, "runs": 7}, **more,
    }  # fmt: skip
    return with_ceiling(row, 20e9)


def report(times: float = 1.25) -> dict[str, Any]:
    peer = {"median": 150 / times, "min": 100.0, "max": 200.0, "runs": 7}
    more = {"llamacpp_tokens_per_second": peer, "monotape_times_as_fast": times}
    rows = [result("f32"), result("as stored", **more), result("int4, head q8")]
    return {"name": "stored-cpu-x86_64", "workers": 2, "machine": {"processor": "Some CPU"}, "results": rows}


def test_the_reference_has_no_speed() -> None:
    row = {"weights": "f32", "bytes_per_token": 3}
    assert with_ceiling(row, 20e9) == row


def test_a_share_is_of_the_bandwidth_of_the_run() -> None:
    row = result("as stored")
    assert (row["ceiling_tokens_per_second"], row["bandwidth_share"]) == (200, 0.75)


@pytest.mark.parametrize(
    ("times", "engine", "speed"), [(1.25, "Monotape", "120 tok/s"), (0.8, "llama.cpp", "188 tok/s")]
)
def test_the_readme_says_which_engine_is_ahead(times: float, engine: str, speed: str) -> None:
    text = summary({"stored-cpu-x86_64.json": report(times)})
    assert f"{engine} is ahead with SmolLM2-135M." in text and "2 cores of Some CPU" in text
    assert (
        f"| SmolLM2-135M, Q4_1 | as stored | 100 MB | 150 tok/s | 75.0 % | {speed} | 20.12 | 97.5 % |" in text
    )
    assert "| SmolLM2-135M, Q4_1 | int4, head q8 | 100 MB | 150 tok/s | 75.0 % |  | 20.12 | 97.5 % |" in text
    assert "| f32 |" not in text
    assert "rows with int4 round the unpacked file" in text


def test_without_a_peer_no_engine_is_ahead() -> None:
    one = report()
    one["results"] = [result("f32"), result("as stored")]
    text = summary({"stored-cpu-x86_64.json": one})
    assert "llama.cpp is" not in text and "int4" not in text


def test_the_page_has_a_row_for_each_way() -> None:
    text = stored_cpu({"stored-cpu-x86_64.json": report(), "decode-cpu-x.json": {}})
    assert text.count("\n| SmolLM2") == 3
    assert (
        "| as stored | q4_1, head q8 | 100 MB | 150 tok/s | 200 tok/s | 75.0 % | 120 tok/s, 1.25x | 20.12 |"
        in text
    )
    assert "97.5 % | 1.2e-03 |" in text and "weights=int4*head*q8]:" in text


def test_links_name_a_field_for_every_number() -> None:
    for text, document in ((stored_cpu, "docs/performance.md"), (summary, "README.md")):
        claims = list(claims_in(document, text({"stored-cpu-x86_64.json": report()})))
        assert claims and all(getattr(claim, "field", "") for claim in claims)


def test_the_table_is_written_between_its_lines() -> None:
    reports = {"stored-cpu-x86_64.json": report()}
    written = with_stored(f"a\n{BEGIN}old\n{END}\nb\n", reports)
    assert "old" not in written and written.startswith("a\n") and written.endswith(f"{END}\nb\n")
    assert with_stored(written, reports) == written
    with pytest.raises(SystemExit, match="no place for stored formats"):
        with_stored("nothing", reports)


def test_float32_is_always_the_first_way() -> None:
    assert chosen_ways("as stored") == [WAYS[0], STORED]
    assert [way.name for way in chosen_ways("int4,f32")] == ["f32", "int4, head q8"]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_every_way_loads_a_file_of_codes(tmp_path: Path, way: Way) -> None:
    kinds = {**dict.fromkeys(SHAPES, Kind.Q4_1), "token_embd": Kind.Q8_0}
    checkpoint = open_checkpoint(write_wide_model(tmp_path / "m.gguf", kinds))
    backend = load(checkpoint, way, Settings(tokens=4, rounds=1, ids=(1, 2, 3)))
    expected = {"as stored": "q4_1, head q8", "int4, head q8": "int4-g128, head q8"}
    assert backend.plan.formats == expected.get(way.name, way.name)
    ours, theirs = speeds(backend, Settings(tokens=4, rounds=2, ids=()), None)
    assert len(ours) == 2 and theirs == []
    backend.close()


def test_unpacked_values_are_those_of_the_file(tmp_path: Path) -> None:
    plain = open_checkpoint(write_wide_model(tmp_path / "m.gguf", dict.fromkeys(SHAPES, Kind.Q4_K)))
    unpacked = Unpacked(plain)
    for name in plain.names:
        rows = plain.shape(name)[0]
        assert np.array_equal(unpacked.rows(name, 0, rows), plain.rows(name, 0, rows))
        assert unpacked.stored_as(name) in ("f32", "f16") and unpacked.stored_matrix(name) is None

"""The monokernel on a Hopper GPU: python -m pytest -m gpu tests/backends/test_cuda_gpu.py"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from backends.cpu_cases import distance, ids, reference, take_until_cancelled
from families import Case, make_checkpoint
from monotape.backends.cuda.backend import CudaBackend
from monotape.backends.cuda.detection import why_not
from monotape.backends.cuda.driver import memory_free_and_total, processors
from monotape.backends.cuda.generation import CudaGeneration
from monotape.backends.cuda.params import place_table
from monotape.backends.cuda.trace import token_s
from monotape.backends.protocol import Job
from monotape.compiler.gpu import Tuning, gpu_plan
from monotape.errors import BackendError, DeadlineFault, NumericalFault
from monotape.models.registry import spec_from_config
from monotape.plan.formats import Format
from monotape.weights.open import open_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_not() is not None, reason=why_not() or "there is no GPU"),
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),
]

CONTEXT = 512
LONG = {"max_position_embeddings": 600}
CASES = {
    case.name: case
    for case in (
        Case("tied", "llama", {"head_dim": 16, "hidden_size": 96, "tie_word_embeddings": True, **LONG}),
        Case("odd", "llama", {"head_dim": 48, "hidden_size": 54, **LONG}),
        Case("qk-norm", "qwen3", {"head_dim": 32, "hidden_size": 66, "tie_word_embeddings": True, **LONG}),
        Case("bias", "qwen2", {"hidden_size": 96, **LONG}),
        Case("window", "mistral", {"head_dim": 64, "sliding_window": 100, **LONG}),
        Case("wide", "llama", {"head_dim": 128, **LONG}),
    )
}
TOKENS = np.random.default_rng(5).integers(3, 131, 300).tolist()  # several splits of the context
PATHS = {"rows": None, "token by token": 0}  # how the prompt is taken: the chunk
Logits = NDArray[np.float32]
Load = Callable[..., CudaBackend]


def load(
    folder: Path, workers: int | None = None, fmt: Format = Format.BF16, context: int = CONTEXT,
    tuning: Tuning | None = None,
) -> CudaBackend:  # fmt: skip
    checkpoint = open_checkpoint(folder)
    spec = spec_from_config(checkpoint.config)
    plan = gpu_plan(spec, workers or processors(), context, fmt, tuning=tuning)
    return CudaBackend.load(spec, plan, checkpoint)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = make_checkpoint(CASES[name], tmp_path_factory.mktemp(name))
        return made[name]

    return folder


@pytest.fixture(scope="module")
def loaded(folder_of: Callable[[str], Path]) -> Load:
    """Backends that tests share, because each shape takes its time to compile."""
    made: dict[tuple[str, int | None], CudaBackend] = {}

    def backend(name: str, workers: int | None = None) -> CudaBackend:
        if (name, workers) not in made:
            made[name, workers] = load(folder_of(name), workers)
        return made[name, workers]

    return backend


@pytest.fixture(scope="module")
def limits(folder_of: Callable[[str], Path]) -> Callable[[str], tuple[Logits, float]]:
    """The exact logits of a case, and twice how far an honest evaluation is from them."""
    known: dict[str, tuple[Logits, float]] = {}

    def limit(name: str) -> tuple[Logits, float]:
        if name not in known:
            want = reference(folder_of(name), CONTEXT)
            exact = want.logits(TOKENS, want.new_sequence())
            known[name] = exact, 2 * distance(honest(folder_of(name), "bfloat16"), exact)
        return known[name]

    return limit


def honest(folder: Path, dtype: str, tokens: Sequence[int] = TOKENS) -> Logits:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="eager"
    )
    with torch.no_grad():
        logits: Logits = model(torch.tensor([tokens])).logits[0].float().numpy()
    return logits


def works(backend: CudaBackend) -> bool:
    generation = backend.start(Job(tuple(TOKENS[:5]), 0, 6), backend.new_sequence())
    return len(list(generation)) == 6 and generation.finish_reason == "length"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("workers", [None, 7])
@pytest.mark.parametrize("name", CASES)
def test_no_worse_than_twice_an_honest_evaluation(
    loaded: Load, limits: Any, name: str, workers: int | None, path: str
) -> None:
    exact, limit = limits(name)
    backend = loaded(name, workers)
    assert distance(backend.logits(TOKENS, backend.new_sequence(), PATHS[path]), exact) <= limit


@pytest.mark.parametrize("name", CASES)
def test_rows_in_several_chunks(loaded: Load, limits: Any, name: str) -> None:
    exact, limit = limits(name)
    backend = loaded(name)
    assert distance(backend.logits(TOKENS, backend.new_sequence(), chunk=128), exact) <= limit


@pytest.mark.parametrize("kv_heads", [1, 2, 3])
def test_attention_over_all_workers(tmp_path: Path, kv_heads: int) -> None:
    """A unit is enough for a worker here: late every worker has one, but for a few left over, then some have two."""
    length, late = processors() // kv_heads * 32 + 40, 60
    fields = {"head_dim": 48, "num_attention_heads": 6, "num_key_value_heads": kv_heads, "hidden_size": 96}
    case = Case("shared", "llama", {**fields, "max_position_embeddings": length + 1})
    folder = make_checkpoint(case, tmp_path)
    tokens = np.random.default_rng(7).integers(3, 131, length).tolist()
    want = reference(folder, length)
    exact = want.logits(tokens, want.new_sequence())[-late:]
    limit = 2 * distance(honest(folder, "bfloat16", tokens)[-late:], exact)
    backend, seen = load(folder, context=length, tuning=Tuning(units_per_split=1)), []
    for _ in range(3):
        sequence = backend.new_sequence()
        backend.logits(tokens[:-late], sequence)
        seen.append(backend.logits(tokens[-late:], sequence, chunk=0))
    assert distance(seen[0], exact) <= limit
    assert np.array_equal(seen[0], seen[1]) and np.array_equal(seen[0], seen[2])


def test_fp16_weights(tmp_path: Path) -> None:
    folder = make_checkpoint(CASES["odd"], tmp_path, "float16")
    want = reference(folder, CONTEXT)
    exact = want.logits(TOKENS, want.new_sequence())
    limit = 2 * distance(honest(folder, "float16"), exact)
    backend = load(folder, fmt=Format.F16)
    for chunk in PATHS.values():
        assert distance(backend.logits(TOKENS, backend.new_sequence(), chunk), exact) <= limit


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("workers", [None, 7, 61])
@pytest.mark.parametrize("name", ["odd", "window"])
def test_bits_repeat(loaded: Load, name: str, workers: int | None, path: str) -> None:
    backend = loaded(name, workers)
    first, *others = (backend.logits(TOKENS, backend.new_sequence(), PATHS[path]) for _ in range(3))
    assert all(np.array_equal(first, other) for other in others)
    runs = [
        ids(
            list(CudaGeneration(backend, Job(tuple(TOKENS[:40]), 0, 80), backend.new_sequence(), PATHS[path]))
        )
        for _ in range(3)
    ]
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_are_the_best_of_the_logits(loaded: Load, limits: Any, name: str) -> None:
    """What decoding after a prefill chose is what the path of decoding calls best, up to rounding of the prefill."""
    backend = loaded(name)
    prompt = TOKENS[:150]
    chosen = ids(list(backend.start(Job(tuple(prompt), 0, 60), backend.new_sequence())))
    logits = backend.logits([*prompt, *chosen[:-1]], backend.new_sequence(), chunk=0)[len(prompt) - 1 :]
    behind = logits.max(axis=1) - logits[np.arange(60), chosen]
    assert (behind <= limits(name)[1] * np.linalg.norm(logits, axis=1)).all()


@pytest.mark.parametrize("name", CASES)
def test_decoding_after_a_prefill_goes_on_identically(loaded: Load, name: str) -> None:
    """In one request or in two, if the second begins with the one token whose KV is missing."""
    backend, prompt = loaded(name), tuple(TOKENS[:150])
    whole = ids(list(backend.start(Job(prompt, 0, 90), backend.new_sequence())))
    sequence = backend.new_sequence()
    first = ids(list(backend.start(Job(prompt, 0, 37), sequence)))
    assert sequence.length == 150 + 36
    rest = ids(list(CudaGeneration(backend, Job((*prompt, *first), sequence.length, 53), sequence, chunk=0)))
    assert [*first, *rest] == whole


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", CASES)
def test_a_second_turn_equals_one_long_prompt(loaded: Load, limits: Any, name: str, path: str) -> None:
    backend, chunk = loaded(name), PATHS[path]
    exact, limit = limits(name)
    sequence = backend.new_sequence()
    pieces = [
        backend.logits(TOKENS[start:stop], sequence, chunk)
        for start, stop in ((0, 133), (133, 134), (134, 300))
    ]
    assert sequence.length == 300
    turns = np.concatenate(pieces)
    assert distance(turns, exact) <= limit
    if path == "token by token":
        assert np.array_equal(turns, backend.logits(TOKENS, backend.new_sequence(), chunk))


def test_one_launch_a_request_with_times_on_one_clock(loaded: Load) -> None:
    backend = loaded("tied")
    sequence, before = backend.new_sequence(), backend.kernel.launches
    for turn in range(3):
        generation = backend.start(Job(tuple(TOKENS[: 9 + 40 * turn]), sequence.length, 30), sequence)
        times = [generation.start_ns, *(token.time_ns for token in generation)]
        assert len(times) == 31 and all(earlier < later for earlier, later in pairwise(times))
        assert times[-1] - times[0] < 10**9
        assert generation.finish_reason == "length"
        sequence.truncate(9)
        assert backend.kernel.launches == before + turn + 1


def test_a_stop_id_ends_the_request_and_is_its_last_token(loaded: Load) -> None:
    backend, prompt = loaded("tied"), tuple(TOKENS[:20])
    free = ids(list(backend.start(Job(prompt, 0, 40), backend.new_sequence())))
    generation = backend.start(Job(prompt, 0, 40, (130, free[10])), backend.new_sequence())
    assert ids(list(generation)) == free[: free.index(free[10]) + 1]
    assert generation.finish_reason == "stop"


@pytest.mark.parametrize("path", PATHS)
def test_a_missing_word_hits_its_deadline_and_names_itself(
    folder_of: Callable[[str], Path], loaded: Load, path: str
) -> None:
    """A worker that publishes nothing in one stage: the others end, name a wait, and leave the process usable."""
    backend = load(folder_of("tied"))
    backend._params.deadline_ns = 200_000_000
    backend.lose_word_of("gate_up")
    generation = CudaGeneration(backend, Job(tuple(TOKENS[:5]), 0, 5), backend.new_sequence(), PATHS[path])
    expected = (
        r"Worker \d+ waited too long for word \d+ of the input of stage down in layer 0, at position \d+\."
    )
    with pytest.raises(DeadlineFault, match=expected):
        list(generation)
    assert works(loaded("tied"))


@pytest.mark.parametrize("after", [0, 1, 100])
def test_cancel_ends_the_kernel_and_the_backend_goes_on(loaded: Load, after: int) -> None:
    backend, sequence = loaded("tied"), loaded("tied").new_sequence()
    generation = backend.start(Job(tuple(TOKENS[:40]), 0, CONTEXT - 40), sequence)
    seen = take_until_cancelled(generation, after)
    assert generation.finish_reason == "cancelled"
    assert after <= seen < CONTEXT - 40
    assert sequence.length == (40 + seen - 1 if seen else generation.filled)
    assert works(backend)


@pytest.mark.parametrize("path", PATHS)
def test_a_long_prefill_can_be_cancelled(loaded: Load, path: str) -> None:
    backend, sequence = loaded("wide"), loaded("wide").new_sequence()
    backend.logits(TOKENS[:7], sequence)
    prompt = (*TOKENS, *TOKENS[:190])
    generation = CudaGeneration(backend, Job(prompt, 7, 1), sequence, PATHS[path])
    generation.cancel()
    seen = len(list(generation))
    cancelled = [
        ("cancelled", 0, length) for length in (7, 490)
    ]  # before the one chunk was complete, or after
    assert (generation.finish_reason, seen, sequence.length) in (*cancelled, ("length", 1, 490))
    assert works(backend)


def test_a_cancelled_prefill_keeps_whole_chunks_and_a_retry_goes_on_there(loaded: Load) -> None:
    """In chunks of eight rows, so that there is something to cancel."""
    backend, prompt = loaded("wide"), (*TOKENS, *TOKENS[:190])
    job, kept = Job(prompt, 0, 9, logprobs=3), set()
    whole = answers(CudaGeneration(backend, job, backend.new_sequence(), 8))
    for pause_us in range(0, 4000, 200):
        sequence = backend.new_sequence()
        generation = CudaGeneration(backend, job, sequence, 8)
        time.sleep(1e-6 * pause_us)
        generation.cancel()
        if not list(generation) and sequence.length < len(prompt):
            assert sequence.length % 8 == 0
            kept.add(sequence.length)
            retry = replace(job, cached=sequence.length)
            assert answers(CudaGeneration(backend, retry, sequence, 8)) == whole
    assert len(kept) > 1


def answers(generation: CudaGeneration) -> list[tuple[int, float | None]]:
    return [(token.id, token.logprob) for token in generation]


def test_who_leaves_half_way_leaves_no_kernel_running(loaded: Load) -> None:
    backend = loaded("tied")
    for _ in backend.start(Job(tuple(TOKENS[:5]), 0, 500), backend.new_sequence()):
        break
    assert works(backend)
    backend.start(Job(tuple(TOKENS[:5]), 0, 500), backend.new_sequence())
    assert works(backend)


def test_one_job_at_a_time(loaded: Load) -> None:
    backend = loaded("wide")
    running = backend.start(Job(tuple(TOKENS[:5]), 0, 500), backend.new_sequence())
    with pytest.raises(BackendError, match="one job at a time"):
        backend.start(Job(tuple(TOKENS[:5]), 0, 1), backend.new_sequence())
    assert len(list(running)) == 500


@pytest.mark.parametrize(("stage", "layer"), [("qkv", 1), ("down", 1), ("head", 3)])
def test_a_nan_in_the_weights_is_a_fault_that_says_where(
    folder_of: Callable[[str], Path], stage: str, layer: int
) -> None:
    backend = load(folder_of("odd"))
    places, first = place_table(backend.plan)
    index = [item.name for item in backend.plan.ranks[0].stages].index(stage)
    start, stride = places[first[index] + backend.plan.ranks[0].stages[index].tiles - 1].tolist()
    poison = np.full(256, 0x7FC0, np.uint16)  # a whole block of the stage's last tile
    backend._memories["tapes"].write(poison, start + stride * layer)
    where = "Stage head" if stage == "head" else f"Stage {stage} of layer {layer}"
    sequence = backend.new_sequence()
    with pytest.raises(NumericalFault, match=where):
        list(CudaGeneration(backend, Job(tuple(TOKENS[:5]), 0, 5), sequence, chunk=0))
    with pytest.raises(NumericalFault, match="not numbers"):
        list(backend.start(Job(tuple(TOKENS[:50]), 0, 5), sequence))
    assert sequence.length == 0


@pytest.mark.parametrize("length", [1, 300, 511])
@pytest.mark.parametrize("name", ["odd", "window"])
def test_a_context_can_be_filled_to_its_last_position(loaded: Load, name: str, length: int) -> None:
    backend, sequence = loaded(name), loaded(name).new_sequence()
    prompt = tuple((TOKENS * 2)[:length])
    generation = backend.start(Job(prompt, 0, CONTEXT - length), sequence)
    assert len(list(generation)) == CONTEXT - length
    assert (generation.finish_reason, sequence.length) == ("length", CONTEXT - 1)


def test_many_requests_leave_memory_flat(loaded: Load) -> None:
    backend = loaded("tied")
    assert works(backend)
    gc.collect()
    before, launches = memory_free_and_total()[0], backend.kernel.launches
    expected = ids(list(backend.start(Job(tuple(TOKENS[:33]), 0, 5), backend.new_sequence())))
    for _ in range(199):
        assert ids(list(backend.start(Job(tuple(TOKENS[:33]), 0, 5), backend.new_sequence()))) == expected
    gc.collect()
    assert memory_free_and_total()[0] >= before
    assert backend.kernel.launches == launches + 200


def test_a_trace_shows_every_stage_of_every_token(loaded: Load) -> None:
    backend = loaded("tied")
    launches = backend.kernel.launches
    trace = backend.trace(TOKENS[:280], 3)
    records = trace.records
    assert set(records["token"].tolist()) == {0, 1, 2}
    stages = backend.gpu_rank.stage_names
    assert {stages[number] for number in records["stage"].tolist()} == set(stages[:8])
    assert set(records["layer"].tolist()) == set(range(backend.spec.layers + 1))
    assert (records["start_ns"] <= records["end_ns"]).all()
    assert (records["waited_ns"] >= 0).all()
    assert 1e-6 < token_s(trace) < 1e-2
    assert backend.kernel.launches == launches and works(backend)

"""Ranks that share a Hopper GPU: python -m pytest -m gpu tests/backends/test_cuda_ranks_gpu.py"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from backends.cpu_cases import ids, reference
from backends.test_cuda_gpu import distance
from families import Case, make_checkpoint
from lane_models import make_laneformer
from monotape.backends.cuda.detection import why_not
from monotape.backends.cuda.driver import compile_kernel, processors
from monotape.backends.cuda.generation import CudaGeneration
from monotape.backends.cuda.header import plan_header
from monotape.backends.cuda.ranked import RankedCudaBackend
from monotape.backends.protocol import Job, Sampling
from monotape.backends.reference.sampler import choose
from monotape.compiler.gpu import gpu_plan
from monotape.errors import DeadlineFault
from monotape.models.registry import spec_from_config
from monotape.weights.open import open_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_not() is not None, reason=why_not() or "there is no GPU"),
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),
]

CONTEXT = 256
#: Eight ranks share eight heads; a KV head of four is on two ranks.
PLAIN = Case(
    "gpu-ranks", "llama",
    {
        "hidden_size": 264, "head_dim": 32, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 256,
        "intermediate_size": 512, "max_position_embeddings": 600, "num_hidden_layers": 3,
    },
)  # fmt: skip
LANES = {
    "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 256,
    "intermediate_size": 512, "max_position_embeddings": 600, "num_hidden_layers": 4, "num_lanes": 8,
    "sliding_window": 40,
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "delay 2": {"num_lanes": 4},
    "delay 4 of eight": {"broadcast_delay": 2},
    "ladder": {
        "broadcast_delay": None,
        "broadcast_delay_modules": 1,
        "ladder_residual": True,
        "num_lanes": 2,
    },
    "silent": {"use_comm": False},
}
TOKENS = tuple(np.random.default_rng(5).integers(3, 256, 90).tolist())
Logits = NDArray[np.float32]
DEADLINE_NS = 300_000_000
PATHS = {"rows": None, "rows, a few at a time": 24, "token by token": 0}  # how the prompt is taken: the chunk
TOLERANCE = 0.04  # of the logits' norm: activations are rounded to bf16 between stages


@dataclass(frozen=True)
class Places:
    """Checkpoints and backends that tests share, because each shape takes its time to compile."""

    folder: Callable[[str], Path]
    load: Callable[..., RankedCudaBackend]
    honest: Callable[[str], Logits]  # what PyTorch gives in bf16


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    folders: dict[str, Path] = {}
    lanes: dict[str, Any] = {}  # the modules that checkpoints came from
    loaded: dict[tuple[str, int | None], RankedCudaBackend] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            place = folders[name] = tmp_path_factory.mktemp("ranks")
            if name == "plain":
                make_checkpoint(PLAIN, place)
            else:
                lanes[name] = make_laneformer(place, **{**LANES, **SETTINGS[name]})
        return folders[name]

    def honest(name: str) -> Logits:
        import torch
        from transformers import AutoModelForCausalLM

        place, tokens = folder(name), torch.tensor([TOKENS])
        with torch.no_grad():
            if name in lanes:
                return np.asarray(lanes[name].bfloat16()(tokens)[0].float().numpy())
            model = AutoModelForCausalLM.from_pretrained(
                place, dtype=torch.bfloat16, attn_implementation="eager"
            )
            return np.asarray(model(tokens).logits[0].float().numpy())

    with ExitStack() as stack:

        def load(name: str, ranks: int | None = None) -> RankedCudaBackend:
            if (name, ranks) not in loaded:
                checkpoint = open_checkpoint(folder(name))
                spec = spec_from_config(checkpoint.config)
                count = ranks or (spec.lanes.count if spec.lanes else 1)
                plan = gpu_plan(spec, processors() // count, CONTEXT, tp=ranks)
                backend = RankedCudaBackend.load(spec, plan, checkpoint, devices=[0] * count)
                for rank in backend.ranks:
                    rank._params.deadline_ns = DEADLINE_NS
                stack.callback(backend.close)
                loaded[name, ranks] = backend
            return loaded[name, ranks]

        compile_all(folder)
        yield Places(folder, load, honest)


def compile_all(folder: Callable[[str], Path]) -> None:
    """All kernels at once: one takes some ten seconds, and the GPU waits for it."""
    headers = []
    for name, ranks in [("plain", 2), ("plain", 4), ("plain", 8), *((name, None) for name in SETTINGS)]:
        spec = spec_from_config(open_checkpoint(folder(name)).config)
        count = ranks or (spec.lanes.count if spec.lanes else 1)
        headers.append(plan_header(gpu_plan(spec, processors() // count, CONTEXT, tp=ranks)))
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_kernel, headers))


def three_runs_agree(places: Places, name: str, ranks: int | None, path: str) -> None:
    """With the reference as well as an honest evaluation does, or half as well; with each other to the last bit."""
    want, backend = reference(places.folder(name), CONTEXT, tp=ranks), places.load(name, ranks)
    exact = want.logits(TOKENS, want.new_sequence())
    runs = [backend.logits(TOKENS, backend.new_sequence(), PATHS[path]) for _ in range(3)]
    assert distance(runs[0], exact) <= 2 * distance(places.honest(name), exact)
    assert np.array_equal(runs[0], runs[1])
    assert np.array_equal(runs[0], runs[2])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_tensor_parallelism_gives_the_logits_of_the_reference(places: Places, ranks: int, path: str) -> None:
    three_runs_agree(places, "plain", ranks, path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", SETTINGS)
def test_lanes_give_the_logits_of_the_reference(places: Places, name: str, path: str) -> None:
    three_runs_agree(places, name, None, path)


@pytest.mark.parametrize(("name", "ranks"), [("plain", 4), ("ladder", None), ("silent", None)])
def test_tokens_after_a_long_prompt_are_the_best(places: Places, name: str, ranks: int | None) -> None:
    """A prompt that fills most of the context, in one chunk and in many: the head has its last row alone."""
    backend, want = places.load(name, ranks), reference(places.folder(name), CONTEXT, tp=ranks)
    prompt = (TOKENS * 3)[:240]
    for chunk in (None, 24):
        runs = [
            ids(list(CudaGeneration(backend, Job(prompt, 0, 9), backend.new_sequence(), chunk)))
            for _ in range(3)
        ]
        assert runs[0] == runs[1] == runs[2]
        logits = want.logits((*prompt, *runs[0][:-1]), want.new_sequence())[len(prompt) - 1 :]
        behind = logits.max(axis=1) - logits[np.arange(9), runs[0]]
        assert (behind <= TOLERANCE * np.linalg.norm(logits, axis=1)).all()


@pytest.mark.parametrize(("name", "ranks"), [("plain", 8), ("delay 2", None)])
def test_a_prefill_can_be_cancelled(places: Places, name: str, ranks: int | None) -> None:
    """One row at a time, so that there is something to cancel; what comes next is not harmed."""
    backend, prompt = places.load(name, ranks), (TOKENS * 3)[:240]
    healthy = ids(list(CudaGeneration(backend, Job(prompt, 0, 4), backend.new_sequence(), 1)))
    for pause_ms in (0, 1, 2, 4, 8):
        sequence = backend.new_sequence()
        generation = CudaGeneration(backend, Job(prompt, 0, 4), sequence, 1)
        time.sleep(1e-3 * pause_ms)
        generation.cancel()
        tokens = ids(list(generation))
        assert tokens == healthy[: len(tokens)]
        assert generation.finish_reason == ("length" if len(tokens) == 4 else "cancelled")
        assert sequence.length == (240 + len(tokens) - 1 if tokens else generation.filled)
        assert len({part.length for part in sequence.parts}) == 1
    assert ids(list(CudaGeneration(backend, Job(prompt, 0, 4), backend.new_sequence(), 1))) == healthy


@pytest.mark.parametrize(("name", "ranks"), [("plain", 8), ("delay 4 of eight", None)])
def test_tokens_are_the_best_and_a_second_turn_goes_on(places: Places, name: str, ranks: int | None) -> None:
    backend, want = places.load(name, ranks), reference(places.folder(name), CONTEXT, tp=ranks)
    prompt, sequence = TOKENS[:20], backend.new_sequence()
    tokens = ids(list(CudaGeneration(backend, Job(prompt, 0, 24), sequence, 0)))
    again = ids(list(CudaGeneration(backend, Job(prompt, 0, 24), backend.new_sequence(), 0)))
    assert tokens == again
    logits = want.logits((*prompt, *tokens[:-1]), want.new_sequence())[len(prompt) - 1 :]
    behind = logits.max(axis=1) - logits[np.arange(24), tokens]
    assert (behind <= TOLERANCE * np.linalg.norm(logits, axis=1)).all()
    turn = (*prompt, *tokens, *TOKENS[20:30])
    warm = ids(list(CudaGeneration(backend, Job(turn, sequence.length, 5), sequence, 0)))
    assert warm == ids(list(CudaGeneration(backend, Job(turn, 0, 5), backend.new_sequence(), 0)))


def test_drawn_tokens_are_those_of_the_reference(places: Places) -> None:
    """From the kernel's own logits."""
    backend, prompt = places.load("plain", 4), TOKENS[:9]
    sampling = Sampling(temperature=0.9, top_k=40, top_p=0.95, repetition_penalty=1.2, seed=11)
    job = Job(prompt, 0, 12, sampling=sampling)
    tokens = ids(list(CudaGeneration(backend, job, backend.new_sequence(), 0)))
    logits = backend.logits((*prompt, *tokens[:-1]), backend.new_sequence(), 0)[len(prompt) - 1 :]
    for step, token in enumerate(tokens):
        assert token == choose(logits[step], prompt, tokens[:step], len(prompt) + step, sampling, ())


@pytest.mark.parametrize(("name", "ranks"), [("plain", 4), ("delay 2", None)])
def test_a_rank_that_stops_is_named(places: Places, name: str, ranks: int | None) -> None:
    """In the prompt, and after a few tokens."""
    backend = places.load(name, ranks)
    healthy = ids(list(backend.start(Job(TOKENS[:3], 0, 6), backend.new_sequence())))
    for rank, after in ((2, 0), (1, 3)):
        backend.stop_rank(rank, after)
        with pytest.raises(
            DeadlineFault, match=rf"Rank \d waited too long for rank {rank} in stage \w+ of layer"
        ):
            list(backend.start(Job(TOKENS[:3], 0, 6), backend.new_sequence()))
    backend.stop_rank(None)
    assert ids(list(backend.start(Job(TOKENS[:3], 0, 6), backend.new_sequence()))) == healthy

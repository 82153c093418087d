"""What the host tells the kernel lies where the kernel looks for it: against plan/params.h, and by the compiler."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest

from backends.host_kernel import SOURCES as HOST_MACHINE
from backends.host_kernel import machine_flags
from families import Case
from monotape.backends.cpu.build import find_compiler
from monotape.backends.cuda.compilation import ARCHITECTURE, KERNELS, STANDARD, cuda_core
from monotape.backends.cuda.header import plan_header
from monotape.backends.cuda.links import InboxStruct, RanksStruct
from monotape.backends.cuda.params import (
    THREADS,
    ParamsStruct,
    RowsStruct,
    StatusStruct,
    exchange_bytes,
    place_table,
    span_table,
)
from monotape.backends.cuda.sampling import SamplingStruct
from monotape.compiler.gpu import gpu_plan
from monotape.models.registry import spec_from_config
from monotape.plan.formats import GPU_LAYOUTS
from monotape.plan.gpu import BLOCK_K, MOST_RANKS, GpuRank
from monotape.plan.gpu_machines import HOPPER
from shapes import SHAPES

STRUCTS: dict[str, type[ctypes.Structure]] = {
    "Params": ParamsStruct, "Rows": RowsStruct, "HostStatus": StatusStruct, "Sampling": SamplingStruct,
    "Ranks": RanksStruct, "Inbox": InboxStruct,
}  # fmt: skip
CASES = {
    "llama-3.2-1b on 132": (SHAPES["llama-3.2-1b"], 132),
    "smollm2-135m on 132": (SHAPES["smollm2-135m"], 132),
    "odd sizes on 7": (Case("odd", "llama", {"head_dim": 48}).config().to_dict(), 7),
}


def declared(name: str) -> list[str]:
    """The fields of a struct of the kernel, in order."""
    text = "".join(file.read_text() for file in sorted(KERNELS.rglob("*.h")))
    found = re.search(rf"^struct {name} {{(.*?)^}};", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"no header has a struct {name}"
    body = re.sub(r"//[^\n]*", "", found.group(1))
    fields = []
    for declaration in filter(str.strip, body.split(";")):
        fields += [re.findall(r"\w+", re.sub(r"\[.*?\]", "", part))[-1] for part in declaration.split(",")]
    return fields


@pytest.mark.parametrize("name", STRUCTS)
def test_fields_have_the_same_names_in_the_same_order(name: str) -> None:
    assert declared(name) == [field[0] for field in STRUCTS[name]._fields_]


def _expected(rank: GpuRank, workers: int) -> dict[str, int]:
    """Expressions of the kernel's, and what the host takes them to be."""
    found = {
        "sizeof(Exchange)": exchange_bytes(rank, workers), "kUnitBytes": rank.kv.unit_bytes, "kThreads": THREADS,
        "kTracedStages": len(rank.stage_names) - 1, "sizeof(Span)": 16, "sizeof(TilePlace)": 16,
        "kSamplerWords": rank.sampler_words, "kMostRanks": MOST_RANKS,
        "sizeof(RankStep)": 16, "sizeof(LinkWord)": 8,
    }  # fmt: skip
    found |= {f"int(Stage::{stage})": number for number, stage in enumerate(rank.stage_names)}
    for number, product in enumerate(rank.products):
        found[f"block_bytes(product({number}))"] = GPU_LAYOUTS[product.format].tile_bytes(BLOCK_K)
    return found | {f"sizeof({name})": ctypes.sizeof(struct) for name, struct in STRUCTS.items()}


def _asserted(expected: dict[str, int]) -> str:
    checks = "\n".join(f'static_assert(({text}) == {value}, "{text}");' for text, value in expected.items())
    return f'#include "worker/ring.h"\nnamespace monotape {{\n{checks}\n}}\n'


@pytest.mark.parametrize("case", CASES)
def test_the_compiler_lays_them_out_alike(case: str, tmp_path: Path) -> None:
    config, workers = CASES[case]
    plan = gpu_plan(spec_from_config(config), workers, 96)
    (tmp_path / "plan.h").write_text(plan_header(plan))
    core = cuda_core()
    options = core.ProgramOptions(arch=ARCHITECTURE, std=STANDARD, include_path=[str(tmp_path), str(KERNELS)])
    source = _asserted(_expected(plan.ranks[0], workers))
    assert core.Program(source, "c++", options=options).compile("cubin").code


def test_fields_lie_where_the_host_takes_them_to_be(tmp_path: Path) -> None:
    """Asked of the host's compiler, because NVRTC's knows no offsets; sizes and alignments are the same."""
    compiler = find_compiler()
    assert compiler, "tests of the kernel need a C++ compiler"
    plan = gpu_plan(spec_from_config(SHAPES["llama-3.2-1b"]), 132, 96)
    (tmp_path / "plan.h").write_text(plan_header(plan))
    offsets = {
        f"__builtin_offsetof({name}, {field[0]})": getattr(struct, field[0]).offset
        for name, struct in STRUCTS.items()
        for field in struct._fields_
    }
    (tmp_path / "check.cpp").write_text(_asserted(offsets))
    places = [f"-I{place}" for place in (tmp_path, KERNELS, HOST_MACHINE)]
    flags = ["-std=c++17", "-fsyntax-only", "-w", *machine_flags(HOPPER)]
    subprocess.run([*compiler, *flags, *places, str(tmp_path / "check.cpp")], check=True)


def test_every_stage_has_a_place_in_the_order_of_a_token() -> None:
    rank = gpu_plan(spec_from_config(SHAPES["llama-3.2-1b"]), 132, 96).ranks[0]
    order = [rank.stage_names[rank.stage_order.index(place)] for place in range(8)]
    assert order.index("qkv") < order.index("attention") < order.index("combine") < order.index("output")
    assert order.index("gate_up") < order.index("down") < order.index("head") < order.index("sample")


def test_tables_lead_to_every_tile() -> None:
    spec = spec_from_config(CASES["odd sizes on 7"][0])
    plan = gpu_plan(spec, 7, 96).plan
    rank, spans = plan.ranks[0], span_table(plan)
    places, first = place_table(plan)
    starts = [sum(tape.bytes for tape in rank.tapes[:worker]) for worker in range(7)]
    for index, stage in enumerate(rank.stages):
        assert spans["count"][:, index].sum() == stage.tiles
        tile_bytes = stage.tile_bytes
        for worker, (tape_first, count, offset) in enumerate(spans[:, index].tolist()):
            for tile in range(count):
                start, stride = places[first[index] + tape_first + tile].tolist()
                assert start == starts[worker] + offset + tile * tile_bytes
                assert stride == (0 if stage is rank.head else rank.tapes[worker].layer_bytes)

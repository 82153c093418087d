"""Recipes of kernels: what a report must hold so that the same plan.h can be made again, without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from monotape.backends.cuda.bandwidth import HEADER as BANDWIDTH_HEADER
from monotape.backends.cuda.collective import header as collective_header
from monotape.backends.cuda.compilation import KERNEL_FILE
from monotape.backends.cuda.header import Variant, plan_header
from monotape.compiler.gpu import Tuning, drafting_plan, gpu_plan
from monotape.models.lanes import Lanes
from monotape.models.registry import spec_from_config
from monotape.models.spec import ModelSpec
from monotape.plan.formats import Format
from monotape.plan.gpu import GpuPlan
from shapes import all_shapes

BANDWIDTH_FILE, COLLECTIVE_FILE = "bandwidth.cu", "collective.cu"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A kernel file and all that its plan.h depends on."""

    source: str = KERNEL_FILE
    shape: str = ""  # of bench/shapes.py, or what a report calls the model whose `config` it holds
    config: Mapping[str, Any] = field(
        default_factory=dict
    )  # of a checkpoint, or what differs from the shape's
    dtype: str = "bf16"
    workers: int = 0
    context: int = 0
    ranks: int = 1
    rank: int = 0
    lanes: Lanes | None = None
    link_delay: bool = False
    trace: bool = False
    drafts: bool = False  # a pass has rows for drafts, where the model allows it
    formats: Mapping[str, str] = field(default_factory=dict)  # of stages that have another than `dtype`
    kv: str = ""  # the format of keys and values, if it is not that of activations

    @property
    def label(self) -> str:
        """How a report names the kernel."""
        words = [f"{self.shape} {self.dtype}, {self.workers} workers" if self.shape else self.source]
        if self.ranks > 1:
            words.append(f"rank {self.rank} of {self.ranks}" if self.shape else f"{self.ranks} ranks")
        if self.lanes is not None:
            words.append("silent" if self.lanes.delay is None else f"delay {self.lanes.delay}")
            words += ["ladder"] * (self.lanes.own == "with sum") + ["early sums"] * (
                self.lanes.early == "sum"
            )
        words += [f"{name} {fmt}" for name, fmt in self.formats.items()] + [f"KV {self.kv}"] * bool(self.kv)
        said = {"slow links": self.link_delay, "trace": self.trace, "drafts": self.drafts}
        words += [word for word, true in said.items() if true]
        return ", ".join(words)

    def spec(self) -> ModelSpec:
        spec = spec_from_config({**all_shapes().get(self.shape, {}), **self.config})
        return spec if self.lanes is None else replace(spec, lanes=self.lanes)

    def plan(self) -> GpuPlan:
        ranks, tuning = self.ranks if self.ranks > 1 else None, Tuning(link_delay=self.link_delay)
        formats = {name: Format(fmt) for name, fmt in self.formats.items()}
        alone = gpu_plan(
            self.spec(), self.workers, self.context, Format(self.dtype), ranks, tuning=tuning, stage_formats=formats,
            kv_format=Format(self.kv) if self.kv else None,
        )  # fmt: skip
        if not self.drafts:
            return alone
        plan = drafting_plan(self.spec(), alone)
        assert plan is not None, f"{self.label} has no kernel for drafts"
        return plan

    def header(self) -> str:
        if self.source == BANDWIDTH_FILE:
            return BANDWIDTH_HEADER
        if self.source == COLLECTIVE_FILE:
            return collective_header(self.ranks)
        return header_text(self, self.plan())

    def facts(self) -> dict[str, Any]:
        """As a report holds it: what is not as usual."""
        usual = Recipe()
        held = {each.name: getattr(self, each.name) for each in fields(self)}
        named = {name: value for name, value in held.items() if value != getattr(usual, name)}
        return {name: asdict(value) if isinstance(value, Lanes) else value for name, value in named.items()}


#: That of the measured ceiling.
BANDWIDTH = Recipe(source=BANDWIDTH_FILE)


def header_text(recipe: Recipe, plan: GpuPlan) -> str:
    """plan.h of a recipe's kernel: the one place where benchmarks make it."""
    return plan_header(plan, rank=recipe.rank, variant=Variant(trace=recipe.trace))


def recipe_of(facts: Mapping[str, Any]) -> Recipe:
    """From what a report holds; other entries beside it are left alone."""
    known = {each.name: facts[each.name] for each in fields(Recipe) if each.name in facts}
    if known.get("lanes") is not None:
        known["lanes"] = Lanes(**known["lanes"])
    return Recipe(**known)


def recipes_of(backend: Any, model: str, config: Mapping[str, Any]) -> list[Recipe]:
    """The kernels of a loaded backend of GPUs. Ranks whose kernels are the same count once."""
    drafting = getattr(backend, "drafting", None)
    kernels = [backend.gpu_plan, *([drafting.gpu_plan] if drafting is not None else [])]
    return [recipe for lowered in kernels for recipe in _recipes_of_kernel(lowered, model, config)]


def _recipes_of_kernel(lowered: GpuPlan, model: str, config: Mapping[str, Any]) -> list[Recipe]:
    plan = lowered.plan
    own = {} if model in all_shapes() else dict(config)
    recipe = Recipe(
        shape=model, config=own, dtype=plan.format.value, workers=plan.machine.workers, context=plan.context,
        ranks=len(plan.ranks),
        formats={stage.name: stage.format.value for stage in plan.ranks[0].stages if stage.format is not plan.format},
        drafts=lowered.ranks[0].rows_a_pass > 1, kv=Format.FP8.value if lowered.ranks[0].kv.narrow else "",
    )  # fmt: skip
    found: dict[str, Recipe] = {}
    for rank in range(len(plan.ranks)):
        one = replace(recipe, rank=rank)
        text = header_text(one, lowered)
        assert text == one.header(), f"the recipe of {one.label} makes another kernel than the one that ran"
        found.setdefault(text, one)
    return list(found.values())

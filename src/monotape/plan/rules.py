"""The rules a plan must obey, as data: a name, a sentence, and a check that says what breaks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from monotape.errors import PlanError
from monotape.plan.formats import LAYOUTS, Format
from monotape.plan.types import Part, Plan, Stage


@dataclass(frozen=True, slots=True)
class Rule:
    name: str
    sentence: str
    broken: Callable[[Plan], Iterator[str]]


def _one_owner(plan: Plan) -> Iterator[str]:
    for rank in plan.ranks:
        for stage in rank.stages:
            end = 0
            for worker, span in enumerate(stage.spans):
                if span.first != end or span.count < 0:
                    yield f"{stage.name}: worker {worker} starts at tile {span.first}, the one before ends at {end}"
                end = span.end
            tiles = max(1, stage.dealt) * stage.tiles
            if end != tiles:
                yield f"{stage.name}: {end} of {tiles} tiles have an owner"


def _a_span_a_worker(plan: Plan) -> Iterator[str]:
    for rank in plan.ranks:
        for stage in rank.stages:
            if len(stage.spans) != plan.machine.workers:
                yield f"{stage.name}: {len(stage.spans)} spans for {plan.machine.workers} workers"


def _residual_has_one_owner(plan: Plan) -> Iterator[str]:
    for rank in plan.ranks:
        writers = [stage for stage in rank.layer_stages if stage.writes == "residual"]
        for stage in writers[1:]:
            if stage.spans != writers[0].spans:
                yield f"{stage.name}: its rows of the residual have other owners than those of {writers[0].name}"


def _whole_units(plan: Plan) -> Iterator[str]:
    for rank in plan.ranks:
        for stage in rank.stages:
            for worker, span in enumerate(stage.spans):
                if span.first % stage.unit or span.count % stage.unit:
                    yield f"{stage.name}: worker {worker} owns part of a unit of {stage.unit} tiles"


def _tiles_cover_rows(plan: Plan) -> Iterator[str]:
    for rank in plan.ranks:
        for stage in rank.stages:
            if any(part.group <= 0 or part.rows % part.group for part in stage.parts):
                yield f"{stage.name}: a part is not a whole number of groups"
            elif sum(part.tiles for part in stage.parts) != stage.tiles:
                yield f"{stage.name}: {stage.tiles} tiles do not hold the rows of its parts"


def _whole_blocks(plan: Plan) -> Iterator[str]:
    for rank in plan.ranks:
        for stage in rank.stages:
            block = stage.layout.k
            if stage.padded_k % block or not 0 <= stage.padded_k - stage.k < block:
                yield f"{stage.name}: k {stage.k} is padded to {stage.padded_k}, blocks are {block}"


def _tape_is_one_run(plan: Plan) -> Iterator[str]:
    for rank in plan.ranks:
        for tape in rank.tapes:
            end = 0
            for segment in tape.layer_segments:
                if not end <= segment.offset < end + plan.machine.alignment:
                    yield f"tape {tape.worker}: {segment.stage} at {segment.offset}, the segment before ends at {end}"
                end = segment.offset + segment.bytes
            if not end <= tape.layer_bytes < end + plan.machine.alignment:
                yield f"tape {tape.worker}: a layer takes {tape.layer_bytes} bytes, its segments end at {end}"
            if tape.head_segment.offset != tape.layer_bytes * plan.layers:
                yield f"tape {tape.worker}: the head does not follow the last layer"
            if tape.bytes < tape.head_segment.offset + tape.head_segment.bytes:
                yield f"tape {tape.worker}: the head ends past the tape"


def _tape_holds_its_tiles(plan: Plan) -> Iterator[str]:
    for rank in plan.ranks:
        if [tape.worker for tape in rank.tapes] != list(range(plan.machine.workers)):
            yield "there is not one tape a worker, in order"
            continue
        for tape in rank.tapes:
            segments, stages = (*tape.layer_segments, tape.head_segment), (*rank.taped_stages, rank.head)
            if [segment.stage for segment in segments] != [stage.name for stage in stages]:
                yield f"tape {tape.worker}: stages are not in the order in which they run"
                continue
            for stage, segment in zip(stages, segments, strict=True):
                if segment.bytes != _owned_bytes(stage, tape.worker):
                    yield f"tape {tape.worker}: {stage.name} takes {segment.bytes} bytes, not what its tiles need"


def _library_holds_experts(plan: Plan) -> Iterator[str]:
    for rank in plan.ranks:
        library, routed = rank.library, rank.routed_stages
        if library is None:
            if routed:
                yield f"{routed[0].name}: is routed, but there is no library of experts"
            continue
        if [segment.stage for segment in library.segments] != [stage.name for stage in routed]:
            yield "the library does not hold the routed stages, in the order in which they run"
            continue
        if library.layers != plan.layers or not 1 <= library.chosen <= library.experts:
            yield f"{library.chosen} of {library.experts} experts in {library.layers} layers are no choice"
        end = 0
        for stage, segment in zip(routed, library.segments, strict=True):
            if segment.bytes != stage.tiles * stage.tile_bytes or segment.offset < end:
                yield f"library: {stage.name} takes {segment.bytes} bytes at {segment.offset}"
            if segment.offset % plan.machine.alignment:
                yield f"library: {stage.name} is not aligned to {plan.machine.alignment} bytes"
            if stage.routed != library.chosen or stage.dealt not in (0, library.chosen):
                yield f"{stage.name}: a token passes {stage.routed} experts, the router chooses {library.chosen}"
            end = segment.offset + segment.bytes
        if not end <= library.expert_bytes < end + plan.machine.alignment:
            yield f"library: an expert takes {library.expert_bytes} bytes, its segments end at {end}"


def _chosen_before_routed(plan: Plan) -> Iterator[str]:
    for rank in plan.ranks:
        chosen = False
        for stage in rank.layer_stages:
            chosen = chosen or stage.writes == "choice"
            if stage.routed and not chosen:
                yield f"{stage.name}: its experts have not been chosen yet"


def _aligned(plan: Plan) -> Iterator[str]:
    for rank in plan.ranks:
        for tape in rank.tapes:
            for segment in (*tape.layer_segments, tape.head_segment):
                if segment.offset % plan.machine.alignment:
                    yield f"tape {tape.worker}: {segment.stage} is not aligned to {plan.machine.alignment} bytes"


def _balanced(plan: Plan) -> Iterator[str]:
    """Whole units cannot be split, so each stage may leave a worker one unit above its share."""
    for rank in plan.ranks:
        loads = [
            sum(_experts_of_a_span(stage) * _owned_bytes(stage, worker) for stage in rank.layer_stages)
            for worker in range(plan.machine.workers)
        ]
        slack = sum(_experts_of_a_span(stage) * stage.unit * stage.tile_bytes for stage in rank.layer_stages)
        if max(loads) > sum(loads) / len(loads) + slack:
            mean = sum(loads) // len(loads)
            yield f"rank {rank.rank}: one worker reads {max(loads)} bytes a layer, the mean is {mean}"


def _experts_of_a_span(stage: Stage) -> int:
    """Experts of which a worker has all tiles of its span."""
    return 1 if stage.dealt else max(1, stage.routed)


def _buffers_exist(plan: Plan) -> Iterator[str]:
    for rank in plan.ranks:
        widths = {buffer.name: buffer.width for buffer in rank.buffers}
        for stage in rank.stages:
            for name in (stage.reads, stage.writes):
                if name not in widths:
                    yield f"{stage.name}: no buffer is called {name}"
            if widths.get(stage.reads, stage.k) < stage.k:
                yield f"{stage.name}: reads {stage.k} values from {stage.reads}, which has {widths[stage.reads]}"


def _written_before_read(plan: Plan) -> Iterator[str]:
    for rank in plan.ranks:
        written = {"residual"}  # the embedding fills it
        for stage in rank.stages:
            if stage.reads == "attended":  # attention turns queries and KV into it
                written |= {"attended"} if "query" in written else set()
            if (
                stage.reads == "combined" and plan.head_input != "own"
            ):  # the ranks combine their residuals into it
                written.add("combined")
            if stage.reads not in written:
                yield f"{stage.name}: reads {stage.reads} before anything wrote it"
            written.add(stage.writes)


def _chunk_fits(plan: Plan) -> Iterator[str]:
    if not plan.chunk >= 1:
        yield f"a prefill pass computes {plan.chunk} rows"
    for rank in plan.ranks:
        for buffer in rank.buffers:
            if buffer.name not in ("logits", "combined") and buffer.rows < plan.chunk:
                yield f"buffer {buffer.name} has {buffer.rows} rows, a prefill pass has {plan.chunk}"


def _formats_that_run(plan: Plan) -> Iterator[str]:
    """Tiles are read by the layout of their format on this kind of machine."""
    for rank in plan.ranks:
        for stage in rank.stages:
            if LAYOUTS[plan.machine.kind].get(stage.format) != stage.layout:
                yield f"{stage.name}: {stage.format.value} does not lie like that on a {plan.machine.kind}'s tape"


#: In which KV can be kept. On the CPU only the reference has 8 bits.
KV_FORMATS = {
    "cpu": (Format.F32, Format.F16, Format.FP8), "cuda": (Format.BF16, Format.F16, Format.FP8),
    "hip": (Format.BF16, Format.F16),
}  # fmt: skip


def _kv_makes_sense(plan: Plan) -> Iterator[str]:
    for rank in plan.ranks:
        if rank.kv.layers != plan.layers or min(rank.kv.kv_heads, rank.kv.head_dim, rank.kv.block) < 1:
            yield f"rank {rank.rank}: the KV layout does not fit the model"
        formats = KV_FORMATS[plan.machine.kind]
        if rank.kv.format not in formats:
            yield f"rank {rank.rank}: KV cannot be kept as {rank.kv.format.value}"


def _ranks_in_order(plan: Plan) -> Iterator[str]:
    if not plan.ranks or [rank.rank for rank in plan.ranks] != list(range(len(plan.ranks))):
        yield "ranks are not 0, 1, 2, ..."


def _shares_cover(plan: Plan) -> Iterator[str]:
    """Every row of a tensor that ranks share belongs to one rank; k and v to several where they are too few."""
    for index, stage in enumerate(plan.ranks[0].stages):
        for place, part in enumerate(stage.parts):
            end = before = 0
            for rank in plan.ranks:
                share = rank.stages[index].parts[place]
                repeated = (
                    part.role in ("k", "v") and share.first == before and share.first + share.rows == end
                )
                on_all = stage.writes in ("residual", "choice")
                whole = on_all and share.first == 0 and share.rows == part.rows
                if not (share.first == end or repeated or whole):
                    yield f"rank {rank.rank}: {part.role} starts at row {share.first}, the rank before ends at {end}"
                before, end = share.first, share.first + share.rows


def _columns_follow_rows(plan: Plan) -> Iterator[str]:
    """A rank's partial sums run over exactly the values that it computed itself."""
    for rank in plan.ranks:
        made: dict[str, Part] = {}
        for stage in rank.layer_stages:
            source = made.get("query" if stage.reads == "attended" else stage.reads)
            if source is not None and (stage.first_k, stage.k) != (source.first, source.rows):
                yield f"rank {rank.rank}: {stage.name} reads columns that are not the rows of its {source.role}"
            if stage.writes != "residual":
                made[stage.writes] = stage.parts[0]


def _steps_fit(plan: Plan) -> Iterator[str]:
    if len(plan.ranks) == 1:
        if plan.steps or plan.slots:
            yield "a single rank has nobody to exchange with"
        return
    if len(plan.steps) < plan.modules:
        yield f"{len(plan.steps)} steps for {plan.modules} modules"
    folded = {step.folds for step in plan.steps}
    for module, step in enumerate(plan.steps):
        if step.sends and (module >= plan.modules or module not in folded):
            yield f"module {module} sends what nobody folds"
        if step.folds is not None and not (
            0 <= step.folds <= module and step.folds < len(plan.steps) and plan.steps[step.folds].sends
        ):
            yield f"module {module} folds module {step.folds}, which has not been sent"


def _slots_suffice(plan: Plan) -> Iterator[str]:
    """A send may overwrite only what every rank has folded: see ARCHITECTURE.md, Ranks."""
    sent: dict[int, int] = {}
    for module, step in enumerate(plan.steps):
        if step.sends:
            sent[module] = len(sent)
        lag = len(sent) - 1 - sent.get(step.folds, len(sent) - 1) if step.folds is not None else 0
        if plan.slots < 2 * lag + 2:
            yield f"module {module} folds a sum {lag} sends late, which takes {2 * lag + 2} slots and not {plan.slots}"


def _owned_bytes(stage: Stage, worker: int) -> int:
    tiles = (
        stage.spans[worker].count if worker < len(stage.spans) else 0
    )  # its absence is another rule's business
    return tiles * stage.tile_bytes


RULES: tuple[Rule, ...] = (
    Rule("ranks in order", "Ranks are numbered from 0 without gaps.", _ranks_in_order),
    Rule("a span a worker", "Every stage gives every worker a span, if only an empty one.", _a_span_a_worker),
    Rule("one owner", "Every tile of every stage has exactly one owner.", _one_owner),
    Rule("residual", "An element of the residual has the same owner in every stage.", _residual_has_one_owner),
    Rule("whole units", "What must stay together (a head, gate and up) has one owner.", _whole_units),
    Rule("tiles cover rows", "A stage's tiles hold all rows of its parts.", _tiles_cover_rows),
    Rule("whole blocks", "k is padded to the format's block and no further.", _whole_blocks),
    Rule("formats", "A stage's tiles have the machine's layout of its format.", _formats_that_run),
    Rule("tape holds its tiles", "A tape holds its worker's tiles, in running order.", _tape_holds_its_tiles),
    Rule("library holds experts", "The library holds the routed stages of all experts.", _library_holds_experts),
    Rule("chosen before routed", "A router stands before the stages that it routes.", _chosen_before_routed),
    Rule("tape is one run", "A tape has no gap wider than its alignment and no overlap.", _tape_is_one_run),
    Rule("aligned", "Every segment starts on the machine's alignment.", _aligned),
    Rule("balanced", "In a layer no worker reads more than one unit a stage above the mean.", _balanced),
    Rule("buffers exist", "Every stage reads and writes buffers that exist and are wide enough.", _buffers_exist),
    Rule("written before read", "No stage reads what nothing wrote.", _written_before_read),
    Rule("chunk fits", "Buffers hold a whole prefill chunk.", _chunk_fits),
    Rule("shares cover", "Ranks share every tensor without a gap or an overlap.", _shares_cover),
    Rule("columns follow rows", "A rank sums over the values that it computed itself.", _columns_follow_rows),
    Rule("steps fit", "What is folded was sent, and what is sent is folded.", _steps_fit),
    Rule("slots suffice", "No send overwrites a partial that a rank still needs.", _slots_suffice),
    Rule("kv makes sense", "The KV layout has the model's layers and a format it can have.", _kv_makes_sense),
)  # fmt: skip


def violations(plan: Plan) -> list[tuple[Rule, str]]:
    """Every rule that the plan breaks, with what breaks it."""
    found = []
    for rule in RULES:
        found += [(rule, what) for what in rule.broken(plan)]
    return found


def verify(plan: Plan) -> None:
    """Raises PlanError when the plan breaks a rule."""
    if found := violations(plan):
        rule, what = found[0]
        raise PlanError(
            f"The plan for {plan.model} breaks the rule '{rule.name}': {what} ({len(found)} findings in all).",
            "This is a fault in the compiler; please report it with the output of `monotape inspect`.",
        )

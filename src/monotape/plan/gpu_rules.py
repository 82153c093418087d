"""The rules that a GpuPlan must obey, as data: a name, a sentence, and a check that says what breaks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from monotape.errors import PlanError
from monotape.plan.formats import GPU_LAYOUTS
from monotape.plan.gpu import (
    BATCH_TILES,
    BLOCK_K,
    AttentionStage,
    Epilogue,
    GpuPlan,
    GpuRank,
    Passed,
    Reset,
    chain_of,
)
from monotape.plan.gpu_formats import GPU_FORMATS
from monotape.plan.gpu_machines import SHARED_MEMORY, WORD_VALUES


@dataclass(frozen=True, slots=True)
class GpuRule:
    name: str
    sentence: str
    broken: Callable[[GpuRank], Iterator[str]]
    of_pages: bool = False  # of a machine whose weights come in pages


def _at(chain: list[Passed], name: str) -> int:
    return next((at for at, stage in enumerate(chain) if stage.name == name), -1)


def _reader(chain: list[Passed], buffer: str) -> int:
    return max((at for at, stage in enumerate(chain) if stage.needs(buffer)), default=-1)


def _layers_have_kinds(rank: GpuRank) -> Iterator[str]:
    if len(rank.layer_kinds) != rank.dimensions.layers:
        yield f"{len(rank.layer_kinds)} layers have a kind, of {rank.dimensions.layers}"
    if any(not 0 <= kind < len(rank.kinds) for kind in rank.layer_kinds):
        yield "a layer is of a kind that there is not"


def _kinds_share_matrices(rank: GpuRank) -> Iterator[str]:
    for kind in rank.kinds[1:]:
        if kind.matrices != rank.kinds[0].matrices:
            yield f"'{kind.name}' has other matrices than '{rank.kinds[0].name}'"
    for kind in rank.kinds:
        if sum(isinstance(stage, AttentionStage) for stage in kind.stages) != 1:
            yield f"'{kind.name}' does not attend once"


def _buffers_hold(rank: GpuRank) -> Iterator[str]:
    words = {buffer.name: buffer.words for buffer in rank.buffers}
    for stage in rank.matrices:
        values = stage.k * max(1, rank.products[stage.product].inputs)
        if words.get(stage.reads, 0) * WORD_VALUES < values:
            yield f"{stage.name}: {stage.reads} does not hold the {values} values that it reads"
        if stage.epilogue is not Epilogue.LOGITS and words.get(stage.writes, 0) < stage.words:
            yield f"{stage.name}: {stage.writes} does not hold what it writes"


def _buffers_apart(rank: GpuRank) -> Iterator[str]:
    places = sorted(
        (buffer.start + copy * buffer.stride + row * rank.row_words, buffer.words, buffer.name)
        for buffer in rank.buffers
        for copy in range(buffer.copies)
        for row in range(1 if buffer.name == "candidates" else rank.rows_a_pass)
    )
    end = 0
    for start, words, name in places:
        if start != end:
            yield f"a copy of {name} starts at word {start}, the one before ends at {end}"
        end = start + words


def _written_before_read(rank: GpuRank) -> Iterator[str]:
    chain = chain_of(rank.kinds[0].stages)
    written = {"residual"}  # by the embedding
    for stage in chain:
        for buffer in filter(None, (stage.reads, stage.also)):
            if buffer not in written:
                yield f"{stage.name} reads {buffer} before anything wrote it"
        written.add(stage.writes)
    if "residual" not in {stage.writes for stage in chain}:
        yield "no stage writes the residual that the next layer starts from"


def _every_buffer_is_reset(rank: GpuRank) -> Iterator[str]:
    found = [reset.buffer for reset in rank.resets]
    for buffer in rank.buffers:
        if buffer.owner != "worker" and found.count(buffer.name) != 1:
            yield f"{buffer.name} is reset {found.count(buffer.name)} times in a turn"


def _reset_stage(rank: GpuRank, reset: Reset) -> int:
    """Where in the chain, counted on through turns, a word is reset; the turn that publishes it is the first."""
    chain = chain_of(rank.kinds[0].stages)
    return reset.turns * len(chain) + _at(chain, reset.at)


def _resets_wait_for_readers(rank: GpuRank) -> Iterator[str]:
    """Between a buffer's reader and its reset lies a stage that reads all of its input: a matrix.

    A worker with an input word of the resetting stage knows that some worker had all input words of that matrix. So all
    their makers had published, which they do after they have read. Attention reads one head's words and proves nothing
    about the other heads. ARCHITECTURE.md has the whole argument.
    """
    chain = chain_of(rank.kinds[0].stages)
    for reset in rank.resets:
        between = range(_reader(chain, reset.buffer) + 1, _reset_stage(rank, reset))
        if _at(chain, reset.at) < 0:
            yield f"{reset.buffer} is reset at {reset.at}, which is no stage"
        elif not reset.first_layer and not any(chain[at % len(chain)].reads_all for at in between):
            yield f"{reset.buffer} is reset at {reset.at}, where others may still read it"
        elif reset.first_layer and _at(chain, reset.at) < 1:
            yield f"{reset.buffer} is reset at {reset.at}, where others may still be at the head"


def _resets_come_in_time(rank: GpuRank) -> Iterator[str]:
    """A turn before a word is published again: meanwhile its owner publishes what all later readers depend on."""
    chain = chain_of(rank.kinds[0].stages)
    for reset in rank.resets:
        writer = next((at for at, stage in enumerate(chain) if stage.writes == reset.buffer), -1)
        copies = rank.buffer(reset.buffer).copies
        if not reset.first_layer and _reset_stage(rank, reset) > writer + (copies - 1) * len(chain):
            yield f"{reset.buffer} is reset at {reset.at}, {reset.turns} turns later: too late for the next use"


def _listed_together(rank: GpuRank) -> Iterator[str]:
    listed = {(reset.at, reset.turns) for reset in rank.resets if reset.listed}
    if len(listed) > 1:
        yield f"resets of {len(listed)} stages are on one list"
    for reset in rank.resets:
        if rank.buffer(reset.buffer).owner == "attention" and not reset.listed:
            yield f"{reset.buffer} is owned by attention, whose words only a list knows"


def _pages_hold_tiles(rank: GpuRank) -> Iterator[str]:
    for product in rank.products:
        if product.format not in GPU_FORMATS:
            yield f"{product.format.value} is no format of a GPU's tape"
            continue
        block = GPU_LAYOUTS[product.format].block_bytes
        if product.tiles_in_page * product.page_run * block > rank.pages.bytes:
            yield f"tiles of {product.blocks} blocks do not fit a page of {rank.pages.bytes} bytes"
        if product.tiles_in_page % product.together or not 2 <= 2 * product.together <= BATCH_TILES:
            yield f"tiles of {product.blocks} blocks are multiplied {product.together} at a time"
        if product.tiles_in_page > 1 and product.page_run != product.blocks:
            yield f"tiles of {product.blocks} blocks share a page that holds parts of them"


def _ring_fits(rank: GpuRank) -> Iterator[str]:
    used = rank.pages.ring * rank.pages.bytes + rank.beside_ring
    if used > SHARED_MEMORY:
        yield f"shared memory would take {used} bytes of {SHARED_MEMORY}"
    most = max(rank.pages.now, rank.pages.ahead, rank.pages.polling, rank.pages.attending)
    if most > rank.pages.ring:
        yield f"{most} copies in flight for {rank.pages.ring} pages"
    if rank.kv.unit_bytes > rank.pages.bytes:
        yield f"a unit of KV, {rank.kv.unit_bytes} bytes, does not fit a page"


def _kv_is_shared(rank: GpuRank) -> Iterator[str]:
    d, kv = rank.dimensions, rank.kv
    if (kv.layers, kv.kv_heads, kv.head_dim) != (d.layers, d.kv_heads, d.head_dim):
        yield "the KV is not the model's"
    if kv.format is not rank.half and not kv.narrow:
        yield f"KV is kept as {kv.format.value}, activations are {rank.half.value}"
    if kv.splits < 1 or kv.units_per_split < 1:
        yield f"{kv.splits} workers share a KV head, {kv.units_per_split} units each"


def _cuts_cover(rank: GpuRank) -> Iterator[str]:
    names = [name for name, _ in rank.prefill.cuts]
    if names != [stage.name for stage in rank.matrices]:
        yield "not every stage has cuts"
    for name, cuts in rank.prefill.cuts:
        rows = [cut.rows for cut in cuts]
        if rows != sorted(set(rows)) or not rows or rows[-1] < rank.prefill.chunk:
            yield f"{name}: cuts end at {rows[-1] if rows else 0} rows, a chunk has {rank.prefill.chunk}"
        if any(cut.pieces < 1 for cut in cuts):
            yield f"{name}: a product of no pieces"


def _vectors_exist(rank: GpuRank) -> Iterator[str]:
    for stage in rank.matrices:
        for name in (stage.gain, stage.bias, stage.scale):
            if name is not None and name not in rank.vectors:
                yield f"{stage.name}: there is no vector {name}"


def _products_fit(rank: GpuRank) -> Iterator[str]:
    for stage in rank.matrices:
        if not 0 <= stage.product < len(rank.products):
            yield f"{stage.name}: there is no product {stage.product}"
            continue
        product = rank.products[stage.product]
        block, inputs = GPU_LAYOUTS[product.format].k, max(1, product.inputs)
        if product.blocks != inputs * -(-stage.k // block):
            yield f"{stage.name}: k {stage.k} is not its product's"
        elif product.blocks * block > rank.input_blocks * BLOCK_K:
            yield f"{stage.name}: its input does not fit the place of inputs"


def _inbox_for_peers(rank: GpuRank) -> Iterator[str]:
    links = rank.links
    if links.ranks == 1 and links.regions:
        yield "a single rank has an inbox"
    if links.ranks > 1 and "sums" not in {region.name for region in links.regions}:
        yield "there is no place for the sums of other ranks"
    if not 0 <= links.rank < links.ranks:
        yield f"rank {links.rank} of {links.ranks}"


def _rows_fit(rank: GpuRank) -> Iterator[str]:
    if not 1 <= rank.rows_a_pass <= 4:
        yield f"a pass of {rank.rows_a_pass} rows: a product has columns for one to four"


GPU_RULES: tuple[GpuRule, ...] = (
    GpuRule("layers have kinds", "Every layer is of a kind that there is.", _layers_have_kinds),
    GpuRule("kinds share matrices", "All kinds pass the same matrices and attend once.", _kinds_share_matrices),
    GpuRule("products fit", "A stage's product has the stage's k.", _products_fit),
    GpuRule("vectors exist", "Every norm and bias that a stage names is there.", _vectors_exist),
    GpuRule("buffers hold", "A buffer holds what its stages read and write.", _buffers_hold),
    GpuRule("buffers apart", "Buffers of the exchange follow each other without a gap.", _buffers_apart),
    GpuRule("written before read", "No stage reads what nothing wrote.", _written_before_read),
    GpuRule("every buffer is reset", "Words of a buffer are taken back once a turn.", _every_buffer_is_reset),
    GpuRule("resets wait", "No word is reset while a worker may still read it.", _resets_wait_for_readers),
    GpuRule("resets come in time", "A word is reset a turn before it is published again.", _resets_come_in_time),
    GpuRule("listed together", "A list is of one stage, and has what attention owns.", _listed_together),
    GpuRule("pages hold tiles", "A page holds whole tiles, or one tile's part.", _pages_hold_tiles, of_pages=True),
    GpuRule("ring fits", "Ring and everything beside it fit a block's shared memory.", _ring_fits, of_pages=True),
    GpuRule("kv is shared", "KV is the model's, and of the format of activations.", _kv_is_shared),
    GpuRule("cuts cover", "Products of rows have a cut for every size of a chunk.", _cuts_cover),
    GpuRule("inbox for peers", "Several ranks have inboxes, a single one has none.", _inbox_for_peers),
    GpuRule("rows fit", "A pass has as many rows as a product has columns for.", _rows_fit),
)  # fmt: skip


def violations(plan: GpuPlan) -> list[tuple[GpuRule, str]]:
    """Every rule that the plan breaks, with what breaks it."""
    rules = [rule for rule in GPU_RULES if plan.machine.ring or not rule.of_pages]
    return [(rule, what) for rank in plan.ranks for rule in rules for what in rule.broken(rank)]


def verify(plan: GpuPlan) -> None:
    """Raises PlanError when the plan breaks a rule."""
    if found := violations(plan):
        rule, what = found[0]
        raise PlanError(
            f"The GPU plan for {plan.plan.model} breaks the rule '{rule.name}': {what} ({len(found)} in all).",
            "This is a fault in the compiler; please report it with the output of `monotape inspect`.",
        )

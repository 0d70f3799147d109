"""Turn each switch of the kernels, and measure it beside the defaults where it should help."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch

from loadtest.gpu.parts import BenchSize, Row, Work
from loadtest.gpu.pooling import AIM_HOTNESS, Ceiling, ceiling_of
from loadtest.gpu.rows import NO_PLACES, Bags, OwnedMemory, RowsOnCard, draw
from loadtest.gpu.timing import Timing, clock_name, time_graphs
from shard_node.cuda.cards import Cards, Stream
from shard_node.cuda.kernel_params import EACH_SWITCH, KernelSwitches

NOTES = (
    "A switch is measured in turns with the defaults, each on a table of its own with the same rows and ids, where it "
    "should help; times is its time by the defaults' (below 1: it is better). bf16, the product's columns.",
    "l2_fetch_bytes holds for the whole process: its values are measured one after the other, at the end, and times is "
    "by what was measured before any was set; ceiling_us, of the same minute, says what the device's clock did.",
)
SETS = 4
DEFAULTS = "defaults"
TURNED = "turned"


def shapes_for(switches: KernelSwitches, size: BenchSize) -> list[tuple[int, int, int]]:
    """List hotness, bags and logical cards (or NO_PLACES) at which a switch should help."""
    batches = sorted(size.batches)
    if switches.bags_per_lane_group > 1:
        return [(min(size.hotness), batch, NO_PLACES) for batch in batches[-2:]]
    if switches.lane_groups_per_bag > 1:
        return [(max(size.hotness), batch, NO_PLACES) for batch in batches[:2]]
    if switches.absolute_bases:
        return [(AIM_HOTNESS, batches[-1], max(size.logical_cards))]
    return [(hotness, batches[-1], NO_PLACES) for hotness in (1, AIM_HOTNESS)]


def measure(work: Work, opened: Callable[..., Cards], size: BenchSize) -> None:
    """Measure all switches of each dim, until the time is spent: those of the compiler first."""
    work.note(*NOTES)
    compiled = [one for one in EACH_SWITCH if one.defines()]
    fetched = [one for one in EACH_SWITCH if not one.defines()]
    cards = opened(1)
    work.part.facts["clock"] = clock_name(cards.cards[0])
    stream = cards.cards[0].stream()
    before: dict[tuple[int, ...], tuple[float, float]] = {}
    for dim in size.dims:
        with _rows(cards, stream, dim, size) as rows:
            for switches in compiled:
                if work.out_of_time(size.cell_s):
                    return
                with _rows(opened(1, switches=switches), stream, dim, size) as turned:
                    for shape in shapes_for(switches, size):
                        _in_turns(work, rows, turned, shape, size)
            for shape in shapes_for(fetched[0], size):
                before[dim, *shape] = _alone(rows, shape, size)
    for switches in fetched:
        for dim in size.dims:
            if work.out_of_time(size.cell_s):
                return
            with _rows(opened(1, switches=switches), stream, dim, size) as turned:
                for shape in shapes_for(switches, size):
                    seconds, ceiling_s = _alone(turned, shape, size)
                    row = _row(turned, shape, seconds, before[dim, *shape][0])
                    row["ceiling_us"], row["ceiling_us_before"] = ceiling_s * 1e6, before[dim, *shape][1] * 1e6
                    work.add(row)


def _rows(cards: Cards, stream: Stream, dim: int, size: BenchSize) -> RowsOnCard:
    """Make a table of a quarter of the size, so that there is room for two: with the same rows each time."""
    return RowsOnCard(cards, cards.cards[0], dim, size.table_bytes // 4, 0, stream)


def _bags(stack: ExitStack, rows: RowsOnCard, shape: tuple[int, int, int]) -> Bags:
    hotness, batch, num_cards = shape
    values = stack.enter_context(OwnedMemory(rows.stream)).own(rows.card.allocate(4 * SETS * hotness * batch))
    rows.generator.manual_seed(hotness)
    with rows.card.torch_stream(rows.stream):
        drawn = draw("uniform", rows.card_rows, values.size_bytes // 4, rows.generator)
        rows.card.tensor(values, 0, (drawn.numel(),), torch.int32).copy_(drawn)
    bags = stack.enter_context(Bags(rows, values, batch, hotness, SETS, "bf16", "product"))
    bags.check(num_cards, SETS - 1)
    return bags


def _in_turns(work: Work, rows: RowsOnCard, turned: RowsOnCard, shape: tuple[int, int, int], size: BenchSize) -> None:
    with ExitStack() as stack:
        both = {DEFAULTS: _bags(stack, rows, shape), TURNED: _bags(stack, turned, shape)}
        pieces = {name: partial(bags.launch_all, shape[2]) for name, bags in both.items()}
        timings = time_graphs(rows.card, rows.stream, pieces, SETS, size.cell_s)
    row = _row(turned, shape, timings[TURNED].median_s, timings[DEFAULTS].median_s)
    work.add({**row, "spread": timings[TURNED].spread})


def _alone(rows: RowsOnCard, shape: tuple[int, int, int], size: BenchSize) -> tuple[float, float]:
    """Measure seconds of a launch and of its ceiling."""
    with ExitStack() as stack:
        bags = _bags(stack, rows, shape)
        ceiling: Ceiling = stack.enter_context(ceiling_of(rows, bags.num_values, shape[0], SETS))
        pieces: dict[str, Callable[[], None]] = {TURNED: partial(bags.launch_all, shape[2]), **ceiling.work()}
        timings: dict[str, Timing] = time_graphs(rows.card, rows.stream, pieces, SETS, size.cell_s)
    return timings[TURNED].median_s, timings[ceiling.best(timings)].median_s


def _row(turned: RowsOnCard, shape: tuple[int, int, int], seconds: float, default_s: float) -> Row:
    hotness, batch, num_cards = shape
    return {
        "switch": str(turned.cards.switches),
        "dim": turned.embedding_dim,
        "hotness": hotness,
        "batch": batch,
        "logical_cards": max(1, num_cards),
        "us_per_launch": seconds * 1e6,
        "default_us": default_s * 1e6,
        "times": seconds / default_s,
        "correct": True,
    }

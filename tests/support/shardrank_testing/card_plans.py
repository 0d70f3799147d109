"""Models, partitions, budgets and hotness for placement on cards, drawn by hypothesis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from loader.snapshot.manifest import ModelSpec
from loader.snapshot.tables import RowDtype, TableSpec
from shard_node.bags import TableLayout
from shard_node.buckets import Partition
from shard_node.cuda.card_rows import Placer
from shard_node.cuda.kernel_params import RowFormat, owner_bits
from shard_node.planning.card_plan import CardBudget, CardPlan
from shard_node.planning.hotness import Hotness
from shardrank_testing.snapshots import model_of, num_buckets, table_of

DTYPES: tuple[RowDtype, ...] = ("int8", "int4", "fp16", "fp32")


def layout_of(tables: Sequence[TableSpec]) -> TableLayout:
    """The layout of a model with these tables."""
    return TableLayout.of(model_of(tables))


def one_table_layout(num_embeddings: int, embedding_dim: int = 8, dtype: RowDtype = "int8", **more) -> TableLayout:
    """The layout of a model with one table `items`."""
    return layout_of([table_of("items", num_embeddings, embedding_dim, "item", dtype=dtype, **more)])


def places_of(plan: CardPlan, table: int) -> np.ndarray:
    """The place of each row of a table, uint32 [num_embeddings]."""
    return np.concatenate([piece for _, piece in Placer(plan).pieces(table)])


def slots_of(places: np.ndarray, num_cards: int) -> np.ndarray:
    """The slot of each place that is not `NOT_HERE`, uint32 [n]."""
    return places >> np.uint32(owner_bits(num_cards))


def round_robin(layout: TableLayout, num_cards: int) -> Partition:
    """Bucket b of every table on card b % num_cards."""
    buckets = [np.arange(num_buckets(table)) for table in layout.tables]
    return Partition(num_cards, tuple((one % num_cards).astype(np.int16) for one in buckets))


def places_bytes(layout: TableLayout) -> int:
    """Of all rows' places, on each card."""
    return sum(4 * table.num_embeddings for table in layout.tables)


def strides(layout: TableLayout) -> list[int]:
    """Bytes of a row on a card, by table."""
    return [RowFormat.of(table.dtype, table.embedding_dim).stride for table in layout.tables]


@st.composite
def models(draw: st.DrawFn, rows: st.SearchStrategy[int], max_tables: int = 4) -> ModelSpec:
    """Up to so many tables of any dtype."""
    return model_of(
        [
            table_of(
                f"t{number}",
                draw(rows),
                draw(st.sampled_from([2, 4, 8, 10, 16, 64])),
                *(f"f{number}.{feature}" for feature in range(draw(st.integers(1, 2)))),
                dtype=draw(st.sampled_from(DTYPES)),
                bucketing=draw(st.sampled_from(["mixed", "range"])),
            )
            for number in range(draw(st.integers(1, max_tables)))
        ]
    )


def layouts(max_rows: int = 1500) -> st.SearchStrategy[TableLayout]:
    """Layouts of such models."""
    return models(st.integers(1, max_rows)).map(TableLayout.of)


@st.composite
def plan_inputs(draw: st.DrawFn) -> tuple[TableLayout, Partition, CardBudget, Hotness]:
    """Inputs of `CardPlan.make`: cards from too small for any row to large enough for all copies, and pinned memory."""
    layout = draw(layouts())
    num_cards = draw(st.integers(1, 8))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    first = draw(st.sampled_from([0, -1]))
    cards = tuple(rng.integers(first, num_cards, num_buckets(one)).astype(np.int16) for one in layout.tables)
    total = sum(one.num_embeddings * stride for one, stride in zip(layout.tables, strides(layout), strict=True))
    card_bytes = [places_bytes(layout) + int(total * share) for share in rng.uniform(0, draw(SHARES), num_cards)]
    budget = CardBudget(
        card_bytes=tuple(card_bytes),
        pinned_bytes=total,
        hot_bytes=draw(st.none() | st.integers(0, total)),
        peer_access=draw(st.booleans()),
    )
    return layout, Partition(num_cards, cards), budget, draw(hotnesses(layout, rng))


SHARES = st.sampled_from([0.0, 0.05, 0.3, 1.0, 2.5])


@st.composite
def hotnesses(draw: st.DrawFn, layout: TableLayout, rng: np.random.Generator) -> Hotness:
    """By table, by a power law, or by counts of some of the tables."""
    kind = draw(st.sampled_from(["uniform", "zipf", "counts"]))
    if kind == "uniform":
        return Hotness(lookups_per_sample={layout.tables[0].name: draw(st.sampled_from([0.0, 1.0, 40.0]))})
    if kind == "zipf":
        return Hotness(zipf=draw(st.sampled_from([0.3, 1.0, 1.05, 2.0])))
    counted = draw(st.lists(st.sampled_from(layout.tables), unique_by=lambda one: one.name, min_size=1))
    return Hotness(
        {
            table.name: np.minimum(rng.zipf(1.3, table.num_embeddings) - 1, 2**32 - 1).astype(np.uint32)
            for table in counted
        }
    )

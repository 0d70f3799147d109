"""Levers shrink a model, those first that change least; bytes and changed lookups are those of a reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from loader.access_counts import AccessCounts
from loader.description import Block, DtypeByPopularity, QuotientRemainderMapping, TableDescription
from loader.snapshot.codecs import RowCodec
from loader.snapshot.tables import HashMapping
from loader.traces import count_values
from router.table_shrinking import LEVERS, LeveredTable, Propose, share_of_lookups, stored_bytes
from router.table_sizing import RowLookups


def table(name: str, rows: int, dim: int = 32, *features: str, **options: Any) -> TableDescription:
    options = {"dtype": "fp32"} | options
    return TableDescription(
        name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features or (f"f_{name}",), **options
    )


def zipf_trace(features: Mapping[str, int], lookups: int = 4000) -> dict[str, AccessCounts]:
    """Ids of each feature below a limit, the lower the more often."""
    rng = np.random.default_rng(5)
    return {
        name: count_values(name, np.minimum(rng.zipf(1.3, lookups) - 1, limit - 1)) for name, limit in features.items()
    }


def shop() -> tuple[LeveredTable, ...]:
    hashed = HashMapping(seed=1)
    tables = (
        table("items", 400_000, 32, "item", "history", id_mapping=hashed),
        table("users", 60_000, 32, id_mapping=HashMapping(seed=2)),
        table("pages", 50_000, 32, id_mapping=hashed),
        table("films", 500_000, 32),
        table("odd", 100, 7),
    )
    traced = {"item": 20_000, "history": 20_000, "f_users": 3000, "f_pages": 4000, "f_films": 400_000, "f_odd": 100}
    trace = zipf_trace(traced)
    return tuple(LeveredTable.of(one, trace) for one in tables)


def counted(name: str, counts: Any, dim: int = 32, **options: Any) -> LeveredTable:
    """A table with so many lookups of each row."""
    described = table(name, len(counts), dim, **options)
    return LeveredTable.of(described, {}, RowLookups.alone(np.array(counts), of_ids=False))


def test_each_step_is_needed_and_those_without_training_come_first() -> None:
    tables = shop()
    before = stored_bytes(tables)
    seen: list[tuple[str, ...]] = []
    for limit in (before, before - 30_000_000, before // 20, before // 600, before // 2000, 20_000, 1000):
        proposal, done = Propose(limit).make(tables)
        steps = proposal.steps
        seen.append(tuple(step.lever for step in steps))
        assert [step.bytes_before for step in steps[1:]] == [step.bytes_after for step in steps[:-1]]
        assert all(step.bytes_after < step.bytes_before for step in steps)
        # Each lever but the last was not enough; what is left fits, or as many shards as it needs.
        assert all(step.bytes_after > limit for step in steps[:-1])
        assert proposal.bytes_after == stored_bytes(done)
        assert proposal.shards == -(-proposal.bytes_after // limit)
        assert sum(step.changed_share for step in steps) == pytest.approx(
            share_of_lookups(done) - share_of_lookups(tables)
        )
        needs_training = [step.needs_training for step in steps if step.lever != "shard"]
        assert needs_training == sorted(needs_training)
    assert seen[:2] == [(), ("prune",)]
    assert seen[-1][:3] == ("prune", "precision", "prune")
    assert set(seen[-1]) == set(LEVERS)
    assert seen[-1][-1] == "shard"


def test_precision_alone_is_proposed_where_it_fits() -> None:
    tables = (counted("films", [5] * 1000), counted("users", range(1, 501)))
    for limit, dtype in ((1500 * 64, "fp16"), (1500 * 40, "int8")):
        proposal, done = Propose(limit).make(tables)
        (step,) = proposal.steps
        assert (step.lever, step.needs_training, step.changed_share, step.all_changed_share) == (
            "precision",
            False,
            0,
            0,
        )
        assert proposal.bytes_after == limit
        assert [one.table.dtype for one in done] == [dtype] * 2


@pytest.mark.parametrize(
    ("counts", "limit", "lever", "changed"),
    [
        # 1,000 rows of int4 are 20,000 B. Dims change 95 % of the rows for 11,948 B, composing all of them for 15,000.
        ([10] * 1000, 5000, "compose", 1.0),
        ([1810] * 50 + [10] * 950, 5000, "dims", 0.095),
        # No byte below the limit counts: 11,900 B for 95 %, or for all.
        ([10] * 1000, 8100, "dims", 0.95),
    ],
)
def test_next_is_what_changes_fewest_lookups_per_byte(
    counts: list[int], limit: int, lever: str, changed: float
) -> None:
    proposal, _ = Propose(limit, levers=["precision", "compose", "dims"]).make((counted("films", counts),))
    precision, trained, *rest = proposal.steps
    assert (precision.lever, precision.bytes_after, precision.changed_share) == ("precision", 20_000, 0)
    assert (trained.lever, trained.needs_training, rest) == (lever, True, [])
    assert trained.changed_share == pytest.approx(changed)
    if lever == "dims":
        assert trained.bytes_after == 50 * 20 + 250 * 8 + 700 * 5 + 4 * 32 * (8 + 2) + 4 * 68


def test_a_hashed_table_is_cut_only_as_far_as_needed() -> None:
    tables = shop()
    row_bytes = 4 * 32
    limit = stored_bytes(tables) - 1000 * row_bytes
    _, (items, *others) = Propose(limit, levers=["fit"]).make(tables)
    films = others[-2]
    assert stored_bytes((items, *others)) == limit
    # The largest hashed table gives the rows; identity ids can't be hashed anew.
    assert (items.num_embeddings, films.num_embeddings) == (399_000, 500_000)


def test_pruned_rows_are_the_unused_and_then_the_rarest() -> None:
    counts = np.zeros(1000, np.int64)
    counts[::4] = 1
    counts[8] = 10_000
    tables = (counted("t", counts),)
    everything = 1000 * 128
    proposal, (pruned,) = Propose(everything // 2, keep_share=0.99).make(tables)
    assert [(step.lever, step.changed_share) for step in proposal.steps] == [("prune", 0)]
    assert (pruned.kept_rows, pruned.changed) == (250, 0)
    assert pruned.stored_bytes == 251 * 128 + 2 * 68
    proposal, (pruned,) = Propose(20_000, keep_share=0.99, levers=["prune"]).make(tables)
    assert pruned.kept_rows == np.ceil(0.99 * 10_249) - 10_000 + 1
    assert [step.lever for step in proposal.steps] == ["prune", "prune"]
    assert proposal.steps[1].changed_share == pytest.approx((250 - pruned.kept_rows) / 10_249)


def test_a_composed_table_has_the_textbooks_bytes() -> None:
    textbook = (LeveredTable.of(table("t", 2_000_000_000, 128), {}),)
    assert textbook[0].stored_bytes == 1.024e12
    proposal, (composed,) = Propose(5_130_000_000, levers=["compose"]).make(textbook)
    mapping = composed.table.id_mapping
    assert isinstance(mapping, QuotientRemainderMapping)
    assert mapping.buckets == pytest.approx(10_000_000, rel=0.003)
    assert composed.stored_bytes == (-(-2_000_000_000 // mapping.buckets) + mapping.buckets) * 512
    assert 5.1e9 < proposal.bytes_after <= 5.13e9
    # As many buckets as there is room for: with more it would not fit.
    assert composed.stored_bytes + 2 * 512 > 5_130_000_000
    assert proposal.steps[0].changed_share is None


def test_a_table_with_keys_is_stored_whole_in_fewer_bits() -> None:
    """With 20 bytes a key, in each slice."""
    keyed = TableDescription(
        name="users", keys="int64", capacity=1000, embedding_dim=32, column_dims=(16, 16), feature_names=("user",)
    )
    whole = LeveredTable.of(keyed, {}, RowLookups.alone(np.arange(1000), of_ids=False))
    assert whole.stored_bytes == 1000 * 2 * (16 + 8 + 20)
    proposal, (after,) = Propose(limit_bytes=1).make((whole,))
    assert [step.lever for step in proposal.steps] == ["precision", "shard"]
    assert (str(after), after.stored_bytes) == ("1000 x 32 int4", 1000 * 2 * (8 + 4 + 20))


def test_blocks_and_dtypes_have_the_bytes_of_their_parts() -> None:
    rng = np.random.default_rng(0)
    counts = np.sort(rng.zipf(1.2, 1000) % 1000)[::-1]
    blocks = (Block(share=0.1), Block(share=0.2, dim=8), Block(dim=2, dtype="int4"))
    described = table("t", 1000, blocks=blocks)
    made = LeveredTable.of(described, {}, RowLookups.alone(counts, of_ids=False))
    rows = [100, 200, 700]
    stored = sum(
        n * RowCodec(*one).row_bytes for n, one in zip(rows, (("fp32", 32), ("fp32", 8), ("int4", 2)), strict=True)
    )
    assert made.stored_bytes == stored + made.class_bytes
    # Two blocks of 512 bits for the table, and two for the 900 rows that are left, each with a count; projections.
    assert made.class_bytes == (2 + 2) * (64 + 4) + 4 * 32 * (8 + 2)
    assert made.changed == counts[100:].sum()
    by_popularity = made.in_dtypes("fp16", "int4", 0.1).updated(blocks=())
    two = by_popularity.updated(dtype=DtypeByPopularity(hot="fp32", cold="int4", hot_share=0.25))
    assert two.stored_bytes == 250 * 128 + 750 * (16 + 4) + two.class_bytes
    assert two.changed == 0


def test_a_collision_of_a_changed_row_is_counted_once() -> None:
    trace = zipf_trace({"f_t": 5000})
    made = LeveredTable.of(table("t", 2000, id_mapping=HashMapping()), trace)
    pruned = replace(made, keep_share=0.7)
    rows = made.rows
    kept = pruned.kept_rows
    expected = rows.lookups[kept:].sum() + rows.lookups[:kept][rows.is_shared[:kept]].sum()
    assert pruned.changed == expected
    assert share_of_lookups([pruned]) == pytest.approx(expected / rows.total)
    assert pruned.changed < rows.lookups[kept:].sum() + rows.colliding

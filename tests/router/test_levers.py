"""Levers shrink a model in their order, no further than asked; bytes and changed lookups are those of a reference."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from loader.access_counts import AccessCounts
from loader.description import Block, DtypeByPopularity, QuotientRemainderMapping, TableDescription
from loader.snapshot.codecs import codec_for
from loader.snapshot.tables import HashMapping
from loader.traces import count_values
from router.errors import FittingError
from router.fitting import RowLookups, TableIds
from router.levers import LEVERS, LeveredTable, Propose, levered, share_of_lookups, size_curve, stored_bytes


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
    return levered(tables, zipf_trace(traced), {})


def test_levers_are_used_in_order_as_far_as_needed() -> None:
    tables = shop()
    before = stored_bytes(tables)
    seen: list[tuple[str, ...]] = []
    for limit in (before, before - 30_000_000, before // 20, before // 60, before // 100, 20_000, 1000):
        proposal, done = Propose(limit).make(tables)
        steps = proposal.steps
        seen.append(tuple(one.lever for one in steps))
        assert seen[-1] == LEVERS[: len(steps)]
        assert [one.bytes_before for one in steps[1:]] == [one.bytes_after for one in steps[:-1]]
        assert all(one.bytes_after <= one.bytes_before for one in steps)
        # Each lever but the last was not enough; what is left fits, or as many shards as it needs.
        assert all(one.bytes_after > limit for one in steps[:-1])
        assert proposal.bytes_after == stored_bytes(done)
        assert proposal.shards == -(-proposal.bytes_after // limit)
        assert all(
            one.changed_share is not None and 0 <= one.changed_share <= one.all_changed_share <= 1 for one in steps
        )
        assert {one.lever for one in steps if one.needs_training} <= {"fit", "unify", "compose", "dims"}
    assert seen[0] == ()
    assert seen[1] == ("fit",)
    assert seen[-1] == LEVERS


def test_a_hashed_table_is_cut_only_as_far_as_needed() -> None:
    tables = shop()
    row_bytes = 4 * 32
    limit = stored_bytes(tables) - 1000 * row_bytes
    _, (items, *others) = Propose(limit).make(tables)
    films = others[-2]
    assert stored_bytes((items, *others)) == limit
    # The largest hashed table gives the rows; identity ids can't be hashed anew.
    assert (items.num_embeddings, films.num_embeddings) == (399_000, 500_000)


def test_pruned_rows_are_the_unused_and_then_the_rarest() -> None:
    counts = np.zeros(1000, np.int64)
    counts[::4] = 1
    counts[8] = 10_000
    tables = levered((table("t", 1000),), {}, {"t": RowLookups.alone(counts, of_ids=False)})
    everything = 1000 * 128
    proposal, (pruned,) = Propose(everything // 2, keep_share=0.99).make(tables)
    assert proposal.steps[0].note == "nothing: no hashed table with a trace of raw ids is larger than its ids need"
    assert (pruned.kept_rows, pruned.changed("prune"), proposal.steps[1].changed_share) == (250, 0, 0.0)
    assert pruned.stored_bytes == 251 * 128 + 2 * 68
    proposal, (pruned,) = Propose(20_000, keep_share=0.99, levers=["prune"]).make(tables)
    assert pruned.kept_rows == np.ceil(0.99 * 10_249) - 10_000 + 1
    assert proposal.steps[0].changed_share == pytest.approx((250 - pruned.kept_rows) / 10_249)


def test_equal_tables_are_unified_except_by_shared_seed() -> None:
    tables = shop()
    fitted = Propose(1, levers=["fit"]).make(tables)[1]
    limit = stored_bytes(fitted) - 1
    _, done = Propose(limit, max_collision_share=0.2, levers=["unify"]).make(tables)
    names = {one.table.name: one for one in done}
    assert names.keys() == {"items", "unified_1", "films", "odd"}
    unified = names["unified_1"]
    assert unified.table.feature_names == ("f_users", "f_pages")
    assert unified.table.id_mapping == HashMapping(salt="per_feature")
    asked = TableIds.of(unified.table, unified.traced)
    found = asked.rows(unified.table)
    assert found.colliding <= 0.2 * found.total
    assert unified.num_embeddings < 110_000


def test_a_composed_table_has_the_textbooks_bytes() -> None:
    textbook = levered((table("t", 2_000_000_000, 128),), {}, {})
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


def test_blocks_and_dtypes_have_the_bytes_of_their_parts() -> None:
    rng = np.random.default_rng(0)
    counts = np.sort(rng.zipf(1.2, 1000) % 1000)[::-1]
    blocks = (Block(share=0.1), Block(share=0.2, dim=8), Block(dim=2, dtype="int4"))
    described = table("t", 1000, blocks=blocks)
    made = LeveredTable(described, table("t", 1000), {}, None, RowLookups.alone(counts, of_ids=False))
    rows = [100, 200, 700]
    stored = sum(
        n * codec_for(*one).row_bytes for n, one in zip(rows, (("fp32", 32), ("fp32", 8), ("int4", 2)), strict=True)
    )
    assert made.stored_bytes == stored + made.class_bytes + 4 * 32 * (8 + 2)
    # Two blocks of 512 bits for the table, and two for the 900 rows that are left, each with a count.
    assert made.class_bytes == (2 + 2) * (64 + 4)
    assert made.changed("dims") == counts[100:].sum()
    assert made.changed("precision") == counts[300:].sum()
    assert made.changed() == counts[100:].sum()
    by_popularity = made.in_dtypes("fp16", "int4", 0.1).updated(blocks=())
    two = by_popularity.updated(dtype=DtypeByPopularity(hot="fp32", cold="int4", hot_share=0.25))
    assert two.stored_bytes == 250 * 128 + 750 * (16 + 4) + two.class_bytes
    assert two.changed("precision") == counts[250:].sum()


def test_a_collision_of_a_changed_row_is_counted_once() -> None:
    trace = zipf_trace({"f_t": 5000})
    (made,) = levered((table("t", 2000, id_mapping=HashMapping()),), trace, {})
    pruned = LeveredTable(made.table, made.table, trace, made.asked, None, 0.7)
    rows = made.rows
    kept = pruned.kept_rows
    expected = rows.lookups[kept:].sum() + rows.lookups[:kept][rows.is_shared[:kept]].sum()
    assert pruned.changed() == expected
    assert share_of_lookups([pruned]) == pytest.approx(expected / rows.total)
    assert pruned.changed() < pruned.changed("prune") + pruned.changed("fit")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit_bytes": 0}, "bytes 0 must be 1 or more"),
        ({"limit_bytes": 1, "max_collision_share": 1.0}, r"max_collision_share 1\.0 must be above 0 and below 1"),
        ({"limit_bytes": 1, "keep_share": 0.0}, r"keep_share 0\.0 must be above 0 and at most 1"),
        ({"limit_bytes": 1, "levers": ["fold"]}, r"levers \['fold'\] are not among \['fit', 'prune'"),
    ],
)
def test_levers_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FittingError, match=message):
        Propose(**options)


def test_the_curve_falls_to_a_hundredth_of_a_row_for_each_id() -> None:
    curve = size_curve(shop())
    assert (curve[0].rows_per_id, curve[-1].rows_per_id) == (1.0, 0.01)
    assert all(point.stored_bytes > after.stored_bytes for point, after in pairwise(curve))
    # Of four of the six features, which are hashed, no id is alone at last.
    assert curve[0].changed_share < curve[6].changed_share < curve[-1].changed_share == pytest.approx(4 / 6)
    assert size_curve(levered((table("t", 10),), {}, {})) == ()

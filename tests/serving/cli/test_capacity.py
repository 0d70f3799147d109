"""Capacity plans: what a batch asks, the engine's own placement, every byte and every lookup accounted for."""

from __future__ import annotations

import numpy as np
import pytest

from serving.cli.capacity import CapacityOptions, CapacityPlan, LookupProfile, catalog_model
from serving.errors import ModelNotFoundError
from shard_node.bags import TableLayout
from shard_node.planning.card_plan import CardPlan
from shard_node.planning.cost_model import SYSTEMS, BagLoad
from shardrank_testing.snapshots import make_spec


def options_of(**changes):
    base = {"system": SYSTEMS["h100"], "cards": 8, "card_memory_gb": 80.0, "pinned_memory_gb": 16.0}
    return CapacityOptions(**base | changes)


def planned(name="dlrm-v2", dtype="int8", zipf=None, **changes):
    found = catalog_model(name, dtype)
    profile = LookupProfile(hotness=found.hotness, zipf=found.zipf if zipf is None else zipf)
    return CapacityPlan.make(found.spec, profile, options_of(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"name": "merlin-jumbo", "pinned_memory_gb": 200.0, "shards": 2},
        {"card_memory_gb": 4.0, "pinned_memory_gb": 6.0},
        {"card_memory_gb": 4.0, "shards": 2, "cards": 3},
        {"card_memory_gb": 20.0, "peer_access": False},
        {"cards": 1, "card_memory_gb": 20.0},
    ],
)
def test_cards_hold_no_more_than_they_may_and_every_lookup_goes_somewhere(changes):
    plan = planned(**changes)
    budget = int(plan.options.card_memory_gb * 1e9)
    for one in plan.cards:
        assert one.hot_bytes + one.own_bytes + one.places_bytes + one.free_bytes == budget
        assert one.free_bytes >= 0
    assert plan.pinned_bytes <= plan.options.pinned_memory_gb * 1e9
    assert sum(one.lookup_share for one in plan.tiers) == pytest.approx(1)
    by_tier = {one.tier: one.rows for one in plan.tiers}
    assert by_tier["card"] == by_tier["peer"] == sum(one.card_rows for one in plan.tables)
    assert by_tier["hot"] == sum(one.hot_rows for one in plan.tables)
    rows = by_tier["hot"] + by_tier["card"] + by_tier["pinned"]
    assert (rows == plan.num_rows) == (plan.options.shards == 1)
    assert plan.fits_on_cards == (by_tier["pinned"] == 0)


def test_a_plan_is_the_engines_own(monkeypatch):
    made = []
    make = CardPlan.make

    def keep(*args, **kwargs):
        made.append(make(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(CardPlan, "make", keep)
    plan = planned(card_memory_gb=5.0, hot_gb=0.5)
    (engine,) = made
    assert [(one.hot_rows, one.card_rows, one.pinned_rows) for one in plan.tables] == [
        (one.hot_rows, one.card_rows, one.host_rows) for one in engine.splits
    ]
    assert [(one.hot_bytes, one.own_bytes, one.places_bytes) for one in plan.cards] == [
        tuple(engine.bytes(card)) for card in range(8)
    ]


def test_counts_decide_where_rows_go():
    spec = make_spec(dtype="int8")
    counts = np.zeros(1000, np.uint32)
    counts[500:600] = 100
    idle = {one.name: 0.0 for one in spec.features if one.name != "user"}
    profile = LookupProfile(counts={"user": counts}, hotness=idle)
    plan = CapacityPlan.make(spec, profile, options_of(cards=2, hot_gb=100 * 32 / 1e9))
    user = next(one for one in plan.tables if one.name == "user")
    assert user.hot_rows == 100


def test_context_features_are_looked_up_once_a_request_and_others_once_a_candidate():
    spec = make_spec()
    layout = TableLayout.of(spec)
    profile = LookupProfile(hotness={"film": 2, "history": 30, "genre": 1.5})
    found = profile.loads(spec, layout, 3, 100)
    loads = {table.name: load for table, load in zip(layout.tables, found, strict=True)}
    assert loads["user"] == BagLoad(3, 3, 1)
    # `film` is pooled, once a candidate; each id of `history`, once a request, is a row of its own.
    assert loads["film"] == BagLoad(2 * 100 + 30 * 3, 100 + 30 * 3, 2)
    assert loads["genre"] == BagLoad(150, 100, 1.5)
    assert loads["tag"] == BagLoad(100 + 3, 100 + 3, 1)


@pytest.mark.parametrize(
    ("name", "tables", "gibibytes"),
    [
        ("dlrm-v2", 26, 97.4),
        ("merlin-tiny", 55, 4.2),
        ("merlin-small", 107, 26.3),
        ("merlin-medium", 311, 206.2),
        ("merlin-large", 612, 773.8),
        ("merlin-jumbo", 1022, 3109.5),
        ("merlin-colossal", 2002, 22327.4),
        ("textbook", 1, 953.7),
    ],
)
def test_a_published_model_has_its_published_size(name, tables, gibibytes):
    found = catalog_model(name, "fp32").spec.tables
    assert len(found) == tables
    assert round(sum(4 * table.num_embeddings * table.embedding_dim for table in found) / 2**30, 1) == gibibytes


def test_a_name_that_is_not_in_the_catalog_is_refused():
    with pytest.raises(ModelNotFoundError, match="'dlrm' is not in the catalog; it has dlrm-v2, merlin-tiny"):
        catalog_model("dlrm")

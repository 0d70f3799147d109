"""A model with every lever from rows to scores: it scores like its twin, whose whole tables have the same rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from loader.registry.fleet import DenseStep
from loader.snapshot.row_source import ArrayRows
from loader.snapshot.writer import export_snapshot
from router.planning.capacity import capacity
from router.planning.inputs import CapacityOptions, LookupProfile
from serving.rank.ranking import MergedBatch
from serving.versions.loaded_version import LoadedVersion
from shard_node.planning.cost_model import SYSTEMS
from shardrank_testing.card_engines import OnCards, engine_params, options_for
from shardrank_testing.card_ranking import (
    DENSE,
    SHOP_LEVERS,
    num_graphs,
    num_replays,
    ranking_of,
    score,
    served_on,
    shop_batch,
    shop_levers,
    shop_spec,
)
from shardrank_testing.divided import Twins, write_twins
from shardrank_testing.ranking import random_tensors

ON = (OnCards(1, "peers"), OnCards(3, "every tier"))
COMPOSED = {"kind": "quotient_remainder", "buckets": 16}


def shop_twins(folder: Path, kind: str, levers: dict | None = None, **how) -> Twins:
    spec = shop_spec(kind)
    description = shop_levers(spec, SHOP_LEVERS if levers is None else levers)
    return write_twins(folder, description, dense=random_tensors(spec, 5), version=1, **how)


def batches_of(served: LoadedVersion) -> list[MergedBatch]:
    """The same requests for every model of that shape."""
    rng = np.random.default_rng(3)
    candidates = (((1,), 4), ((7, 3), 4), ((40, 2), 4), ((5, 1, 20), 26))
    return [shop_batch(served, rng, counts, longest=longest) for counts, longest in candidates]


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("on", engine_params(ON, (OnCards(2, "peers", "logical"),)))
def test_divided_and_sliced_tables_score_like_whole_ones(tmp_path, kind, on):
    """On cards again and again: by graphs too."""
    levers = SHOP_LEVERS | ({"tags": {"id_mapping": COMPOSED}} if on.num_cards == 1 else {})
    twins = shop_twins(tmp_path, kind, levers, pruned=("films",))
    divided = twins.divided.path
    assert [table.name for table in twins.divided.spec.divided] == [name for name in levers if name != "genres"]
    topology = {"local_shards": 3, "cards": 2, "sharding": "table", "replicate_bytes": 0}
    with (
        served_on(divided, None) as in_memory,
        served_on(divided, None, **topology) as sharded,
        served_on(divided, on) as on_cards,
        served_on(twins.whole.path, None) as whole,
    ):
        expected = [score(whole, batch) for batch in batches_of(whole)]
        for served in (in_memory, sharded, *[on_cards] * 3):
            for batch, scores in zip(batches_of(served), expected, strict=True):
                np.testing.assert_allclose(score(served, batch), scores, rtol=1e-4, atol=1e-5)
        scorer = ranking_of(on_cards).scorer
        assert num_graphs(scorer) == len(scorer.classes) > 3
        assert num_replays(scorer) >= 2 * len(expected)
        assert {batch.is_graph for batch in scorer._batches.values()} == {kind != "target_attention"}


@pytest.mark.parametrize("on", ON, ids=str)
def test_hot_and_cold_rows_take_their_planned_bytes(tmp_path, on):
    twins = shop_twins(tmp_path, "mlp")
    spec = twins.divided.spec
    planned = capacity(
        spec,
        LookupProfile(counts={one.name: twins.divided.access_counts(one.slices[0].name) for one in spec.tables}),
        CapacityOptions(
            system=SYSTEMS["h100"],
            cards=on.num_cards,
            **options_for(spec, on.num_cards, on.tiers).model_dump(
                include={"card_memory_gb", "hot_gb", "pinned_memory_gb"}
            ),
        ),
    )
    on_cards = {table["name"]: table["on_cards_bytes"] for table in planned["tables"]}
    # Rows on cards take whole 16 bytes.
    assert (on_cards["films.b0"], on_cards["films.b1"]) == (50 * 32, 450 * 16)
    assert sum(on_cards.values()) == planned["size"]["on_cards_bytes"]
    held = {(one.card, one.tier): one.size_bytes for one in on.load(twins.divided).memory()}
    assert held == {
        **{(card["card"], "card"): card["own_bytes"] + card["places_bytes"] for card in planned["cards"]},
        **{(card["card"], "hot"): card["hot_bytes"] for card in planned["cards"] if card["hot_bytes"]},
        **({(0, "pinned"): planned["pinned_bytes"]} if planned["pinned_bytes"] else {}),
    }


@pytest.mark.parametrize("on", [None, OnCards(2, "peers")], ids=str)
def test_a_dense_step_brings_its_projections_with_it(tmp_path, on):
    twins = shop_twins(tmp_path, "mlp", {"cities": SHOP_LEVERS["cities"]})
    # Twice the projection is twice the row.
    rows = {name: ArrayRows(one * (2 if name == "cities" else 1)) for name, one in twins.rows.items()}
    spec = twins.whole.spec
    doubled = export_snapshot(tmp_path / "doubled", spec, rows=rows, dense=twins.whole.dense_tensors(), version=1)
    tensors = twins.divided.dense_tensors()
    tensors["projections.cities"] = tensors["projections.cities"] * 2
    record = DenseStep(
        model=spec.model, version=1, step=1, sequence=0, sha256="", size_bytes=0, max_drift=1.0, published_at=0.0
    )
    with (
        served_on(twins.divided.path, on) as own,
        served_on(twins.whole.path, None) as before,
        served_on(doubled, None) as after,
    ):
        for expected in (before, after):
            for batch, same in zip(batches_of(own), batches_of(expected), strict=True):
                np.testing.assert_allclose(score(own, batch), score(expected, same), rtol=1e-4, atol=1e-5)
            own.change_dense(twins.divided, tensors, record, 1.0)

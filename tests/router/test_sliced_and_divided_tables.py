"""Features of sliced and divided tables: the router joins what slices and parts give, however rows are divided."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loader.errors import ShardrankError
from loader.snapshot.row_classes import RowClasses
from router.feature_schema import FeatureSchema
from router.id_mapping import PartRows
from shard_node.bags import Bags
from shardrank_testing.divided import Twins, describe, write_twins
from shardrank_testing.snapshots import make_spec
from shardrank_testing.topologies import Topology, local_router, lookup, random_feature_bags

BLOCKS = [{"share": 0.1}, {"share": 0.3, "dim": 6, "dtype": "fp16"}, {"dim": 2, "dtype": "int4"}]
HOT_AND_COLD = {"dtype": {"hot": "fp16", "cold": "int4", "hot_share": 0.2}}
LEVERS = {
    "user": [
        {},
        {"column_dims": (4, 2, 6, 2, 2)},
        HOT_AND_COLD,
        {"blocks": BLOCKS},
        {"id_mapping": {"kind": "hash", "salt": "per_feature"}},
    ],
    "film": [
        {},
        {"column_dims": (10, 3, 3)},
        HOT_AND_COLD,
        {"blocks": BLOCKS},
        {"id_mapping": {"kind": "quotient_remainder", "buckets": 30}},
        {"embedding_dim": 4, "project_to": 16},
    ],
    "genre": [
        {},
        {"column_dims": (5, 3)},
        {"id_mapping": {"kind": "quotient_remainder", "buckets": 4}},
        HOT_AND_COLD,
    ],
    "tag": [
        {},
        {"column_dims": (6, 2)},
        {"id_mapping": {"kind": "quotient_remainder", "buckets": 17}},
        {"blocks": [{"share": 0.5, "dtype": "fp32"}, {"dim": 4}]},
    ],
    "city": [{}, {"column_dims": (1, 3)}, {"embedding_dim": 2, "project_to": 8}],
}


def by_name(snapshot, router, bags: Bags, projections=None) -> dict[str, np.ndarray]:
    embeddings = asyncio.run(lookup(router, snapshot, bags))
    found = {}
    for key in bags.keys.tolist():
        name = router.schema.features[key].name
        found |= {name: embeddings.feature(key, projections), f"{name} lengths": embeddings.lengths(key)}
    return found


def in_order_of(twins: Twins, bags: Bags) -> Bags:
    """Return the same bags with the flat indices of the whole twin, whose tables are in another order."""
    schema, other = FeatureSchema.of(twins.divided.spec), FeatureSchema.of(twins.whole.spec)
    keys = np.array([other.index[schema.features[key].name] for key in bags.keys.tolist()], np.int32)
    order = np.argsort(keys)

    def ordered(array: np.ndarray, starts: np.ndarray) -> np.ndarray:
        return np.concatenate([array[:0], *(array[starts[one] : starts[one + 1]] for one in order)])

    values = [ordered(array, bags.value_starts()) for array in (bags.values, bags.weights)]
    return Bags.from_lengths(keys[order], bags.bags_per_key[order], ordered(bags.lengths, bags.bag_starts()), *values)


@given(
    levers=st.fixed_dictionaries({name: st.sampled_from(ways) for name, ways in LEVERS.items()}),
    bucketing=st.sampled_from(["mixed", "range"]),
    pruned=st.booleans(),
    shards=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(suppress_health_check=list(HealthCheck))
def test_any_levers_give_what_whole_tables_give(levers, bucketing, pruned, shards, seed):
    rng = np.random.default_rng(seed)
    cut = ("user", "film") if pruned else ()
    # Parts that are trained as such bring no row for those that are pruned.
    cut = tuple(name for name in cut if levers[name] in ({}, HOT_AND_COLD))
    with tempfile.TemporaryDirectory() as folder:
        twins = write_twins(Path(folder), describe(make_spec(bucketing=bucketing), levers), pruned=cut, seed=seed)
        topology = Topology(shards, 2, "table" if shards > 1 else None, replicate_bytes=4096 if seed % 2 else 0)
        router, plain = local_router(twins.divided, topology), local_router(twins.whole, Topology())
        count = len(router.schema.features)
        some = sorted(rng.choice(count, int(rng.integers(1, count + 1)), replace=False).tolist())
        for features in (list(range(count)), some):
            bags = random_feature_bags(router.schema, rng, features=features)
            found = by_name(twins.divided, router, bags, twins.projections)
            expected = by_name(twins.whole, plain, in_order_of(twins, bags))
            assert found.keys() == expected.keys()
            for name, values in found.items():
                np.testing.assert_allclose(values, expected[name], rtol=1e-4, atol=1e-4, err_msg=name)


def test_classes_of_other_tables_are_refused_by_name(tmp_path):
    twins = write_twins(tmp_path, describe(make_spec(), {"film": HOT_AND_COLD}))
    schema = FeatureSchema.of(twins.divided.spec)
    with pytest.raises(ShardrankError, match=r"row classes of \['user'\] were given; the model needs \['film'\]"):
        PartRows(schema, {"user": RowClasses.of(np.zeros(3, np.uint8), 2)})

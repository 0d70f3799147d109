from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.snapshot.codecs import bucket_shift
from loader.snapshot.manifest import DenseModelSpec, FeatureSpec, ModelSpec, TableSpec
from router.plan import REPLICATED, BucketOwners, Plan
from shard_node.bags import KeyedBags


def spec_of(sizes: list[int], bucketing: str) -> ModelSpec:
    return ModelSpec(
        model="owners",
        tables=tuple(
            TableSpec(
                name=f"t{number}",
                num_embeddings=size,
                embedding_dim=8,
                dtype="int8",
                bucketing=bucketing,
                feature_names=(f"f{number}",),
            )
            for number, size in enumerate(sizes)
        ),
        features=tuple(FeatureSpec(name=f"f{number}", side="candidate") for number in range(len(sizes))),
        dense_model=DenseModelSpec(kind="mlp"),
    )


def bags_of(plan: Plan, rng: np.random.Generator, keys: list[int]) -> KeyedBags:
    counts = rng.integers(0, 40, len(keys))
    rows = [
        rng.integers(0, plan.layout.tables[key].num_embeddings, count) for key, count in zip(keys, counts, strict=True)
    ]
    values = np.concatenate([*rows, np.empty(0, np.int64)]).astype(np.int64)
    return KeyedBags.from_lengths(
        np.array(keys, np.int32), counts.astype(np.int64), np.ones(values.size, np.int64), values
    )


def expected_owners(plan: Plan, bags: KeyedBags, up: list[int], turn: int) -> list[int]:
    owners, starts = [], bags.value_starts().tolist()
    for segment, key in enumerate(bags.keys.tolist()):
        table = plan.layout.tables[key]
        shift = bucket_shift(table.bucketing, table.num_embeddings)
        for row in bags.values[starts[segment] : starts[segment + 1]].tolist():
            owner = int(plan.shard_of_bucket[key, (row >> shift) & 255])
            owners.append(up[(key + turn) % len(up)] if owner == REPLICATED else owner)
    return owners


@settings(deadline=None)
@given(
    sizes=st.lists(st.sampled_from([3, 255, 256, 1000, 70_000, 1 << 20]), min_size=1, max_size=4),
    bucketing=st.sampled_from(["hash", "range"]),
    by_table=st.booleans(),
    shards=st.sampled_from([2, 3, 4, 5, 7, 255, 256, 257, 1000]),
    replicate_bytes=st.sampled_from([0, 4096, 1 << 30]),
    turn=st.integers(0, 2**70),
    seed=st.integers(0, 2**32),
)
def test_every_value_has_the_owner_that_the_plan_gives_its_bucket(
    sizes, bucketing, by_table, shards, replicate_bytes, turn, seed
):
    sharding = "table" if by_table else bucketing
    plan = Plan.make(spec_of(sizes, bucketing), shards, sharding, replicate_bytes=replicate_bytes)
    rng = np.random.default_rng(seed)
    up = sorted(rng.choice(shards, rng.integers(1, shards + 1), replace=False).tolist())
    bags = bags_of(plan, rng, [key for key in range(len(sizes)) if rng.random() < 0.8])
    owners = BucketOwners(plan).of(bags, lambda: np.array(up, np.int16), turn)
    assert owners.dtype == (np.uint8 if shards <= 256 else np.uint16)
    assert owners.tolist() == expected_owners(plan, bags, up, turn)


@pytest.mark.parametrize("shards", [2, 3, 4, 5, 8])
def test_who_is_up_is_not_asked_where_nothing_is_replicated(shards):
    plan = Plan.make(spec_of([100_000, 100_000], "hash"), shards, replicate_bytes=0)
    bags = bags_of(plan, np.random.default_rng(1), [0, 1])

    def nobody():
        raise AssertionError("asked")

    assert BucketOwners(plan).of(bags, nobody, 0).tolist() == expected_owners(plan, bags, [0], 0)

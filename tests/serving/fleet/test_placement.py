"""What `up` and the demo say about where tables go."""

from __future__ import annotations

import pytest

from router.plan import Plan
from serving.fleet.local_fleet import placement_line
from serving.training.dataset import with_bucketing
from shardrank_testing.snapshots import make_spec

# Rows as stored: user 1000 x 24 bytes and film 777 x 24 are above 10 kB, the other tables below.
CASES = [
    (2, "hash", 10_000, "on every shard: city, genre, tag; split over 2 shards: user, film"),
    (3, "hash", 0, "on every shard: none; split over 3 shards: city, genre, tag, user, film"),
    (2, "table", 10_000, "on every shard: city, genre, tag; whole on one shard each: user, film"),
    (2, "hash", 1 << 20, "on every shard: city, genre, tag, user, film; split over 2 shards: none"),
    (1, "hash", 1 << 20, "one shard holds every table: city, genre, tag, user, film"),
]


@pytest.mark.parametrize(("shards", "sharding", "replicate_bytes", "line"), CASES)
def test_every_table_is_told_as_whole_or_divided(shards, sharding, replicate_bytes, line):
    assert placement_line(Plan.make(with_bucketing(make_spec(), "hash"), shards, sharding, 1, replicate_bytes)) == line

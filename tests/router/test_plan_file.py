"""A plan file says who owns every bucket; what was changed, or is for another model or fleet, is refused."""

from __future__ import annotations

import asyncio
import base64
import json
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loader.errors import SnapshotCorruptError
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.reader import Snapshot
from loader.snapshot.tables import NUM_BUCKETS
from router.errors import PlanError
from router.plan import REPLICATED, Plan
from router.plan_file import PlanFile, RanksOfBuckets, TablePlan
from shard_node.node import LocalShard
from shardrank_testing.snapshots import make_spec, sharding_of, write_snapshot
from shardrank_testing.topologies import StoredModel, lookup, make_node, make_router

KINDS = ["data_parallel", "table_wise", "row_wise", "column_wise", "grid_shard"]
DTYPES = ["int8", "int4", "fp16", "fp32"]


def ranks_of(kind: str, count: int, shards: int, cards: int, rng: np.random.Generator) -> RanksOfBuckets:
    """Random owners that the kind allows."""
    if kind == "data_parallel":
        return RanksOfBuckets(ranks=tuple(shard * cards + int(rng.integers(cards)) for shard in range(shards)))
    shard = int(rng.integers(shards)) if kind in ("table_wise", "column_wise") else rng.integers(0, shards, count)
    return RanksOfBuckets.of(np.broadcast_to(shard * cards, count) + rng.integers(0, cards, count))


def file_of(spec: ModelSpec, kinds: list[str], shards: int, cards: int, seed: int) -> PlanFile:
    rng, tables = np.random.default_rng(seed), []
    for table, kind in zip(spec.tables, kinds, strict=True):
        slices = 2 if kind in ("column_wise", "grid_shard") else 1
        tables.append(
            TablePlan(
                table=table.name,
                num_embeddings=table.num_embeddings,
                bucketing=table.bucketing,
                sharding_type=kind,
                column_dims=(table.embedding_dim // 2,) * 2 if slices == 2 else (),
                slices=tuple(ranks_of(kind, NUM_BUCKETS[table.bucketing], shards, cards, rng) for _ in range(slices)),
            )
        )
    return PlanFile.of(spec.model, shards, cards, tables)


@st.composite
def plans(draw: st.DrawFn) -> tuple[ModelSpec, PlanFile]:
    spec = make_spec(dtype=draw(st.sampled_from(DTYPES)), bucketing=draw(st.sampled_from(["mixed", "range"])))
    kinds = [draw(st.sampled_from(KINDS)) for _ in spec.tables]
    shards, cards = draw(st.sampled_from([1, 3, 4])), draw(st.sampled_from([1, 4]))
    return spec, file_of(spec, kinds, shards, cards, draw(st.integers(0, 2**32 - 1)))


@given(plans())
def test_a_file_is_read_as_it_was_written(planned):
    _, file = planned
    assert PlanFile.parse("plan.json", file.to_json().encode()) == file
    # What is packed is not unpacked beyond the buckets that there are.
    packed = base64.b64encode(zlib.compress(bytes(4 << 20), 9)).decode()
    with pytest.raises(PlanError, match="does not hold 256 numbers"):
        RanksOfBuckets(ranks=(0, 1), packed=packed).rank_of_bucket(256)


@settings(suppress_health_check=list(HealthCheck))
@given(planned=plans(), seed=st.integers(0, 2**32 - 1))
def test_any_plan_gives_the_references_answer(planned, seed):
    spec, file = planned
    with tempfile.TemporaryDirectory() as folder:
        stored = StoredModel(Path(folder), file.sliced(spec), seed, plan=file.to_json().encode())
        plan = Plan.of_snapshot(stored.snapshot, file.num_shards, sharding_of(spec), file.cards_per_shard)
        assert plan.digest == file.digest
        nodes = [make_node(stored.snapshot, plan, shard) for shard in range(file.num_shards)]
        router = make_router(stored.snapshot, plan, [LocalShard(node) for node in nodes])
        bags = stored.bags(np.random.default_rng(seed), 3)
        stored.check(bags, asyncio.run(lookup(router, stored.snapshot, bags)))
        asyncio.run(router.close())


SPEC = make_spec(dtype="int8")
FILE = file_of(SPEC, (KINDS * 3)[: len(SPEC.tables)], 2, 2, 1)
SLICED = FILE.sliced(SPEC)


def changed(**fields: object) -> bytes:
    return json.dumps(json.loads(FILE.to_json()) | fields).encode()


def with_first_table(**fields: object) -> bytes:
    document = json.loads(FILE.to_json())
    document["tables"][0] |= fields
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (changed(num_shards=4), "digest is .*, but the content has .*: it was changed"),
        (changed(model="another"), "it was changed"),
        (with_first_table(num_embeddings=7), "it was changed"),
        (changed(extra=1), r"unknown key 'extra'; allowed are \['format_version', 'model'"),
        (changed(format_version=2), "format_version"),
        (changed(num_shards=5000), "less than or equal to 1024"),
        (with_first_table(sharding_type="row"), "'data_parallel', 'table_wise', 'row_wise'"),
        (with_first_table(slices=[]), "at least 1 item"),
        (with_first_table(slices=[{"ranks": [3, 1]}]), "ranks must ascend"),
        (b"[]", "document"),
        (b"\xff", "JSON"),
    ],
)
def test_what_was_changed_is_refused(content, problem):
    with pytest.raises(PlanError, match=problem):
        PlanFile.parse("plan.json", content)


def test_a_file_of_many_mistakes_is_refused_in_a_short_message():
    """Each was compared with all others once."""
    with pytest.raises(PlanError, match="k0: unknown key 'k0'") as refusal:
        PlanFile.parse("plan.json", changed(**{f"k{number}": 1 for number in range(20_000)}))
    assert len(str(refusal.value)) < 5000


def one_table(kind: str, ranks: RanksOfBuckets) -> bytes:
    """A file whose digest is right, whatever it says."""
    table = TablePlan(table="t", num_embeddings=5000, bucketing="range", sharding_type=kind, slices=(ranks,))
    return PlanFile.of("m", 2, 2, [table]).to_json().encode()


HALVES = np.arange(256) % 2 * 2


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (one_table("table_wise", RanksOfBuckets(ranks=(4,))), r"table 't': rank is 4, allowed is 0\.\.3"),
        (one_table("table_wise", RanksOfBuckets.of(HALVES)), "ranks are of 2 shards; table_wise allows 1"),
        (one_table("data_parallel", RanksOfBuckets(ranks=(0, 1))), "needs one card of each of the 2 shards"),
        (one_table("data_parallel", RanksOfBuckets(ranks=(0,))), "needs one card of each of the 2 shards"),
        (one_table("row_wise", RanksOfBuckets(ranks=(0, 2))), "packed is empty, but there are 2 ranks"),
        (one_table("row_wise", RanksOfBuckets.of(np.arange(100) % 2 * 2)), "does not hold 256 numbers"),
        (one_table("row_wise", RanksOfBuckets.of(np.arange(4096) % 2 * 2)), "does not hold 256 numbers"),
        (one_table("row_wise", RanksOfBuckets(ranks=(0, 2), packed="AAAA")), "can't be unpacked"),
        (
            one_table("row_wise", RanksOfBuckets.of(HALVES).model_copy(update={"ranks": (0, 1, 2)})),
            r"allowed is each of 0\.\.2",
        ),
    ],
)
def test_impossible_ranks_are_refused(content, problem):
    with pytest.raises(PlanError, match=problem):
        PlanFile.parse("plan.json", content)


@pytest.mark.parametrize(
    ("spec", "shards", "cards", "problem"),
    [
        (SLICED.model_copy(update={"model": "other"}), 2, 2, "model is 'films', allowed here is 'other'"),
        (SLICED, 3, 2, "num_shards is 2, allowed here is 3"),
        (SLICED, 2, 1, "cards_per_shard is 2, allowed here is 1"),
        (SPEC, 2, 2, r"column_dims is \(\d+, \d+\), allowed here is \(\)"),
        (SLICED.model_copy(update={"tables": SLICED.tables[:-1]}), 2, 2, "tables has"),
        (make_spec(dtype="int8", bucketing="range"), 2, 2, "allowed here is"),
    ],
)
def test_a_plan_of_another_model_or_fleet_is_refused(spec, shards, cards, problem):
    with pytest.raises(PlanError, match=problem):
        Plan.of_file(spec, FILE, shards, cards)


def test_a_snapshots_plan_is_used_where_its_shards_fit(tmp_path):
    path, _ = write_snapshot(tmp_path, SLICED, plan=FILE.to_json().encode())
    snapshot = Snapshot.open(path)
    assert Plan.of_snapshot(snapshot, 2, cards_per_shard=2).digest == FILE.digest
    # A router does not know the cards; a node with others divides its own part over those it has.
    router, node = Plan.of_snapshot(snapshot, 2), Plan.of_snapshot(snapshot, 2, cards_per_shard=3)
    assert router.digest == node.digest == FILE.digest
    for owners, cards in zip(node.shard_of_bucket, node.partition(1).card_of_bucket, strict=True):
        assert ((cards >= 0) == ((owners == 1) | (owners == REPLICATED))).all()
    assert Plan.of_snapshot(snapshot, 3).digest == Plan.make(SLICED, 3).digest
    another = file_of(SPEC, [one.sharding_type for one in FILE.tables], 2, 2, seed=9)
    assert Plan.of_snapshot(snapshot, 2, cards_per_shard=2, file=another).digest == another.digest


def test_a_snapshot_with_a_broken_plan_is_refused(tmp_path):
    path, _ = write_snapshot(tmp_path, SLICED, plan=changed(num_shards=4))
    with pytest.raises(PlanError, match="it was changed"):
        Plan.of_snapshot(Snapshot.open(path), 2)
    (path / "plan.safetensors").write_bytes(b"")
    with pytest.raises(SnapshotCorruptError):
        Snapshot.open(path)

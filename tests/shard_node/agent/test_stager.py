"""Staging takes nothing on trust: what is not exactly the published version is refused before it could be pooled."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loader.errors import SnapshotCorruptError, SnapshotError
from loader.registry.fleet import PublishedVersion
from loader.snapshot.buckets import RowBuckets
from loader.snapshot.reader import Snapshot
from shard_node.agent.node_agent import share_of, stage_tables
from shard_node.engine.loading import load_tables
from shard_node.engine.memory import RowMemory
from shard_node.errors import MemoryBudgetError
from shardrank_testing.agents import plan_of
from shardrank_testing.bags import assert_blocks_equal, random_table_bags
from shardrank_testing.snapshots import make_spec, restate_file, rewrite_manifest, write_snapshot

GIB = 1 << 30


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    path, _ = write_snapshot(tmp_path_factory.mktemp("store"), make_spec(), seed=3, rows_per_file=256)
    return path


@pytest.fixture
def copy(pristine, tmp_path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "films" / "1"))


def record_of(folder: Path) -> PublishedVersion:
    snapshot = Snapshot.open(folder, verify=False, files="rows")
    return PublishedVersion(
        model="films", version=1, identity=snapshot.identity, delta_base=1, last_delta=0, rows_bytes=0, published_at=0.0
    )


def stage(folder: Path, published: PublishedVersion | None = None, memory: RowMemory | None = None, **options):
    return stage_tables(folder, published or record_of(folder), plan_of, memory=memory or RowMemory(), **options)


@pytest.mark.parametrize("budget", [None, 0, 20_000])
def test_a_sound_version_is_staged_as_loaded(pristine, budget):
    shares: list[float] = []
    memory = RowMemory()
    tables = stage(pristine, memory=memory, memory_budget_bytes=budget, progress=share_of(shares.append))
    snapshot = Snapshot.open(pristine)
    bags = random_table_bags(np.random.default_rng(1), tables.engine.layout, 50, 5)
    expected = load_tables(snapshot, *plan_of(snapshot)).engine.pool(bags)
    assert_blocks_equal(tables.engine.pool(bags), expected, scale=1.0)
    assert tables.manifest_identity == snapshot.identity
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert memory.held_bytes == sum(use.size_bytes for use in tables.engine.memory() if use.tier == "ram")
    tables.close()
    assert memory.held_bytes == 0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_bit_flip_anywhere_in_a_row_file_is_refused(copy, data):
    files = sorted((copy / "tables").rglob("rows-*"))
    path = data.draw(st.sampled_from(files))
    content = path.read_bytes()
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    published = record_of(copy)
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    path.write_bytes(changed)
    memory = RowMemory()
    try:
        with pytest.raises(SnapshotError):
            stage(copy, published, memory)
    finally:
        path.write_bytes(content)
    assert memory.held_bytes == 0


@pytest.mark.parametrize("budget", [None, 0], ids=["in ram", "left in mapped files"])
def test_a_row_with_a_nan_scale_is_refused_by_name(copy, budget):
    # Of table film, dim 16 in int8: the scale is bytes 16 to 20 of a row of 24.
    (path,) = (copy / "tables" / "film").iterdir()
    content = bytearray(path.read_bytes())
    snapshot = Snapshot.open(copy)
    table = snapshot.spec.table_of("film")
    rows = snapshot.rows_file("film", 0)
    position = int(RowBuckets.of(table).in_file(4096, 0).positions(np.array([700]))[0])
    start = len(content) - rows.nbytes + position * 24
    content[start + 16 : start + 20] = np.float32(np.nan).tobytes()
    path.write_bytes(content)
    restate_file(copy, str(path.relative_to(copy)))
    memory = RowMemory()
    with pytest.raises(SnapshotCorruptError, match=r"table 'film', row 700: decodes to NaN or inf"):
        stage(copy, memory=memory, memory_budget_bytes=budget)
    assert memory.held_bytes == 0


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda copy: shutil.rmtree(copy / "tables" / "city"), "city"),
        (lambda copy: rewrite_manifest(copy, lambda manifest: manifest["tables"].pop()), "tables"),
        (
            lambda copy: rewrite_manifest(copy, lambda manifest: manifest["metadata"].update(changed="later")),
            "published was",
        ),
    ],
)
def test_another_snapshot_than_the_published_one_is_refused(copy, damage, message):
    published = record_of(copy)
    damage(copy)
    with pytest.raises(SnapshotError, match=message):
        stage(copy, published)


def test_a_version_that_does_not_fit_is_refused_unread(pristine):
    tables = stage(pristine)
    size = sum(use.size_bytes for use in tables.engine.memory())
    seen: list[tuple[object, ...]] = []
    memory = RowMemory(cap_bytes=2 * size - 1)
    memory.take(size).filled()
    with pytest.raises(MemoryBudgetError, match=f"take {size} bytes beside {size} .* {2 * size}, .* {2 * size - 1} "):
        stage(pristine, memory=memory, progress=lambda *step: seen.append(step))
    assert seen == []
    assert memory.held_bytes == size


def test_staging_memory_counts_before_the_system_sees_it():
    assert RowMemory(available=lambda: 0).take(0).size_bytes == 0
    memory = RowMemory(available=lambda: 10 * GIB, reserve_bytes=GIB)
    first = memory.take(5 * GIB)
    with pytest.raises(MemoryBudgetError, match=f"rows take {5 * GIB} bytes, but {10 * GIB} are available and {GIB} "):
        memory.take(5 * GIB)
    memory.take(4 * GIB).give_back()
    first.give_back()
    first.give_back()
    memory.take(9 * GIB).filled()
    assert memory.held_bytes == 9 * GIB

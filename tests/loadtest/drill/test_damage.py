from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.registry.opening import open_registry
from loader.snapshot.buckets import RowBuckets
from loader.snapshot.reader import Snapshot, verify_snapshot
from loadtest.drill.broken import (
    Attempt,
    Damage,
    DamageKind,
    damaged,
    delete_table,
    forge_nan_row,
    forge_nan_weight,
    forge_without_table,
    make_broken_report,
    publish_to_full_disk,
    random_damages,
)
from loadtest.drill.fleet import running_redis
from loadtest.drill.load import RECORD
from loadtest.drill.oracle import OracleShape, OracleWriter
from shardrank_testing.serving_api import run

SMALL = OracleShape(items=600, users=300, tags=50)


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return OracleWriter(SMALL).write(tmp_path_factory.mktemp("store"), 2, rows_per_file=256)


def digest(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("kind", ["truncated", "bit flipped"])
def test_random_damage_comes_to_every_file_and_leaves_no_trace_once_it_is_undone(snapshot: Path, kind: DamageKind):
    before = digest(snapshot)
    hit = set()
    for damage in random_damages(snapshot, kind, 60, seed=1):
        with damaged(snapshot, damage):
            now = digest(snapshot)
            assert [path for path in before if now[path] != before[path]] == [damage.path]
        hit.add(damage.path)
    assert digest(snapshot) == before
    assert hit == set(before)
    assert random_damages(snapshot, kind, 5, seed=1) == random_damages(snapshot, kind, 60, seed=1)[:5]


@settings(max_examples=20)
@given(st.data(), st.sampled_from(["truncated", "bit flipped"]))
def test_any_damage_is_found_when_a_snapshot_is_checked(snapshot: Path, data: st.DataObject, kind: DamageKind):
    path = data.draw(st.sampled_from(sorted(digest(snapshot))))
    offset = data.draw(st.integers(0, (snapshot / path).stat().st_size - 1))
    with damaged(snapshot, Damage(kind, path, offset, 0 if kind == "truncated" else data.draw(st.integers(0, 7)))):
        assert not verify_snapshot(snapshot).ok
    assert verify_snapshot(snapshot).ok


def test_forgeries_have_right_checksums_and_the_fault_that_they_are_named_after(snapshot: Path, tmp_path: Path):
    def forged(name: str) -> Path:
        return Path(shutil.copytree(snapshot, tmp_path / name / "oracle" / "2"))

    dim = SMALL.embedding_dim
    for table, offset in (("items", dim), ("users", 0), ("tags", 0)):
        forge_nan_row(folder := forged(table), table, offset)
        problems = verify_snapshot(folder).problems
        assert len(problems) == 1
        # The first row of a file is the first of its first bucket.
        spec = next(one for one in Snapshot.open(snapshot).spec.tables if one.name == table)
        first = RowBuckets.of(spec).in_file(4096, 0).row_at(0)
        assert f"table '{table}', row {first}: decodes to NaN or inf" in problems[0]
    forge_nan_weight(folder := forged("weight"))
    assert verify_snapshot(folder).problems == ("dense.safetensors: tensor 'mlp.layers.0.bias' holds NaN or inf",)
    delete_table(folder := forged("deleted"), "users")
    assert "tables/users/" in verify_snapshot(folder).problems[0]
    # Nothing is wrong with its files: only who builds the dense model can tell.
    forge_without_table(folder := forged("without"), "users")
    assert verify_snapshot(folder).ok


def test_a_version_that_does_not_fit_on_the_disk_leaves_nothing_behind(snapshot: Path, tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    result = publish_to_full_disk(snapshot, str(tmp_path / "registry"), disk, size_kb=24)
    assert result.refused, result
    assert re.search(r"^error: .*(No space left on device|File too large)", result.message, re.MULTILINE)
    # With room for it the same command passes, so it was the room.
    roomy = tmp_path / "roomy"
    roomy.mkdir()
    passed = publish_to_full_disk(snapshot, str(tmp_path / "registry"), roomy, size_kb=16_000)
    assert passed.exit_code == 0, passed
    assert passed.left_behind == ("2",)
    assert not passed.refused


def test_a_killed_redis_comes_back_with_its_data_or_without(tmp_path: Path):
    async def main() -> None:
        async with running_redis(tmp_path / "redis") as server:
            registry = open_registry(server.url)
            await registry.put("versions/a", b"1", 0)
            await server.kill()
            await server.start()
            entry = await registry.get("versions/a")
            assert entry is not None
            assert entry.value == b"1"
            await server.kill()
            await server.start(empty=True)
            assert await registry.get("versions/a") is None
            await registry.close()

    run(main())


def test_a_broken_snapshot_that_goes_live_is_a_problem_and_so_is_a_drill_that_refuses_everything():
    answers = np.zeros(10, RECORD)
    answers["ended"] = np.arange(10)
    answers["version"] = 1
    answers["version"][8:] = 4
    facts = {"registry": "directory", "shards": 2, "replicas": 2, "cards": 2, "workers": 1, "rate": 20.0, "details": ()}
    facts |= {"disk_full_means": "tmpfs", "control_went_live": True}
    refused = Attempt("bit flipped", "in a file", "publish", "SHA-256")
    report = make_broken_report([refused], answers, 8.0, 1, facts)
    assert (report.tried, report.refused, report.accepted, report.other_versions) == (1, 1, 0, 0)
    assert report.problems == ()
    accepted = Attempt("NaN", "in a row", "none", "")
    report = make_broken_report([refused, accepted], answers, 9.0, 1, {**facts, "control_went_live": False})
    assert report.groups["NaN"].accepted == 1
    assert report.problems == (
        "accepted: NaN: in a row",
        "1 answers named another version than 1",
        "the sound snapshot at the end did not go live, so refusals prove nothing",
    )

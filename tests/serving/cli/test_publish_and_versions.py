"""`shardrank publish` and `shardrank versions` on real stores."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from loader.registry.directory import DirectoryRegistry
from loader.registry.fleet import Canary, FleetRegistry, NodeRecord, VersionReport, WantedModel
from shardrank_testing.command_line import shardrank
from shardrank_testing.registries import REGISTRY_KINDS, registry_of
from shardrank_testing.snapshots import one_table_spec, write_snapshot


@pytest.fixture
def training(tmp_path: Path) -> Path:
    for seed in range(3):
        write_snapshot(tmp_path / "training", one_table_spec(260), seed=seed)
    return tmp_path / "training" / "small"


@pytest.mark.parametrize("kind", REGISTRY_KINDS)
def test_publish_tells_what_it_did_and_versions_lists_it(kind: str, training: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with registry_of(kind, tmp_path) as url:
        where = ("--store", store, "--registry", url)
        first = shardrank("publish", training / "1", *where)
        assert "small version 1 is published; 4.2 kB of rows\n" in first.output
        assert f"copied to {store}/small/1, identity " in first.output
        assert "was published before" in shardrank("publish", training / "1", *where).output
        report = json.loads(shardrank("publish", training / "2", *where, "--json").stdout)
        assert (report["version"], report["copied"], report["is_new"], report["kept"]) == (2, True, True, None)
        assert report["folder"] == str(store / "small" / "2")
        listed = json.loads(shardrank("versions", "--registry", url, "--json").stdout)["versions"]
        assert [(one["model"], one["version"], one["uses"], one["nodes"]) for one in listed] == [
            ("small", 1, [], 0),
            ("small", 2, [], 0),
        ]
        assert listed[1]["identity"] == report["identity"]


def test_retain_deletes_all_but_the_highest(training: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    for version in (1, 2):
        shardrank("publish", training / str(version), "--store", store)
    result = shardrank("publish", training / "3", "--store", store, "--retain", 2)
    assert result.output.endswith("kept: 2, 3; deleted: 1\n")
    assert sorted(path.name for path in (store / "small").iterdir() if path.is_dir()) == ["2", "3"]


def test_versions_tells_what_a_fleet_does_with_them(training: Path, tmp_path: Path) -> None:
    store, registry = tmp_path / "store", tmp_path / "registry"
    for version in (1, 2, 3):
        shardrank("publish", training / str(version), "--store", store, "--registry", registry)

    async def use() -> None:
        fleet = FleetRegistry(DirectoryRegistry(registry))
        canary = Canary(version=2, share=0.05)
        await fleet.put_wanted(WantedModel(model="small", epoch=1, live=1, hold=(1, 2), canary=canary), None)
        for node_id, state in (("a", "ready"), ("b", "staging")):
            report = VersionReport(model="small", version=2, state=state)
            node = NodeRecord(node_id=node_id, kind="shard", process_id=1, address="h:1", versions=(report,))
            await fleet.announce_node(node, 60)

    asyncio.run(use())
    listed = json.loads(shardrank("versions", "small", "--registry", registry, "--json").stdout)["versions"]
    assert [(one["uses"], one["nodes"]) for one in listed] == [(["live"], 0), (["staged", "canary 0.05"], 1), ([], 0)]


def test_a_bad_snapshot_ends_with_one_line_and_code_1(training: Path, tmp_path: Path) -> None:
    (training / "1" / "dense.safetensors").write_bytes(b"x")
    result = shardrank("publish", training / "1", "--store", tmp_path / "store", code=1)
    assert result.stderr.startswith("error: ")
    assert "dense.safetensors" in result.stderr.splitlines()[-1]

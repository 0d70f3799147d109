"""What is trained online is in the store and the registry of a fleet, and is what the fleet answers with."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import numpy as np
import pytest

from loader.deltas.chain import FORMAT
from loader.registry import open_registry
from loader.registry.fleet import FleetRegistry, NodeRecord
from loader.snapshot.reader import Snapshot, verify_snapshot
from serving.training.dataset import TrainingError
from serving.training.fleet_feed import FeedConfig, train_online
from serving.training.online_model import OnlineConfig
from serving.training.rating_stream import read_ratings
from shardrank_testing.deltas import MODEL, published_rows
from shardrank_testing.online import Reference
from shardrank_testing.processes import running, wait_until
from shardrank_testing.registered_fleet import change_wanted


def rows_by_key(snapshot: Snapshot, table: str) -> dict[int, np.ndarray]:
    keys = snapshot.keys(table, 0)
    return dict(zip(keys.tolist(), snapshot.rows_file(table, 0).copy().view(np.float32), strict=True))


async def test_versions_rows_and_dense_weights_are_published(tmp_path: Path):
    store, registry, ratings = tmp_path / "models", str(tmp_path / "registry"), read_ratings(None, 1500, 0)
    how = {"workers": 1, "servers": 1, "batch": 25, "write_dense_s": 0.1}
    config = OnlineConfig(folder=tmp_path / "online", model=MODEL, **how)
    feed = FeedConfig(store=store, registry=registry, publish_rows_s=0.1, publish_dense_s=0.1, dtype="fp32")
    told: list[str] = []
    opened = FleetRegistry(open_registry(registry))

    async def make_live() -> None:
        """As a serving process does that has the rows itself, and reads deltas of this release."""
        while (await opened.version(MODEL, 1)) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        node = NodeRecord(node_id="serve-0", kind="serving", process_id=1, address="a:1", delta_format=FORMAT)
        await opened.announce_node(node, 60)
        await change_wanted(opened, MODEL, live=1)

    live = asyncio.create_task(make_live())
    report, folder = await train_online(config, feed, ratings, told.append)
    await live
    assert sorted(told) == ["server-0 is ready", "worker-0 is ready"]
    assert (report.step, report.ratings, folder) == (60, 1500, store / MODEL / "2")
    reference, last = Reference(config, ratings), Snapshot.open(folder)
    published = await asyncio.to_thread(published_rows, registry, ["users", "films"])
    for table, keys in reference.keys.items():
        expected, there = dict(zip(keys.tolist(), reference.rows[table], strict=True)), rows_by_key(last, table)
        assert there.keys() == expected.keys() | {0}
        # Whatever came later is published as well, once the servers end.
        assert published[table].keys() == expected.keys()
        for key, row in expected.items():
            np.testing.assert_allclose(there[key], row, rtol=1e-4, atol=1e-4)
            np.testing.assert_array_equal(published[table][key], there[key])
    assert verify_snapshot(folder).ok
    assert last.manifest.metadata["ratings"] == "1500"
    assert (await opened.dense_step(MODEL, 1)) is not None
    await opened.registry.close()
    with pytest.raises(TrainingError, match="its stream has 1500 ratings, 1400 are given"):
        await train_online(config, feed, ratings[:1400], told.append)
    elsewhere = config.model_copy(update={"folder": tmp_path / "other"})
    with pytest.raises(TrainingError, match="version 1 of 'fresh' is live, and of another training"):
        await train_online(elsewhere, feed, ratings, told.append)


@pytest.mark.nightly
@pytest.mark.timeout(180)
def test_a_fleet_serves_each_version_and_fails_no_request(tmp_path: Path):
    store, answers = tmp_path / "models", set[tuple[int, int]]()
    where = ["--store", str(store), "--registry", str(tmp_path / "registry")]
    often = ["--snapshot-s", "4", "--publish-rows-s", "0.5", "--publish-dense-s", "1", "--bake-s", "0.5"]
    more = ["--model", "ratings", "--workers", "1", "--ratings", "40000", "--batch", "12"]
    with running("train", "--online", *where, "--folder", str(tmp_path / "online"), *more, *often) as training:
        wait_until((store / "ratings" / "1").is_dir, "a version", timeout_s=60)
        with running("up", *where, "--replicas", "2", "--http-port", "0", "--grpc-port", "0") as fleet:
            body = {"context": {"sparse": {"user_id": [1]}}, "candidates": {"sparse": {"film_id": [[1], [2], [3]]}}}
            url = f"{fleet.url}/v1/models/ratings:rank"
            while training.process.poll() is None:
                answer = httpx.post(url, json=body)
                assert answer.status_code == 200, answer.text
                answers.add((answer.json()["version"], answer.json()["dense_step"]))
            assert training.process.wait() == 0
            last = int(
                max(
                    (store / "ratings").iterdir(), key=lambda folder: int(folder.name) if folder.name.isdecimal() else 0
                ).name
            )
            wait_until(lambda: httpx.post(url, json=body).json()["version"] == last, "the last version")
            assert fleet.stop() == 0
    assert len({version for version, _ in answers}) >= 3
    assert len({step for _, step in answers}) >= 3

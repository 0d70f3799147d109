"""What a serving process does in a fleet: waits, loads, follows pointers, retires, survives its registry."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import time

import numpy as np
import pytest

from loader.deltas.publisher import AsyncDeltaPublisher
from loader.errors import RegistryForeignError
from loader.registry.directory import DirectoryRegistry
from loader.registry.fleet import Canary, FleetRegistry
from loader.rollout.coordinator import Coordinator, CoordinatorConfig
from loader.rollout.guards import GuardLimits
from loader.rollout.plan import Rollout, read_rollout
from loader.rollout.requests import start_rollout
from loader.snapshot.publishing import register
from loader.snapshot.reader import Snapshot
from shardrank_testing.agent_fleet import agent_fleet, with_live
from shardrank_testing.golden import golden_of
from shardrank_testing.registered_fleet import change_wanted
from shardrank_testing.serving_api import (
    FILMS,
    MODEL,
    ApiModel,
    api_request,
    running_api,
    stats_of,
    write_api_model,
)


async def test_a_version_waits_for_a_node_of_every_shard(versions, store, folder):
    async with agent_fleet(folder, store, shards=2, replicas=0) as fleet:
        node, service = fleet.serving()
        loading = asyncio.create_task(node.load())
        await fleet.want(MODEL, live=1, hold=(1,), serve=(1,))

        async def waits_for(reason: str) -> None:
            await fleet.until(
                "serve-0",
                lambda node: (found := node.report(MODEL, 1)) and found.state == "waiting" and reason in found.reason,
            )

        await waits_for("version 1 of model 'films' is not on record as published")
        await fleet.publish(versions[1].path)
        await waits_for("no shard node has joined the fleet")
        await fleet.start_node(0)
        await waits_for("no node of shard 1 of 2 has version 1")
        assert service.watch.problems() == {MODEL: "no live version"}
        await fleet.start_node(1)
        await loading
        assert service.live(MODEL) == 1
        record = await fleet.until("serve-0", lambda told: told.live == {MODEL: 1})
        report = record.report(MODEL, 1)
        assert (report.state, report.reason, report.stats.requests) == ("ready", "", 0)
        assert report.golden_difference <= report.golden_tolerance


async def test_readiness_is_of_the_models_desired_at_the_start(versions, store, folder):
    async with agent_fleet(folder, store, shards=1, replicas=1) as fleet:
        node, service = fleet.serving()
        async with running_api(service) as api:
            answer = await api.http.get("/readyz")
            assert answer.status_code == 503
            assert answer.json()["problems"] == {"": "it is not known yet which models are wanted"}
            await fleet.publish(versions[1].path)
            await fleet.want(MODEL, live=1, hold=(1,), serve=(1,))
            await node.load()
            await service.watch.refresh()
            assert (await api.http.get("/readyz")).status_code == 200
            # What is wanted later, and can't be had, makes nobody turn away from what is served.
            await fleet.want("series", live=1, hold=(1,), serve=(1,))
            await fleet.until_state("serve-0", "series", 1, "waiting")
            await service.watch.refresh()
            assert (await api.http.get("/readyz")).status_code == 200


async def test_applied_says_when_the_canary_is_set(versions, store, folder):
    async with agent_fleet(folder, store, shards=1, replicas=1) as fleet:
        node, service = await with_live(fleet, versions)
        wanted = await fleet.want(MODEL, canary=Canary(version=2, share=0.5))
        # It is not here: nobody is sent to it, and nobody is told that it is in effect.
        await fleet.until_state("serve-0", MODEL, 1, "ready")
        assert not await node.reconcile(wanted)
        assert service.canary(MODEL) is None
        await fleet.want(MODEL, hold=(1, 2), serve=(1, 2))
        wanted = await fleet.want(MODEL, canary=Canary(version=2, share=0.5))
        record = await fleet.until("serve-0", lambda told: told.applied.get(MODEL) == wanted.epoch)
        assert record.live == {MODEL: 1}
        assert service.canary(MODEL).version == 2
        wanted = await fleet.want(MODEL, live=2, canary=None)
        record = await fleet.until("serve-0", lambda told: told.applied.get(MODEL) == wanted.epoch)
        assert record.live == {MODEL: 2}
        assert service.canary(MODEL) is None
        # Back again: the version that was live is still here.
        wanted = await fleet.want(MODEL, live=1)
        await fleet.until("serve-0", lambda told: told.live == {MODEL: 1})


async def test_every_replica_is_connected_before_a_version_is_ready(versions, store, folder):
    async with agent_fleet(folder, store, shards=2, replicas=2) as fleet:
        await fleet.publish(versions[1].path)
        await fleet.want(MODEL, live=1, hold=(1,), serve=(1,), follow=(1,))
        for name in fleet.nodes:
            await fleet.until_state(name, MODEL, 1, "ready")
        node, service = fleet.serving()
        await node.load()
        for shard_node in fleet.nodes.values():
            # Two ranking replicas, each with a connection to each of the four nodes.
            assert shard_node.server.num_connections == 2
            assert any(table.rows for table in shard_node.node.info().lookups)
        assert stats_of(service, 1).requests == 0


async def test_a_process_that_starts_after_deltas_serves_them(versions, store, folder, caplog):
    request = api_request(1)
    request["candidates"]["sparse"]["film"] = [1, 2, 3, 4, 5]

    async with agent_fleet(folder, store, shards=2, replicas=1) as fleet:
        _, first = await with_live(fleet, versions)
        publisher = AsyncDeltaPublisher(fleet.fleet.registry, MODEL, 1)
        await publisher.open()
        values = np.full((FILMS, 8), 3.0, np.float32)
        sequence = await publisher.publish("films", np.arange(FILMS), values)
        for name in fleet.nodes:
            await fleet.until(name, lambda told: told.report(MODEL, 1).delta_sequence == sequence)
        second_node, second = fleet.serving()
        await second_node.load()
        record = await fleet.until("serve-1", lambda told: told.live == {MODEL: 1})
        assert record.report(MODEL, 1).golden_difference is None
        assert record.report(MODEL, 1).golden_tolerance is not None
        assert "since deltas were applied" in caplog.text
        scores = []
        for service in (first, second):
            async with running_api(service) as api:
                answer = await api.http.post(f"/v1/models/{MODEL}:rank", json=request)
                scores.append(answer.json()["scores"])
        assert scores[0] == scores[1]
        changed = {**versions[1].tables, "films": values}
        expected = ApiModel(versions[1].path, versions[1].spec, changed, versions[1].tensors).scores(request)
        np.testing.assert_allclose(scores[0], expected, rtol=1e-4)


async def test_a_lost_registry_gets_back_its_desired_state(versions, store, folder):
    async with agent_fleet(folder, store, shards=1, replicas=1) as fleet:
        _, service = await with_live(fleet, versions)
        wanted = await fleet.fleet.wanted_model(MODEL)
        registry = fleet.fleet.registry
        lost = {**await registry.entries("wanted/"), **await registry.entries("versions/")}
        lost["fleet"] = await registry.get("fleet")
        for key, entry in lost.items():
            await registry.delete(key, entry.revision)
        while await fleet.fleet.wanted_model(MODEL) != wanted:  # noqa: ASYNC110  # a registry tells no events
            await asyncio.sleep(0.01)
        assert service.live(MODEL) == 1
        assert [one.version for one in service.generations.all()] == [1]
        # Its topology is told by the nodes, so that another process can begin.
        await fleet.publish(versions[1].path)
        another, other_service = fleet.serving()
        await another.load()
        assert other_service.live(MODEL) == 1


async def test_where_another_registry_came_in_its_place_a_fleet_goes_on(versions, store, folder):
    """Nothing of it is used or changed; once the right one is back all is as before."""
    link, ours, theirs = folder / "registry", folder / "ours", folder / "theirs"

    def lead_to(path):
        (folder / "next").symlink_to(path)
        (folder / "next").rename(link)

    ours.mkdir()
    lead_to(ours)
    async with agent_fleet(folder, store, shards=1, replicas=1) as fleet:
        _, service = await with_live(fleet, versions)
        shard = fleet.nodes["shard-0-0"]
        publisher = AsyncDeltaPublisher(fleet.fleet.registry, MODEL, 1, retry_s=0.1)

        async def publish(value: float) -> None:
            await publisher.publish("films", [1], np.full((1, 8), value, np.float32))

        async def has_applied(sequence: int) -> None:
            await fleet.until("shard-0-0", lambda node: node.report(MODEL, 1).delta_sequence == sequence)

        await publish(1.0)
        await has_applied(1)
        other = FleetRegistry(DirectoryRegistry(theirs))
        await register(other, Snapshot.open(versions[2].path), clock=time.time)
        await change_wanted(other, MODEL, live=2, hold=(2,), serve=(2,))
        (node,) = [node for node in await fleet.fleet.nodes() if node.kind == "shard"]
        await other.announce_node(node.model_copy(update={"address": "unix:/nowhere"}), 600.0)
        content, nodes = await other.registry.entries(""), await other.nodes()

        lead_to(theirs)
        while (await other.strangers()).keys() != {"shard-0-0", "serve-0"}:  # noqa: ASYNC110  # it tells no events
            await asyncio.sleep(0.01)
        problem = (await other.strangers())["serve-0"]
        assert "not the one that version 1 of films was rolled out with" in problem
        assert (service.watch.degraded(), shard.actions.problems(shard.agent)) == ({"": problem}, {"": problem})
        with pytest.raises(RegistryForeignError):
            await publish(2.0)
        async with running_api(service) as api:
            answer = await api.http.post(f"/v1/models/{MODEL}:rank", json=api_request(1))
            assert (answer.status_code, answer.json()["version"]) == (200, 1)
        assert (await other.registry.entries(""), await other.nodes()) == (content, nodes)

        lead_to(ours)
        await publish(3.0)
        await has_applied(2)
        assert (service.watch.degraded(), shard.actions.problems(shard.agent)) == ({}, {})
        await other.registry.close()


@pytest.mark.parametrize(
    ("is_wrong", "reason"),
    [("folder", "published"), ("golden", "golden scores differ by up to 0.5")],
)
async def test_a_wrong_version_is_refused_and_the_live_one_stays(versions, folder, tmp_path, is_wrong, reason):
    """Of its number is stored another snapshot than was published, or one without its golden scores."""
    store, golden = tmp_path / "store", golden_of(versions[1])
    good = write_api_model(store, 1, seed=1)
    wrong = dataclasses.replace(golden, scores=(golden.scores + 0.5) % 1)
    bad = write_api_model(store, 2, seed=1, golden=wrong if is_wrong == "golden" else None)
    published = bad if is_wrong == "golden" else write_api_model(tmp_path / "elsewhere", 2, seed=9)
    async with agent_fleet(folder, store, shards=1, replicas=0) as fleet:
        _, service = await with_live(fleet, {1: good, 2: published}, local=True)
        await fleet.want(MODEL, hold=(1, 2), serve=(1, 2))
        record = await fleet.until_state("serve-0", MODEL, 2, "refused")
        assert reason in record.report(MODEL, 2).reason
        assert (record.live, service.live(MODEL)) == ({MODEL: 1}, 1)
        await service.watch.refresh()
        assert service.watch.problems() == {}


async def ended_rollout(fleet: FleetRegistry) -> Rollout:
    while (on_record := await read_rollout(fleet, MODEL)) is None or on_record.rollout.active:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    return on_record.rollout


@pytest.mark.nightly
@pytest.mark.parametrize(("late_node", "comes_back"), [("shard-0-1", False), ("serve-0", True)])
async def test_a_folder_that_one_node_does_not_see_holds_a_rollout_up(
    versions, store, folder, tmp_path, late_node, comes_back
):
    """That node refuses the version and tries again; if that lasts until the stage timeout, the rollout is undone."""
    mount, away = tmp_path / "mount", tmp_path / "away"
    shutil.copytree(store, mount)
    (mount / MODEL / "2").rename(away)
    async with agent_fleet(folder, store, shards=1, replicas=0) as fleet:
        staging = fleet.config.staging.model_copy(update={"retry_s": 0.3, "live_retry_s": 0.1})
        fleet.config = fleet.config.model_copy(update={"staging": staging})
        for replica, name in enumerate(("shard-0-0", "shard-0-1")):
            fleet.store = mount if name == late_node else store
            await fleet.start_node(0, replica)
        fleet.store = mount if late_node == "serve-0" else store
        _, service = await with_live(fleet, {1: versions[1]})
        await fleet.publish(versions[2].path)
        config = CoordinatorConfig(settle_s=0.5, stage_timeout_s=60.0 if comes_back else 3.0)
        coordinator = Coordinator(fleet.fleet, "coordinator", time.time, config=config)
        carried = asyncio.create_task(coordinator.run())
        await start_rollout(fleet.fleet, MODEL, 2, guards=GuardLimits(min_requests=0), rollout_id="a" * 32)
        record = await fleet.until_state(late_node, MODEL, 2, "refused")
        assert record.report(MODEL, 2).passing
        if comes_back:
            away.rename(mount / MODEL / "2")
        ended = await ended_rollout(fleet.fleet)
        carried.cancel()
        await asyncio.wait([carried])
        live = 2 if comes_back else 1
        assert (ended.state, service.live(MODEL)) == ("done" if comes_back else "rolled_back", live)
        if not comes_back:
            assert f"{late_node}: version 2 is " in ended.reason
            assert "SnapshotNotFoundError: store" in ended.reason

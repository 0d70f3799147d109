"""Agents stage, announce and retire the versions that their registry desires, and survive what goes wrong with it."""

from __future__ import annotations

import asyncio
import errno
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from loader.errors import (
    RegistryForeignError,
    RegistryRecordError,
    RegistryUnavailableError,
    SnapshotCorruptError,
    SnapshotNotFoundError,
)
from loader.registry.directory import DirectoryRegistry
from loader.registry.fleet import IDENTITY, FleetRecord, FleetRegistry, WantedModel, rollout_key, wanted_key
from loader.registry.registry import Registry
from shard_node.agent.agent import AgentConfig, Remembered
from shard_node.agent.version_loading import StagingConfig
from shard_node.errors import MemoryBudgetError
from shardrank_testing.agents import PROMPT, HandClock, agent_on, running_node
from shardrank_testing.bags import random_table_bags
from shardrank_testing.registries import REGISTRY_KINDS, redis_server
from shardrank_testing.rollout_fleet import published


@pytest.fixture
async def under(request, tmp_path):
    """An agent on a registry of its own."""
    config = getattr(request, "param", PROMPT)
    async with agent_on(str(tmp_path / "registry"), config=config) as under:
        yield under


async def test_a_desired_version_is_staged_and_announced(under):
    gate = under.actions.gates["films", 3] = asyncio.Event()
    desired = await under.want("films", hold=(3,), live=3)
    await under.until(lambda: under.actions.begun == [("films", 3)])
    assert (await under.announced("films", 3, "staging")).progress == 0.5
    assert (await under.record()).applied == {}
    gate.set()
    await under.until(lambda: ("films", 3) in under.actions.ready)
    await under.announced("films", 3, "ready")
    assert (await under.record()).applied == {"films": desired.epoch}
    assert under.agent.problems() == []


async def test_the_live_version_is_staged_first_and_alone(under):
    gate = under.actions.gates["films", 9] = asyncio.Event()
    await under.want("films", hold=(3, 9), live=9)
    await under.until(lambda: bool(under.actions.begun))
    await under.pass_time(1.0)
    assert under.actions.begun == [("films", 9)]
    assert (await under.report("films", 3)).state == "waiting"
    gate.set()
    await under.until(lambda: under.actions.begun == [("films", 9), ("films", 3)])


async def test_a_hanging_staging_blocks_neither_models_nor_heartbeat(under):
    under.actions.gates["films", 1] = asyncio.Event()
    await under.want("films", hold=(1,))
    await under.until(lambda: ("films", 1) in under.actions.begun)
    await under.want("songs", hold=(1,))
    await under.until(lambda: ("songs", 1) in under.actions.ready)
    await under.fleet.withdraw_node(under.actions.node_id)
    await under.pass_time(1.2)
    record = await under.record()
    assert record.report("songs", 1).state == "ready"
    assert record.report("films", 1).state == "staging"
    # It is called off once it is not desired any more.
    await under.want("films", hold=(2,))
    await under.until(lambda: ("films", 2) in under.actions.ready)
    assert under.actions.cancelled == [("films", 1)]
    await under.announced("films", 1, None)
    # So is one that is in progress at the end.
    under.actions.gates["songs", 2] = asyncio.Event()
    await under.want("songs", hold=(1, 2))
    await under.until(lambda: ("songs", 2) in under.actions.begun)
    await under.agent.close()
    assert under.actions.cancelled == [("films", 1), ("songs", 2)]


async def test_a_bad_version_is_refused_and_other_models_go_on(under):
    await under.fleet.put_version(published(2))
    under.actions.faults["films", 2] = [SnapshotCorruptError("rows are damaged")]
    await under.want("films", hold=(1, 2), live=1)
    await under.want("songs", hold=(5,))
    await under.until(lambda: {("films", 1), ("songs", 5)} <= under.actions.loaded())
    report = await under.announced("films", 2, "refused")
    assert report.reason == "SnapshotCorruptError: rows are damaged"
    await under.pass_time(20.0)
    assert under.actions.begun.count(("films", 2)) == 1
    # Withdrawn and desired again, it gets another chance.
    await under.want("films", hold=(1,))
    await under.announced("films", 2, None)
    await under.want("films", hold=(1, 2))
    await under.until(lambda: ("films", 2) in under.actions.ready)


@pytest.mark.parametrize(
    ("error", "live", "state", "pause_s"),
    [
        (SnapshotCorruptError("not published"), None, "refused", 5.0),
        (SnapshotCorruptError("damaged"), 2, "refused", 29.0),
        (RegistryUnavailableError("gone"), None, "waiting", 0.0),
    ],
    ids=["published anew", "live", "it passes by itself"],
)
async def test_a_failed_staging_is_tried_again(under, error, live, state, pause_s):
    under.actions.faults["films", 2] = [error]
    await under.want("films", hold=(2,), live=live)
    await under.until(lambda: bool(under.actions.begun))
    report = await under.announced("films", 2, state)
    assert report.reason == f"{type(error).__name__}: {error}"
    await under.pass_time(pause_s)
    assert under.actions.begun == [("films", 2)]
    if live is None:
        await under.fleet.put_version(published(2))
    await under.pass_time_until(lambda: ("films", 2) in under.actions.ready)


def unreadable() -> SnapshotCorruptError:
    """What is raised for a file that the file system can't read now."""
    error = SnapshotCorruptError("rows-00000: can't be read: Stale file handle")
    error.__cause__ = OSError(errno.ESTALE, "Stale file handle")
    return error


@pytest.mark.parametrize("error", [unreadable(), SnapshotNotFoundError("no version 2"), OSError("I/O error")])
async def test_what_a_file_system_refuses_is_tried_again_before_the_version_is_refused(under, error):
    """For `retry_s`, more and more seldom; then the version is refused, and tried every `live_retry_s`."""
    await under.fleet.put_version(published(2))
    faults = under.actions.faults["films", 2] = [error] * 1000
    await under.want("films", hold=(2,))
    await under.until(lambda: bool(under.actions.begun))
    report = await under.announced("films", 2, "waiting")
    assert (report.passing, report.reason) == (True, f"{type(error).__name__}: {error}")
    await under.pass_time(59.0)
    assert (await under.report("films", 2)).state == "waiting"
    assert 25 < len(under.actions.begun) < 35
    await under.pass_time(3.0)
    report = await under.announced("films", 2, "refused")
    assert (report.passing, report.reason) == (True, f"{type(error).__name__}: {error}")
    tries = len(under.actions.begun)
    await under.pass_time(61.0)
    assert len(under.actions.begun) == tries + 2
    # Meanwhile other versions are staged, and it is once its files are there.
    await under.want("films", hold=(2, 3))
    await under.until(lambda: ("films", 3) in under.actions.ready)
    faults.clear()
    await under.pass_time(30.0)
    assert (await under.announced("films", 2, "ready")).passing is False


async def test_damage_that_is_found_once_files_can_be_read_is_refused(under):
    await under.fleet.put_version(published(2))
    under.actions.faults["films", 2] = [unreadable(), SnapshotCorruptError("SHA-256 differs")]
    await under.want("films", hold=(2,))
    await under.pass_time(1.0)
    report = await under.announced("films", 2, "refused")
    assert (report.passing, report.reason) == (False, "SnapshotCorruptError: SHA-256 differs")
    await under.pass_time(61.0)
    assert len(under.actions.begun) == 2


async def test_a_version_drains_before_it_is_retired(under):
    await under.want("films", hold=(1, 2), live=1)
    await under.until(lambda: len(under.actions.ready) == 2)
    await under.want("films", hold=(2,), live=2)
    await under.pass_time(0.4)
    assert (await under.report("films", 1)).state == "draining"
    assert under.actions.retired == []
    # Desired again meanwhile, it is kept.
    await under.want("films", hold=(1, 2))
    await under.pass_time(3.0)
    assert under.actions.retired == []
    assert (await under.report("films", 1)).state == "ready"
    await under.want("films", hold=(2,))
    await under.pass_time_until(lambda: under.actions.retired == [("films", 1)])
    await under.announced("films", 1, None)
    assert (await under.report("films", 2)).state == "ready"


async def test_a_version_waits_for_the_one_that_it_replaces(under):
    await under.want("films", hold=(1,))
    await under.until(lambda: len(under.actions.ready) == 1)
    under.actions.retire_gate = asyncio.Event()
    await under.want("films", node_hold={under.actions.node_id: (2,)})
    await under.pass_time(2.0)
    report = await under.report("films", 2)
    assert (report.state, report.reason) == ("waiting", "version 1 is retired first")
    assert (await under.report("films", 1)).state == "draining"
    under.actions.retire_gate.set()
    await under.pass_time_until(lambda: ("films", 2) in under.actions.ready)
    assert under.actions.loaded() == {("films", 2)}


async def test_a_lack_of_memory_is_waited_out_only_while_some_is_freed(under):
    await under.want("films", hold=(1,))
    await under.until(lambda: len(under.actions.ready) == 1)
    under.actions.retire_gate = asyncio.Event()
    await under.want("films", hold=())
    await under.pass_time(1.0)
    under.actions.faults["songs", 1] = [MemoryBudgetError("no room")]
    await under.want("songs", hold=(1,))
    await under.until(lambda: ("songs", 1) in under.actions.begun)
    await under.announced("songs", 1, "waiting")
    under.actions.retire_gate.set()
    await under.pass_time_until(lambda: ("songs", 1) in under.actions.ready)
    under.actions.faults["films", 4] = [MemoryBudgetError("no room")]
    await under.want("films", hold=(4,))
    await under.announced("films", 4, "refused")


async def test_a_pointer_that_can_not_be_set_stops_no_other_model(under):
    under.actions.reconcile_faults["films"] = ValueError("no such thing")
    await under.want("films", hold=(1,))
    songs = await under.want("songs", hold=(1,))
    await under.until(lambda: len(under.actions.ready) == 2)
    await under.step()
    assert under.agent.problems() == ["settling films: ValueError: no such thing"]
    assert (await under.record()).applied == {"songs": songs.epoch}
    under.actions.reconcile_faults.clear()
    await under.step()
    assert under.agent.problems() == []


@pytest.mark.parametrize(
    "under", [AgentConfig(reconcile_timeout_s=0.2, staging=StagingConfig(jitter_s=0))], indirect=True
)
async def test_hanging_pointers_hold_up_neither_models_nor_heartbeat(under):
    for model in ("a", "b", "c", "songs"):
        await under.want(model, hold=(1,))
    await under.until(lambda: len(under.actions.ready) == 4)
    under.actions.reconciled.clear()
    for model in ("a", "b", "c"):
        under.actions.reconcile_gates[model] = asyncio.Event()
    problems: list[str] = []
    rounds = asyncio.create_task(under.agent.round())
    while "songs" not in {desired.model for desired in under.actions.reconciled}:
        await asyncio.sleep(0.001)
        problems = under.agent.problems()
    # None of the others was waited for until its time was over.
    assert problems == []
    await rounds
    late = "TimeoutError: not done within 0.2 s"
    assert under.agent.problems() == [f"settling {model}: {late}" for model in ("a", "b", "c")]
    assert (await under.record()).applied["songs"] > 0
    default = AgentConfig()
    assert default.reconcile_timeout_s + 1.25 * default.poll_s + default.heartbeat_s < default.ttl_s


@pytest.mark.parametrize("under", [AgentConfig(models=("songs",), staging=StagingConfig(jitter_s=0))], indirect=True)
async def test_only_the_models_of_its_config_are_staged(under):
    await under.want("films", hold=(1,))
    await under.want("songs", hold=(1,))
    await under.until(lambda: ("songs", 1) in under.actions.ready)
    assert under.actions.begun == [("songs", 1)]
    assert set(under.agent.desired) == {"songs"}


async def test_leaving_is_announced_first_and_then_nothing(under):
    await under.want("films", hold=(1,))
    await under.until(lambda: len(under.actions.ready) == 1)
    leaving = asyncio.create_task(under.agent.leave())
    await under.want("films", hold=(1, 2))
    await under.step()
    record = await under.record()
    assert (record.draining, record.report("films", 1).state) == (True, "ready")
    while not leaving.done():
        under.clock.advance(0.5)
        await asyncio.sleep(0.001)
    assert await under.record() is None
    await under.pass_time(3.0)
    assert await under.record() is None
    assert ("films", 2) not in under.actions.begun


async def test_an_older_or_unreadable_record_changes_nothing(under):
    old = await under.want("films", hold=(1,), live=1)
    new = await under.want("films", hold=(1, 2), live=2)
    await under.until(lambda: len(under.actions.ready) == 2)

    async def overwrite(content: bytes) -> None:
        entry = await under.fleet.registry.get(wanted_key("films"))
        await under.fleet.registry.put(wanted_key("films"), content, entry.revision)

    await overwrite(old.model_dump_json().encode())
    await under.step()
    assert await under.fleet.wanted() == {"films": new}
    await overwrite(b"{")
    await under.pass_time(3.0)
    assert "RegistryRecordError: wanted/films" in under.agent.problems()[0]
    assert under.actions.retired == []
    assert (await under.report("films", 1)).state == "ready"


ROLLOUT = b'{"epoch": 4, "model": "films", "steps": ["whatever"]}'


async def test_an_emptied_registry_unloads_nothing_and_is_restored(tmp_path):
    division = FleetRecord(num_shards=1, sharding="hash", replicate_bytes=0)
    with redis_server(tmp_path) as server:
        async with agent_on(server.url) as under:
            fleet = under.fleet
            assert await fleet.join_fleet(division) == division
            await fleet.put_version(published(1))
            await fleet.put_spec("films", 1, "{}")
            await fleet.put_version(published(7))
            await fleet.registry.put(rollout_key("films"), ROLLOUT, 0)
            wanted = await under.want("films", hold=(1,), live=1)
            await under.until(lambda: len(under.actions.ready) == 1)
            await under.pass_time(1.5)
            record = await under.record()

            server.kill()
            await under.pass_time(0.3)
            assert under.agent.problems()[0].startswith("registry: RegistryUnavailableError")
            assert under.agent.desired == {"films": wanted}
            assert under.actions.loaded() == {("films", 1)}

            server.start()
            server.flush()
            await under.pass_time(2.5)
            await under.until(lambda: under.agent.problems() == [])
            await under.pass_time(1.2)
            assert await fleet.wanted() == {"films": wanted}
            assert await fleet.fleet() == division
            assert [one.version for one in await fleet.versions()] == [1]
            assert await fleet.spec("films", 1) == "{}"
            assert (await fleet.registry.get(rollout_key("films"))).value == ROLLOUT
            assert await under.record() == record
            assert under.actions.retired == []
            assert under.actions.begun == [("films", 1)]


async def test_lookups_go_on_while_the_registry_is_disturbed(tmp_path):
    with redis_server(tmp_path) as server:
        async with running_node(server.url, tmp_path / "store") as under:
            await under.publish(1)
            await under.want("films", hold=(1,), live=1)
            await under.announced("films", 1, "ready")
            bags = random_table_bags(
                np.random.default_rng(5), under.node.generations.payload("films", 1).engine.layout, 50, 5
            )
            expected = [block.tobytes() for block in under.node.pool("films", 1, bags)]
            for disturb in (server.kill, server.start, server.restart_empty, server.flush, server.kill, server.start):
                await asyncio.to_thread(disturb)
                for _ in range(20):
                    await asyncio.sleep(0.02)
                    assert [block.tobytes() for block in under.node.pool("films", 1, bags)] == expected
            await under.announced("films", 1, "ready")
            assert (await under.fleet.wanted())["films"].live == 1


WANTED = WantedModel(model="films", epoch=7, live=1, hold=(1,), serve=(1,))
PLAN = b'{"epoch": 40, "model": "films"}'


@pytest.mark.parametrize("is_broken", [False, True], ids=["lost", "broken"])
async def test_desired_versions_are_restored_after_the_plan(tmp_path, is_broken):
    """Not a moment earlier: as soon as desired versions are back, a rollout can be started. A broken plan stays."""
    registry = DirectoryRegistry(tmp_path / "registry")
    fleet = FleetRegistry(registry)
    await fleet.put_wanted(WANTED, None)
    await registry.put(rollout_key("films"), PLAN, 0)
    remembered = Remembered(fleet, None, 1.0, HandClock())
    await remembered.refresh()
    shutil.rmtree(tmp_path / "registry")
    if is_broken:
        await registry.put(rollout_key("films"), b"{", 0)
        with pytest.raises(RegistryRecordError, match=r"rollouts/films: .*Invalid JSON"):
            await remembered.refresh()
    else:
        await remembered.refresh()
        keys = IDENTITY, rollout_key("films"), wanted_key("films")
        identity, plan, wanted = [await fleet.registry.get(key) for key in keys]
        assert plan.value == PLAN
        assert identity.revision < plan.revision < wanted.revision
    assert await fleet.wanted() == {"films": WANTED}
    await registry.close()


@contextmanager
def two_registries(kind: str, folder: Path) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """The URLs of two registries, and what has each lead to the other one."""
    if kind == "redis":
        with redis_server(folder, tcp=True) as server:
            yield f"{server.url}/0", f"{server.url}/1", lambda: server.command("SWAPDB", "0", "1")
        return
    paths = folder / "a", folder / "b", folder / "c"

    def swap() -> None:
        for before, after in ((0, 2), (1, 0), (2, 1)):
            paths[before].rename(paths[after])

    yield str(paths[0]), str(paths[1]), swap


async def content_of(registry: Registry) -> tuple[dict, dict]:
    return await registry.entries(""), await registry.announced("nodes/")


FOREIGN = (
    "this registry is not the one that version 1 of films was rolled out with: restore it, or restart the processes to "
    "adopt it"
)


@pytest.mark.parametrize("kind", REGISTRY_KINDS)
async def test_another_fleets_registry_is_left_alone_and_not_followed(kind, tmp_path, caplog):
    with two_registries(kind, tmp_path) as (url, other_url, swap):
        async with agent_on(url) as under, agent_on(other_url) as other:
            await under.want("films", hold=(1,), live=1)
            await under.pass_time_until(lambda: under.actions.loaded() == {("films", 1)})
            for version in (5, 6, 7):
                await other.want("films", hold=(version,), live=version)
            await other.fleet.put_version(published(7))
            await other.until(lambda: ("films", 7) in other.actions.ready)
            before, _ = await content_of(under.fleet.registry)
            theirs = await content_of(other.fleet.registry)

            swap()
            with caplog.at_level(logging.WARNING):
                await under.pass_time(3.0)
            assert await content_of(under.fleet.registry) == theirs
            assert await under.fleet.strangers() == {under.node_id: FOREIGN}
            assert under.agent.problems() == [f"registry: RegistryForeignError: {FOREIGN}"]
            assert caplog.text.count(FOREIGN) == 1
            assert under.agent.desired["films"].live == 1
            assert (under.actions.loaded(), under.actions.retired) == ({("films", 1)}, [])
            with pytest.raises(RegistryForeignError, match="version 1 of films"):
                await under.want("films", live=2)

            swap()
            await under.pass_time(1.5)
            assert (await content_of(under.fleet.registry))[0] == before
            assert (under.agent.problems(), (await under.record()).draining) == ([], False)

            swap()
            await under.pass_time(0.3)
            leaving = asyncio.create_task(under.agent.leave())
            while not leaving.done():
                under.clock.advance(0.5)
                await asyncio.sleep(0.001)
            assert await under.fleet.strangers() == {}
            assert await content_of(under.fleet.registry) == theirs


async def test_the_process_that_fills_an_emptied_registry_first_decides_whose_it_is(tmp_path):
    """One that remembers nothing, such as one of this fleet that was restarted, leaves it to others."""
    url = str(tmp_path / "registry")
    async with agent_on(url) as first, agent_on(url) as second, agent_on(str(tmp_path / "other")) as stranger:
        wanted = await first.want("films", hold=(1,), live=1)
        await asyncio.gather(first.step(), second.step())
        await stranger.want("films", hold=(9,), live=9)
        await stranger.step()
        identity = (await first.fleet.registry.get(IDENTITY)).value
        for fill, is_restored in ((None, True), (stranger, False)):
            shutil.rmtree(tmp_path / "registry")
            async with agent_on(url) as restarted:
                await restarted.step()
                assert await restarted.fleet.registry.get(IDENTITY) is None
                if fill is not None:
                    shutil.copytree(tmp_path / "other", tmp_path / "registry", dirs_exist_ok=True)
                await asyncio.gather(first.agent.round(), second.agent.round())
                await restarted.step()
                now = await first.fleet.registry.get(IDENTITY)
                assert (now.value == identity) == is_restored
                assert (restarted.agent.desired == {"films": wanted}) == is_restored
                problems = first.agent.problems() + second.agent.problems()
                assert [f"registry: RegistryForeignError: {FOREIGN}"] * 2 * (not is_restored) == problems


async def test_a_registry_of_an_older_release_gets_an_id(tmp_path):
    url = str(tmp_path / "registry")
    async with agent_on(url) as first, agent_on(url) as second:
        await first.fleet.registry.put(wanted_key("films"), WANTED.encode(), 0)
        await asyncio.gather(first.agent.round(), second.agent.round())
        identity = await first.fleet.registry.get(IDENTITY)
        assert len(identity.value) == 32
        # It may lose the id with its last writes; older processes may have restored all else.
        await first.fleet.registry.delete(IDENTITY, identity.revision)
        await asyncio.gather(first.agent.round(), second.agent.round())
        assert (await first.fleet.registry.get(IDENTITY)).value == identity.value
        assert first.agent.problems() == second.agent.problems() == []


async def test_a_registry_that_lost_its_last_writes_gets_them_back(tmp_path):
    keys = tmp_path / "registry" / "keys"
    async with agent_on(str(tmp_path / "registry")) as under:
        await under.want("films", hold=(1,), live=1)
        await under.step()
        shutil.copytree(keys, tmp_path / "then")
        later = await under.want("films", hold=(1, 2), live=2)
        await under.step()
        shutil.rmtree(keys)
        shutil.copytree(tmp_path / "then", keys)
        await under.step()
        assert await under.fleet.wanted() == {"films": later}
        assert under.agent.problems() == []

"""A shard node follows only its fleet's stream; rows of a stream that forked are replaced, and never by older ones."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest

from loader.registry import open_registry
from loader.registry.fleet import FleetRegistry, WantedModel
from loader.snapshot.codecs import RowCodec
from shard_node.agent import delta_follower, node_agent
from shard_node.agent.delta_follower import catch_up
from shard_node.engine.loading import load_tables
from shard_node.errors import GenerationNotFoundError
from shardrank_testing.agents import NodeUnderTest, plan_of, reached, running_node, user_3
from shardrank_testing.bags import random_table_bags
from shardrank_testing.deltas import StreamWriter
from shardrank_testing.nodes import until
from shardrank_testing.snapshots import make_spec

SIZE = sum(table.num_embeddings * RowCodec(table.dtype, table.embedding_dim).row_bytes for table in make_spec().tables)


@pytest.fixture
async def under(request, tmp_path):
    """The agent of a shard node runs on a registry of its own, with the settings of its `NodeConfig`."""
    settings = getattr(request, "param", {})
    async with running_node(str(tmp_path / "registry"), tmp_path / "store", **settings) as under:
        yield under


FORKED = pytest.mark.parametrize(
    ("under", "beside"),
    [({}, True), ({"memory_budget_bytes": 0}, True), ({"memory_cap_bytes": 2 * SIZE - 1}, False)],
    indirect=["under"],
)


@FORKED
async def test_rows_of_a_forked_stream_are_replaced(under, beside, tmp_path, monkeypatch, caplog):
    """Lookups go on where both have room; then rows are those of the snapshot with the deltas that are left."""
    monkeypatch.setattr(node_agent, "ANNOUNCED_S", 0.05)
    snapshot, stream = await under.publish(1), StreamWriter(make_spec())
    for value in (1.0, 2.0, 3.0):
        stream.write("user", [3, int(value) + 10], np.full((2, 16), value))
    await stream.put(under.fleet.registry)
    await under.want("films", hold=(1,), live=1, follow=(1,))
    await until(lambda: under.actions.reports() and under.actions.reports()[0].delta_sequence == 3)
    # A failover lost delta 3, and another publisher went on from 2.
    del stream.entries[2:]
    stream.write("user", [3, 20], np.full((2, 16), 9.0), sequence=5)
    shutil.rmtree(tmp_path / "registry" / "streams")
    await stream.put(under.fleet.registry)
    values = set()
    while 9.0 not in values:
        try:
            values.add(user_3(under)[0])
        except GenerationNotFoundError:
            values.add(None)
        await under.step()
    # What is staged anew answers before it is live again.
    while under.node.info().versions[0].state != "live":
        await under.step()
    # Without room nothing answers for a moment.
    assert values <= {3.0, 9.0} | (set() if beside else {None})
    expected = load_tables(snapshot, *plan_of(snapshot))
    await catch_up(under.fleet, "films", 1, expected)
    bags = random_table_bags(np.random.default_rng(5), expected.engine.layout, 400, 5)
    for actual, wanted in zip(under.node.pool("films", 1, bags), expected.engine.pool(bags), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)
    assert "has delta 3" in caplog.text
    assert ("is to be staged anew" in caplog.text) == (not beside)
    (served,) = under.node.info().versions
    assert (served.delta_forks, served.forked, served.delta_sequence, served.state) == (1, False, 5, "live")
    stream.write("user", [3], np.full((1, 16), 10.0))
    await stream.put(under.fleet.registry, 3)
    await reached(under, 6)
    assert under.actions.problems(under.agent) == {}


@pytest.mark.parametrize("under", [{"memory_cap_bytes": 2 * SIZE - 1}], indirect=True)
async def test_forked_replicas_without_room_go_by_turns(under, tmp_path, monkeypatch, caplog):
    """The one that comes before has forked too: this one answers until that is ready again."""
    monkeypatch.setattr(node_agent, "ANNOUNCED_S", 0.05)
    await under.publish(1)
    stream = StreamWriter(make_spec())
    for value in (1.0, 2.0):
        stream.write("user", [3], np.full((1, 16), value))
    await stream.put(under.fleet.registry)
    await under.want("films", hold=(1,), live=1, follow=(1,))
    report = await under.announced("films", 1, "ready")
    await until(lambda: under.actions.reports()[0].delta_sequence == 2)
    this = await under.record()

    async def announce(**changes):
        versions = (report.model_copy(update=changes),) if changes else ()
        await under.fleet.announce_node(this.model_copy(update={"node_id": "a-node", "versions": versions}), 60.0)

    await announce(forked=True)
    shutil.rmtree(tmp_path / "registry" / "streams")
    del stream.entries[1:]
    await stream.put(under.fleet.registry)
    await until(lambda: "is not staged anew yet: it comes after a-node" in caplog.text)
    assert "row updates of version 1 have forked: " in under.actions.problems(under.agent)["films"]
    # Once it is freed, and before it is staged, it has none.
    for changes in ({"state": "ready"}, {"state": "draining"}, {}, {"state": "staging"}):
        await announce(**changes, **({"forked": True} if changes else {}))
        for _ in range(20):
            await under.step()
        assert user_3(under) == [2.0] * 16
    await announce(forked=False)
    await until(lambda: under.actions.reports() and under.actions.reports()[0].delta_sequence == 1)
    assert user_3(under) == [1.0] * 16


@pytest.mark.parametrize("applied", [0, 2])
async def test_deltas_of_another_fleet_are_never_applied(under, applied, tmp_path):
    """Its stream of that name is as good as none: neither rows nor what is known of theirs change."""
    await under.publish(1)
    stream, theirs = StreamWriter(make_spec()), StreamWriter(make_spec())
    for value in (1.0, 2.0, 3.0):
        stream.write("user", [3], np.full((1, 16), value))
        theirs.write("user", [3], np.full((1, 16), 60.0 + value))
    del theirs.entries[1 if applied else 2 :]
    rest = stream.entries[applied:]
    del stream.entries[applied:]
    await stream.put(under.fleet.registry)
    await under.want("films", hold=(1,), live=1, follow=(1,))
    await until(lambda: under.actions.reports() and not under.actions.problems(under.agent))
    await reached(under, applied)
    before = user_3(under)
    other = open_registry(tmp_path / "other")
    await FleetRegistry(other).check_identity(create=True)
    await theirs.put(other)
    await other.close()
    shutil.move(tmp_path / "registry", tmp_path / "away")
    shutil.move(tmp_path / "other", tmp_path / "registry")
    await asyncio.sleep(1.2)
    assert under.fleet.foreign
    (report,) = under.actions.reports()
    assert (user_3(under), report.delta_sequence, report.forked, report.reason) == (before, applied, False, "")
    shutil.move(tmp_path / "registry", tmp_path / "other")
    shutil.move(tmp_path / "away", tmp_path / "registry")
    stream.entries += rest
    await stream.put(under.fleet.registry, applied)
    await reached(under, 3)
    assert user_3(under) == [3.0] * 16


async def fork(under: NodeUnderTest, folder: Path) -> StreamWriter:
    """Has deltas 1 to 3 applied, of which the registry then loses the third."""
    await under.publish(1)
    stream = StreamWriter(make_spec())
    for value in (1.0, 2.0, 3.0):
        stream.write("user", [3], np.full((1, 16), value))
    await stream.put(under.fleet.registry)
    await under.want("films", hold=(1,), live=1, follow=(1,))
    await until(lambda: under.actions.reports() and under.actions.reports()[0].delta_sequence == 3)
    del stream.entries[2:]
    shutil.rmtree(folder / "registry" / "streams")
    await stream.put(under.fleet.registry)
    return stream


@pytest.mark.parametrize("under", [{}, {"memory_cap_bytes": 2 * SIZE - 1}], indirect=True)
async def test_a_registry_that_is_emptied_while_rows_are_mended_takes_none_back(under, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(node_agent, "ANNOUNCED_S", 0.05)
    monkeypatch.setattr(delta_follower, "RETRY_S", 0.05)
    stage = node_agent.stage_tables

    def emptied(*arguments, **options):
        if under.actions.loaded():
            shutil.rmtree(tmp_path / "registry" / "streams", ignore_errors=True)
        return stage(*arguments, **options)

    monkeypatch.setattr(node_agent, "stage_tables", emptied)
    stream = await fork(under, tmp_path)
    await until(lambda: "is not mended yet: the registry has no deltas/films/1 any more" in caplog.text)
    assert user_3(under) == [3.0] * 16
    monkeypatch.setattr(node_agent, "stage_tables", stage)
    await stream.put(under.fleet.registry)
    await until(lambda: under.actions.reports() and under.actions.reports()[0].delta_sequence == 2)
    assert user_3(under) == [2.0] * 16


@pytest.mark.parametrize("under", [{"memory_cap_bytes": 2 * SIZE - 1}], indirect=True)
async def test_a_version_that_is_to_be_staged_anew_can_be_retired(under, tmp_path, monkeypatch):
    monkeypatch.setattr(node_agent, "ANNOUNCED_S", 0.05)
    await fork(under, tmp_path)
    with under.node.generations.lease("films", 1) as lease:
        await until(lambda: lease.generation.state == "draining")
        under.agent_runs.cancel()
        await asyncio.wait([under.agent_runs])
        retiring = asyncio.create_task(under.actions.retire("films", 1))
        await asyncio.sleep(0.1)
        assert not retiring.done()
    await retiring
    assert under.actions.loaded() == set()


async def test_a_fork_that_is_noticed_while_staging_is_counted(under):
    under.agent_runs.cancel()
    await asyncio.wait([under.agent_runs])
    await under.publish(1)
    first, second = StreamWriter(make_spec()), StreamWriter(make_spec())
    for number in range(3):
        first.write("user", [3], np.full((1, 16), 1.0))
        second.write("user", [number], np.full((1, 16), 2.0))
    first.entries[2:] = second.entries[2:]
    await first.put(under.fleet.registry)
    desired = WantedModel(model="films", epoch=1, live=1, hold=(1,), follow=(1,))
    await under.actions.stage("films", 1, desired, lambda fraction: None)
    (served,) = under.node.info().versions
    assert (served.delta_sequence, served.forked, served.delta_forks) == (2, True, 1)


async def test_an_outage_after_rows_were_loaded_does_not_free_them(under, tmp_path, monkeypatch, caplog):
    under.agent_runs.cancel()
    await asyncio.wait([under.agent_runs])
    stage = node_agent.stage_tables

    def loaded(*arguments, **options):
        tables = stage(*arguments, **options)
        shutil.rmtree(tmp_path / "registry")
        (tmp_path / "registry").write_text("no folder")
        return tables

    monkeypatch.setattr(node_agent, "stage_tables", loaded)
    await under.publish(1)
    desired = WantedModel(model="films", epoch=1, live=1, hold=(1,), follow=(1,))
    await under.actions.stage("films", 1, desired, lambda fraction: None)
    assert under.actions.loaded() == {("films", 1)}
    assert "version 1 of films is loaded without deltas after 0" in caplog.text
    (tmp_path / "registry").unlink()

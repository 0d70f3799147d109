from __future__ import annotations

import asyncio

import pytest

from loader.errors import RegistryUnavailableError, SnapshotCorruptError
from loader.registry.fleet import wanted_key
from shard_node.agent.agent import AgentConfig
from shard_node.agent.stagings import StagingConfig
from shard_node.errors import MemoryBudgetError
from shardrank_testing.agents import ToldActions, agent_on, published, run


@pytest.fixture
def url(tmp_path) -> str:
    return str(tmp_path / "registry")


def test_a_wanted_version_is_staged_announced_and_acted_on(url):
    async def main():
        async with agent_on(url) as under:
            gate = under.actions.gates["films", 3] = asyncio.Event()
            wanted = await under.want("films", hold=(3,), live=3)
            await under.until(lambda: under.actions.begun == [("films", 3)])
            assert (await under.told("films", 3, "staging")).progress == 0.5
            assert (await under.record()).applied == {}
            gate.set()
            await under.until(lambda: ("films", 3) in under.actions.ready)
            await under.told("films", 3, "ready")
            record = await under.record()
            assert record.applied == {"films": wanted.epoch}
            assert under.agent.problems() == []

    run(main())


def test_the_live_version_is_staged_first_and_one_at_a_time(url):
    async def main():
        async with agent_on(url) as under:
            gate = under.actions.gates["films", 9] = asyncio.Event()
            await under.want("films", hold=(3, 9), live=9)
            await under.until(lambda: bool(under.actions.begun))
            await under.pass_time(1.0)
            assert under.actions.begun == [("films", 9)]
            assert (await under.report("films", 3)).state == "waiting"
            gate.set()
            await under.until(lambda: under.actions.begun == [("films", 9), ("films", 3)])

    run(main())


def test_a_staging_that_hangs_blocks_neither_another_model_nor_the_heartbeat(url):
    async def main():
        async with agent_on(url) as under:
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

    run(main())


def test_a_bad_version_is_refused_with_its_reason_and_wedges_no_other_model(url):
    async def main():
        async with agent_on(url) as under:
            await under.fleet.put_version(published("films", 2))
            under.actions.faults["films", 2] = [SnapshotCorruptError("rows are damaged")]
            await under.want("films", hold=(1, 2), live=1)
            await under.want("songs", hold=(5,))
            await under.until(lambda: {("films", 1), ("songs", 5)} <= under.actions.held())
            report = await under.told("films", 2, "refused")
            assert report.reason == "SnapshotCorruptError: rows are damaged"
            await under.pass_time(100.0)
            assert under.actions.begun.count(("films", 2)) == 1
            # Taken back and wanted again, it gets another chance.
            await under.want("films", hold=(1,))
            await under.told("films", 2, None)
            await under.want("films", hold=(1, 2))
            await under.until(lambda: ("films", 2) in under.actions.ready)

    run(main())


def test_a_refused_version_is_tried_again_once_it_is_published_as_something_else(url):
    async def main():
        async with agent_on(url) as under:
            under.actions.faults["films", 2] = [SnapshotCorruptError("not published")]
            await under.want("films", hold=(2,))
            await under.told("films", 2, "refused")
            await under.pass_time(5.0)
            assert under.actions.begun == [("films", 2)]
            await under.fleet.put_version(published("films", 2))
            await under.pass_time_until(lambda: ("films", 2) in under.actions.ready)

    run(main())


def test_the_live_version_is_tried_again_although_it_was_refused(url):
    async def main():
        async with agent_on(url) as under:
            under.actions.faults["films", 2] = [OSError("stale file handle")]
            await under.want("films", hold=(2,), live=2)
            await under.told("films", 2, "refused")
            await under.pass_time(29.0)
            assert under.actions.begun == [("films", 2)]
            await under.pass_time_until(lambda: ("films", 2) in under.actions.ready)

    run(main())


def test_what_passes_by_itself_is_waited_for_with_its_reason_and_tried_again(url):
    async def main():
        async with agent_on(url) as under:
            under.actions.faults["films", 1] = [RegistryUnavailableError("gone"), RegistryUnavailableError("gone")]
            await under.want("films", hold=(1,))
            await under.until(lambda: bool(under.actions.begun))
            report = await under.told("films", 1, "waiting")
            assert report.reason == "RegistryUnavailableError: gone"
            await under.until(lambda: True)
            assert len(under.actions.begun) == 1
            await under.pass_time_until(lambda: ("films", 1) in under.actions.ready)
            assert len(under.actions.begun) == 3

    run(main())


def test_a_version_is_announced_as_draining_before_it_is_retired(url):
    async def main():
        async with agent_on(url) as under:
            await under.want("films", hold=(1, 2), live=1)
            await under.until(lambda: len(under.actions.ready) == 2)
            await under.want("films", hold=(2,), live=2)
            await under.pass_time(0.4)
            assert (await under.report("films", 1)).state == "draining"
            assert under.actions.retired == []
            await under.pass_time_until(lambda: under.actions.retired == [("films", 1)])
            await under.told("films", 1, None)
            assert (await under.report("films", 2)).state == "ready"

    run(main())


def test_a_version_that_is_wanted_again_while_it_is_only_announced_is_kept(url):
    async def main():
        async with agent_on(url) as under:
            await under.want("films", hold=(1, 2))
            await under.until(lambda: len(under.actions.ready) == 2)
            await under.want("films", hold=(2,))
            await under.pass_time(0.3)
            await under.want("films", hold=(1, 2))
            await under.pass_time(3.0)
            assert under.actions.retired == []
            assert (await under.report("films", 1)).state == "ready"

    run(main())


def test_a_version_comes_only_after_the_one_that_goes_is_gone(url):
    async def main():
        async with agent_on(url) as under:
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
            assert under.actions.held() == {("films", 2)}

    run(main())


def test_a_lack_of_memory_is_waited_out_while_memory_is_being_freed_and_refused_otherwise(url):
    async def main():
        async with agent_on(url) as under:
            await under.want("films", hold=(1,))
            await under.until(lambda: len(under.actions.ready) == 1)
            under.actions.retire_gate = asyncio.Event()
            await under.want("films", hold=())
            await under.pass_time(1.0)
            under.actions.faults["songs", 1] = [MemoryBudgetError("no room")]
            await under.want("songs", hold=(1,))
            await under.until(lambda: ("songs", 1) in under.actions.begun)
            await under.told("songs", 1, "waiting")
            under.actions.retire_gate.set()
            await under.pass_time_until(lambda: ("songs", 1) in under.actions.ready)
            under.actions.faults["films", 4] = [MemoryBudgetError("no room")]
            await under.want("films", hold=(4,))
            await under.until(lambda: ("films", 4) in under.actions.begun)
            await under.told("films", 4, "refused")

    run(main())


def test_a_staging_that_is_not_wanted_any_more_is_called_off(url):
    async def main():
        async with agent_on(url) as under:
            under.actions.gates["films", 1] = asyncio.Event()
            await under.want("films", hold=(1,))
            await under.until(lambda: bool(under.actions.begun))
            await under.want("films", hold=(2,))
            await under.until(lambda: ("films", 2) in under.actions.ready)
            assert under.actions.cancelled == [("films", 1)]
            await under.told("films", 1, None)

    run(main())


def test_no_more_of_the_fleet_than_allowed_stages_at_a_time(url):
    config = AgentConfig(staging=StagingConfig(jitter_s=0.0, fleet_limit=1))

    async def main():
        other_actions = ToldActions(node_id="shard-0-b")
        async with agent_on(url, config=config) as under, agent_on(url, other_actions, config) as other:
            gate = under.actions.gates["films", 1] = asyncio.Event()
            await under.want("films", hold=(1,))
            await under.until(lambda: bool(under.actions.begun))
            await other.pass_time(1.0)
            while (await other.report("films", 1)).reason == "":
                await other.pass_time(0.1)
            assert other_actions.begun == []
            report = await other.report("films", 1)
            assert report.state == "waiting"
            assert report.reason == "StagingBusyError: 1 stagings run in the fleet, which is its limit"
            gate.set()
            await under.until(lambda: ("films", 1) in under.actions.ready)
            await other.pass_time_until(lambda: ("films", 1) in other_actions.ready)

    run(main())


def test_a_pointer_that_can_not_be_set_is_told_and_stops_no_other_model(url):
    async def main():
        async with agent_on(url) as under:
            under.actions.settle_faults["films"] = ValueError("no such thing")
            await under.want("films", hold=(1,))
            songs = await under.want("songs", hold=(1,))
            await under.until(lambda: len(under.actions.ready) == 2)
            await under.until(lambda: True)
            assert under.agent.problems() == ["settling films: ValueError: no such thing"]
            assert (await under.record()).applied == {"songs": songs.epoch}
            under.actions.settle_faults.clear()
            await under.until(lambda: True)
            assert under.agent.problems() == []

    run(main())


def test_models_whose_pointers_hang_hold_up_neither_others_nor_the_heartbeat(url):
    async def main():
        config = AgentConfig(settle_timeout_s=0.2, staging=StagingConfig(jitter_s=0.0))
        async with agent_on(url, config=config) as under:
            for model in ("a", "b", "c", "songs"):
                await under.want(model, hold=(1,))
            await under.until(lambda: len(under.actions.ready) == 4)
            under.actions.settled.clear()
            for model in ("a", "b", "c"):
                under.actions.settle_gates[model] = asyncio.Event()
            cut: list[str] = []
            rounds = asyncio.create_task(under.agent.round())
            while "songs" not in {wanted.model for wanted in under.actions.settled}:
                await asyncio.sleep(0.001)
                cut = under.agent.problems()
            # None of the others was waited for until its time was over.
            assert cut == []
            await rounds
            late = "TimeoutError: not done within 0.2 s"
            assert under.agent.problems() == [f"settling {model}: {late}" for model in ("a", "b", "c")]
            assert (await under.record()).applied["songs"] > 0

    run(main())


def test_a_heartbeat_that_waits_for_pointers_is_in_time_nevertheless():
    config = AgentConfig()
    longest = config.settle_timeout_s + 1.25 * config.poll_s + config.heartbeat_s
    assert longest < config.ttl_s


def test_only_the_models_that_it_is_for_are_staged(url):
    async def main():
        async with agent_on(url, config=AgentConfig(models=("songs",), staging=StagingConfig(jitter_s=0))) as under:
            await under.want("films", hold=(1,))
            await under.want("songs", hold=(1,))
            await under.until(lambda: ("songs", 1) in under.actions.ready)
            assert under.actions.begun == [("songs", 1)]
            assert set(under.agent.wanted) == {"songs"}

    run(main())


def test_leaving_is_announced_first_and_nothing_is_announced_after_it(url):
    async def main():
        async with agent_on(url) as under:
            await under.want("films", hold=(1,))
            await under.until(lambda: len(under.actions.ready) == 1)
            leaving = asyncio.create_task(under.agent.leave())
            await under.want("films", hold=(1, 2))
            await under.until(lambda: True)
            record = await under.record()
            assert (record.draining, record.report("films", 1).state) == (True, "ready")
            while not leaving.done():
                under.clock.advance(0.5)
                await asyncio.sleep(0.001)
            assert await under.record() is None
            await under.pass_time(3.0)
            assert await under.record() is None
            assert ("films", 2) not in under.actions.begun

    run(main())


def test_a_record_of_a_lower_epoch_is_replaced_by_the_one_that_is_known(url):
    async def main():
        async with agent_on(url) as under:
            old = await under.want("films", hold=(1,), live=1)
            new = await under.want("films", hold=(1, 2), live=2)
            await under.until(lambda: len(under.actions.ready) == 2)
            entry = await under.fleet.raw(wanted_key("films"))
            await under.fleet.registry.put(wanted_key("films"), old.model_dump_json().encode(), entry.revision)
            await under.until(lambda: True)
            assert await under.fleet.wanted() == {"films": new}
            await under.pass_time(2.0)
            assert under.actions.retired == []

    run(main())


def test_a_record_that_can_not_be_read_is_told_and_changes_nothing(url):
    async def main():
        async with agent_on(url) as under:
            await under.want("films", hold=(1,))
            await under.until(lambda: len(under.actions.ready) == 1)
            entry = await under.fleet.raw(wanted_key("films"))
            await under.fleet.registry.put(wanted_key("films"), b"{", entry.revision)
            await under.pass_time(3.0)
            assert "RegistryRecordError: wanted/films" in under.agent.problems()[0]
            assert under.actions.held() == {("films", 1)}
            assert (await under.report("films", 1)).state == "ready"

    run(main())

"""Whoever dies, at whatever step, and whatever the registry loses: a rollout ends in exactly one version."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loader.errors import RegistryUnavailableError, RolloutError
from loader.registry import open_registry
from loader.registry.directory import DirectoryRegistry
from loader.registry.fleet import COORDINATOR_LOCK, WANTED, FleetRegistry, WantedModel, rollout_key, wanted_key
from loader.rollout.coordinator import Coordinator
from shardrank_testing.interrupted_registry import InterruptedRegistry, KilledError
from shardrank_testing.registries import redis_server
from shardrank_testing.rollout_fleet import MODEL, NEW, OLD, Clock, PlayedFleet, PlayedNode


@pytest.mark.parametrize("strategy", ["beside", "by-replica"])
@pytest.mark.parametrize("when", ["kill_before", "kill_after"])
async def test_a_coordinator_killed_at_any_write_is_replaced(fleet, strategy, when):
    async def revisions():
        return [(await fleet.registry.get(key)).revision for key in (rollout_key(MODEL), wanted_key(MODEL))]

    await fleet.begin(1, 2, 1)
    await fleet.start(strategy=strategy, canary_share=0.1, bake_s=1.0)
    killed = 0
    while (await fleet.rollout()).active:
        registry = InterruptedRegistry(fleet.registry)
        setattr(registry, when, 1)
        fleet.coordinator = fleet.new_coordinator(registry)
        try:
            # It has seen the nodes for long enough, and then dies in its first write.
            await fleet.round(times=8)
        except KilledError:
            killed += 1
        if when == "kill_before":
            fleet.coordinator = fleet.new_coordinator()
            before = await revisions()
            for _ in range(30):
                await fleet.round()
                if await revisions() != before:
                    break
    assert killed >= 12
    await fleet.ends("done", NEW)


async def sleeps_at_its_step(fleet):
    """A coordinator that hangs in the write of what its step wants, and the link that holds it up."""
    link = InterruptedRegistry(fleet.registry)
    sleeper = fleet.new_coordinator(link)
    link.hold_next = WANTED
    for _ in range(3):
        fleet.clock.now += 0.3
        await fleet.react()
        tick = asyncio.create_task(sleeper.tick())
        await asyncio.wait([tick, asyncio.create_task(link.held.wait())], return_when="FIRST_COMPLETED")
        if link.held.is_set():
            break
    assert not tick.done()
    return sleeper, link, tick


async def test_a_coordinator_that_slept_through_an_abort_is_late(fleet):
    await fleet.begin(1, 1, 1)
    await fleet.start()
    sleeper, link, tick = await sleeps_at_its_step(fleet)
    await fleet.abort()
    await fleet.ends("aborted", OLD)
    before = await fleet.wanted()
    link.go_on.set()
    await tick
    assert await fleet.wanted() == before
    for _ in range(5):
        await sleeper.tick()
        await fleet.round()
    await fleet.check_all_in(OLD)


async def test_a_step_that_was_written_after_an_abort_is_undone(fleet):
    await fleet.begin(1, 1, 1)
    await fleet.start()
    _, link, tick = await sleeps_at_its_step(fleet)
    await fleet.abort()
    link.go_on.set()
    await tick
    assert NEW in (await fleet.wanted()).hold
    await fleet.ends("aborted", OLD)


async def test_two_coordinators_that_both_believe_to_lead_do_no_harm(fleet):
    await fleet.begin(2, 2, 2)
    others = [fleet.new_coordinator() for _ in range(2)]
    await fleet.start(strategy="by-replica", bake_s=9.0)
    baking = set()
    while (rollout := await fleet.rollout()).active:
        if rollout.bake_began_at is not None:
            baking.add(fleet.clock.now)
        fleet.clock.now += 0.3
        await fleet.react()
        await asyncio.gather(fleet.coordinator.tick(), *(other.tick() for other in others))
        fleet.check_answers()
    await fleet.ends("done", NEW)
    assert 9.0 <= max(baking) + 0.3 - min(baking) < 15.0


async def test_another_coordinator_leads_when_the_first_is_gone(fleet):
    await fleet.begin(1, 1, 1)
    other = fleet.new_coordinator(owner="the other")
    await other.tick()
    assert (fleet.coordinator.leads, other.leads) == (True, False)
    await fleet.start()
    await fleet.until_step("stage_serving")
    fleet.clock.now += fleet.config.lock_ttl_s + 0.1
    await other.tick()
    assert other.leads
    fleet.coordinator, first = other, fleet.coordinator
    await fleet.ends("done", NEW)
    await first.tick()
    assert not first.leads


@pytest.mark.parametrize(
    ("loss", "step"), [("flush", "flip"), ("restart_empty", "stage_shards"), ("kill", "retire_shards")]
)
async def test_a_redis_that_dies_or_forgets_pauses_the_rollout_only(loss, step, tmp_path):
    with redis_server(tmp_path) as server:
        clock = Clock()
        registry = open_registry(server.url, clock=clock)
        fleet = PlayedFleet(registry, clock)
        await fleet.begin(2, 2, 2)
        await fleet.start()
        await fleet.until_step(step)
        await asyncio.to_thread(getattr(server, loss))
        if loss == "kill":
            for _ in range(3):
                await fleet.coordinator.tick()
                await fleet.node("serve-0").react(fleet.fleet)
                fleet.clock.now += 100.0
            assert "rollouts pause" in fleet.coordinator.problems()[0]
            await asyncio.to_thread(server.start)
        for node in fleet.nodes:
            with contextlib.suppress(RegistryUnavailableError):
                await node.react(fleet.fleet)
        await fleet.ends("done", NEW)
        assert fleet.coordinator.problems() == ()
        await registry.close()


async def test_a_registry_that_forgot_its_nodes_is_no_empty_fleet(fleet):
    await fleet.begin(1, 1, 2)
    fleet.node("serve-1").stuck.add(OLD)
    await fleet.start()
    await fleet.until_step("retire_serving")
    # The process that still answers with the old version is the last one to announce itself again.
    await fleet.fleet.withdraw_node("serve-1")
    others = [node for node in fleet.nodes if node.node_id != "serve-1"]
    shutil.rmtree(fleet.registry.path)
    fleet.coordinator = fleet.new_coordinator()
    await fleet.react(others)
    await fleet.coordinator.tick()
    assert (await fleet.rollout()).step == "retire_serving"
    await fleet.round(times=10)
    assert (await fleet.rollout()).step == "retire_serving"
    fleet.node("serve-1").stuck.clear()
    await fleet.ends("done", NEW)


async def test_lost_writes_of_a_registry_are_restored_by_nodes(fleet, tmp_path):
    await fleet.begin(1, 2, 1)
    await fleet.start()
    await fleet.until_step("stage_serving")
    keys = fleet.registry.path / "keys"
    shutil.copytree(keys, tmp_path / "then")
    await fleet.until_step("retire_serving")
    await fleet.react()
    wanted, rollout = await fleet.wanted(), await fleet.rollout()
    shutil.rmtree(keys)
    shutil.copytree(tmp_path / "then", keys)
    assert (await fleet.rollout()).step == "stage_serving"
    with pytest.raises(RolloutError, match="is running"):
        await fleet.start(3)
    fleet.coordinator = fleet.new_coordinator()
    await fleet.react()
    assert await fleet.wanted() == wanted
    assert (await fleet.rollout()).epoch == rollout.epoch
    await fleet.ends("done", NEW)


async def test_a_rollout_older_than_what_is_wanted_goes_on_there(fleet):
    """The registry has lost the rollout's last steps, and nobody remembers them."""
    await fleet.begin(1, 1, 1)
    await fleet.start()
    old = await fleet.registry.get(rollout_key(MODEL))
    await fleet.until_step("retire_serving")
    for node in fleet.nodes:
        node.rollout = None
    now = await fleet.registry.get(rollout_key(MODEL))
    await fleet.registry.put(rollout_key(MODEL), old.value, now.revision)
    fleet.coordinator = fleet.new_coordinator()
    await fleet.coordinator.tick()
    rollout = await fleet.rollout()
    assert (rollout.step, rollout.events[-1].text) == (
        "retire_serving",
        "the registry had lost how far it was: step retire_serving",
    )
    await fleet.ends("done", NEW)


async def test_what_is_wanted_and_lost_is_written_anew_from_the_rollout(fleet):
    await fleet.begin(1, 1, 1)
    await fleet.start()
    await fleet.until_step("flip")
    for node in fleet.nodes:
        node.restart()
    fleet.coordinator = fleet.new_coordinator()
    epoch, wanted = (await fleet.wanted()).epoch, await fleet.registry.get(wanted_key(MODEL))
    await fleet.registry.delete(wanted_key(MODEL), wanted.revision)
    await fleet.react()
    await fleet.coordinator.tick()
    assert await fleet.wanted() is None
    await fleet.ends("done", NEW)
    assert (await fleet.wanted()).epoch >= epoch


async def test_a_coordinator_restores_what_the_registry_forgot(fleet, caplog):
    await fleet.begin(1, 1, 1)
    keys = rollout_key(MODEL), wanted_key(MODEL)
    await fleet.start()
    before = [await fleet.registry.get(key) for key in keys]
    await fleet.until_step("retire_serving")
    for node in fleet.nodes:
        node.restart()
    for key, old in zip(keys, before, strict=True):
        await fleet.registry.put(key, old.value, (await fleet.registry.get(key)).revision)
    await fleet.coordinator.tick()
    assert (await fleet.rollout()).step == "retire_serving"
    assert caplog.text.count("the registry had lost") == 2
    await fleet.ends("done", NEW)


async def test_a_coordinator_leaves_another_fleets_registry_alone(fleet, tmp_path, caplog):
    await fleet.begin(1, 1, 1)
    await fleet.start()
    await fleet.round()
    other = FleetRegistry(DirectoryRegistry(tmp_path / "other"))
    await other.put_wanted(WantedModel(model=MODEL, epoch=1, live=9), None)
    before = await other.registry.entries("")
    paths = fleet.registry.path, tmp_path / "ours"
    paths[0].rename(paths[1])
    other.registry.path.rename(paths[0])
    for _ in range(3):
        fleet.clock.now += fleet.config.lock_ttl_s
        await fleet.coordinator.tick()
    (problem,) = fleet.coordinator.problems()
    assert problem.startswith("rollouts pause: this registry is not the one that version 1 of ")
    assert caplog.text.count(problem) == 1
    assert await fleet.registry.entries("") == before
    assert await fleet.registry.holder(COORDINATOR_LOCK) is None
    paths[0].rename(tmp_path / "other")
    paths[1].rename(paths[0])
    await fleet.ends("done", NEW)


async def test_a_cancelled_coordinator_releases_its_lock(fleet):
    await fleet.begin(1, 1, 1)
    await fleet.registry.release(COORDINATOR_LOCK, "the one")
    await fleet.start()
    done = asyncio.Event()

    async def sleep(_):
        fleet.clock.now += 0.3
        await fleet.react()
        if not (await fleet.rollout()).active:
            done.set()
        await asyncio.sleep(0)

    running = asyncio.create_task(
        Coordinator(fleet.fleet, "a", fleet.clock, sleep, fleet.config, fleet.clock.monotonic).run()
    )
    await asyncio.wait_for(done.wait(), 60.0)
    assert await fleet.registry.holder(COORDINATOR_LOCK) == "a"
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await fleet.registry.holder(COORDINATOR_LOCK) is None


async def test_a_step_on_record_is_done_after_the_delay_of_drills(fleet):
    fleet.config = fleet.config.model_copy(update={"step_delay_s": 3.0})
    fleet.coordinator = fleet.new_coordinator()
    await fleet.begin(1, 1, 1)
    await fleet.start()
    await fleet.round(times=8)
    assert (await fleet.wanted()).epoch == 1
    ended = await fleet.ends("done", NEW)
    assert fleet.clock.now - ended.started_at >= 3.0 * len(ended.steps)


async def test_no_rollout_starts_on_a_registry_that_lost_changes(fleet):
    await fleet.begin(1, 1, 1)
    await fleet.start()
    await fleet.ends("done", NEW)
    wanted = await fleet.registry.get(wanted_key(MODEL))
    await fleet.registry.delete(wanted_key(MODEL), wanted.revision)
    with pytest.raises(RolloutError, match="the registry has lost its last changes: "):
        await fleet.start(3)


async def until_baked(fleet, began, away_s=0.0):
    """Seconds that the bake has lasted, without those in which nobody observed it."""
    await fleet.until_step("flip", written=False)
    return fleet.clock.now - began - away_s


@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0])
async def test_a_clock_that_steps_ends_no_bake_and_delays_none(fleet, ahead_s):
    await fleet.begin(1, 2, 1)
    await fleet.start(canary_share=0.1, bake_s=10.0)
    began = (await fleet.until_bake()).bake_began_at
    await fleet.round(times=10)
    fleet.clock.ahead_s = ahead_s
    assert 10.0 <= await until_baked(fleet, began) < 12.0


@pytest.mark.parametrize("owner", ["the one", "the next one"])
async def test_a_new_coordinator_waits_for_the_rest_of_a_bake(fleet, owner):
    """Its clock is an hour ahead, and nobody observed the fleet for 50 s."""
    await fleet.begin(1, 2, 1)
    await fleet.start(canary_share=0.1, bake_s=10.0)
    began = (await fleet.until_bake()).bake_began_at
    before = await fleet.rollout()
    await fleet.round(times=19)
    after = await fleet.rollout()
    assert 4.7 <= after.baked_s < 5.8
    assert after == before.model_copy(update={"baked_s": after.baked_s})
    fleet.clock.now += 50.0
    fleet.coordinator = fleet.new_coordinator(owner=owner, ahead_s=3600.0)
    assert 10.0 <= await until_baked(fleet, began, 50.0) < 12.5


@pytest.mark.parametrize("is_cut", [True, False])
async def test_time_that_a_coordinator_did_not_observe_is_no_bake(fleet, is_cut):
    """The registry was away, or the process was stopped."""
    await fleet.begin(1, 2, 1)
    await fleet.start(canary_share=0.1, bake_s=10.0)
    link = InterruptedRegistry(fleet.registry)
    fleet.coordinator = fleet.new_coordinator(link)
    began = (await fleet.until_bake()).bake_began_at
    await fleet.round(times=10)
    for _ in range(5):
        link.calls_left = 0 if is_cut else link.calls_left
        fleet.clock.now += 1000.0
        await fleet.coordinator.tick()
    link.calls_left = math.inf
    assert 10.0 <= await until_baked(fleet, began, 5000.0 if is_cut else 4995.0) < 13.0


async def test_a_bake_of_an_earlier_release_begins_anew(fleet):
    await fleet.begin(1, 2, 1)
    await fleet.start(canary_share=0.1, bake_s=10.0)
    await fleet.until_bake()
    await fleet.round(times=20)
    entry = await fleet.registry.get(rollout_key(MODEL))
    record = json.loads(entry.value)
    for name in ("baked_s", "waited_s", "waited_staging"):
        del record[name]
    await fleet.registry.put(rollout_key(MODEL), json.dumps(record).encode(), entry.revision)
    assert 10.0 <= await until_baked(fleet, fleet.clock.now) < 12.0


async def test_the_limit_of_a_step_holds_over_new_coordinators(fleet):
    fleet.config = fleet.config.model_copy(update={"stage_timeout_s": 20.0})
    await fleet.begin(1, 2, 1)
    fleet.node("shard-0-1").stage_rounds = 10**9
    began = (await fleet.start()).started_at
    for _ in range(6):
        assert (await fleet.rollout()).state == "running"
        fleet.coordinator = fleet.new_coordinator()
        await fleet.round(times=15)
    ended = await fleet.ends("rolled_back", OLD)
    assert "step stage_shards is not done after 20 s: shard-0-1" in ended.reason
    assert 20.0 < fleet.clock.now - began < 40.0


async def test_a_fleet_that_was_stopped_with_its_coordinator_is_not_empty(fleet):
    """All announcements have expired when it looks again, and no node has had the time to repeat its own."""
    fleet.config = fleet.config.model_copy(update={"settle_s": 2.0})
    fleet.coordinator = fleet.new_coordinator()
    await fleet.begin(1, 1, 1)
    fleet.node("serve-0").stuck.add(OLD)
    await fleet.start()
    await fleet.until_step("retire_serving")
    fleet.clock.now += 600.0
    await fleet.coordinator.tick()
    assert (await fleet.rollout()).step == "retire_serving"
    fleet.node("serve-0").stuck.clear()
    await fleet.ends("done", NEW)


async def forget(fleet: PlayedFleet, node_id: str) -> None:
    """Kill a node, and let what it announced expire before anybody looks."""
    fleet.node(node_id).kill()
    for _ in range(8):
        fleet.clock.now += 0.5
        await fleet.react()


@pytest.mark.parametrize("ending", ["aborted", "rolled_back"])
async def test_undoing_rolls_no_group_that_could_not_be_rolled(fleet, ending):
    fleet.config = fleet.config.model_copy(update={"stage_timeout_s": 15.0})
    fleet.coordinator = fleet.new_coordinator()
    await fleet.begin(2, 2, 1)
    await fleet.start(strategy="by-replica")
    await forget(fleet, "shard-1-1")
    await fleet.round(times=5)
    assert (await fleet.rollout()).step == "roll:0"
    if ending == "aborted":
        await fleet.abort()
    while (await fleet.rollout()).active:
        await fleet.round()
        assert OLD in fleet.node("shard-1-0").ready()
    rollout = await fleet.ends(ending, OLD)
    assert ending == "aborted" or "shard 1 would be left without a node that has version 1 ready" in rollout.reason


async def test_a_shard_that_lost_the_new_version_is_healed(fleet):
    await fleet.begin(2, 2, 2)
    rollout = await fleet.start(strategy="by-replica")
    assert rollout.groups[1] == ("shard-0-1", "shard-1-1")
    await fleet.until_step("roll:1")
    await forget(fleet, "shard-1-0")
    await fleet.ends("done", NEW)


async def test_a_rollout_that_an_earlier_release_began_ends(fleet):
    """Its plan retires the old version before the late rolls, and what it wants has no fallback."""
    await fleet.begin(2, 2, 2)
    rollout = await fleet.start(strategy="by-replica", bake_s=5.0)
    *start, late, retire, end = rollout.steps
    earlier = rollout.model_copy(update={"steps": (*start, retire, late, end)})
    await fleet.registry.put(
        rollout_key(MODEL), earlier.encode(), (await fleet.registry.get(rollout_key(MODEL))).revision
    )
    began = (await fleet.until_bake()).bake_began_at
    key, wanted = wanted_key(MODEL), await fleet.wanted()
    without = wanted.model_copy(update={"fallback": None})
    for node in fleet.nodes:
        node.wanted = without
    await fleet.registry.put(key, without.encode(), (await fleet.registry.get(key)).revision)
    await fleet.coordinator.tick()
    await fleet.until(lambda _, wanted: wanted.fallback == OLD)
    assert (await fleet.rollout()).bake_began_at == began
    await fleet.until_step("roll:1")
    # Nobody holds the old version any more: its last node may be all that can heal the shard.
    await forget(fleet, "shard-1-0")
    await fleet.ends("done", NEW)


async def test_the_last_node_with_the_old_version_waits_for_another(fleet):
    await fleet.begin(2, 2, 2)
    await fleet.start(strategy="by-replica")
    await fleet.until_step("flip")
    await forget(fleet, "shard-1-0")
    await fleet.round(times=2)
    fleet.node("shard-1-0").restart()
    await fleet.until_step("roll:1", written=False)
    await forget(fleet, "shard-1-0")
    await fleet.round(times=20)
    assert (await fleet.rollout()).step == "roll:1"
    assert ((await fleet.wanted()).fallback, fleet.node("shard-1-1").ready()) == (OLD, {OLD})
    # Another one in its place heals the shard as well; it is in no group, so it has the old version.
    fleet.nodes.append(PlayedNode("shard-1-2", shard=1, num_shards=2))
    await fleet.ends("done", NEW)


@pytest.mark.parametrize("step", ["canary", "flip", "bake"])
async def test_the_old_version_stays_while_a_shard_lost_the_new_one(fleet, step):
    await fleet.begin(2, 2, 1)
    await fleet.start(strategy="by-replica", canary_share=0.1 if step == "canary" else None, bake_s=2.0)
    await fleet.until_step(step)
    await forget(fleet, "shard-1-0")
    await fleet.round(times=20)
    assert (await fleet.rollout()).step == step
    fleet.node("shard-1-0").restart()
    await fleet.ends("done", NEW)


ACTIONS = st.one_of(
    *[st.just(("round",))] * 4,
    st.tuples(st.just("react"), st.integers(0, 5)),
    st.tuples(st.just("tick"), st.integers(0, 1)),
    st.tuples(st.just("kill"), st.sampled_from(["kill_before", "kill_after"]), st.integers(1, 2)),
    st.just(("restart_coordinator",)),
    st.tuples(st.just("restart_node"), st.integers(0, 5)),
    st.just(("remember",)),
    st.just(("lose_last_writes",)),
    st.just(("abort",)),
    st.tuples(st.just("time"), st.floats(0.1, 5.0)),
)


class Play:
    """One play: a fleet of four shard nodes and two serving processes, and two coordinators that both lead."""

    def __init__(self, fleet: PlayedFleet, folder: Path) -> None:
        self.fleet = fleet
        self.saved = folder / "saved"
        self.keys = folder / "registry" / "keys"
        self.coordinators = [fleet.coordinator, fleet.new_coordinator()]
        self.aborted = False

    async def react(self, index: int) -> None:
        await self.fleet.nodes[index].react(self.fleet.fleet)

    async def tick(self, index: int) -> None:
        await self.coordinators[index].tick()

    async def kill(self, when: str, write: int) -> None:
        link = InterruptedRegistry(self.fleet.registry)
        setattr(link, when, write)
        dying = self.fleet.new_coordinator(link)
        with contextlib.suppress(KilledError):
            for _ in range(5):
                self.fleet.clock.now += 0.2
                await self.fleet.react()
                await dying.tick()

    async def restart_coordinator(self) -> None:
        self.fleet.coordinator = self.coordinators[0] = self.fleet.new_coordinator()

    async def restart_node(self, index: int) -> None:
        # What only one process knew is lost with it: the others have looked since.
        await self.fleet.react()
        self.fleet.nodes[index].restart()
        await self.fleet.react()

    async def remember(self) -> None:
        shutil.rmtree(self.saved, ignore_errors=True)
        shutil.copytree(self.keys, self.saved)

    async def lose_last_writes(self) -> None:
        if self.saved.exists():
            await self.fleet.react()
            shutil.rmtree(self.keys)
            shutil.copytree(self.saved, self.keys)

    async def abort(self) -> None:
        # The registry may have lost the rollout, too; and one that loses an abort at once has nobody to restore it.
        with contextlib.suppress(RolloutError):
            await self.fleet.abort()
            self.aborted = True
            await self.fleet.react()

    async def time(self, seconds: float) -> None:
        self.fleet.clock.now += seconds


@settings(max_examples=settings.default.max_examples // 2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    actions=st.lists(ACTIONS, max_size=30),
    strategy=st.sampled_from(["beside", "by-replica"]),
    canary_share=st.sampled_from([None, 0.1]),
    bake_s=st.sampled_from([0.0, 1.0]),
)
async def test_any_interleaving_ends_in_one_version_everywhere(actions, strategy, canary_share, bake_s):
    """And no request is missed: `check_answers` after each action."""
    with tempfile.TemporaryDirectory() as name:
        clock = Clock()
        registry = DirectoryRegistry(Path(name) / "registry", clock=clock)
        fleet = PlayedFleet(registry, clock)
        await fleet.begin(2, 2, 2)
        await fleet.start(strategy=strategy, canary_share=canary_share, bake_s=bake_s)
        await fleet.round()
        play = Play(fleet, Path(name))
        for action, *arguments in actions:
            await getattr(fleet if action == "round" else play, action)(*arguments)
            fleet.check_answers()
        rollout = await fleet.until_ended()
        await fleet.round(times=8)
        assert rollout.state == "done" or (rollout.state == "aborted" and play.aborted), rollout.reason
        await fleet.check_all_in(NEW if rollout.state == "done" else OLD)
        await registry.close()

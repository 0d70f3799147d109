"""Any order of what nodes, coordinators, people and failures do: the end is one version, and no answer was missed."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loader.errors import RolloutError
from loader.registry.directory import DirectoryRegistry
from loader.rollout.plan import read_rollout
from loader.rollout.requests import abort_rollout, start_rollout
from shardrank_testing.interrupted_registry import InterruptedRegistry, KilledError
from shardrank_testing.rollout_fleet import MODEL, NEW, OLD, Clock, PlayedFleet

ACTIONS = st.one_of(
    *[st.just("round")] * 4,
    st.tuples(st.just("react"), st.integers(0, 5)),
    st.tuples(st.just("tick"), st.integers(0, 1)),
    st.tuples(st.just("kill_before"), st.integers(1, 2)),
    st.tuples(st.just("kill_after"), st.integers(1, 2)),
    st.just("restart_coordinator"),
    st.tuples(st.just("restart_node"), st.integers(0, 5)),
    st.just("remember"),
    st.just("lose_last_writes"),
    st.just("abort"),
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

    async def act(self, action: object) -> None:
        name, argument = action if isinstance(action, tuple) else (action, None)
        await getattr(self, name)(argument)
        self.fleet.check_answers()

    async def round(self, _: object) -> None:
        await self.fleet.round()

    async def react(self, index: int) -> None:
        await self.fleet.nodes[index].react(self.fleet.fleet)

    async def tick(self, index: int) -> None:
        await self.coordinators[index].tick()

    async def kill_before(self, write: int) -> None:
        await self._killed("kill_before", write)

    async def kill_after(self, write: int) -> None:
        await self._killed("kill_after", write)

    async def _killed(self, when: str, write: int) -> None:
        link = InterruptedRegistry(self.fleet.registry)
        setattr(link, when, write)
        dying = self.fleet.new_coordinator(link)
        try:
            for _ in range(5):
                self.fleet.clock.now += 0.2
                await self.fleet.react()
                await dying.tick()
        except KilledError:
            return

    async def restart_coordinator(self, _: object) -> None:
        self.fleet.coordinator = self.coordinators[0] = self.fleet.new_coordinator()

    async def restart_node(self, index: int) -> None:
        # What only one process knew is lost with it: the others have looked since.
        await self.fleet.react()
        self.fleet.nodes[index].restart()
        await self.fleet.react()

    async def remember(self, _: object) -> None:
        shutil.rmtree(self.saved, ignore_errors=True)
        shutil.copytree(self.keys, self.saved)

    async def lose_last_writes(self, _: object) -> None:
        if self.saved.exists():
            await self.fleet.react()
            shutil.rmtree(self.keys)
            shutil.copytree(self.saved, self.keys)

    async def abort(self, _: object) -> None:
        if await read_rollout(self.fleet.fleet, MODEL) is None:
            return
        try:
            await abort_rollout(self.fleet.fleet, MODEL, "by hand", clock=self.fleet.clock)
        except RolloutError:
            return
        self.aborted = True
        # A registry that loses this at once has nobody to give it back.
        await self.fleet.react()

    async def time(self, seconds: float) -> None:
        self.fleet.clock.now += seconds


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    actions=st.lists(ACTIONS, max_size=30),
    strategy=st.sampled_from(["beside", "by-replica"]),
    canary=st.booleans(),
    bake=st.booleans(),
)
def test_any_interleaving_ends_in_one_version_everywhere_and_misses_no_answer(actions, strategy, canary, bake):
    async def scenario(folder):
        clock = Clock()
        registry = DirectoryRegistry(folder / "registry", clock=clock)
        try:
            fleet = PlayedFleet(registry, clock)
            await fleet.begin(2, 2, 2)
            share = 0.1 if canary else None
            await start_rollout(
                fleet.fleet,
                MODEL,
                NEW,
                canary_share=share,
                bake_s=1.0 if bake else 0.0,
                strategy=strategy,
                clock=clock,
                rollout_id="0" * 32,
            )
            await fleet.round()
            play = Play(fleet, folder)
            for action in actions:
                await play.act(action)
            rollout = await fleet.until_ended()
            for _ in range(8):
                await fleet.round()
            assert rollout.state == "done" or (rollout.state == "aborted" and play.aborted), rollout.reason
            version = NEW if rollout.state == "done" else OLD
            fleet.assert_all_in(version, wanted=await fleet.fleet.wanted_model(MODEL))
        finally:
            await registry.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(scenario(Path(folder)))

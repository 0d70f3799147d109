"""One run of a scenario: its processes, what happens to them, and the checks along the way."""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any, cast

import numpy as np

from loader import errors
from loader.errors import ShardrankError
from loader.registry.fleet import DenseStep, FleetRecord, FleetRegistry, WantedModel, delta_stream, rollout_key
from loader.registry.registry import Registry, StreamEntry
from loader.rollout.guards import GuardLimits
from loader.rollout.plan import Rollout, decode_rollout
from loader.rollout.requests import abort_rollout, roll_back, start_rollout
from tests.simulation.fleet import AGENT, CoordinatorProcess, PublisherProcess, ServingProcess, ShardProcess
from tests.simulation.history import History, ViolationError, entries_of
from tests.simulation.loop import SimulatedLoop
from tests.simulation.model import EVERYTHING, KEYS, MODEL, STAMPS, STEPS, VERSIONS, row_values, rows_of, snapshots
from tests.simulation.network import Network
from tests.simulation.processes import DISK_ERRORS, Clocks, FaultyStore, Process
from tests.simulation.registry import CrashableFiles, FilesRegistry, RegistryClient, RegistryServer
from tests.simulation.scenario import Event, Scenario

SETTLE_S = 150.0
"""After the last fault everything must have settled."""
RESTORED_S = 8
MOMENT_S = 15.0
"""How long a fault waits for its moment at most."""
QUIET_S = 8.0
STEADY_S = 6.0
"""For so long a way must have been there before a request that may not fail: ejections and back-off have passed."""
KNOWN_S = 3.0
"""How long ago a process may have been told what it still answers by: a poll, and a reconciliation."""
RECOVERY_S = 20.0
"""After a process or the registry was gone, or could not be reached, until it is as if it never had been."""
PATIENCE_S = 3.0
"""Of a client, over all of its tries."""
GUARDS = GuardLimits(min_requests=5, max_p99_ratio=1e6, p99_slack_ms=1e6)
HIGHEST = list(rows_of(1, 2))


class World:
    """Everything of one seed. `trace` has what happened, with its time."""

    def __init__(self, scenario: Scenario, *, verbose: bool = False) -> None:
        self.scenario, self.verbose = scenario, verbose
        self.random, self.loop = Random(scenario.seed), SimulatedLoop()
        self.loop.work_s = lambda: self.random.uniform(0.001, 0.05)
        self.loop.thread_s = lambda: self.random.uniform(0.001, scenario.load_s)
        self.network = self.loop.network = Network(self.loop, Random(self.random.random()))
        self.network.loss, self.network.duplicates = scenario.loss, scenario.duplicates
        self.num_shards, self.memory_versions = scenario.num_shards, scenario.memory_versions
        self.store_path, self.records, self._specs, _ = snapshots(scenario.capacity)
        names = scenario.processes()
        skews = dict(zip(names, scenario.skews_s or (0.0,) * len(names), strict=True))
        self.clocks = {name: Clocks(self.loop, skews[name]) for name in names}
        dense: dict[str, bytes] = {}
        self.stores = {name: FaultyStore(self.store_path, dense) for name in names}
        keeps_all = not any(event.kind in ("failover", "power") for event in scenario.events)
        self.history = History(scenario.num_shards, scenario.capacity, keeps_all=keeps_all)
        self.trace = list[tuple[float, str, str]]()
        self.server = RegistryServer(self.loop, Random(self.random.random()), self._written)
        self.server.lag_s = scenario.lag_s
        self.files = CrashableFiles(Random(self.random.random()))
        self.truth = self.files if scenario.files else self.server
        self.processes: dict[str, Process] = {}
        self.is_quiet, self.quiet_publishers = False, 0
        self._graveyard: list[Process] = []
        self._stamps, self._steps, self._unhealed = iter(STAMPS), {version: iter(STEPS) for version in VERSIONS}, 0
        self._last_fault_s, self._numbers = 0.0, 0
        self._current: Rollout | None = None
        self._bake_began_s: float | None = None
        # Set when a step of a rollout, or a dense one, begins.
        self._moments = defaultdict[str, asyncio.Event](asyncio.Event)
        self._named: tuple[int, ...] = ()
        self._broken: ViolationError | None = None
        self._way_since: float | None = None
        # Since when nothing is in the way of any request; below 0 if there is something.
        self._calm_since, self._disturbed_until = -1.0, 0.0
        # What was wrong with the last answer of each serving process.
        self._wrong: dict[str, str] = {}
        self._held_since: dict[tuple[str, int], float] = {}
        # What each serving process was last seen to know, by its epoch, and when.
        self._known: dict[tuple[str, int], tuple[float, WantedModel]] = {}

    def note(self, who: str, text: str) -> None:
        """Add to the trace."""
        self.trace.append((self.loop.now, who, text))
        if self.verbose:
            print(f"{self.loop.now:9.3f} {who:14} {text}")  # noqa: T201

    def open_registry(self) -> Registry:
        """Open the registry, as a process does."""
        if self.scenario.files:
            return FilesRegistry(self.files, self.server.now, self.loop, self._written)
        return cast("Registry", RegistryClient(self.server, self.network))

    def next_stamp(self) -> int:
        """Return a number that no rows were published with; 0 if there are none left."""
        return next(self._stamps, 0)

    def next_step(self, version: int) -> int:
        """Return the next dense step of a version; 0 if there are none left."""
        return next(self._steps[version], 0)

    def of(self, kind: type[Any]) -> list[Any]:
        """Return the processes of a kind that run."""
        return [process for process in self.processes.values() if isinstance(process, kind) and process.is_running]

    # What is written.

    def stream(self, base: int) -> dict[int, tuple[bytes, bytes]]:
        """Return a stream as the registry has it now."""
        return self.truth.stream(delta_stream(MODEL, base))

    def wanted(self) -> WantedModel | None:
        """Return what is wanted now."""
        value = self.truth.record(f"wanted/{MODEL}")
        return None if value is None else WantedModel.model_validate_json(value)

    def _written(self, name: str, arguments: tuple[Any, ...]) -> None:
        try:
            if name == "put" and arguments[0].startswith("rollouts/"):
                self._rollout_written(decode_rollout(MODEL, arguments[1]))
            elif name == "put" and arguments[0].startswith("dense/"):
                step = DenseStep.model_validate_json(arguments[1])
                stream = self.stream(VERSIONS[step.version].base)
                self.history.step_written(step.version, step.step, step.sequence, step.digest, stream)
                self._moments["dense"].set()
            elif name == "commit":
                self.history.written(arguments[1], arguments[2])
            elif name == "append":
                self.history.written(StreamEntry(arguments[1], arguments[2]), b"")
        except ViolationError as violation:
            self._broken = self._broken or violation

    def _rollout_written(self, rollout: Rollout) -> None:
        before, self._current = self._current, rollout
        step = rollout.rollout_id, rollout.step, rollout.state
        if before is None or (before.rollout_id, before.step, before.state) != step:
            self._moments[rollout.step].set()
            self.note("registry", f"rollout to {rollout.to_version}: {rollout.state} {rollout.step} {rollout.reason}")
        if before is None or before.rollout_id != rollout.rollout_id:
            self._bake_began_s = None
            return
        if rollout.bake_began_at is not None and before.bake_began_at is None:
            self._bake_began_s = self.loop.now
        goes_on = rollout.step_index > before.step_index
        if before.bake_began_at is not None and goes_on and self._bake_began_s is not None:
            self._check_bake(before, rollout)
        if rollout.state != before.state and rollout.outcome is not None:
            self._check_outcome(rollout)

    def _check_bake(self, before: Rollout, after: Rollout) -> None:
        assert self._bake_began_s is not None
        lasted = self.loop.now - self._bake_began_s
        if after.state == "running" and lasted < 0.95 * before.bake_s:
            raise ViolationError("bake ended early", f"after {lasted:.2f} of {before.bake_s} s")
        # It begins with what serving processes announced last.
        since = self._bake_began_s - 2 * AGENT.heartbeat_s
        answered = sum(at >= since for at in self.history.answers_of[before.to_version])
        if after.state == "running" and answered < before.guards.min_requests:
            raise ViolationError("bake ended early", f"after {answered} of {before.guards.min_requests} requests")
        self._bake_began_s = None

    def _check_outcome(self, rollout: Rollout) -> None:
        version, reason = VERSIONS[rollout.to_version], rollout.reason
        is_right = not version.is_broken and not version.is_worse
        has_no_room = self.memory_versions == 1 and "MemoryBudgetError" in reason
        if is_right and rollout.outcome == "refused" and not has_no_room:
            raise ViolationError("sound version refused", f"version {version.number}: {reason}")
        if is_right and "deviations off" in reason:
            raise ViolationError("sound version rolled back", f"version {version.number}: {reason}")

    # What happens.

    def start(self, name: str) -> None:
        """Start a process by its name."""
        kind, _, rest = name.partition("-")
        if kind == "shard":
            self.processes[name] = ShardProcess(self, name, int(rest.split("-")[0]))
        elif kind == "serve":
            self.processes[name] = ServingProcess(self, name)
        elif kind == "coordinator":
            self.processes[name] = CoordinatorProcess(self, name)
        else:
            version = self.scenario.publishers[int(rest)]
            self.processes[name] = PublisherProcess(self, name, version, self.scenario.min_replicas)

    def kill(self, name: str) -> None:
        """End a process as `kill -9` does."""
        process = self.processes[name]
        if process.is_running:
            process.is_running = False
            self._graveyard.append(process)
            self.network.closed(process)
            self.history.died(name)
            self._wrong.pop(name, None)
            self._observe()

    def restart(self, name: str) -> None:
        """Start what was killed."""
        if not self.processes[name].is_running:
            self.start(name)

    async def _happen(self, event: Event) -> None:
        await asyncio.sleep(event.at_s - self.loop.now)
        if event.moment:
            began = self._moments[event.moment]
            began.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(began.wait(), MOMENT_S)
            await asyncio.sleep(self.random.uniform(0.0, 2.0))
        self.note("event", str(event))
        kind, what = event.kind, event.what
        if kind in ("rollout", "abort", "roll_back"):
            await self._operate(kind, what)
            return
        is_in_the_way = kind in ("partition", "power")
        self._unhealed += is_in_the_way
        is_late = kind == "registry_down" and self.loop.now < self._disturbed_until  # to recover needs the registry
        if is_in_the_way or is_late or kind in ("crash", "failover"):
            self._disturbed_until = max(self._disturbed_until, self.loop.now + event.lasts_s + RECOVERY_S)
        heal = self._break(kind, what)
        await asyncio.sleep(event.lasts_s)
        for each in heal:
            each()
        self._unhealed -= is_in_the_way
        if is_in_the_way or kind == "slow":
            self._last_fault_s = self.loop.now

    def _break(self, kind: str, what: tuple[Any, ...]) -> list[Callable[[], Any]]:
        """Do what a fault does; return what ends it."""
        network, server = self.network, self.server
        if kind == "crash":
            self.kill(what[0])
            return [lambda: self.restart(what[0])]
        if kind == "partition":
            one, other, direction = what
            ways = [(one, other)] * (direction != "from") + [(other, one)] * (direction != "to")
            network.blocked.update(ways)
            return [lambda: network.blocked.difference_update(ways)]
        if kind == "slow":
            network.slow_s[what[0]] = what[1]
            return [partial(network.slow_s.pop, what[0], None)]
        if kind == "clock":
            self.clocks[what[0]].skew_s += what[1]
        elif kind == "disk":
            self.stores[what[0]].error = DISK_ERRORS[what[1]]
            return [lambda: setattr(self.stores[what[0]], "error", None)]
        elif kind == "failover":
            self.loop.call_later(what[0], lambda: setattr(server, "is_up", True))
            server.is_up = not what[0]
            self.note("registry", f"failover, {server.fail_over()} writes lost")
        elif kind == "registry_down":
            server.is_up = False
            return [lambda: setattr(server, "is_up", True)]
        elif kind == "registry_disk":
            self.files.fails = self._fail_half
            return [lambda: setattr(self.files, "fails", lambda: None)]
        elif kind == "power":
            for name in self.processes:
                self.kill(name)
            self.files.lose_power()
            return [lambda: [self.restart(name) for name in self.processes]]
        elif kind == "name_versions":
            wanted = self.wanted()
            self._named = what if wanted is None or wanted.live is None else (*what, wanted.live)
            return [lambda: setattr(self, "_named", ())]
        return []

    def _fail_half(self) -> None:
        if self.random.random() < 0.5:
            raise DISK_ERRORS["EIO"]()

    async def _operate(self, kind: str, what: tuple[Any, ...]) -> None:
        fleet, now = FleetRegistry(self.open_registry()), self.server.now
        for _ in range(10):
            try:
                if kind == "abort":
                    await abort_rollout(fleet, MODEL, "by hand", clock=now)
                elif kind == "roll_back":
                    await roll_back(fleet, MODEL, clock=now, rollout_id=secrets.token_hex(16))
                else:
                    await self._start_rollout(fleet, *what)
                return
            except errors.RegistryUnavailableError:
                await asyncio.sleep(1.0)
            except (errors.RolloutError, errors.RegistryConflictError) as error:
                self.note("operator", f"{kind}: {error}")
                return

    async def _start_rollout(
        self, fleet: FleetRegistry, number: int, share: float | None, bake_s: float, strategy: Any
    ) -> None:
        version, record = VERSIONS[number], self.records[number]
        if version.last_delta and max(self.stream(version.base), default=0) < version.last_delta:
            raise errors.RolloutError(f"version {number} has deltas that were not published yet")
        await fleet.put_version(record)
        await fleet.put_spec(MODEL, number, self._specs[number])
        options: dict[str, Any] = {"canary_share": share, "bake_s": bake_s, "bake_timeout_s": 20.0 if bake_s else None}
        options |= {"guards": GUARDS if share or bake_s else GuardLimits(min_requests=0), "strategy": strategy}
        rollout_id = secrets.token_hex(16)
        await start_rollout(fleet, MODEL, number, clock=self.server.now, rollout_id=rollout_id, **options)

    # What is asked.

    async def _client(self) -> None:
        random = Random(self.random.random())
        while True:
            await asyncio.sleep(self.scenario.pause_s * random.uniform(0.5, 1.5) / (2 if self._named else 1))
            named = random.choice(self._named) if self._named and random.random() < 0.7 else None
            self.loop.create_task(self._ask(random, named))

    async def _ask(self, random: Random, version: int | None) -> None:
        rows = EVERYTHING if version is None else HIGHEST
        items = ", ".join("[]" if row in KEYS else f"[{row}]" for row in rows)
        keys = ", ".join(f"[{row}]" if row in KEYS else "[]" for row in rows)
        named = "" if version is None else f', "version": {version}'
        self._numbers += 1
        key = f', "request_id": "{self._numbers}"'
        sparse = f'{{"item": [{items}], "key": [{keys}]}}'
        body = f'{{"candidates": {{"sparse": {sparse}}}, "return_missing": true{named}{key}}}'
        errs = random.random() < 0.1
        if errs:
            body = random.choice((body[:-1], body.replace("item", "user"), body.replace("[[", '[["x"], [')))
        began, was_steady = self.loop.now, self._steady_since()
        order = random.sample(sorted(self.processes), len(self.processes))
        servers = [name for name in order if name.startswith("serve")]
        retries = random.random() < 0.8
        failures: list[str] = []
        for name in servers * 3 if retries else servers[:1]:
            left = began + PATIENCE_S - self.loop.now
            if left <= 0:
                break
            try:
                async with asyncio.timeout(min(left, 1.2)):
                    work = partial(self._serve, name, body.encode(), version, errs)
                    answer = await self.network.call("client", name, work)
            except (TimeoutError, ConnectionError, ShardrankError) as error:
                if errs and isinstance(error, ShardrankError) and error.http_status < 500:
                    return
                failures.append(f"{name}: {type(error).__name__}: {error}")
                await asyncio.sleep(0.05)
                continue
            self._judge(name, answer, rows, version)
            if errs:
                self._broken = self._broken or ViolationError("bad request answered", body)
            return
        since = self._steady_since()
        # A version that is named has no fallback.
        if was_steady is not None and since is not None and began - since >= STEADY_S and retries and version is None:
            self._broken = self._broken or ViolationError("request fails", "; ".join(failures))

    def _answered(self, name: str, named: int | None, calm_since: float, answering: asyncio.Task[Any]) -> None:
        """Count what guards count, answers and what is the server's fault; in a calm nothing is."""
        error = asyncio.CancelledError() if answering.cancelled() else answering.exception()
        says = "" if error is None else f"{name}: {type(error).__name__}: {error}"
        if named is None:
            # Of an error it is not said which version's it was.
            for version in VERSIONS if says else (answering.result()["version"],):
                self.history.answers_of[version].append(self.loop.now)
            self._wrong[name] = says
        is_slow = any(event.kind == "slow" for event in self.scenario.events)
        is_late = is_slow and isinstance(error, errors.DeadlineExceededError | errors.OverloadedError)
        if says and not is_late and self._calm_since == calm_since >= 0:
            self._broken = self._broken or ViolationError("request fails in a calm", says)

    async def _serve(self, name: str, body: bytes, named: int | None, errs: bool) -> Any:
        process = self.processes[name]
        if not process.is_running:
            raise ConnectionRefusedError(f"{name} is gone")
        assert isinstance(process, ServingProcess)
        began, live = self.loop.now, process.service.live(MODEL)
        answering = process.start(process.ask(body))
        # Replica by replica the old version's rows go first, and are for a fallback until then.
        goes = self._current is not None and self._current.strategy == "by-replica"
        if not errs and (named is None or ((MODEL, named) in process.member.loaded() and not goes)):
            answering.add_done_callback(partial(self._answered, name, named, self._calm_since))
        while not answering.done():
            await asyncio.wait([answering], timeout=0.5)
            if not process.is_running:
                raise ConnectionResetError(f"{name} is gone")
        return answering.result(), began, live

    def _judge(self, name: str, answered: Any, rows: list[int], named: int | None) -> None:
        answer, began, live = answered
        version = answer["version"]
        try:
            if lost := self.history.judge(answer, rows, entries_of(self.stream(VERSIONS[version].base))):
                self._wrong[name] = lost
            if named is not None and version != named:
                raise ViolationError("another version than named", f"{version} answers, {named} was named")
            if named is None and version not in (known := self._may_answer(name, began, live)):
                raise ViolationError("undone version answers", f"{name} answers with {version}, not one of {known}")
        except ViolationError as violation:
            self._broken = self._broken or violation

    def _may_answer(self, name: str, began: float, live: int | None) -> set[int]:
        """Return which versions a process may answer a request of that time with: those it was told to a moment ago."""
        self._observe()
        known = [record for (of, _), (at, record) in self._known.items() if of == name and at >= began - KNOWN_S]
        allowed = {version for record in known for version in (record.live, record.fallback)}
        allowed |= {record.canary.version for record in known if record.canary is not None}
        # What was live stays so until the next one is loaded.
        loaded = {version for _, version in self.processes[name].member.loaded()}  # type: ignore[attr-defined]
        is_behind = any(record.live not in loaded for record in known)
        return {version for version in (*allowed, live if is_behind or not known else None) if version is not None}

    def _observe(self) -> None:
        """Note what serving processes know, and since when there is a way for requests."""
        for server in self.of(ServingProcess):
            record = server.member.agent.desired.get(MODEL)
            if record is not None:
                self._known[server.name, record.epoch] = self.loop.now, record
        # What is to go is announced to do so, and not asked any more, before it does.
        held = [(node.name, version) for node in self.of(ShardProcess) for version in node.kept_versions()]
        self._held_since = {key: self._held_since.get(key, self.loop.now) for key in held}
        if not any(map(self._has_way, self.of(ServingProcess))):
            self._way_since = None
        elif self._way_since is None:
            self._way_since = self.loop.now
        if self.loop.now < self._disturbed_until or self.network.loss or sum(self.network.slow_s.values()) > 0.45:
            self._calm_since = -1.0
        elif self._calm_since < 0 and all(map(self._has_way, self.of(ServingProcess))):
            self._calm_since = self.loop.now

    def _has_way(self, server: ServingProcess) -> bool:
        """Return whether a serving process reaches a node of each shard, with its live version or the fallback."""
        reached = [node for node in self.of(ShardProcess) if self.network.joins(server.name, node.name)]
        if not server.is_ready:
            return False
        desired, now = server.member.agent.desired.get(MODEL), self.loop.now
        for version in (server.service.live(MODEL), desired.fallback if desired is not None else None):
            held = {name for (name, of), since in self._held_since.items() if of == version and now - since >= KNOWN_S}
            if len({node.shard for node in reached if node.name in held}) == self.num_shards:
                return True
        return False

    def _steady_since(self) -> float | None:
        """Return since when there is a way; None if there is none, or faults are in it."""
        wanted, slow_s = self.wanted(), sum(self.network.slow_s.values())
        # To connect and ask is six messages, at two processes; those of a canary are connected anew more often.
        is_too_slow = slow_s > PATIENCE_S / (12 if wanted is None or wanted.canary is None else 13)
        # Without memory for one more version, one that has forked must go before it is there again.
        is_full = wanted is None or len(set(wanted.hold)) >= self.memory_versions
        may_go = is_full and any(event.kind == "failover" for event in self.scenario.events)
        if self._unhealed or self.network.loss or self._way_since is None or is_too_slow or may_go:
            return None
        return max(self._way_since, self._last_fault_s)

    async def _watch_all(self) -> None:
        while True:
            await asyncio.sleep(0.25)
            self._observe()
            self._check_broken()

    def _check_broken(self) -> None:
        if self._broken is not None:
            raise self._broken
        for context in self.loop.failures:
            error = context.get("exception")
            if error is not None and not isinstance(error, ShardrankError | OSError | ViolationError):
                raise ViolationError("unforeseen error", f"{context.get('message')}: {error!r}")

    async def main(self) -> None:
        """Run all of it. Raises ViolationError."""
        scenario = self.scenario
        await self._begin()
        for name in scenario.processes():
            self.start(name)
        clients = [self.loop.create_task(self._client()), self.loop.create_task(self._watch_all())]
        events = [self.loop.create_task(self._happen(event)) for event in scenario.events]
        try:
            await self._watch(clients, asyncio.gather(*events))
            self.network.loss = self.network.duplicates = 0.0
            await self._settle(clients)
            self.is_quiet = True
            await self._watch(clients, self._quiet())
            self._check_end()
        finally:
            for client in clients:
                client.cancel()

    async def _watch(self, clients: list[asyncio.Task[None]], work: Any) -> None:
        working = asyncio.ensure_future(work)
        await asyncio.wait([working, *clients], return_when=asyncio.FIRST_COMPLETED)
        for client in clients:
            if client.done():
                client.result()
        await working
        self._check_broken()

    async def _begin(self) -> None:
        fleet = FleetRegistry(self.open_registry())
        self.network.loss, loss = 0.0, self.network.loss
        for number in {1, *self.scenario.publishers}:
            await fleet.put_version(self.records[number])
            await fleet.put_spec(MODEL, number, self._specs[number])
        await fleet.join_fleet(FleetRecord(num_shards=self.num_shards, sharding="hash", replicate_bytes=0))
        shards = {1: self.num_shards}
        wanted = WantedModel(model=MODEL, epoch=1, live=1, hold=(1,), serve=(1,), follow=(1,), num_shards=shards)
        await fleet.put_wanted(wanted, None)
        if not self.scenario.files:
            await asyncio.sleep(2 * self.server.lag_s)
        self.network.loss = loss

    async def _settle(self, clients: list[asyncio.Task[None]]) -> None:
        until, lags, settled_s = self.loop.now + SETTLE_S, list[str](), 0
        # What a registry has lost is given back to it within seconds, a rollout too.
        while settled_s < RESTORED_S:
            if self.loop.now >= until:
                raise ViolationError("not settled", "; ".join(lags))
            await self._watch(clients, asyncio.sleep(1.0))
            settled_s = 0 if (lags := self.lags()) else settled_s + 1

    def lags(self) -> list[str]:
        """Return who is not as wanted yet."""
        wanted = self.wanted()
        if wanted is None:
            return ["nothing is wanted"]
        lags = []
        # A failover may have lost it, with its acknowledgement.
        record = self.truth.record(rollout_key(MODEL))
        if record is not None and (rollout := decode_rollout(MODEL, record)).active:
            lags.append(f"the rollout is {rollout.state} {rollout.step}")
        for node in self.of(ShardProcess):
            held = sorted(one.version for one in node.node.generations.all())
            if held != sorted(set(wanted.hold)):
                lags.append(f"{node.name} holds {held}, not {wanted.hold}")
            if any(one.payload.deltas.now.forked for one in node.node.generations.all()):
                lags.append(f"{node.name} has rows that forked")
        for server in self.of(ServingProcess):
            if not server.is_ready or server.service.live(MODEL) != wanted.live:
                lags.append(f"{server.name} answers with {server.service.live(MODEL)}, not {wanted.live}")
            if wrong := self._wrong.get(server.name):
                lags.append(f"{server.name}: {wrong}")
        return lags

    async def _quiet(self) -> None:
        while self.quiet_publishers < len(self.of(PublisherProcess)):  # noqa: ASYNC110  # of simulated time
            await asyncio.sleep(1.0)
        await asyncio.sleep(QUIET_S)

    def _check_end(self) -> None:
        wanted = self.wanted()
        assert wanted is not None
        if lags := self.lags():
            raise ViolationError("not settled", "; ".join(lags))
        if wanted.live is not None and VERSIONS[wanted.live].is_worse:
            raise ViolationError("worse version is live", f"version {wanted.live}")
        streams = {base: self.stream(base) for base in {version.base for version in VERSIONS.values()}}
        self.history.check_promises(streams, may_be_lost=not (self.scenario.min_replicas or self.scenario.files))
        for version in wanted.follow:
            base = VERSIONS[version].base
            writes, full = self.history.contents(version, entries_of(streams[base]))
            wrong = list[str]()
            for node in self.of(ShardProcess):
                self._check_rows(node, version, writes)
                (report,) = (one for one in node.actions.reports() if one.version == version)
                if (report.delta_refusal == "key_capacity") != (node.shard in full):
                    wrong.append(f"{node.name} has delta {report.delta_sequence}, {report.reason!r}")
            for trainer in self.of(PublisherProcess) if version == wanted.live else ():
                if trainer.is_refused not in (None, bool(full) and VERSIONS[trainer.version].base == base):
                    wrong.append(f"{trainer.name} was told {trainer.is_refused}")
            if wrong:
                raise ViolationError("keys beyond the capacity", f"version {version}, by shard {full}: {wrong}")

    def _check_rows(self, node: ShardProcess, version: int, writes: dict[int, list[tuple[int, int]]]) -> None:
        rows = node.rows(version)
        if rows is None:
            raise ViolationError("not settled", f"{node.name} has no version {version}")
        for row, value in rows.items():
            stamp = writes[row][-1][1]
            of_version = VERSIONS[version].base if stamp else version
            if value != (row_values(of_version, np.array([row]), stamp)[0, 0] if stamp >= 0 else 0.0):
                says = f"{node.name} has stamp {int(512 * value) & 255} in row {row} of version {version}, not {stamp}"
                raise ViolationError("replicas differ from the stream", says)

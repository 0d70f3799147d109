"""Training on simulated time: real servers, logs and clients of workers, which die, stall and are cut off.

Each push adds 1 and its step to two columns of its worker, in every row, so that what was applied can be read from any
row. Rules, after every pull and answer, and in the end:

| rule | broken if |
|---|---|
| acknowledged and lost | a row has fewer pushes of a worker than were answered |
| applied twice | it has more than the worker has begun, or, while nobody has left, other steps than 1 to its clock |
| ahead | a push is answered whose step is further ahead of the slowest of a server than the consistency allows |
| half a step | of `bsp`, while nobody has left, rows that a worker pulls lack a step before its own, or have its own |
| stuck | 100 s after the last fault a worker has not done all of its steps |
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from loader.snapshot.manifest import ModelSpec
from loader.snapshot.reader import Snapshot
from router.plan import Plan
from serving.training.parameter_servers import ParameterServers
from shard_node.engine.cpu import CpuEngine
from shard_node.engine.loading import load_tables
from shard_node.errors import PushRefusedError
from shard_node.node import ShardNode
from shard_node.training.row_optimizers import RowOptimizer
from shard_node.training.trainer import Trainer, TrainerConfig
from shard_node.wire.server import NodeServer
from shardrank_testing.snapshots import model_of, table_of, write_snapshot
from tests.simulation.history import ViolationError
from tests.simulation.loop import SimulatedLoop
from tests.simulation.network import Network
from tests.simulation.processes import Clocks, Process

ROWS, MAX_WORKERS, STEPS, NEVER_S = 24, 4, 30, 1e6
PORT = 1


@dataclass(frozen=True)
class Scenario:
    """What a seed draws. Times in seconds; `events` are when, what and to whom."""

    servers: int
    workers: int
    consistency: str
    timeout_s: float
    events: tuple[tuple[float, str, str], ...]


def draw(seed: int) -> Scenario:
    """Draw a scenario; one half has no worker that ever leaves."""
    random = Random(seed)
    servers, workers = random.randint(1, 3), random.randint(1, MAX_WORKERS)
    names = [f"server-{shard}" for shard in range(servers)] + [f"worker-{worker}" for worker in range(workers)]
    kinds = ("kill", "kill", "torn", "cut off", "stall")
    count = random.randint(0, 8)
    events = [(random.uniform(0.5, 20.0), random.choice(kinds), random.choice(names)) for _ in range(count)]
    consistency = random.choice(("bsp", "bsp", "ssp:1", "ssp:4", "asp"))
    return Scenario(servers, workers, consistency, random.choice((NEVER_S, 3.0)), tuple(sorted(events)))


class SimulatedTrainer(Trainer):
    """A trainer whose thread is the loop: batches are done at once, a drawn moment after a push."""

    loop: SimulatedLoop
    random: Random

    def _start(self) -> None:
        self._tick()

    def _tick(self) -> None:
        self._do_batch()
        self.loop.call_later(0.25, self._tick)

    def submit(self, *arguments: Any) -> None:
        super().submit(*arguments)
        self.loop.call_later(self.random.expovariate(200.0), self._do_batch)


@dataclass
class World:
    """Servers and workers of one scenario, and what has happened."""

    scenario: Scenario
    seed: int
    folder: Path
    snapshot: Snapshot
    loop: SimulatedLoop = field(default_factory=SimulatedLoop)
    trace: list[str] = field(default_factory=list)
    processes: dict[str, Process] = field(default_factory=dict)
    trainers: dict[str, SimulatedTrainer] = field(default_factory=dict)
    stalled_until: dict[str, float] = field(default_factory=dict)
    begun: dict[int, set[int]] = field(default_factory=dict)
    answered: dict[int, set[int]] = field(default_factory=dict)
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    finished: set[int] = field(default_factory=set)
    has_left: bool = False

    def __post_init__(self) -> None:
        self.random = Random(self.seed + 1)
        self.network = self.loop.network = Network(self.loop, self.random)
        self.begun = {worker: set() for worker in range(self.scenario.workers)}
        self.answered = {worker: set() for worker in range(self.scenario.workers)}
        self.plan = Plan.make(self.snapshot.spec, num_shards=self.scenario.servers, replicate_bytes=0)

    def note(self, text: str) -> None:
        self.trace.append(f"{self.loop.now:9.3f} {text}")

    async def main(self) -> None:
        for shard in range(self.scenario.servers):
            self.start_server(shard)
        for worker in range(self.scenario.workers):
            self.start_worker(worker)
        for when, what, name in self.scenario.events:
            await asyncio.sleep(max(0.0, when - self.loop.now))
            self.note(f"{what} {name}")
            self.happen(what, name)
        until = self.loop.now + 100.0
        while len(self.finished) < self.scenario.workers:
            if self.loop.now > until:
                clocks = {name: trainer.report() for name, trainer in self.trainers.items()}
                raise ViolationError("stuck", f"{sorted(self.finished)} are done, {clocks}")
            await asyncio.sleep(0.5)
            self.check_failures()
        self.check_failures()

    def check_failures(self) -> None:
        """Raise what a worker, or a callback, ended with."""
        for task in self.tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error if isinstance(error, ViolationError) else ViolationError("unforeseen error", repr(error))
        # What a task of theirs ends with they have seen.
        for failure in self.loop.failures:
            if not failure["message"].startswith("task "):
                raise ViolationError("unforeseen error", repr(failure))

    def happen(self, what: str, name: str) -> None:
        process, number = self.processes[name], int(name.rpartition("-")[2])
        if what in ("kill", "torn") and process.is_running:
            process.is_running = False
            self.network.closed(process)
            if trainer := self.trainers.get(name):
                trainer._log.close()
                if what == "torn":
                    numbers = [int(path.name[4:]) for path in (self.folder / name).glob("log-*") if path.suffix == ""]
                    with (self.folder / name / f"log-{max(numbers)}").open("ab") as file:
                        file.write(b"SRPL" + self.random.randbytes(self.random.randint(0, 40)))
            start = self.start_server if name in self.trainers else self.start_worker
            self.loop.call_later(self.random.uniform(0.2, 6.0), start, number)
        elif what == "cut off":
            ways = {way for other in self.processes if other != name for way in ((name, other), (other, name))}
            self.network.blocked |= ways
            self.loop.call_later(self.random.uniform(1.0, 8.0), self.network.blocked.difference_update, ways)
        elif what == "stall":
            self.stalled_until[name] = self.loop.now + self.random.uniform(1.0, 8.0)

    def start_server(self, shard: int) -> None:
        name = f"server-{shard}"
        process = self.processes[name] = Process(self.loop, name, Clocks(self.loop))
        process.run(self._begin_server, process, shard, name)

    def _begin_server(self, process: Process, shard: int, name: str) -> None:
        node = ShardNode(self.plan.identity(shard), None, process.clocks.wall, self.loop.begin_thread)
        tables = load_tables(self.snapshot, self.plan.partition(shard), self.plan.digest)
        node.generations.stage(self.snapshot.spec.model, 1, tables)
        node.generations.flip(self.snapshot.spec.model, 1)
        scenario = self.scenario
        config = TrainerConfig(
            folder=self.folder / name,
            workers=scenario.workers,
            consistency=scenario.consistency,
            optimizer=RowOptimizer(kind="sgd", lr=1.0),
            worker_timeout_s=scenario.timeout_s,
            # Some hundred pushes.
            checkpoint_bytes=1 << 17,
        )
        assert isinstance(tables.engine, CpuEngine)
        trainer: SimulatedTrainer = SimulatedTrainer.__new__(SimulatedTrainer)
        trainer.loop, trainer.random = self.loop, self.random
        of = {"model": self.snapshot.spec.model, "version": 1, "shard": shard}
        trainer.__init__(tables.engine, of, config, process.clocks.monotonic)  # type: ignore[misc]
        node.trainer = self.trainers[name] = trainer
        server = NodeServer(node, clock=process.clocks.monotonic)
        self.network.listening[name, PORT] = process, partial(server.make, "")

    def start_worker(self, worker: int) -> None:
        name = f"worker-{worker}"
        process = self.processes[name] = Process(self.loop, name, Clocks(self.loop))
        self.tasks.append(process.start(self._work(worker, name)))

    async def _work(self, worker: int, name: str) -> None:
        addresses = [f"server-{shard}:{PORT}" for shard in range(self.scenario.servers)]
        servers = ParameterServers(addresses, self.snapshot.spec, 1, worker, 0.0)
        ids, step = np.arange(ROWS), await servers.resume_step()
        gradients, first = np.zeros((ROWS, 2 * MAX_WORKERS), np.float32), step
        while step <= STEPS:
            # Of what is answered while it pulls, some may be there.
            answered = [len(steps) for steps in self.answered.values()]
            self.check(worker, step, -(await servers.pull({0: ids}))[0], answered, is_first=step == first)
            await asyncio.sleep(self.random.expovariate(5.0))
            await asyncio.sleep(max(0.0, self.stalled_until.get(name, 0.0) - self.loop.now))
            gradients[:, worker], gradients[:, MAX_WORKERS + worker] = 1, step
            self.begun[worker].add(step)
            try:
                await servers.push(step, {0: (ids, gradients)})
            except PushRefusedError as error:
                if error.kind != "push_step":
                    raise
                self.note(f"{name}: {error}")
                step = await servers.resume_step()
                continue
            self.answered[worker].add(step)
            self.note(f"{name} has done step {step}")
            for trainer in self.trainers.values():
                clocks = trainer._clocks
                if step - clocks.slowest > clocks.consistency.bound:
                    raise ViolationError("ahead", f"step {step} of {name}, the slowest is at {clocks.slowest}")
            step += 1
        self.finished.add(worker)

    def check(self, puller: int, step: int, rows: np.ndarray, answered: list[int], *, is_first: bool) -> None:
        """Compare pulled rows with what was begun and answered."""
        self.has_left = self.has_left or any(not all(trainer._clocks.is_active) for trainer in self.trainers.values())
        for worker in range(self.scenario.workers):
            counts, sums = rows[:, worker], rows[:, MAX_WORKERS + worker]
            begun = len(self.begun[worker])
            if counts.min() < answered[worker]:
                raise ViolationError("acknowledged and lost", f"worker {worker}: {counts}, {answered} were answered")
            if counts.max() > begun or (not self.has_left and not np.array_equal(sums, counts * (counts + 1) / 2)):
                raise ViolationError("applied twice", f"worker {worker}: {counts} of {begun}, steps come to {sums}")
            # One that died between two servers finds the step that it repeats on one of them.
            allowed = (step - 1, step) if is_first else (step - 1,)
            if self.scenario.consistency == "bsp" and not self.has_left and not np.isin(counts, allowed).all():
                raise ViolationError("half a step", f"worker {puller} at step {step}: of worker {worker} {counts}")


def spec() -> ModelSpec:
    """Return what is trained: one table, a pair of columns for each worker."""
    return model_of([table_of("items", ROWS, 2 * MAX_WORKERS, dtype="fp32")])


def run(seed: int, snapshot: Snapshot) -> World:
    """Run a seed. Raises ViolationError."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        world = World(draw(seed), seed, Path(folder), snapshot)
        try:
            world.loop.run(world.main())
        except ViolationError as error:
            error.args = (f"seed {seed}, {world.scenario}: {error}\n" + "\n".join(world.trace[-40:]),)
            raise
        finally:
            for trainer in world.trainers.values():
                trainer._log.close()
        return world


def run_many(first: int, count: int, folder: Path) -> None:
    """Run seeds, one after the other. Raises ViolationError for the first that breaks a rule."""
    tables = {"items": np.zeros((ROWS, 2 * MAX_WORKERS), np.float32)}
    snapshot = Snapshot.open(write_snapshot(folder, spec(), tables=tables)[0])
    logging.disable(logging.CRITICAL)
    try:
        for seed in range(first, first + count):
            run(seed, snapshot)
    finally:
        logging.disable(logging.NOTSET)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.training", description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        run_many(options.first, options.seeds, Path(made))
    sys.stdout.write(f"{options.seeds} seeds, all rules held\n")

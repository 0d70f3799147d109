"""The trainer of a drill: a process of a checkout that publishes rows, and may give way to one of another checkout."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping
from typing import Final

import numpy as np

from loader.registry.fleet import delta_stream
from loader.registry.registry import StreamEntry
from loader.snapshot.manifest import ModelSpec
from loadtest.drill.config import UpdatingDrillConfig
from loadtest.drill.fleet import OracleFleet
from loadtest.drill.oracle import QUESTIONS_EACH, make_questions, version_rows
from loadtest.errors import LoadError
from shard_node.bags import Int64Array

UPDATED_ROWS: Final = 64
CHANGED: Final = "users"
"""The table of which rows are changed that no question has; of the others rows are published as they are."""
PROGRAM: Final = """
import json, sys
from shardrank import DeltaPublisher

url, model, publishers = *sys.argv[1:], {}
for line in sys.stdin:
    version, table, rows, values = json.loads(line)
    try:
        if version not in publishers:
            publishers[version] = DeltaPublisher(url, model, version, retry_s=5.0)
        answer = publishers[version].publish(table, rows, values)
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    print(json.dumps(answer), flush=True)
"""


class Trainer:
    """Publishes rows of the live version through its last process, until it is told that it is over.

    `factors` has, by version, the rows of `CHANGED` that were changed, and how often those of the snapshot they are.
    """

    def __init__(self, fleet: OracleFleet, config: UpdatingDrillConfig, counts: Counter[str]) -> None:
        self._fleet, self._config, self._counts = fleet, config, counts
        self._processes: list[Process] = []
        self._lock = asyncio.Lock()
        self._rng, self._tables = np.random.default_rng(config.seed), itertools.cycle(fleet.spec.tables)
        self._acknowledged: defaultdict[int, set[int]] = defaultdict(set)
        self.free = free_rows(fleet.spec)
        self.factors: defaultdict[int, dict[int, float]] = defaultdict(dict)
        self.is_over = False

    async def start(self, environment: Mapping[str, str]) -> None:
        """Start a process, which publishes from now on."""
        command = sys.executable, "-c", PROGRAM, self._fleet.registry.registry.url, self._fleet.spec.model
        with (self._fleet.folder / f"trainer-{len(self._processes)}.log").open("wb") as log:
            variables = {**os.environ, **environment}
            process = await asyncio.create_subprocess_exec(*command, env=variables, stdin=PIPE, stdout=PIPE, stderr=log)
        self._processes.append(process)

    async def run(self) -> None:
        """Publish again and again."""
        while not self.is_over:
            await asyncio.sleep(1.0 / self._config.updates)
            await self.update()

    async def update(self, process: int = -1) -> None:
        """Publish rows of the next table through a process. Raises LoadError with the reason if that refuses."""
        async with self._lock:
            table, running, count = next(self._tables), self._processes[process], self._counts["updates"]
            live, factor = await self._fleet.live_version(), 1.0
            rows = self._rng.integers(0, table.num_embeddings, UPDATED_ROWS)
            if table.name == CHANGED:
                rows, factor = self.free[[count // 3 % self.free.size]], 2.0 + count
            values = factor * version_rows(table, live, rows)
            assert running.stdin is not None
            assert running.stdout is not None
            running.stdin.write(json.dumps([live, table.name, rows.tolist(), values.tolist()]).encode() + b"\n")
            answer = json.loads(await running.stdout.readline() or '"it has ended"')
            if isinstance(answer, str):
                raise LoadError(f"publishing rows of version {live}: {answer}")
            self._acknowledged[live].add(answer)
            self._counts["updates"] += 1
            if table.name == CHANGED:
                self.factors[live][int(rows[0])] = factor

    async def stream(self, version: int) -> list[StreamEntry]:
        """Return the deltas of a version."""
        stream, entries = delta_stream(self._fleet.spec.model, version), list[StreamEntry]()
        while more := await self._fleet.registry.registry.read(stream, entries[-1].sequence if entries else 0):
            entries += more
        return entries

    async def count_lost(self) -> int:
        """Return how many deltas that were acknowledged are in no stream."""
        kept = {version: {entry.sequence for entry in await self.stream(version)} for version in self._acknowledged}
        return sum(len(numbers - kept[version]) for version, numbers in self._acknowledged.items())

    async def close(self) -> None:
        """End its processes."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def free_rows(spec: ModelSpec) -> Int64Array:
    """Return some rows of `CHANGED` that no question has."""
    questions = itertools.chain.from_iterable(make_questions(spec, QUESTIONS_EACH).values())
    used = {row for question in questions for bag in question.bags.get("user", ()) for row in bag}
    return np.setdiff1d(np.arange(len(used) + UPDATED_ROWS), list(used))[:UPDATED_ROWS]


@contextlib.asynccontextmanager
async def running_trainer(
    fleet: OracleFleet, config: UpdatingDrillConfig, counts: Counter[str], environment: Mapping[str, str] | None = None
) -> AsyncIterator[tuple[Trainer, asyncio.Task[None]]]:
    """Have a trainer publish until the block ends, or it is over; yield it and its task."""
    trainer = Trainer(fleet, config, counts)
    try:
        await trainer.start(environment or {})
        running = fleet.load.tasks.create_task(trainer.run())
        yield trainer, running
        running.cancel()
    finally:
        await trainer.close()

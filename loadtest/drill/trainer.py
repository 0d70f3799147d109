"""The trainer of a drill: a process that publishes rows, and may be followed by one of another release."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import numpy as np

from loader.snapshot.tables import TableSpec
from loadtest.bench.deltas import BATCHES, PUBLISHES_PER_S
from loadtest.drill.config import UpdatingDrillConfig
from loadtest.drill.fleet import OracleFleet
from loadtest.drill.oracle import FREE_ROWS, ids_of, rows_in, version_rows
from loadtest.errors import LoadError

UPDATED_ROWS: Final = 64
DELETE_EVERY: Final = 5
PROGRAM: Final = """
import json, sys
from shardrank import DeltaPublisher

url, model, publishers = *sys.argv[1:], {}
for line in sys.stdin:
    version, operation, table, *changes = json.loads(line)
    try:
        if version not in publishers:
            publishers[version] = DeltaPublisher(url, model, version, retry_s=5.0)
        answer = getattr(publishers[version], operation)(table, *changes)
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    print(json.dumps(answer), flush=True)
"""


class Trainer:
    """Publishes through the last process that was started, until it `is_over`.

    Rows as they are, so that answers stay what they must be, and `changed` ones that no question has, by version,
    feature and id. One in `DELETE_EVERY` of those with keys is deleted instead. `acknowledged` has versions and numbers
    of deltas.
    """

    def __init__(self, fleet: OracleFleet, config: UpdatingDrillConfig, counts: Counter[str]) -> None:
        self._fleet, self._config, self._counts = fleet, config, counts
        self._rng, self._tables = np.random.default_rng(config.seed), itertools.cycle(fleet.spec.tables)
        self._lock = asyncio.Lock()
        self.processes: list[subprocess.Popen[str]] = []
        self.acknowledged = set[tuple[int, int]]()
        self.changed: dict[int, dict[str, dict[int, list[float]]]] = defaultdict(lambda: defaultdict(dict))
        self.is_over = False

    def start(self, environment: Mapping[str, str]) -> None:
        """Start a process, with this in its environment."""
        command = [sys.executable, "-c", PROGRAM, self._fleet.registry.registry.url, self._fleet.spec.model]
        pipe, variables = subprocess.PIPE, {**os.environ, **environment}
        self.processes.append(subprocess.Popen(command, env=variables, stdin=pipe, stdout=pipe, text=True))

    async def run(self) -> None:
        """Publish again and again."""
        while not self.is_over:
            await asyncio.sleep(1.0 / self._config.updates)
            await self.update(self.processes[-1])

    async def update(self, process: subprocess.Popen[str]) -> None:
        """Publish rows of the next table through a process. Raises LoadError with the reason if that refuses."""
        async with self._lock:
            live, table, count = await self._fleet.live_version(), next(self._tables), self._counts["updates"]
            rows = self._rng.integers(0, rows_in(table) - FREE_ROWS, UPDATED_ROWS)
            *ids, changed = ids_of(table, np.append(rows, rows_in(table) - 1 - count % FREE_ROWS)).tolist()
            # The changed one becomes as that of the count would be.
            values = version_rows(table, live, np.array([*ids, count])).tolist()
            request = ["upsert" if table.keys else "publish", table.name, [*ids, changed], values]
            if table.keys and count % DELETE_EVERY == 0:
                request, values = ["delete", table.name, [changed]], [[0.0] * table.embedding_dim]
            assert process.stdin is not None
            assert process.stdout is not None
            print(json.dumps([live, *request]), file=process.stdin, flush=True)
            answer = json.loads(await asyncio.to_thread(process.stdout.readline) or '"it has ended"')
            if isinstance(answer, str):
                raise LoadError(f"the publisher of version {live}: {answer}")
            self.acknowledged.add((live, answer))
            self.changed[live][table.feature_names[0]][changed] = values[-1]
            self._counts["updates"] += 1


def drawn_upserts(table: TableSpec, version: int, keys_per_s: int) -> list[list[tuple[Any, ...]]]:
    """Draw rows as a version has them, and new keys, one of ten, which are deleted a second later."""
    rng, num_rows = np.random.default_rng(1), rows_in(table)
    step = max(1, keys_per_s // PUBLISHES_PER_S)
    new = np.arange(num_rows, table.num_embeddings)[: BATCHES * max(1, step // 10)]
    coming = [ids_of(table, rows) for rows in np.array_split(new, BATCHES)]
    drawn = list[list[tuple[Any, ...]]]()
    for number, fresh in enumerate(coming):
        known = np.unique(rng.integers(0, num_rows, step - fresh.size))
        keys = np.concatenate([ids_of(table, known), fresh])
        upsert = ("upsert", table.name, keys, version_rows(table, version, keys))
        drawn.append([upsert, ("delete", table.name, coming[number - PUBLISHES_PER_S])])
    return drawn


@contextlib.asynccontextmanager
async def running_trainer(
    fleet: OracleFleet, config: UpdatingDrillConfig, counts: Counter[str], environment: Mapping[str, str]
) -> AsyncIterator[tuple[Trainer, asyncio.Task[None]]]:
    """Have a trainer publish until the block ends, or it is over. Yields it and its task."""
    trainer = Trainer(fleet, config, counts)
    trainer.start(environment)
    try:
        running = fleet.load.tasks.create_task(trainer.run())
        yield trainer, running
        running.cancel()
    finally:
        for process in trainer.processes:
            with process:
                process.kill()

"""Publishes the rows that a node has trained, every so many seconds, to a fleet that serves them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence

import numpy as np

from loader.deltas.blocking_publisher import DeltaPublisher
from loader.errors import ConfigError, DeltaLostError, ShardrankError
from loader.registry import open_registry
from loader.registry.fleet import FleetRegistry
from loader.snapshot.tables import TableSpec
from shard_node.bags import Float32Array, Int64Array
from shard_node.training.trainer import Trainer

logger = logging.getLogger(__name__)


class RowPublisher:
    """A thread that publishes what a trainer has changed since it did last, to the live version of a model.

    Rows that could not be published are tried again with the next ones, and all that was trained if the registry has
    lost some, or a version of another stream is live. Tables that the version has not are left out.

    Args:
        registry: of the fleet, as a URL or folder.
        trained: the tables that are trained; of those that the live version has as well it must have the same rows.
    """

    def __init__(
        self, trainer: Trainer, registry: str, model: str, trained: Sequence[TableSpec], every_s: float
    ) -> None:
        self._trainer, self._registry, self._model, self._every_s = trainer, registry, model, every_s
        self._trained = {table.name: table for table in trained}
        self._waiting: dict[str, tuple[Int64Array, Float32Array]] = {}
        self._publisher: DeltaPublisher | None = None
        self._delta_base = 0
        self._is_lost = False
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="row-publisher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publish what has changed, and end the thread. Before the trainer is closed. Idempotent."""
        self._is_closed.set()
        self._thread.join()

    def _run(self) -> None:
        is_last, reported = False, ""
        while not is_last:
            is_last = self._is_closed.wait(self._every_s)
            try:
                self._publish()
                reported = ""
            except (ShardrankError, OSError) as error:
                self._is_lost = self._is_lost or isinstance(error, DeltaLostError)
                if str(error) != reported or is_last:
                    again = "when training goes on" if is_last else "and tried again"
                    logger.warning("rows are not published yet, %s: %s", again, error)
                reported = str(error)
        if self._publisher is not None:
            self._publisher.close()

    def _publish(self) -> None:
        publisher = self._connected()
        changed, self._is_lost = self._trainer.pop_changed(everything=self._is_lost), False
        for name, (ids, rows) in changed.items():
            old_ids, old_rows = self._waiting.get(name, (ids[:0], rows[:0]))
            is_older = ~np.isin(old_ids, ids)
            self._waiting[name] = np.concatenate([old_ids[is_older], ids]), np.concatenate([old_rows[is_older], rows])
        tables = {table.name: table for table in publisher.spec.tables}
        for name, (ids, rows) in list(self._waiting.items()):
            if name in tables and ids.size:
                publish = publisher.publish if tables[name].keys is None else publisher.upsert
                logger.info("%d rows of %s: up to delta %d", ids.size, name, publish(name, ids, rows))
            del self._waiting[name]

    def _connected(self) -> DeltaPublisher:
        """Return a publisher of the live version's stream. Raises ConfigError for none, or one of other tables."""
        version, delta_base = asyncio.run(self._live())
        if self._publisher is not None and delta_base == self._delta_base:
            return self._publisher
        publisher = DeltaPublisher(self._registry, self._model, version)
        for table in publisher.spec.tables:
            trained = self._trained.get(table.name, table)
            if _shape(trained) != _shape(table):
                publisher.close()
                raise ConfigError(
                    f"table {table.name!r} of {self._model!r} version {version}: (keys, rows, columns) are "
                    f"{_shape(table)}, those that are trained have {_shape(trained)}"
                )
        if self._publisher is not None:
            self._publisher.close()
        self._is_lost = self._is_lost or self._delta_base != 0
        self._publisher, self._delta_base = publisher, delta_base
        return publisher

    async def _live(self) -> tuple[int, int]:
        fleet = FleetRegistry(open_registry(self._registry))
        try:
            live = await fleet.live_version(self._model)
            record = None if live is None else await fleet.version(self._model, live)
            if record is None:
                raise ConfigError(f"no version of {self._model!r} is live in {fleet.name}")
            return record.version, record.delta_base
        finally:
            await fleet.registry.close()


def _shape(table: TableSpec) -> tuple[str | None, int, int]:
    return table.keys, table.num_embeddings, table.embedding_dim

"""Publishes the rows that a node has trained, every so many seconds, to a fleet that serves them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import numpy as np

from loader.deltas.blocking_publisher import DeltaPublisher
from loader.errors import DeltaLostError, ShardrankError
from shard_node.bags import Float32Array, Int64Array
from shard_node.training.trainer import Trainer

logger = logging.getLogger(__name__)


class RowPublisher:
    """A thread that publishes what a trainer has changed since it did last, to the version of `connect`'s publisher.

    Rows that could not be published are tried again with the next ones, and all that was trained if the registry has
    lost some. Tables that the version has not are left out.
    """

    def __init__(
        self,
        trainer: Trainer,
        connect: Callable[[], DeltaPublisher],
        every_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trainer, self._connect, self._every_s, self._clock = trainer, connect, every_s, clock
        self._waiting: dict[str, tuple[Int64Array, Float32Array]] = {}
        self._publisher: DeltaPublisher | None = None
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
        changed, self._is_lost = self._trainer.pop_changed(everything=self._is_lost), False
        for name, (ids, rows) in changed.items():
            old_ids, old_rows = self._waiting.get(name, (ids[:0], rows[:0]))
            is_older = ~np.isin(old_ids, ids)
            self._waiting[name] = np.concatenate([old_ids[is_older], ids]), np.concatenate([old_rows[is_older], rows])
        publisher = self._publisher = self._publisher or self._connect()
        tables, started_at = {table.name: table for table in publisher.spec.tables}, self._clock()
        for name, (ids, rows) in list(self._waiting.items()):
            if name in tables and ids.size:
                publish = publisher.publish if tables[name].keys is None else publisher.upsert
                sequence = publish(name, ids, rows)
                logger.info("%d rows of %s: delta %d, %.3f s", ids.size, name, sequence, self._clock() - started_at)
            del self._waiting[name]

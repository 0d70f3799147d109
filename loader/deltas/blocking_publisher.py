"""Publish changed rows from a trainer's thread."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from anyio.from_thread import start_blocking_portal

from loader.access_counts import AccessCounts
from loader.deltas.publisher import AsyncDeltaPublisher
from loader.errors import DeltaError
from loader.registry import open_registry
from loader.registry.registry import Registry
from loader.snapshot.manifest import ModelSpec
from loader.stores.cache import StoreUrl

T = TypeVar("T")


class DeltaPublisher(AbstractContextManager["DeltaPublisher"]):
    """Publishes changed rows from a trainer; thread-safe. A context manager.

    It has a thread with an event loop and a connection to the registry. `registry` is a URL or folder, or a registry
    whose URL is opened again; arguments and errors are those of `AsyncDeltaPublisher`.
    """

    def __init__(
        self,
        registry: str | Path | Registry,
        model: str,
        base_version: int,
        store: str | Path | StoreUrl | None = None,
        **options: Any,
    ) -> None:
        self._closing, self._is_closed = ExitStack(), False
        self._portal = self._closing.enter_context(start_blocking_portal(name=f"deltas-{model}"))
        self._closing.callback(self._portal.call, self._portal.stop, True)
        try:
            own = open_registry(registry if isinstance(registry, str | Path) else registry.url)
            self._closing.callback(self._portal.call, own.close)
            self._publisher = AsyncDeltaPublisher(own, model, base_version, store, **options)
            self._portal.call(self._publisher.open)
        except BaseException:
            self.close()
            raise

    def publish(self, table: str, rows: Any, values: Any) -> int:
        """Publish as `AsyncDeltaPublisher.publish`. Raises DeltaError, outcome unknown, if it is closed meanwhile."""
        return self._call(f"rows of table {table!r}", partial(self._publisher.publish, table, rows, values))

    def upsert(self, table: str, keys: Any, values: Any) -> int:
        """Publish as `AsyncDeltaPublisher.upsert`. Raises as `publish`."""
        return self._call(f"keys of table {table!r}", partial(self._publisher.upsert, table, keys, values))

    def delete(self, table: str, keys: Any) -> int:
        """Publish as `AsyncDeltaPublisher.delete`. Raises as `publish`."""
        return self._call(f"keys of table {table!r}", partial(self._publisher.delete, table, keys))

    def publish_dense(self, step: int, tensors: Mapping[str, Any], **options: Any) -> int:
        """Publish as `AsyncDeltaPublisher.publish_dense`. Raises as `publish`."""
        return self._call(f"dense step {step}", partial(self._publisher.publish_dense, step, tensors, **options))

    @property
    def spec(self) -> ModelSpec:
        """What the version is made of."""
        return self._publisher.spec

    @property
    def pruned_updates(self) -> Mapping[str, AccessCounts]:
        """As of `AsyncDeltaPublisher`; also after it is closed."""
        return self._publisher.pruned_updates

    def write_pruned(self, path: str | Path) -> int:
        """Write a file as `AsyncDeltaPublisher.write_pruned` does; also after it is closed."""
        return self._publisher.write_pruned(path)

    @property
    def sequence(self) -> int:
        """The last delta of the stream that this publisher knows of."""
        return self._publisher.sequence

    def close(self) -> None:
        """End what other threads are publishing, the connection and the thread. Idempotent."""
        self._is_closed = True
        self._closing.close()

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _call(self, what: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            answer: T = self._portal.call(work)
        except (concurrent.futures.CancelledError, RuntimeError) as error:
            # The portal raises RuntimeError where it has ended.
            if not self._is_closed:
                raise
            if isinstance(error, RuntimeError):
                raise DeltaError("the publisher is closed") from None
            outcome = "they may be published or not"
            raise DeltaError(f"the publisher was closed while it published {what}; {outcome}") from None
        return answer

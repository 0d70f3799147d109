"""Generations and leases: which versions of a model are here, which one is live, and who still uses which.

A generation is staged beside the live one, becomes live by a flip, and stays, staged again, after the next flip: a
rollback is a flip back. Only `retire` ends it: from then on it drains, no new lease is given, and when the last one
ends its payload is freed in a thread of its own. Shard nodes have engines as payload, serving processes routers.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

import msgspec

from loader.errors import RolloutError
from loader.progress import BeginThread, begin_thread
from shard_node.errors import GenerationNotFoundError

logger = logging.getLogger(__name__)

# How long a writer of rows waits before it keeps new readers out.
DEFAULT_PATIENCE_S = 0.002

Payload = TypeVar("Payload")
GenerationState = Literal["staged", "live", "draining", "retired"]


@dataclass(eq=False)
class Generation(Generic[Payload]):
    """One servable version. Fields but `state` and `leases` never change; those two belong to `Generations`.

    `retired` is set when the payload has been freed, or freeing it has failed (which is logged).
    """

    model: str
    version: int
    payload: Payload
    state: GenerationState = "staged"
    leases: int = 0
    retired: threading.Event = field(default_factory=threading.Event)


class Lease(msgspec.Struct, Generic[Payload], eq=False):
    """The right to use one generation until released. A context manager; releasing it twice is an error."""

    generations: Generations[Payload]
    generation: Generation[Payload]
    is_released: bool = False

    @property
    def payload(self) -> Payload:
        """What the generation serves with."""
        return self.generation.payload

    @property
    def version(self) -> int:
        """The generation's version."""
        return self.generation.version

    def release(self) -> None:
        """Give the lease back. The last one of a draining generation lets it be retired."""
        generations, generation = self.generations, self.generation
        if self.is_released:
            raise RolloutError(f"a lease on {generation.model!r} {generation.version} was released twice")
        self.is_released = True
        with generations.lock:
            generation.leases -= 1
            if generation.state == "draining":
                generations.free_if_drained(generation)

    def __enter__(self) -> Lease[Payload]:
        return self

    def __exit__(self, *raised: object) -> None:
        self.release()


class Generations(Generic[Payload]):
    """All generations of a process. Thread-safe; taking and releasing a lease is a few instructions under `lock`.

    `free_payload` does so after the last lease, in a thread of its own, of low priority unless the work is in Python.
    """

    def __init__(
        self, free_payload: Callable[[Payload], None], begin: BeginThread = begin_thread, *, low_priority: bool = True
    ) -> None:
        self._free_payload, self._begin, self._low_priority = free_payload, begin, low_priority
        self.lock = threading.Lock()
        self._by_key: dict[tuple[str, int], Generation[Payload]] = {}
        self._live: dict[str, Generation[Payload]] = {}

    def stage(self, model: str, version: int, payload: Payload) -> Generation[Payload]:
        """Put a loaded version beside the live one. Raises RolloutError if it is here, or still drains."""
        generation = Generation(model, version, payload)
        with self.lock:
            if (before := self._by_key.get((model, version))) is not None:
                raise RolloutError(f"version {version} of model {model!r} is already here ({before.state})")
            self._by_key[model, version] = generation
        return generation

    def flip(self, model: str, version: int) -> None:
        """Make a staged version the live one; the one that was live is staged again.

        Raises GenerationNotFoundError if that version is not here, or drains; so do all that name a version.
        """
        with self.lock:
            generation = self._find(model, version)
            before = self._live.get(model)
            # States are read without the lock: the one that stays live is never seen as anything else.
            if before is not None and before is not generation:
                before.state = "staged"
            generation.state = "live"
            self._live[model] = generation

    def lease(self, model: str, version: int | None = None) -> Lease[Payload]:
        """Lease the live generation, or the given version, live or staged."""
        with self.lock:
            generation = self._live.get(model) if version is None else self._by_key.get((model, version))
            if generation is None or generation.state == "draining":
                raise self._not_found(model, version)
            generation.leases += 1
        return Lease(self, generation)

    def replace(self, model: str, version: int, payload: Payload) -> Generation[Payload]:
        """Have a version serve with another payload from now on: live or staged as before, under the same number.

        Returns what it was, which drains: its payload is freed with its last lease.
        """
        with self.lock:
            before = self._find(model, version)
            after = self._by_key[model, version] = Generation(model, version, payload, before.state)
            if before.state == "live":
                self._live[model] = after
            before.state = "draining"
            self.free_if_drained(before)
        return before

    def payload(self, model: str, version: int) -> Payload:
        """Return what a version serves with, without a lease: only for what outlasts its being freed."""
        with self.lock:
            return self._find(model, version).payload

    def retire(self, model: str, version: int) -> Generation[Payload]:
        """Withdraw a version: it is freed when its last lease ends; wait for its `retired` event."""
        with self.lock:
            generation = self._find(model, version)
            if self._live.get(model) is generation:
                del self._live[model]
            generation.state = "draining"
            self.free_if_drained(generation)
        return generation

    def retire_all(self) -> list[Generation[Payload]]:
        """Withdraws every version that is not withdrawn yet; returns all that are not freed yet."""
        with self.lock:
            generations = list(self._by_key.values())
            self._live.clear()
            for generation in generations:
                generation.state = "draining"
                self.free_if_drained(generation)
        return generations

    def live(self) -> list[Generation[Payload]]:
        """Return the live generation of every model that has one."""
        with self.lock:
            return list(self._live.values())

    def live_versions(self) -> dict[str, int]:
        """Return the live version of every model that has one, all as of one moment."""
        with self.lock:
            return {model: one.version for model, one in sorted(self._live.items())}

    def has(self, model: str, version: int) -> bool:
        """Whether a version is here and not freed: live, staged, or draining."""
        with self.lock:
            return (model, version) in self._by_key

    def all(self) -> list[Generation[Payload]]:
        """Return every generation that is here, by model and version."""
        with self.lock:
            return [self._by_key[key] for key in sorted(self._by_key)]

    def _find(self, model: str, version: int) -> Generation[Payload]:
        generation = self._by_key.get((model, version))
        if generation is None or generation.state == "draining":
            raise self._not_found(model, version)
        return generation

    def _not_found(self, model: str, version: int | None) -> GenerationNotFoundError:
        here = [f"{name} {number} ({one.state})" for (name, number), one in sorted(self._by_key.items())]
        wanted = f"model {model!r}" if version is None else f"version {version} of model {model!r}"
        return GenerationNotFoundError(f"{wanted} is not here; here: {', '.join(here) or 'nothing'}")

    def free_if_drained(self, generation: Generation[Payload]) -> None:
        """Retire a draining generation without leases, under `lock`, and free its payload in a thread of its own."""
        if generation.leases:
            return
        generation.state = "retired"
        if self._by_key.get((generation.model, generation.version)) is generation:
            del self._by_key[generation.model, generation.version]

        # Unmapping gigabytes takes long; whoever gave the last lease back must not wait for it.
        def free() -> None:
            try:
                self._free_payload(generation.payload)
            except Exception:
                logger.exception("freeing version %d of model %r failed", generation.version, generation.model)
            finally:
                generation.retired.set()

        self._begin(free, f"retire-{generation.model}-{generation.version}", low_priority=self._low_priority)


class RowLock:
    """Lets any number of threads pool, or one change rows, never both.

    The writer first waits for a moment in which nobody pools; only when none comes within `patience_s` are new readers
    kept out. Readers who wait are let in before the next writer, so neither side starves.

    Begin and end must be paired, by try and finally. A reader's pair takes less than a microsecond if none writes.
    """

    def __init__(self, patience_s: float = DEFAULT_PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._mutex = threading.Lock()
        self._may_read = threading.Condition(self._mutex)
        self._may_write = threading.Condition(self._mutex)
        self._writers = threading.Lock()
        self._readers = 0
        self._waiting_readers = 0
        self._closed = False
        self._writer_waits = False
        self._writes_ended = 0

    def begin_read(self) -> None:
        """Wait until no writer keeps readers out."""
        with self._mutex:
            if not self._closed:
                self._readers += 1
                return
            self._waiting_readers += 1
            before = self._writes_ended
            try:
                while self._writes_ended == before:
                    self._may_read.wait()
            except BaseException:  # KeyboardInterrupt: whoever gives up must not be waited for
                if self._writes_ended == before:
                    self._waiting_readers -= 1
                else:
                    self._leave()
                raise

    def end_read(self) -> None:
        """End what `begin_read` began."""
        with self._mutex:
            # As `_leave`, without a call: nearly all readers pass here.
            self._readers -= 1
            if self._writer_waits and not self._readers:
                self._closed = True
                self._may_write.notify()

    def begin_write(self) -> None:
        """Wait until nobody else writes and nobody reads; from then on nobody does either until `end_write`."""
        self._writers.acquire()
        try:
            with self._mutex:
                if self._readers:
                    self._writer_waits = True
                    try:
                        if not self._may_write.wait_for(lambda: not self._readers, self._patience_s):
                            self._closed = True
                            self._may_write.wait_for(lambda: not self._readers)
                    except BaseException:
                        self._open()
                        raise
                    finally:
                        self._writer_waits = False
                self._closed = True
        except BaseException:
            self._writers.release()
            raise

    def end_write(self) -> None:
        """End what `begin_write` began; readers who waited are in."""
        with self._mutex:
            self._open()
        self._writers.release()

    def _leave(self) -> None:
        self._readers -= 1
        if not self._readers and self._writer_waits:
            # Closed on the writer's behalf: until it wakes up, the moment would be over.
            self._closed = True
            self._may_write.notify()

    def _open(self) -> None:
        self._closed = False
        self._writes_ended += 1
        self._readers += self._waiting_readers
        self._waiting_readers = 0
        self._may_read.notify_all()

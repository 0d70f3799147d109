"""Generations and leases: which versions of a model are here, which one is live, and who still uses which.

A generation goes staged -> live -> draining -> retired. A lease keeps one generation's payload alive, so a request
sees one version from its first lookup to its last. The same type serves shard nodes (payload: an engine) and serving
processes (payload: a router with its ranking replicas).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Generic, Literal, TypeVar

from shard_node.errors import GenerationNotFoundError, GenerationStateError

Payload = TypeVar("Payload")
GenerationState = Literal["staged", "live", "draining", "retired"]


@dataclass(eq=False)
class Generation(Generic[Payload]):
    """One servable version. Fields but `state` and `leases` never change; those two belong to `Generations`."""

    model: str
    version: int
    payload: Payload
    state: GenerationState = "staged"
    leases: int = 0
    drained: threading.Event = field(default_factory=threading.Event)


class Lease(Generic[Payload]):
    """The right to use one generation until released. A context manager; releasing it twice is an error."""

    __slots__ = ("_generations", "_released", "generation")

    def __init__(self, generations: Generations[Payload], generation: Generation[Payload]) -> None:
        self._generations = generations
        self._released = False
        self.generation = generation

    @property
    def payload(self) -> Payload:
        """What the generation serves with."""
        return self.generation.payload

    @property
    def version(self) -> int:
        """The generation's version."""
        return self.generation.version

    def release(self) -> None:
        """Gives the lease back. The last one of a draining generation lets it be retired.

        Raises:
            GenerationStateError: if it was released before.
        """
        if self._released:
            raise GenerationStateError(f"a lease on {self.generation.model!r} {self.version} was released twice")
        self._released = True
        self._generations.release(self.generation)

    def __enter__(self) -> Lease[Payload]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Generations(Generic[Payload]):
    """All generations of a process. Thread-safe; taking and releasing a lease is a few instructions under one lock.

    Args:
        retire: frees a payload once its generation has drained. Called without the lock held, off the caller of
            `release` if the caller wants so: `retire` decides where the work is done.
    """

    def __init__(self, retire: Callable[[Payload], None]) -> None:
        self._retire = retire
        self._lock = threading.Lock()
        self._by_key: dict[tuple[str, int], Generation[Payload]] = {}
        self._live: dict[str, Generation[Payload]] = {}

    def stage(self, model: str, version: int, payload: Payload) -> Generation[Payload]:
        """Puts a loaded version beside the live one.

        Raises:
            GenerationStateError: if that version is already here.
        """
        generation = Generation(model, version, payload)
        with self._lock:
            if (model, version) in self._by_key:
                raise GenerationStateError(f"version {version} of model {model!r} is already here")
            self._by_key[model, version] = generation
        return generation

    def flip(self, model: str, version: int) -> None:
        """Makes a staged (or draining) version live; the one that was live begins to drain.

        Raises:
            GenerationNotFoundError: if that version is not here.
        """
        retired = None
        with self._lock:
            generation = self._find(model, version)
            before = self._live.get(model)
            if before is generation:
                return
            generation.state = "live"
            generation.drained.clear()
            self._live[model] = generation
            if before is not None:
                before.state = "draining"
                retired = self._take_if_drained(before)
        self._free(retired)

    def lease(self, model: str, version: int | None = None) -> Lease[Payload]:
        """A lease on the live generation, or on the given version in whatever state it is.

        Raises:
            GenerationNotFoundError: naming what is here instead.
        """
        with self._lock:
            if version is None:
                generation = self._live.get(model)
                if generation is None:
                    raise self._not_found(model, version)
            else:
                generation = self._find(model, version)
            generation.leases += 1
        return Lease(self, generation)

    def release(self, generation: Generation[Payload]) -> None:
        """Gives one lease back; called by `Lease.release`."""
        with self._lock:
            generation.leases -= 1
            retired = self._take_if_drained(generation)
        self._free(retired)

    def remove(self, model: str, version: int) -> Generation[Payload]:
        """Withdraws a version that is staged or live: no new lease is given; it is retired when the last one ends.

        Returns:
            The generation; its `drained` event is set when its payload may be freed.

        Raises:
            GenerationNotFoundError: if that version is not here.
        """
        with self._lock:
            generation = self._find(model, version)
            if self._live.get(model) is generation:
                del self._live[model]
            generation.state = "draining"
            retired = self._take_if_drained(generation)
        self._free(retired)
        return generation

    def models(self) -> list[str]:
        """Models that have a live version, sorted."""
        with self._lock:
            return sorted(self._live)

    def all(self) -> list[Generation[Payload]]:
        """Every generation that is here, by model and version."""
        with self._lock:
            return [self._by_key[key] for key in sorted(self._by_key)]

    def _find(self, model: str, version: int) -> Generation[Payload]:
        generation = self._by_key.get((model, version))
        if generation is None:
            raise self._not_found(model, version)
        return generation

    def _not_found(self, model: str, version: int | None) -> GenerationNotFoundError:
        here = [f"{name} {number} ({one.state})" for (name, number), one in sorted(self._by_key.items())]
        wanted = f"model {model!r}" if version is None else f"version {version} of model {model!r}"
        return GenerationNotFoundError(f"{wanted} is not here; here: {', '.join(here) or 'nothing'}")

    def _take_if_drained(self, generation: Generation[Payload]) -> Generation[Payload] | None:
        # Once taken out of the map no new lease can find it, so the payload can be freed outside the lock.
        if generation.state != "draining" or generation.leases:
            return None
        generation.state = "retired"
        del self._by_key[generation.model, generation.version]
        return generation

    def _free(self, generation: Generation[Payload] | None) -> None:
        if generation is not None:
            self._retire(generation.payload)
            generation.drained.set()

"""The versions that a serving process holds: which is live, which is the canary, and which one a request gets.

A canary gets the requests whose key's hash is below `share` of the hash's range. So a key always goes to the same
version while the share is unchanged, in every process and over restarts, and a share that grows keeps the keys that are
already in. Why so: docs/decisions/version-leases.md.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from math import isfinite
from typing import NamedTuple

import xxhash

from loader.errors import ConfigError
from loader.progress import BeginThread, begin_thread
from serving.errors import NotFoundError, not_ready
from serving.versions.loaded_version import LoadedVersion
from shard_node.errors import GenerationNotFoundError
from shard_node.generation import Generation, Generations, Lease

_RANGE = 1 << 64


class CanaryChoice(NamedTuple):
    """The canary of one model: its version, and its fraction of the requests that ask for none, 0 < share < 1."""

    version: int
    share: float

    def has_key(self, model: str, key: str) -> bool:
        """Return whether a request with this key goes to the canary."""
        return key_hash(model, key) < int(self.share * _RANGE)


def key_hash(model: str, key: str) -> int:
    """Hash model, a zero byte, and key, as UTF-8: two models' canaries are tried on different keys.

    It is XXH64 with seed 0: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md.
    """
    # A lone surrogate is refused when the request is parsed, which is after this.
    return xxhash.xxh64_intdigest(f"{model}\0{key}".encode("utf-8", "surrogatepass"))


class VersionChoice:
    """Generations of served models, with a live and a canary pointer for each model. Thread-safe.

    `expected_models` must be live; None until `expected` is set. `on_freed` is called with each version that was freed.
    """

    def __init__(
        self,
        expected_models: Sequence[str] | None,
        on_freed: Callable[[str, int], None],
        begin: BeginThread = begin_thread,
    ) -> None:
        self.generations: Generations[LoadedVersion] = Generations(self._free, begin, low_priority=False)
        self.begin_thread = begin
        self._on_freed = on_freed
        self.expected = None if expected_models is None else tuple(expected_models)
        self._lock = threading.Lock()
        # Replaced as a whole, so that a request reads it without the lock.
        self._canaries: dict[str, CanaryChoice] = {}
        self.fallbacks: dict[str, int | None] = {}  # as of `WantedModel.fallback`
        self._keyless = itertools.count()

    def install(self, served: LoadedVersion) -> None:
        """Make a loaded version the live one of its model, and retire the others when their requests have ended."""
        self.install_staged(served)
        self.flip(served.model, served.version)
        for other in self.generations.all():
            if other.model == served.model and other.version != served.version and other.state == "staged":
                self.retire(other.model, other.version)

    def install_staged(self, served: LoadedVersion) -> None:
        """Put a loaded version beside the live one. Raises RolloutError if it is here already."""
        self.generations.stage(served.model, served.version, served)

    def flip(self, model: str, version: int) -> None:
        """Make a version the live one, and not the canary. Raises GenerationNotFoundError if not here, or draining."""
        self.generations.flip(model, version)
        self._end_canary(model, version)

    def retire(self, model: str, version: int) -> Generation[LoadedVersion]:
        """Withdraw a version; its `retired` event is set after its last request. Raises GenerationNotFoundError."""
        self._end_canary(model, version)
        return self.generations.retire(model, version)

    def live(self, model: str) -> int | None:
        """Tell the version that answers requests; None if there is none."""
        return self.generations.live_versions().get(model)

    def set_canary(self, model: str, version: int | None, share: float = 0.0) -> None:
        """Send a fraction `share` of a model's requests to a version, or end the canary with None.

        Raises GenerationNotFoundError if the version is not here, or drains; ConfigError unless 0 < share < 1.
        """
        if version is None:
            self._end_canary(model, None)
            return
        if not (isfinite(share) and 0.0 < share < 1.0):
            raise ConfigError(f"share: {share} is not above 0 and below 1")
        choice = CanaryChoice(version, share)
        with self.generations.lease(model, version), self._lock:
            self._canaries = {**self._canaries, model: choice}

    def canary(self, model: str) -> CanaryChoice | None:
        """Tell the model's canary; None if there is none."""
        return self._canaries.get(model)

    def lease(
        self, model: str, version: int | None = None, key: Callable[[], str] | None = None
    ) -> Lease[LoadedVersion]:
        """Take a lease on the given version; without one, on the canary or, also without `key`, on the live one.

        `key` returns a request's key, or "", and is only called while there is a canary. Raises NotFoundError,
        naming what is served instead, or UnavailableError for a model that is expected but not loaded yet.
        """
        while key is not None and version is None and (choice := self._canaries.get(model)) is not None:
            # A request without a key is anybody's: numbering them gives the canary its share of them.
            if not choice.has_key(model, key() or str(next(self._keyless))):
                break
            try:
                return self.generations.lease(model, choice.version)
            except GenerationNotFoundError:
                # It was withdrawn since the pointer was read.
                self._end_canary(model, choice.version)
        try:
            return self.generations.lease(model, version)
        except GenerationNotFoundError as error:
            if version is None and model in (self.expected or ()):
                raise not_ready(f"model: {model!r} is not loaded yet") from error
            served = [f"{generation.model} {generation.version}" for generation in self.generations.all()]
            requested = repr(model[:128]) + ("" if version is None else f" version {version}")
            says = f"model: {requested} is not served here; served are {served}"
            raise NotFoundError(says, kind="model_not_found", field="model") from error

    def _free(self, served: LoadedVersion) -> None:
        try:
            served.close()
        finally:
            self._on_freed(served.model, served.version)

    def _end_canary(self, model: str, version: int | None) -> None:
        with self._lock:
            canary = self._canaries.get(model)
            if canary is not None and version in (None, canary.version):
                self._canaries = {name: canary for name, canary in self._canaries.items() if name != model}

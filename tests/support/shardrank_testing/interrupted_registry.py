"""A real registry behind a link that a test cuts: before a write, or after it, when the writer can't know any more."""

from __future__ import annotations

import asyncio
from typing import Any

from loader.errors import RegistryUnavailableError
from loader.registry.registry import Registry


class KilledError(BaseException):
    """The process that called ended here."""


class InterruptedRegistry:
    """Passes everything on to `registry`, and interrupts writes of keys as it is told.

    Attributes:
        kill_before, kill_after: of which write from now on (1 is the next) the caller is killed; 0 for none.
        unavailable: every call fails like that of a registry that does not answer.
        held: a write waits here until `go_on` is set, if `hold_next` was set.
    """

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.kill_before = 0
        self.kill_after = 0
        self.unavailable = False
        self.hold_next = ""
        self.held = asyncio.Event()
        self.go_on = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        if self.unavailable and name not in ("name", "url"):
            raise RegistryUnavailableError("the link is cut")
        return getattr(self.registry, name)

    async def put(self, key: str, value: bytes, expected_revision: int) -> int:
        if self.unavailable:
            raise RegistryUnavailableError("the link is cut")
        self.kill_before, before = max(self.kill_before - 1, 0), self.kill_before == 1
        self.kill_after, after = max(self.kill_after - 1, 0), self.kill_after == 1
        if before:
            raise KilledError
        if self.hold_next and key.startswith(self.hold_next):
            self.hold_next = ""
            self.held.set()
            await self.go_on.wait()
        revision = await self.registry.put(key, value, expected_revision)
        if after:
            raise KilledError
        return revision

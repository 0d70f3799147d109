"""A real registry behind a link that a test cuts: before a call, or after it, when the caller can't know any more."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from loader.errors import RegistryUnavailableError
from loader.registry.registry import Registry


class KilledError(BaseException):
    """The process that called ended here."""


class InterruptedRegistry:
    """Passes everything on to `registry`, and interrupts calls as it is told.

    Attributes:
        kill_before, kill_after: of which write of a key from now on (1 is the next) the caller is killed; 0 for none.
        calls_left: so many calls take place, then the registry is unavailable.
        answers_to_lose: of so many commits to streams from now on, every other one's answer is lost.
        held: a write waits here until `go_on` is set, if its key begins with `hold_next`.
    """

    def __init__(self, registry: Registry, *, calls_left: float = math.inf, answers_to_lose: int = 0) -> None:
        self.registry = registry
        self.kill_before = 0
        self.kill_after = 0
        self.calls_left = calls_left
        self.answers_to_lose = answers_to_lose
        self.hold_next = ""
        self.held = asyncio.Event()
        self.go_on = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.registry, name)
        return partial(self._call, found) if asyncio.iscoroutinefunction(found) else found

    async def _call(self, method: Callable[..., Awaitable[Any]], *arguments: Any, **named: Any) -> Any:
        if self.calls_left == 0:
            raise RegistryUnavailableError("the link is cut")
        self.calls_left -= 1
        return await method(*arguments, **named)

    async def commit(self, *arguments: Any, **named: Any) -> None:
        await self._call(self.registry.commit, *arguments, **named)
        self.answers_to_lose = max(self.answers_to_lose - 1, 0)
        if self.answers_to_lose % 2:
            raise RegistryUnavailableError("the answer was lost")

    async def put(self, key: str, value: bytes, expected_revision: int) -> int:
        self.kill_before, before = max(self.kill_before - 1, 0), self.kill_before == 1
        self.kill_after, after = max(self.kill_after - 1, 0), self.kill_after == 1
        if before:
            raise KilledError
        if self.hold_next and key.startswith(self.hold_next):
            self.hold_next = ""
            self.held.set()
            await self.go_on.wait()
        revision: int = await self._call(self.registry.put, key, value, expected_revision)
        if after:
            raise KilledError
        return revision

"""An event loop on a thread of its own, beside a test that blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

T = TypeVar("T")


@contextmanager
def in_background(context: AbstractAsyncContextManager[T]) -> Iterator[tuple[T, BlockingPortal]]:
    """Enter a context on another thread's loop until the block ends; the portal calls coroutine functions there."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(context) as entered:
        yield entered, portal

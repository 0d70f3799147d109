"""From `--registry` or `--store` to an open registry."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

if TYPE_CHECKING:
    from loader.registry.typed import FleetRegistry

Result = TypeVar("Result")


def registry_url(registry: str | None, store: Path | None) -> str:
    """The registry that was named, or the store's own.

    Raises:
        click.UsageError: neither was named.
    """
    if registry is not None:
        return registry
    if store is None:
        raise click.UsageError("Name the fleet: --registry URL, or --store FOLDER for the registry that lies in it.")
    from serving.fleet.local_fleet import STORE_REGISTRY

    return str(store.resolve() / STORE_REGISTRY)


@contextlib.asynccontextmanager
async def opened_registry(url: str) -> AsyncIterator[FleetRegistry]:
    """A registry that is closed when the block ends. Raises RegistryError."""
    from loader.registry.opening import open_registry
    from loader.registry.typed import FleetRegistry

    registry = open_registry(url)
    try:
        yield FleetRegistry(registry)
    finally:
        await registry.close()


def with_registry(url: str, work: Callable[[FleetRegistry], Awaitable[Result]]) -> Result:
    """Runs what talks to a registry, in an event loop of its own, until it is done. Raises RegistryError."""

    async def program() -> Result:
        async with opened_registry(url) as fleet:
            return await work(fleet)

    return asyncio.run(program())

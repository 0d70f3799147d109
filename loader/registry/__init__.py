"""The registry: what is wanted of a fleet, what is, and the streams of changed rows. A directory, or Redis."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from loader.errors import RegistryRecordError, cut
from loader.registry.directory import DirectoryRegistry
from loader.registry.registry import REDIS_SCHEMES, Registry, local_path, without_password


def registry_in(store: Path) -> str:
    """Return the folder in a store that is the registry of a fleet for which no other was named."""
    return str(store.resolve() / ".registry")


def open_registry(url: str | Path, clock: Callable[[], float] = time.time) -> Registry:
    """Open a registry by its URL. Nothing is connected to or written before it is first used.

    Args:
        url: a directory, as a path or `file:///path`; or
            `redis://[[USER]:PASSWORD@]HOST[:PORT][/DB]`, `rediss://…` (TLS) or `unix:///path/to/socket`, with the
            options `?fleet=NAME` (several fleets can share a Redis) and `password_file=FILE`; for TLS
            `ssl_ca_certs=FILE`, and `ssl_certfile=FILE` with `ssl_keyfile=FILE` to show a certificate. With Sentinel
            `redis+sentinel://[[USER]:PASSWORD@]HOST[:PORT][,HOST[:PORT]...]/MASTER[/DB]` or `rediss+sentinel://…`.
        clock: seconds since the epoch; of a directory. Redis has its own.

    Raises:
        RegistryRecordError: not such a URL.
    """
    if not str(url):
        raise RegistryRecordError("registry URL '': a path or a URL is needed")
    if (path := url if isinstance(url, Path) else local_path(url)) is not None:
        return DirectoryRegistry(path, clock=clock)
    url = str(url)
    if url.partition("://")[0] not in REDIS_SCHEMES:
        schemes = ", ".join(f"{scheme}://…" for scheme in REDIS_SCHEMES)
        raise RegistryRecordError(
            f"registry URL {cut(without_password(url))}: allowed are a path, file:///PATH, {schemes}"
        )
    # Only who uses it pays for its import.
    from loader.registry.redis_registry import RedisRegistry

    return RedisRegistry(url)

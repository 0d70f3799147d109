"""The registry: what is wanted of a fleet, what is, and the streams of changed rows. A directory, or Redis."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from loader.errors import RegistryRecordError, cut
from loader.registry.directory import DirectoryRegistry
from loader.registry.registry import REDIS_SCHEMES, Registry, without_password


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
    if isinstance(url, Path):
        return DirectoryRegistry(url, clock=clock)
    scheme, separator, _ = url.partition("://")
    if not separator:
        if not url:
            raise RegistryRecordError("registry URL '': a path or a URL is needed")
        return DirectoryRegistry(url, clock=clock)
    if scheme in REDIS_SCHEMES:
        # Only who uses it pays for its import.
        from loader.registry.redis_registry import RedisRegistry

        return RedisRegistry(url)
    parts = urlsplit(url)
    if scheme != "file" or parts.netloc not in ("", "localhost") or parts.query or parts.fragment or not parts.path:
        raise RegistryRecordError(
            f"registry URL {cut(without_password(url))}: allowed are a path, file:///PATH, "
            f"{', '.join(f'{one}://…' for one in REDIS_SCHEMES)}"
        )
    return DirectoryRegistry(unquote(parts.path), clock=clock)

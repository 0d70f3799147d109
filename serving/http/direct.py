"""The paths that are asked for most, and what answers them without the application.

An application framework's way to a handler goes through every route before it, and through layers and objects that rank
requests have no use for. So the connection itself knows these paths and runs their handlers (see
docs/decisions/rank-requests-pass-the-framework-by.md). The routes stay in the application, which documents them and
answers the same paths for whoever hosts it otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from serving.http.exchange import Handler

_SEGMENT = re.compile(r"\{(\w+)\}")
# What is escaped, or has a query, is left to the application. So is what is not ASCII.
_PLAIN = rb"[^/:?#%\x00-\x20\x7f-\xff]+"
_MAX_REMEMBERED_PATHS = 256
_MAX_PATH_BYTES = 1024


class DirectRoute(NamedTuple):
    """What answers a path.

    Attributes:
        handler: gets the request.
        path: the path itself.
        parameters: its parts by name.
        numbers_after: name of the header that says behind how many bytes of a body numbers lie; None if they never do.
    """

    handler: Handler
    path: str
    parameters: Mapping[str, str]
    numbers_after: bytes | None


class DirectRoutes:
    """Handlers of POST by path; a `{name}` in a path stands for one part of it.

    Args:
        handlers: by path.
        numbers_after: by path, where bodies have numbers: see `DirectRoute`.
    """

    def __init__(self, handlers: Mapping[str, Handler], numbers_after: Mapping[str, bytes] | None = None) -> None:
        after = numbers_after or {}
        self._routes = tuple((_pattern(path), handler, after.get(path)) for path, handler in handlers.items())
        # Clients ask for the same few paths; those of others push each other out.
        self._remembered = lru_cache(_MAX_REMEMBERED_PATHS)(self._find)

    def find(self, url: bytes) -> DirectRoute | None:
        """What answers a request line's URL; None if that is up to the application."""
        return self._remembered(url) if len(url) <= _MAX_PATH_BYTES else None

    def _find(self, url: bytes) -> DirectRoute | None:
        for pattern, handler, numbers_after in self._routes:
            if (match := pattern.fullmatch(url)) is not None:
                parameters = {name: value.decode("ascii") for name, value in match.groupdict().items()}
                return DirectRoute(handler, url.decode("ascii"), parameters, numbers_after)
        return None


def _pattern(path: str) -> re.Pattern[bytes]:
    parts = _SEGMENT.split(path)
    # Odd ones are the names.
    pattern = b"".join(
        b"(?P<%s>%s)" % (part.encode(), _PLAIN) if number % 2 else re.escape(part.encode())
        for number, part in enumerate(parts)
    )
    return re.compile(pattern)

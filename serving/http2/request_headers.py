"""Which headers make a request that is malformed (RFC 9113, sections 8.2 and 8.3)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from serving.http2.header_blocks import Header

_NEEDED = (b":method", b":scheme", b":path")
_PSEUDO_HEADERS = frozenset((*_NEEDED, b":authority"))
_OF_A_CONNECTION = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))
# Section 8.2.1: visible ASCII but upper case and the colon.
_NAME = re.compile(rb"[!-9;-@\[-~]+")


def malformation(headers: Iterable[Header]) -> str | None:
    """What is wrong with the headers of a request; None if nothing is.

    Proxies route by these headers too, so one that two readers could read differently is not to be served.
    """
    seen: dict[bytes, bytes] = {}
    has_others = False
    for name, value in headers:
        if name[:1] == b":":
            if name not in _PSEUDO_HEADERS or name in seen or has_others:
                return f"the header {_shown(name)} is unknown, there twice, or behind others"
            seen[name] = value
            continue
        has_others = True
        if _NAME.fullmatch(name) is None:
            return f"the name of the header {_shown(name)} has a character that is not allowed"
        if name in _OF_A_CONNECTION or (name == b"te" and value != b"trailers"):
            return f"the header {_shown(name)}: {_shown(value)} is none of HTTP/2"
    for name in _NEEDED:
        if not seen.get(name):
            return f"the header {_shown(name)} is missing or empty"
    return None


def _shown(text: bytes) -> str:
    return repr(text[:64].decode("latin-1"))

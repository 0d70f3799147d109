"""Requests whose head was met before pass the parser by.

A client's requests differ little in their heads: often in nothing but the body's length. The parser calls back for
each header of each of them. So what it found in a head is kept under the head's bytes, without the length's digits, and
found again by these. Nothing is kept but what a plain reading of the same bytes finds in them too, so both agree on
where a head ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from serving.http.direct import DirectRoute, DirectRoutes
from serving.http.direct_exchange import DirectExchange
from serving.http.protocol import BoundedHttpProtocol
from serving.limits import RequestLimits
from serving.observe.metrics import ServingMetrics

MAX_HEAD_BYTES = 1024
MAX_HEADS = 256
_METHOD = b"POST "
_END = b"\r\n\r\n"
_LENGTH = b"content-length"
_LENGTH_LINES = (b"\r\ncontent-length: ", b"\r\nContent-Length: ")
_LENGTH_DIGITS = 18
# With any of these there is more to a request than its head and so many bytes behind it.
_NOT_PLAIN = frozenset((b"transfer-encoding", b"expect", b"upgrade"))


class SplitHead(NamedTuple):
    """A head, looked at just enough to find it again.

    Attributes:
        key: its bytes without the body's length.
        length: what it says the body's length is: digits.
        body_at: where the body begins.
    """

    key: bytes
    length: bytes
    body_at: int


class KnownHead(NamedTuple):
    """What the parser has found in a head.

    Attributes:
        route: what answers its path.
        fields: header values by name in lower case.
    """

    route: DirectRoute
    fields: Mapping[bytes, bytes]


class KnownHeads:
    """Heads of one server's requests, in a bounded number. One that does not come again is not kept."""

    def __init__(self) -> None:
        self._known: dict[bytes, KnownHead] = {}
        self._seen_once: dict[bytes, None] = {}
        self.find = self._known.get

    def has_come_again(self, key: bytes) -> bool:
        """Whether a head that is not known was met before."""
        if key in self._seen_once:
            return True
        _forget_first(self._seen_once)
        self._seen_once[key] = None
        return False

    def add(self, key: bytes, known: KnownHead) -> None:
        """Keeps what was found."""
        self._seen_once.pop(key, None)
        _forget_first(self._known)
        self._known[key] = known


def _forget_first(kept: dict[bytes, KnownHead] | dict[bytes, None]) -> None:
    if len(kept) >= MAX_HEADS:
        del kept[next(iter(kept))]


def split_head(data: memoryview) -> SplitHead | None:
    """The head that data begin with; None if they begin with no whole one that could be known."""
    begin = bytes(data[:MAX_HEAD_BYTES])
    end = begin.find(_END)
    if end < 0 or not begin.startswith(_METHOD):
        return None
    for line in _LENGTH_LINES:
        at = begin.find(line, 0, end)
        if at >= 0:
            first = at + len(line)
            last = begin.find(b"\r\n", first)
            length = begin[first:last]
            if not length.isdigit() or len(length) > _LENGTH_DIGITS:
                return None
            return SplitHead(begin[:first] + begin[last:end], length, end + len(_END))
    return None


def is_plain(head: bytes, url: bytes, headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Whether a plain reading of a head, without the empty line behind it, finds what the parser has found."""
    first, *lines = head.split(b"\r\n")
    if first != b"%s%s HTTP/1.1" % (_METHOD, url) or len(lines) != len(headers):
        return False
    for line, (name, value) in zip(lines, headers, strict=True):
        read_name, _, read_value = line.partition(b":")
        if read_name.lower() != name or read_value.strip(b" \t") != value or b"\n" in line or b"\r" in line:
            return False
    names = [name for name, _ in headers]
    return names.count(_LENGTH) == 1 and _NOT_PLAIN.isdisjoint(names)


class KnownHeadsProtocol(BoundedHttpProtocol):
    """One HTTP connection. `known_heads` are those of its server."""

    known_heads: KnownHeads
    _passes_parser = False

    def data_received(self, data: memoryview) -> None:  # type: ignore[override]
        """Answers a request of a known head; leaves all else to the parser."""
        split = split_head(data) if self._is_between_requests() else None
        if split is None:
            super().data_received(data)
            return
        known = self.known_heads.find(split.key)
        if known is None:
            super().data_received(data)
            self._learn(split, data)
        elif not self._take(known, split, data):
            super().data_received(data)

    def end_long_body(self) -> None:
        """All of it has come; the parser has not seen its head either."""
        if self._passes_parser:
            self._passes_parser = False
            self.long_body = None
            self.on_message_complete()
        else:
            super().end_long_body()

    def _take(self, known: KnownHead, split: SplitHead, data: memoryview) -> bool:
        """Begins a request, unless more has come than that, or too little."""
        _, stated, body_at = split
        length, here = int(stated), len(data) - body_at
        if here > length:
            return False
        exchange = DirectExchange(
            known.route,
            {**known.fields, _LENGTH: stated},
            self.transport,
            self.flow,
            self._body_event,
            self.limits.max_body_bytes,
            keep_alive=not self.is_draining,
        )
        if here:
            exchange.take(bytes(data[body_at:]))
        if here < length:
            long_body = exchange.expect_rest()
            if long_body is None:
                return False
            self.long_body, self._passes_parser, self._in_head = long_body, True, False
            if not self._receive_timer.is_running:
                self._start_receive_timer()
        self._unset_keepalive_if_required()
        self.cycle = exchange
        self._start_answer(exchange)
        if here == length:
            self.on_message_complete()
        return True

    def _learn(self, split: SplitHead, data: memoryview) -> None:
        """Keeps what the parser has found in the head of the request that it has begun."""
        key, stated, body_at = split
        exchange = self.cycle
        if (
            not isinstance(exchange, DirectExchange)
            or not exchange.keep_alive
            or len(data) - body_at > int(stated)
            or self._has_begun
            or self.transport.is_closing()
            or not self.known_heads.has_come_again(key)
        ):
            return
        if is_plain(bytes(data[: body_at - len(_END)]), self.url, self.headers):
            self.known_heads.add(key, KnownHead(exchange.route, dict(reversed(self.headers))))


def bounded_protocol(limits: RequestLimits, metrics: ServingMetrics, routes: DirectRoutes) -> type[KnownHeadsProtocol]:
    """The class of a server's connections, with what they share."""
    attributes = {"limits": limits, "metrics": metrics, "routes": routes, "known_heads": KnownHeads()}
    return type("LimitedHttpProtocol", (KnownHeadsProtocol,), attributes)

"""What the HTTP connections of one listener share: who may connect, what they wait for, and what is told of them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from http import HTTPStatus
from itertools import islice
from typing import Any, Protocol

from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from loader.errors import ShardrankError
from serving.api.addresses import Addresses
from serving.errors import OverloadedError
from serving.formats.json_writer import RETRY_AFTER_S, encode, error_document
from serving.limits import RequestLimits
from serving.observe.metrics import ServingMetrics

logger = logging.getLogger(__name__)

READ_BYTES = 64 * 2**10
"""Read at once; as much may be held of requests that are sent ahead."""
LINGER_S = 1.0
"""How long the rest of a body that was refused is read and dropped, so that the client gets to see the refusal."""
_EVICTION_CHOICE = 64


class Connection(Protocol):
    """What a listener asks of a connection."""

    address: str
    has_begun: bool

    def begin_drain(self) -> None:
        """Make the answer that is owed the connection's last."""

    def is_between_requests(self) -> bool:
        """Say whether no request is here, not even in part."""

    def may_bring_request(self) -> bool:
        """Say whether a request may be on its way."""

    def was_reset(self) -> bool:
        """Say whether the peer has ended the connection for good, which nobody sees while nothing is read."""

    def end(self) -> None:
        """Close the connection, once all that was written is sent."""

    def end_late(self) -> None:
        """End a connection whose request was not complete in time."""

    def drop(self) -> None:
        """Close the connection now."""


class Gates:
    """What the connections of one listener share, and what they wait for.

    Args:
        config: of uvicorn, with the application.
        limits: times, sizes and numbers.
        metrics: count what is refused before it is a request.
        addresses: accounts of whoever connects.
        clock: monotonic seconds.
        is_tls: whether the connections are encrypted.

    Attributes:
        state: of uvicorn: the running requests, and headers that every answer has.
        is_draining: whether each answer is its connection's last.
        open: all connections.
        idle: connections between two requests, since when; the longest idle first, as in those that follow.
        receiving: connections whose first, or next, request is not complete.
        lingering: connections that have their answer and send the rest of a body all the same.
        unread: connections whose peer does not take its answer.
        closing: connections that are closed but for what is still to be written.
        ahead: connections that are not read from, because a request was sent ahead of an answer.
        read_buffer: what comes is read into it, for one connection after the other.
    """

    def __init__(
        self,
        config: Config,
        limits: RequestLimits,
        metrics: ServingMetrics,
        addresses: Addresses,
        clock: Callable[[], float],
        *,
        is_tls: bool = False,
    ) -> None:
        self.config = config
        self.limits = limits
        self.addresses = addresses
        self.clock = clock
        self.is_tls = is_tls
        self.state = ServerState()
        self.is_draining = False
        self.open: set[Connection] = set()
        self.idle: dict[Connection, float] = {}
        self.receiving: dict[Connection, float] = {}
        self.lingering: dict[Connection, float] = {}
        self.unread: dict[Connection, float] = {}
        self.closing: dict[Connection, float] = {}
        self.ahead: set[Connection] = set()
        self.read_buffer = memoryview(bytearray(READ_BYTES))
        self.all_closed = asyncio.Event()
        self.max_work_s = limits.max_idle_work_ms / 1000 or float("inf")
        self._metrics = metrics
        self._ended: Counter[str] = Counter()
        self._inner_logger = logging.Logger(f"{__name__}.uvicorn")
        self._inner_logger.parent = logger
        self._inner_logger.setLevel(logging.INFO)
        # The gate says so itself, and not once for each.
        self._inner_logger.addFilter(lambda record: not record.getMessage().startswith("Invalid HTTP request"))

    def refusal(self, address: str) -> OverloadedError | None:
        """Say why no connection from an address is taken now; None if one is. Makes room, if an idle one can go."""
        if (reason := self.addresses.admit(address)) is not None:
            self.note("penalty" if self.addresses.is_waiting(address) else "overloaded")
            return OverloadedError(reason)
        if len(self.open) - len(self.closing) < self.limits.max_connections:
            return None
        # Who holds most of them gives one back first.
        candidates = list(islice(self.idle, _EVICTION_CHOICE))
        candidates = candidates or [gate for gate in islice(self.receiving, _EVICTION_CHOICE) if not gate.has_begun]
        if candidates:
            max(candidates, key=lambda gate: self.addresses.connections(gate.address)).end()
            self.note("evicted")
            return None
        self.note("overloaded")
        return OverloadedError(
            f"max_connections = {self.limits.max_connections} connections are open, none of them idle"
        )

    def add(self, gate: Connection) -> None:
        """Count a connection in; `lose` counts it out."""
        self.open.add(gate)
        self.addresses.opened(gate.address)

    def lose(self, gate: Connection) -> None:
        """Count a connection out."""
        self.forget(gate)
        self.open.discard(gate)
        if not self.open:
            self.all_closed.set()
        self.addresses.closed(gate.address)

    def new_protocol(self, state: dict[str, Any]) -> HttpToolsProtocol:
        """Make what is behind a gate; `state` gets into the scope of every request."""
        protocol = HttpToolsProtocol(self.config, self.state, state)
        protocol.logger = self._inner_logger
        return protocol

    def note(self, kind: str) -> None:
        """Count what was refused, or ended. It is logged with others of its second."""
        self._ended[kind] += 1
        self._metrics.failed("http", "connection", kind)

    def tell(self) -> None:
        """Log what was noted since the last time, in one line."""
        if self._ended:
            counts = ", ".join(f"{kind}: {count}" for kind, count in self._ended.most_common())
            logger.warning("HTTP connections refused or ended: %s", counts)
            self._ended.clear()

    def sweep(self) -> None:
        """End what has waited for too long."""
        timeout_s = self.limits.receive_timeout_s
        for gate in self._expired(self.receiving, timeout_s):
            gate.end_late()
        for gate in self._expired(self.idle, self.limits.keep_alive_s):
            gate.end()
        for gate in self._expired(self.lingering, LINGER_S):
            gate.end()
        for gate in self._expired(self.unread, timeout_s):
            self.note("unread")
            gate.drop()
        for gate in self._expired(self.closing, timeout_s):
            gate.drop()
        for gate in [gate for gate in self.ahead if gate.was_reset()]:
            gate.drop()

    def forget(self, gate: Connection) -> None:
        """Take a connection out of all that wait."""
        for waiting in (self.idle, self.receiving, self.lingering, self.unread, self.closing):
            waiting.pop(gate, None)
        self.ahead.discard(gate)

    def _expired(self, waiting: dict[Connection, float], timeout_s: float) -> Iterator[Connection]:
        before = self.clock() - timeout_s
        late = []
        for gate, since in waiting.items():
            if since > before:
                break
            late.append(gate)
        for gate in late:
            waiting.pop(gate, None)
            yield gate


def refusal(error: ShardrankError, headers: list[tuple[bytes, bytes]]) -> bytes:
    """Write a connection's last answer: head and body."""
    body = encode(error_document(error))
    lines = [b"HTTP/1.1 %d %b" % (error.http_status, HTTPStatus(error.http_status).phrase.encode())]
    lines += [b"%b: %b" % header for header in headers]
    lines += [b"content-type: application/json", b"content-length: %d" % len(body), b"connection: close"]
    if error.http_status == HTTPStatus.SERVICE_UNAVAILABLE:
        lines.append(b"retry-after: %d" % RETRY_AFTER_S)
    return b"\r\n".join((*lines, b"", body))

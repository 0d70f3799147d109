"""Keeps one connection to a node: makes it when it is first needed, and brings it back by itself when it is lost."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable

from shard_node.errors import DeadlineExceededError, NodeUnavailableError
from shard_node.wire.address import Address
from shard_node.wire.client_connection import ClientConnection, Ended
from shard_node.wire.tls import SHUTDOWN_TIMEOUT_S, connection_failure

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.02
# More doublings than any backoff needs, few enough for a float.
MAX_DOUBLINGS = 32

Sleep = Callable[[float], Awaitable[None]]


class Connector:
    """One connection to one address.

    The first call for it starts connecting, and so does the loss of a connection: no request has to pay for finding
    out whether a node is back. Calls wait for the first attempt, bounded by their own time; once it has failed they
    fail at once, so that another replica can be asked, until a later attempt succeeds. Attempts that fail are
    20 ms apart, doubling up to `max_backoff_s`.

    Args:
        address: of the node.
        make: makes the protocol of a connection; is given what to call when the node wants no new requests, and when
            the connection is gone.
        connect_timeout_s: how long an attempt may take.
        max_backoff_s: longest pause between two attempts.
        sleep: waits for that many seconds.
        tls: spoken to a TCP address; None for plain text.

    Attributes:
        num_made: connections made so far.
    """

    def __init__(
        self,
        address: Address,
        make: Callable[[Callable[[ClientConnection], None], Ended], ClientConnection],
        connect_timeout_s: float,
        max_backoff_s: float,
        sleep: Sleep,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._address = address
        self._make = make
        self._connect_timeout_s = connect_timeout_s
        self._max_backoff_s = max_backoff_s
        self._sleep = sleep
        self._tls = tls
        self._connection: ClientConnection | None = None
        # Every connection that has not ended, those that are going away included.
        self._open: set[ClientConnection] = set()
        self._connecting: asyncio.Task[None] | None = None
        self._first_attempt: asyncio.Future[None] | None = None
        self._failures = 0
        self._failure = "not connected yet"
        self._failed_as = NodeUnavailableError
        self._is_closed = False
        self.num_made = 0

    @property
    def available(self) -> bool:
        """Whether there is a connection, or none was needed so far."""
        if self.usable() is not None:
            return True
        return not self._is_closed and self._connecting is None and self._connection is None and not self._failures

    def usable(self) -> ClientConnection | None:
        """The connection, if requests may be sent on it."""
        connection = self._connection
        return connection if connection is not None and connection.is_usable else None

    async def connect(self, timeout_s: float) -> ClientConnection:
        """Waits for the connection if it is being made for the first time since it last worked.

        Raises:
            NodeUnavailableError: if the attempt fails, or has failed before; a TlsHandshakeError if that is why.
            DeadlineExceededError: if it takes longer than `timeout_s`.
        """
        if not self._is_closed and self._connecting is None and self._connection is None:
            self._start()
        try:
            async with asyncio.timeout(timeout_s):
                while (undecided := self._undecided()) is not None:
                    await asyncio.wait({undecided})
        except TimeoutError:
            raise DeadlineExceededError(f"{self._address}: deadline passed while connecting") from None
        connection = self.usable()
        if connection is None:
            raise self._failed_as(f"{self._address}: not connected: {self._failure}")
        return connection

    async def close(self) -> None:
        """Cuts every connection and makes no new one. Idempotent."""
        self._is_closed = True
        self._fail("the client is closed")
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait({self._connecting})
            # Cancelled before it began, it had no chance to do this itself.
            self._connecting = None
            self._first_attempt_is_over()
        ended = [connection.closed for connection in self._open]
        for connection in tuple(self._open):
            connection.abort()
        if ended:
            await asyncio.wait(ended)

    def _undecided(self) -> asyncio.Future[None] | None:
        """What has to end before it is known whether there is a connection."""
        if self._connection is not None and not self._connection.is_usable:
            return self._connection.closed
        return self._first_attempt

    def _start(self, pause_s: float = 0.0) -> None:
        if self._is_closed or self._connecting is not None:
            return
        loop = asyncio.get_running_loop()
        if not self._failures:
            self._first_attempt = loop.create_future()
        self._connecting = loop.create_task(self._connect_until_done(pause_s))

    async def _connect_until_done(self, pause_s: float) -> None:
        try:
            while True:
                if pause_s:
                    await self._sleep(pause_s)
                connection = await self._attempt()
                if connection is not None and not connection.closed.done():
                    self._connection = connection
                    self.num_made += 1
                    return
                pause_s = self._next_pause_s()
                self._first_attempt_is_over()
        finally:
            self._connecting = None
            self._first_attempt_is_over()

    async def _attempt(self) -> ClientConnection | None:
        """One attempt; None and the reason in `_failure` if it fails."""
        loop = asyncio.get_running_loop()
        made: ClientConnection | None = None
        connection: ClientConnection | None = None

        def make() -> ClientConnection:
            nonlocal made
            made = self._make(self._going_away, self._ended)
            self._open.add(made)
            return made

        try:
            async with asyncio.timeout(self._connect_timeout_s):
                host, port = self._address.host, self._address.port
                if self._address.is_unix:
                    _, connection = await loop.create_unix_connection(make, self._address.path)
                elif self._tls is None:
                    _, connection = await loop.create_connection(make, host, port)
                else:
                    _, connection = await loop.create_connection(
                        make, host, port, ssl=self._tls, ssl_shutdown_timeout=SHUTDOWN_TIMEOUT_S
                    )
        except TimeoutError:
            self._fail(f"no connection within {self._connect_timeout_s} s")
        except OSError as error:
            kind, reason = connection_failure(error)
            self._fail(reason, kind)
        except Exception as error:
            # Not the network's doing, so not expected here: the log says where it came from.
            logger.exception("connecting to %s failed", self._address)
            self._fail(f"{type(error).__name__}: {error}")
        else:
            return connection
        finally:
            if made is not None and (connection is None or connection.closed.done()):
                self._drop(made)
        return None

    def _drop(self, made: ClientConnection) -> None:
        """Closes what an attempt left behind: it may have succeeded just when its time was over."""
        made.abort()
        if not made.was_made:
            self._open.discard(made)

    def _going_away(self, connection: ClientConnection) -> None:
        """The node drains: the connection lives until its answers are there, but takes no new requests."""
        if self._connection is connection:
            self._connection = None
            self._fail("the node is draining")
            self._failures = 0
            self._start(self._next_pause_s())

    def _fail(self, reason: str, kind: type[NodeUnavailableError] = NodeUnavailableError) -> None:
        """Keeps why there is no connection, for calls that want one."""
        self._failure, self._failed_as = reason, kind

    def _ended(self, connection: ClientConnection, kind: type[NodeUnavailableError], reason: str) -> None:
        self._open.discard(connection)
        # An attempt that goes on while one ends: it was made and lost before the attempt could say so.
        if not self._is_closed and (self._connection is connection or self._connecting is not None):
            self._fail(f"connection lost: {reason}", kind)
        if self._connection is not connection:
            return
        self._connection = None
        if connection.has_answered:
            # It worked until now: the first attempt to get it back need not wait.
            self._failures = 0
            self._start()
        else:
            self._start(self._next_pause_s())

    def _next_pause_s(self) -> float:
        pause_s = min(FIRST_BACKOFF_S * 2.0**self._failures, self._max_backoff_s)
        self._failures = min(self._failures + 1, MAX_DOUBLINGS)
        return pause_s

    def _first_attempt_is_over(self) -> None:
        if self._first_attempt is not None:
            self._first_attempt.set_result(None)
            self._first_attempt = None

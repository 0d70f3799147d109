"""The node server: one shard node behind TCP and Unix sockets."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from shard_node.errors import NodeOverloadedError
from shard_node.node import ShardNode
from shard_node.wire.address import Address
from shard_node.wire.listening import Listener, listen
from shard_node.wire.messages import encode_error
from shard_node.wire.request_handler import RequestHandler, ServerLimits
from shard_node.wire.server_connection import ServerConnection
from shard_node.wire.tls import ReloadingContext

__all__ = ["NodeServer", "ServerLimits"]

logger = logging.getLogger(__name__)


class NodeServer:
    """Serves a shard node over the wire protocol on the running event loop, asyncio's or uvloop's.

    Args:
        node: what pools. Stays open when the server closes: it belongs to whoever made it.
        limits: what peers may ask for.
        clock: monotonic seconds.
        tls: what TCP connections must speak; None for plain text. Unix sockets never speak it.
    """

    def __init__(
        self,
        node: ShardNode,
        limits: ServerLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        tls: ReloadingContext | None = None,
    ) -> None:
        self._limits = limits or ServerLimits()
        self._clock = clock
        self._tls = tls
        self._handler = RequestHandler(node, self._limits, clock)
        self._listeners: list[Listener] = []
        self._connections: set[ServerConnection] = set()
        self._is_draining = False
        self._all_ended = asyncio.Event()

    @property
    def addresses(self) -> tuple[Address, ...]:
        """What is bound, with real ports; a host name that has several addresses gives one each."""
        return tuple(address for listener in self._listeners for address in listener.addresses)

    @property
    def in_flight(self) -> int:
        """Requests waiting for a thread or being pooled."""
        return self._handler.in_flight

    @property
    def num_connections(self) -> int:
        """Open connections."""
        return len(self._connections)

    async def start(self, addresses: Sequence[Address]) -> None:
        """Listens on every address, or on none.

        Raises:
            AddressError: naming the address that can't be bound, and why.
        """
        try:
            for address in addresses:
                self._listeners.append(await listen(address, self._make_connection, tls=self._tls))
        except BaseException:
            self._stop_listening()
            raise

    async def drain(self, timeout_s: float) -> bool:
        """Stops accepting, asks every peer to go elsewhere, and waits until all have their answers and are gone.

        Requests that cross the wire with the GOAWAY frame are still answered.

        Returns:
            Whether all connections ended within the time; `close` ends the others.
        """
        self._is_draining = True
        self._stop_listening()
        for connection in tuple(self._connections):
            connection.go_away()
        if not self._connections:
            return True
        self._all_ended.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_ended.wait()
        except TimeoutError:
            logger.warning(
                "drain: %d connections and %d requests left after %.1f s",
                self.num_connections,
                self.in_flight,
                timeout_s,
            )
            return False
        return True

    async def close(self) -> None:
        """Stops at once: connections are cut, what is being pooled is waited for and dropped. Idempotent."""
        self._is_draining = True
        self._stop_listening()
        ended = [connection.closed for connection in self._connections]
        for connection in tuple(self._connections):
            connection.abort()
        await self._handler.close()
        if ended:
            await asyncio.wait(ended)

    def opened(self, connection: ServerConnection) -> None:
        """A connection was accepted (called by it)."""
        self._connections.add(connection)
        if len(self._connections) > self._limits.max_connections:
            error = NodeOverloadedError(f"at most {self._limits.max_connections} connections are taken")
            logger.warning("refusing the connection from %s: %s", connection.peer, error)
            connection.refuse(encode_error(0, error))
        elif self._is_draining:
            connection.go_away()

    def ended(self, connection: ServerConnection) -> None:
        """A connection is gone (called by it)."""
        self._connections.discard(connection)
        if not self._connections:
            self._all_ended.set()

    def _make_connection(self) -> ServerConnection:
        return ServerConnection(self, self._handler, self._limits, self._clock)

    def _stop_listening(self) -> None:
        for listener in self._listeners:
            listener.close()

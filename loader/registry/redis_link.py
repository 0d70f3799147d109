"""The connections to a Redis: bounded in number and time, made again when they break, and one kind of error."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from redis.asyncio import BlockingConnectionPool, Redis, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.connection import AbstractConnection, Connection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ReadOnlyError,
    RedisError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

from loader.errors import RegistryUnavailableError, cut
from loader.registry.redis_url import RedisUrl

SOCKET_TIMEOUT_S: Final = 2.0
"""How long a connection may take to be made, and a read from one to bring anything."""
CALL_TIMEOUT_S: Final = 5.0
"""How long a method may take in all."""
MAX_CONNECTIONS: Final = 16

_log = logging.getLogger(__name__)
_FINAL = (AuthenticationError, AuthorizationError, BusyLoadingError)


class _TlsConnection(SSLConnection):
    """Reads its certificates whenever it connects, so that renewed ones count; redis-py reads them once in its life."""

    async def connect(self) -> None:
        """As in redis-py."""
        if not self.is_connected:
            self.ssl_context.context = None
        await super().connect()  # type: ignore[no-untyped-call]


class RedisLink:
    """Runs scripts and commands. Belongs to the event loop that it is first used on."""

    def __init__(self, url: RedisUrl, socket_timeout_s: float, call_timeout_s: float, max_connections: int) -> None:
        """A link to the Redis that a URL names. Connects when it is first used."""
        self._url = url
        self._call_timeout_s = call_timeout_s
        kinds: dict[str, type[AbstractConnection]] = {"unix": UnixDomainSocketConnection, "rediss": _TlsConnection}
        pool = BlockingConnectionPool(
            connection_class=kinds.get(url.scheme, Connection),
            max_connections=max_connections,
            timeout=socket_timeout_s,
            socket_timeout=socket_timeout_s,
            socket_connect_timeout=socket_timeout_s,
            # What may be repeated is decided in `_send`.
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            **url.connection,
        )
        self._client: Any = Redis.from_pool(pool)
        self._scripts: dict[str, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inspected = False
        self._closed = False

    async def script(
        self, script: str, keys: Sequence[str], args: Sequence[str | bytes | int], *, repeatable: bool = True
    ) -> Any:
        """Runs a Lua script.

        Args:
            script: its text.
            keys: its KEYS.
            args: its ARGV.
            repeatable: whether it may be sent once more if the connection broke, when it may have run already.

        Raises:
            RegistryUnavailableError: Redis can't be reached, takes too long, or refuses.
        """
        if script not in self._scripts:
            self._scripts[script] = self._client.register_script(script)
        ready = self._scripts[script]
        return await self._run(lambda: ready(keys=keys, args=args), repeatable)

    async def command(self, *parts: str) -> Any:
        """Runs a command that only reads. Raises RegistryUnavailableError like `script`."""
        return await self._run(lambda: self._client.execute_command(*parts), True)

    async def close(self) -> None:
        """Ends all connections. Idempotent."""
        self._closed = True
        await self._client.aclose()

    async def _run(self, send: Callable[[], Awaitable[Any]], repeatable: bool) -> Any:
        if self._closed:
            raise RegistryUnavailableError(f"registry {self._url.name} is closed")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise RuntimeError(f"registry {self._url.name} belongs to another event loop: open one for each")
        task = asyncio.current_task()
        cancels = task.cancelling() if task is not None else 0
        try:
            return await self._answer(send, repeatable)
        finally:
            # The client writes through asyncio.wait_for, which up to Python 3.11 forgets that it was cancelled if what
            # it waits for is done by then. Whoever cancelled would wait for ever.
            if task is not None and task.cancelling() > cancels:
                raise asyncio.CancelledError

    async def _answer(self, send: Callable[[], Awaitable[Any]], repeatable: bool) -> Any:
        try:
            async with asyncio.timeout(self._call_timeout_s):
                answer = await self._send(send, repeatable)
                await self._inspect()
                return answer
        except TimeoutError as error:
            raise self._unavailable(f"no answer within {self._call_timeout_s:g} s") from error
        except ReadOnlyError as error:
            # It was the primary and is none any more. New connections find the new one.
            await self._client.connection_pool.disconnect(inuse_connections=False)
            raise self._unavailable(error) from error
        except (RedisError, OSError) as error:
            raise self._unavailable(error) from error

    async def _send(self, send: Callable[[], Awaitable[Any]], repeatable: bool) -> Any:
        try:
            return await send()
        except RedisConnectionError as error:
            if not repeatable or isinstance(error, _FINAL):
                raise
        # A connection that was open when Redis was restarted: a new one may work.
        return await send()

    async def _inspect(self) -> None:
        """Tells once, in the log, of settings with which Redis can lose what is kept in it."""
        if self._inspected:
            return
        self._inspected = True
        try:
            told = await self._client.info("persistence") | await self._client.info("memory")
        except RedisError as error:
            _log.info("registry %s: its settings can't be read: %s", self._url.name, cut(error))
            return
        if not told.get("aof_enabled"):
            _log.warning(
                "registry %s: appendonly is off: a restart of Redis loses rollouts and deltas; set appendonly to yes",
                self._url.name,
            )
        policy = told.get("maxmemory_policy", "noeviction")
        if told.get("maxmemory") and policy != "noeviction":
            _log.warning(
                "registry %s: maxmemory-policy is %s: Redis may drop deltas and plans; set it to noeviction",
                self._url.name,
                policy,
            )

    def _unavailable(self, reason: object) -> RegistryUnavailableError:
        return RegistryUnavailableError(f"registry {self._url.name}: {cut(reason) or type(reason).__name__}")

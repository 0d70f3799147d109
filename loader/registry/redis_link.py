"""Connect to a Redis by its URL: connections bounded in number and time, made again when they break, one kind of error.

Passwords stay out of messages and logs.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

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

from loader.errors import RegistryRecordError, RegistryUnavailableError, cut

REDIS_SCHEMES: Final = ("redis", "rediss", "unix")
DEFAULT_PORT: Final = 6379
_TLS_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
"""Options of `rediss://`, by the names of redis-py."""
_OPTIONS: Final = ("fleet", *_TLS_FILES, "password_file")
_FLEET = re.compile(r"[A-Za-z0-9_.\-]{1,64}\Z")


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """What a URL says.

    Attributes:
        name: the URL without its password.
        scheme: one of `REDIS_SCHEMES`.
        fleet: whose keys; they begin with `shardrank:<fleet>:`.
        connection: arguments of the client's connection, the password among them.
    """

    name: str
    scheme: str
    fleet: str
    connection: dict[str, Any] = field(repr=False)


def parse_redis_url(url: str) -> RedisUrl:
    """Reads a URL. Raises RegistryRecordError, without the password, if it is not one."""
    name = without_password(url)
    try:
        parts = urlsplit(url)
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        port = parts.port
    except ValueError:
        # Nothing of it is told: a password may stand where it does not belong.
        raise RegistryRecordError(
            f"registry URL {url.partition(':')[0]}://***: it can't be read as a URL; "
            "SCHEME://[[USER]:PASSWORD@]HOST[:PORT][/DB][?OPTION=VALUE&...] is one, special characters percent-encoded"
        ) from None
    options = dict(pairs)
    if len(options) != len(pairs) or (set(options) - set(_OPTIONS)) or parts.fragment:
        raise RegistryRecordError(
            f"registry URL {cut(name)}: allowed are the options {list(_OPTIONS)}, each once; found are "
            f"{[cut(key, 40) for key, _ in pairs]}"
        )
    fleet = options.get("fleet", "default")
    if _FLEET.match(fleet) is None:
        raise RegistryRecordError(
            f"registry URL {cut(name)}: fleet {cut(repr(fleet))}; allowed are 1 to 64 characters out of "
            "A-Z a-z 0-9 _ . -"
        )
    place = _unix_socket(name, parts) if parts.scheme == "unix" else _host(name, parts, port)
    return RedisUrl(name, parts.scheme, fleet, place | _credentials(name, parts, options) | _tls(name, parts, options))


def without_password(url: str) -> str:
    """Returns a URL for messages: what stands for a user and a password becomes `***`."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url
    # Up to the last @ before the first / would let a password with a raw / through: up to the last @ of all.
    _, at, place = rest.rpartition("@")
    return f"{scheme}://{'***@' if at else ''}{place}"


def _host(name: str, parts: SplitResult, port: int | None) -> dict[str, Any]:
    if not parts.hostname:
        raise RegistryRecordError(f"registry URL {cut(name)}: a host is needed")
    database = parts.path.removeprefix("/")
    if database and not re.fullmatch(r"[0-9]{1,5}", database):
        raise RegistryRecordError(f"registry URL {cut(name)}: database {cut(repr(database))}; allowed is a number")
    return {
        "host": parts.hostname,
        "port": DEFAULT_PORT if port is None else port,
        "db": int(database or 0),
    }


def _unix_socket(name: str, parts: SplitResult) -> dict[str, Any]:
    if parts.hostname or not parts.path:
        raise RegistryRecordError(f"registry URL {cut(name)}: unix:///PATH of a socket is needed")
    return {"path": unquote(parts.path)}


def _credentials(name: str, parts: SplitResult, options: dict[str, str]) -> dict[str, Any]:
    password = unquote(parts.password) if parts.password else None
    if (path := options.get("password_file")) is not None:
        if password is not None:
            raise RegistryRecordError(f"registry URL {cut(name)}: a password and a password_file; one is allowed")
        try:
            password = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise RegistryRecordError(f"registry URL {cut(name)}: password_file: {reason}") from None
        if not password:
            raise RegistryRecordError(f"registry URL {cut(name)}: password_file: it is empty")
    user = unquote(parts.username) if parts.username else None
    if user is not None and password is None:
        raise RegistryRecordError(
            f"registry URL {cut(name)}: a user without a password; redis://:PASSWORD@HOST gives a password alone"
        )
    return {key: value for key, value in (("username", user), ("password", password)) if value is not None}


def _tls(name: str, parts: SplitResult, options: dict[str, str]) -> dict[str, Any]:
    files = {option: options[option] for option in _TLS_FILES if option in options}
    if parts.scheme != "rediss":
        if files:
            raise RegistryRecordError(f"registry URL {cut(name)}: {', '.join(files)}: only for rediss://")
        return {}
    for option, path in files.items():
        if not Path(path).is_file():
            raise RegistryRecordError(f"registry URL {cut(name)}: {option} {cut(path)}: there is no such file")
    checks = {"ssl_cert_reqs": "required", "ssl_check_hostname": True}
    return checks | files | _client_certificate(name, files.get("ssl_certfile"), files.get("ssl_keyfile"))


def _client_certificate(name: str, cert: str | None, key: str | None) -> dict[str, Any]:
    if (cert is None) != (key is None):
        raise RegistryRecordError(f"registry URL {cut(name)}: ssl_certfile and ssl_keyfile belong together")
    if cert is None:
        return {}
    # Without a password OpenSSL would ask for one at the terminal.
    password = {"ssl_password": ""}
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(cert, key, password["ssl_password"])
    except OSError as error:
        reason = (error.reason if isinstance(error, ssl.SSLError) else error.strerror) or error
        raise RegistryRecordError(
            f"registry URL {cut(name)}: ssl_certfile {cut(cert)} with ssl_keyfile {cut(key)}: {reason}"
        ) from None
    return password


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
        """Connects, as in redis-py."""
        if not self.is_connected:
            self.ssl_context.context = None
        await super().connect()  # type: ignore[no-untyped-call]


class RedisLink:
    """Runs scripts and commands. Belongs to the event loop that it is first used on."""

    def __init__(self, url: RedisUrl, socket_timeout_s: float, call_timeout_s: float, max_connections: int) -> None:
        """Opens a link to the Redis that a URL names. Connects when it is first used."""
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
        """Runs a Lua script with these KEYS and ARGV.

        If it is `repeatable`, it is sent once more when the connection broke, when it may have run already.

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

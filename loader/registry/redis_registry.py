"""Keep a registry in Redis (6.2 or later), for fleets of more than one machine.

Each Lua script runs as one step, and touches a bounded number of entries. All names begin with `shardrank:<fleet>:`.

```
key:<key>           hash: value, revision, writer (of the last write)
keys                sorted set of all keys, by name
revision            the last revision that was given
announced:<key>     the value, with an expiry
announcements       sorted set of their keys; of expired ones too, until somebody reads
lock:<key>          the owner, with an expiry
stream:<name>       stream; entry `<sequence>-0`, field `payload`
ends:<name>         hash: first, last, writer (of the last append)
```

A writer's token makes it safe to send a write again when the first answer was lost. A stream's ends lie beside it since
XINFO, which knows them, also copies its first and last payload. Passwords stay out of messages and logs.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
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
from redis.exceptions import AuthenticationError, AuthorizationError, BusyLoadingError, ReadOnlyError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError

from loader.errors import (
    RegistryConflictError,
    RegistryRecordError,
    RegistryUnavailableError,
    StreamSequenceError,
    cut,
)
from loader.registry.registry import (
    Entry,
    StreamBounds,
    StreamEntry,
    check_key,
    check_owner,
    check_prefix,
    check_read,
    check_sequence,
    check_ttl,
    check_value,
    without_password,
)

_TLS_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
"""Options of `rediss://`, by the names of redis-py."""
_OPTIONS: Final = ("fleet", *_TLS_FILES, "password_file")
_MAX_CONNECTIONS: Final = 16
_log = logging.getLogger(__name__)
_FINAL = (AuthenticationError, AuthorizationError, BusyLoadingError)

# TIME makes a script's effects differ from run to run: before Redis 7 it has to be told that effects are replicated.
# Lua numbers are doubles: microseconds since the epoch fit until the year 2255. They are above all revisions that were
# ever given, also after Redis has lost its data or its last writes.
PUT: Final = """
if redis.replicate_commands then redis.replicate_commands() end
local there = redis.call('HMGET', KEYS[1], 'revision', 'writer')
local revision = there[1] or '0'
if there[2] and there[2] == ARGV[3] then return {1, revision} end
if revision ~= ARGV[2] then return {0, revision} end
local time = redis.call('TIME')
local given = math.max(tonumber(redis.call('GET', KEYS[3]) or '0'), tonumber(revision))
local following = string.format('%.0f', math.max(given + 1, time[1] * 1000000 + time[2]))
redis.call('SET', KEYS[3], following)
redis.call('HSET', KEYS[1], 'value', ARGV[1], 'revision', following, 'writer', ARGV[3])
redis.call('ZADD', KEYS[2], 0, ARGV[4])
return {1, following}
"""
DELETE: Final = """
local revision = redis.call('HGET', KEYS[1], 'revision') or '0'
if revision ~= ARGV[1] then return {0, revision} end
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[2])
return {1, revision}
"""
PAGE: Final = """
local names = redis.call('ZRANGEBYLEX', KEYS[1], ARGV[2], ARGV[3], 'LIMIT', 0, ARGV[4])
local found, bytes = {}, 0
for place, name in ipairs(names) do
    local value, revision
    if ARGV[6] == 'key' then
        local there = redis.call('HMGET', ARGV[1] .. name, 'value', 'revision')
        value, revision = there[1], there[2]
    else
        value = redis.call('GET', ARGV[1] .. name)
        if not value then redis.call('ZREM', KEYS[1], name) end
    end
    if value then
        bytes = bytes + #value
        found[#found + 1] = name
        found[#found + 1] = value
        found[#found + 1] = revision or ''
    end
    if bytes >= tonumber(ARGV[5]) and place < #names then return {name, found} end
end
if #names < tonumber(ARGV[4]) then return {'', found} end
return {names[#names], found}
"""
"""Entries or announcements, and the name to go on after; '' after the last one."""
ANNOUNCE: Final = """
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('ZADD', KEYS[2], 0, ARGV[3])
return 1
"""
WITHDRAW: Final = """
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[1])
return 1
"""
ACQUIRE: Final = """
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
RELEASE: Final = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 1
"""
APPEND: Final = """
local ends = redis.call('HMGET', KEYS[2], 'last', 'writer')
if ends[1] then
    if ends[1] == ARGV[1] and ends[2] == ARGV[3] then return {1, ends[1]} end
    if tonumber(ARGV[1]) ~= tonumber(ends[1]) + 1 then return {0, ends[1]} end
else
    redis.call('HSET', KEYS[2], 'first', ARGV[1])
end
redis.call('XADD', KEYS[1], ARGV[1] .. '-0', 'payload', ARGV[2])
redis.call('HSET', KEYS[2], 'last', ARGV[1], 'writer', ARGV[3])
return {1, ARGV[1]}
"""
READ: Final = """
local found, bytes, following = {}, 0, ARGV[1] .. '-0'
for _ = 1, tonumber(ARGV[2]) do
    local entry = redis.call('XRANGE', KEYS[1], following, '+', 'COUNT', 1)[1]
    if not entry then return found end
    local sequence, payload = string.match(entry[1], '^%d+'), entry[2][2]
    bytes = bytes + #payload
    if #found > 0 and bytes > tonumber(ARGV[3]) then return found end
    found[#found + 1] = sequence
    found[#found + 1] = payload
    following = string.format('%.0f', tonumber(sequence) + 1) .. '-0'
end
return found
"""
TRIM: Final = """
local ends = redis.call('HMGET', KEYS[2], 'first', 'last')
if not ends[2] then return 1 end
local first, last = tonumber(ends[1]), tonumber(ends[2])
local target = math.min(tonumber(ARGV[1]), last + 1)
if target <= first then return 1 end
local step = string.format('%.0f', math.min(target, first + tonumber(ARGV[2])))
redis.call('XTRIM', KEYS[1], 'MINID', '=', step .. '-0')
redis.call('HSET', KEYS[2], 'first', step)
if tonumber(step) < target then return 0 end
return 1
"""
"""Drops so many entries at most; 0 if there are more to drop."""
PAGE_ENTRIES: Final = 128
"""Entries that one script reads: Redis does nothing else meanwhile."""
PAGE_BYTES: Final = 4 << 20
TRIM_ENTRIES: Final = 1024


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """What a URL says: its text without the password, whose keys, and arguments of the client's connection."""

    name: str
    scheme: str
    fleet: str
    connection: dict[str, Any] = field(repr=False)


def parse_redis_url(url: str) -> RedisUrl:
    """Read a URL. Raises RegistryRecordError, without the password, if it is not one."""
    name = without_password(url)
    try:
        parts = urlsplit(url)
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        port = 6379 if parts.port is None else parts.port
    except ValueError:
        # Nothing of it is told: a password may stand where it does not belong.
        raise RegistryRecordError(
            f"registry URL {url.partition(':')[0]}://***: it can't be read as a URL; "
            "SCHEME://[[USER]:PASSWORD@]HOST[:PORT][/DB][?OPTION=VALUE&...] is one, special characters percent-encoded"
        ) from None
    options = dict(pairs)
    try:
        if len(options) != len(pairs) or (set(options) - set(_OPTIONS)) or parts.fragment:
            found = [cut(key, 40) for key, _ in pairs]
            raise ValueError(f"allowed are the options {list(_OPTIONS)}, each once; found are {found}")
        fleet = options.get("fleet", "default")
        if not re.fullmatch(r"[A-Za-z0-9_.\-]{1,64}", fleet):
            raise ValueError(f"fleet {cut(repr(fleet))}; allowed are 1 to 64 characters out of A-Z a-z 0-9 _ . -")
        return RedisUrl(
            name, parts.scheme, fleet, _place(parts, port) | _credentials(parts, options) | _tls(parts, options)
        )
    except ValueError as error:
        raise RegistryRecordError(f"registry URL {cut(name)}: {error}") from None


def _place(parts: SplitResult, port: int) -> dict[str, Any]:
    if parts.scheme == "unix":
        if parts.hostname or not parts.path:
            raise ValueError("unix:///PATH of a socket is needed")
        return {"path": unquote(parts.path)}
    if not parts.hostname:
        raise ValueError("a host is needed")
    database = parts.path.removeprefix("/")
    if database and not re.fullmatch(r"[0-9]{1,5}", database):
        raise ValueError(f"database {cut(repr(database))}; allowed is a number")
    return {"host": parts.hostname, "port": port, "db": int(database or 0)}


def _credentials(parts: SplitResult, options: dict[str, str]) -> dict[str, Any]:
    password = unquote(parts.password) if parts.password else None
    if (path := options.get("password_file")) is not None:
        if password is not None:
            raise ValueError("a password and a password_file; one is allowed")
        try:
            password = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ValueError(f"password_file: {reason}") from None
        if not password:
            raise ValueError("password_file: it is empty")
    user = unquote(parts.username) if parts.username else None
    if user is not None and password is None:
        raise ValueError("a user without a password; redis://:PASSWORD@HOST gives a password alone")
    return {key: value for key, value in (("username", user), ("password", password)) if value is not None}


def _tls(parts: SplitResult, options: dict[str, str]) -> dict[str, Any]:
    files: dict[str, Any] = {option: options[option] for option in _TLS_FILES if option in options}
    if parts.scheme != "rediss":
        if files:
            raise ValueError(f"{', '.join(files)}: only for rediss://")
        return {}
    for option, path in files.items():
        if not Path(path).is_file():
            raise ValueError(f"{option} {cut(path)}: there is no such file")
    cert, key = files.get("ssl_certfile"), files.get("ssl_keyfile")
    if (cert is None) != (key is None):
        raise ValueError("ssl_certfile and ssl_keyfile belong together")
    if cert is not None:
        # Without a password OpenSSL would ask for one at the terminal.
        files["ssl_password"] = ""
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(cert, key, "")
        except OSError as error:
            reason = (error.reason if isinstance(error, ssl.SSLError) else error.strerror) or error
            raise ValueError(f"ssl_certfile {cut(cert)} with ssl_keyfile {cut(key)}: {reason}") from None
    return {"ssl_cert_reqs": "required", "ssl_check_hostname": True} | files


class _TlsConnection(SSLConnection):
    """Reads its certificates whenever it connects, so that renewed ones count; redis-py reads them once in its life."""

    async def connect(self) -> None:
        if not self.is_connected:
            self.ssl_context.context = None
        await super().connect()  # type: ignore[no-untyped-call]


class RedisRegistry:
    """A `Registry` in Redis. Belongs to the event loop that it is first used on.

    Revisions and expiry go by the clock of Redis, so those of the machines need not agree.
    Its `url` has the password; `name` is what to tell people.
    """

    def __init__(
        self,
        url: str,
        *,
        socket_timeout_s: float = 2.0,
        call_timeout_s: float = 5.0,
    ) -> None:
        """Open a registry by its URL, and connect when it is first used. Raises RegistryRecordError.

        A connection may take `socket_timeout_s` to be made, as may a read from one to bring anything. A method that
        takes longer than `call_timeout_s` in all is a RegistryUnavailableError.
        """
        settings = parse_redis_url(url)
        self.url, self.name = url, settings.name
        self._prefix = f"shardrank:{settings.fleet}:"
        self._call_timeout_s = call_timeout_s
        kinds: dict[str, type[AbstractConnection]] = {"unix": UnixDomainSocketConnection, "rediss": _TlsConnection}
        pool = BlockingConnectionPool(
            connection_class=kinds.get(settings.scheme, Connection),
            max_connections=_MAX_CONNECTIONS,
            timeout=socket_timeout_s,
            socket_timeout=socket_timeout_s,
            socket_connect_timeout=socket_timeout_s,
            # What may be repeated is decided in `_send`.
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            **settings.connection,
        )
        self._client: Any = Redis.from_pool(pool)
        self._scripts: dict[str, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inspected = False
        self._closed = False

    async def get(self, key: str) -> Entry | None:
        """See `Registry.get`."""
        value, revision = await self._command("HMGET", self._at("key", check_key(key)), "value", "revision")
        return _entry(key, value, revision) if value is not None else None

    async def entries(self, prefix: str) -> dict[str, Entry]:
        """See `Registry.entries`. Key by key: not all are of the same moment."""
        found = await self._pages("keys", "key", check_prefix(prefix))
        return {name: _entry(name, value, revision) for name, value, revision in found}

    async def put(self, key: str, value: bytes, expected_revision: int) -> int:
        """See `Registry.put`."""
        check_value(check_key(key), value)
        keys = [self._at("key", key), self._at("keys"), self._at("revision")]
        arguments: list[str | bytes | int] = [value, str(expected_revision), secrets.token_hex(12), key]
        done, revision = await self._script(PUT, keys, arguments)
        if not done:
            raise RegistryConflictError(f"{key} has revision {int(revision)}, not {expected_revision}")
        return int(revision)

    async def delete(self, key: str, expected_revision: int) -> None:
        """See `Registry.delete`."""
        keys = [self._at("key", check_key(key)), self._at("keys")]
        # Not repeatable: the second time it would find nothing, and call that a conflict.
        done, revision = await self._script(DELETE, keys, [str(expected_revision), key], repeatable=False)
        if not done:
            raise RegistryConflictError(f"{key} has revision {int(revision)}, not {expected_revision}")

    async def announce(self, key: str, value: bytes, ttl_s: float) -> None:
        """See `Registry.announce`."""
        check_value(check_key(key), value)
        check_ttl(key, ttl_s)
        keys = [self._at("announced", key), self._at("announcements")]
        await self._script(ANNOUNCE, keys, [value, _milliseconds(ttl_s), key])

    async def withdraw(self, key: str) -> None:
        """See `Registry.withdraw`."""
        await self._script(WITHDRAW, [self._at("announced", check_key(key)), self._at("announcements")], [key])

    async def announced(self, prefix: str) -> dict[str, bytes]:
        """See `Registry.announced`."""
        return {name: value for name, value, _ in await self._pages("announcements", "announced", check_prefix(prefix))}

    async def acquire(self, key: str, owner: str, ttl_s: float) -> bool:
        """See `Registry.acquire`."""
        check_owner(check_key(key), owner)
        check_ttl(key, ttl_s)
        taken = await self._script(ACQUIRE, [self._at("lock", key)], [owner, _milliseconds(ttl_s)])
        return bool(taken)

    async def release(self, key: str, owner: str) -> None:
        """See `Registry.release`."""
        check_owner(check_key(key), owner)
        await self._script(RELEASE, [self._at("lock", key)], [owner])

    async def holder(self, key: str) -> str | None:
        """See `Registry.holder`."""
        owner = await self._command("GET", self._at("lock", check_key(key)))
        return owner.decode() if owner is not None else None

    async def append(self, stream: str, sequence: int, payload: bytes) -> None:
        """See `Registry.append`. As durable as `appendfsync` makes it."""
        check_value(check_key(stream, "stream"), payload)
        check_sequence(stream, sequence)
        keys = [self._at("stream", stream), self._at("ends", stream)]
        done, last = await self._script(APPEND, keys, [str(sequence), payload, secrets.token_hex(12)])
        if not done:
            raise StreamSequenceError(
                f"stream {stream}: sequence {sequence} after {int(last)}; {int(last) + 1} is next"
            )

    async def read(
        self, stream: str, after: int, max_entries: int = 256, max_bytes: int = 16 << 20
    ) -> list[StreamEntry]:
        """See `Registry.read`."""
        check_read(check_key(stream, "stream"), max_entries, max_bytes)
        flat = await self._script(READ, [self._at("stream", stream)], [str(max(after, 0) + 1), max_entries, max_bytes])
        return [StreamEntry(int(sequence), payload) for sequence, payload in zip(flat[::2], flat[1::2], strict=True)]

    async def bounds(self, stream: str) -> StreamBounds:
        """See `Registry.bounds`."""
        ends = self._at("ends", check_key(stream, "stream"))
        first, last = await self._command("HMGET", ends, "first", "last")
        return StreamBounds(int(first), int(last)) if last is not None else StreamBounds(0, 0)

    async def trim(self, stream: str, before: int) -> None:
        """See `Registry.trim`."""
        keys = [self._at("stream", check_key(stream, "stream")), self._at("ends", stream)]
        while not await self._script(TRIM, keys, [str(max(before, 0)), TRIM_ENTRIES]):
            pass

    async def close(self) -> None:
        """End its connections."""
        self._closed = True
        await self._client.aclose()

    async def _pages(self, index: str, values: str, prefix: str) -> list[tuple[str, bytes, bytes]]:
        start, end = (f"[{prefix}", f"[{prefix}\x7f") if prefix else ("-", "+")
        found: list[tuple[str, bytes, bytes]] = []
        while True:
            arguments: list[str | bytes | int] = [self._at(values, ""), start, end, PAGE_ENTRIES, PAGE_BYTES, values]
            last, flat = await self._script(PAGE, [self._at(index)], arguments)
            found += zip(map(bytes.decode, flat[::3]), flat[1::3], flat[2::3], strict=True)
            if not last:
                return found
            start = f"({last.decode()}"

    def _at(self, kind: str, name: str | None = None) -> str:
        return f"{self._prefix}{kind}" if name is None else f"{self._prefix}{kind}:{name}"

    async def _script(
        self, script: str, keys: Sequence[str], args: Sequence[str | bytes | int], *, repeatable: bool = True
    ) -> Any:
        """Run a Lua script with these KEYS and ARGV; if `repeatable`, once more when the connection broke.

        Raises RegistryUnavailableError if Redis can't be reached, takes too long, or refuses.
        """
        if script not in self._scripts:
            self._scripts[script] = self._client.register_script(script)
        ready = self._scripts[script]
        return await self._run(lambda: ready(keys=keys, args=args), repeatable)

    async def _command(self, *parts: str) -> Any:
        """Run a command that only reads. Raises as `_script`."""
        return await self._run(lambda: self._client.execute_command(*parts), True)

    async def _run(self, send: Callable[[], Awaitable[Any]], repeatable: bool) -> Any:
        if self._closed:
            raise RegistryUnavailableError(f"registry {self.name} is closed")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise RuntimeError(f"registry {self.name} belongs to another event loop: open one for each")
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
            _log.info("registry %s: its settings can't be read: %s", self.name, cut(error))
            return
        if not told.get("aof_enabled"):
            _log.warning(
                "registry %s: appendonly is off: a restart of Redis loses rollouts and deltas; set appendonly to yes",
                self.name,
            )
        policy = told.get("maxmemory_policy", "noeviction")
        if told.get("maxmemory") and policy != "noeviction":
            _log.warning(
                "registry %s: maxmemory-policy is %s: Redis may drop deltas and plans; set it to noeviction",
                self.name,
                policy,
            )

    def _unavailable(self, reason: object) -> RegistryUnavailableError:
        return RegistryUnavailableError(f"registry {self.name}: {cut(reason) or type(reason).__name__}")


def _entry(key: str, value: Any, revision: Any) -> Entry:
    if not revision or not revision.isdigit():
        raise RegistryRecordError(f"{key}: its revision is {revision!r}; a number is needed")
    return Entry(value, int(revision))


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))

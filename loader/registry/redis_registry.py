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
import math
import re
import secrets
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from redis.asyncio import BlockingConnectionPool, Redis, SSLConnection
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool, SentinelManagedConnection
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError, RedisError

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
_SENTINEL_OPTIONS: Final = ("sentinel_user", "sentinel_password_file")
_OPTIONS: Final = ("fleet", *_TLS_FILES, "password_file")
MAX_SENTINELS: Final = 16
_DATABASE: Final = r"/?(?P<database>[0-9]{0,5})"
_PATHS: Final = {
    "unix": (r"/.+", "unix:///PATH of a socket"),
    "sentinel": (rf"/(?P<master>[A-Za-z0-9_.\-]{{1,256}})(?:{_DATABASE})?", "a host and /MASTER[/DB] with a number DB"),
    **dict.fromkeys(("redis", "rediss"), (_DATABASE, "a host without a path or with a number /DB")),
}
"""By scheme, the pattern of a path, and how it is called."""


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """What a URL says.

    Attributes:
        name: its text without the password.
        fleet: whose keys.
        connection: redis-py's arguments of a connection; with sentinels it has no host.
        sentinels: host and port of each; () without.
        master: the name by which sentinels know it.
        sentinel_connection: redis-py's arguments of connections to sentinels.
    """

    name: str
    fleet: str
    connection: dict[str, Any] = field(repr=False)
    sentinels: tuple[tuple[str, int], ...] = ()
    master: str = ""
    sentinel_connection: dict[str, Any] = field(default_factory=dict, repr=False)


def parse_redis_url(url: str) -> RedisUrl:
    """Read a URL. Raises RegistryRecordError, without the password, if it is not one."""
    try:
        parts = urlsplit(url)
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        scheme, _, kind = parts.scheme.partition("+")
        login, at, hosts = parts.netloc.rpartition("@")
        sentinels = [parse_url(f"redis://{host}") for host in hosts.split(",") if kind]
        addresses = tuple((sentinel["host"], sentinel.get("port", 26379)) for sentinel in sentinels)
        connection: dict[str, Any] = {**parse_url(f"{scheme}://{login}{at}{'' if kind else hosts}")}
        if len(sentinels) > MAX_SENTINELS:
            raise ValueError("too many sentinels")
    except (ValueError, KeyError):
        # Nothing of it is told: a password may stand where it does not belong.
        raise RegistryRecordError(
            f"registry URL {url.partition(':')[0]}://***: it can't be read as a URL; "
            "SCHEME://[[USER]:PASSWORD@]HOST[:PORT][/DB][?OPTION=VALUE&...] is one, special characters "
            "percent-encoded; "
            f"redis+sentinel://[...@]HOST[:PORT][,HOST[:PORT]...]/MASTER[/DB] with at most {MAX_SENTINELS} hosts"
        ) from None
    name, options, allowed = without_password(url), dict(pairs), _OPTIONS + (_SENTINEL_OPTIONS if kind else ())
    pattern, form = _PATHS[kind or scheme]
    try:
        if len(options) != len(pairs) or (set(options) - set(allowed)) or parts.fragment:
            given = [cut(option, 40) for option, _ in pairs]
            raise ValueError(f"allowed are the options {list(allowed)}, each once; given are {given}")
        if not re.fullmatch(r"[A-Za-z0-9_.\-]{1,64}", fleet := options.get("fleet", "default")):
            raise ValueError(f"fleet {cut(repr(fleet))}; allowed are 1 to 64 characters out of A-Z a-z 0-9 _ . -")
        if (path := re.fullmatch(pattern, parts.path)) is None or bool(hosts) == (scheme == "unix"):
            raise ValueError(f"{form} is needed")
        connection |= {"path": unquote(parts.path)} if scheme == "unix" else {"db": int(path["database"] or 0)}
        tls = _tls_files(scheme, options)
        connection |= _login(connection.get("username"), connection.get("password"), "password_file", options) | tls
        sentinel_login = _login(options.get("sentinel_user"), None, "sentinel_password_file", options)
    except ValueError as error:
        raise RegistryRecordError(f"registry URL {cut(name)}: {error}") from None
    master = path["master"] if kind else ""
    return RedisUrl(name, fleet, connection, addresses, master, {**sentinel_login, **tls, "ssl": scheme == "rediss"})


def _login(user: str | None, password: str | None, option: str, options: dict[str, str]) -> dict[str, Any]:
    """Return the user and the password, which may be in the file that an option names."""
    if option in options:
        if password is not None:
            raise ValueError(f"a password and a {option}; one is allowed")
        try:
            password = Path(options[option]).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{option}: {error.strerror if isinstance(error, OSError) else 'not UTF-8'}") from None
        if not password:
            raise ValueError(f"{option}: it is empty")
    if user and not password:
        raise ValueError(f"a user without a password or {option}; redis://:PASSWORD@HOST is a password alone")
    return {key: value for key, value in (("username", user), ("password", password)) if value}


def _tls_files(scheme: str, options: dict[str, str]) -> dict[str, Any]:
    """Return redis-py's arguments for the files of TLS, which can be read and fit together."""
    files: dict[str, Any] = {option: options[option] for option in _TLS_FILES if option in options}
    if files and scheme != "rediss":
        raise ValueError(f"{', '.join(files)}: only for rediss://")
    if ("ssl_certfile" in files) != ("ssl_keyfile" in files):
        raise ValueError("ssl_certfile and ssl_keyfile belong together")
    try:
        context = ssl.create_default_context(cafile=files.get("ssl_ca_certs"))
        if "ssl_certfile" in files:
            # Without a password OpenSSL would ask for one at the terminal.
            files["ssl_password"] = ""
            context.load_cert_chain(files["ssl_certfile"], files["ssl_keyfile"], "")
    except OSError as error:
        reason = (error.reason if isinstance(error, ssl.SSLError) else error.strerror) or error
        names = ", ".join(f"{option} {cut(path)}" for option, path in files.items() if path)
        raise ValueError(f"{names}: {reason}") from None
    return files


_MAX_CONNECTIONS: Final = 16
MASTER_CHECK_S: Final = 1.0
_log = logging.getLogger(__name__)

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


class _TlsConnection(SSLConnection):
    """Reads its certificates whenever it connects, so that renewed ones count; redis-py reads them once in its life."""

    async def _connect(self) -> None:
        self.ssl_context.context = None
        await super()._connect()  # type: ignore[no-untyped-call]


class _MasterConnection(SentinelManagedConnection):
    """Connects to whom the sentinels call the master, if it says so too: what is read from a replica may be old."""

    async def connect_to(self, address: tuple[str, int]) -> None:
        await super().connect_to(address)  # type: ignore[no-untyped-call]
        try:
            await self.send_command("ROLE")
            if (role := (await self.read_response())[0]) != b"master":
                raise RedisConnectionError(f"{self.host}:{self.port} is a {role.decode()}, and was called the master")
        except RedisError:
            await self.disconnect()
            raise


class _MasterTlsConnection(_MasterConnection, _TlsConnection):
    """The same, over TLS."""


class _MasterPool(BlockingConnectionPool, SentinelConnectionPool):
    """Waits for a connection if all are in use, which redis-py's pool of a master does not."""


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
        # What is repeated is decided in `_run`.
        options: dict[str, Any] = {"retry": Retry(NoBackoff(), 0), "protocol": 2}
        timeouts = ("socket_timeout", "socket_connect_timeout")
        options |= settings.connection | dict.fromkeys(timeouts, socket_timeout_s)
        has_tls = options.get("connection_class") is SSLConnection
        if has_tls:
            options["connection_class"] = _TlsConnection
        options |= {"max_connections": _MAX_CONNECTIONS, "timeout": socket_timeout_s}
        self._sentinel: Any = None
        if settings.sentinels:
            # redis-py asks one after the other: all of them together may take as long as one read from Redis.
            of_sentinel = dict.fromkeys(timeouts, socket_timeout_s / len(settings.sentinels))
            options["connection_class"] = _MasterTlsConnection if has_tls else _MasterConnection
            sentinel: Any = Sentinel  # it has no types
            self._sentinel = sentinel(settings.sentinels, sentinel_kwargs=settings.sentinel_connection | of_sentinel)
            options |= {"service_name": settings.master, "sentinel_manager": self._sentinel}
            for client in self._sentinel.sentinels if has_tls else ():
                client.connection_pool.connection_class = _TlsConnection
        pool_class = _MasterPool if settings.sentinels else BlockingConnectionPool
        self._client: Any = Redis.from_pool(pool_class(**options))
        self._checked_at = -math.inf
        self._inspected = False
        self._maxmemory = 0
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
        at, index, expiry_ms = self._at("announced", key), self._at("announcements"), _milliseconds(ttl_s)
        # A pipeline is empty once it was executed: there is one for each try.
        pipeline = self._client.pipeline
        await self._run(lambda: pipeline().set(at, value, px=expiry_ms).zadd(index, {key: 0}).execute())

    async def withdraw(self, key: str) -> None:
        """See `Registry.withdraw`."""
        at, index, pipeline = self._at("announced", check_key(key)), self._at("announcements"), self._client.pipeline
        await self._run(lambda: pipeline().delete(at).zrem(index, key).execute())

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

    async def stream_bytes(self, stream: str) -> int:
        """See `Registry.stream_bytes`."""
        return int(
            await self._command("MEMORY", "USAGE", self._at("stream", check_key(stream, "stream")), "SAMPLES", "0") or 0
        )

    async def max_stream_bytes(self) -> float:
        """See `Registry.max_stream_bytes`: half of `maxmemory`, if that is set."""
        await self._command("PING")
        return self._maxmemory / 2 or math.inf

    async def trim(self, stream: str, before: int) -> None:
        """See `Registry.trim`."""
        keys = [self._at("stream", check_key(stream, "stream")), self._at("ends", stream)]
        while not await self._script(TRIM, keys, [str(max(before, 0)), TRIM_ENTRIES]):
            pass

    async def close(self) -> None:
        """End its connections."""
        self._closed = True
        await self._client.aclose()
        if self._sentinel is not None:
            await self._sentinel.aclose()

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
        ready = self._client.register_script(script)
        return await self._run(lambda: ready(keys=keys, args=args), repeatable)

    async def _command(self, *parts: str) -> Any:
        """Run a command that only reads. Raises as `_script`."""
        return await self._run(lambda: self._client.execute_command(*parts))

    async def _run(self, send: Callable[[], Awaitable[Any]], repeatable: bool = True) -> Any:
        if self._closed:
            raise RegistryUnavailableError(f"registry {self.name} is closed")
        pool, task = self._client.connection_pool, asyncio.current_task()
        cancels = 0 if task is None else task.cancelling()

        async def drop_idle(error: Exception) -> None:
            await pool.disconnect(inuse_connections=False)

        # ReadOnlyError: it was the master and is none any more; nothing was written. Otherwise the connection may have
        # been open since before Redis was restarted: a new one may work.
        retry = Retry(NoBackoff(), 1, (ReadOnlyError, RedisConnectionError) if repeatable else (ReadOnlyError,))
        try:
            async with asyncio.timeout(self._call_timeout_s):
                await self._follow_master()
                answer = await retry.call_with_retry(send, drop_idle)
                await self._inspect()
                return answer
        except (RedisError, OSError) as error:  # TimeoutError is an OSError
            late = f"no answer within {self._call_timeout_s:g} s" if isinstance(error, TimeoutError) else ""
            reason = late or cut(error) or type(error).__name__
            raise RegistryUnavailableError(f"registry {self.name}: {reason}") from error
        finally:
            # The client writes through asyncio.wait_for, which up to Python 3.11 forgets that it was cancelled if what
            # it waits for is done by then. Whoever cancelled would wait for ever.
            if task is not None and task.cancelling() > cancels:
                raise asyncio.CancelledError

    async def _follow_master(self) -> None:
        """Drop the connections to who was the master; ask a sentinel once in `MASTER_CHECK_S`.

        After a failover that was ordered the old one goes on taking writes, which are lost, for ten seconds and more.
        """
        pool, now = self._client.connection_pool, asyncio.get_running_loop().time()
        if self._sentinel is None or now < self._checked_at + MASTER_CHECK_S:
            return
        self._checked_at, before = now, pool.master_address
        try:
            master = await pool.get_master_address()
        except RedisError as error:
            # Sentinels that are away change nothing for who has a connection; who needs one will be told.
            _log.info("registry %s: who is the master is not known: %s", self.name, cut(error))
            return
        if before not in (None, master):
            _log.warning("registry %s: %s:%d is the master now", self.name, *master)
            await pool.disconnect()

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
        self._maxmemory = int(told.get("maxmemory", 0))
        if self._maxmemory and policy != "noeviction":
            _log.warning(
                "registry %s: maxmemory-policy is %s: Redis may drop deltas and plans; set it to noeviction",
                self.name,
                policy,
            )


def _entry(key: str, value: Any, revision: Any) -> Entry:
    if not revision or not revision.isdigit():
        raise RegistryRecordError(f"{key}: its revision is {revision!r}; a number is needed")
    return Entry(value, int(revision))


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))

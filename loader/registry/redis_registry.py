r"""Keep a registry in Redis (6.2 or later), for fleets of more than one machine.

URLs are as `loader.registry.open_registry` has them. With Sentinel the hosts are the sentinels, of port 26379, and the
credentials those of Redis; sentinels with a password of their own get `sentinel_user` and `sentinel_password_file`.
Passwords stay out of messages and logs.

Each Lua script runs as one step. All names begin with `shardrank:<fleet>:`.

```
key:<key>           hash: value, revision, writer (of the last write)
keys                sorted set of all keys, by name
revision            the last revision that was given
announced:<key>     the value, with an expiry
announcements       sorted set of their keys; of expired ones too, until somebody reads
lock:<key>          the owner, with an expiry
stream:<name>       stream; entry `<sequence>-0`, field `payload`
ends:<name>         hash: first, last, writer (of the last append); of a stream with commits, numbers that keep out
                    releases that know of none
head:<name>         hash, of a stream with commits: first, last, writer, bytes (of all `rows`), token, token:<publisher>
rows:<name>:<n>     what lies beside commit n
```

A writer's token makes it safe to send a write again when the first answer was lost. A stream's ends lie beside it since
XINFO, which knows them, also copies its first and last payload.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, cast
from urllib.parse import parse_qsl, unquote, urlsplit

import xxhash
from redis.asyncio import BlockingConnectionPool, Redis, SSLConnection
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool, SentinelManagedConnection
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError, RedisError

from loader.errors import (
    PublisherSupersededError,
    RegistryConflictError,
    RegistryRecordError,
    RegistryUnavailableError,
    StreamSequenceError,
    cut,
)
from loader.registry.registry import (
    ANYBODY,
    Entry,
    Publisher,
    StreamBounds,
    StreamEntry,
    check_entry,
    check_key,
    check_publisher,
    check_stream,
    without_password,
)

_TLS_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_OPTIONS: Final = ("fleet", "password_file", "sentinel_password_file", *_TLS_FILES, "sentinel_user")
_DATABASE: Final = r"/?(?P<database>[0-9]{0,5})"
_PATHS: Final = {"unix": r"/.+", "sentinel": rf"/(?P<master>[A-Za-z0-9_.\-]{{1,256}})(?:{_DATABASE})?"}
"""Patterns of a URL's path; of the other schemes it is `_DATABASE`."""
_FORMS: Final = (
    "allowed are redis[s]://[[USER]:PASSWORD@]HOST[:PORT][/DB], unix://[[USER]:PASSWORD@]/PATH, and "
    "redis[s]+sentinel://[[USER]:PASSWORD@]HOST[:PORT][,HOST[:PORT]...]/MASTER[/DB], each with [?OPTION=VALUE&...], "
    "DB a number, and special characters percent-encoded"
)
MASTER_CHECK_S: Final = 1.0
REPLICAS_TIMEOUT_MS: Final = 1000
"""How long one try of a commit waits for replicas of Redis."""
_log = logging.getLogger(__name__)

# TIME makes a script's effects differ from run to run: before Redis 7 it has to be told that effects are replicated.
# Lua numbers are doubles: microseconds since the epoch fit until the year 2255. They are above all revisions that were
# ever given, also after Redis has lost its data or its last writes.
_PUT: Final = """
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
_DELETE: Final = """
local revision = redis.call('HGET', KEYS[1], 'revision')
if revision and revision ~= ARGV[1] then return {0, revision} end
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[2])
return {1, ARGV[1]}
"""
_FORGET: Final = """
for index, name in ipairs(ARGV) do
    if redis.call('EXISTS', KEYS[index + 1]) == 0 then redis.call('ZREM', KEYS[1], name) end
end
"""
_ACQUIRE: Final = """
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
_RELEASE: Final = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"
# Format 1 has its ends under KEYS[2], where releases look that know no other. A commit moves them to KEYS[3], and
# leaves numbers after which nothing may be appended, and before which nothing is trimmed.
_APPEND: Final = """
local sequence, payload, writer, after, before, rows, publisher, token = unpack(ARGV)
local head = redis.call('HMGET', KEYS[3], 'last', 'writer', 'token:' .. publisher)
local ends = head[1] and head or redis.call('HMGET', KEYS[2], 'last', 'writer')
if ends[1] == sequence and ends[2] == writer then
    redis.call('HSET', head[1] and KEYS[3] or KEYS[2], 'writer', writer)
    return {1, sequence}
end
if tonumber(head[3] or '0') > tonumber(token) then return {-1, head[3]} end
if publisher ~= '' then redis.call('HSET', KEYS[3], 'token:' .. publisher, token) end
local last = tonumber(ends[1] or '0')
if after == '' then
    if head[1] then return {-2, last} end
    if ends[1] and tonumber(sequence) ~= last + 1 then return {0, last} end
    redis.call('HSETNX', KEYS[2], 'first', sequence)
    redis.call('HSET', KEYS[2], 'last', sequence, 'writer', writer)
else
    if tonumber(after) ~= last or (head[1] and before ~= '' and before ~= ends[2]) then return {0, last} end
    if not head[1] then
        redis.call('HSET', KEYS[3], 'first', redis.call('HGET', KEYS[2], 'first') or sequence)
        redis.call('HSET', KEYS[2], 'first', '9007199254740991', 'last', '9007199254740991', 'writer', '')
    end
    redis.call('HSET', KEYS[3], 'last', sequence, 'writer', writer)
    redis.call('HINCRBY', KEYS[3], 'bytes', #rows)
    redis.call('SET', KEYS[4], rows)
end
redis.call('XADD', KEYS[1], sequence .. '-0', 'payload', payload)
return {1, sequence}
"""
# As high as the time: above all that were given before Redis lost its data.
_TOKEN: Final = """
if redis.replicate_commands then redis.replicate_commands() end
local time = redis.call('TIME')
local given = tonumber(redis.call('HGET', KEYS[1], 'token') or '0')
local token = string.format('%.0f', math.max(given + 1, time[1] * 1000000 + time[2]))
redis.call('HSET', KEYS[1], 'token', token)
if ARGV[1] ~= '' then redis.call('HSET', KEYS[1], 'token:' .. ARGV[1], token) end
return token
"""
_READ: Final = """
local found, bytes, following = {}, 0, ARGV[1] .. '-0'
for _ = 1, tonumber(ARGV[2]) do
    local entry = redis.call('XRANGE', KEYS[1], following, '+', 'COUNT', 1)[1]
    if not entry then return found end
    bytes = bytes + #entry[2][2]
    if #found > 0 and bytes > tonumber(ARGV[3]) then return found end
    found[#found + 1] = entry
    following = '(' .. entry[1]
end
return found
"""
_TRIM: Final = """
local key = redis.call('HEXISTS', KEYS[3], 'last') == 1 and KEYS[3] or KEYS[2]
local ends = redis.call('HMGET', key, 'first', 'last')
local first = ends[2] and math.min(tonumber(ARGV[1]), tonumber(ends[2]) + 1) or 0
if first <= tonumber(ends[1] or '0') then return end
local freed, from, till = 0, '-', string.format('%.0f-0', first - 1)
while true do
    local entry = redis.call('XRANGE', KEYS[1], from, till, 'COUNT', 1)[1]
    if not entry then break end
    local rows = ARGV[2] .. string.match(entry[1], '%d+')
    freed, from = freed + redis.call('STRLEN', rows), '(' .. entry[1]
    redis.call('DEL', rows)
end
redis.call('HINCRBY', KEYS[3], 'bytes', string.format('%.0f', 0 - freed))
redis.call('XTRIM', KEYS[1], 'MINID', '=', string.format('%.0f-0', first))
redis.call('HSET', key, 'first', string.format('%.0f', first))
"""


class TlsConnection(SSLConnection):
    """Reads its certificates whenever it connects, so that renewed ones count; redis-py reads them once in its life."""

    async def _connect(self) -> None:
        self.ssl_context.context = None
        await super()._connect()  # type: ignore[no-untyped-call]


class _SentinelTlsConnection(SentinelManagedConnection, TlsConnection):
    pass


class _MasterPool(BlockingConnectionPool, SentinelConnectionPool):
    """Waits for a connection if all are in use, which redis-py's pool of a master does not."""


class RedisUrl(NamedTuple):
    """What a URL says: redis-py's arguments, host and port of each sentinel, and how these call the master."""

    fleet: str
    connection: dict[str, Any]
    sentinels: tuple[tuple[str, int], ...]
    master: str
    sentinel_connection: dict[str, Any]


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
    except (ValueError, KeyError):
        # Nothing of it is told: a password may stand where it does not belong.
        raise RegistryRecordError(f"registry URL {url.partition(':')[0]}://*** can't be read: {_FORMS}") from None
    options, path = dict(pairs), re.fullmatch(_PATHS.get(kind or scheme, _DATABASE), parts.path)
    of_sentinel: dict[str, Any] = {"username": options.get("sentinel_user")}
    try:
        if len(options) != len(pairs) or not options.keys() <= set(_OPTIONS):
            raise ValueError(f"options {[cut(option, 40) for option, _ in pairs]}; allowed is each of {_OPTIONS} once")
        if not re.fullmatch(r"[A-Za-z0-9_.\-]{1,64}", fleet := options.get("fleet", "default")):
            raise ValueError(f"fleet {cut(repr(fleet))}; allowed are 1 to 64 characters out of A-Z a-z 0-9 _ . -")
        if not kind and (wrong := [option for option in options if option.startswith("sentinel_")]):
            raise ValueError(f"{', '.join(wrong)}: only for redis+sentinel:// and rediss+sentinel://")
        if "username" in connection and "password" not in connection and "password_file" not in options:
            raise ValueError("a user without a password")
        if path is None or bool(hosts) == (scheme == "unix") or parts.fragment:
            raise ValueError(_FORMS)
        connection |= {"path": unquote(parts.path)} if scheme == "unix" else {"db": int(path["database"] or 0)}
        for option, arguments in (("password_file", connection), ("sentinel_password_file", of_sentinel)):
            if option in options:
                if "password" in arguments:
                    raise ValueError(f"a password and a {option}; one is allowed")
                if not (password := Path(options[option]).read_text(encoding="utf-8").strip()):
                    raise ValueError(f"{option} {cut(options[option])}: it is empty")
                arguments["password"] = password
        files: dict[str, Any] = {option: options[option] for option in _TLS_FILES if option in options}
        if scheme == "rediss":
            connection["connection_class"], of_sentinel["ssl"] = TlsConnection, True
            files["ssl_password"] = ""  # else OpenSSL would ask for one at the terminal
            TlsConnection(**files).ssl_context.get()
        elif files:
            raise ValueError(f"{', '.join(files)}: only for rediss://")
    except (OSError, TypeError, ValueError) as error:
        used = ", ".join(f"{option} {cut(options[option])}" for option in _OPTIONS[1:6] if option in options)
        problem = f"{used}: {error}" if isinstance(error, OSError | TypeError) else error
        raise RegistryRecordError(f"registry URL {cut(without_password(url))}: {problem}") from None
    return RedisUrl(fleet, connection | files, addresses, path["master"] if kind else "", of_sentinel | files)


async def expect_master(connection: Any) -> None:
    """Log in at whom the sentinels call the master, if it says so too: what is read from a replica may be old."""
    await connection.on_connect()
    await connection.send_command("ROLE")
    if (role := (await connection.read_response())[0]) != b"master":
        raise RedisConnectionError(f"{connection.host} is a {role.decode()}, and was called the master")


class RedisRegistry:
    """A `Registry` in Redis. Belongs to the event loop that it is first used on.

    Revisions and expiry go by the clock of Redis, so those of the machines need not agree.
    """

    def __init__(self, url: str, *, socket_timeout_s: float = 2.0, call_timeout_s: float = 5.0) -> None:
        """Connect when it is first used. Raises RegistryRecordError for what is no URL of Redis.

        Connecting, and each read, may take `socket_timeout_s`. A method that takes longer than `call_timeout_s` in all
        is a RegistryUnavailableError.
        """
        settings = parse_redis_url(url)
        self.url, self.name = url, without_password(url)
        self._prefix = f"shardrank:{settings.fleet}"
        self._call_timeout_s = call_timeout_s
        timeouts = ("socket_timeout", "socket_connect_timeout")
        # A connection may have been open since before Redis was restarted, or was the master: a new one may work.
        retried = [RedisConnectionError, ReadOnlyError]
        options = settings.connection | dict.fromkeys(("timeout", *timeouts), socket_timeout_s)
        retry = Retry(NoBackoff(), 1, tuple(retried))
        options |= {"max_connections": 16, "protocol": 2, "retry": retry, "retry_on_error": retried}
        has_tls = options.get("connection_class") is TlsConnection
        self._sentinel: Any = None
        if settings.sentinels:
            # redis-py asks one after the other: all of them together may take as long as one read from Redis.
            of_sentinel: dict[str, Any] = dict.fromkeys(timeouts, socket_timeout_s / len(settings.sentinels))
            # Unless told so, it would ask one that is away eleven times before it asks the next.
            of_sentinel["retry"] = Retry(NoBackoff(), 0)
            sentinel: Any = Sentinel  # it has no types
            self._sentinel = sentinel(settings.sentinels, sentinel_kwargs=settings.sentinel_connection | of_sentinel)
            for client in self._sentinel.sentinels if has_tls else ():
                client.connection_pool.connection_class = TlsConnection
            options["connection_class"] = _SentinelTlsConnection if has_tls else SentinelManagedConnection
            options |= {"service_name": settings.master, "sentinel_manager": self._sentinel}
            options["redis_connect_func"] = expect_master
        self._client: Any = Redis.from_pool((_MasterPool if settings.sentinels else BlockingConnectionPool)(**options))
        self._checked_at = -math.inf
        self._maxmemory: int | None = None
        self._closed = False

    async def get(self, key: str) -> Entry | None:
        value, revision = await self._command("HMGET", self._at("key", check_key(key)), "value", "revision")
        return Entry(value, int(revision)) if value is not None else None

    async def entries(self, prefix: str) -> dict[str, Entry]:
        names = await self._names("keys", prefix)
        rows = await self._pipeline(*(("HMGET", self._at("key", name), "value", "revision") for name in names))
        values_by_name = zip(names, rows, strict=True)
        return {name: Entry(value, int(revision)) for name, (value, revision) in values_by_name if value is not None}

    async def put(self, key: str, value: bytes, expected_revision: int) -> int:
        keys = [self._at("key", check_key(key, value=value)), self._at("keys"), self._at("revision")]
        arguments: list[str | bytes] = [value, str(expected_revision), secrets.token_hex(12), key]
        return await self._write(key, _PUT, keys, arguments, expected_revision)

    async def delete(self, key: str, expected_revision: int) -> None:
        keys = [self._at("key", check_key(key)), self._at("keys")]
        await self._write(key, _DELETE, keys, [str(expected_revision), key], expected_revision)

    async def announce(self, key: str, value: bytes, ttl_s: float) -> None:
        at, index = self._at("announced", check_key(key, value=value, ttl_s=ttl_s)), self._at("announcements")
        await self._pipeline(("SET", at, value, "PX", round(1000 * ttl_s)), ("ZADD", index, 0, key))

    async def withdraw(self, key: str) -> None:
        await self._pipeline(("DEL", self._at("announced", check_key(key))), ("ZREM", self._at("announcements"), key))

    async def announced(self, prefix: str) -> dict[str, bytes]:
        names = await self._names("announcements", prefix)
        keys = [self._at("announced", name) for name in names]
        values = await self._command("MGET", *keys) if keys else []
        values_by_name = {name: value for name, value in zip(names, values, strict=True) if value is not None}
        if len(values_by_name) < len(names):
            await self._script(_FORGET, [self._at("announcements"), *keys], names)
        return values_by_name

    async def acquire(self, key: str, owner: str, ttl_s: float) -> bool:
        keys = [self._at("lock", check_key(key, owner=owner, ttl_s=ttl_s))]
        return bool(await self._script(_ACQUIRE, keys, [owner, round(1000 * ttl_s)]))

    async def release(self, key: str, owner: str) -> None:
        await self._script(_RELEASE, [self._at("lock", check_key(key, owner=owner))], [owner])

    async def holder(self, key: str) -> str | None:
        owner = await self._command("GET", self._at("lock", check_key(key)))
        return owner.decode() if owner is not None else None

    async def append(self, stream: str, sequence: int, payload: bytes, by: Publisher = ANYBODY) -> None:
        """See `Registry.append`. As durable as `appendfsync`, and replicas that are waited for, make it."""
        await self._append(stream, StreamEntry(sequence, payload), ["", ""], b"", by)

    async def commit(
        self, stream: str, entry: StreamEntry, rows: bytes, after: StreamEntry | None, by: Publisher = ANYBODY
    ) -> None:
        """See `Registry.commit`. As durable as `append`."""
        check_entry(stream, entry, rows, after)
        last = after or StreamEntry(0, b"")
        expected = [str(last.sequence), xxhash.xxh3_128_hexdigest(last.payload) if last.payload else ""]
        await self._append(stream, entry, expected, rows, by)

    async def _append(self, stream: str, entry: StreamEntry, expected: list[str], rows: bytes, by: Publisher) -> None:
        check_entry(stream, entry)
        keys = [*self._stream(stream), self._at("rows", stream, str(entry.sequence))]
        # The same bytes are the same entry, whoever tries again.
        writer = xxhash.xxh3_128_hexdigest(entry.payload)
        arguments = [str(entry.sequence), entry.payload, writer, *expected, rows, by.name, by.token]

        async def append() -> Any:
            # On one connection, since what is waited for is what that one wrote.
            pipeline = self._client.pipeline(transaction=False)
            pipeline.eval(_APPEND, len(keys), *keys, *arguments)
            if by.min_replicas:
                pipeline.execute_command("WAIT", by.min_replicas, REPLICAS_TIMEOUT_MS)
            answers = await pipeline.execute(raise_on_error=False)
            for answer in answers:
                # Raised by the pipeline it would begin with the whole script.
                if isinstance(answer, RedisError):
                    raise answer
            return *answers[0], *answers[1:]

        done, last, *reached = await self._run(append)
        if done == -1:
            superseded = f"began again, with token {int(last)}; {by.token} is superseded"
            raise PublisherSupersededError(f"publisher {by.name!r} {superseded}")
        if done < 1:
            follows = f"{entry.sequence} was to follow {expected[0] or entry.sequence - 1}"
            problem = "format 1 is over" if done else follows
            raise StreamSequenceError(f"stream {stream} ends with {int(last)}: {problem}")
        if reached and reached[0] < by.min_replicas:
            raise RegistryUnavailableError(
                f"registry {self.name}: {stream} {entry.sequence} is on {reached[0]} replicas of Redis, min_replicas "
                f"is {by.min_replicas}"
            )

    async def next_token(self, stream: str, publisher: str) -> int:
        return int(await self._script(_TOKEN, self._stream(check_stream(stream))[2:], [check_publisher(publisher)]))

    async def read_rows(self, stream: str, ranges: Sequence[tuple[int, int, int]]) -> list[bytes]:
        at = self._at("rows", check_stream(stream), "")
        pieces = await self._pipeline(*(("GETRANGE", f"{at}{of}", begin, end - 1) for of, begin, end in ranges))
        return cast("list[bytes]", pieces)

    async def read(
        self, stream: str, after: int, max_entries: int = 256, max_bytes: int = 16 << 20
    ) -> list[StreamEntry]:
        check_stream(stream, max_entries=max_entries, max_bytes=max_bytes)
        entries = await self._script(_READ, self._stream(stream)[:1], [str(max(after, 0) + 1), max_entries, max_bytes])
        return [StreamEntry(int(entry_id.partition(b"-")[0]), payload) for entry_id, (_, payload) in entries]

    async def bounds(self, stream: str) -> StreamBounds:
        check_stream(stream)
        old, now = await self._pipeline(*(("HMGET", ends, "first", "last") for ends in self._stream(stream)[1:]))
        first, last = old if now[1] is None else now
        return StreamBounds(int(first), int(last)) if last is not None else StreamBounds(0, 0)

    async def stream_size(self, stream: str) -> tuple[int, int]:
        key, _, head = self._stream(check_stream(stream))
        entries, commits, rows = await self._pipeline(("XLEN", key), ("MEMORY", "USAGE", key), ("HGET", head, "bytes"))
        return int(entries), int(commits or 0) + int(rows or 0)

    async def max_stream_bytes(self) -> float:
        """See `Registry.max_stream_bytes`: half of `maxmemory`, if that is set."""
        await self._command("PING")
        return self._maxmemory / 2 if self._maxmemory else math.inf

    async def trim(self, stream: str, before: int) -> None:
        keys = self._stream(check_stream(stream))
        await self._script(_TRIM, keys, [str(max(before, 0)), self._at("rows", stream, "")])

    async def close(self) -> None:
        """End its connections."""
        self._closed = True
        await self._client.aclose()
        if self._sentinel is not None:
            await self._sentinel.aclose()

    def _stream(self, stream: str) -> list[str]:
        return [self._at(kind, stream) for kind in ("stream", "ends", "head")]

    def _at(self, *parts: str) -> str:
        return ":".join((self._prefix, *parts))

    async def _names(self, index: str, prefix: str) -> list[str]:
        low, high = (f"[{check_key(prefix, 'prefix')}", f"[{prefix}\x7f") if prefix else ("-", "+")
        return [name.decode() for name in await self._command("ZRANGEBYLEX", self._at(index), low, high)]

    async def _write(self, key: str, script: str, keys: list[str], arguments: list[str | bytes], expected: int) -> int:
        done, revision = await self._script(script, keys, arguments)
        if not done:
            raise RegistryConflictError(f"{key} has revision {int(revision)}, not {expected}")
        return int(revision)

    async def _script(self, script: str, keys: Sequence[str], arguments: Sequence[str | bytes | int]) -> Any:
        return await self._run(lambda: self._client.register_script(script)(keys=keys, args=arguments))

    async def _command(self, *parts: str) -> Any:
        return await self._run(lambda: self._client.execute_command(*parts))

    async def _pipeline(self, *commands: tuple[str | bytes | int, ...]) -> Any:
        def execute() -> Any:
            pipeline = self._client.pipeline()
            for command in commands:
                pipeline.execute_command(*command)
            return pipeline.execute()

        return await self._run(execute)

    async def _run(self, send: Callable[[], Awaitable[Any]]) -> Any:
        if self._closed:
            raise RegistryUnavailableError(f"registry {self.name} is closed")
        task = asyncio.current_task()
        cancels = 0 if task is None else task.cancelling()
        try:
            async with asyncio.timeout(self._call_timeout_s):
                await self._follow_master()
                answer = await send()
                await self._inspect()
                return answer
        except (RedisError, OSError) as error:  # TimeoutError is an OSError
            reason = cut(error) or type(error).__name__
            if isinstance(error, TimeoutError):
                reason = f"no answer within {self._call_timeout_s:g} s"
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
        # Sentinels that are away change nothing for who has a connection; who needs one will be told.
        with suppress(RedisError):
            await pool.get_master_address()
        if before not in (None, pool.master_address):
            _log.warning("registry %s: %s:%d is the master now", self.name, *pool.master_address)
            await pool.disconnect()

    async def _inspect(self) -> None:
        """Log, once, settings with which Redis can lose what is kept in it."""
        if self._maxmemory is not None:
            return
        self._maxmemory = 0
        with suppress(RedisError):  # who connects may not be allowed to see them
            settings = await self._client.info("persistence") | await self._client.info("memory")
            self._maxmemory, policy = int(settings.get("maxmemory", 0)), settings.get("maxmemory_policy", "noeviction")
            if not settings.get("aof_enabled"):
                problem = "appendonly is off: a restart of Redis loses rollouts and deltas; set appendonly to yes"
                _log.warning("registry %s: %s", self.name, problem)
            if self._maxmemory and policy != "noeviction":
                problem = f"maxmemory-policy is {policy}: Redis may drop deltas and plans; set it to noeviction"
                _log.warning("registry %s: %s", self.name, problem)

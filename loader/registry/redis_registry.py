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
XINFO, which knows them, also copies its first and last payload.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, Final

from loader.errors import RegistryConflictError, RegistryRecordError, StreamSequenceError
from loader.registry.redis_link import CALL_TIMEOUT_S, MAX_CONNECTIONS, SOCKET_TIMEOUT_S, RedisLink, parse_redis_url
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
)

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

ENTRIES: Final = """
local names = redis.call('ZRANGEBYLEX', KEYS[1], ARGV[2], ARGV[3], 'LIMIT', 0, ARGV[4])
local found, bytes = {}, 0
for place, name in ipairs(names) do
    local there = redis.call('HMGET', ARGV[1] .. name, 'value', 'revision')
    if there[1] then
        bytes = bytes + #there[1]
        found[#found + 1] = name
        found[#found + 1] = there[1]
        found[#found + 1] = there[2]
    end
    if bytes >= tonumber(ARGV[5]) and place < #names then return {name, found} end
end
if #names < tonumber(ARGV[4]) then return {'', found} end
return {names[#names], found}
"""
"""A page, and the name to go on after; '' after the last one."""

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

ANNOUNCED: Final = """
local names = redis.call('ZRANGEBYLEX', KEYS[1], ARGV[2], ARGV[3], 'LIMIT', 0, ARGV[4])
local found, bytes = {}, 0
for place, name in ipairs(names) do
    local value = redis.call('GET', ARGV[1] .. name)
    if value then
        bytes = bytes + #value
        found[#found + 1] = name
        found[#found + 1] = value
    else
        redis.call('ZREM', KEYS[1], name)
    end
    if bytes >= tonumber(ARGV[5]) and place < #names then return {name, found} end
end
if #names < tonumber(ARGV[4]) then return {'', found} end
return {names[#names], found}
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


class RedisRegistry:
    """A `Registry` in Redis. Revisions and expiry go by the clock of Redis, so those of the machines need not agree."""

    def __init__(
        self,
        url: str,
        *,
        socket_timeout_s: float = SOCKET_TIMEOUT_S,
        call_timeout_s: float = CALL_TIMEOUT_S,
        max_connections: int = MAX_CONNECTIONS,
        new_token: Callable[[], str] = lambda: secrets.token_hex(12),
    ) -> None:
        """Opens a registry by its URL. Connects when it is first used.

        Args:
            url: see `open_registry`.
            socket_timeout_s: how long a connection may take to be made, and a read from one to bring anything.
            call_timeout_s: how long a method may take in all; longer is a RegistryUnavailableError.
            max_connections: to Redis at a time; a method waits for a free one.
            new_token: gives each write a text that no other write has, by which it is known when it is sent again.

        Raises:
            RegistryRecordError: not such a URL.
        """
        settings = parse_redis_url(url)
        self._url, self._name = url, settings.name
        self._prefix = f"shardrank:{settings.fleet}:"
        self._new_token = new_token
        self._link = RedisLink(settings, socket_timeout_s, call_timeout_s, max_connections)

    @property
    def url(self) -> str:
        """Its URL, with the password."""
        return self._url

    @property
    def name(self) -> str:
        """Its URL, without the password."""
        return self._name

    async def get(self, key: str) -> Entry | None:
        """See `Registry.get`."""
        value, revision = await self._link.command("HMGET", self._at("key", check_key(key)), "value", "revision")
        return _entry(key, value, revision) if value is not None else None

    async def entries(self, prefix: str) -> dict[str, Entry]:
        """See `Registry.entries`. Key by key: not all are of the same moment."""
        flat = await self._pages(ENTRIES, "keys", "key", check_prefix(prefix))
        found = zip(flat[::3], flat[1::3], flat[2::3], strict=True)
        return {name.decode(): _entry(name.decode(), value, revision) for name, value, revision in found}

    async def put(self, key: str, value: bytes, expected_revision: int) -> int:
        """See `Registry.put`."""
        check_value(check_key(key), value)
        done, revision = await self._link.script(
            PUT,
            [self._at("key", key), self._at("keys"), self._at("revision")],
            [value, str(expected_revision), self._new_token(), key],
        )
        if not done:
            raise RegistryConflictError(f"{key} has revision {int(revision)}, not {expected_revision}")
        return int(revision)

    async def delete(self, key: str, expected_revision: int) -> None:
        """See `Registry.delete`."""
        done, revision = await self._link.script(
            DELETE,
            [self._at("key", check_key(key)), self._at("keys")],
            [str(expected_revision), key],
            # The second time it would find nothing, and call that a conflict.
            repeatable=False,
        )
        if not done:
            raise RegistryConflictError(f"{key} has revision {int(revision)}, not {expected_revision}")

    async def announce(self, key: str, value: bytes, ttl_s: float) -> None:
        """See `Registry.announce`."""
        check_value(check_key(key), value)
        check_ttl(key, ttl_s)
        await self._link.script(
            ANNOUNCE,
            [self._at("announced", key), self._at("announcements")],
            [value, _milliseconds(ttl_s), key],
        )

    async def withdraw(self, key: str) -> None:
        """See `Registry.withdraw`."""
        await self._link.script(WITHDRAW, [self._at("announced", check_key(key)), self._at("announcements")], [key])

    async def announced(self, prefix: str) -> dict[str, bytes]:
        """See `Registry.announced`."""
        flat = await self._pages(ANNOUNCED, "announcements", "announced", check_prefix(prefix))
        return {name.decode(): value for name, value in zip(flat[::2], flat[1::2], strict=True)}

    async def acquire(self, key: str, owner: str, ttl_s: float) -> bool:
        """See `Registry.acquire`."""
        check_owner(check_key(key), owner)
        check_ttl(key, ttl_s)
        taken = await self._link.script(ACQUIRE, [self._at("lock", key)], [owner, _milliseconds(ttl_s)])
        return bool(taken)

    async def release(self, key: str, owner: str) -> None:
        """See `Registry.release`."""
        check_owner(check_key(key), owner)
        await self._link.script(RELEASE, [self._at("lock", key)], [owner])

    async def holder(self, key: str) -> str | None:
        """See `Registry.holder`."""
        owner = await self._link.command("GET", self._at("lock", check_key(key)))
        return owner.decode() if owner is not None else None

    async def append(self, stream: str, sequence: int, payload: bytes) -> None:
        """See `Registry.append`. As durable as `appendfsync` makes it."""
        check_value(check_key(stream, "stream"), payload)
        check_sequence(stream, sequence)
        done, last = await self._link.script(
            APPEND,
            [self._at("stream", stream), self._at("ends", stream)],
            [str(sequence), payload, self._new_token()],
        )
        if not done:
            raise StreamSequenceError(
                f"stream {stream}: sequence {sequence} after {int(last)}; {int(last) + 1} is next"
            )

    async def read(
        self, stream: str, after: int, max_entries: int = 256, max_bytes: int = 16 << 20
    ) -> list[StreamEntry]:
        """See `Registry.read`."""
        check_read(check_key(stream, "stream"), max_entries, max_bytes)
        flat = await self._link.script(
            READ, [self._at("stream", stream)], [str(max(after, 0) + 1), max_entries, max_bytes]
        )
        return [StreamEntry(int(sequence), payload) for sequence, payload in zip(flat[::2], flat[1::2], strict=True)]

    async def bounds(self, stream: str) -> StreamBounds:
        """See `Registry.bounds`."""
        ends = self._at("ends", check_key(stream, "stream"))
        first, last = await self._link.command("HMGET", ends, "first", "last")
        return StreamBounds(int(first), int(last)) if last is not None else StreamBounds(0, 0)

    async def trim(self, stream: str, before: int) -> None:
        """See `Registry.trim`."""
        keys = [self._at("stream", check_key(stream, "stream")), self._at("ends", stream)]
        while not await self._link.script(TRIM, keys, [str(max(before, 0)), TRIM_ENTRIES]):
            pass

    async def close(self) -> None:
        """Ends its connections."""
        await self._link.close()

    async def _pages(self, script: str, index: str, values: str, prefix: str) -> list[bytes]:
        start, end = (f"[{prefix}", f"[{prefix}\x7f") if prefix else ("-", "+")
        found: list[bytes] = []
        while True:
            last, flat = await self._link.script(
                script, [self._at(index)], [self._at(values, ""), start, end, PAGE_ENTRIES, PAGE_BYTES]
            )
            found += flat
            if not last:
                return found
            start = f"({last.decode()}"

    def _at(self, kind: str, name: str | None = None) -> str:
        return f"{self._prefix}{kind}" if name is None else f"{self._prefix}{kind}:{name}"


def _entry(key: str, value: Any, revision: Any) -> Entry:
    if revision is None or not revision.isdigit():
        raise RegistryRecordError(f"{key}: its revision is {revision!r}; a number is needed")
    return Entry(value, int(revision))


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))

"""The Lua scripts of `RedisRegistry`: each runs as one step, and touches a bounded number of entries.

All names begin with `shardrank:<fleet>:`.

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

from typing import Final

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

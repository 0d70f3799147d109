"""A registry found through a sentinel goes on with whoever is the master: real processes, and real failovers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from redis.exceptions import ConnectionError

from loader.errors import RegistryUnavailableError
from loader.registry.opening import open_registry
from loader.registry.redis_registry import MASTER_CHECK_S, _ToMaster
from loader.registry.registry import StreamBounds
from shardrank_testing.registries import RedisServer, WatchedRedis, watched_redis

pytestmark = pytest.mark.anyio

STREAM = "deltas/films"
LEASE_S = 30.0


@pytest.fixture
def watched(tmp_path):
    with watched_redis(tmp_path) as running:
        yield running


class Traffic:
    """What a fleet does all the time: append to a stream, renew a lock, and read the stream in order.

    Attributes:
        appended: the last number of the stream that is known to be in it.
        read: numbers in the order in which they were read.
        may_append: cleared, nothing is appended.
    """

    def __init__(self, url: str) -> None:
        self.registry = open_registry(url)
        self.appended = 0
        self.read: list[int] = []
        self.may_append = asyncio.Event()
        self.may_append.set()

    async def run(self) -> None:
        while True:
            await self.may_append.wait()
            with suppress(RegistryUnavailableError):
                await self.registry.append(STREAM, self.appended + 1, b"row")
                self.appended += 1
                assert await self.registry.acquire("coordinator", "a", LEASE_S)
                after = self.read[-1] if self.read else 0
                self.read += [entry.sequence for entry in await self.registry.read(STREAM, after)]
            await asyncio.sleep(0.005)

    async def goes_on(self) -> None:
        before = self.appended
        while min(self.appended, len(self.read)) < before + 5:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def is_replicated(self, replica: RedisServer) -> None:
        """Stop appending, and wait until a replica has all: what it lacks is lost with the master."""
        self.may_append.clear()
        await asyncio.sleep(0.05)
        while str(self.appended).encode() not in last_entry(replica):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@asynccontextmanager
async def traffic_on(watched: WatchedRedis) -> AsyncIterator[Traffic]:
    """Check at the end that nothing of the stream was lost, doubled or read out of order, and who has the lock."""
    traffic = Traffic(watched.url)
    task = asyncio.create_task(traffic.run())
    await traffic.goes_on()
    yield traffic
    await traffic.goes_on()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert await traffic.registry.holder("coordinator") == "a"
    assert traffic.read == list(range(1, len(traffic.read) + 1))
    bounds = await traffic.registry.bounds(STREAM)
    assert bounds in (StreamBounds(1, traffic.appended), StreamBounds(1, traffic.appended + 1))
    await traffic.registry.close()


def last_entry(server: RedisServer) -> bytes:
    return server.command("HGET", f"shardrank:default:ends:{STREAM}", "last")


async def moved(watched: WatchedRedis, before: RedisServer) -> None:
    while watched.master() is before:  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def test_streams_and_locks_go_on_after_the_death_of_a_master(watched, caplog):
    """And who is called the master, but says that it is none, is not sent a command."""
    caplog.set_level(logging.DEBUG)
    master, replica = watched.servers

    async def find_master() -> tuple[str, int]:
        return "127.0.0.1", replica.port

    connection = _ToMaster(find_master=find_master, password="geheim", protocol=2)
    with pytest.raises(ConnectionError, match=r"is a slave, and was called the master"):
        await connection.connect()
    assert not connection.is_connected
    async with traffic_on(watched) as traffic:
        registry = traffic.registry
        revision = await registry.put("wanted/films", b"1", 0)
        await traffic.is_replicated(replica)
        master.kill()
        with pytest.raises(RegistryUnavailableError):
            await registry.put("wanted/films", b"2", revision)
        traffic.may_append.set()
        await moved(watched, master)
        await traffic.goes_on()
        assert await registry.put("wanted/films", b"2", revision) > revision
        assert "geheim" not in registry.name + repr(registry)
    assert not [secret for secret in ("geheim", "wache") if secret in caplog.text]


async def test_an_ordered_failover_is_followed_while_the_old_master_writes(watched):
    old, new = watched.servers
    async with traffic_on(watched) as traffic:
        await traffic.is_replicated(new)
        assert watched.ask("SENTINEL", "FAILOVER", watched.NAME) == b"+OK\r\n"
        await moved(watched, old)
        await asyncio.sleep(MASTER_CHECK_S)
        before = traffic.appended
        traffic.may_append.set()
        await traffic.goes_on()
        assert b"role:master" in old.command("INFO", "replication")
        assert last_entry(old).split()[-1] == str(before).encode()

"""What goes wrong with a Redis: each time a typed error within bounded time, and no help needed afterwards."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import pytest
from redis.asyncio.sentinel import SentinelManagedConnection
from redis.exceptions import ConnectionError

from loader.errors import RegistryConflictError, RegistryUnavailableError, StreamSequenceError
from loader.registry import open_registry
from loader.registry.redis_registry import MASTER_CHECK_S, RedisRegistry, expect_master
from loader.registry.registry import StreamBounds, StreamEntry
from shard_node.wire.tls import TlsConfig, server_context
from shardrank_testing.certificates import Authority, needs_openssl
from shardrank_testing.registries import RedisServer, WatchedRedis, every_call, redis_server, watched_redis
from shardrank_testing.tcp_proxy import redis_proxy

# Well above what an answer takes, far below the default: tests wait for it.
QUICK = {"socket_timeout_s": 0.5, "call_timeout_s": 1.0}
WAIT_S = 30.0


@pytest.fixture
def server(tmp_path):
    with redis_server(tmp_path) as running:
        yield running


@asynccontextmanager
async def opened(url, **limits):
    """A registry that is closed at the end; fails if it takes longer than anything may."""
    registry = RedisRegistry(url, **limits)
    try:
        async with asyncio.timeout(WAIT_S):
            yield registry
    finally:
        await registry.close()


@pytest.fixture
async def registry(server):
    async with opened(server.url, **QUICK) as registry:
        yield registry


async def assert_unavailable(registry, message="^registry "):
    with pytest.raises(RegistryUnavailableError, match=message) as failure:
        await registry.get("a")
    return failure.value


async def assert_every_method_is_unavailable(registry):
    for call in [*every_call(registry), registry.entries("a/"), registry.announced("a/")]:
        with pytest.raises(RegistryUnavailableError, match=r"^registry "):
            await call


@pytest.mark.parametrize("url", ["unix:///none/none.sock", "redis://127.0.0.1:1", "redis://host.invalid"])
async def test_a_redis_that_is_not_there_is_unavailable(url):
    async with opened(url, **QUICK) as registry:
        await (assert_unavailable if "host" in url else assert_every_method_is_unavailable)(registry)


async def test_what_was_written_before_a_kill_is_there_after_it(registry, server):
    revision = await registry.put("a", b"value", 0)
    await registry.append("s", 7, b"entry")
    await registry.append("s", 8, b"entry")
    await registry.trim("s", 9)
    server.kill()
    await assert_every_method_is_unavailable(registry)
    server.start()
    entry = await registry.get("a")
    assert (entry.value, entry.revision) == (b"value", revision)
    assert await registry.bounds("s") == StreamBounds(9, 8)
    assert await registry.put("a", b"more", revision) > revision
    await registry.append("s", 9, b"entry")


@pytest.mark.parametrize("lose", ["flush", "restart_empty"])
async def test_a_redis_that_lost_everything_gives_higher_revisions(registry, server, lose):
    before = await registry.put("wanted/m", b"1", 0)
    before = await registry.put("wanted/m", b"2", before)
    await registry.append("s", 5, b"")
    await registry.announce("nodes/a", b"", 60.0)
    getattr(server, lose)()
    assert await registry.entries("") == {}
    assert await registry.announced("") == {}
    assert await registry.bounds("s") == StreamBounds(0, 0)
    with pytest.raises(RegistryConflictError, match="has revision 0"):
        await registry.put("wanted/m", b"3", before)
    assert await registry.put("wanted/m", b"2", 0) > before
    await registry.append("s", 6, b"")
    assert await registry.bounds("s") == StreamBounds(6, 6)


async def test_after_a_pause_each_call_gets_its_own_answer(server):
    """A call that was given up leaves a request whose answer comes later."""
    async with opened(server.url, socket_timeout_s=0.2, call_timeout_s=0.3) as registry:
        for number in range(8):
            await registry.put(f"k/{number}", b"%d" % number, 0)
        server.pause()
        try:
            given_up = asyncio.gather(*(registry.get(f"k/{number}") for number in range(8)), return_exceptions=True)
            assert all(isinstance(answer, RegistryUnavailableError) for answer in await given_up)
            waiting = asyncio.ensure_future(registry.get("k/0"))
            await asyncio.sleep(0)
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                await waiting
            await assert_every_method_is_unavailable(registry)
        finally:
            server.resume()
        for number in [*range(8), *reversed(range(8))]:
            assert (await registry.get(f"k/{number}")).value == b"%d" % number


async def test_writes_cancelled_at_any_moment_are_done_or_not(server):
    """And a cancelled call ends."""
    draw, done = random.Random(0), 0
    async with opened(server.url) as registry:

        async def write():
            nonlocal done
            while True:
                number = (await registry.bounds("s")).last + 1
                with suppress(StreamSequenceError):
                    await registry.append("s", number, b"%d" % number * 300)
                    done = number

        for _ in range(300):
            task = asyncio.create_task(write())
            await asyncio.sleep(0.003 * draw.random())
            task.cancel()
            ended, _ = await asyncio.wait([task], timeout=10)
            assert ended == {task}
            assert task.cancelled()
        # Writes that were cancelled may have reached Redis.
        entries = await registry.read("s", 0, 100_000, 1 << 30)
        assert len(entries) >= done > 20
        assert [entry.sequence for entry in entries] == list(range(1, len(entries) + 1))
        assert all(entry.payload == b"%d" % entry.sequence * 300 for entry in entries)


async def test_a_write_whose_answer_was_lost_is_done_once(server):
    async with redis_proxy(server) as proxy, opened(f"redis://127.0.0.1:{proxy.port}") as registry:
        first = await registry.put("a", b"1", 0)
        proxy.replies.cuts = 1
        second = await registry.put("a", b"2", first)
        entry = await registry.get("a")
        assert (entry.value, entry.revision) == (b"2", second)
        await registry.append("s", 1, b"1")
        proxy.replies.cuts = 1
        await registry.append("s", 2, b"2")
        assert await registry.read("s", 0) == [StreamEntry(1, b"1"), StreamEntry(2, b"2")]
        proxy.replies.cuts = 1
        await registry.announce("nodes/a", b"1", 60.0)
        assert await registry.announced("nodes/") == {"nodes/a": b"1"}
        proxy.replies.cuts = 1
        await registry.withdraw("nodes/a")
        assert await registry.announced("nodes/") == {}
        # Redis knows the script from here on, so that the answer that is lost is that of the deletion.
        await registry.delete("b", await registry.put("b", b"", 0))
        proxy.replies.cuts = 1
        await registry.delete("a", second)
        assert await registry.get("a") is None
        with pytest.raises(StreamSequenceError, match="ends with 2: 2 was to follow 1"):
            await registry.append("s", 2, b"another")
        assert proxy.connections >= 3


async def test_a_redis_without_memory_is_unavailable_and_loses_nothing(registry, server):
    revision = await registry.put("a", b"1", 0)
    assert server.command("CONFIG", "SET", "maxmemory", "1") == b"+OK\r\n"
    with pytest.raises(RegistryUnavailableError, match="maxmemory"):
        await registry.append("s", 1, b"x" * 1000)
    assert (await registry.get("a")).revision == revision
    assert server.command("CONFIG", "SET", "maxmemory", "0") == b"+OK\r\n"
    await registry.append("s", 1, b"x" * 1000)


async def test_fleets_in_one_redis_do_not_see_each_other(registry, server):
    async with opened(f"{server.url}?fleet=one") as one:
        await one.put("a", b"", 0)
        await one.announce("a", b"", 60.0)
        await one.append("a", 3, b"")
        assert await one.acquire("a", "me", 60.0)
    async with opened(f"{server.url}?fleet=two") as two:
        for other in (registry, two):
            assert await other.entries("") == {}
            assert await other.announced("") == {}
            assert await other.bounds("a") == StreamBounds(0, 0)
            assert await other.holder("a") is None


async def test_settings_with_which_redis_loses_data_are_logged_once(tmp_path, caplog):
    settings = {"appendonly": "no", "maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"}
    with redis_server(tmp_path, settings=settings) as server, caplog.at_level(logging.WARNING):
        async with opened(server.url) as registry:
            await registry.get("a")
            assert await registry.max_stream_bytes() == 50 << 20
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "appendonly is off: a restart of Redis loses rollouts and deltas; set appendonly to yes",
        "maxmemory-policy is allkeys-lru: Redis may drop deltas and plans; set it to noeviction",
    ]


async def test_only_the_right_password_opens_redis(tmp_path, caplog):
    """And no password is in a name, a message or a log."""
    (tmp_path / "password").write_text("geheim\n")
    with redis_server(tmp_path, settings={"requirepass": "geheim"}) as server, caplog.at_level(logging.DEBUG):
        plain = server.url.replace(":geheim@", "")
        async with opened(server.url) as registry:
            await registry.put("a", b"1", 0)
            assert "geheim" in registry.url
            assert "geheim" not in registry.name + repr(registry)
        for url in (plain, server.url.replace("geheim", "falsch")):
            async with opened(url) as registry:
                failure = await assert_unavailable(registry)
                assert "falsch" not in str(failure) + repr(failure.__cause__)
        async with opened(f"{plain}?password_file={tmp_path}/password") as registry:
            assert (await registry.get("a")).value == b"1"
    assert not [secret for secret in ("geheim", "falsch") if secret in caplog.text]


@needs_openssl
async def test_rediss_trusts_only_the_certificate_that_is_named(tmp_path):
    ca, other = Authority(tmp_path), Authority(tmp_path, "other")
    redis = ca.issue("redis")
    tls = server_context(TlsConfig(cert=redis.cert, key=redis.key))
    with redis_server(tmp_path, settings={"requirepass": "geheim"}) as server:
        async with redis_proxy(server, tls) as proxy:
            address = f"rediss://:geheim@127.0.0.1:{proxy.port}/0"
            async with opened(f"{address}?ssl_ca_certs={ca.cert}", **QUICK) as registry:
                revision = await registry.put("a", b"1", 0)
                assert (await registry.get("a")).revision == revision
            for url, message in (
                (f"{address}?ssl_ca_certs={other.cert}", "certificate"),
                (address, "certificate"),
                (address.replace("rediss", "redis"), "registry"),
            ):
                async with opened(url, **QUICK) as registry:
                    await assert_unavailable(registry, message)


# Sentinels

STREAM = "deltas/films"


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
                assert await self.registry.acquire("coordinator", "a", WAIT_S)
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


async def test_a_silent_sentinel_is_asked_once(watched):
    """It accepts connections and never answers; asked again and again, it would take the time of the call."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        registry = open_registry(watched.url.replace("127.0.0.1:1,", f"127.0.0.1:{silent.getsockname()[1]},"))
        assert await registry.put("wanted/films", b"1", 0) > 0
        await registry.close()


async def test_streams_and_locks_go_on_after_the_death_of_a_master(watched, caplog):
    """And who is called the master, but says that it is none, is not sent a command."""
    caplog.set_level(logging.DEBUG)
    master, replica = watched.servers
    pool = SimpleNamespace(check_connection=False)
    options = {"password": "geheim", "protocol": 2, "redis_connect_func": expect_master}
    connection = SentinelManagedConnection(connection_pool=pool, **options)
    with pytest.raises(ConnectionError, match=r"is a slave, and was called the master"):
        await connection.connect_to(("127.0.0.1", replica.port))
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


async def test_an_ordered_failover_is_followed_at_once(watched):
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

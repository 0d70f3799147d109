"""What goes wrong with a Redis: each time a typed error within bounded time, and no help needed afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest

from loader.errors import RegistryConflictError, RegistryUnavailableError, StreamSequenceError
from loader.registry.redis_registry import RedisRegistry
from loader.registry.registry import StreamBounds, StreamEntry
from shard_node.wire.tls import TlsConfig, server_context
from shardrank_testing.certificates import Authority, needs_openssl
from shardrank_testing.registries import redis_server
from shardrank_testing.tcp_proxy import redis_proxy

# Well above what an answer takes, far below the default: tests wait for it.
QUICK = {"socket_timeout_s": 0.5, "call_timeout_s": 1.0}
WAIT_S = 30.0


@pytest.fixture
def server(tmp_path):
    with redis_server(tmp_path) as running:
        yield running


def run(url, scenario, **limits):
    """Runs a coroutine with a registry that is closed at the end; fails if it takes longer than anything may."""

    async def program():
        registry = RedisRegistry(url, **limits)
        try:
            async with asyncio.timeout(WAIT_S):
                return await scenario(registry)
        finally:
            await registry.close()

    return asyncio.run(program())


async def assert_every_method_is_unavailable(registry):
    for call in (
        registry.get("a"),
        registry.entries("a/"),
        registry.put("a", b"", 0),
        registry.delete("a", 1),
        registry.announce("a", b"", 1.0),
        registry.withdraw("a"),
        registry.announced("a/"),
        registry.acquire("a", "me", 1.0),
        registry.release("a", "me"),
        registry.holder("a"),
        registry.append("a", 1, b""),
        registry.read("a", 0),
        registry.bounds("a"),
        registry.trim("a", 1),
    ):
        with pytest.raises(RegistryUnavailableError, match=r"^registry "):
            await call


def test_a_redis_that_is_not_there_is_unavailable(tmp_path):
    async def scenario(registry):
        with pytest.raises(RegistryUnavailableError):
            await registry.get("a")

    for url in (f"unix://{tmp_path}/none.sock", "redis://127.0.0.1:1"):
        run(url, assert_every_method_is_unavailable, **QUICK)
    run("redis://host.invalid", scenario, **QUICK)


def test_what_was_written_before_a_kill_is_there_after_the_restart_and_the_registry_needs_no_help(server):
    async def scenario(registry):
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

    run(server.url, scenario, **QUICK)


@pytest.mark.parametrize("lose", ["flush", "restart_empty"])
def test_a_redis_that_lost_everything_is_empty_and_gives_higher_revisions_than_before(server, lose):
    async def scenario(registry):
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

    run(server.url, scenario)


def test_a_redis_that_stands_still_is_unavailable_and_then_answers_to_the_right_questions(server):
    async def scenario(registry):
        for number in range(8):
            await registry.put(f"k/{number}", b"%d" % number, 0)
        server.pause()
        try:
            given_up = asyncio.gather(*(registry.get(f"k/{number}") for number in range(8)), return_exceptions=True)
            assert all(isinstance(answer, RegistryUnavailableError) for answer in await given_up)
            # One that its caller gives up leaves a question whose answer comes later.
            waiting = asyncio.ensure_future(registry.get("k/0"))
            await asyncio.sleep(0)
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting
            await assert_every_method_is_unavailable(registry)
        finally:
            server.resume()
        for number in [*range(8), *reversed(range(8))]:
            assert (await registry.get(f"k/{number}")).value == b"%d" % number

    run(server.url, scenario, socket_timeout_s=0.2, call_timeout_s=0.3)


def test_a_write_whose_answer_was_lost_is_done_once(server):
    async def program():
        async with redis_proxy(server) as proxy:
            registry = RedisRegistry(f"redis://127.0.0.1:{proxy.port}")
            first = await registry.put("a", b"1", 0)
            proxy.answers_to_lose = 1
            second = await registry.put("a", b"2", first)
            entry = await registry.get("a")
            assert (entry.value, entry.revision) == (b"2", second)
            await registry.append("s", 1, b"1")
            proxy.answers_to_lose = 1
            await registry.append("s", 2, b"2")
            assert await registry.read("s", 0) == [StreamEntry(1, b"1"), StreamEntry(2, b"2")]
            # Redis knows the script from here on, so that the answer that is lost is that of the deletion.
            await registry.delete("b", await registry.put("b", b"", 0))
            proxy.answers_to_lose = 1
            with pytest.raises(RegistryUnavailableError):
                await registry.delete("a", second)
            assert await registry.get("a") is None
            # The same writes by somebody else, or once more, are not taken for these.
            with pytest.raises(StreamSequenceError, match="3 is next"):
                await registry.append("s", 2, b"2")
            assert proxy.connections >= 3
            await registry.close()

    asyncio.run(asyncio.wait_for(program(), WAIT_S))


def test_a_redis_without_memory_is_unavailable_and_keeps_what_it_has(server):
    async def scenario(registry):
        revision = await registry.put("a", b"1", 0)
        assert server.command("CONFIG", "SET", "maxmemory", "1") == b"+OK\r\n"
        with pytest.raises(RegistryUnavailableError, match="maxmemory"):
            await registry.append("s", 1, b"x" * 1000)
        assert (await registry.get("a")).revision == revision
        assert server.command("CONFIG", "SET", "maxmemory", "0") == b"+OK\r\n"
        await registry.append("s", 1, b"x" * 1000)

    run(server.url, scenario)


def test_fleets_in_one_redis_do_not_see_each_other(server):
    async def write(registry):
        await registry.put("a", b"", 0)
        await registry.announce("a", b"", 60.0)
        await registry.append("a", 3, b"")
        assert await registry.acquire("a", "me", 60.0)

    async def look(registry):
        assert await registry.entries("") == {}
        assert await registry.announced("") == {}
        assert await registry.bounds("a") == StreamBounds(0, 0)
        assert await registry.holder("a") is None

    run(f"{server.url}?fleet=one", write)
    run(f"{server.url}?fleet=two", look)
    run(server.url, look)


def test_settings_with_which_redis_can_lose_data_are_told_once(tmp_path, caplog):
    async def scenario(registry):
        await registry.get("a")
        await registry.get("a")

    settings = {"appendonly": "no", "maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"}
    with redis_server(tmp_path, settings=settings) as server, caplog.at_level(logging.WARNING):
        run(server.url, scenario)
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "appendonly is off: a restart of Redis loses rollouts and deltas; set appendonly to yes",
        "maxmemory-policy is allkeys-lru: Redis may drop deltas and plans; set it to noeviction",
    ]


# Passwords and TLS


def test_the_password_opens_redis_and_a_wrong_one_is_unavailable_and_neither_is_told(tmp_path, caplog):
    async def scenario(registry):
        await registry.put("a", b"1", 0)
        assert "geheim" in registry.url
        assert "geheim" not in registry.name
        assert "geheim" not in repr(registry)

    async def refused(registry):
        with pytest.raises(RegistryUnavailableError) as failure:
            await registry.get("a")
        assert "falsch" not in str(failure.value)
        assert "falsch" not in repr(failure.value.__cause__)

    with redis_server(tmp_path, settings={"requirepass": "geheim"}) as server, caplog.at_level(logging.DEBUG):
        run(server.url, scenario)
        run(server.url.replace("geheim", "falsch"), refused)
        run(server.url.replace(":geheim@", ""), refused)
        (tmp_path / "password").write_text("geheim\n")

        async def by_file(registry):
            assert (await registry.get("a")).value == b"1"

        run(server.url.replace(":geheim@", "") + f"?password_file={tmp_path}/password", by_file)
    assert "geheim" not in caplog.text
    assert "falsch" not in caplog.text


@needs_openssl
def test_rediss_trusts_the_certificate_that_is_named_and_no_other(tmp_path):
    ca, other = Authority(tmp_path), Authority(tmp_path, "other")
    redis = ca.issue("redis")
    tls = server_context(TlsConfig(cert=redis.cert, key=redis.key))

    async def program(server):
        async with redis_proxy(server, tls) as proxy:
            place = f"rediss://:geheim@127.0.0.1:{proxy.port}/0"
            registry = RedisRegistry(f"{place}?ssl_ca_certs={ca.cert}", **QUICK)
            revision = await registry.put("a", b"1", 0)
            assert (await registry.get("a")).revision == revision
            await registry.close()
            for wrong in (f"{place}?ssl_ca_certs={other.cert}", place):
                registry = RedisRegistry(wrong, **QUICK)
                with pytest.raises(RegistryUnavailableError, match="certificate"):
                    await registry.get("a")
                await registry.close()
            plain = RedisRegistry(place.replace("rediss", "redis"), **QUICK)
            with pytest.raises(RegistryUnavailableError):
                await plain.get("a")
            await plain.close()

    with redis_server(tmp_path, settings={"requirepass": "geheim"}) as server:
        asyncio.run(asyncio.wait_for(program(server), WAIT_S))

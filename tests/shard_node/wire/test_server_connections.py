"""Connections to a node: broken and stalled streams, peers that do not read, addresses, draining."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.errors import ConfigError, OverloadedError
from shard_node.errors import NodeUnavailableError, WireError
from shard_node.wire.address import Address
from shard_node.wire.frame import FrameType, pack_header
from shard_node.wire.messages import decode_answer, decode_error, encode_pool
from shard_node.wire.requests import ServerLimits
from shard_node.wire.server import NodeServer
from shardrank_testing.nodes import (
    MODEL,
    NEVER_S,
    SLOW_ROW,
    VERSION,
    Gate,
    RawPeer,
    connected,
    expected_films,
    film_bags,
    in_every_place,
    pool_films,
    raw_peer,
    serving,
    small_node,
    until,
)

REQUEST = b"".join(encode_pool(1, 0, MODEL, VERSION, film_bags([7])))


async def assert_serves(peer: RawPeer) -> None:
    peer.write(REQUEST)
    np.testing.assert_array_equal(decode_answer(await peer.read_frame()).sums[1], expected_films([7]))


@in_every_place
@pytest.mark.parametrize("sent", [1, 24, len(REQUEST) - 1])
async def test_a_half_sent_frame_is_closed_and_an_idle_connection_not(place, sent, tmp_path):
    async with place.peer(tmp_path, None, ServerLimits(receive_timeout_ms=30)) as (server, idle):
        await assert_serves(idle)
        async with raw_peer(server.addresses[0]) as stalled:
            await assert_serves(stalled)
            stalled.write(REQUEST[:sent])
            error = await stalled.read_frame()
            assert await stalled.read_end() == b""
        await assert_serves(idle)
    assert error.header.request_id == (1 if sent >= 24 else 0)
    assert "not whole 30 ms after its first byte" in str(decode_error(error))


WRONG_VERSION = struct.pack("<4sHHQII", b"SHRK", 2, 1, 77, 4, 0) + b"body"
TOO_LARGE = pack_header(FrameType.POOL, 78, 2**32 - 1)


@pytest.mark.parametrize(
    ("sent", "request_id", "kind", "message"),
    [
        (b"GET / HTTP/1.1\r\nHost: node\r\n\r\n", 0, WireError, "magic is b'GET ', a frame begins with b'SHRK'"),
        (WRONG_VERSION, 77, WireError, "protocol version 2 is not spoken here, only 1"),
        (TOO_LARGE + b"x" * 100_000, 78, WireError, "frame has 4294967319 bytes, at most 67108864"),
    ],
)
async def test_a_broken_stream_gets_an_error_and_is_closed(place, sent, request_id, kind, message, tmp_path):
    """Requests before what is broken are answered."""

    async with place.peer(tmp_path) as (server, good):
        async with raw_peer(server.addresses[0]) as bad:
            bad.write(REQUEST * 3 + sent)
            assert [(await bad.read_frame()).header.frame_type for _ in range(3)] == [FrameType.POOLED] * 3
            frame = await bad.read_frame()
            assert await bad.read_end() == b""
        await assert_serves(good)
    error = decode_error(frame)
    assert frame.header.request_id == request_id
    assert type(error) is kind
    assert message in str(error)


async def test_a_peer_that_does_not_read_is_not_read_from(place, tmp_path):
    """And loses nothing."""
    unsent, answer_bytes, num_requests = 64 << 10, 16_000, 400
    bags = film_bags([7], *[[]] * (answer_bytes // 32))

    limits = ServerLimits(max_unsent_bytes=unsent, max_inline_bytes=1 << 20)
    async with place.peer(tmp_path, None, limits) as (server, peer):
        for number in range(num_requests):
            peer.write(*encode_pool(number + 1, 0, MODEL, VERSION, bags))
        await until(lambda: any(connection.is_reading_held for connection in server.open))
        (connection,) = server.open
        unsent_bytes = connection._transport.get_write_buffer_size()
        ids = [(await peer.read_frame()).header.request_id for _ in range(num_requests)]
    assert unsent < unsent_bytes < unsent + 2 * answer_bytes
    assert ids == list(range(1, num_requests + 1))


async def test_a_peer_that_never_reads_is_cut_off(place, tmp_path):
    limits = ServerLimits(max_unsent_bytes=1024, max_inline_bytes=1 << 20, send_timeout_ms=30)
    request = b"".join(encode_pool(1, 0, MODEL, VERSION, film_bags(*[[]] * 5000)))

    async with serving(place.address(tmp_path), None, limits) as server:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(server.addresses[0].path)
            peer.setblocking(False)
            # Ends with an error when the server hangs up, having read only some of it.
            with pytest.raises((BrokenPipeError, ConnectionResetError)):
                await loop.sock_sendall(peer, request * 200)
        await until(lambda: not server.num_connections)


async def test_half_sent_frames_leave_room_for_whole_ones(place, tmp_path):
    """Of 20 connections that send a part of a long frame each, those beyond the budget are refused and freed."""
    limits = ServerLimits(max_frame_bytes=1 << 20, max_buffered_bytes=4 << 20)
    half_sent = pack_header(FrameType.POOL, 5, 900_000) + bytes(600_000)
    async with place.peer(tmp_path, None, limits) as (server, good), contextlib.AsyncExitStack() as stack:
        greedy = [await stack.enter_async_context(raw_peer(server.addresses[0])) for _ in range(20)]
        for peer in greedy:
            peer.write(half_sent)
            await assert_serves(good)
        reading = [asyncio.create_task(peer.read_frame()) for peer in greedy]
        done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
        assert 0 < server.buffers.buffered <= 4 << 20
        await assert_serves(good)
        for task in reading:
            task.cancel()
    refused = decode_error(done.pop().result())
    assert type(refused) is OverloadedError
    assert "max_buffered_bytes = 4194304" in str(refused)
    assert server.buffers.buffered == 0


async def test_a_small_request_is_answered_though_bytes_are_scarce(place, tmp_path):
    async with place.peer(tmp_path) as (server, peer):
        server.buffers.max_bytes = 10
        await assert_serves(peer)


async def test_answers_that_are_not_read_are_counted_until_they_are(place, tmp_path):
    bags = film_bags([7], *[[]] * 20_000)
    async with place.peer(tmp_path, None, ServerLimits(max_inline_bytes=1 << 20)) as (server, peer):
        for number in range(8):
            peer.write(*encode_pool(number + 1, 0, MODEL, VERSION, bags))
        await until(lambda: server.buffers.buffered > 1 << 20)
        for _ in range(8):
            await peer.read_frame()
        await until(lambda: server.buffers.buffered == 0)


async def test_a_connection_that_asks_nothing_is_asked_to_go(place, tmp_path):
    """And cut off if it stays; one that goes on asking is kept."""
    async with place.peer(tmp_path, None, ServerLimits(idle_timeout_ms=600)) as (server, busy):
        async with raw_peer(server.addresses[0]) as idle:
            asking = asyncio.create_task(keep_asking(busy, enough := asyncio.Event()))
            assert (await idle.read_frame()).header.frame_type == FrameType.GOAWAY
            await idle.read_end()
            enough.set()
            await asking
        await assert_serves(busy)


async def keep_asking(peer: RawPeer, enough: asyncio.Event) -> None:
    while not enough.is_set():
        await asyncio.sleep(0.03)
        await assert_serves(peer)


async def test_one_connection_too_many_is_refused(place, tmp_path):
    async with place.peer(tmp_path, None, ServerLimits(max_connections=1)) as (server, first):
        await assert_serves(first)
        async with raw_peer(server.addresses[0]) as second:
            frame = await second.read_frame()
            assert await second.read_end() == b""
        async with connected(server.addresses[0]) as client:
            with pytest.raises(NodeUnavailableError, match="at most 1 connections are taken"):
                await client.info()
        await assert_serves(first)
    assert type(decode_error(frame)) is OverloadedError


async def test_a_stale_socket_is_replaced_and_a_live_one_kept(place, tmp_path):
    address = place.address(tmp_path)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(address.path)
    async with place.client(tmp_path) as (_, client):
        assert stat.S_IMODE(os.stat(address.path).st_mode) == 0o600
        with pytest.raises(ConfigError, match="another process listens there"):
            await NodeServer(small_node()).start([address])
        assert await client.info() == small_node().info()
    assert not list(tmp_path.iterdir())
    (tmp_path / "node.sock").write_text("precious")
    with pytest.raises(ConfigError, match="a file that is not a socket"):
        await NodeServer(small_node()).start([address])
    assert (tmp_path / "node.sock").read_text() == "precious"


async def test_a_server_has_all_its_addresses_or_none(place, tmp_path):
    address = place.address(tmp_path)
    server = NodeServer(small_node())
    await server.start([address, Address.parse("127.0.0.1:0")])
    for bound in server.addresses:
        async with connected(bound) as client:
            assert await client.info() == small_node().info()
    elsewhere = Address(path=str(tmp_path / "other"))
    with pytest.raises(ConfigError, match=f"can't listen on {server.addresses[1]}"):
        await NodeServer(small_node()).start([elsewhere, server.addresses[1]])
    await server.close()
    await server.close()
    assert not list(tmp_path.iterdir())


@in_every_place
async def test_draining_answers_what_is_in_flight_and_refuses_new(place, tmp_path):
    gate = Gate()
    async with place.client(tmp_path, gate.node, ServerLimits(max_inline_bytes=0)) as (server, client):
        in_flight = asyncio.create_task(pool_films(client, [SLOW_ROW]))
        await gate.wait_entered()
        draining = asyncio.create_task(server.drain(NEVER_S))
        await until(lambda: not client.is_available)
        with pytest.raises(NodeUnavailableError, match="draining"):
            await pool_films(client, [1])
        assert not draining.done()
        gate.opened.set()
        answer, complete = await in_flight, await draining
    assert complete
    np.testing.assert_array_equal(answer, expected_films([SLOW_ROW]))


async def test_requests_that_cross_goaway_are_answered(place, tmp_path):
    """A peer that ignores it is cut off at the end."""

    async with place.peer(tmp_path) as (server, peer):
        await assert_serves(peer)
        draining = asyncio.create_task(server.drain(0.1))
        goaway = await peer.read_frame()
        peer.write(*encode_pool(2, 0, MODEL, VERSION, film_bags([1])))
        crossed = await peer.read_frame()
        assert not await draining
        await server.close()
        assert await peer.read_end() == b""
        goaway, crossed = goaway.header, crossed.header
    assert goaway.frame_type == FrameType.GOAWAY
    assert (crossed.frame_type, crossed.request_id) == (FrameType.POOLED, 2)


async def test_a_drained_address_is_free_for_a_successor(place, tmp_path):
    async with place.client(tmp_path) as (first, client):
        await client.info()
        assert await first.drain(NEVER_S)
        async with serving(first.addresses[0]) as successor:
            await until(lambda: client.is_available)
            assert await client.info() == small_node().info()
            await client.close()
            assert await successor.drain(NEVER_S)  # it has no connection


@pytest.mark.parametrize(
    ("text", "expected", "normal"),
    [
        ("tcp://shard-0.local:7000", Address("shard-0.local", 7000), "tcp://shard-0.local:7000"),
        ("10.0.0.3:0", Address("10.0.0.3", 0), "tcp://10.0.0.3:0"),
        ("tcp://[fe80::1%eth0]:65535", Address("fe80::1%eth0", 65535), "tcp://[fe80::1%eth0]:65535"),
        ("[::1]:80", Address("::1", 80), "tcp://[::1]:80"),
        ("unix:/run/node.sock", Address(path="/run/node.sock"), "unix:/run/node.sock"),
        ("unix:///run/a b/node", Address(path="/run/a b/node"), "unix:/run/a b/node"),
    ],
)
def test_an_address_is_parsed_and_written_back(text, expected, normal):
    address = Address.parse(text)
    assert address == expected
    assert str(address) == normal
    assert Address.parse(str(address)) == address
    assert address.is_unix == bool(expected.path)


WRONG_ADDRESSES = [
    *["node", "node:", ":7000", "node:port", "node:65536", "node:-1", "::1:80", "http://node:80", "tcp://node:80/path"],
    *["tcp://user@node:80", "unix:", "unix:relative", "unix://host/path", "unix:/", "unix:/folder/", "unix:////run/x"],
    *("", "no de:80", "unix:/" + "x" * 107, "unix:/" + "ü" * 54),
]


@pytest.mark.parametrize("text", WRONG_ADDRESSES)
def test_a_wrong_address_is_refused_by_its_text(text):
    with pytest.raises(ConfigError) as caught:
        Address.parse(text)
    assert repr(text) in str(caught.value)


@given(st.text(max_size=30))
def test_any_text_is_an_address_or_an_address_error(text):
    try:
        address = Address.parse(text)
    except ConfigError:
        return
    assert Address.parse(str(address)) == address

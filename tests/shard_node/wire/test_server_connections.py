from __future__ import annotations

import asyncio
import os
import socket
import stat
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shard_node.errors import AddressError, FrameTooLargeError, NodeOverloadedError, NodeUnavailableError, WireError
from shard_node.wire.address import Address
from shard_node.wire.frame import FrameType, pack_header
from shard_node.wire.messages import decode_answer, decode_error, encode_pool
from shard_node.wire.server import NodeServer, ServerLimits
from shardrank_testing.nodes import (
    EVERY_PLACE,
    MODEL,
    VERSION,
    RawPeer,
    connected,
    film_bags,
    in_every_place,
    on_every_loop,
    reference_engine,
    serving,
    small_node,
    until,
)

REQUEST = b"".join(encode_pool(1, 0, MODEL, VERSION, film_bags([7])))


async def assert_serves(peer: RawPeer) -> None:
    peer.write(REQUEST)
    (block,) = decode_answer(await peer.read_frame()).sums[1:]
    np.testing.assert_array_equal(block, reference_engine().pool(film_bags([7]))[1])


@in_every_place
@pytest.mark.parametrize("sent", [1, 23, 24, len(REQUEST) - 1])
def test_a_half_sent_frame_is_closed_in_time_and_an_idle_connection_is_not(place, sent, tmp_path):
    limits = ServerLimits(receive_timeout_ms=30)

    async def main():
        async with serving(place.address(tmp_path), None, limits) as server:
            idle = await RawPeer.connect(server.addresses[0])
            await assert_serves(idle)
            stalled = await RawPeer.connect(server.addresses[0])
            await assert_serves(stalled)
            stalled.write(REQUEST[:sent])
            error = await stalled.read_frame()
            assert await stalled.read_end() == b""
            await stalled.close()
            await assert_serves(idle)
            await idle.close()
            return error

    error = place.run(main())
    assert error.header.request_id == (1 if sent >= 24 else 0)
    assert "not whole 30 ms after its first byte" in str(decode_error(error))


WRONG_VERSION = struct.pack("<4sHHQII", b"SHRK", 2, 1, 77, 4, 0) + b"body"
TOO_LARGE = pack_header(FrameType.POOL, 78, 2**32 - 1)


@in_every_place
@pytest.mark.parametrize(
    ("sent", "request_id", "kind", "message"),
    [
        (b"GET / HTTP/1.1\r\nHost: node\r\n\r\n", 0, WireError, "magic is b'GET ', a frame begins with b'SHRK'"),
        (WRONG_VERSION, 77, WireError, "protocol version 2 is not spoken here, only 1"),
        (TOO_LARGE + b"x" * 100_000, 78, FrameTooLargeError, "frame has 4294967319 bytes, at most 67108864"),
    ],
)
def test_a_broken_stream_is_answered_with_an_error_and_closed(place, sent, request_id, kind, message, tmp_path):
    async def main():
        async with serving(place.address(tmp_path)) as server:
            good = await RawPeer.connect(server.addresses[0])
            bad = await RawPeer.connect(server.addresses[0])
            bad.write(sent)
            frame = await bad.read_frame()
            assert await bad.read_end() == b""
            await bad.close()
            await assert_serves(good)
            await good.close()
            return frame

    frame = place.run(main())
    error = decode_error(frame)
    assert frame.header.request_id == request_id
    assert type(error) is kind
    assert message in str(error)


@on_every_loop
def test_requests_before_the_broken_one_are_answered(place, tmp_path):
    async def main():
        async with serving(place.address(tmp_path)) as server:
            peer = await RawPeer.connect(server.addresses[0])
            peer.write(REQUEST * 3 + b"garbage that is no frame at all")
            kinds = [(await peer.read_frame()).header.frame_type for _ in range(4)]
            assert await peer.read_end() == b""
            await peer.close()
            return kinds

    assert place.run(main()) == [FrameType.POOLED] * 3 + [FrameType.ERROR]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(junk=st.one_of(st.binary(max_size=300), st.binary(max_size=200).map(lambda tail: b"SHRK\1\0\1\0" + tail)))
def test_arbitrary_bytes_never_disturb_the_server(junk, tmp_path, caplog):
    async def main():
        async with serving(Address(path=str(tmp_path / "node")), None, ServerLimits(receive_timeout_ms=20)) as server:
            peer = await RawPeer.connect(server.addresses[0])
            peer.write(junk)
            peer.writer.write_eof()
            await peer.read_end()
            await peer.close()
            other = await RawPeer.connect(server.addresses[0])
            await assert_serves(other)
            await other.close()

    caplog.clear()
    EVERY_PLACE[3].run(main())
    assert [record for record in caplog.records if record.exc_info] == []


@in_every_place
def test_a_peer_that_does_not_read_is_not_read_from_and_loses_nothing(place, tmp_path):
    unsent, answer_bytes, num_requests = 64 << 10, 16_000, 1000
    limits = ServerLimits(max_unsent_bytes=unsent, max_inline_bytes=1 << 20)
    bags = film_bags([7], *[[]] * (answer_bytes // 32))

    async def main():
        async with serving(place.address(tmp_path), None, limits) as server:
            peer = await RawPeer.connect(server.addresses[0])
            for number in range(num_requests):
                peer.write(*encode_pool(number + 1, 0, MODEL, VERSION, bags))
            await until(lambda: any(connection.is_reading_held for connection in server._connections))
            (connection,) = server._connections
            held = connection._transport.get_write_buffer_size()
            ids = [(await peer.read_frame()).header.request_id for _ in range(num_requests)]
            await peer.close()
            return held, ids

    held, ids = place.run(main())
    assert unsent < held < unsent + 2 * answer_bytes
    assert ids == list(range(1, num_requests + 1))


@on_every_loop
def test_a_peer_that_never_reads_is_cut_off(place, tmp_path):
    limits = ServerLimits(max_unsent_bytes=1024, max_inline_bytes=1 << 20, send_timeout_ms=30)
    request = b"".join(encode_pool(1, 0, MODEL, VERSION, film_bags(*[[]] * 5000)))

    async def main():
        async with serving(place.address(tmp_path), None, limits) as server:
            loop = asyncio.get_running_loop()
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect(server.addresses[0].path)
                peer.setblocking(False)
                # Ends with an error when the server hangs up, having read only some of it.
                with pytest.raises((BrokenPipeError, ConnectionResetError)):
                    await loop.sock_sendall(peer, request * 200)
            await until(lambda: not server.num_connections)

    place.run(main())


@in_every_place
def test_one_connection_too_many_is_told_so_and_closed(place, tmp_path):
    async def main():
        async with serving(place.address(tmp_path), None, ServerLimits(max_connections=1)) as server:
            first = await RawPeer.connect(server.addresses[0])
            await assert_serves(first)
            second = await RawPeer.connect(server.addresses[0])
            frame = await second.read_frame()
            assert await second.read_end() == b""
            await second.close()
            async with connected(server.addresses[0]) as client:
                with pytest.raises(NodeUnavailableError, match="at most 1 connections are taken"):
                    await client.info()
            await assert_serves(first)
            await first.close()
            return frame

    error = decode_error(place.run(main()))
    assert type(error) is NodeOverloadedError


@on_every_loop
def test_a_unix_socket_is_private_and_is_removed_at_the_end(place, tmp_path):
    address = place.address(tmp_path)

    async def main():
        async with serving(address):
            assert stat.S_IMODE(os.stat(address.path).st_mode) == 0o600

    place.run(main())
    assert not os.path.exists(address.path)


@on_every_loop
def test_a_socket_that_a_dead_process_left_is_replaced(place, tmp_path):
    address = place.address(tmp_path)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(address.path)

    async def main():
        async with serving(address), connected(address) as client:
            return await client.info()

    assert place.run(main()) == small_node().info()


@on_every_loop
def test_a_socket_on_which_somebody_listens_is_left_alone(place, tmp_path):
    address = place.address(tmp_path)

    async def main():
        async with serving(address), connected(address) as client:
            with pytest.raises(AddressError, match="another process listens there"):
                await NodeServer(small_node()).start([address])
            return await client.info()

    assert place.run(main()) == small_node().info()


@on_every_loop
def test_a_file_that_is_no_socket_is_not_overwritten(place, tmp_path):
    address = place.address(tmp_path)
    (tmp_path / "node.sock").write_text("precious")

    async def main():
        with pytest.raises(AddressError, match="a file that is not a socket"):
            await NodeServer(small_node()).start([address])

    place.run(main())
    assert (tmp_path / "node.sock").read_text() == "precious"


@on_every_loop
def test_a_server_that_can_not_have_all_its_addresses_takes_none(place, tmp_path):
    address = place.address(tmp_path)

    async def main():
        async with serving(Address.parse("127.0.0.1:0")) as other:
            with pytest.raises(AddressError, match=f"can't listen on {other.addresses[0]}"):
                await NodeServer(small_node()).start([address, other.addresses[0]])

    place.run(main())
    assert not os.path.exists(address.path)


@on_every_loop
def test_one_server_listens_on_tcp_and_unix_at_once(place, tmp_path):
    async def main():
        server = NodeServer(small_node())
        await server.start([place.address(tmp_path), Address.parse("127.0.0.1:0")])
        infos = []
        for address in server.addresses:
            async with connected(address) as client:
                infos.append(await client.info())
        await server.close()
        await server.close()
        return infos

    assert place.run(main()) == [small_node().info()] * 2

"""Stalled, half-sent and oversized requests, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
import struct
from collections.abc import AsyncIterator, Callable

import pytest

from serving.limits import RequestLimits
from shardrank_testing.serving_api import MODEL, Api, Gate, api_request, api_service, gated_service, run, running_api

LIMITS = RequestLimits(
    receive_timeout_s=0.2, max_connections=3, max_header_bytes=4096, max_body_bytes=300_000, keep_alive_s=30
)
PATH = f"/v1/models/{MODEL}:rank"


@pytest.fixture(scope="module")
def service(api_model):
    with api_service(api_model, LIMITS) as service:
        yield service


@contextlib.asynccontextmanager
async def connection(api: Api) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(api.listening.host, api.listening.http_port)
    try:
        yield reader, writer
    finally:
        writer.close()


def post(body: bytes, headers: str = "", length: int | None = None) -> bytes:
    count = len(body) if length is None else length
    return f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {count}\r\n{headers}\r\n".encode() + body


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], dict]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    body = await reader.readexactly(int(headers["content-length"]))
    return int(head[0].split()[1]), headers, json.loads(body)


VALID = json.dumps(api_request(1)).encode()


@pytest.mark.parametrize(
    "sent",
    [
        b"P",
        b"POST / HTTP/1.1\r\nhost:",
        post(b"", length=10),
        post(VALID[:100], length=len(VALID)),
        f"POST {PATH} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab".encode(),
    ],
    ids=["one byte", "half a header", "no body", "half a body", "half a chunk"],
)
def test_a_half_sent_request_is_answered_408_and_closed(service, sent):
    async def main() -> None:
        async with running_api(service) as api, connection(api) as (reader, writer):
            writer.write(sent)
            status, headers, answer = await read_answer(reader)
            assert (status, answer["error"]["kind"]) == (408, "request_timeout")
            assert "receive_timeout_s = 0.2" in answer["error"]["message"]
            assert headers["connection"] == "close"
            assert await reader.read() == b""
        assert service.in_flight == 0

    run(main())


def test_a_connection_without_a_request_is_closed(service):
    async def main() -> None:
        async with running_api(service) as api, connection(api) as (reader, _):
            assert await reader.read() == b""

    run(main())


def test_an_idle_connection_is_kept_for_the_next_request_which_then_has_its_time(service):
    async def main() -> None:
        async with running_api(service) as api, connection(api) as (reader, writer):
            for _ in range(2):
                writer.write(post(VALID))
                assert (await read_answer(reader))[0] == 200
                # Longer than receive_timeout_s, shorter than keep_alive_s.
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(reader.read(1), 0.4)
            writer.write(post(VALID[:-1], length=len(VALID)))
            assert (await read_answer(reader))[0] == 408

    run(main())


def test_a_request_sent_ahead_in_half_does_not_cut_the_answer_before_it(api_model):
    gate = Gate()

    async def main() -> None:
        with gated_service(api_model, gate, LIMITS) as service:
            async with running_api(service) as api, connection(api) as (reader, writer):
                writer.write(post(VALID) + b"POST /v1")
                await gate.wait_until_busy()
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(reader.read(1), 0.5)
                gate.open.set()
                assert (await read_answer(reader))[0] == 200
                assert (await read_answer(reader))[0] == 408

    run(main())


@pytest.mark.parametrize("chunked", [False, True])
def test_a_long_body_is_refused_before_it_is_read_whole(service, chunked):
    async def main() -> None:
        async with running_api(service) as api, connection(api) as (reader, writer):
            if chunked:
                writer.write(f"POST {PATH} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode())
                writer.write(b"4000\r\n" + b" " * 0x4000 + b"\r\n")
                for _ in range(20):
                    writer.write(b"4000\r\n" + b" " * 0x4000 + b"\r\n")
            else:
                writer.write(post(b"{", length=10**12))
            status, _, answer = await read_answer(reader)
            assert (status, answer["error"]["kind"]) == (413, "body_too_large")
            assert "max_body_bytes = 300000" in answer["error"]["message"]
            # The client never sends the rest; the connection does not wait for it for long.
            assert await reader.read() == b""

    run(main())


@pytest.mark.parametrize("pieces", [1, 20])
def test_long_headers_are_refused(service, pieces):
    async def main() -> None:
        async with running_api(service) as api, connection(api) as (reader, writer):
            head = "".join(f"x-{number}: {'a' * (8000 // pieces)}\r\n" for number in range(pieces))
            writer.write(post(VALID, head))
            status, _, answer = await read_answer(reader)
            assert (status, answer["error"]["kind"]) == (431, "header_too_large")
            assert "max_header_bytes = 4096" in answer["error"]["message"]

    run(main())


def test_when_all_places_are_taken_the_connection_that_was_idle_for_longest_makes_room(service):
    async def main() -> None:
        async with running_api(service) as api, contextlib.AsyncExitStack() as stack:
            peers = [await stack.enter_async_context(connection(api)) for _ in range(3)]
            for reader, writer in peers:
                writer.write(post(VALID))
                assert (await read_answer(reader))[0] == 200
            reader, writer = await stack.enter_async_context(connection(api))
            writer.write(post(VALID))
            assert (await read_answer(reader))[0] == 200
            assert await peers[0][0].read() == b""
            for reader, writer in peers[1:]:
                writer.write(post(VALID))
                assert (await read_answer(reader))[0] == 200

    run(main())


def test_one_connection_too_many_is_refused_if_none_is_idle_and_the_others_go_on(api_model):
    gate = Gate()

    async def main() -> None:
        with gated_service(api_model, gate, LIMITS) as service:
            async with running_api(service) as api, contextlib.AsyncExitStack() as stack:
                peers = [await stack.enter_async_context(connection(api)) for _ in range(3)]
                for _, writer in peers:
                    writer.write(post(VALID))
                await until(lambda: service.in_flight == 3)
                extra, _ = await stack.enter_async_context(connection(api))
                status, headers, answer = await read_answer(extra)
                assert (status, answer["error"]["kind"], headers["retry-after"]) == (503, "overloaded", "1")
                assert "max_connections = 3" in answer["error"]["message"]
                gate.open.set()
                for reader, _ in peers:
                    assert (await read_answer(reader))[0] == 200

    run(main())


def test_what_is_not_http_is_refused_in_the_form_of_every_error(service):
    async def main() -> None:
        async with running_api(service) as api, connection(api) as (reader, writer):
            writer.write(b"\x16\x03\x01 hello\r\n\r\n")
            status, _, answer = await read_answer(reader)
            assert (status, answer["error"]["kind"]) == (400, "malformed")
            assert await reader.read() == b""

    run(main())


def test_a_client_that_leaves_takes_its_waiting_request_with_it(api_model):
    gate = Gate()

    async def main() -> None:
        with gated_service(api_model, gate) as service:
            async with running_api(service) as api, connection(api) as (_, busy):
                busy.write(post(VALID))
                await gate.wait_until_busy()
                async with connection(api) as (_, writer):
                    writer.write(post(VALID))
                    await until(lambda: service.generations.all()[0].payload.num_waiting == 1)
                    # Closed as a whole. The end of sending alone is not the end of listening, and looks the same
                    # as an orderly close.
                    raw = writer.get_extra_info("socket")
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                await until(lambda: service.in_flight == 1)
                gate.open.set()
            assert 'shardrank_errors_total{api="http",kind="client_gone",method="rank"}' in metrics_of(service)
            assert 'shardrank_batch_requests_sum{model="films"} 1.0' in metrics_of(service)

    run(main())


async def until(condition: Callable[[], bool]) -> None:
    """Another party's state, which tells nobody when it changes."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def metrics_of(service) -> str:
    return service.metrics.render().decode()


def test_a_peer_that_does_not_take_its_answer_is_dropped(api_model):
    limits = RequestLimits(receive_timeout_s=0.2, max_lookup_floats=2**24, max_bags_per_feature=2**20)
    body = json.dumps({"sparse": {"film": list(range(700)) * 300}}).encode()
    head = f"POST /v1/models/{MODEL}:lookup HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()

    async def main() -> None:
        with api_service(api_model, limits) as service:
            async with running_api(service) as api:
                with socket.create_connection((api.listening.host, api.listening.http_port)) as peer:
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                    await asyncio.to_thread(peer.sendall, head + body)

                    def reset_arrives() -> bool:
                        # Reads nothing of the answer: only the end of the connection makes poll report an error.
                        poller = select.poll()
                        poller.register(peer, 0)
                        return bool(poller.poll(20_000))

                    assert await asyncio.to_thread(reset_arrives)

    run(main())

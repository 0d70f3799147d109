"""Bodies in pieces, on real sockets: whatever the pieces, the answers are the same."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct

import pytest

from serving.limits import RequestLimits
from shardrank_testing.serving_api import MODEL, Gate, api_request, api_service, gated_service, run, running_api

PATH = f"/v1/models/{MODEL}:rank"
BODY = json.dumps(api_request(1)).encode()
LONG = BODY + b" " * 150_000


def post(body: bytes, headers: str = "", length: int | None = None, path: str = PATH, version: str = "1.1") -> bytes:
    count = len(body) if length is None else length
    return f"POST {path} HTTP/{version}\r\nhost: x\r\ncontent-length: {count}\r\n{headers}\r\n".encode() + body


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    return int(head[0].split()[1]), headers, await reader.readexactly(int(headers.get("content-length", 0)))


async def until(condition) -> None:
    """Another party's state, which tells nobody when it changes."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def test_requests_in_any_pieces_are_answered_in_turn(api_model):
    chunked = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    chunked += b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (LONG[:70_000], LONG[70_000:])) + b"0\r\n\r\n"
    sent = post(LONG) + post(BODY) + chunked + post(b"") + post(LONG) + post(b"{" + LONG) + post(BODY)
    statuses = [200, 200, 200, 400, 200, 400, 200]
    rng = random.Random(7)

    async def main() -> None:
        with api_service(api_model) as service:
            async with running_api(service) as api:
                for longest in (len(sent), 1000, 30_000, 100_000, 300_000):
                    reader, writer = await asyncio.open_connection(api.listening.host, api.listening.http_port)
                    at = 0
                    while at < len(sent):
                        size = rng.randint(1, longest)
                        writer.write(sent[at : at + size])
                        await writer.drain()
                        at += size
                        # Lets the server read what is here, as a piece of its own.
                        await asyncio.sleep(0)
                    answers = [await answer_of(reader) for _ in statuses]
                    assert [status for status, _, _ in answers] == statuses
                    assert len({body for status, _, body in answers if status == 200}) == 1
                    writer.close()
            assert service.in_flight == 0

    run(main())


def test_requests_of_the_application_and_direct_ones_are_answered_in_turn(api_model):
    def get(path: str) -> bytes:
        return f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode()

    escaped = post(LONG, path=PATH.replace(":rank", ":ran%6B"))
    sent = [get("/healthz"), post(LONG), get("/v9"), escaped, post(BODY), get("/healthz"), get("/readyz")]
    orders = [random.Random(seed).sample(range(len(sent)), len(sent)) for seed in range(6)]
    expected = [200, 200, 404, 200, 200, 200, 200]

    async def main() -> None:
        with api_service(api_model) as service:
            async with running_api(service) as api:
                reader, writer = await asyncio.open_connection(api.listening.host, api.listening.http_port)
                for order in orders:
                    writer.write(b"".join(sent[number] for number in order))
                    answers = {number: await answer_of(reader) for number in order}
                    assert [answers[number][0] for number in range(len(sent))] == expected
                    assert answers[1][2] == answers[3][2] == answers[4][2]
                writer.close()

    run(main())


def test_a_client_that_leaves_within_a_long_body_leaves_nothing_behind(api_model):
    async def main() -> None:
        with api_service(api_model) as service:
            async with running_api(service) as api:
                for is_reset in (False, True):
                    _, writer = await asyncio.open_connection(api.listening.host, api.listening.http_port)
                    writer.write(post(LONG[:-1], length=len(LONG)))
                    await writer.drain()
                    await until(lambda: service.in_flight == 1)
                    if is_reset:
                        linger = struct.pack("ii", 1, 0)
                        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    writer.close()
                    await until(lambda: service.in_flight == 0)
            text = service.metrics.render().decode()
            assert 'shardrank_errors_total{api="http",kind="client_gone",method="rank"} 2.0' in text

    run(main())


def test_a_long_body_that_stalls_is_answered_408(api_model):
    async def main() -> None:
        with api_service(api_model, RequestLimits(receive_timeout_s=0.2)) as service:
            async with running_api(service) as api:
                reader, writer = await asyncio.open_connection(api.listening.host, api.listening.http_port)
                writer.write(post(LONG[:-1], length=len(LONG)))
                status, headers, body = await answer_of(reader)
                assert (status, headers["connection"]) == (408, "close")
                assert json.loads(body)["error"]["kind"] == "request_timeout"
                assert await reader.read() == b""
                writer.close()
            assert service.in_flight == 0

    run(main())


@pytest.mark.parametrize(
    "headers",
    [
        "transfer-encoding: chunked\r\n",
        f"content-length: {len(BODY)}\r\n",
        "x-request-id: a\x01b\r\n",
        "x-request-id: a\nset-cookie: b\r\n",
        "x-request-id: a\r\n b\r\n",
    ],
)
def test_a_body_of_two_lengths_and_a_header_that_could_split_an_answer_are_refused(api_model, headers):
    async def main() -> None:
        with api_service(api_model) as service:
            async with running_api(service) as api:
                reader, writer = await asyncio.open_connection(api.listening.host, api.listening.http_port)
                writer.write(post(BODY, headers))
                status, answered, body = await answer_of(reader)
                assert (status, answered["connection"]) == (400, "close")
                assert json.loads(body)["error"]["kind"] == "malformed"
                assert await reader.read() == b""
                writer.close()

    run(main())


def test_a_client_that_leaves_takes_all_its_requests_with_it_those_sent_ahead_too(api_model):
    gate = Gate()

    async def main() -> None:
        with gated_service(api_model, gate) as service:
            async with running_api(service) as api:
                address = api.listening.host, api.listening.http_port
                _, busy = await asyncio.open_connection(*address)
                busy.write(post(BODY))
                await gate.wait_until_busy()
                _, writer = await asyncio.open_connection(*address)
                writer.write(post(BODY) * 3)
                await until(lambda: service.in_flight == 2)
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                writer.close()
                await until(lambda: service.in_flight == 1)
                gate.open.set()
                busy.close()
            assert 'shardrank_batch_requests_sum{model="films"} 1.0' in service.metrics.render().decode()

    run(main())

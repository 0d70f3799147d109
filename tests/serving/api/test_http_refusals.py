"""Requests that go wrong after their headers: refused once, in their turn, and within bounds. On real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest

from serving.limits import RequestLimits
from shardrank_testing.serving_api import MODEL, Api, Gate, api_request, api_service, gated_service, run, running_api

LIMITS = RequestLimits(receive_timeout_s=0.5, max_header_bytes=4096, max_body_bytes=300_000)
# For what is not about time: a busy machine may take longer to read a request than half a second.
PATIENT = LIMITS.model_copy(update={"receive_timeout_s": 50.0})
DIRECT = f"/v1/models/{MODEL}:rank"
PATHS = pytest.mark.parametrize("path", [DIRECT, f"{DIRECT}?x=1"])
VALID = json.dumps(api_request(1)).encode()


def head(path: str, *headers: str) -> bytes:
    return "\r\n".join((f"POST {path} HTTP/1.1", "host: x", *headers, "\r\n")).encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@contextlib.asynccontextmanager
async def connection(api: Api) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(api.listening.host, api.listening.http_port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, dict]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines[1:] if line)
    return int(lines[0].split()[1]), json.loads(await reader.readexactly(int(headers["content-length"])))


@pytest.mark.parametrize("begun", [20, 20_000])
def test_a_body_that_stalls_ahead_of_its_turn_does_not_cut_the_answer_before_it(api_model, begun):
    gate = Gate()
    body = b" " * 40_000 + VALID

    async def main() -> None:
        with gated_service(api_model, gate, LIMITS) as service:
            async with running_api(service) as api, connection(api) as (reader, writer):
                length = f"content-length: {len(VALID)}"
                ahead = head(DIRECT, f"content-length: {len(body)}") + body[:begun]
                writer.write(head(DIRECT, length) + VALID + ahead)
                await gate.wait_until_busy()
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(reader.read(1), 3 * LIMITS.receive_timeout_s)
                # Its time begins with its turn.
                gate.open.set()
                assert (await answer_of(reader))[0] == 200
                assert (await answer_of(reader))[0] == 408
                assert await reader.read() == b""

    run(main())


@PATHS
@pytest.mark.parametrize("trailers", [b"x: y\r\n" * 10_000, b"y" * 60_000], ids=["many", "a long one"])
def test_headers_behind_a_body_are_bounded(api_model, path, trailers):
    async def main() -> None:
        with api_service(api_model, PATIENT) as service:
            async with running_api(service) as api, connection(api) as (reader, writer):
                writer.write(head(path, "transfer-encoding: chunked") + chunk(b"{") + b"0\r\nx: ")
                # The answer may be lost, as more is on its way when the connection ends.
                ended = asyncio.create_task(reader.read())
                with contextlib.suppress(ConnectionError):
                    while not ended.done():
                        writer.write(trailers)
                        await writer.drain()
                        await asyncio.sleep(0)
                    await ended
                metrics = (await api.http.get("/metrics")).text
                assert [line for line in metrics.splitlines() if "header_too_large" in line and line.endswith(" 1.0")]

    run(main())

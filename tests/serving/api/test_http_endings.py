"""How connections end: half-closed clients, garbage behind a request, and a server that stops. On real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import httpx
import pytest

from serving.limits import RequestLimits
from serving.server import ServerConfig, running_server
from shardrank_testing.serving_api import MODEL, Gate, api_request, api_service, gated_service, run, running_api

PATH = f"/v1/models/{MODEL}:rank"
BODY = json.dumps(api_request(1)).encode()
POST = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(BODY)}\r\n\r\n".encode() + BODY


async def answers_until_closed(reader: asyncio.StreamReader) -> list[tuple[int, bool, dict]]:
    """Status, whether it says `connection: close`, and the body of each answer that comes."""
    answers = []
    while head := await reader.readline():
        headers = {}
        while (line := await reader.readline()) != b"\r\n":
            name, value = line.decode().strip().lower().split(": ", 1)
            headers[name] = value
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        answers.append((int(head.split()[1]), headers.get("connection") == "close", body))
    return answers


@pytest.mark.parametrize("requests", [1, 3])
def test_a_client_that_has_ended_sending_gets_every_answer(api_model, requests):
    gate = Gate()

    async def main() -> None:
        with gated_service(api_model, gate) as service:
            async with running_api(service) as api:
                reader, writer = await asyncio.open_connection(api.listening.host, api.listening.http_port)
                writer.write(POST * requests)
                writer.write_eof()
                await gate.wait_until_busy()
                gate.open.set()
                answers = await answers_until_closed(reader)
                assert [status for status, _, _ in answers] == [200] * requests
                assert answers[-1][1]
                writer.close()

    run(main())


def test_while_a_server_stops_it_still_takes_requests_and_each_answer_ends_its_connection(api_model):
    async def main() -> None:
        with api_service(api_model) as service:
            config = ServerConfig(http_port=0, grpc_port=0, shutdown_delay_s=0.5, drain_timeout_s=5)
            server = running_server(service, config)
            listening = await server.__aenter__()
            url = f"http://127.0.0.1:{listening.http_port}"
            kept, kept_writer = await asyncio.open_connection("127.0.0.1", listening.http_port)
            fresh, fresh_writer = await asyncio.open_connection("127.0.0.1", listening.http_port)
            async with httpx.AsyncClient(base_url=url) as client:
                assert (await client.get("/readyz")).status_code == 200
                stopping = asyncio.create_task(server.__aexit__(None, None, None))
                await asyncio.sleep(0)
                kept_writer.write(POST)
                assert [answer[:2] for answer in await answers_until_closed(kept)] == [(200, True)]
                answer = await client.get("/readyz")
                assert (answer.status_code, answer.headers["connection"]) == (503, "close")
                assert (await client.post(PATH, content=BODY)).status_code == 200
                fresh_writer.write(POST)
                assert [answer[:2] for answer in await answers_until_closed(fresh)] == [(200, True)]
                await stopping
                with pytest.raises(httpx.ConnectError):
                    await client.get("/readyz")
            kept_writer.close()
            fresh_writer.close()

    run(main())


def test_what_has_connected_and_sent_when_a_server_stops_is_answered(api_model):
    async def main() -> None:
        with api_service(api_model) as service:
            config = ServerConfig(http_port=0, grpc_port=0, shutdown_delay_s=0, drain_timeout_s=5)
            async with running_server(service, config) as listening:
                peers = [socket.create_connection(("127.0.0.1", listening.http_port)) for _ in range(5)]
                for one in peers:
                    one.sendall(POST)
            for one in peers:
                reader, writer = await asyncio.open_connection(sock=one)
                assert [answer[:2] for answer in await answers_until_closed(reader)] == [(200, True)]
                writer.close()

    run(main())


def test_long_bodies_and_answers_are_the_same_as_short_ones_and_keep_no_lease(api_model):
    limits = RequestLimits(max_in_flight=100)
    padding = " " * 600_000

    async def main() -> None:
        with api_service(api_model, limits) as service:
            async with running_api(service) as api:
                short = (await api.http.post(PATH, content=BODY)).json()
                assert (await api.http.post(PATH, content=BODY + padding.encode())).json() == short
                wrong = json.dumps(api_request(1) | {"top_k": 0}) + padding
                answer = await api.http.post(PATH, content=wrong)
                assert (answer.status_code, answer.json()["error"]["field"]) == (400, "top_k")
                bags = [[number % 700] for number in range(4000)]
                answer = await api.http.post(f"/v1/models/{MODEL}:lookup", json={"sparse": {"film": bags}})
                rows = answer.json()["embeddings"]["film"]
                assert len(rows) == 4000
                assert rows[5] == rows[705]
                # Clients that leave while their bodies come, or just after.
                for number in range(10):
                    with contextlib.suppress(httpx.TimeoutException):
                        await api.http.post(PATH, content=BODY + padding.encode() * 5, timeout=0.001 * number)
            assert service.in_flight == 0
            assert [generation.leases for generation in service.generations.all()] == [0]

    run(main())

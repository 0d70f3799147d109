"""Requests in pieces, stalled, half-sent and oversized ones, and how connections end. On real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import select
import socket

import httpx
import pytest

from serving.config import ServeConfig
from serving.limits import RequestLimits
from serving.server import running_server
from shardrank_testing import http_wire
from shardrank_testing.http_wire import CHUNKED, HttpPeer, http_peer, post
from shardrank_testing.serving_api import MODEL, api_request, api_service, gated_api, served_api, until

LIMITS = RequestLimits(
    receive_timeout_s=0.2, max_connections=3, max_header_bytes=4096, max_body_bytes=300_000, keep_alive_s=30
)
PATH = f"/v1/models/{MODEL}:rank"
BODY = json.dumps(api_request(1)).encode()
LONG = BODY + b" " * 150_000
CHUNKED_HEAD = CHUNKED.format(path=PATH).encode()
RANK = post(BODY, path=PATH)


@pytest.fixture(scope="module")
def limits():
    return LIMITS


@pytest.mark.parametrize(
    "sent",
    [
        b"P",
        b"POST / HTTP/1.1\r\nhost:",
        post(b"", path=PATH, length=10),
        post(BODY[:100], path=PATH, length=len(BODY)),
        post(LONG[:-1], path=PATH, length=len(LONG)),
        CHUNKED_HEAD + b"5\r\nab",
    ],
    ids=["one byte", "half a header", "no body", "half a body", "most of a long body", "half a chunk"],
)
async def test_a_half_sent_request_is_answered_408_and_closed(api, sent):
    async with http_peer(api) as peer:
        peer.send(sent)
        response = await peer.response()
        assert (response.status, response.error["kind"]) == (408, "request_timeout")
        assert "receive_timeout_s = 0.2" in response.error["message"]
        assert response.headers["connection"] == "close"
        assert await peer.rest() == b""
    assert api.service.in_flight == 0


async def test_a_connection_without_a_request_is_closed(api):
    async with http_peer(api) as peer:
        assert await peer.rest() == b""


async def test_an_idle_connection_waits_for_the_next_request(api):
    async with http_peer(api) as peer:
        for _ in range(2):
            peer.send(RANK)
            assert (await peer.response()).status == 200
            # Longer than receive_timeout_s, shorter than keep_alive_s.
            await peer.assert_silent(0.4)
        peer.send(RANK[:-1])
        assert (await peer.response()).status == 408


@pytest.mark.parametrize("sent", [8, 200, 20_000])
async def test_what_stalls_ahead_of_its_turn_cuts_no_answer(api_model, sent):
    """The time of a request that is sent ahead begins with its turn."""
    async with gated_api(api_model, LIMITS) as api, http_peer(api) as peer:
        peer.send(RANK + post(LONG, path=PATH)[:sent])
        await api.gate.wait_until_busy()
        await peer.assert_silent(0.5)
        api.gate.open.set()
        assert [(await peer.response()).status for _ in range(2)] == [200, 408]
        assert await peer.rest() == b""


@pytest.mark.parametrize(
    "sent", [CHUNKED_HEAD + (b"4000\r\n" + b" " * 0x4000 + b"\r\n") * 21, post(b"{", path=PATH, length=10**12)]
)
async def test_a_long_body_is_refused_before_it_is_read_whole(api, sent):
    async with http_peer(api) as peer:
        peer.send(sent)
        response = await peer.response()
        assert (response.status, response.error["kind"]) == (413, "body_too_large")
        assert "max_body_bytes = 300000" in response.error["message"]
        # The client never sends the rest; the connection does not wait for it for long.
        assert await peer.rest() == b""


@pytest.mark.parametrize(
    ("sent", "status", "kind", "says"),
    [
        (post(BODY, f"x: {'a' * 8000}", path=PATH), 431, "header_too_large", "max_header_bytes = 4096"),
        (post(BODY, *["x: " + "a" * 400] * 20, path=PATH), 431, "header_too_large", "max_header_bytes = 4096"),
        (b"\x16\x03\x01 hello\r\n\r\n", 400, "malformed", ""),
    ],
    ids=["a long header", "many headers", "not HTTP"],
)
async def test_what_is_refused_by_its_head_has_the_form_of_errors(api, sent, status, kind, says):
    async with http_peer(api) as peer:
        peer.send(sent)
        response = await peer.response()
        assert (response.status, response.error["kind"]) == (status, kind)
        assert says in response.error["message"]
        assert await peer.rest() == b""


async def test_the_connection_that_was_idle_for_longest_makes_room(api):
    async with contextlib.AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(http_peer(api)) for _ in range(3)]
        for peer in peers:
            peer.send(RANK)
            assert (await peer.response()).status == 200
        peers.append(await stack.enter_async_context(http_peer(api)))
        peers[3].send(RANK)
        assert (await peers[3].response()).status == 200
        assert await peers[0].rest() == b""
        for peer in peers[1:3]:
            peer.send(RANK)
            assert (await peer.response()).status == 200


async def test_a_connection_too_many_is_refused_if_none_is_idle(api_model):
    async with gated_api(api_model, LIMITS) as api, contextlib.AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(http_peer(api)) for _ in range(3)]
        for peer in peers:
            peer.send(RANK)
        await until(lambda: api.service.in_flight == 3)
        extra = await stack.enter_async_context(http_peer(api))
        response = await extra.response()
        assert (response.status, response.error["kind"], response.headers["retry-after"]) == (503, "overloaded", "1")
        assert "max_connections = 3" in response.error["message"]
        api.gate.open.set()
        assert [(await peer.response()).status for peer in peers] == [200] * 3


async def test_requests_whose_body_never_ends_shut_nobody_out(api_model):
    limits = RequestLimits(max_in_flight=1, max_receiving=4)
    async with served_api(api_model, limits) as api, contextlib.AsyncExitStack() as stack:

        async def stall(count: int) -> None:
            peer = await stack.enter_async_context(http_peer(api))
            peer.send(RANK[:-1])
            await until(lambda: api.service.in_flight == count)

        for count in (1, 2, 3):
            await stall(count)
        assert (await api.http.post(PATH, json=api_request(1))).status_code == 200
        await stall(4)
        answer = await api.http.post(PATH, json=api_request(1))
        assert (answer.status_code, answer.json()["error"]["kind"]) == (503, "overloaded")
        assert "max_receiving = 4" in answer.json()["error"]["message"]


@pytest.mark.parametrize("requests", [1, 3])
async def test_a_client_that_leaves_takes_its_requests_with_it(api_model, requests):
    """Those that it sent ahead too."""
    async with gated_api(api_model) as api, http_peer(api) as busy:
        busy.send(RANK)
        await api.gate.wait_until_busy()
        async with http_peer(api) as peer:
            peer.send(RANK * requests)
            await until(lambda: api.service.generations.all()[0].payload.batcher.num_waiting == 1)
            peer.reset()
        await until(lambda: api.service.in_flight == 1)
        api.gate.open.set()
        assert (await busy.response()).status == 200
        metrics = api.service.metrics.render().decode()
        assert 'shardrank_errors_total{api="http",kind="client_gone",method="rank"} 1.0' in metrics
        assert 'shardrank_batch_requests_sum{model="films"} 1.0' in metrics


async def test_a_client_that_leaves_within_a_body_leaves_nothing(api_model):
    async with served_api(api_model) as api:
        for leave in (HttpPeer.reset, lambda peer: peer.writer.close()):
            async with http_peer(api) as peer:
                peer.send(post(LONG[:-1], path=PATH, length=len(LONG)))
                await peer.writer.drain()
                await until(lambda: api.service.in_flight == 1)
                leave(peer)
                await until(lambda: api.service.in_flight == 0)
        metrics = api.service.metrics.render().decode()
        assert 'shardrank_errors_total{api="http",kind="client_gone",method="rank"} 2.0' in metrics


async def test_a_peer_that_does_not_take_its_answer_is_dropped(api_model):
    limits = RequestLimits(receive_timeout_s=0.2, max_lookup_floats=2**24, max_bags_per_feature=2**20)
    body = json.dumps({"sparse": {"film": list(range(700)) * 300}}).encode()

    def reset_arrives(peer: socket.socket) -> bool:
        # Reads nothing of the answer: only the end of the connection makes poll report an error.
        poller = select.poll()
        poller.register(peer, 0)
        return bool(poller.poll(20_000))

    async with served_api(api_model, limits) as api:
        with socket.create_connection((api.listening.host, api.listening.http_port)) as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await asyncio.to_thread(peer.sendall, post(body, path=f"/v1/models/{MODEL}:lookup"))
            assert await asyncio.to_thread(reset_arrives, peer)


async def test_requests_in_any_pieces_are_answered_in_turn(api_model):
    chunked = http_wire.chunked([LONG[:70_000], LONG[70_000:]], path=PATH)
    bodies = [post(body, path=PATH) for body in (LONG, BODY, b"", LONG, b"{" + LONG, BODY)]
    sent, statuses = b"".join((*bodies[:2], chunked, *bodies[2:])), [200, 200, 200, 400, 200, 400, 200]
    rng = random.Random(7)
    async with served_api(api_model) as api:
        for longest in (len(sent), 1000, 30_000, 100_000, 300_000):
            async with http_peer(api) as peer:
                at = 0
                while at < len(sent):
                    size = rng.randint(1, longest)
                    peer.send(sent[at : at + size])
                    await peer.writer.drain()
                    at += size
                    # Lets the server read what is there, as a piece of its own.
                    await asyncio.sleep(0)
                responses = [await peer.response() for _ in statuses]
            assert [response.status for response in responses] == statuses
            assert len({response.body for response in responses if response.status == 200}) == 1
        assert api.service.in_flight == 0


async def test_requests_of_the_application_and_direct_ones_take_turns(api_model):
    def get(path: str) -> bytes:
        return f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode()

    escaped, long = (post(LONG, path=path) for path in (PATH.replace(":rank", ":ran%6B"), PATH))
    sent = [get("/healthz"), long, get("/v9"), escaped, RANK, get("/healthz"), get("/readyz")]
    async with served_api(api_model) as api, http_peer(api) as peer:
        for seed in range(6):
            order = random.Random(seed).sample(range(len(sent)), len(sent))
            peer.send(b"".join(sent[number] for number in order))
            responses = {number: await peer.response() for number in order}
            assert [responses[number].status for number in range(len(sent))] == [200, 200, 404, 200, 200, 200, 200]
            assert responses[1].body == responses[3].body == responses[4].body


@pytest.mark.parametrize("requests", [1, 3])
async def test_a_client_that_has_ended_sending_gets_every_answer(api_model, requests):
    async with gated_api(api_model) as api, http_peer(api) as peer:
        peer.send(RANK * requests)
        peer.writer.write_eof()
        await api.gate.wait_until_busy()
        api.gate.open.set()
        responses = [await peer.response() for _ in range(requests)]
        assert {response.status for response in responses} == {200}
        assert responses[-1].headers["connection"] == "close"
        assert await peer.rest() == b""


async def assert_last_answer(peer: HttpPeer) -> None:
    response = await peer.response()
    assert (response.status, response.headers["connection"]) == (200, "close")
    assert await peer.rest() == b""


async def test_a_server_that_stops_answers_and_ends_each_connection(api_model):
    """It takes requests for `shutdown_delay_s`, over connections old and new."""
    with api_service(api_model) as service:
        server = running_server(service, ServeConfig(http_port=0, grpc_port=0, shutdown_delay_s=0.5), drain_timeout_s=5)
        listening = await server.__aenter__()
        at = ("127.0.0.1", listening.http_port)
        kept, fresh = [HttpPeer(*await asyncio.open_connection(*at)) for _ in range(2)]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listening.http_port}") as client:
            assert (await client.get("/readyz")).status_code == 200
            stopping = asyncio.create_task(server.__aexit__(None, None, None))
            await asyncio.sleep(0)
            kept.send(RANK)
            await assert_last_answer(kept)
            answer = await client.get("/readyz")
            assert (answer.status_code, answer.headers["connection"]) == (503, "close")
            assert (await client.post(PATH, content=BODY)).status_code == 200
            fresh.send(RANK)
            await assert_last_answer(fresh)
            await stopping
            with pytest.raises(httpx.ConnectError):
                await client.get("/readyz")
        for peer in (kept, fresh):
            peer.writer.close()


async def test_what_was_sent_before_a_server_stops_is_answered(api_model):
    with api_service(api_model) as service:
        config = ServeConfig(http_port=0, grpc_port=0, shutdown_delay_s=0)
        async with running_server(service, config) as listening:
            connections = [socket.create_connection(("127.0.0.1", listening.http_port)) for _ in range(5)]
            for connection in connections:
                connection.sendall(RANK)
        for connection in connections:
            peer = HttpPeer(*await asyncio.open_connection(sock=connection))
            await assert_last_answer(peer)
            peer.writer.close()


async def test_long_bodies_and_answers_are_as_short_ones(api_model):
    padding = b" " * 600_000
    async with served_api(api_model, RequestLimits(max_in_flight=100)) as api:
        short = (await api.http.post(PATH, content=BODY)).json()
        assert (await api.http.post(PATH, content=BODY + padding)).json() == short
        answer = await api.http.post(PATH, content=json.dumps(api_request(1) | {"top_k": 0}).encode() + padding)
        assert (answer.status_code, answer.json()["error"]["field"]) == (400, "top_k")
        bags = [[number % 700] for number in range(4000)]
        answer = await api.http.post(f"/v1/models/{MODEL}:lookup", json={"sparse": {"film": bags}})
        rows = answer.json()["embeddings"]["film"]
        assert len(rows) == 4000
        assert rows[5] == rows[705]
        # Clients that leave while their bodies come, or just after.
        for number in range(10):
            with contextlib.suppress(httpx.TimeoutException):
                await api.http.post(PATH, content=BODY + padding * 5, timeout=0.001 * number)
        await until(lambda: api.service.in_flight == 0)
        assert [generation.leases for generation in api.service.generations.all()] == [0]

"""Connections that know heads, and others that never do: the same bytes in the same pieces get the same answers."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from loader.errors import ShardrankError
from serving.http.body import read_body
from serving.http.direct import DirectRoutes
from serving.http.endpoints import error_reply
from serving.http.exchange import Exchange, Reply, reply_to
from serving.http.known_heads import KnownHeadsProtocol, bounded_protocol
from serving.http.reading import reading_protocol
from serving.limits import RequestLimits
from serving.observe.metrics import ServingMetrics
from shardrank_testing.serving_api import run

LIMITS = RequestLimits(max_body_bytes=200_000, max_header_bytes=1024, receive_timeout_s=3600.0)
RANK = "/v1/models/films:rank"
SIZES = (0, 1, 7, 300, 20_000, 70_000, 150_000)
TOO_LONG = 200_001
CONVERSATIONS_OF_FORMS = 12
HEADERS = ("host: x", "Host: y", "accept: */*", "x-wait: 3", "x-request-id: a", "content-type:application/json ")
# Each makes something of a head of which the parser may think otherwise than a plain reading does.
LENGTHS = (
    "content-length: {}",
    "Content-Length: {}",
    "content-length: 000{}",
    "content-length: 00000000000000000{}",
    "content-length:{}",
    "content-length:  {}",
    "content-length: {} ",
    "content-length: +{}",
    "content-length: -{}",
    "content-length: 0x{}",
    "content-length: {0}, {0}",
    "content-length: 9999999999999999999{}",
    "content-length: \u00b2{}",
    "CONTENT-LENGTH: {}",
    "content-length: {0}\r\ncontent-length: {0}",
    "Content-Length: {0}\r\ncontent-length: 1",
    "content-length: 1\r\nContent-Length: {0}",
    "content-length: {}\r\ntransfer-encoding: chunked",
    "Transfer-Encoding: identity\r\ncontent-length: {}",
    "content-length: {}\r\nexpect: 100-continue",
    "content-length: {}\r\nconnection: close",
    "content-length: {}\r\nConnection: keep-alive, x",
    "content-length: {}\r\nconnection: upgrade\r\nupgrade: h2c",
    "content-length: {}\r\nupgrade: h2c",
    "x: a\r\n content-length: {}",
    "content-length: {}\r\n x: folded",
    "x: a\ncontent-length: {}",
    "content-length: {}\nx: y",
    "x: a\rb\r\ncontent-length: {}",
    "x : a\r\ncontent-length: {}",
    "content-length : {}",
    ": a\r\ncontent-length: {}",
    "x: \0\r\ncontent-length: {}",
    "x: content-length: 5\r\ncontent-length: {}",
    "x-é: ü\r\ncontent-length: {}",
    "x: " + "y" * 900 + "\r\ncontent-length: {}",
    "x: " + "y" * 1100 + "\r\ncontent-length: {}",
    "",
)
BEGINNINGS = (
    "POST {} HTTP/1.0",
    "POST {} HTTP/1.2",
    "POST {} HTTP/2.0",
    "POST {} http/1.1",
    "POST  {} HTTP/1.1",
    "POST {} HTTP/1.1 ",
    "POST http://z{} HTTP/1.1",
    "POST {}?a=b HTTP/1.1",
    "POST /other HTTP/1.1",
    "post {} HTTP/1.1",
    "GET {} HTTP/1.1",
    "PUT {} HTTP/1.1",
    "\r\nPOST {} HTTP/1.1",
    " POST {} HTTP/1.1",
    "POST {}",
)


def form_of(rng: random.Random) -> str:
    """A head but for its length, most often a usual one."""
    beginning = "POST {} HTTP/1.1" if rng.random() < 0.8 else rng.choice(BEGINNINGS)
    length = LENGTHS[rng.randint(0, 1)] if rng.random() < 0.5 else rng.choice(LENGTHS)
    lines = [beginning.format(RANK), *rng.sample(HEADERS, rng.choice((0, 0, 1, 1, 2)))]
    lines.insert(rng.randint(1, len(lines)), length)
    return "\r\n".join(line for line in lines if line) + "\r\n\r\n"


def request_of(rng: random.Random, form: str) -> bytes:
    """A request with such a head, most often a valid one."""
    size = rng.choice(SIZES) if rng.random() < 0.97 else TOO_LONG
    body = rng.randbytes(size)
    if size and rng.random() < 0.1:
        inner = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc" % RANK.encode()
        body = (inner * (size // len(inner) + 1))[:size]
    if rng.random() < 0.03:
        trailer = rng.choice((b"", b"x: y\r\n", b"content-length: 3\r\n"))
        chunk = b"%x\r\n%s\r\n0\r\n%s\r\n" % (size or 1, body or b"a", trailer)
        return f"POST {RANK} HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n".encode() + chunk
    head = form.format(size).encode("utf-8", "replace")
    if rng.random() < 0.03:
        damaged = bytearray(head)
        damaged[rng.randrange(len(damaged))] = rng.choice(b"\r\n\0 :a0\t\xff")
        head = bytes(damaged)
    if rng.random() < 0.03:
        body = body[: rng.randint(0, size)] if rng.random() < 0.5 else body + rng.choice((b"\r\n", b"\r", b"\n", b"x"))
    return head + body


def pieces_of(rng: random.Random, requests: list[bytes]) -> list[bytes]:
    """What is read at once: requests each by itself, several together, or cut anywhere."""
    if rng.random() < 0.7:
        return [
            part
            for one in requests
            for cut in [rng.randint(0, min(len(one), 2000)) if rng.random() < 0.2 else len(one)]
            for part in (one[:cut], one[cut:])
            if part
        ]
    sent, pieces = b"".join(requests), []
    longest = rng.choice((100, 3000, 70_000, 400_000)) if len(sent) < 100_000 else rng.choice((30_000, 400_000))
    while sent:
        size = rng.randint(1, longest)
        pieces.append(sent[:size])
        sent = sent[size:]
    return pieces


class Wire(asyncio.Transport):
    """A transport whose other end is a list."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.is_closed = self.is_paused = False

    def write(self, data: bytes) -> None:
        if not self.is_closed:
            self.written.append(bytes(data))

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def get_write_buffer_size(self) -> int:
        return 0


@dataclass
class Served:
    """A server's connections, without sockets: what reaches handlers, and what they answer."""

    knows_heads: bool
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        routes = DirectRoutes({"/v1/models/{model}:rank": self.answer})
        self.protocol = bounded_protocol(LIMITS, ServingMetrics(), routes)
        if not self.knows_heads:
            self.protocol.known_heads.has_come_again = lambda _: False
        self.config = uvicorn.Config(
            self.application, interface="asgi3", lifespan="off", log_config=None, access_log=False, ws="none"
        )
        self.config.load()
        self.make = reading_protocol(self.protocol)

    async def answer(self, exchange: Exchange) -> Reply:
        for _ in range(int(exchange.header(b"x-wait") or 0)):
            await asyncio.sleep(0)
        try:
            body = bytes(await read_body(exchange, LIMITS.max_body_bytes))
        except ShardrankError as error:
            self.calls.append((exchange.target, type(error)))
            return error_reply(exchange, error)
        names = (b"host", b"accept", b"content-length", b"content-type", b"x", b"expect", b"connection", b"x-\xc3\xa9")
        self.calls.append((exchange.target, [exchange.header(name) for name in names], body))
        return reply_to(exchange, 200, b"%d bytes" % len(body))

    async def application(self, scope: Any, receive: Any, send: Any) -> None:
        body, is_more = b"", True
        while is_more:
            message = await receive()
            body, is_more = body + message.get("body", b""), message.get("more_body", False)
        self.calls.append((scope["method"], scope["path"], scope["headers"], scope["http_version"], body))
        length = b"%d" % len(scope["path"])
        await send({"type": "http.response.start", "status": 404, "headers": [(b"content-length", length)]})
        await send({"type": "http.response.body", "body": scope["path"].encode()})

    async def converse(self, pieces: list[bytes]) -> tuple[bytes, bool, list[tuple[Any, ...]]]:
        """What one connection is answered, whether it was closed, and the calls that were made."""
        self.calls = []
        wire, state = Wire(), ServerState()
        reading = self.make(config=self.config, server_state=state, app_state={})
        reading.connection_made(wire)
        for piece in pieces:
            left = memoryview(piece)
            while left and not wire.is_closed:
                room = reading.get_buffer(-1)
                size = min(len(room), len(left))
                room[:size] = left[:size]
                left = left[size:]
                reading.buffer_updated(size)
                if room is reading._read_buffer:
                    # It is used again for other connections.
                    room[:size] = bytes(size)
                for _ in range(40):
                    await asyncio.sleep(0)
                    if not (wire.is_paused or state.tasks):
                        break
        answered, closed = b"".join(wire.written), wire.is_closed
        reading.connection_lost(None)
        await asyncio.gather(*state.tasks)
        return answered, closed, self.calls


def compare(seed: int, conversations: int) -> int:
    """Has the same conversations with both. Returns how many requests passed the parser by."""
    rng, passed = random.Random(seed), 0

    async def main() -> None:
        nonlocal passed
        knowing, plain = Served(knows_heads=True), Served(knows_heads=False)
        take = knowing.protocol._take

        def counting(self: KnownHeadsProtocol, *arguments: Any) -> bool:
            nonlocal passed
            was_taken = take(self, *arguments)
            passed += was_taken
            return was_taken

        knowing.protocol._take = counting
        for number in range(conversations):
            if number % CONVERSATIONS_OF_FORMS == 0:
                # Few, so that each comes often enough to be known.
                forms = [form_of(rng) for _ in range(4)]
            requests = [request_of(rng, rng.choice(forms)) for _ in range(rng.randint(1, 8))]
            pieces = pieces_of(rng, requests)
            expected, told = await plain.converse(pieces), await knowing.converse(pieces)
            assert told == expected, [piece[:300] for piece in pieces]
        assert not plain.protocol.known_heads._known

    run(main())
    return passed


@pytest.mark.parametrize("seed", range(4))
def test_known_heads_change_no_call_and_no_answer(seed):
    assert compare(seed, 100) > 15


@pytest.mark.parametrize("knows_heads", [False, True])
def test_the_body_behind_a_head_that_asks_for_an_upgrade_is_never_taken_for_a_request(knows_heads):
    inner = f"POST {RANK} HTTP/1.1\r\ncontent-length: 3\r\n\r\nabc".encode()
    wish = f"content-length: {len(inner)}\r\nconnection: upgrade\r\nupgrade: h2c"
    head = f"POST {RANK} HTTP/1.1\r\n{wish}\r\n\r\n".encode()

    async def main() -> None:
        served = Served(knows_heads)
        for _ in range(3):
            await served.converse([inner])
        for pieces in ([head, inner], [head + inner], [head + inner[:9], inner[9:], inner]):
            answered, closed, calls = await served.converse(pieces)
            assert closed
            assert answered.count(b"HTTP/1.1 ") == 1
            assert b"connection: close\r\n" in answered.lower()
            assert len(calls) == 1

    run(main())

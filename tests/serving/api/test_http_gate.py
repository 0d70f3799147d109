"""The gate by bytes: a transport whose other end is a list, and whatever a client could send."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.api.addresses import Addresses
from serving.api.http_gate import READ_BYTES, Gates
from serving.limits import RequestLimits
from serving.metrics import ServingMetrics

HOME = "192.0.2.1"
LIMITS = RequestLimits(max_header_bytes=4096, max_body_bytes=100_000)


class Wire(asyncio.Transport):
    """A transport whose other end is a list."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.is_closed = self.is_aborted = self.is_paused = False

    def write(self, data: bytes) -> None:
        assert not self.is_closed
        self.sent += bytes(data)

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        assert not self.is_paused
        self.is_paused = True

    def resume_reading(self) -> None:
        assert self.is_paused
        self.is_paused = False


class Clock:
    def __init__(self, step: float = 0.0) -> None:
        self.now, self.step = 1000.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


class Served:
    """Gates over an application that says what it got."""

    def __init__(self, limits: RequestLimits = LIMITS, clock: Clock | None = None, hold: bool = False) -> None:
        self.calls: list[tuple[str, str, bytes, dict[bytes, bytes]]] = []
        self.may_answer = asyncio.Event()
        self.left = 0
        if not hold:
            self.may_answer.set()
        self.clock = clock or Clock()
        self.metrics = ServingMetrics()
        config = uvicorn.Config(
            self.app, interface="asgi3", lifespan="off", log_config=None, access_log=False, ws="none"
        )
        config.load()
        self.addresses = Addresses(limits, self.clock)
        self.gates = Gates(config, limits, self.metrics, self.addresses, self.clock)

    def _leave(self) -> None:
        self.left += 1

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        gate = scope["state"]["gate"]
        gate.watch(self._leave)
        body, is_more = b"", True
        while is_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, is_more = body + message["body"], message["more_body"]
        self.calls.append((scope["method"], scope["path"], body, dict(scope["headers"])))
        await self.may_answer.wait()
        text = b"%d" % len(body)
        headers = [(b"content-length", b"%d" % len(text))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": text})
        gate.answered()

    def connect(self, address: str = HOME) -> tuple[Any, Wire]:
        wire, gate = Wire(), self.gates.new_gate(address)
        gate.connection_made(wire)
        return gate, wire

    async def converse(self, pieces: list[bytes]) -> Wire:
        """Sends pieces as a socket would: only while they are read."""
        gate, wire = self.connect()
        for piece in pieces:
            for at in range(0, len(piece), READ_BYTES):
                await settled(lambda: not wire.is_paused or wire.is_closed)
                if not wire.is_closed:
                    gate.data_received(piece[at : at + READ_BYTES])
        await settled(lambda: not (self.gates.state.tasks or wire.is_paused) or wire.is_closed)
        gate.connection_lost(None)
        await settled(lambda: not self.gates.state.tasks)
        return wire


async def settled(condition: Any) -> None:
    for _ in range(2000):
        await asyncio.sleep(0)
        if condition():
            return


def post(body: bytes = b"abc", *headers: str, path: str = "/p") -> bytes:
    lines = (f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(body)}", *headers, "", "")
    return "\r\n".join(lines).encode("latin-1") + body


def chunked(parts: list[bytes], extension: bytes = b"", trailers: bytes = b"") -> bytes:
    chunks = b"".join(b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in parts if part)
    return b"POST /c HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n" + trailers + b"\r\n"


def statuses(sent: bytes) -> list[int]:
    return [int(part[:3]) for part in sent.split(b"HTTP/1.1 ")[1:]]


def errors(metrics: ServingMetrics) -> dict[str, float]:
    found = {}
    for line in metrics.render().decode().splitlines():
        if line.startswith("shardrank_errors_total{"):
            found[line.split('kind="')[1].split('"')[0]] = float(line.rsplit(" ", 1)[1])
    return found


AMBIGUOUS = {
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nhost: a\r\nHost: a\r\n\r\n",
    "two hosts in 1.0": b"GET / HTTP/1.0\r\nhost: a\r\nHost: a\r\n\r\n",
    "gzip, chunked": b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n" * 1
    + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "identity": b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: identity\r\ncontent-length: 1\r\n\r\na",
    "chunked in 1.0": b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "two framings": b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 1\r\n\r\na",
    "a list of lengths": b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1, 1\r\n\r\na",
    "a signed length": b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: +1\r\n\r\na",
    "a hexadecimal length": b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 0x1\r\n\r\na",
    "an empty length": b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length:\r\n\r\n",
    "a huge length": b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1" + b"0" * 18 + b"\r\n\r\na",
    "NUL": b"GET / HTTP/1.1\r\nhost: a\r\nx: a\0b\r\n\r\n",
    "a bare CR": b"GET / HTTP/1.1\r\nhost: a\r\nx: a\rb\r\n\r\n",
    "a bare LF": b"GET / HTTP/1.1\r\nhost: a\r\nx: a\nb: c\r\n\r\n",
    "lines end with LF": b"GET / HTTP/1.1\nhost: a\n\n\r\n\r\n",
    "a folded header": b"GET / HTTP/1.1\r\nhost: a\r\nx: a\r\n b\r\n\r\n",
    "a space before the colon": b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length : 1\r\n\r\na",
    "no name": b"GET / HTTP/1.1\r\nhost: a\r\n: b\r\n\r\n",
    "a name with a quote": b'GET / HTTP/1.1\r\nhost: a\r\nx"y: b\r\n\r\n',
    "no colon": b"GET / HTTP/1.1\r\nhost: a\r\nabc\r\n\r\n",
    "a target with a control": b"GET /a\x01b HTTP/1.1\r\nhost: a\r\n\r\n",
    "a target with a space": b"GET /a b HTTP/1.1\r\nhost: a\r\n\r\n",
    "a target beyond ASCII": b"GET /\xff HTTP/1.1\r\nhost: a\r\n\r\n",
    "an authority": b"GET example.com:80 HTTP/1.1\r\nhost: a\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/1.2": b"GET / HTTP/1.2\r\nhost: a\r\n\r\n",
    "an unknown method": b"FETCH / HTTP/1.1\r\nhost: a\r\n\r\n",
    "a method in small letters": b"get / HTTP/1.1\r\nhost: a\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
}


@pytest.mark.parametrize("sent", AMBIGUOUS.values(), ids=AMBIGUOUS.keys())
def test_what_could_be_understood_in_two_ways_is_refused_and_never_reaches_the_application(sent, caplog):
    async def main() -> None:
        served = Served()
        wire = await served.converse([sent + post()])
        assert statuses(wire.sent) == [400]
        assert wire.is_closed
        assert b"connection: close\r\n" in wire.sent
        assert served.calls == []
        assert errors(served.metrics) == {"malformed": 1.0}

    asyncio.run(main())
    # One line a second, for all of them together, and not by the gate itself.
    assert caplog.records == []


def test_connect_is_not_allowed_here():
    async def main() -> None:
        served = Served()
        assert statuses((await served.converse([b"CONNECT / HTTP/1.1\r\nhost: a\r\n\r\n"])).sent) == [405]

    asyncio.run(main())


@pytest.mark.parametrize(
    "headers",
    [
        ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA"),
        ("upgrade: websocket", "connection: keep-alive, Upgrade"),
        ("upgrade: h2c",),
    ],
)
def test_a_wish_for_another_protocol_is_not_granted_and_the_request_is_answered_with_its_body(headers):
    async def main() -> None:
        served = Served()
        wire = await served.converse([post(b"hello", *headers) + post(b"again")])
        assert statuses(wire.sent) == [200, 200]
        assert [call[2] for call in served.calls] == [b"hello", b"again"]
        assert not {b"upgrade", b"http2-settings"} & set(served.calls[0][3])
        assert b"upgrade" not in served.calls[0][3].get(b"connection", b"").lower()

    asyncio.run(main())


def test_other_wishes_about_the_connection_stay():
    async def main() -> None:
        served = Served()
        wire = await served.converse([post(b"a", "connection: close, upgrade", "upgrade: h2c") + post(b"b")])
        assert statuses(wire.sent) == [200]
        assert wire.is_closed
        assert b"connection: close" in wire.sent

    asyncio.run(main())


def test_nothing_is_read_ahead_of_an_answer_but_what_one_read_brought_along():
    async def main() -> None:
        served = Served(hold=True)
        gate, wire = served.connect()
        gate.data_received(post() * 500)
        await settled(lambda: served.calls)
        assert wire.is_paused
        assert len(gate._held) == 499 * len(post())
        assert len(served.calls) == 1
        served.may_answer.set()
        await settled(lambda: len(served.calls) == 500)
        await settled(lambda: not wire.is_paused)
        assert statuses(wire.sent) == [200] * 500
        assert gate._held == b""

    asyncio.run(main())


def test_a_request_sent_ahead_of_an_answer_stops_the_reading():
    async def main() -> None:
        served = Served(hold=True)
        gate, wire = served.connect()
        gate.data_received(post())
        await settled(lambda: served.calls)
        assert not wire.is_paused
        gate.data_received(post()[:10])
        assert wire.is_paused
        served.may_answer.set()
        await settled(lambda: not wire.is_paused)
        gate.data_received(post()[10:])
        await settled(lambda: len(served.calls) == 2)
        assert statuses(wire.sent) == [200, 200]

    asyncio.run(main())


@pytest.mark.parametrize(
    "sent",
    [
        chunked([b"a" * 10] * 20, extension=b";" + b"e" * 300),
        chunked([b"abc"], trailers=b"x: y\r\n" * 1000),
        chunked([b"abc"])[:-2] + b"x: " + b"y" * 5000,
        b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 5000,
        b"GET /" + b"y" * 5000 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
    ],
    ids=["extensions", "trailers", "a trailer", "a header", "a target"],
)
@pytest.mark.parametrize("size", [7, 10_000])
def test_whatever_is_no_body_counts_to_the_limit_of_headers(sent, size):
    async def main() -> None:
        served = Served()
        wire = await served.converse([sent[at : at + size] for at in range(0, len(sent), size)])
        assert statuses(wire.sent) == [431]
        assert wire.is_closed
        assert served.calls == []

    asyncio.run(main())


@pytest.mark.parametrize(
    "body",
    [
        *(b"5\r\nabc\r\n0\r\n\r\n", b"3\r\nabcde\r\n", b"x\r\n", b"\r\n", b"-1\r\n", b"3 3\r\nabc\r\n"),
        *(b"0\r\nx y\r\n\r\n", b"1" * 16 + b"\r\n", b"3\nabc\n0\n\n", b"3;\0\r\nabc\r\n", b"0\r\n x: y\r\n\r\n"),
    ],
)
def test_chunks_that_are_not_as_they_should_be_are_refused(body):
    async def main() -> None:
        served = Served()
        wire = await served.converse([b"POST /c HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + body])
        # The first one's length takes what follows for the chunk, whose end is then missing.
        assert statuses(wire.sent) == [400]
        assert served.calls == []
        assert wire.is_closed

    asyncio.run(main())


def test_many_small_chunks_give_others_their_turn_and_arrive_as_one_body():
    async def main() -> None:
        # Each look at the clock takes 3 ms: a turn is over at the first.
        served = Served(RequestLimits(max_idle_work_ms=0), Clock(0.003))
        gate, wire = served.connect()
        sent = chunked([b"%d" % (number % 10) for number in range(5000)])
        gate.data_received(sent)
        assert wire.is_paused
        await settled(lambda: served.calls)
        assert served.calls[0][2] == b"0123456789" * 500
        await settled(lambda: wire.sent)
        assert not wire.is_paused
        assert statuses(wire.sent) == [200]

    asyncio.run(main())


def test_who_causes_work_and_completes_nothing_is_ended_and_its_address_waits():
    async def main() -> None:
        served = Served()
        gate, wire = served.connect()
        gate.data_received(post(b"x" * 90_000)[:200])
        reads = 0
        while not wire.is_closed:
            gate.data_received(b"x")
            reads += 1
        assert wire.is_aborted
        assert 10_000 < reads < 40_000
        gate.connection_lost(None)
        assert served.gates.refusal(HOME) is not None
        assert served.gates.refusal("192.0.2.2") is None
        assert errors(served.metrics)["penalty"] == 2.0

    asyncio.run(main())


def test_a_trusted_proxy_is_ended_alone_and_may_come_again():
    async def main() -> None:
        served = Served(RequestLimits(trusted_proxies=(HOME,)))
        gate, wire = served.connect()
        gate.data_received(post(b"x" * 90_000)[:200])
        for _ in range(40_000):
            gate.data_received(b"x")
        assert wire.is_aborted
        assert served.gates.refusal(HOME) is None

    asyncio.run(main())


def test_connections_that_bring_nothing_cost_their_address_something():
    async def main() -> None:
        served = Served()
        opened = 0
        while served.gates.refusal(HOME) is None:
            gate, _ = served.connect()
            gate.connection_lost(None)
            opened += 1
        assert 1000 < opened < 10_000
        served.clock.now += LIMITS.penalty_s + 0.1
        assert served.gates.refusal(HOME) is None

    asyncio.run(main())


def test_idle_connections_make_room_those_of_the_address_with_most_of_them_first():
    async def main() -> None:
        served = Served(RequestLimits(max_connections=6))
        gates = [served.connect(address) for address in (HOME, "192.0.2.2", "192.0.2.2", "192.0.2.2", "192.0.2.3")]
        for gate, _ in gates:
            gate.data_received(post())
        await settled(lambda: len(served.gates.idle) == 5)
        served.connect("192.0.2.4")
        assert served.gates.refusal("192.0.2.9") is None
        assert [wire.is_closed for _, wire in gates] == [False, True, False, False, False]

    asyncio.run(main())


def test_malformed_requests_are_told_in_one_line_with_their_number(caplog):
    async def main() -> None:
        served = Served()
        for _ in range(100):
            await served.converse([AMBIGUOUS["NUL"]])
        served.gates.tell()
        served.gates.tell()
        assert errors(served.metrics) == {"malformed": 100.0}

    asyncio.run(main())
    assert [record.getMessage() for record in caplog.records] == ["HTTP connections refused or ended: malformed: 100"]


def test_times_end_what_waits_and_nothing_else():
    async def main() -> None:
        served = Served(LIMITS.model_copy(update={"receive_timeout_s": 4.0, "keep_alive_s": 60.0}), hold=True)
        fresh, idle, half, busy, unread = (served.connect() for _ in range(5))
        half[0].data_received(post()[:-1])
        busy[0].data_received(post())
        served.clock.now += 3.9
        unread[0].data_received(post())
        unread[0].pause_writing()
        idle[0].data_received(post())
        await settled(lambda: len(served.calls) == 3)
        served.gates.sweep()
        assert not any(wire.is_closed for _, wire in (fresh, idle, half, busy, unread))
        served.clock.now += 0.2
        served.gates.sweep()
        assert (fresh[1].is_closed, fresh[1].sent) == (True, b"")
        assert (half[1].is_closed, statuses(half[1].sent)) == (True, [408])
        served.clock.now += 3.8
        served.gates.sweep()
        assert unread[1].is_aborted
        unread[0].connection_lost(None)
        served.may_answer.set()
        await settled(lambda: idle[1].sent and busy[1].sent)
        served.clock.now += 59.0
        served.gates.sweep()
        assert not busy[1].is_closed
        served.clock.now += 1.1
        served.gates.sweep()
        assert busy[1].is_closed
        assert idle[1].is_closed

    asyncio.run(main())


def test_whoever_works_for_a_client_is_told_that_it_left():
    async def main() -> None:
        served = Served(hold=True)
        gate, _ = served.connect()
        gate.data_received(post())
        await settled(lambda: served.calls)
        gate.connection_lost(ConnectionResetError())
        assert served.left == 1
        assert served.addresses.connections(HOME) == 0

    asyncio.run(main())


REQUESTS = st.one_of(
    st.builds(post, st.binary(max_size=300)),
    st.builds(post, st.binary(max_size=50), st.just("connection: upgrade"), st.just("upgrade: h2c")),
    st.builds(chunked, st.lists(st.binary(max_size=40), max_size=8), st.sampled_from([b"", b";a=b", b" ;q"])),
    st.builds(
        chunked, st.lists(st.binary(max_size=40), max_size=8), trailers=st.just(b"x: y\r\ncontent-length: 7\r\n")
    ),
    st.just(b"GET /g HTTP/1.1\r\nhost: x\r\n\r\n"),
)


@settings(deadline=None, max_examples=150)
@given(st.lists(REQUESTS, min_size=1, max_size=6), st.lists(st.integers(1, 120)))
def test_however_valid_requests_are_cut_the_answers_are_the_same(requests, cuts):
    stream = b"".join(requests)
    pieces, at = [], 0
    for size in itertools.chain(cuts, itertools.repeat(len(stream))):
        if at >= len(stream):
            break
        pieces.append(stream[at : at + size])
        at += size

    async def main() -> None:
        whole, cut = Served(), Served()
        expected, got = await whole.converse([stream]), await cut.converse(pieces)
        assert statuses(expected.sent) == [200] * len(requests)
        assert got.sent == expected.sent
        assert cut.calls == whole.calls
        assert (expected.is_closed, got.is_closed) == (False, False)

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(4))
def test_whatever_comes_the_gate_answers_or_closes_and_is_whole_afterwards(seed, caplog):
    rng = random.Random(seed)
    valid = [post(b"abc"), chunked([b"abc", b"d" * 50]), post(b"", "expect: 100-continue"), *AMBIGUOUS.values()]
    alphabet = b"\r\n\0 :;,a0Ff\t\xff"

    async def main() -> None:
        served = Served(RequestLimits(max_header_bytes=4096, max_idle_work_ms=0))
        for _ in range(1500):
            sent = bytearray(b"".join(rng.choices(valid, k=rng.randint(1, 3))))
            for _ in range(rng.randint(0, 4)):
                at = rng.randrange(len(sent))
                if rng.random() < 0.3:
                    del sent[at : at + rng.randint(1, 5)]
                elif rng.random() < 0.5:
                    sent.insert(at, rng.choice(alphabet))
                else:
                    sent[at] = rng.choice(alphabet)
                if not sent:
                    sent = bytearray(b"x")
            cut = rng.randint(0, len(sent))
            wire = await served.converse([bytes(sent[:cut]), bytes(sent[cut:])] if cut else [bytes(sent)])
            assert set(statuses(wire.sent)) <= {100, 200, 400, 405, 431}
        assert not served.gates.open
        assert not served.gates.state.connections
        assert not served.gates.state.tasks
        assert all(not waiting for waiting in (served.gates.idle, served.gates.receiving, served.gates.closing))
        assert not served.gates.ahead
        assert len(served.addresses) <= 1
        assert statuses((await served.converse([post()])).sent) == [200]

    asyncio.run(main())
    assert caplog.records == []

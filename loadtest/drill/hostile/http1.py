"""Attacks on the HTTP port below the bodies: heads, chunks, pipelines, connections."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Iterator

from loadtest.drill.hostile.attacker import PAUSE_S, Attacker, EndedError
from loadtest.drill.hostile.documents import DIM, MAX_FLOATS, Body, full_lookup

GET = b"GET /healthz HTTP/1.1\r\nhost: drill\r\n\r\n"
METRICS = b"GET /metrics HTTP/1.1\r\nhost: drill\r\n\r\n"
IDLE_CONNECTIONS = 4096
SLOW_CONNECTIONS = 300
UNREAD_CONNECTIONS = 64
SLOW_PAUSE_S = 0.5


def small_lookup(attacker: Attacker) -> bytes:
    """The body of a valid lookup of one id."""
    return f'{{"sparse":{{"{attacker.config.features[0]}":[1]}}}}'.encode()


def lookup_head(attacker: Attacker, *lines: str, host: str = "host: drill") -> bytes:
    """The head of a lookup with these lines, and a host unless that is empty."""
    head = [f"POST /v1/models/{attacker.config.model}:lookup HTTP/1.1", *([host] if host else ()), *lines]
    return ("\r\n".join(head) + "\r\n\r\n").encode("latin-1")


def post(lines: Callable[[Attacker], bytes]) -> Callable[[Attacker], None]:
    """Sends a request on a connection of its own, again and again, and waits for its answer each time."""

    def run(attacker: Attacker) -> None:
        request = lines(attacker)
        for _ in range(attacker.config.repeats):
            with attacker.span(), contextlib.closing(attacker.http()) as sock:
                attacker.tally.messages += 1
                attacker.answered(attacker.exchange(sock, request))
            time.sleep(PAUSE_S)

    return run


def _with_length(attacker: Attacker, *lines: str, host: str = "host: drill") -> bytes:
    body = small_lookup(attacker)
    return lookup_head(attacker, f"content-length: {len(body)}", *lines, host=host) + body


def _chunked(attacker: Attacker, coding: str = "chunked", tail: bytes = b"\r\n") -> bytes:
    body = small_lookup(attacker)
    return lookup_head(attacker, f"transfer-encoding: {coding}") + b"%x\r\n%s\r\n0\r\n" % (len(body), body) + tail


def gzip_chunked(attacker: Attacker) -> bytes:
    """Row 12: a transfer coding that isn't undone."""
    return _chunked(attacker, "gzip, chunked")


def long_trailers(attacker: Attacker) -> bytes:
    """Row 12: 100 KB behind the last chunk."""
    return _chunked(attacker, tail=b"".join(b"x-%d: %s\r\n" % (one, b"y" * 1000) for one in range(100)) + b"\r\n")


def no_host(attacker: Attacker) -> bytes:
    """Row 12: a request without Host."""
    return _with_length(attacker, host="")


def two_hosts(attacker: Attacker) -> bytes:
    """Row 12: a request with two."""
    return _with_length(attacker, "host: other")


def nul_in_header(attacker: Attacker) -> bytes:
    """A NUL in a header's value."""
    return _with_length(attacker, "x-request-id: a\0b")


def two_lengths(attacker: Attacker) -> bytes:
    """Two lengths that do not agree, as request smuggling has them."""
    return _with_length(attacker, "content-length: 1")


def length_and_chunks(attacker: Attacker) -> bytes:
    """Both ways to say where a body ends."""
    return _with_length(attacker, "transfer-encoding: chunked")


def long_head(attacker: Attacker) -> bytes:
    """A head of 16 MB."""
    return lookup_head(attacker, *(f"x-{one}: {'y' * 1000}" for one in range(16_000)))


def upgrade_h2c(attacker: Attacker) -> bytes:
    """Row 14: what Java's HttpClient asks beside its POST. It must be answered as if it had not."""
    lines = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAA")
    return _with_length(attacker, *lines, "content-type: application/json")


def pipelined(*, reads: bool) -> Callable[[Attacker], None]:
    """Row 3: small GETs sent ahead."""

    def run(attacker: Attacker) -> None:
        attacker.flood(attacker.http, lambda: _again(GET * 100), 100, reads=reads)

    return run


def _again(chunk: bytes, first: bytes = b"") -> Iterator[bytes]:
    if first:
        yield first + chunk
    while True:
        yield chunk


def small_chunks(attacker: Attacker) -> None:
    """A body in chunks of one byte."""
    head = lookup_head(attacker, "transfer-encoding: chunked")
    attacker.flood(attacker.http, lambda: _again(b"1\r\n \r\n" * 500, head), 500)


def chunk_extensions(attacker: Attacker) -> None:
    """A body whose chunks have extensions of a kilobyte."""
    head = lookup_head(attacker, "transfer-encoding: chunked")
    attacker.flood(attacker.http, lambda: _again((b"1;a=" + b"x" * 1000 + b"\r\n \r\n") * 10, head), 10)


def endless_head(attacker: Attacker) -> None:
    """A head that does not end."""
    head = f"POST /v1/models/{attacker.config.model}:rank HTTP/1.1\r\nhost: drill\r\n".encode()
    attacker.flood(attacker.http, lambda: _again(b"a: b\r\n" * 500, head), 500)


def metrics(attacker: Attacker) -> None:
    """Row 10: GET /metrics, one after the other on one connection."""
    _gets(attacker, METRICS)


def _gets(attacker: Attacker, request: bytes) -> None:
    attacker.until = time.monotonic() + attacker.config.seconds
    with attacker.span():
        while attacker.goes_on():
            try:
                with contextlib.closing(attacker.http()) as sock:
                    _gets_on(attacker, sock, request)
            except (EndedError, OSError) as error:
                attacker.ended(str(error))


def _gets_on(attacker: Attacker, sock: socket.socket, request: bytes) -> None:
    sock.settimeout(10)
    while attacker.goes_on():
        attacker.send(sock, request)
        attacker.tally.messages += 1
        got = bytearray()
        while b"\r\n\r\n" not in got or not _is_whole(got):
            part = sock.recv(1 << 18)
            if not part:
                raise EndedError("closed")
            got += part
        attacker.answered(f"HTTP {bytes(got[9:12]).decode('latin-1')}")


def _is_whole(got: bytearray) -> bool:
    head, _, body = bytes(got).partition(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return len(body) >= int(line.partition(b":")[2])
    return body.endswith(b"0\r\n\r\n")


def reconnect(attacker: Attacker) -> None:
    """Row 11: connections that begin a request and leave, as fast as they come."""
    _reconnect(attacker, GET[:-4], waits=False)


def reconnect_get(attacker: Attacker) -> None:
    """A connection for each GET, as fast as they are answered."""
    _reconnect(attacker, GET)


def malformed(attacker: Attacker) -> None:
    """Row 13: bytes that are not HTTP, each on a connection of its own."""
    _reconnect(attacker, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 not HTTP\r\n\r\n")


def _reconnect(attacker: Attacker, request: bytes, *, waits: bool = True) -> None:
    attacker.until = time.monotonic() + attacker.config.seconds
    with attacker.span():
        while attacker.goes_on():
            try:
                with contextlib.closing(attacker.http()) as sock:
                    sock.settimeout(2)
                    attacker.send(sock, request)
                    attacker.tally.messages += 1
                    if not waits:
                        continue
                    got = sock.recv(4096)
                    attacker.answered(f"HTTP {got[9:12].decode('latin-1')}" if got else "closed")
            except (EndedError, OSError) as error:
                attacker.ended(str(error))
                time.sleep(0.001)


def idle(port: Callable[[Attacker], int]) -> Callable[[Attacker], None]:
    """Row 9: as many idle connections as a process may have, opened again when they are ended."""

    def run(attacker: Attacker) -> None:
        _hold(attacker, port(attacker), IDLE_CONNECTIONS, lambda sock, turn: b"")

    return run


def slow_head(attacker: Attacker) -> None:
    """Heads of which a byte comes now and then."""
    head = lookup_head(attacker, "content-length: 100", "x: " + "y" * 10_000)
    _hold(attacker, attacker.config.http_port, SLOW_CONNECTIONS, lambda sock, turn: head[turn : turn + 1])


def slow_body(attacker: Attacker) -> None:
    """Bodies of which a byte comes now and then."""
    head = lookup_head(attacker, "content-length: 1000")
    pieces = [head, *[b" "] * 10_000]
    _hold(attacker, attacker.config.http_port, SLOW_CONNECTIONS, lambda sock, turn: pieces[turn])


def unread(attacker: Attacker) -> None:
    """Row 13: large answers that are not read, more of them than the kernel keeps for a peer."""
    request = full_answer(attacker).request(attacker.config)
    pieces = [*[request] * 16, *[b""] * 100_000]
    _hold(attacker, attacker.config.http_port, UNREAD_CONNECTIONS, lambda sock, turn: pieces[turn], reads=False)


def full_answer(attacker: Attacker) -> Body:
    """A small lookup with the largest answer that is allowed."""
    bags = MAX_FLOATS // DIM // len(attacker.config.features)
    features = ",".join(f'"{name}":[{",".join(["7"] * bags)}]' for name in attacker.config.features)
    return Body(full_lookup(attacker.config).path, ('{"sparse":{' + features + "}}").encode())


def _hold(
    attacker: Attacker,
    port: int,
    count: int,
    piece: Callable[[socket.socket, int], bytes],
    *,
    reads: bool = True,
) -> None:
    """Keeps `count` connections open and sends the next piece on each, a round every `SLOW_PAUSE_S`."""
    attacker.until = time.monotonic() + attacker.config.seconds
    held: dict[int, tuple[socket.socket, int]] = {}
    poll = select.poll()
    with attacker.span():
        while attacker.goes_on():
            begin = time.monotonic()
            while len(held) < count and attacker.goes_on():
                try:
                    sock = attacker.connect(port)
                except EndedError as error:
                    attacker.ended(str(error))
                    break
                sock.setblocking(False)
                held[sock.fileno()] = (sock, 0)
                poll.register(sock, select.POLLIN if reads else 0)
            for descriptor, (sock, turn) in list(held.items()):
                try:
                    data = piece(sock, turn)
                    attacker.tally.bytes_sent += sock.send(data) if data else 0
                    attacker.tally.messages += bool(data)
                    held[descriptor] = (sock, turn + 1)
                except BlockingIOError:
                    pass
                except OSError:
                    _drop(attacker, held, poll, descriptor, "reset")
            for descriptor, event in poll.poll(0):
                _look(attacker, held, poll, descriptor, event)
            time.sleep(max(0.0, SLOW_PAUSE_S - (time.monotonic() - begin)))
    for sock, _ in held.values():
        sock.close()


def _look(
    attacker: Attacker, held: dict[int, tuple[socket.socket, int]], poll: select.poll, descriptor: int, event: int
) -> None:
    if descriptor not in held:
        return
    try:
        got = held[descriptor][0].recv(1 << 16) if event & select.POLLIN else b""
    except OSError:
        got = b""
    if got.startswith(b"HTTP/1.1 "):
        attacker.answered(f"HTTP {got[9:12].decode('latin-1')}")
    if not got:
        _drop(attacker, held, poll, descriptor, "closed")


def _drop(
    attacker: Attacker, held: dict[int, tuple[socket.socket, int]], poll: select.poll, descriptor: int, how: str
) -> None:
    attacker.ended(how)
    poll.unregister(descriptor)
    held.pop(descriptor)[0].close()

"""How long does the server's loop stand? Two connections, each with a tiny request every 5 ms, in their own process.

`python -m loadtest.drill.hostile.probe CONFIG` with a file that holds a `WatchConfig` as JSON. An answer's latency is
an upper bound of what the loop stood: this process and the server wait for a core too.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from pathlib import Path
from typing import Protocol

from loadtest.drill.hostile.peer import END_HEADERS, HEADERS, Http2Peer, call_headers, frame, message
from loadtest.drill.hostile.valid import FLUSH_S, Log, WatchConfig
from serving.fleet.process import die_with_parent

INTERVAL_S = 0.005
TIMEOUT_S = 60.0
RECONNECT_S = 0.05
HTTP_PROBE, GRPC_PROBE = 3, 4
_HEALTH = "/grpc.health.v1.Health/Check"


class _Exchange(Protocol):
    def request(self) -> bytes: ...

    def answer(self, data: bytes) -> str | None:
        """None while more must come, else what is wrong, or an empty text."""


class _Http:
    def __init__(self) -> None:
        self._got = b""

    def request(self) -> bytes:
        self._got = b""
        return b"GET /healthz HTTP/1.1\r\nhost: drill\r\n\r\n"

    def answer(self, data: bytes) -> str | None:
        self._got += data
        head, end, body = self._got.partition(b"\r\n\r\n")
        if not end:
            return None
        length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        if length and len(body) < int(length[0].partition(b":")[2]):
            return None
        return "" if self._got.startswith(b"HTTP/1.1 200") else head[:40].decode("latin-1")


class _Grpc:
    def __init__(self) -> None:
        self._peer = Http2Peer()
        self._begin = self._peer.begin()

    def request(self) -> bytes:
        peer = self._peer
        stream = peer.open()
        body = frame(HEADERS, END_HEADERS, stream, call_headers(_HEALTH)) + peer.data(stream, message(b""), last=True)
        begin, self._begin = self._begin + bytes(peer.out), b""
        peer.out.clear()
        return begin + body

    def answer(self, data: bytes) -> str | None:
        peer = self._peer
        peer.feed(data)
        if not peer.replies[peer.last_stream].ended:
            return None
        reply = peer.replies.pop(peer.last_stream)
        return "" if reply.code == 0 else str(reply)


class _Probe:
    """One connection, opened again when it has ended."""

    def __init__(self, address: tuple[str, int], source: int, log: Log) -> None:
        self._address, self._source, self._log = address, source, log
        self.sock: socket.socket | None = None
        self._exchange: _Exchange = _Http()
        self.sent_at = 0.0
        self.waits = False
        self.next_at = 0.0

    def send(self, now: float) -> None:
        self.sent_at, self.next_at = now, now + INTERVAL_S
        try:
            if self.sock is None:
                self.sock = socket.create_connection(self._address, TIMEOUT_S)
                self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._exchange = _Http() if self._source == HTTP_PROBE else _Grpc()
            self.sock.sendall(self._exchange.request())
            self.waits = True
        except OSError as error:
            self.fail(str(error))

    def receive(self) -> None:
        assert self.sock is not None
        try:
            data = self.sock.recv(1 << 16)
            problem = self._exchange.answer(data) if data else "closed"
        except (OSError, ValueError, KeyError) as error:
            problem = str(error)
        if problem:
            self.fail(problem)
        elif problem is not None:
            self.waits = False
            self._log.add(self.sent_at, self._source, "")

    def fail(self, problem: str) -> None:
        self._log.add(self.sent_at, self._source, f"probe {self._source}: {problem}")
        if self.sock is not None:
            self.sock.close()
        self.sock, self.waits = None, False
        self.next_at = time.monotonic() + RECONNECT_S


def run(config: WatchConfig) -> None:
    """Probes for ever."""
    log = Log(config.log)
    probes = [
        _Probe((config.host, config.http_port), HTTP_PROBE, log),
        _Probe((config.host, config.grpc_port), GRPC_PROBE, log),
    ]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    flushed = 0.0
    while True:
        now = time.monotonic()
        for probe in probes:
            if probe.waits and now - probe.sent_at > TIMEOUT_S:
                probe.fail("no answer")
            elif not probe.waits and now >= probe.next_at:
                probe.send(now)
        poll = select.poll()
        waiting = {probe.sock.fileno(): probe for probe in probes if probe.waits and probe.sock is not None}
        for descriptor in waiting:
            poll.register(descriptor, select.POLLIN)
        due = min(probe.next_at for probe in probes if not probe.waits) if len(waiting) < len(probes) else now + 0.1
        for descriptor, _ in poll.poll(max(0.0, due - time.monotonic()) * 1e3):
            waiting[descriptor].receive()
        if now - flushed > FLUSH_S:
            flushed = now
            log.flush()


def main(arguments: list[str]) -> None:
    """The program."""
    die_with_parent(os.environ)
    run(WatchConfig.model_validate_json(Path(arguments[0]).read_text(encoding="utf-8")))


if __name__ == "__main__":
    main(sys.argv[1:])

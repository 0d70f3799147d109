"""All attacks by name, and what each must come to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from loadtest.drill.errors import DrillError
from loadtest.drill.hostile import documents, http1, http2, protobuf
from loadtest.drill.hostile import peer as h2
from loadtest.drill.hostile.attacker import PAUSE_S, Attacker, EndedError

Kind: TypeAlias = Literal["message", "flood", "refused"]
Outcome: TypeAlias = Literal["refused", "served", "any"]

MESSAGE_MS = 50.0
LARGEST_JSON_MS = 100.0


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack.

    Attributes:
        name: of it.
        row: of the first table in docs/drills.md that it belongs to; `own` for ideas beside it.
        kind: `message` is one message, sent a few times; `flood` goes on for `--seconds`; `refused` is a large message
            that is sent `--refused` times and must leave nothing behind.
        run: what the attacking process does.
        outcome: of messages: refused (4xx and its like), served (200, OK), or whatever the server prefers.
        limit_ms: of messages: how long the loop may stand.
        must_end: of floods: whether the server must end the source, or refuse it.
        least_s: of floods: how long they last at least, where it is a timeout of seconds that ends the source.
        about: a line for people.
    """

    name: str
    row: str
    kind: Kind
    run: Callable[[Attacker], None]
    outcome: Outcome = "any"
    limit_ms: float = MESSAGE_MS
    must_end: bool = False
    least_s: float = 0.0
    about: str = ""


def _grpc(path: str, build: protobuf.Build, *, compressed: bool) -> Callable[[Attacker], None]:
    def run(attacker: Attacker) -> None:
        body = build(attacker.config)
        body = protobuf.compressed(body) if compressed else body
        for _ in range(attacker.config.repeats):
            attacker.tally.messages += 1
            with attacker.span():
                attacker.grpc_call(path, body, compressed=compressed)
            time.sleep(PAUSE_S)

    return run


def _http(build: documents.Build) -> Callable[[Attacker], None]:
    return http1.post(lambda attacker: build(attacker.config).request(attacker.config))


def _again(prepare: Callable[[Attacker], Callable[[], None]]) -> Callable[[Attacker], None]:
    """Sends a large message `--refused` times, from another address when one is turned away."""

    def run(attacker: Attacker) -> None:
        once = prepare(attacker)
        with attacker.span():
            for _ in range(attacker.config.refused):
                attacker.tally.messages += 1
                try:
                    once()
                except (EndedError, OSError, ValueError) as error:
                    attacker.ended(str(error))
                    attacker.next_source()

    return run


def _refused_grpc(path: str, build: protobuf.Build, *, compressed: bool) -> Callable[[Attacker], None]:
    def prepare(attacker: Attacker) -> Callable[[], None]:
        body = build(attacker.config)
        body = protobuf.compressed(body) if compressed else body
        return lambda: attacker.grpc_call(path, body, compressed=compressed)

    return _again(prepare)


def _refused_http(build: documents.Build) -> Callable[[Attacker], None]:
    def prepare(attacker: Attacker) -> Callable[[], None]:
        request = build(attacker.config).request(attacker.config)

        def once() -> None:
            sock = attacker.http()
            with sock:
                attacker.answered(attacker.exchange(sock, request))

        return once

    return _again(prepare)


def _cut_off(attacker: Attacker) -> Callable[[], None]:
    """A gRPC message of which half comes before the stream ends."""
    half = h2.message(bytes(16 << 20))[: 8 << 20]

    def once() -> None:
        with attacker.grpc() as sock:
            peer = h2.Http2Peer()
            attacker.send(sock, peer.begin())
            attacker.answered(str(attacker.call(sock, peer, protobuf.RANK, half)))

    return once


def _messages() -> Iterator[Attack]:
    for name, (path, build, row) in protobuf.MESSAGES.items():
        for compressed in (True, False):
            run = _grpc(path, build, compressed=compressed)
            method = path.rpartition("/")[2]
            about = f"{method}, {'gzip' if compressed else 'as it is'}"
            # The last entry of a key is the one that counts, so this one is valid.
            outcome: Outcome = "any" if name == "grpc-lookup-one-feature" else "refused"
            yield Attack(name if compressed else f"{name}-plain", row, "message", run, outcome, about=about)
    bombs: tuple[tuple[str, protobuf.Build], ...] = (
        ("grpc-gzip-bomb", lambda config: protobuf.bomb(900)),
        ("grpc-gzip-cut", lambda config: protobuf.bomb(1)[:-100]),
        ("grpc-gzip-garbage", lambda config: b"\x1f\x8b" + bytes(1 << 20)),
    )
    for name, build in bombs:
        yield Attack(name, "own", "message", _compressed_already(build), "refused", about="what it says is gzip")
    for name, (body, row, limit_ms) in documents.BODIES.items():
        yield Attack(name, row, "message", _http(body), "refused", limit_ms)
    for name, allowed in documents.ALLOWED.items():
        yield Attack(name, "own", "message", _http(allowed), "any", LARGEST_JSON_MS, about="as much as is allowed")
    yield Attack("grpc-reflection-v1", "15", "message", http2.reflection("v1", 1), "served")
    yield Attack("grpc-reflection-v1alpha", "15", "message", http2.reflection("v1alpha", 1), "served")
    for name, header, value in (
        ("nul", b"x-request-id", b"a\0b"),
        ("lf", b"x-request-id", b"a\nb: c"),
        ("cr", b"x-request-id", b"a\rb"),
        ("upper-case", b"X-Request-Id", b"a"),
    ):
        yield Attack(f"h2-header-{name}", "12", "message", http2.bad_header(header, value), "refused")
    for name, row, request in (
        ("http1-gzip-chunked", "12", http1.gzip_chunked),
        ("http1-trailers", "12", http1.long_trailers),
        ("http1-no-host", "12", http1.no_host),
        ("http1-two-hosts", "12", http1.two_hosts),
        ("http1-nul", "12", http1.nul_in_header),
        ("http1-two-lengths", "own", http1.two_lengths),
        ("http1-length-and-chunks", "own", http1.length_and_chunks),
        ("http1-long-head", "own", http1.long_head),
    ):
        yield Attack(name, row, "message", http1.post(request), "refused")
    yield Attack("http1-upgrade-h2c", "14", "message", http1.post(http1.upgrade_h2c), "served")


def _compressed_already(build: protobuf.Build) -> Callable[[Attacker], None]:
    def run(attacker: Attacker) -> None:
        body = build(attacker.config)
        for _ in range(attacker.config.repeats):
            attacker.tally.messages += 1
            with attacker.span():
                attacker.grpc_call(protobuf.INFER, body, compressed=True)
            time.sleep(PAUSE_S)

    return run


_SLOW = (
    "http1-unread",
    "http1-pipelined-unread",
    "http1-small-chunks",
    "http1-slow-head",
    "http1-slow-body",
    "h2-untaken",
)


def _floods() -> Iterator[Attack]:
    for name, row, frames, each in (
        ("h2-one-byte-data", "4", http2.one_byte_data, 700),
        ("h2-ended-stream-data", "4", http2.ended_stream_data, 700),
        ("h2-new-headers", "6", http2.new_headers, 1),
        ("h2-rapid-reset", "11", http2.rapid_reset, 50),
        ("h2-made-resets", "11", http2.made_resets, 50),
        ("h2-ping", "11", http2.ping, 500),
        ("h2-settings", "11", http2.settings, 500),
        ("h2-table-sizes", "11", http2.table_sizes, 1000),
        ("h2-window-update", "11", http2.window_updates, 500),
        ("h2-empty-data", "11", http2.empty_data, 700),
        ("h2-continuation", "11", http2.continuation, 500),
        ("h2-empty-continuation", "11", http2.empty_continuation, 500),
        ("h2-priority", "own", http2.priority, 500),
        ("h2-unknown-frames", "own", http2.unknown_frames, 500),
        ("h2-header-bomb", "own", http2.header_bomb, 1),
    ):
        yield Attack(name, row, "flood", http2.flood(frames, each), must_end=True)
    for name, row, run in (
        ("http1-pipelined-unread", "3", http1.pipelined(reads=False)),
        ("h2-reflection-100k", "8", http2.reflection("v1alpha", http2.REFLECTED)),
        ("h2-reflection-v1-100k", "8", http2.reflection("v1", http2.REFLECTED)),
        ("http1-idle", "9", http1.idle(lambda attacker: attacker.config.http_port)),
        ("h2-idle", "9", http1.idle(lambda attacker: attacker.config.grpc_port)),
        ("http1-reconnect", "11", http1.reconnect),
        ("h2-reconnect", "11", http2.reconnect),
        ("http1-malformed", "13", http1.malformed),
        ("http1-unread", "13", http1.unread),
        ("http1-small-chunks", "own", http1.small_chunks),
        ("http1-chunk-extensions", "own", http1.chunk_extensions),
        ("http1-endless-head", "own", http1.endless_head),
        ("http1-slow-head", "own", http1.slow_head),
        ("http1-slow-body", "own", http1.slow_body),
        ("h2-preface-garbage", "own", http2.preface_garbage),
        ("h2-untaken", "own", http2.untaken),
    ):
        yield Attack(name, row, "flood", run, must_end=True, least_s=10.0 if name in _SLOW else 0.0)
    # Each of these is answered as it asks to be: load, which is to be held back and need not be ended.
    yield Attack("http1-pipelined", "3", "flood", http1.pipelined(reads=True))
    yield Attack("http1-reconnect-get", "own", "flood", http1.reconnect_get)
    yield Attack("http1-metrics", "10", "flood", http1.metrics)


def _refusals() -> Iterator[Attack]:
    for name, run in (
        ("refused-grpc-int64", _refused_grpc(protobuf.INFER, protobuf.input_varints, compressed=True)),
        ("refused-grpc-outputs", _refused_grpc(protobuf.INFER, protobuf.MESSAGES["grpc-outputs"][1], compressed=True)),
        ("refused-grpc-features", _refused_grpc(protobuf.LOOKUP, protobuf.lookup_of_features, compressed=False)),
        ("refused-grpc-cut-off", _again(_cut_off)),
        ("refused-json-lookup", _refused_http(documents.BODIES["json-lookup-wrong-end"][0])),
        ("refused-json-rank", _refused_http(documents.BODIES["json-rank-wrong-end"][0])),
        ("refused-oip-json", _refused_http(documents.BODIES["oip-json-inputs"][0])),
    ):
        yield Attack(name, "2", "refused", run, "refused")


ATTACKS: dict[str, Attack] = {one.name: one for one in (*_messages(), *_floods(), *_refusals())}


def attack_named(name: str) -> Attack:
    """The attack. Raises DrillError for a name that there isn't."""
    if name not in ATTACKS:
        raise DrillError(f"attack {name!r}: there are {', '.join(ATTACKS)}")
    return ATTACKS[name]

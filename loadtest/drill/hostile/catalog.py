"""All attacks by name, and what each must come to.

`python -m loadtest.drill.hostile.catalog CONFIG` runs one, in a process of its own on one core, with a file that holds
an `AttackConfig` as JSON. Its one line on stdout is a `Tally`.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

from loadtest.drill.hostile import floods
from loadtest.drill.hostile import peer as h2
from loadtest.drill.hostile.attacker import AttackConfig, Attacker, EndedError
from loadtest.drill.hostile.messages import GRPC_RANK, MESSAGE_MS, MESSAGES, Form, HostileMessage, Outcome, half_message
from loadtest.drill.processes import module_config
from loadtest.errors import DrillError
from serving.api.grpc import wire

AttackKind: TypeAlias = Literal["message", "flood", "refused"]
Prepare = Callable[[Attacker], Callable[[], None]]
"""Make ready what is sent again and again."""

PAUSE_S = 0.5
SLOW_FLOOD_S = 10.0


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack.

    Attributes:
        name: of it.
        row: of the first table in docs/drills.md that it belongs to; `own` for ideas beside it.
        kind: `message` is one message, sent a few times; `flood` goes on for `--seconds`; `refused` is a large message
            that is sent `--refused` times and must leave nothing behind.
        run: what the attacking process does.
        outcome: of messages, as `HostileMessage` has it.
        limit_ms: of messages: how long the loop may stand.
        must_end: of floods: whether the server must end the source, or refuse it.
        least_s: of floods: how long they last at least, where it is a timeout of seconds that ends the source.
        about: a line for people.
    """

    name: str
    row: str
    kind: AttackKind
    run: Callable[[Attacker], None]
    outcome: Outcome = "any"
    limit_ms: float = MESSAGE_MS
    must_end: bool = False
    least_s: float = 0.0
    about: str = ""

    def __str__(self) -> str:
        row = "" if self.row == "own" else f"row {self.row}"
        return f"{self.name:28} {self.kind:8} {row:7} {self.about}".rstrip()


def few_times(prepare: Prepare) -> Callable[[Attacker], None]:
    """Send a message `--repeats` times."""

    def run(attacker: Attacker) -> None:
        once = prepare(attacker)
        for _ in range(attacker.config.repeats):
            attacker.tally.messages += 1
            with attacker.span():
                once()
            time.sleep(PAUSE_S)

    return run


def many_times(prepare: Prepare) -> Callable[[Attacker], None]:
    """Send a large message `--refused` times, from another address when one is turned away."""

    def run(attacker: Attacker) -> None:
        once = prepare(attacker)
        with attacker.span():
            for _ in range(attacker.config.refused):
                attacker.tally.messages += 1
                try:
                    once()
                except (EndedError, OSError, ValueError) as error:
                    attacker.ended(error)
                    attacker.next_source()

    return run


def prepared(message: HostileMessage, form: Form) -> Prepare:
    """Send a message on a connection of its own, and wait for its answer."""

    def prepare(attacker: Attacker) -> Callable[[], None]:
        data = message.encode(attacker.config, form)
        extra = tuple((name.encode(), value.encode()) for name, value in message.headers)
        if "gzip" in form:
            extra = ((b"grpc-encoding", b"gzip"), *extra)

        def over_http() -> None:
            with contextlib.closing(attacker.http()) as sock:
                attacker.exchange(sock, data)

        return partial(attacker.call, message.path, data, extra) if message.is_grpc else over_http

    return prepare


def _messages() -> Iterator[Attack]:
    for one in MESSAGES.values():
        method = one.path.rpartition("/")[2]
        about = "as much as is allowed" if one.name in ("json-lookup-full", "json-rank-full") else ""
        forms: dict[str, tuple[Form, str]] = {one.name: (one.form, about)}
        if one.form == "both":
            forms = {one.name: ("gzip", f"{method}, gzip"), f"{one.name}-plain": ("plain", f"{method}, as it is")}
        elif one.form == "as gzip":
            forms = {one.name: (one.form, "what it says is gzip")}
        for name, (form, about) in forms.items():
            run = few_times(prepared(one, form))
            yield Attack(name, one.row, "message", run, one.outcome, one.limit_ms, about=about)


# Floods by name, with their row. What waits for a timeout of the server's is in `_SLOW`.
_IDLE, _SLOW_ONES = floods.IDLE_CONNECTIONS, floods.SLOW_CONNECTIONS
_TABLE_SIZES = wire.settings({wire.HEADER_TABLE_SIZE: 0}) + wire.settings({wire.HEADER_TABLE_SIZE: 4096})
_FLOODS: dict[str, tuple[str, floods.Run]] = {
    "h2-one-byte-data": ("4", floods.frames(floods.one_byte_data, 700)),
    "h2-ended-stream-data": ("4", floods.frames(floods.ended_stream_data, 700)),
    "h2-new-headers": ("6", floods.frames(floods.new_headers, 1)),
    "h2-rapid-reset": ("11", floods.frames(floods.rapid_reset, 50)),
    "h2-made-resets": ("11", floods.frames(floods.made_resets, 50)),
    "h2-ping": ("11", floods.same_frame(wire.frame(wire.PING, 0, 0, bytes(8)))),
    "h2-settings": ("11", floods.same_frame(wire.settings({wire.INITIAL_WINDOW_SIZE: 65_535}))),
    "h2-table-sizes": ("11", floods.same_frame(_TABLE_SIZES)),
    "h2-window-update": ("11", floods.same_frame(wire.window_update(0, 1))),
    "h2-empty-data": ("11", floods.frames(floods.empty_data, 700)),
    "h2-continuation": ("11", floods.frames(floods.continuation(h2.header(b"a", b"b")), 500)),
    "h2-empty-continuation": ("11", floods.frames(floods.continuation(b""), 500)),
    "h2-priority": ("own", floods.same_frame(wire.frame(wire.PRIORITY, 0, 1, bytes((0, 0, 0, 0, 16))))),
    "h2-unknown-frames": ("own", floods.same_frame(wire.frame(0x7F, 0, 0, bytes(8)))),
    "h2-header-bomb": ("own", floods.frames(floods.header_bomb, 1)),
    "http1-pipelined-unread": ("3", floods.pipelined(reads=False)),
    "h2-reflection-100k": ("8", floods.reflection("v1alpha")),
    "h2-reflection-v1-100k": ("8", floods.reflection("v1")),
    "http1-idle": ("9", floods.hold("http", _IDLE, floods.nothing)),
    "h2-idle": ("9", floods.hold("grpc", _IDLE, floods.nothing)),
    "http1-reconnect": ("11", floods.reconnect("http", lambda attacker: floods.GET[:-4], waits=False)),
    "h2-reconnect": ("11", floods.reconnect("grpc", floods.call_of_nothing)),
    "http1-malformed": ("13", floods.reconnect("http", lambda attacker: floods.NOT_HTTP)),
    "http1-unread": ("13", floods.hold("http", floods.UNREAD_CONNECTIONS, floods.unread, reads=False)),
    "http1-small-chunks": ("own", floods.endless_body(b"1\r\n \r\n", 500)),
    "http1-chunk-extensions": ("own", floods.endless_body(b"1;a=" + b"x" * 1000 + b"\r\n \r\n", 10)),
    "http1-endless-head": ("own", floods.endless_head),
    "http1-slow-head": ("own", floods.hold("http", _SLOW_ONES, floods.slow_head)),
    "http1-slow-body": ("own", floods.hold("http", _SLOW_ONES, floods.slow_body)),
    "h2-preface-garbage": ("own", floods.reconnect("grpc", floods.preface_garbage)),
    "h2-untaken": ("own", floods.untaken),
    # Each of these is answered as it asks to be: load, which is to be held back and need not be ended.
    "http1-pipelined": ("3", floods.pipelined(reads=True)),
    "http1-reconnect-get": ("own", floods.reconnect("http", lambda attacker: floods.GET)),
    "http1-metrics": ("10", floods.metrics),
}
_LOAD = ("http1-pipelined", "http1-reconnect-get", "http1-metrics")
_SLOW = (
    *("http1-pipelined-unread", "http1-unread", "http1-small-chunks", "http1-slow-head", "http1-slow-body"),
    "h2-untaken",
)


def _floods() -> Iterator[Attack]:
    for name, (row, run) in _FLOODS.items():
        least_s = SLOW_FLOOD_S if name in _SLOW else 0
        yield Attack(name, row, "flood", run, must_end=name not in _LOAD, least_s=least_s)


def _refusals() -> Iterator[Attack]:
    # Half of a message comes before the stream ends.
    cut_off = HostileMessage("refused-grpc-cut-off", GRPC_RANK, half_message, form="framed")
    chosen: tuple[tuple[str, HostileMessage, Form], ...] = (
        ("refused-grpc-int64", MESSAGES["grpc-int64-contents"], "gzip"),
        ("refused-grpc-outputs", MESSAGES["grpc-outputs"], "gzip"),
        ("refused-grpc-features", MESSAGES["grpc-lookup-features"], "plain"),
        (cut_off.name, cut_off, "framed"),
        ("refused-json-lookup", MESSAGES["json-lookup-wrong-end"], "post"),
        ("refused-json-rank", MESSAGES["json-rank-wrong-end"], "post"),
        ("refused-oip-json", MESSAGES["oip-json-inputs"], "post"),
    )
    for name, message, form in chosen:
        yield Attack(name, "2", "refused", many_times(prepared(message, form)), "refused")


ATTACKS: dict[str, Attack] = {one.name: one for one in (*_messages(), *_floods(), *_refusals())}


def attack_named(name: str) -> Attack:
    """Return the attack. Raises DrillError for a name that there isn't."""
    if name not in ATTACKS:
        raise DrillError(f"attack {name!r}: there are {', '.join(ATTACKS)}")
    return ATTACKS[name]


def attack(config: AttackConfig) -> None:
    """Run an attack in this process, and print its tally."""
    if config.core is not None:
        os.sched_setaffinity(0, {config.core})
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    attacker = Attacker(config)
    attack_named(config.name).run(attacker)
    sys.stdout.write(attacker.tally.model_dump_json() + "\n")


if __name__ == "__main__":
    attack(module_config(AttackConfig))

"""Connections by bytes: what they read ahead, when they end, and what they charge."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest

from serving.api.http_connection import LINGER_S, TRANSITIONS, Event, State
from serving.limits import RequestLimits
from shardrank_testing.http_wire import LIMITS, Served, Wire, chunked, errors, post, read_from, settled, statuses
from shardrank_testing.waiting import Clock


@pytest.fixture(autouse=True, params=[True, False], ids=["ranked", "by an application"])
def is_ranked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Served, "is_ranked", request.param)


def read_all(data: bytes, connection: Any) -> None:
    """Have a connection read all of it, as an event loop does."""
    while data:
        data = data[read_from(data, connection) :]


async def test_only_what_one_read_brought_is_ahead_of_an_answer():
    served = Served(hold=True)
    connection, wire = served.connect()
    connection.data_received(post() * 500)
    await settled(lambda: served.calls)
    assert wire.is_paused
    assert served.buffers.buffered == 499 * len(post()) + len(b"abc")
    assert len(served.calls) == 1
    served.may_answer.set()
    await settled(lambda: len(served.calls) == 500)
    await settled(lambda: not wire.is_paused)
    assert statuses(wire.sent) == [200] * 500
    assert served.buffers.buffered == 0


async def test_a_request_sent_ahead_of_an_answer_stops_the_reading():
    served = Served(hold=True)
    connection, wire = served.connect()
    connection.data_received(post())
    await settled(lambda: served.calls)
    assert not wire.is_paused
    connection.data_received(post()[:10])
    assert wire.is_paused
    served.may_answer.set()
    await settled(lambda: not wire.is_paused)
    connection.data_received(post()[10:])
    await settled(lambda: len(served.calls) == 2)
    assert statuses(wire.sent) == [200, 200]


async def test_many_small_chunks_give_others_their_turn():
    # Each look at the clock takes 3 ms: a turn is over at the first.
    served = Served(RequestLimits(max_idle_work_ms=0), Clock(step=0.003))
    connection, wire = served.connect()
    sent = chunked([b"%d" % (number % 10) for number in range(5000)])
    connection.data_received(sent)
    assert wire.is_paused
    await settled(lambda: served.calls)
    assert served.calls[0][2] == b"0123456789" * 500
    await settled(lambda: wire.sent)
    assert not wire.is_paused
    assert statuses(wire.sent) == [200]


async def test_a_connection_that_works_for_nothing_is_ended():
    served = Served()
    connection, wire = served.connect()
    connection.data_received(post(b"x" * 90_000)[:200])
    reads = 0
    while not wire.is_closed:
        connection.data_received(b"x")
        reads += 1
    assert wire.is_aborted
    assert 10_000 < reads < 40_000
    connection.connection_lost(None)
    assert served.listener.refusal() is None
    assert errors(served.metrics)["idle_work"] == 1.0


async def test_the_connection_that_is_idle_for_longest_makes_room():
    served = Served(RequestLimits(max_connections=3))
    connections = [served.connect() for _ in range(2)]
    for connection, _ in reversed(connections):
        connection.data_received(post())
        await settled(lambda: len(served.listener.waiting[State.IDLE]) == len(served.calls))
    served.connect()
    assert served.listener.refusal() is None
    assert [wire.is_closed for _, wire in connections] == [False, True]


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_body_without_room_is_refused_and_frees_its_bytes(is_chunked):
    """The rest of it is dropped as it comes, and the connection goes on."""
    served = Served()
    served.buffers.max_bytes = 100_000
    body = bytes(90_000)
    sent = chunked([body[:30_000]] * 3) if is_chunked else post(body)
    others = [served.connect() for _ in range(2)]
    for connection, _ in others:
        connection.data_received(post(body)[:20_000])
    connection, wire = served.connect()
    for at in range(0, len(sent), 10_000):
        read_all(sent[at : at + 10_000], connection)
    answer = wire.sent
    assert statuses(answer) == [429]
    assert b"retry-after: 1" in answer
    assert served.buffers.buffered == sum(len(post(body)[:20_000]) - len(post(body)) + len(body) for _ in others)
    connection.data_received(post())
    await settled(lambda: len(served.calls) == 1)
    await settled(lambda: statuses(wire.sent) == [429, 200])
    assert not wire.is_closed


async def test_a_refused_request_ends_no_later_one():
    """Its task learns that its client left, and says only then that it is answered."""
    served = Served(hold=True)
    connection, wire = served.connect()
    read_all(chunked([bytes(30_000)])[:20_000], connection)
    served.buffers.max_bytes = 10_000
    read_all(chunked([bytes(30_000)])[20_000:], connection)
    assert statuses(wire.sent) == [429]
    served.buffers.max_bytes = 100_000
    connection.data_received(post())
    await settled(lambda: len(served.calls) == 1)
    served.listener.expire()
    served.clock.now += 2 * LINGER_S
    served.listener.expire()
    assert not wire.is_closed
    served.may_answer.set()
    await settled(lambda: statuses(wire.sent) == [429, 200])


async def test_what_is_sent_ahead_without_room_ends_the_connection():
    served = Served(hold=True)
    served.buffers.max_bytes = 20_000
    connection, wire = served.connect()
    connection.data_received(post())
    await settled(lambda: served.tasks)
    connection.data_received(post(bytes(9_000)))
    assert (statuses(wire.sent), wire.is_paused) == ([], True)
    connection.data_received(post(bytes(9_000)))
    assert (statuses(wire.sent), wire.is_closed, served.left) == ([429], True, 1)
    assert served.buffers.buffered == 0


async def test_refusals_that_are_not_read_are_not_written():
    served = Served(refuses=True)
    connection, wire = served.connect()

    def write(data: bytes) -> None:
        Wire.write(wire, data)
        connection.pause_writing()

    wire.write = write
    refused = post(b"", "x-refuse: 1")
    connection.data_received(refused * 3)
    connection.data_received(refused)
    assert (statuses(wire.sent), wire.is_paused) == ([503], True)
    for count in (2, 3, 4):
        connection.resume_writing()
        assert statuses(wire.sent) == [503] * count
    connection.resume_writing()
    assert (connection.state, wire.is_paused) == (State.IDLE, False)


def test_every_state_is_reached_and_left():
    reached = {after for row in TRANSITIONS.values() for after in row.values()}
    assert reached == set(State) - {State.NEW}
    assert {state for state in State if Event.LOST not in TRANSITIONS[state]} == {State.CLOSED}


async def test_the_largest_body_gives_way_to_a_small_request():
    served = Served()
    served.buffers.max_bytes = 100_000
    large, small = served.connect(), served.connect()
    read_all(post(bytes(90_000))[:49_000], large[0])
    served.buffers.max_bytes = 49_000
    small[0].data_received(post(b"x" * 500))
    await settled(lambda: statuses(small[1].sent) == [200])
    assert statuses(large[1].sent) == [429]
    assert served.buffers.buffered == 0


async def test_times_end_what_waits_and_nothing_else():
    served = Served(LIMITS.model_copy(update={"receive_timeout_s": 4.0, "keep_alive_s": 60.0}), hold=True)
    fresh, idle, half, busy, unread = (served.connect() for _ in range(5))
    half[0].data_received(post()[:-1])
    busy[0].data_received(post())
    served.clock.now += 3.9
    unread[0].data_received(post())
    unread[0].pause_writing()
    idle[0].data_received(post())
    await settled(lambda: len(served.calls) == 3)
    served.listener.expire()
    assert not any(wire.is_closed for _, wire in (fresh, idle, half, busy, unread))
    served.clock.now += 0.2
    served.listener.expire()
    assert (fresh[1].is_closed, fresh[1].sent) == (True, b"")
    assert (half[1].is_closed, statuses(half[1].sent)) == (True, [408])
    served.clock.now += 3.8
    served.listener.expire()
    assert unread[1].is_aborted
    unread[0].connection_lost(None)
    served.may_answer.set()
    await settled(lambda: idle[1].sent and busy[1].sent)
    served.clock.now += 59.0
    served.listener.expire()
    assert not busy[1].is_closed
    served.clock.now += 1.1
    served.listener.expire()
    assert busy[1].is_closed
    assert idle[1].is_closed


async def test_a_length_that_is_only_said_takes_no_memory():
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    served = Served(RequestLimits())
    length = served.listener.limits.max_body_bytes
    before = resident_bytes()
    connections = [served.connect()[0] for _ in range(20)]
    for connection in connections:
        connection.data_received(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\nx" % length)
    assert resident_bytes() - before < 4 * length
    for connection in connections:
        connection.drop()
        connection.connection_lost(None)


async def test_a_body_of_any_parts_is_held_once():
    """As few objects, however short its chunks are, and freed once it is refused."""
    served = Served(RequestLimits(max_header_bytes=2**20, max_idle_work_ms=0), hold=True)
    connection, wire = served.connect()
    read_all(chunked([b"ab"] * 50_000)[:-5], connection)
    assert [len(part) for part in connection._body_parts] == [2, 99_998]
    connection.expire(served.clock.now + 60)
    assert statuses(wire.sent) == [408]
    connection.connection_lost(None)
    assert (connection._body_parts, served.buffers.buffered) == ([], 0)


async def test_the_body_of_a_request_refused_by_its_head_is_not_kept():
    served = Served(RequestLimits(), refuses=True)
    connection, wire = served.connect()
    data = post(b"x" * 1_000_000, "x-refuse: 1")
    read_from(data[:1_000], connection)
    assert statuses(wire.sent) == [503]
    assert (connection.state, served.buffers.buffered) == (State.LINGERING, 0)
    left = memoryview(data)[1_000:]
    while left:
        left = left[read_from(left, connection) :]
    assert list(served.listener.waiting[State.IDLE]) == [connection]
    connection.data_received(post())
    await settled(lambda: served.calls)
    await settled(lambda: len(statuses(wire.sent)) == 2)
    assert statuses(wire.sent) == [503, 200]

    connection.data_received(data[:1_000])
    assert not wire.is_closed
    served.clock.now += LINGER_S
    served.listener.expire()
    assert wire.is_closed
    assert statuses(wire.sent) == [503, 200, 503]


async def test_a_client_has_read_one_answer_and_not_the_next():
    """The next request is not parsed before."""
    served = Served(hold=True)
    connection, wire = served.connect()
    read: list[str] = []
    connection.data_received(post())
    connection._exchange.once_sent(lambda: read.append("first"))
    await settled(lambda: served.calls)

    def write(data: bytes) -> None:
        Wire.write(wire, data)
        if data.endswith(b"3"):
            connection.pause_writing()

    wire.write = write
    served.may_answer.set()
    await settled(lambda: wire.sent.endswith(b"3"))
    served.may_answer.clear()
    connection.data_received(post())
    assert (read, wire.is_paused, served.calls[1:]) == ([], True, [])
    connection.resume_writing()
    assert read == ["first"]
    await settled(lambda: connection._exchange)
    assert not wire.is_paused
    exchange = connection._exchange
    exchange.once_sent(lambda: read.append("second"))
    connection.connection_lost(None)
    assert read == ["first", "second"]
    exchange.once_sent(lambda: read.append("late"))
    assert read[2:] == ["late"]


async def test_a_client_that_leaves_before_its_request_is_begun_gets_nothing_done():
    served = Served()
    connection, wire = served.connect()
    connection.data_received(post())
    connection.connection_lost(None)
    await settled(lambda: not served.tasks)
    assert (served.left, served.calls, wire.sent) == (1, [], b"")


async def test_a_client_that_expects_it_is_told_to_continue():
    served = Served()
    connection, wire = served.connect()
    sent = post(b"abc", "expect: 100-continue")
    connection.data_received(sent[:-3])
    await settled(lambda: wire.sent)
    assert wire.sent == b"HTTP/1.1 100 Continue\r\n\r\n"
    connection.data_received(sent[-3:])
    await settled(lambda: wire.sent.endswith(b"3"))
    assert statuses(wire.sent.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")) == [200]


async def test_a_request_that_is_cancelled_before_it_is_begun_ends_with_its_connection():
    served = Served()
    connection, _ = served.connect()
    connection.data_received(post())
    for task in served.tasks:
        task.cancel()
    await settled(lambda: not served.tasks)
    connection.connection_lost(None)
    assert (served.left, served.calls) == (1, [])


async def test_nothing_is_written_behind_an_answer_that_is_not_read():
    """Not the refusal of bytes that come meanwhile, for which there is no room, either."""
    served = Served(hold=True)
    connection, wire = served.connect()
    connection.data_received(post())
    await settled(lambda: served.calls)
    connection.pause_writing()
    served.may_answer.set()
    await settled(lambda: not served.tasks)
    served.buffers.max_bytes = 0
    connection.data_received(post()[:10])
    assert len(statuses(wire.sent)) == 1


async def test_an_answer_to_a_dropped_connection_is_not_written(caplog):
    served, taken = Served(hold=True), list[str]()
    connection, wire = served.connect()
    connection.data_received(post())
    await settled(lambda: served.calls)
    connection._exchange.once_sent(lambda: taken.append("over"))
    connection.drop()
    served.may_answer.set()
    await settled(lambda: not served.tasks)
    connection.connection_lost(None)
    assert (taken, wire.sent) == (["over"], b"")
    # uvicorn writes to the closed transport, which drops it; here that is an error.
    assert not (served.is_ranked and [record for record in caplog.records if record.exc_info])


async def test_a_client_that_leaves_leaves_no_reference_to_its_request():
    served = Served(hold=True)
    connection, _ = served.connect()
    connection.data_received(post())
    await settled(lambda: served.calls)
    exchange = connection._exchange
    connection.connection_lost(None)
    assert (exchange.respond, exchange.on_leave, served.left) == (None, None, 1)

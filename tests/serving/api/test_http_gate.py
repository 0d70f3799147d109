"""The gate by bytes: what it reads ahead, whom it ends, and when."""

from __future__ import annotations

import resource
from pathlib import Path

from serving.api.http_gate import LINGER_S
from serving.limits import RequestLimits
from shardrank_testing.http_wire import HOME, LIMITS, Served, chunked, errors, post, read_from, settled, statuses
from shardrank_testing.waiting import Clock


async def test_only_what_one_read_brought_is_ahead_of_an_answer():
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


async def test_a_request_sent_ahead_of_an_answer_stops_the_reading():
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


async def test_many_small_chunks_give_others_their_turn():
    # Each look at the clock takes 3 ms: a turn is over at the first.
    served = Served(RequestLimits(max_idle_work_ms=0), Clock(step=0.003))
    gate, wire = served.connect()
    sent = chunked([b"%d" % (number % 10) for number in range(5000)])
    gate.data_received(sent)
    assert wire.is_paused
    await settled(lambda: served.calls)
    assert served.calls[0][2] == b"0123456789" * 500
    await settled(lambda: wire.sent)
    assert not wire.is_paused
    assert statuses(wire.sent) == [200]


async def test_who_works_for_nothing_is_ended_and_its_address_waits():
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


async def test_idle_connections_of_the_busiest_address_make_room():
    served = Served(RequestLimits(max_connections=6))
    gates = [served.connect(address) for address in (HOME, "192.0.2.2", "192.0.2.2", "192.0.2.2", "192.0.2.3")]
    for gate, _ in gates:
        gate.data_received(post())
    await settled(lambda: len(served.gates.idle) == 5)
    served.connect("192.0.2.4")
    assert served.gates.refusal("192.0.2.9") is None
    assert [wire.is_closed for _, wire in gates] == [False, True, False, False, False]


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


async def test_a_length_that_is_only_said_takes_no_memory():
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    served = Served(RequestLimits())
    length = served.gates.limits.max_body_bytes
    before = resident_bytes()
    gates = [served.connect()[0] for _ in range(20)]
    for gate in gates:
        gate.data_received(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\nx" % length)
    assert resident_bytes() - before < 4 * length
    for gate in gates:
        gate.drop()
        gate.connection_lost(None)


async def test_the_memory_of_a_long_body_that_was_refused_is_freed():
    served = Served(hold=True)
    gate, _wire = served.connect()
    data = post(b"x" * 90_000)
    sent = read_from(data[:1_000], gate)
    await settled(lambda: served.gates.state.tasks)
    sent += read_from(data[sent : sent + 80_000], gate)
    assert len(gate._body) == 90_000
    # As an application that refuses a request without reading it.
    gate.owes = False
    sent += read_from(data[sent : sent + 1_000], gate)
    assert gate._body is None
    assert gate._left == len(data) - sent
    while sent < len(data):
        sent += read_from(data[sent:], gate)
    assert gate._phase == "head"
    gate.connection_lost(None)


async def test_the_body_of_a_request_refused_by_its_head_is_not_kept():
    served = Served(RequestLimits(), refuses=True)
    gate, wire = served.connect()
    data = post(b"x" * 1_000_000, "x-refuse: 1")
    read_from(data[:1_000], gate)
    assert statuses(wire.sent) == [503]
    assert gate._body is None
    assert list(served.gates.lingering) == [gate]
    left = memoryview(data)[1_000:]
    while left:
        left = left[read_from(left, gate) :]
    assert list(served.gates.idle) == [gate]
    gate.data_received(post())
    await settled(lambda: served.calls)
    await settled(lambda: len(statuses(wire.sent)) == 2)
    assert statuses(wire.sent) == [503, 200]

    gate.data_received(data[:1_000])
    assert not wire.is_closed
    served.clock.now += LINGER_S
    served.gates.sweep()
    assert wire.is_closed
    assert statuses(wire.sent) == [503, 200, 503]


async def test_a_client_has_read_one_answer_and_not_the_next():
    served = Served(hold=True)
    gate, _ = served.connect()
    taken = []
    gate.data_received(post())
    gate.when_taken(lambda: taken.append("first"))
    gate.pause_writing()
    gate.answered()
    assert taken == []
    gate.data_received(post())
    gate.when_taken(lambda: taken.append("second"))
    gate.resume_writing()
    assert taken == ["first"]
    gate.connection_lost(None)
    assert taken == ["first", "second"]
    gate.when_taken(lambda: taken.append("late"))
    assert taken[2:] == ["late"]
    # The answer that was being written when the connection was lost is told of as written.
    gate.answered()
    assert taken == ["first", "second", "late"]

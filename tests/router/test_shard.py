"""A shard with several replicas: which is sent a call, which is refused, and what happens as nodes join and leave."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader.errors import DeadlineExceededError, UnavailableError
from loader.snapshot.reader import Snapshot
from router.shard import STALE_S
from shard_node.answer import Answer
from shard_node.bags import Bags
from shard_node.engine.loading import load_tables
from shard_node.freshness import FORKED_AGE_MS, FreshnessBound
from shard_node.node import ShardNode
from shard_node.tracing import TRACED_LOOKUP, SpanContext, TracedLookup
from shardrank_testing.errors import raises_kind
from shardrank_testing.nodes import until
from shardrank_testing.otlp_receiver import KeptSpans
from shardrank_testing.replica_fleet import BAGS, PLAN, SPEC, ReplicaFleet
from shardrank_testing.snapshots import write_snapshot
from shardrank_testing.topologies import Topology, make_node


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory) -> Snapshot:
    return Snapshot.open(write_snapshot(tmp_path_factory.mktemp("store"), SPEC, seed=1)[0])


@pytest.fixture
async def fleet(snapshot: Snapshot, tmp_path: Path) -> AsyncIterator[ReplicaFleet]:
    async with contextlib.AsyncExitStack() as stack:
        yield ReplicaFleet(tmp_path, snapshot, stack)


async def test_with_no_replica_the_error_names_all_until_one_is_back(fleet):
    shard = fleet.shard(0, 1)
    with raises_kind("shard_unavailable", match=r"shard 0 of 1: no replica answered \(.*0\.sock.*; .*1\.sock"):
        await fleet.ask(shard)
    await fleet.start(1)
    answered = False
    while not answered:
        with contextlib.suppress(UnavailableError):
            await fleet.ask(shard)
            answered = True
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("shard_index", "replicate_bytes", "message"),
    [(1, 0, r"the node is shard 1 of 2 \(range\), needed is shard 0 of 2"), (0, 1 << 20, "by another plan")],
)
async def test_a_node_of_another_shard_or_plan_is_refused(fleet, shard_index, replicate_bytes, message):
    other = Topology(shards=2, replicate_bytes=replicate_bytes).plan(SPEC)
    await fleet.start(0, node=make_node(fleet.snapshot, other, shard_index))
    shard = fleet.shard(0, plan=Topology(shards=2).plan(SPEC))
    with raises_kind("shard_unavailable", match=message):
        await fleet.ask(shard)
    assert fleet.events == ["!unfit"]


@pytest.mark.parametrize("restart", [True, False])
async def test_another_snapshot_of_the_same_version_is_refused(fleet, restart):
    """After a restart of its node, or over the connection on which the right one was served before."""
    node, (model, version) = fleet.node(), (SPEC.model, fleet.snapshot.version)
    await fleet.start(0, node=node)
    shard = fleet.shard(0)
    await fleet.ask(shard)
    other = Snapshot.open(write_snapshot(fleet.folder / "other", SPEC, seed=2)[0])
    assert other.version == version
    if restart:
        await fleet.stop(0)
        await fleet.start(0, node=make_node(other, PLAN, 0))
    else:
        assert await asyncio.to_thread(node.generations.retire(model, version).retired.wait, 30)
        with raises_kind("shard_unavailable", match="is not here"):
            await fleet.ask(shard)
        node.generations.stage(model, version, load_tables(other, PLAN.partition(0), PLAN.digest))
    refused = ""
    while "another snapshot" not in refused:
        with raises_kind("shard_unavailable") as error:
            await fleet.ask(shard)
        refused = str(error.value)
        await asyncio.sleep(0.01)


async def test_a_node_that_never_reports_is_unavailable_and_no_deadline(fleet, monkeypatch):
    """Its check is out of time, not the lookup."""
    monkeypatch.setattr("router.shard_client.INFO_TIMEOUT_S", 0.05)
    await fleet.link(0)
    shard = fleet.shard(0)
    for _ in range(3):
        with raises_kind("shard_unavailable", match="no reply to INFO"):
            await fleet.ask(shard, timeout_s=20.0)


@pytest.mark.parametrize("count", [1, 2])
async def test_silent_nodes_cost_the_deadline_and_no_more(fleet, count):
    for number in range(count):
        await fleet.link(number)
    with pytest.raises(DeadlineExceededError, match=r"0\.sock: not connected after 0\.0"):
        await fleet.ask(fleet.shard(*range(count)), timeout_s=0.05)
    with raises_kind("shard_unavailable", match=r"deadline_exceeded: .*0\.sock: no reply within 0\.05 s"):
        await fleet.shard(*range(count)).connect(time.monotonic() + 0.05)
    # Each node reports of itself, and a silent one delays no other.
    await fleet.start(8, 9)
    infos = await fleet.shard(0, 8, 9).infos()
    assert [address for address, _ in infos] == [str(fleet.address(number)) for number in (8, 9)]
    assert all(info.identity == PLAN.identity(0) for _, info in infos)


async def test_a_slow_replica_is_ejected_until_it_is_fast_again(fleet):
    await fleet.start(1, 2)
    # Far more than a busy machine makes of the other one's answers.
    link = await fleet.link(0, to=2)
    link.delay_s = 0.2
    policy = {"min_answers": 4, "base_ejection_s": 0.2, "max_ejection_s": 0.2, "probes": 2, "slow_excess_ms": 20}
    shard = await fleet.connected(0, 1, **policy)
    while "!slow" not in fleet.events:
        await fleet.answer(shard)
    link.delay_s = 0.0
    while "in again" not in fleet.events:
        await fleet.answer(shard)
    assert set(fleet.events) == {"!slow", "in again"}


async def test_calls_in_flight_at_a_node_that_dies_are_answered(fleet):
    await fleet.start(1, 2)
    link = await fleet.link(0, to=2)
    shard = await fleet.connected(0, 1)
    link.opened.clear()
    calls = [asyncio.create_task(fleet.ask(shard)) for _ in range(40)]
    for answered in itertools.islice(asyncio.as_completed(calls), 20):
        await answered
    link.cut()
    await asyncio.gather(*calls)
    # Half of them were at the one that died; once is enough to know that it is gone.
    assert fleet.events.count("node_unavailable") == 20
    assert not [event for event in fleet.events if event.startswith("no ")]


async def test_without_budget_a_late_answer_is_waited_for(fleet):
    """And a failure is final."""
    await fleet.start(1, 9)
    link, no_budget = await fleet.link(0, to=9), {"budget_share": 0, "budget_per_s": 0}
    shard = await fleet.connected(0, 1, hedge_after_ms=100, budget_reserve=2, failures=1000, **no_budget)
    link.opened.clear()
    answered = 0
    for _ in range(8):
        with contextlib.suppress(DeadlineExceededError):
            await fleet.ask(shard, timeout_s=0.5)
            answered += 1
    assert fleet.events == ["late", "late", "no late", "no late"]
    assert answered == 6
    fleet.events.clear()
    node = fleet.node()
    await fleet.start(2, node=node)
    shard = await fleet.connected(2, 1, budget_reserve=0.5)
    node.generations.retire(SPEC.model, fleet.snapshot.version)
    with raises_kind("shard_unavailable", match=r"is not here.*; no other replica was tried: the budget of hedges"):
        await fleet.ask(shard)
    # A replica without the version comes last.
    await fleet.ask(shard)
    assert fleet.events == ["!unfit", "no generation_not_found"]


async def test_a_retry_after_nothing_was_sent_is_free(fleet):
    await fleet.start(1)
    await fleet.ask(fleet.shard(3, 1, budget_reserve=0), 3)
    assert fleet.events == ["node_unavailable"]


async def test_a_hanging_replica_is_overtaken_and_then_comes_last(fleet):
    await fleet.start(1, 9)
    link = await fleet.link(0, to=9)
    shard = await fleet.connected(0, 1, hedge_after_ms=50)
    link.opened.clear()
    requests = link.requests
    # A long deadline must not mean a long wait: the other replica is called as well.
    await fleet.ask(shard, 20, timeout_s=600.0)
    assert fleet.events == ["late", "late", "late", "!failures"]
    assert link.requests - requests == 3


async def test_of_many_calls_at_once_only_one_is_a_probe(fleet):
    await fleet.start(1, 9)
    link = await fleet.link(0, to=9)
    shard = await fleet.connected(0, 1, failures=1, hedge_after_ms=300, base_ejection_s=0.1)
    link.opened.clear()
    await fleet.ask(shard, 2)
    assert fleet.events == ["late", "!failures"]
    await asyncio.sleep(0.2)
    await asyncio.gather(*(fleet.ask(shard) for _ in range(10)))
    assert fleet.events == ["late", "!failures"] * 2


async def test_an_answer_that_does_not_fit_is_refused_and_retried(fleet):
    node = fleet.node()
    complete = node.answer

    def forgetful(*lookup: Any) -> Answer:
        answer = complete(*lookup)
        return Answer([sums[:-1] for sums in answer.sums], answer.stored)

    node.answer = forgetful
    await fleet.start(0, node=node)
    with raises_kind("shard_unavailable", match=r"sums of group 0 are \[1, 8\], not \[2, 8\]"):
        await fleet.ask(fleet.shard(0))
    assert fleet.events == []
    await fleet.start(1)
    await fleet.ask(await fleet.connected(0, 1), 4)
    assert set(fleet.events) == {"remote"}


@pytest.mark.parametrize(
    ("sequences", "answered", "events"),
    [
        ((2, 3), 3, ["!unfit", "replica_lags"]),
        # Where all replicas lag one of them answers, and reports it.
        ((2,), 2, ["!unfit"]),
        ((2, 2), 2, ["!unfit", "replica_lags", "!unfit"]),
        ((None, 3), 3, ["!unfit", "generation_not_found"]),
    ],
)
async def test_a_replica_without_version_or_deltas_comes_last(fleet, sequences, answered, events):
    for number, sequence in enumerate(sequences):
        await fleet.start(number, node=ShardNode(PLAN.identity(0)) if sequence is None else fleet.node(sequence))
    shard = fleet.shard(*range(len(sequences)))
    shard.min_sequence = 3
    for _ in range(6 if answered == 3 else 1):
        assert (await fleet.answer(shard)).sequence == answered
    assert fleet.events == events


@pytest.mark.parametrize("bound", [FreshnessBound(max_age_ms=60_000), FreshnessBound(min_sequence=3)])
async def test_a_lookup_with_a_bound_is_sent_to_a_replica_within_it(fleet, bound):
    """The other one is as good as before for lookups without a bound, and tried again after a while."""
    await fleet.start(0, node=fleet.node(2))
    await fleet.start(1, node=fleet.node(3, age_s=10.0))
    shard = fleet.shard(0, 1)
    for _ in range(6):
        answer = await fleet.answer(shard, bound=bound)
        assert (answer.sequence, 10_000 <= answer.age_ms <= 60_000) == (3, True)
    assert (fleet.events, fleet.lookups) == (["rows_stale"], {0: 1, 1: 6})
    await fleet.ask(shard, 4)
    assert fleet.lookups == {0: 3, 1: 8}
    for replica in shard._replicas:
        replica.old_until -= STALE_S
    assert [(await fleet.answer(shard, bound=bound)).sequence for _ in range(2)] == [3, 3]
    assert fleet.events == ["rows_stale", "rows_stale"]


async def test_a_bound_that_no_replica_meets_costs_no_budget_and_no_other_lookup(fleet):
    await fleet.start(0, 1, node=fleet.node(3, age_s=10.0))
    shard = fleet.shard(0, 1)
    for max_age_ms in [0] * 20 + [0, 60_000] * 20:
        assert (await fleet.answer(shard, bound=FreshnessBound(max_age_ms=max_age_ms))).sequence == 3
    assert fleet.events == ["rows_stale"]


@pytest.mark.parametrize(
    ("nodes", "bound", "answering"),
    [
        ([(2, 600.0, False), (2, 300.0, False)], FreshnessBound(max_age_ms=60_000), 1),
        ([(2, 600.0, False), (1, 900.0, False)], FreshnessBound(max_age_ms=60_000), 0),
        # Forked rows only where there are no others, however old these are.
        ([(9, 0.0, True), (2, 600.0, False)], FreshnessBound(max_age_ms=60_000), 1),
        ([(9, 0.0, True), (2, 600.0, False)], None, 1),
        ([(9, 0.0, True)], None, 0),
    ],
)
async def test_of_lagging_replicas_the_newest_answers(fleet, nodes, bound, answering):
    for number, (sequence, age_s, forked) in enumerate(nodes):
        await fleet.start(number, node=fleet.node(sequence, age_s, forked=forked))
    shard, (sequence, _, forked) = fleet.shard(*range(len(nodes))), nodes[answering]
    answer = await fleet.answer(shard, bound=bound)
    assert (answer.sequence, answer.age_ms == FORKED_AGE_MS) == (sequence, forked)
    assert ("!unfit" in fleet.events) == nodes[0][2]
    if forked:
        with raises_kind("shard_unavailable", match="has applied delta 9"):
            await shard.pool_at(SPEC.model, fleet.snapshot.version, BAGS, time.monotonic() + 30, 3)


async def test_of_replicas_beyond_a_bound_the_newest_is_tried_first(fleet):
    """It answers again as soon as it is within the bound."""
    nodes = [fleet.node(3, age_s) for age_s in (100.0, 10.0)]
    for number, node in enumerate(nodes):
        await fleet.start(number, node=node)
    shard, bound = fleet.shard(0, 1), FreshnessBound(max_age_ms=1000)
    assert (await fleet.answer(shard, bound=bound)).age_ms < 100_000
    deltas = nodes[1].generations.payload(SPEC.model, fleet.snapshot.version).deltas
    deltas.now = replace(deltas.now, fresh_at=time.time() + 600)
    for _ in range(6):
        assert (await fleet.answer(shard, bound=bound)).age_ms == 0


@pytest.mark.parametrize("bound", [FreshnessBound(max_age_ms=1000), None])
async def test_rows_that_lag_answer_where_the_other_replicas_hang(fleet, bound):
    """In time, wherever in the order the one that hangs is, and whether it is known to lag as well."""
    for number, age_s in ((9, 5.0), (1, 10.0), (2, 20.0)):
        await fleet.start(number, node=fleet.node(3, age_s, forked=bound is None))
    link = await fleet.link(0, to=9)
    shard = await fleet.connected(0, 1, 2)
    await fleet.answer(shard, bound=bound)
    link.opened.clear()
    for _ in range(6):
        answer = await fleet.answer(shard, 0.4, bound)
        assert answer.age_ms == FORKED_AGE_MS if bound is None else 10_000 <= answer.age_ms < 30_000


async def test_replicas_are_exchanged_under_load(fleet):
    await fleet.start(0, 1, 2)
    fleet.announce(0)
    shard, is_over, answers = fleet.shard(), False, 0

    async def load() -> None:
        nonlocal answers
        while not is_over:
            await fleet.ask(shard)
            answers += 1

    async with asyncio.TaskGroup() as callers:
        for _ in range(8):
            callers.create_task(load())
        for round_number in range(15):
            fleet.announce(*[(0, 1), (1,), (1, 2), (2, 0), (0,)][round_number % 5])
            enough = answers + 16
            await until(lambda enough=enough: answers >= enough)
        is_over = True
    assert all(fleet.lookups[number] for number in range(3))
    fleet.announce(0)
    await fleet.ask(shard)
    for number in (1, 2):
        await asyncio.gather(*(client.closed.wait() for client in fleet.clients[number]))
    assert not fleet.clients[0][-1].closed.is_set()


async def test_a_leaving_replica_answers_its_calls_first(fleet):
    await fleet.start(1, 9)
    link = await fleet.link(0, to=9)
    fleet.announce(0)
    shard = fleet.shard()
    await fleet.ask(shard)
    (leaving,) = fleet.clients[0]
    link.opened.clear()
    slow = asyncio.create_task(fleet.ask(shard))
    await until(lambda: fleet.lookups[9] == 2)
    fleet.announce(1)
    await fleet.ask(shard)
    assert not leaving.closed.is_set()
    link.opened.set()
    await slow
    await leaving.closed.wait()
    assert fleet.lookups[1] == 1


async def test_no_call_waits_for_a_newcomer(fleet):
    """One that is silent or has something else gets no call; without any node the error says so."""
    shard = fleet.shard()
    for call in (fleet.ask(shard), shard.infos(), shard.connect(time.monotonic() + 5)):
        with raises_kind("shard_unavailable", match="no node reports that this version is ready"):
            await call
    await fleet.start(0, 2)
    await fleet.start(3, node=make_node(fleet.snapshot, Topology(shards=2).plan(SPEC), 1))
    await fleet.link(1)
    fleet.announce(0)
    await fleet.ask(shard)
    fleet.announce(0, 1, 2, 3)
    await fleet.ask(shard, 10)
    await until(lambda: fleet.clients[2][0].connection is not None and "!unfit" in fleet.events)
    await fleet.ask(shard, 10)
    assert fleet.lookups[2] > 0
    assert fleet.lookups[1] == fleet.lookups[3] == 0


async def test_connecting_beforehand_leaves_nothing_for_the_first_call(fleet):
    """A node that was restarted is connected to again alongside the calls."""
    await fleet.start(0, 1)
    fleet.announce(0, 1, 2)  # the last is not there
    shard = await fleet.connected()
    clients = [fleet.clients[number][0] for number in (0, 1)]
    await fleet.ask(shard, 4)
    assert all(fleet.lookups[number] for number in (0, 1))
    assert [client.num_connections for client in clients] == [1, 1]
    await fleet.stop(0)
    await fleet.ask(shard, 2)
    await fleet.start(0)
    await until(lambda: clients[0].num_connections == 2)
    lookups = fleet.lookups[0]
    await fleet.ask(shard, 10)
    assert fleet.lookups[0] > lookups


async def test_a_newcomer_that_leaves_while_connecting_is_closed(fleet):
    await fleet.start(0)
    silent = await fleet.link(1)
    fleet.announce(0, 1)
    shard = fleet.shard()
    await fleet.ask(shard)
    await silent.connected.wait()
    fleet.announce()
    with raises_kind("shard_unavailable"):
        await fleet.ask(shard)
    await shard.close()
    assert all(client.closed.is_set() for (client,) in fleet.clients.values())


async def test_rows_at_a_sequence_come_from_a_node_that_has_it(fleet):
    version = fleet.snapshot.version
    await fleet.start(0, node=fleet.node(2))
    await fleet.start(1, node=fleet.node(3))
    shard = fleet.shard(0, 1)
    for _ in range(3):
        answer, applied = await shard.pool_at(SPEC.model, version, BAGS, time.monotonic() + 30, 3)
        np.testing.assert_array_equal(answer.sums[0], fleet.expected)
        assert applied == 3
    assert fleet.lookups[1] == 3
    with raises_kind("shard_unavailable", match="has applied delta 3, needed is 4"):
        await shard.pool_at(SPEC.model, version, BAGS, time.monotonic() + 30, 4)


async def test_a_cancelled_lookup_is_dropped_and_its_timer_too(fleet):
    await fleet.start(1, 9)
    link = await fleet.link(0, to=9)
    shard = await fleet.connected(0, 1, hedge_after_ms=200)
    link.opened.clear()
    lookups = [asyncio.create_task(fleet.ask(shard)) for _ in range(2)]
    await until(lambda: fleet.lookups[9] == 1)
    for lookup in lookups:
        lookup.cancel()
    await asyncio.sleep(0.5)
    assert fleet.events == []
    assert fleet.clients[0][0].connection.is_idle
    # A reply that is not awaited any more is dropped, and the connection is used again.
    link.opened.set()
    await fleet.ask(shard, 2)
    assert (fleet.lookups[9], fleet.clients[0][0].num_connections) == (2, 1)


async def test_each_attempt_of_a_traced_lookup_has_a_span(fleet):
    node, node_spans, spans, lookup = fleet.node(), KeptSpans(), KeptSpans(), SpanContext(5, 7)
    node.sink = node_spans
    await fleet.start(1, node=node)
    await fleet.start(9)
    link = await fleet.link(0, to=9)
    shard = await fleet.connected(0, 1, hedge_after_ms=20)
    link.opened.clear()
    token = TRACED_LOOKUP.set(TracedLookup(spans, lookup))
    await fleet.ask(shard)
    TRACED_LOOKUP.reset(token)
    await fleet.ask(shard)
    assert [span.attributes["server.address"] for span in spans.spans] == [str(fleet.address(n)) for n in (1, 0)]
    assert [span.error for span in spans.spans] == ["", "another replica replied first"]
    answered, _ = spans.spans
    assert (answered.parent, answered.attributes["shardrank.shard"]) == (lookup, 0)
    # Only this node takes traces.
    (pooled,) = node_spans.spans
    assert pooled.parent == answered.context
    assert answered.began <= pooled.began <= pooled.ended <= answered.ended


async def test_a_node_whose_disk_fails_answers_503_and_its_replica_is_asked(fleet, tmp_path):
    """The error names the file; a lookup fails once no replica has the row."""
    rows = np.arange(SPEC.tables[0].num_embeddings)
    bags = Bags.from_lengths(np.array([0], np.int32), np.array([rows.size]), np.ones(rows.size, np.int64), rows)
    for number in range(2):
        snapshot = Snapshot.open(shutil.copytree(fleet.snapshot.path, tmp_path / f"disk-{number}" / SPEC.model / "1"))
        await fleet.start(number, node=make_node(snapshot, PLAN, 0, memory_budget_bytes=0))
    shard, expected = await fleet.connected(0, 1), fleet.node().pool(SPEC.model, 1, bags)

    async def look_up() -> Answer:
        return await shard.pool(SPEC.model, 1, bags, time.monotonic() + 30)

    for number in range(2):
        for _ in range(4):
            np.testing.assert_array_equal((await look_up()).sums[0], expected[0])
        (file,) = (tmp_path / f"disk-{number}").rglob("rows-*")
        with file.open("r+b") as opened:
            opened.truncate(file.stat().st_size - 64)
    assert "rows_unreadable" in fleet.events
    with raises_kind("shard_unavailable", match=r"rows_unreadable: .*rows-\S+: the row at byte \d+"):
        await look_up()

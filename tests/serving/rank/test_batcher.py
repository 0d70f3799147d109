"""Requests wait for a replica, and lookups for room for their answers."""

from __future__ import annotations

import asyncio
import json
import socket
import threading

import pytest

from loader.errors import DeadlineExceededError, OverloadedError
from serving.limits import RequestLimits
from serving.observe.calls import Call
from serving.rank.batcher import MAX_WAITING_OF_AN_OWNER, Batcher, LookupMemoryLimit, finish
from shardrank_testing.nodes import until
from shardrank_testing.serving_api import MODEL, api_service, running_api
from shardrank_testing.waiting import Clock, Model


@pytest.fixture
def model() -> Model:
    return Model()


def unwoken() -> None:
    """Wake a replica of which a test takes batches itself."""


def test_an_idle_replica_is_woken_once(model):
    batcher, woken = Batcher(RequestLimits()), []
    assert batcher.pop(lambda: woken.append(1)) == []
    requests = [model.rank(), model.rank()]
    for request in requests:
        batcher.submit(request)
    assert woken == [1]
    assert batcher.pop(unwoken) == requests


# Sizes are (candidates, longest sequence), and None a lookup.
@pytest.mark.parametrize(
    ("limits", "sizes", "batches"),
    [
        # What is more than a batch's limit by itself goes alone.
        ({"max_batch_candidates": 10}, [(4, 1), (6, 1), (1, 1), (30, 1), (2, 1)], [2, 1, 1, 1]),
        # A pair is a candidate and an item of the batch's longest sequence, to which all others are padded.
        ({"max_batch_pairs": 1000}, [(10, 50), (10, 20), (1, 200), (4, 10), (50, 50)], [2, 2, 1]),
        ({}, [(1, 1), None, None, (1, 1)], [1, 1, 1, 1]),
    ],
)
def test_requests_are_joined_in_order_up_to_the_limits(model, limits, sizes, batches):
    batcher = Batcher(RequestLimits(**limits))
    waiting = [model.lookup() if size is None else model.sized(size[0], 1, size[1]) for size in sizes]
    for request in waiting:
        batcher.submit(request)
    taken = [batcher.pop(unwoken) for _ in batches]
    assert [len(batch) for batch in taken] == batches
    assert [request for batch in taken for request in batch] == waiting


def test_expired_and_abandoned_requests_are_never_run(model):
    clock = Clock()
    batcher = Batcher(RequestLimits(), clock)
    expired, abandoned, alive = model.rank(deadline=5.0), model.rank(), model.rank()
    for one in (expired, abandoned, alive):
        batcher.submit(one)
    abandoned.is_abandoned = True
    clock.now = 6.0
    assert batcher.pop(unwoken) == [alive]
    with pytest.raises(DeadlineExceededError):
        expired.future.result(0)
    assert model.leases == 1


def test_a_full_queue_drops_abandoned_requests_and_then_refuses(model):
    clock = Clock()
    batcher = Batcher(RequestLimits(max_queue=3), clock)
    expired, abandoned, alive = model.rank(deadline=5.0), model.rank(), model.rank()
    for one in (expired, abandoned, alive):
        batcher.submit(one)
    abandoned.is_abandoned = True
    clock.now = 6.0
    newest = [model.rank(), model.rank()]
    for one in newest:
        batcher.submit(one)
    with pytest.raises(DeadlineExceededError):
        expired.future.result(0)
    with pytest.raises(OverloadedError, match="max_queue = 3"):
        batcher.submit(model.rank())
    assert (batcher.num_waiting, model.leases) == (3, 3)
    assert batcher.pop(unwoken) == [alive, *newest]


def test_every_request_of_many_threads_is_taken_exactly_once(model):
    batcher = Batcher(RequestLimits(max_queue=1000, max_batch_requests=7))
    requests = [model.rank() for _ in range(300)]
    taken: list[Call] = []
    lock = threading.Lock()

    def replica() -> None:
        woken = threading.Event()
        while (batch := batcher.pop(woken.set)) is not None:
            if not batch:
                woken.wait()
                woken.clear()
            with lock:
                taken.extend(batch)
            finish([(one, RuntimeError("done")) for one in batch])

    replicas = [threading.Thread(target=replica) for _ in range(3)]
    submitters = [
        threading.Thread(target=lambda own=own: [batcher.submit(one) for one in own])
        for own in (requests[:150], requests[150:])
    ]
    for thread in replicas + submitters:
        thread.start()
    for one in requests:
        assert isinstance(one.future.exception(10), RuntimeError)
    batcher.close()
    for thread in replicas + submitters:
        thread.join()
    assert sorted(map(id, taken)) == sorted(map(id, requests))
    assert model.leases == 0


FAR_S = 30.0


async def asking(untaken: LookupMemoryLimit, owner: str, num_floats: int) -> asyncio.Task[None]:
    """A lookup that has asked for room."""
    task = asyncio.create_task(untaken.acquire(owner, num_floats, FAR_S))
    for _ in range(3):
        await asyncio.sleep(0)
    return task


async def test_one_owner_has_a_quarter_of_the_room_and_others_go_on():
    untaken = LookupMemoryLimit(400)
    await untaken.acquire("a", 100, FAR_S)
    waits = await asking(untaken, "a", 1)
    assert not waits.done()
    for owner in ("b", "c", "d"):
        await untaken.acquire(owner, 100, FAR_S)
    full = await asking(untaken, "e", 1)
    assert not full.done()
    untaken.release("b", 100)
    await full
    assert not waits.done()
    untaken.release("a", 100)
    await waits


async def test_who_waits_too_long_is_told_the_limit_and_makes_room():
    untaken = LookupMemoryLimit(400)
    await untaken.acquire("a", 100, FAR_S)
    with pytest.raises(DeadlineExceededError, match="max_untaken_floats = 400"):
        await untaken.acquire("a", 10, 0.01)
    untaken.release("a", 100)
    await untaken.acquire("a", 100, FAR_S)


async def test_an_owner_of_whom_many_wait_is_refused_at_once():
    untaken = LookupMemoryLimit(4)
    await untaken.acquire("a", 4, FAR_S)
    waiting = [await asking(untaken, "a", 1) for _ in range(MAX_WAITING_OF_AN_OWNER)]
    with pytest.raises(OverloadedError, match="lookups of this client wait"):
        await untaken.acquire("a", 1, FAR_S)
    waiting[0].cancel()
    await asyncio.gather(waiting[0], return_exceptions=True)
    last = await asking(untaken, "a", 1)
    assert not last.done()
    untaken.release("a", 4)
    await waiting[1]


BODY = json.dumps({"sparse": {"film": [7] * 30_000}}).encode()
HEAD = f"POST /v1/models/{MODEL}:lookup HTTP/1.1\r\nhost: x\r\ncontent-length: {len(BODY)}\r\n\r\n".encode()


async def test_unread_lookups_of_all_connections_are_bounded(api_model):
    # A row of 8 floats counts as 9; three answers of 2 MB are 270,000 floats each.
    limits = RequestLimits(
        receive_timeout_s=1.0, max_lookup_floats=2**20, max_bags_per_feature=2**20, max_untaken_floats=600_000
    )
    with api_service(api_model, limits) as service:
        async with running_api(service) as api:
            address = (api.listening.host, api.listening.http_port)
            peers = [socket.create_connection(address) for _ in range(3)]
            try:
                for peer in peers:
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                    await asyncio.to_thread(peer.sendall, HEAD + BODY)
                held = service.untaken._held
                # Two are answered; there is no room for one more.
                await until(lambda: service.in_flight == 1 and held.total() == 540_000)
                await until(lambda: held.total() == 0)
            finally:
                for peer in peers:
                    peer.close()
            # A client that reads its answers gets them.
            for _ in range(3):
                body = {"sparse": {"film": [7] * 100}}
                assert (await api.http.post(f"/v1/models/{MODEL}:lookup", json=body)).status_code == 200
            await until(lambda: held.total() == 0)

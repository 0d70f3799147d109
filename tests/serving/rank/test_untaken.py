"""The room that answers to lookups have until clients take them."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from serving.errors import OverloadedError
from serving.formats.requests import Encoded
from serving.limits import RequestLimits
from serving.rank.batcher import MAX_WAITING_OF_AN_OWNER, UntakenAnswers
from shard_node.errors import DeadlineExceededError
from shardrank_testing.serving_api import MODEL, api_service, run, running_api

FAR_S = 30.0


async def asking(untaken: UntakenAnswers, owner: str, num_floats: int) -> asyncio.Task[None]:
    """A lookup that has asked for room."""
    task = asyncio.create_task(untaken.take(owner, num_floats, FAR_S))
    for _ in range(3):
        await asyncio.sleep(0)
    return task


def test_one_owner_has_a_quarter_of_the_room_and_others_go_on():
    async def main() -> None:
        untaken = UntakenAnswers(400)
        await untaken.take("a", 100, FAR_S)
        waits = await asking(untaken, "a", 1)
        assert not waits.done()
        for owner in ("b", "c", "d"):
            await untaken.take(owner, 100, FAR_S)
        full = await asking(untaken, "e", 1)
        assert not full.done()
        untaken.give("b", 100)
        await full
        assert not waits.done()
        untaken.give("a", 100)
        await waits

    run(main())


def test_an_owner_without_a_name_may_have_all_the_room():
    async def main() -> None:
        untaken = UntakenAnswers(400)
        for _ in range(4):
            await untaken.take("", 100, FAR_S)
        assert not (await asking(untaken, "a", 1)).done()

    run(main())


def test_an_answer_larger_than_all_the_room_waits_until_it_is_alone_and_nobody_passes_it():
    async def main() -> None:
        untaken = UntakenAnswers(400)
        await untaken.take("a", 1, FAR_S)
        large = await asking(untaken, "b", 1000)
        small = await asking(untaken, "c", 1)
        assert (large.done(), small.done()) == (False, False)
        untaken.give("a", 1)
        await large
        assert not small.done()
        untaken.give("b", 1000)
        await small

    run(main())


def test_who_waits_too_long_is_told_the_limit_and_makes_room():
    async def main() -> None:
        untaken = UntakenAnswers(400)
        await untaken.take("a", 100, FAR_S)
        with pytest.raises(DeadlineExceededError, match="max_untaken_floats = 400"):
            await untaken.take("a", 10, 0.01)
        untaken.give("a", 100)
        await untaken.take("a", 100, FAR_S)

    run(main())


def test_who_gives_up_at_the_moment_of_being_let_in_leaves_no_room_taken():
    async def main() -> None:
        untaken = UntakenAnswers(400)
        await untaken.take("a", 100, FAR_S)
        given_up, let_in = await asking(untaken, "a", 60), await asking(untaken, "a", 70)
        given_up.cancel()
        await asyncio.sleep(0)
        untaken.give("a", 100)
        let_in.cancel()
        results = await asyncio.gather(given_up, let_in, return_exceptions=True)
        assert [type(one) for one in results] == [asyncio.CancelledError, asyncio.CancelledError]
        for _ in range(4):
            assert (await asking(untaken, "a", 25)).done()

    run(main())


def test_an_owner_of_whom_many_wait_is_refused_at_once():
    async def main() -> None:
        untaken = UntakenAnswers(4)
        await untaken.take("a", 4, FAR_S)
        waiting = [await asking(untaken, "a", 1) for _ in range(MAX_WAITING_OF_AN_OWNER)]
        with pytest.raises(OverloadedError, match="lookups of this client wait"):
            await untaken.take("a", 1, FAR_S)
        waiting[0].cancel()
        await asyncio.gather(waiting[0], return_exceptions=True)
        last = await asking(untaken, "a", 1)
        assert not last.done()
        untaken.give("a", 4)
        await waiting[1]

    run(main())


def test_answers_are_written_one_at_a_time_and_others_have_their_turn_in_between():
    told: list[Any] = []

    def pieces(name: str) -> Any:
        for number in range(3):
            told.append((name, number))
            yield name.encode()

    async def ticks() -> None:
        for _ in range(3):
            told.append("tick")
            await asyncio.sleep(0)

    async def main() -> None:
        untaken = UntakenAnswers(4)
        first, second, _ = await asyncio.gather(
            untaken.write(Encoded(b"<", more=pieces("a"))), untaken.write(Encoded(b"<", more=pieces("b"))), ticks()
        )
        assert (first.body, second.body) == (b"<aaa", b"<bbb")

    run(main())
    assert [one for one in told if one != "tick"] == [(name, number) for name in "ab" for number in range(3)]
    assert told.index("tick") < told.index(("a", 1))


def lookup_of(num_rows: int) -> bytes:
    body = json.dumps({"sparse": {"film": [7] * num_rows}}).encode()
    head = f"POST /v1/models/{MODEL}:lookup HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def until_true(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # another party's state
            await asyncio.sleep(0.005)


def test_lookups_of_clients_that_take_nothing_stay_within_their_share_and_are_given_up(api_model):
    # A row of 8 floats counts as 9; three answers of 2 MB are 270,000 floats each.
    limits = RequestLimits(
        receive_timeout_s=1.0, max_lookup_floats=2**20, max_bags_per_feature=2**20, max_untaken_floats=1_200_000
    )

    async def main() -> None:
        with api_service(api_model, limits) as service:
            async with running_api(service) as api:
                address = (api.listening.host, api.listening.http_port)
                peers = [socket.create_connection(address) for _ in range(3)]
                try:
                    for peer in peers:
                        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                        await asyncio.to_thread(peer.sendall, lookup_of(30_000))
                    held = service.untaken._held
                    # The first is answered; there is no room for one more of this address.
                    await until_true(lambda: service.in_flight == 2 and held.total() == 270_000)
                    await until_true(lambda: held.total() == 0)
                finally:
                    for peer in peers:
                        peer.close()
                # Whoever takes answers gets them.
                with socket.create_connection(address) as peer:
                    for _ in range(3):
                        await asyncio.to_thread(peer.sendall, lookup_of(100))
                        assert (await asyncio.to_thread(peer.recv, 15)) == b"HTTP/1.1 200 OK"
                        await asyncio.to_thread(read_to_end_of_answer, peer)
                await until_true(lambda: held.total() == 0)

    run(main())


def read_to_end_of_answer(peer: socket.socket) -> None:
    data = b""
    while not data.endswith(b"}}"):
        data += peer.recv(65_536)

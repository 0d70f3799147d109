"""Where a request is pooled: by the event loop while that has time to spare, else by a thread."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard_node.answer import Answer
from shard_node.wire.messages import Buffer, decode_answer, encode_pool
from shard_node.wire.server import SPARE_SAVED_S, SPARE_SHARE, RequestHandler, ServerLimits, SpareTime
from shardrank_testing.nodes import MODEL, VERSION, HookedEngine, film_bags, received, reference_engine, small_node

ROW = 42
# 32 KB of answer: too long for what is pooled by the loop in any case.
LONG = film_bags([ROW], *[[7]] * 1000)


class Handled:
    """A handler on a clock that only pooling moves, and the threads that pooled."""

    def __init__(self, limits: ServerLimits, pooling_s: float) -> None:
        self.now = 100.0
        self._pooling_s = pooling_s
        self.threads: list[int] = []
        self.handler = RequestHandler(small_node(HookedEngine({ROW: self._pooled})), limits, lambda: self.now)

    def _pooled(self) -> None:
        self.threads.append(threading.get_ident())
        self.now += self._pooling_s

    async def ask(self, bags) -> Answer:
        answered: asyncio.Future[list[Buffer]] = asyncio.get_running_loop().create_future()
        frame = received(encode_pool(1, 0, MODEL, VERSION, bags))
        self.handler.handle(frame, None, answered.set_result, lambda: True)
        return decode_answer(received(await answered))

    def by_loop(self) -> list[bool]:
        return [one == threading.get_ident() for one in self.threads]


def pooled_by_loop(limits: ServerLimits, pooling_s: float, requests: list) -> list[bool]:
    async def main():
        handled = Handled(limits, pooling_s)
        for bags in requests:
            np.testing.assert_array_equal((await handled.ask(bags)).sums[1], reference_engine().pool(bags)[1])
        await handled.handler.close()
        return handled.by_loop()

    return asyncio.run(main())


def test_the_loop_pools_long_requests_in_its_spare_time():
    saved = int(SPARE_SAVED_S / (0.001 * (1 - SPARE_SHARE)))
    # Each takes 1 ms of the clock, of which half comes back meanwhile: what was saved lasts for twice as many.
    by_loop = pooled_by_loop(ServerLimits(), 0.001, [LONG] * (saved + 4))
    assert by_loop[:saved] == [True] * saved
    # A thread's 1 ms passes as well, so from now on loop and threads take turns.
    assert set(by_loop[saved:]) == {True, False}


@pytest.mark.parametrize(
    ("limits", "bags", "by_loop"),
    [
        (ServerLimits(), film_bags([ROW]), True),
        (ServerLimits(max_inline_bytes=0), LONG, False),
        (ServerLimits(max_spare_inline_bytes=0), LONG, False),
        (ServerLimits(max_spare_inline_bytes=32_000), LONG, False),
    ],
    ids=["short", "none may", "no long one may", "this one is longer"],
)
def test_limits_decide_whether_loop_or_threads_pool(limits, bags, by_loop):
    assert pooled_by_loop(limits, 1.0 if by_loop else 0.0, [bags] * 5) == [by_loop] * 5


@given(
    share=st.floats(0.1, 0.9),
    pieces=st.lists(st.tuples(st.floats(1e-5, 0.01), st.floats(0, 0.01)), min_size=50, max_size=200),
)
def test_spare_time_is_a_bounded_share_of_all(share, pieces):
    saved_s, now, spent = 0.005, 0.0, 0.0
    spare = SpareTime(share, saved_s, now)
    for work_s, pause_s in pieces:
        if spare.is_left(now):
            spare.spend(work_s)
            spent += work_s
            now += work_s
        now += pause_s
    assert spent <= share * now + saved_s + max(work_s for work_s, _ in pieces) + 1e-9

"""One timer for the deadlines of many requests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvloop

from serving.rank.batcher import Expiry
from shard_node.errors import DeadlineExceededError


def run(main: Any) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(30):
            return await main()

    return uvloop.run(bounded())


@pytest.mark.parametrize("delays_ms", [(60, 20, 40), (20, 40, 60), (40, 20, 20), (0, -5, 30)])
def test_each_future_fails_in_the_order_of_the_deadlines(delays_ms):
    async def main() -> None:
        loop = asyncio.get_running_loop()
        expiry, failed, futures = Expiry(loop), [], []
        for delay_ms in delays_ms:
            future = loop.create_future()
            future.add_done_callback(lambda _, delay_ms=delay_ms: failed.append(max(0, delay_ms)))
            expiry.add(future, delay_ms / 1000)
            futures.append(future)
        await asyncio.wait(futures)
        assert all(isinstance(future.exception(), DeadlineExceededError) for future in futures)
        assert failed == sorted(max(0, delay_ms) for delay_ms in delays_ms)
        assert not expiry._due

    run(main)


def test_what_was_taken_off_or_is_done_is_left_alone_and_later_ones_still_fail():
    async def main() -> None:
        loop = asyncio.get_running_loop()
        expiry = Expiry(loop)
        taken_off, done, waits = (loop.create_future() for _ in range(3))
        for future, delay_s in ((taken_off, 0.005), (done, 0.01), (waits, 0.03)):
            expiry.add(future, delay_s)
        expiry.discard(taken_off)
        expiry.discard(taken_off)
        done.set_result(5)
        with pytest.raises(DeadlineExceededError, match="deadline passed"):
            await waits
        assert not taken_off.done()
        assert done.result() == 5

    run(main)


def test_the_loop_gets_one_timer_for_requests_of_equal_timeouts(monkeypatch):
    async def main() -> int:
        loop = asyncio.get_running_loop()
        expiry, armed = Expiry(loop), []
        monkeypatch.setattr(expiry, "_arm", lambda due, arm=expiry._arm: (armed.append(due), arm(due)))
        for _ in range(100):
            future = loop.create_future()
            expiry.add(future, 60.0)
            expiry.discard(future)
        return len(armed)

    assert run(main) == 1

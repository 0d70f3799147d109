from __future__ import annotations

import asyncio
import random
from pathlib import Path

from loader.registry.opening import open_registry
from shardrank_testing.registries import redis_server


def test_whoever_works_with_redis_ends_when_it_is_cancelled_at_whatever_moment(tmp_path: Path):
    draw = random.Random(0)

    async def main() -> None:
        registry = open_registry(server.url)

        async def work() -> None:
            while True:
                await registry.get("wanted/films")

        for _ in range(300):
            task = asyncio.create_task(work())
            await asyncio.sleep(0.003 * draw.random())
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=10)
            assert task in done
            assert task.cancelled()
        await registry.close()

    with redis_server(tmp_path) as server:
        asyncio.run(main())

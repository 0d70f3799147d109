"""The shard nodes that train a version, as one of its workers reaches them: rows are pulled, gradients pushed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from loader.errors import DeadlineExceededError, OverloadedError
from loader.snapshot.manifest import ModelSpec
from router.plan import BucketOwners, Plan
from router.shard_client import ShardClient, within
from shard_node.answer import Answer
from shard_node.bags import Bags, Float32Array, Int64Array
from shard_node.errors import NodeUnavailableError, PushRefusedError
from shard_node.node import NodeInfo
from shard_node.training.push import Push
from shard_node.training.trained_rows import initial_rows
from shard_node.wire.address import Address
from shard_node.wire.frame import MAX_BUDGET_US, FrameType
from shard_node.wire.messages import decode_answer, encode_pool

T = TypeVar("T")
logger = logging.getLogger(__name__)

PULL_TIMEOUT_S: Final = 10.0
PUSH_TIMEOUT_S: Final = 30.0
"""Then the push is sent again: its answer is withheld for as long as others need, or was lost with a connection."""
RETRY_S: Final = 0.1


class ParameterServers:
    """The servers of one version, by number of the shard, for one worker. Belongs to one event loop.

    Where a server can't be reached, pulls and pushes are repeated until it can. `pulled_bytes` and `pushed_bytes` are
    those of numbers of rows and of gradients alone, by server. Raises as `Plan.make`.
    """

    def __init__(self, addresses: Sequence[str], spec: ModelSpec, version: int, worker: int, init_scale: float) -> None:
        plan = Plan.make(spec, num_shards=len(addresses), replicate_bytes=0)
        self._model, self._version, self._worker, self._init_scale = spec.model, version, worker, init_scale
        self._layout, self._owners = plan.layout, BucketOwners(plan)
        self._clients = [ShardClient(Address.parse(address)) for address in addresses]
        self.pulled_bytes, self.pushed_bytes = [0] * len(addresses), [0] * len(addresses)

    async def pull(self, ids: Mapping[int, Int64Array]) -> dict[int, Float32Array]:
        """Return rows, float32 [n, embedding_dim], of different ids, int64 [n], by number of the table.

        Keys that no server has yet get the rows that they will begin with.
        """
        rows = {
            table: np.empty((of.size, self._layout.tables[table].embedding_dim), np.float32)
            for table, of in ids.items()
        }

        async def pull_from(shard: int, at: dict[int, Int64Array]) -> None:
            some = {table: ids[table][positions] for table, positions in at.items()}
            answer = await self._until_answered(partial(self._pool, self._clients[shard], some))
            for table, values in self._rows_of(some, answer):
                rows[table][at[table]] = values
                self.pulled_bytes[shard] += values.nbytes

        await asyncio.gather(*(pull_from(shard, at) for shard, at in enumerate(self._divided(ids)) if at))
        return rows

    async def push(self, step: int, gradients: Mapping[int, tuple[Int64Array, Float32Array]]) -> None:
        """Push a step's gradients, by number of the table: different ids, int64 [n], and float32 [n, embedding_dim].

        Returns once every server has answered. Raises PushRefusedError where another step is due.
        """

        async def push_to(shard: int, at: dict[int, Int64Array]) -> None:
            some = {table: (gradients[table][0][chosen], gradients[table][1][chosen]) for table, chosen in at.items()}
            await self._push_to(self._clients[shard], Push(self._worker, step, some))
            self.pushed_bytes[shard] += sum(values.nbytes for _, values in some.values())

        divided = self._divided({table: ids for table, (ids, _) in gradients.items()})
        # All of them end, whatever one answers: none is pushed again while it is still in flight.
        answers = await asyncio.gather(
            *(push_to(shard, at) for shard, at in enumerate(divided)), return_exceptions=True
        )
        for error in answers:
            if error is not None:
                raise error

    async def resume_step(self) -> int:
        """Return the step at which the worker goes on: the lowest that a server expects.

        One that died while it pushed has a step on some servers and not on others, and pushes that again. Where some
        count it as gone, the steps that it leaves out there are without its gradients on all.
        """
        while True:
            infos = await self._infos()
            due, is_active = list[int](), list[bool]()
            for client, info in zip(self._clients, infos, strict=True):
                if info.training is None:
                    raise PushRefusedError(f"{client.address} trains nothing", kind="not_training")
                if self._worker >= len(info.training.steps):
                    raise PushRefusedError(f"worker {self._worker} is none of 0..{len(info.training.steps) - 1}")
                due.append(info.training.resume_steps[self._worker])
                is_active.append(info.training.is_active[self._worker])
            if all(is_active) and max(due) - min(due) <= 1:
                return min(due)
            if not all(is_active) and await self._push_skipped(due, is_active):
                return max(due)
            await asyncio.sleep(RETRY_S)

    async def last_step(self) -> int:
        """Return the highest step that any worker has pushed to any server."""
        return max(
            step
            for info in await self._infos()
            for step in (info.training.steps if info.training is not None else (0,))
        )

    async def _push_skipped(self, due: list[int], is_active: list[bool]) -> bool:
        """Push steps without gradients where others wait for them, up to the highest due; False if one is not."""
        for client, first, is_due in zip(self._clients, due, is_active, strict=True):
            for step in range(first, max(due) if is_due else first):
                try:
                    await self._push_to(client, Push(self._worker, step, {}))
                except PushRefusedError as error:
                    if error.kind != "push_step":
                        raise
                    return False
        return True

    async def _infos(self) -> list[NodeInfo]:
        return await asyncio.gather(*(self._until_answered(client.info) for client in self._clients))

    async def _push_to(self, client: ShardClient, push: Push) -> None:
        await self._until_answered(partial(client.push, self._model, self._version, push, PUSH_TIMEOUT_S))

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(client.close() for client in self._clients))

    def _divided(self, ids: Mapping[int, Int64Array]) -> list[dict[int, Int64Array]]:
        """Return the positions of each server's ids, by table in ascending order; tables without any are left out."""
        tables = sorted(table for table, of in ids.items() if of.size)
        divided: list[dict[int, Int64Array]] = [{} for _ in self._clients]
        if tables:
            owners = self._owners.of(_bags({table: ids[table] for table in tables}), _no_shards, 0)
            ends = np.cumsum([ids[table].size for table in tables])
            for table, of_table in zip(tables, np.split(owners, ends[:-1]), strict=True):
                for shard, at in enumerate(divided):
                    if (positions := (of_table == shard).nonzero()[0]).size:
                        at[table] = positions
        return divided

    async def _pool(self, client: ShardClient, ids: Mapping[int, Int64Array]) -> Answer:
        request = encode_pool, min(int(PULL_TIMEOUT_S * 1e6), MAX_BUDGET_US), self._model, self._version, _bags(ids)
        async with within(PULL_TIMEOUT_S, f"{client.address}: no rows"):
            return await (await client.ready()).exchange((FrameType.POOLED,), decode_answer, *request)

    def _rows_of(self, ids: Mapping[int, Int64Array], answer: Answer) -> Iterator[tuple[int, Float32Array]]:
        """Yield the rows of each table; an answer has a block for each group of tables, in their order."""
        answer.check(self._layout, _bags(ids))
        is_missing = np.zeros(sum(of.size for of in ids.values()), np.bool_)
        is_missing[answer.missing] = True
        start = 0
        for group, sums in zip(self._layout.groups, answer.sums, strict=True):
            row = 0
            for table in (table for table in ids if group.first_table <= table < group.end_table):
                count = ids[table].size
                values = np.array(sums[row : row + count], np.float32)
                missing = is_missing[start : start + count]
                values[missing] = initial_rows(ids[table][missing], values.shape[1], self._init_scale)
                yield table, values
                row, start = row + count, start + count

    async def _until_answered(self, call: Callable[[], Awaitable[T]]) -> T:
        reported = ""
        while True:
            try:
                return await call()
            except (NodeUnavailableError, DeadlineExceededError, OverloadedError) as error:
                if str(error) != reported:
                    logger.warning("%s: tried again until it answers", error)
                reported = str(error)
                await asyncio.sleep(RETRY_S)


def _bags(ids: Mapping[int, Int64Array]) -> Bags:
    """Make a bag of each id, table after table; tables ascend."""
    sizes = np.array([of.size for of in ids.values()], np.int64)
    values = np.concatenate(list(ids.values()))
    return Bags(np.array(list(ids), np.int32), sizes, np.arange(values.size + 1), values)


def _no_shards() -> npt.NDArray[np.int16]:
    raise AssertionError("no table is on every shard")

"""Dense weights that change while it serves: right scores, never rows older than a step needs, refused steps named."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from loader.deltas.dense import KEPT_STEPS, steps_folder, write_step
from loader.deltas.publisher import AsyncDeltaPublisher
from loader.registry.fleet import FleetRegistry
from loader.registry.opening import open_registry
from loader.snapshot.reader import Snapshot
from loader.snapshot.store import Store
from router.errors import ShardUnavailableError
from serving.rank.ranking import Ranking
from serving.rank.service import RankingService
from serving.versions.dense_steps import READ_FOR_S, DenseSteps
from shard_node.node import DeltaProgress
from shardrank_testing.agent_fleet import agent_fleet, with_live
from shardrank_testing.deltas import register_version
from shardrank_testing.registries import registry_of
from shardrank_testing.serving_api import FILMS, MODEL, ApiModel, api_request, run, running_api, served_service

REQUEST = api_request(1)
NUM_STATES = 4
LOCAL = pytest.mark.parametrize("local", [False, True], ids=["shards", "local"])


def films(state: int) -> np.ndarray:
    return np.full((FILMS, 8), 0.5 * state, np.float32)


def tensors_of(model: ApiModel, step: int) -> dict[str, torch.Tensor]:
    return {name: tensor * (1 + 0.3 * step) for name, tensor in model.tensors.items()}


def expected(model: ApiModel, state: int, step: int) -> np.ndarray:
    """The scores of rows after `state` deltas by the weights of a step, by definition."""
    tables = model.tables if state == 0 else {**model.tables, "films": films(state)}
    return ApiModel(model.path, model.spec, tables, tensors_of(model, step)).scores(REQUEST).reshape(-1)


async def asked(api) -> dict:
    answer = await api.http.post(f"/v1/models/{MODEL}:rank", json=REQUEST)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def until_step(fleet, step: int) -> None:
    await fleet.until("serve-0", lambda told: told.report(MODEL, 1).dense_step == step)


@LOCAL
def test_answers_are_of_one_step_and_of_rows_that_have_its_deltas(versions, store, folder, local):
    model = versions[1]
    scores = {(state, step): expected(model, state, step) for state in range(NUM_STATES) for step in range(NUM_STATES)}
    seen: Counter[tuple[int, int]] = Counter()

    async def ask_always(api, ended: asyncio.Event) -> None:
        while not ended.is_set():
            answer = await asked(api)
            step, found = answer["dense_step"], np.array(answer["scores"])
            states = [
                state for state in range(NUM_STATES) if np.allclose(found, scores[state, step], rtol=1e-3, atol=1e-4)
            ]
            # Rows of exactly one state: an answer of two steps, or of half a delta, fits none.
            assert len(states) == 1, (step, found)
            # Newer rows are allowed, older ones are not.
            assert states[0] >= step
            seen[states[0], step] += 1

    async def main() -> None:
        # Rows of two shards may be of two states, both new enough; of one shard they are of one.
        async with agent_fleet(folder, store, shards=1, replicas=0 if local else 2) as fleet:
            _, service = await with_live(fleet, versions, local=local)
            publisher = AsyncDeltaPublisher(fleet.fleet.registry, MODEL, 1, store)
            ended = asyncio.Event()
            async with running_api(service) as api:
                asking = [asyncio.create_task(ask_always(api, ended)) for _ in range(3)]
                for state in range(1, NUM_STATES):
                    sequence = await publisher.publish("films", np.arange(FILMS), films(state))
                    assert await publisher.publish_dense(state, tensors_of(model, state), max_drift=1.0) == sequence
                    await until_step(fleet, state)
                    while seen[state, state] < 3:
                        await asyncio.sleep(0.01)
                        for task in asking:
                            if task.done():
                                task.result()
                ended.set()
                await asyncio.gather(*asking)

    run(main())
    assert seen[NUM_STATES - 1, NUM_STATES - 1]


def test_a_step_waits_for_rows_and_goes_back_for_a_replica_that_lags(versions, store, folder):
    async def main() -> None:
        async with agent_fleet(folder, store, shards=1, replicas=0) as fleet:
            _, service = await with_live(fleet, versions, local=True)
            publisher = AsyncDeltaPublisher(fleet.fleet.registry, MODEL, 1, store)
            await publisher.publish("films", [1], films(1)[:1])
            await publisher.publish_dense(4, tensors_of(versions[1], 1), max_drift=1.0)
            await until_step(fleet, 4)
            served = service.generations.payload(MODEL, 1)

            async def choose(ranking: Ranking) -> list[object]:
                found: list[object] = [ranking.choose(0).dense_step, ranking.choose(1).dense_step]
                found += [ranking.choose(2**63 - 1).dense_step, ranking.choose(0).dense_step]
                # Of a node that does not tell, only the snapshot's own weights are safe.
                found.append(ranking.choose(-1).dense_step)
                ranking.offer(dataclasses.replace(ranking.parts, dense_step=5, min_sequence=7))
                found += [ranking.choose(1).dense_step, ranking.choose(7).dense_step]
                with pytest.raises(ShardUnavailableError, match="rows are of delta 0, dense step 4 needs 1"):
                    ranking.choose(0)
                return found

            assert await asyncio.wrap_future(served._replicas[0].call(choose)) == [0, 4, 4, 0, 0, 4, 5]

    run(main())


def test_a_replica_too_far_behind_for_both_steps_costs_no_request_while_another_one_is_there(versions, store, folder):
    async def main() -> None:
        async with agent_fleet(folder, store, shards=1, replicas=2) as fleet:
            _, service = await with_live(fleet, versions)
            publisher = AsyncDeltaPublisher(fleet.fleet.registry, MODEL, 1, store)
            async with running_api(service) as api:
                for step in (1, 2):
                    await publisher.publish("films", np.arange(FILMS), films(step))
                    await publisher.publish_dense(step, tensors_of(versions[1], step), max_drift=1.0)
                    await until_step(fleet, step)
                    while (await asked(api))["dense_step"] != step:  # noqa: ASYNC110  # no event tells it
                        await asyncio.sleep(0.01)
                # As if it had been started again: it has its snapshot's rows, and begins to replay the stream.
                running = fleet.nodes["shard-0-1"]
                running.task.cancel()
                await asyncio.wait([running.task])
                running.node.generations.payload(MODEL, 1).deltas._now = DeltaProgress()
                answers = [await asked(api) for _ in range(20)]
                assert {one["dense_step"] for one in answers} == {2}
                text = (await api.http.get("/metrics")).text
                assert 'shardrank_shard_retries_total{kind="replica_lags",model="films"}' in text

    run(main())


def test_a_step_that_drifts_too_far_is_refused_by_name_and_the_live_one_goes_on(versions, store, folder, caplog):
    model = versions[1]

    async def main() -> None:
        async with agent_fleet(folder, store, shards=1, replicas=0) as fleet:
            _, service = await with_live(fleet, versions, local=True)
            publisher = AsyncDeltaPublisher(fleet.fleet.registry, MODEL, 1, store)
            await publisher.publish_dense(1, tensors_of(model, 1), max_drift=1.0)
            await until_step(fleet, 1)
            async with running_api(service) as api:
                before = await asked(api)
                wild = {name: -30 * tensor for name, tensor in model.tensors.items()}
                await publisher.publish_dense(2, wild, max_drift=0.01)
                told = await fleet.until("serve-0", lambda told: told.report(MODEL, 1).dense_refused != "")
                reason = told.report(MODEL, 1).dense_refused
                assert reason.startswith("dense step 2: golden_mismatch: golden scores are up to ")
                assert reason.endswith("of the same rows; max_drift is 0.01")
                assert (await asked(api))["scores"] == before["scores"]

                await publisher.publish_dense(3, wild, max_drift=1.0)
                await until_step(fleet, 3)
                assert (await asked(api))["dense_step"] == 3
                assert (await fleet.until("serve-0", lambda told: True)).report(MODEL, 1).dense_refused in ("", reason)

                metrics = (await api.http.get("/metrics")).text
                assert 'shardrank_dense_step{model="films",version="1"} 3.0' in metrics
                assert 'shardrank_dense_steps_refused_total{model="films",version="1"} 1.0' in metrics

    run(main())


def test_a_version_that_comes_back_answers_with_the_step_it_had(versions, store, folder):
    model = versions[1]

    async def main() -> None:
        async with agent_fleet(folder, store, shards=1, replicas=0) as fleet:
            await with_live(fleet, versions, local=True)
            publisher = AsyncDeltaPublisher(fleet.fleet.registry, MODEL, 1, store)
            await publisher.publish_dense(9, tensors_of(model, 2), max_drift=1.0)
            await until_step(fleet, 9)
            # A process that joins later answers with it from its first answer on.
            node, service = fleet.serving(local=True)
            await node.load()
            async with running_api(service) as api:
                answer = await asked(api)
            assert answer["dense_step"] == 9
            np.testing.assert_allclose(np.array(answer["scores"]), expected(model, 0, 2), rtol=1e-3, atol=1e-4)

    run(main())


def test_a_fleet_over_redis_answers_with_a_step_and_a_rollback_brings_it_back(versions, store, folder):
    async def main(url: str) -> None:
        async with agent_fleet(folder, store, shards=1, replicas=2, registry=url) as fleet:
            _, service = await with_live(fleet, versions)
            publisher = AsyncDeltaPublisher(fleet.fleet.registry, MODEL, 1, store)
            async with running_api(service) as api:
                sequence = await publisher.publish("films", np.arange(FILMS), films(1))
                assert await publisher.publish_dense(7, tensors_of(versions[1], 1), max_drift=1.0) == sequence
                await until_step(fleet, 7)

                async def ask_until(version: int, step: int) -> np.ndarray:
                    while True:
                        answer = await asked(api)
                        if (answer["version"], answer["dense_step"]) == (version, step):
                            return np.array(answer["scores"])
                        await asyncio.sleep(0.01)

                np.testing.assert_allclose(await ask_until(1, 7), expected(versions[1], 1, 1), rtol=1e-3, atol=1e-4)
                await fleet.want(MODEL, hold=(1, 2), serve=(1, 2))
                await fleet.until_state("serve-0", MODEL, 2, "ready")
                await fleet.want(MODEL, live=2)
                # Steps are of one version: the other one answers with its own weights.
                np.testing.assert_allclose(await ask_until(2, 0), expected(versions[2], 0, 0), rtol=1e-3, atol=1e-4)
                # Version 1 is gone from the process, and is loaded anew.
                await fleet.want(MODEL, serve=(2,))
                await fleet.until_state("serve-0", MODEL, 1, None)
                await fleet.want(MODEL, serve=(1, 2))
                await fleet.until_state("serve-0", MODEL, 1, "ready")
                await fleet.want(MODEL, live=1)
                np.testing.assert_allclose(await ask_until(1, 7), expected(versions[1], 1, 1), rtol=1e-3, atol=1e-4)

    with registry_of("redis", folder) as url:
        run(main(url))


def test_a_process_that_joins_late_takes_what_others_accepted_however_far_from_the_snapshot(versions, store, folder):
    model = versions[1]

    async def main() -> None:
        async with agent_fleet(folder, store, shards=1, replicas=0) as fleet:
            await with_live(fleet, versions, local=True)
            publisher = AsyncDeltaPublisher(fleet.fleet.registry, MODEL, 1, store)
            await publisher.publish_dense(9, tensors_of(model, 2), max_drift=1.0)
            await until_step(fleet, 9)
            # No drift at all from the step before, and far more than this from the snapshot's weights.
            await publisher.publish_dense(10, tensors_of(model, 2), max_drift=1e-6)
            await until_step(fleet, 10)
            wild = {name: -30 * tensor for name, tensor in model.tensors.items()}
            await publisher.publish_dense(11, wild, max_drift=0.01)
            await fleet.until("serve-0", lambda told: "dense step 11" in told.report(MODEL, 1).dense_refused)
            # Refused steps do not cost the accepted one its file.
            for step in range(12, 12 + KEPT_STEPS):
                wilder = {name: tensor * step for name, tensor in wild.items()}
                await publisher.publish_dense(step, wilder, max_drift=0.01)
            node, service = fleet.serving(local=True)
            await node.load()
            async with running_api(service) as api:
                answer = await asked(api)
            assert answer["dense_step"] == 10
            np.testing.assert_allclose(np.array(answer["scores"]), expected(model, 0, 2), rtol=1e-3, atol=1e-4)

    run(main())


def test_a_step_that_waits_for_rows_is_not_replaced_by_the_next_which_comes_after_it(versions, store, folder):
    model = versions[1]

    async def main() -> None:
        async with agent_fleet(folder, store, shards=1, replicas=0) as fleet:
            _, service = await with_live(fleet, versions, local=True)
            served = service.generations.payload(MODEL, 1)
            publisher = AsyncDeltaPublisher(fleet.fleet.registry, MODEL, 1, store)
            await publisher.publish_dense(1, tensors_of(model, 0), max_drift=1.0)
            await until_step(fleet, 1)
            # A step whose delta is still to come.
            sha256, size_bytes = write_step(Store(store), MODEL, 1, 2, tensors_of(model, 1))
            first = await fleet.fleet.dense_step(MODEL, 1)
            changes = {"step": 2, "sequence": 1, "sha256": sha256, "size_bytes": size_bytes}
            await fleet.fleet.put_dense_step(first.model_copy(update=changes))
            await until_step(fleet, 2)
            assert not await served.takes_dense()
            await publisher.publish_dense(3, tensors_of(model, 2), sequence=0, max_drift=1.0)
            async with running_api(service) as api:
                assert (await asked(api))["dense_step"] == 1
                assert not await served.takes_dense()
                assert served.dense_step == 2
                # Nobody asks meanwhile: what the nodes tell is enough.
                await publisher.publish("films", [1], films(1)[:1])
                await until_step(fleet, 3)
                assert (await asked(api))["dense_step"] == 3

    run(main())


def test_a_file_that_is_not_what_was_published_is_refused_by_name(versions, store, folder):
    model = versions[1]

    async def main() -> None:
        async with agent_fleet(folder, store, shards=1, replicas=0) as fleet:
            _, service = await with_live(fleet, versions, local=True)
            publisher = AsyncDeltaPublisher(fleet.fleet.registry, MODEL, 1, store)
            await publisher.publish_dense(1, tensors_of(model, 1), max_drift=1.0)
            await until_step(fleet, 1)
            record = await fleet.fleet.dense_step(MODEL, 1)
            # The name has the beginning of another SHA-256 than the content.
            folder_of_steps = store / steps_folder(MODEL, 1)
            written = next(folder_of_steps.glob(f"{1:020d}-{record.sha256[:16]}*"))
            forged = record.model_copy(update={"step": 2, "sha256": "f" * 64})
            (folder_of_steps / f"{2:020d}-{'f' * 16}.safetensors").write_bytes(written.read_bytes())
            await fleet.fleet.put_dense_step(forged)
            told = await fleet.until("serve-0", lambda told: told.report(MODEL, 1).dense_refused != "")
            assert told.report(MODEL, 1).dense_refused.startswith("dense step 2: delta_format: ")
            async with running_api(service) as api:
                assert (await asked(api))["dense_step"] == 1

    run(main())


class SlowStore:
    """A served version without a fleet around it, and a step on record whose file the test puts in place."""

    def __init__(self, fleet: FleetRegistry, store: Path, service: RankingService) -> None:
        self.now = 1000.0
        self.generations = service.generations
        self.served = self.generations.payload(MODEL, 1)
        self.steps = DenseSteps(fleet, Store(store), service.metrics, lambda: self.now)
        self._fleet, self._store = fleet, store

    async def record(self, model: ApiModel) -> Path:
        """Put a step on record; its file's path, where there is none yet, and the content beside it, as `.later`."""
        publisher = AsyncDeltaPublisher(self._fleet.registry, MODEL, 1, self._store)
        await publisher.publish_dense(1, tensors_of(model, 1), max_drift=1.0)
        record = await self._fleet.dense_step(MODEL, 1)
        path = next((self._store / steps_folder(MODEL, 1)).glob(f"{1:020d}-{record.sha256[:16]}*"))
        path.rename(path.with_suffix(".later"))
        return path

    async def look_after(self, seconds: float) -> str:
        """Look for new steps after a while; why the step is refused, or ""."""
        self.now += seconds
        await self.steps.look(self.served)
        found = self.steps.refused.get((MODEL, 1))
        return "" if found is None else found.reason

    async def looks_until_refused(self) -> int:
        """Look every 10 ms until the step is refused; how many seconds that took."""
        began = self.now
        while not await self.look_after(0.01):
            assert self.now < began + 100
        return round(self.now - began)


def put_in_place(path: Path, *, damaged: bool = False) -> None:
    """Let a step's file appear."""
    content = path.with_suffix(".later").read_bytes()
    if path.is_dir():
        path.rmdir()
    path.write_bytes(content[:-1] + b"?" if damaged else content)


def with_slow_store(versions, store, folder, scenario) -> None:
    async def main() -> None:
        registry = open_registry(folder / "registry")
        service = served_service(versions[1])
        try:
            await register_version(registry, Snapshot.open(versions[1].path))
            slow = SlowStore(FleetRegistry(registry), store, service)
            await scenario(slow, await slow.record(versions[1]))
        finally:
            await asyncio.to_thread(service.close)
            await registry.close()
            shutil.rmtree(store / steps_folder(MODEL, 1))

    run(main())


def test_a_step_whose_file_appears_late_is_tried_again_ever_more_seldom_and_then_taken(versions, store, folder, caplog):
    async def scenario(slow: SlowStore, path: Path) -> None:
        assert await slow.look_after(0) == ""
        assert await slow.look_after(0.1) == ""
        # It was not tried again yet, though looked for.
        assert caplog.text.count("can't be taken yet") == 1
        for pause_s in (0.5, 1, 2, 4, 8):
            assert await slow.look_after(pause_s) == ""
        assert caplog.text.count("can't be taken yet") == 6
        put_in_place(path)
        assert await slow.look_after(1) == ""
        assert slow.served.dense_step == 0
        assert await slow.look_after(7) == ""
        assert slow.served.dense_step == 1

    with_slow_store(versions, store, folder, scenario)


@pytest.mark.parametrize(
    ("make", "problem"),
    [(lambda path: None, "missing"), (Path.mkdir, "can't be read: Is a directory")],
    ids=["missing", "unreadable"],
)
def test_a_step_whose_file_can_not_be_read_for_long_is_refused_by_name(versions, store, folder, make, problem):
    async def scenario(slow: SlowStore, path: Path) -> None:
        make(path)
        assert await slow.looks_until_refused() == READ_FOR_S
        reason = await slow.look_after(0)
        assert reason.startswith("dense step 1: bad_snapshot: ")
        assert reason.endswith(problem)
        # For good, until there is another step.
        put_in_place(path)
        assert await slow.look_after(100) == reason

    with_slow_store(versions, store, folder, scenario)


def test_a_step_whose_file_is_damaged_is_refused_at_once(versions, store, folder):
    async def scenario(slow: SlowStore, path: Path) -> None:
        put_in_place(path, damaged=True)
        assert (await slow.look_after(0)).startswith("dense step 1: delta_format: ")

    with_slow_store(versions, store, folder, scenario)


def test_a_version_is_not_retired_while_a_step_is_checked_on_it_though_the_process_ends(versions, store, folder):
    async def scenario(slow: SlowStore, path: Path) -> None:
        # Whoever reads the file waits until it is written.
        os.mkfifo(path)
        following = asyncio.create_task(slow.steps.run(slow.generations))
        file = await asyncio.to_thread(path.open, "wb")
        with file:
            retiring = slow.generations.retire(MODEL, 1)
            for _ in range(5):
                following.cancel()
                await asyncio.sleep(0)
            assert not following.done()
            assert (retiring.state, retiring.leases) == ("draining", 1)
            await asyncio.to_thread(file.write, path.with_suffix(".later").read_bytes())
        with pytest.raises(asyncio.CancelledError):
            await following
        assert await asyncio.to_thread(retiring.retired.wait, 30)
        # The check came to its end, on replicas that were there for it.
        assert slow.served.dense_step == 1

    with_slow_store(versions, store, folder, scenario)

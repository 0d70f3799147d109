"""Dense weights that change while it serves: right scores, never rows older than a step needs, refused steps named."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch

from loader.deltas.dense import steps_folder
from loader.deltas.publisher import AsyncDeltaPublisher
from router.errors import ShardUnavailableError
from serving.rank.ranking import Ranking
from shardrank_testing.agent_fleet import agent_fleet, with_live
from shardrank_testing.registries import registry_of
from shardrank_testing.serving_api import FILMS, MODEL, ApiModel, api_request, run, running_api

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

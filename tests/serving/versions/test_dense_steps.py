"""Dense weights that change while it serves: right scores, never rows older than a step needs, refused steps named."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loader.deltas.dense import steps_folder
from loader.deltas.publisher import AsyncDeltaPublisher
from loader.errors import DeltaLostError
from serving.rank.ranking import Ranking
from serving.rank.service import RankingService
from shard_node.freshness import FORKED_AGE_MS
from shard_node.node import DeltaPosition
from shardrank_testing.agent_fleet import AgentFleet, agent_fleet, with_live
from shardrank_testing.errors import raises_kind
from shardrank_testing.nodes import until
from shardrank_testing.registries import registry_of
from shardrank_testing.serving_api import FILMS, MODEL, Api, ApiModel, api_request, running_api

REQUEST = api_request(1)
NUM_STATES = 4


def films(state: int) -> np.ndarray:
    return np.full((FILMS, 8), 0.5 * state, np.float32)


def tensors_of(model: ApiModel, step: int) -> dict[str, torch.Tensor]:
    return {name: tensor * (1 + 0.3 * step) for name, tensor in model.tensors.items()}


def expected(model: ApiModel, state: int, step: int) -> np.ndarray:
    """The scores of rows after `state` deltas by the weights of a step, by definition."""
    tables = model.tables if state == 0 else {**model.tables, "films": films(state)}
    return ApiModel(model.path, model.spec, tables, tensors_of(model, step)).scores(REQUEST).reshape(-1)


async def asked(api: Api) -> dict:
    answer = await api.http.post(f"/v1/models/{MODEL}:rank", json=REQUEST)
    assert answer.status_code == 200, answer.text
    return answer.json()


@dataclass
class Training:
    """A fleet whose process `serve-0` serves version 1, with its API, and a publisher of deltas and dense weights."""

    fleet: AgentFleet
    service: RankingService
    api: Api
    publisher: AsyncDeltaPublisher
    model: ApiModel

    async def publish_step(self, step: int, weights_of: int) -> int:
        """Publish the weights of a step as `step`, and wait until it is in use; return the delta that it needs."""
        sequence = await self.publisher.publish_dense(step, tensors_of(self.model, weights_of), max_drift=1.0)
        await self.fleet.until("serve-0", lambda node: node.report(MODEL, 1).dense_step == step)
        return sequence

    async def refused(self) -> str:
        node = await self.fleet.until("serve-0", lambda node: node.report(MODEL, 1).dense_refused != "")
        return node.report(MODEL, 1).dense_refused

    async def stop_following(self) -> list[DeltaPosition]:
        """Apply no deltas any more; return the positions, by node."""
        await self.fleet.want(MODEL, follow=())
        nodes = list(self.fleet.nodes.values()) or [self.fleet.servings[0][0]._local]
        await until(lambda: not any(node.actions._followers._tasks for node in nodes))
        return [node.node.generations.payload(MODEL, 1).deltas for node in nodes]

    async def lose_rows(self) -> None:
        """Have the rows stay what they are, whatever their position says."""
        for position in await self.stop_following():
            vars(position).update(vars(DeltaPosition(1)))

    async def answers(self) -> list[int | str]:
        """Ask of all replicas; return the dense step, or the error, of each answer."""
        answers = [await self.api.http.post(f"/v1/models/{MODEL}:rank", json=REQUEST) for _ in range(20)]
        return [answer.json().get("dense_step", answer.json().get("error", {}).get("kind")) for answer in answers]


@asynccontextmanager
async def training_of(
    versions: dict[int, ApiModel], store: Path, folder: Path, clock: Callable[[], float] = time.monotonic, **how: Any
) -> AsyncIterator[Training]:
    """Start the fleet, with rows in the serving process unless there are replicas."""
    async with agent_fleet(folder, store, **({"shards": 1, "replicas": 0} | how)) as fleet:
        _, service = await with_live(fleet, versions, local=not fleet.nodes, clock=clock)
        async with running_api(service) as api:
            publisher = AsyncDeltaPublisher(fleet.fleet.registry, MODEL, 1, store)
            yield Training(fleet, service, api, publisher, versions[1])


@pytest.fixture
async def training(versions, store, folder) -> AsyncIterator[Training]:
    async with training_of(versions, store, folder) as training:
        yield training


@pytest.mark.parametrize("replicas", [pytest.param(2, marks=pytest.mark.nightly), 0])
async def test_answers_have_one_step_and_its_deltas(versions, store, folder, replicas):
    """Rows of two shards may be of two states, both new enough; those of one shard, as here, are of one."""
    states = range(NUM_STATES)
    scores = {(state, step): expected(versions[1], state, step) for state in states for step in states}
    seen: Counter[tuple[int, int]] = Counter()
    is_over = False

    async def ask_always(api: Api) -> None:
        while not is_over:
            answer = await asked(api)
            step, found = answer["dense_step"], np.array(answer["scores"])
            # Rows of exactly one state: an answer of two steps, or of half a delta, fits none.
            (state,) = [one for one in states if np.allclose(found, scores[one, step], rtol=1e-3, atol=1e-4)]
            # Newer rows are allowed, older ones are not.
            assert state >= step
            seen[state, step] += 1

    async with training_of(versions, store, folder, replicas=replicas) as training, asyncio.TaskGroup() as asking:
        for _ in range(3):
            asking.create_task(ask_always(training.api))
        for state in states[1:]:
            sequence = await training.publisher.publish("films", np.arange(FILMS), films(state))
            assert await training.publish_step(state, state) == sequence
            await until(lambda state=state: seen[state, state] >= 3)
        is_over = True


async def test_a_step_waits_for_its_rows(training):
    """For a replica that lags it goes back to the step before."""
    await training.publisher.publish("films", [1], films(1)[:1])
    await training.publish_step(4, 1)
    (position,) = await training.stop_following()

    async def choose(ranking: Ranking) -> list[int]:
        # Of a node that reports no delta (-1), only the snapshot's own weights are safe.
        found = [ranking.choose(sequence).dense_step for sequence in (0, 1, 2**63 - 1, 0, -1)]
        ranking.stage_weights(dataclasses.replace(ranking.parts, dense_step=5, min_sequence=7))
        found.append(await ranking.weights_active(1))
        position.refused("lost", forked=True)
        found.append(await ranking.weights_active(1))
        # What has forked may have another delta of that number than the step needs.
        found += [ranking.choose(*rows).dense_step for rows in ((1,), (7, FORKED_AGE_MS), (7,))]
        with raises_kind("shard_unavailable", match="rows are of delta 0, dense step 4 needs 1"):
            ranking.choose(0)
        return found

    served = training.service.generations.payload(MODEL, 1)
    assert await asyncio.wrap_future(served.replicas[0].call(choose)) == [0, 4, 4, 0, 0, True, False, 4, 4, 5]


async def test_snapshot_weights_answer_for_a_step_whose_rows_are_lost(versions, store, folder):
    """After 30 s of failures, and until rows have the delta of a step again: of the same, or of a later one."""
    later_s = 0.0
    async with training_of(versions, store, folder, lambda: time.monotonic() + later_s) as training:
        fleet, model = training.fleet, training.model
        for step in (3, 4):
            await training.publisher.publish("films", np.arange(FILMS), films(1))
            await training.publish_step(step, step)

        async def ask() -> dict:
            return (await training.api.http.post(f"/v1/models/{MODEL}:rank", json=REQUEST)).json()

        async def until_answered(step: int, degraded: str) -> None:
            while (answer := await ask()).get("dense_step") != step:
                assert answer.get("error", {"kind": "shard_unavailable"})["kind"] == "shard_unavailable"
            np.testing.assert_allclose(answer["scores"], expected(model, 1, step), rtol=1e-3, atol=1e-4)
            report = (await fleet.until("serve-0", lambda node: node.report(MODEL, 1).dense_refused == degraded)).report
            assert report(MODEL, 1).state == "ready"
            ready = await training.api.http.get("/readyz")
            assert (ready.status_code, ready.json()["degraded"].get(MODEL, "")) == (200, degraded)
            metrics = (await training.api.http.get("/metrics")).text
            assert f'shardrank_dense_step_fallback{{model="films",version="1"}} {float(degraded != "")}' in metrics
            assert f'shardrank_dense_step{{model="films",version="1"}} {float(step)}' in metrics

        async def lack_rows(seconds: float) -> None:
            nonlocal later_s
            await training.answers()
            later_s += seconds

        reason = "rows lack what dense step 4 needs: weights of snapshot 1 answer"
        await training.lose_rows()
        await lack_rows(29)
        assert (await ask())["error"]["kind"] == "shard_unavailable"
        await lack_rows(2)
        await until_answered(0, reason)
        await fleet.want(MODEL, follow=(1,))
        await until_answered(4, "")
        await training.lose_rows()
        await lack_rows(31)
        await until_answered(0, reason)
        await training.publisher.publish_dense(5, tensors_of(model, -100), sequence=0, max_drift=0.01)
        refused = "dense step 5: golden_mismatch: "
        await fleet.until("serve-0", lambda node: refused in node.report(MODEL, 1).dense_refused)
        assert (await training.refused()).startswith(f"{reason}; {refused}")
        # A later step that rows have is used as ever.
        await training.publisher.publish_dense(6, tensors_of(model, 6), sequence=0, max_drift=1.0)
        await until_answered(6, "")


async def test_snapshot_weights_answer_while_the_registry_is_unreachable(versions, store, folder):
    later_s = 0.0
    async with training_of(versions, store, folder, lambda: time.monotonic() + later_s) as training:
        for step in (3, 4):
            await training.publisher.publish("films", np.arange(FILMS), films(1))
            await training.publish_step(step, step)
        await training.lose_rows()
        path = training.fleet.fleet.registry.path
        path.rename(path.with_name("away"))
        path.touch()
        assert set(await training.answers()) == {"shard_unavailable"}
        later_s += 31
        while set(await training.answers()) != {0}:
            pass
        path.unlink()
        path.with_name("away").rename(path)
        await training.fleet.want(MODEL, follow=(1,))
        while set(await training.answers()) != {4}:
            pass


async def test_a_step_that_answers_again_is_answered_by_replicas_that_have_its_rows(versions, store, folder):
    async with training_of(versions, store, folder, replicas=2) as training:
        training.fleet.servings[0][0]._dense._wait_s = 0
        await training.publisher.publish("films", np.arange(FILMS), films(1))
        await training.publish_step(4, 4)
        await training.lose_rows()
        await training.answers()
        await training.refused()
        # From here on a batch that is asked again of another replica is none that lacks rows for too long.
        training.fleet.servings[0][0]._dense._wait_s = 30
        await training.fleet.want(MODEL, follow=(1,))
        await training.fleet.until("serve-0", lambda node: node.report(MODEL, 1).dense_refused == "")
        position, _ = await training.stop_following()
        vars(position).update(vars(DeltaPosition(1)))
        assert await training.answers() == [4] * 20


async def test_a_step_that_waits_for_lost_rows_makes_room_for_a_later_one(training):
    await training.publisher.publish("films", np.arange(FILMS), films(1))
    await training.publish_step(1, 1)
    assert (await asked(training.api))["dense_step"] == 1
    await training.stop_following()
    await training.publisher.publish("films", np.arange(FILMS), films(2))
    await training.publish_step(2, 2)
    await training.publisher.publish_dense(3, tensors_of(training.model, 3), sequence=1, max_drift=1.0)
    while (answer := await asked(training.api))["dense_step"] != 3:
        assert answer["dense_step"] == 1
    np.testing.assert_allclose(answer["scores"], expected(training.model, 1, 3), rtol=1e-3, atol=1e-4)


async def test_a_step_whose_delta_the_stream_has_lost_is_refused_by_name(training):
    await training.publisher.publish("films", [1], films(1)[:1])
    await training.publish_step(1, 1)
    registry = training.fleet.fleet
    record = await registry.dense_step(MODEL, 1)
    # Two trainers may give different rows the same number, one of them to a registry that forgot it.
    await registry.put_dense_step(record.model_copy(update={"step": 2, "digest": "0f" * 16}))
    assert await training.refused() == f"dense step 2: delta_fork: deltas/films/1 has lost delta 1 ({'0f' * 16})"
    assert (await asked(training.api))["dense_step"] == 1


async def test_a_step_whose_delta_the_stream_loses_answers_no_more(training):
    """Although later deltas have a higher number."""
    streams, then = training.fleet.fleet.registry.path / "streams", training.fleet.fleet.registry.path / "then"
    await training.publisher.publish("films", [1], films(1)[:1])
    shutil.copytree(streams, then)
    await training.publisher.publish("films", [2], films(1)[:1])
    await training.publish_step(1, 1)
    assert (await asked(training.api))["dense_step"] == 1
    shutil.rmtree(streams)
    then.rename(streams)
    with pytest.raises(DeltaLostError):
        await training.publisher.publish("films", [3], films(1)[:1])
    assert await training.publisher.publish("films", [3], films(1)[:1]) == 3
    assert "deltas/films/1 has lost delta 2 (" in await training.refused()
    assert (await asked(training.api))["dense_step"] == 0


async def test_a_step_waits_while_rows_are_of_deltas_that_the_stream_has_lost(training):
    """Also before the node has noticed, which takes it up to a second: its number is high enough."""
    await training.publisher.publish("films", [1], films(1)[:1])
    await training.publish_step(1, 1)
    (position,) = await training.stop_following()
    right = position.now
    position.now = dataclasses.replace(right, digest=b"\x0f" * 16)
    await training.publisher.publish_dense(2, tensors_of(training.model, 2), max_drift=1.0)
    assert await training.answers() == [1] * 20
    await asyncio.sleep(0.5)
    assert await training.answers() == [1] * 20
    position.now = right
    while (await asked(training.api))["dense_step"] != 2:
        pass


async def test_a_step_that_drifts_too_far_is_refused_by_name(training):
    """The live one goes on."""
    await training.publish_step(1, 1)
    before = await asked(training.api)
    await training.publisher.publish_dense(2, tensors_of(training.model, -100), max_drift=0.01)
    reason = await training.refused()
    assert reason.startswith("dense step 2: golden_mismatch: golden scores are up to ")
    assert reason.endswith("of the same rows; max_drift is 0.01")
    assert (await asked(training.api))["scores"] == before["scores"]
    await training.publish_step(3, -100)
    assert (await asked(training.api))["dense_step"] == 3
    metrics = (await training.api.http.get("/metrics")).text
    assert 'shardrank_dense_step{model="films",version="1"} 3.0' in metrics
    assert 'shardrank_dense_steps_refused_total{model="films",version="1"} 1.0' in metrics


@pytest.mark.nightly
async def test_a_rollback_brings_the_step_of_its_version_back(versions, store, folder):
    """Over Redis; the version is gone from the process in between, and is loaded anew."""
    with registry_of("redis", folder) as url:
        async with training_of(versions, store, folder, replicas=2, registry=url) as training:
            fleet = training.fleet

            async def until_answered(version: int, state: int, step: int, weights_of: int) -> None:
                answer = await asked(training.api)
                while (answer["version"], answer["dense_step"]) != (version, step):
                    answer = await asked(training.api)
                scores = expected(versions[version], state, weights_of)
                np.testing.assert_allclose(np.array(answer["scores"]), scores, rtol=1e-3, atol=1e-4)

            await training.publisher.publish("films", np.arange(FILMS), films(1))
            await training.publish_step(7, 1)
            await until_answered(1, 1, 7, 1)
            await fleet.want(MODEL, hold=(1, 2), serve=(1, 2))
            await fleet.until_state("serve-0", MODEL, 2, "ready")
            await fleet.want(MODEL, live=2)
            # Steps are of one version: the other one answers with its own weights.
            await until_answered(2, 0, 0, 0)
            await fleet.want(MODEL, serve=(2,))
            await fleet.until_state("serve-0", MODEL, 1, None)
            await fleet.want(MODEL, serve=(1, 2))
            await fleet.until_state("serve-0", MODEL, 1, "ready")
            await fleet.want(MODEL, live=1)
            await until_answered(1, 1, 7, 1)


async def test_a_step_file_of_another_content_is_refused_by_name(training, store):
    await training.publish_step(1, 1)
    registry = training.fleet.fleet
    record = await registry.dense_step(MODEL, 1)
    # The name has the beginning of another SHA-256 than the content.
    steps = store / steps_folder(MODEL, 1)
    written = next(steps.glob(f"{1:020d}-{record.sha256[:16]}*"))
    (steps / f"{2:020d}-{'f' * 16}.safetensors").write_bytes(written.read_bytes())
    await registry.put_dense_step(record.model_copy(update={"step": 2, "sha256": "f" * 64}))
    assert (await training.refused()).startswith("dense step 2: delta_format: ")
    assert (await asked(training.api))["dense_step"] == 1

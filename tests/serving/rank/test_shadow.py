"""Shadows: the differences that metrics tell are those of the two versions, and live requests come first."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving.rank import shadow
from serving.rank.service import RankingService
from serving.rank.shadow import MAX_WAITING, Shadows
from serving.versions.loading import ModelSource, load_served_model
from shardrank_testing.serving_api import MODEL, ApiModel, api_request, api_spec, ask, run, write_api_model

NAME = "shardrank_shadow_score_difference"


@contextlib.contextmanager
def service_of(*models: ApiModel) -> Iterator[RankingService]:
    """The first one live, the others staged."""
    service = RankingService(expected_models=[MODEL])
    for number, model in enumerate(models):
        served = load_served_model(ModelSource(snapshot=model.path, dtype="float32"), service)
        (service.install_staged if number else service.install)(served)
    try:
        yield service
    finally:
        service.close()


def told(service: RankingService) -> dict[tuple[str, ...], float]:
    """Samples of shadows, by name and the labels that tell them apart."""
    found = {}
    for family in text_string_to_metric_families(service.metrics.render().decode()):
        for one in family.samples:
            if one.name.startswith("shardrank_shadow") and not one.name.endswith("_created"):
                assert one.labels["model"] == MODEL
                kept = {name: one.labels.get(name, "") for name in ("version", "shadow", "of", "outcome", "le")}
                found[one.name, *kept.values()] = one.value
    return found


def test_the_differences_are_those_of_the_two_versions(versions: dict[int, ApiModel]) -> None:
    asked = [api_request(seed, 3 + seed) for seed in range(5)]
    own, other = ([versions[version].scores(one) for one in asked] for version in (1, 2))
    differences = [np.abs(a - b) for a, b in zip(own, other, strict=True)]
    changes = sum(a.argmax() != b.argmax() for a, b in zip(own, other, strict=True))

    async def main() -> dict[tuple[str, ...], float]:
        with service_of(versions[1], versions[2]) as service:
            shadows = Shadows(service)
            shadows.set(MODEL, 2, 1.0)
            for request in asked:
                assert (await ask(service, request)).version == 1
            await shadows.idle()
            counted = told(service)
            stats = next(one for one in service.generations.all() if one.version == 2).payload.counter.stats()
            assert (stats.requests, stats.score_count) == (0, 0)
            # What is gone is told no more.
            shadows.set(MODEL, None)
            assert service.on_ranked == ()
            service.retire(MODEL, 2).retired.wait(10)
            while told(service):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            return counted

    counted = run(main())
    both = ("1", "2")
    assert counted["shardrank_shadow_requests_total", *both, "", "scored", ""] == 5
    assert counted["shardrank_shadow_top_changes_total", *both, "", "", ""] == changes
    for of, values in (("mean", [one.mean() for one in differences]), ("max", [one.max() for one in differences])):
        assert counted[f"{NAME}_sum", *both, of, "", ""] == pytest.approx(sum(values), abs=1e-5)
        assert counted[f"{NAME}_count", *both, of, "", ""] == 5
        below = sum(value <= 0.1 for value in values)
        assert counted[f"{NAME}_bucket", *both, of, "", "0.1"] == below


def test_while_calls_are_handled_nothing_is_scored_and_what_waits_too_long_or_is_too_much_is_dropped(
    versions: dict[int, ApiModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> tuple[dict[tuple[str, ...], float], dict[tuple[str, ...], float]]:
        with service_of(versions[1], versions[2]) as service:
            shadows = Shadows(service)
            shadows.set(MODEL, 2, 1.0)
            monkeypatch.setattr(shadow, "MAX_WAIT_S", 60.0)
            with service.call("http", "rank") as call:
                service.admit(call)
                for _ in range(MAX_WAITING + 3):
                    await ask(service, api_request())
                full = told(service)
                monkeypatch.setattr(shadow, "MAX_WAIT_S", 0.0)
                await shadows.idle()
                late = told(service)
            monkeypatch.setattr(shadow, "MAX_WAIT_S", 60.0)
            await ask(service, api_request())
            await shadows.idle()
            assert told(service)["shardrank_shadow_requests_total", "1", "2", "", "scored", ""] == 1
            return full, late

    full, late = run(main())
    dropped = "shardrank_shadow_requests_total", "1", "2", "", "dropped", ""
    assert full == {dropped: 3}
    assert late == {dropped: MAX_WAITING + 3}


def test_a_share_is_drawn_for_each_and_what_the_shadow_answered_itself_is_left_out(
    versions: dict[int, ApiModel],
) -> None:
    draw, expected = Random(3), Random(3)

    async def main() -> dict[tuple[str, ...], float]:
        with service_of(versions[1], versions[2]) as service:
            shadows = Shadows(service, draw.random)
            shadows.set(MODEL, 2, 0.5)
            for _ in range(20):
                await ask(service, api_request())
                await ask(service, {**api_request(), "version": 2})
                await shadows.idle()
            return told(service)

    chosen = sum(expected.random() < 0.5 for _ in range(20))
    assert run(main())["shardrank_shadow_requests_total", "1", "2", "", "scored", ""] == chosen


def test_a_shadow_of_other_features_or_one_that_is_gone_costs_no_answer(
    versions: dict[int, ApiModel], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = api_spec()
    weighted = [one.model_copy(update={"weighted": one.name in ("tag", "liked-tag", "film")}) for one in spec.features]
    other = write_api_model(tmp_path, 3, spec=spec.model_copy(update={"features": tuple(weighted)}))

    async def main() -> dict[tuple[str, ...], float]:
        with service_of(versions[1], other) as service:
            shadows = Shadows(service)
            for version in (3, 3, 9):
                shadows.set(MODEL, version, 1.0)
                assert (await ask(service, api_request())).version == 1
                await shadows.idle()
            return told(service)

    outcomes = {key[2:5:2]: value for key, value in run(main()).items()}
    assert outcomes == {("3", "failed"): 2, ("9", "dropped"): 1}
    assert caplog.text.count("its requests have other features") == 1


def test_a_shadow_that_hangs_is_given_up_with_its_lease(
    versions: dict[int, ApiModel], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shadow, "TIMEOUT_S", 0.02)

    async def main() -> dict[tuple[str, ...], float]:
        with service_of(versions[1], versions[2]) as service:
            shadows, goes_on = Shadows(service), threading.Event()
            generation = next(one for one in service.generations.all() if one.version == 2)

            async def hang(_: object) -> None:
                goes_on.wait(20)

            hanging = [replica.call(hang) for replica in generation.payload._replicas]
            try:
                shadows.set(MODEL, 2, 1.0)
                await ask(service, api_request())
                await shadows.idle()
                assert not any(one.done() for one in hanging)
                assert generation.leases == 0
            finally:
                goes_on.set()
            return told(service)

    outcomes = {key[2:5:2]: value for key, value in run(main()).items()}
    assert outcomes == {("2", "failed"): 1}
    assert "no scores within" in caplog.text

"""Shadows: the differences that metrics tell are those of the two versions, and live requests come first."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving.rank import shadow
from serving.rank.service import RankingService
from serving.rank.shadow import Shadows
from serving.versions.loading import ModelSource, load_served_model
from shardrank_testing.serving_api import MODEL, ApiModel, api_request, ask, run

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

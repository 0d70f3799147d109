"""Shadows: the differences that metrics report are those of the two versions."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving.rank.service import RankingService
from serving.rank.shadow import Shadows
from serving.versions.loading import ModelSource, load_served_model
from shard_node.errors import NodeUnavailableError
from shardrank_testing.serving_api import MODEL, ApiModel, api_request, ask

NAME = "shardrank_shadow_score_difference"


def reported(service: RankingService) -> dict[tuple[str, ...], float]:
    """Return samples of shadows by name, and by what they measure or count."""
    found = {}
    for family in text_string_to_metric_families(service.metrics.render().decode()):
        for sample in family.samples:
            if sample.name.startswith("shardrank_shadow") and not sample.name.endswith("_created"):
                labels = {**sample.labels}
                assert [labels.pop(name) for name in ("model", "version", "shadow")] == [MODEL, "1", "2"]
                found[sample.name, *(labels[name] for name in sorted(labels))] = sample.value
    return found


async def away(*_: object) -> None:
    raise NodeUnavailableError("it is away")


async def test_the_differences_are_those_of_the_two_versions(versions: dict[int, ApiModel], caplog) -> None:
    """The live version answers; a shadow that fails is counted, and what is gone is reported no more."""
    requests = [api_request(seed, 3 + seed) for seed in range(5)]
    live, shadowed = ([versions[version].scores(request) for request in requests] for version in (1, 2))
    differences = [np.abs(a - b) for a, b in zip(live, shadowed, strict=True)]
    changes = sum(a.argmax() != b.argmax() for a, b in zip(live, shadowed, strict=True))
    with closing(RankingService(expected_models=[MODEL])) as service:
        first, second = (
            load_served_model(ModelSource(snapshot=versions[version].path, dtype="float32"), service)
            for version in (1, 2)
        )
        service.install(first)
        service.install_staged(second)
        shadows = Shadows(service)
        shadows.set(MODEL, 2, 1.0)
        for request in requests:
            assert (await ask(service, request)).version == 1
        await shadows.idle()
        counted = reported(service)
        stats = second.counter.stats()
        assert (stats.requests, stats.score_count) == (0, 0)
        for replica in second._replicas:
            replica.ranking.score = away
        await ask(service, requests[0])
        await shadows.idle()
        assert reported(service)["shardrank_shadow_requests_total", "failed"] == 1
        assert "could not score a request: it is away" in caplog.text
        shadows.set(MODEL, None)
        assert service.on_ranked == ()
        service.retire(MODEL, 2).retired.wait(10)
        assert reported(service) == {}
    assert counted["shardrank_shadow_requests_total", "scored"] == 5
    assert counted["shardrank_shadow_top_changes_total",] == changes
    for of, values in (("mean", [one.mean() for one in differences]), ("max", [one.max() for one in differences])):
        assert counted[f"{NAME}_sum", of] == pytest.approx(sum(values), abs=1e-5)
        assert counted[f"{NAME}_count", of] == 5
        assert counted[f"{NAME}_bucket", "0.1", of] == sum(value <= 0.1 for value in values)

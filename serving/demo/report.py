"""The demo's result: every number computed from what came back from the running server."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from loader.manifest import Frozen
from serving.demo.config import DemoConfig
from serving.demo.measure import Measured
from serving.demo.prepare import Expectation
from serving.training.metrics import auc
from shard_node.bags import Float32Array


class DemoReport(Frozen):
    """What `--json` writes. Latencies are with one request in flight, after a warm-up.

    Attributes:
        source: where the ratings came from.
        users, films, ratings, test_ratings: how many.
        auc_fp32: of the float32 model in-process, over the test part.
        auc_served: of the scores that came back over HTTP; None if no request was answered.
        auc_item_mean: of scoring each film by its mean training label.
        max_score_diff: largest difference of a served score from the float32 model's.
        scores_identical: whether HTTP and gRPC gave the same bits for every candidate.
        requests: sent over both APIs, warm-up included.
        errors: of these, not answered with a score for each candidate.
        error_examples: the first messages.
        http_p50_ms, http_p99_ms, grpc_p50_ms, grpc_p99_ms: over every test request.
        snapshot_bytes: all files of the snapshot.
        float32_bytes: its rows unquantised.
        version: that every answer named.
        dense_dtype: number format of the dense model.
        stage_seconds: how long each stage took.
    """

    source: str
    users: int
    films: int
    ratings: int
    test_ratings: int
    auc_fp32: float
    auc_served: float | None
    auc_item_mean: float
    max_score_diff: float | None
    scores_identical: bool
    requests: int
    errors: int
    error_examples: tuple[str, ...]
    http_p50_ms: float | None
    http_p99_ms: float | None
    grpc_p50_ms: float | None
    grpc_p99_ms: float | None
    snapshot_bytes: int
    float32_bytes: int
    shards: int
    cards: int
    sharding: str
    local: bool
    version: int
    dense_dtype: str
    seed: int
    stage_seconds: dict[str, float] = Field(default_factory=dict)


def compare(expected: Expectation, served: Float32Array) -> tuple[float | None, float | None]:
    """(AUC, largest difference from the float32 scores) over the candidates that were answered; None without any."""
    answered = np.isfinite(served)
    if not answered.any():
        return None, None
    difference = float(np.abs(served[answered] - expected.scores[answered]).max())
    return auc(expected.labelled.labels[answered], served[answered]), difference


def make_report(
    config: DemoConfig,
    expected: Expectation,
    http: Measured,
    grpc: Measured,
    **facts: object,
) -> DemoReport:
    """Puts the report together; `facts` are the fields that were not measured here."""
    auc_served, http_difference = compare(expected, http.scores)
    _, grpc_difference = compare(expected, grpc.scores)
    differences = [one for one in (http_difference, grpc_difference) if one is not None]
    measured: dict[str, object] = {
        "auc_fp32": expected.auc_fp32,
        "auc_served": auc_served,
        "auc_item_mean": expected.auc_item_mean,
        "max_score_diff": max(differences) if differences else None,
        "scores_identical": bool(np.array_equal(http.scores, grpc.scores)),
        "requests": http.requests + grpc.requests,
        "errors": http.errors + grpc.errors,
        "error_examples": (*http.error_examples, *grpc.error_examples),
        "http_p50_ms": http.percentile_ms(50),
        "http_p99_ms": http.percentile_ms(99),
        "grpc_p50_ms": grpc.percentile_ms(50),
        "grpc_p99_ms": grpc.percentile_ms(99),
        "shards": config.shards,
        "cards": config.cards,
        "sharding": config.sharding,
        "local": config.local,
        "seed": config.seed,
    }
    return DemoReport.model_validate({**measured, **facts})

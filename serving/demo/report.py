"""The demo's result: every number computed from what came back from the running server."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from loader.snapshot.manifest import Frozen
from serving.cli.output import human_bytes, table_of


class DemoReport(Frozen):
    """What `--json` writes. Latencies are with one request in flight, after a warm-up, over every test request.

    Attributes:
        auc_fp32: of the float32 model in-process, over the test part; `auc_served` of the scores that came over HTTP.
        auc_item_mean: of scoring each film by its mean training label.
        max_score_diff: largest difference of a served score from the float32 model's.
        scores_identical: whether HTTP and gRPC gave the same bits for every candidate.
        requests: sent over both APIs, warm-up included.
        errors: of these, not answered with a score for each candidate.
        float32_bytes: the snapshot's rows unquantised.
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
    stage_seconds: dict[str, float]


def print_top_films(console: Console, who: str, liked: Sequence[str], films: Sequence[tuple[str, str, float]]) -> None:
    """Prints one user's films (title, genres, score), best first, as they came back from the server."""
    rows = [(place, title, genres, f"{score:.4f}") for place, (title, genres, score) in enumerate(films, start=1)]
    console.print(table_of(f"Films for {who}", ("#", "film", "genres", "#score"), rows))
    console.print(f"  liked lately: {'; '.join(liked) or 'nothing yet'}\n", markup=False, highlight=False)


def print_report(console: Console, report: DemoReport) -> None:
    """Prints quality, latency and size."""
    quality = (
        ("each film's mean label", _number(report.auc_item_mean, 4)),
        ("the float32 model, in this process", _number(report.auc_fp32, 4)),
        ("the running server, int8 rows", _number(report.auc_served, 4)),
    )
    console.print(table_of("Quality on held-out ratings", ("scores from", "#AUC"), quality))
    if report.max_score_diff is not None:
        same = "the same bits" if report.scores_identical else "DIFFERENT scores"
        console.print(f"  largest difference of a score: {report.max_score_diff:.4f}; HTTP and gRPC gave {same}\n")
    latency = (
        ("HTTP", _number(report.http_p50_ms, 2), _number(report.http_p99_ms, 2)),
        ("gRPC", _number(report.grpc_p50_ms, 2), _number(report.grpc_p99_ms, 2)),
    )
    console.print(table_of("Latency, one request in flight", ("API", "#p50 ms", "#p99 ms"), latency))
    where = "in this process" if report.local else f"on {report.shards} shards × {report.cards} cards"
    console.print(
        f"  {report.requests} requests, {report.errors} errors; version {report.version}, rows {where}; "
        f"snapshot {human_bytes(report.snapshot_bytes)}, its rows as float32 {human_bytes(report.float32_bytes)}"
    )
    for example in report.error_examples:
        console.print(f"  error: {example}", markup=False, highlight=False)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"

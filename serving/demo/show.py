"""What the demo prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from serving.cli.output import human_bytes
from serving.demo.report import DemoReport
from serving.demo.top_films import TopFilm


def print_top_films(console: Console, who: str, liked: Sequence[str], films: Sequence[TopFilm]) -> None:
    """One user's films, best first, as they came back from the server."""
    table = Table(title=f"Films for {who}", title_justify="left", box=box.SIMPLE_HEAD)
    for name, justify in (("", "right"), ("film", "left"), ("genres", "left"), ("score", "right")):
        table.add_column(name, justify="right" if justify == "right" else "left")
    for film in films:
        table.add_row(str(film.place), film.title, film.genres, f"{film.score:.4f}")
    console.print(table)
    console.print(f"  liked lately: {'; '.join(liked) or 'nothing yet'}\n", markup=False, highlight=False)


def print_report(console: Console, report: DemoReport) -> None:
    """Quality, latency and size."""
    quality = Table(title="Quality on held-out ratings", title_justify="left", box=box.SIMPLE_HEAD)
    quality.add_column("scores from")
    quality.add_column("AUC", justify="right")
    quality.add_row("each film's mean label", f"{report.auc_item_mean:.4f}")
    quality.add_row("the float32 model, in this process", f"{report.auc_fp32:.4f}")
    quality.add_row("the running server, int8 rows", "-" if report.auc_served is None else f"{report.auc_served:.4f}")
    console.print(quality)
    if report.max_score_diff is not None:
        same = "the same bits" if report.scores_identical else "DIFFERENT scores"
        console.print(f"  largest difference of a score: {report.max_score_diff:.4f}; HTTP and gRPC gave {same}\n")
    title = "Latency, one request in flight"
    latency = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, min_width=len(title))
    for name in ("API", "p50 ms", "p99 ms"):
        latency.add_column(name, justify="left" if name == "API" else "right")
    latency.add_row("HTTP", _ms(report.http_p50_ms), _ms(report.http_p99_ms))
    latency.add_row("gRPC", _ms(report.grpc_p50_ms), _ms(report.grpc_p99_ms))
    console.print(latency)
    where = "in this process" if report.local else f"on {report.shards} shards × {report.cards} cards"
    console.print(
        f"  {report.requests} requests, {report.errors} errors; version {report.version}, rows {where}; "
        f"snapshot {human_bytes(report.snapshot_bytes)}, its rows as float32 {human_bytes(report.float32_bytes)}"
    )
    for example in report.error_examples:
        console.print(f"  error: {example}", markup=False, highlight=False)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"

"""The serving benchmark: real servers, a client that keeps them busy, and the same batches without a server."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from loadtest.bench_serving import bench_config, main
from loadtest.serving_cost.result import Saturated, ServingBench, Spread, Unloaded
from loadtest.serving_cost.run import BenchConfig
from loadtest.serving_cost.shape import Shape
from loadtest.serving_cost.tables import show

SHORT = ("--rows", "500", "--quick", "--seconds", "0.3", "--hotness", "2", "--in-flight", "8", "--dtype", "float32")


def test_a_short_run_measures_real_servers_against_the_same_batches(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    apis = ("--api", "grpc", "--api", "oip-http", "--api", "json", "--mode", "local")
    arguments = [*SHORT, *apis, "--json", str(file), "--profile", str(tmp_path)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    found = ServingBench.model_validate_json(file.read_text())
    names = ["grpc", "oip-http", "json"]
    assert [(one.head, one.hotness, one.api) for one in found.saturated] == [("mlp", 2, name) for name in names]
    for one in found.saturated:
        assert one.cpu_ms > 0
        assert one.ratio == pytest.approx(one.cpu_ms / one.limit_cpu_ms)
        assert 1 <= one.batch_requests <= 8
        assert one.requests_per_s > 0
        assert one.p50_ms <= one.p99_ms
    assert [(one.mode, one.api) for one in found.unloaded] == [("local", name) for name in names]
    for one in found.unloaded:
        assert one.extra_ms == pytest.approx(one.p50_ms - one.limit_ms)
    # The server under load told where its time went, and it is the load's.
    profile = json.loads((tmp_path / "profile-mlp.json").read_text())
    assert {one["api"] for one in profile["accounts"]} == {"grpc", "oip_http", "http"}
    for account in profile["accounts"]:
        assert abs(account["unaccounted_share"]) <= 0.05, account
    assert "8 in flight" in result.output


def test_the_quick_form_is_shorter_and_flags_are_stronger() -> None:
    full = bench_config(quick=False, rows=1000, varied=True, heads=(), rounds=None)
    assert full == BenchConfig(shape=Shape(rows=1000))
    quick = bench_config(quick=True, rows=1000, varied=True, heads=())
    assert (quick.heads, quick.rounds) == (("mlp",), 1)
    assert quick.seconds < full.seconds
    chosen = bench_config(quick=True, rows=1000, varied=True, heads=("dlrm", "mlp"), rounds=3, seconds=9.0)
    assert (chosen.heads, chosen.rounds, chosen.seconds) == (("dlrm", "mlp"), 3, 9.0)


def result_of(ratios: list[float], extras: list[float]) -> ServingBench:
    cell = {"head": "dlrm", "hotness": 20, "api": "oip-http"}
    load = dict.fromkeys(
        ("cpu_ms", "limit_cpu_ms", "batch_requests", "requests_per_s", "server_cores", "client_cores", "p50_ms"), 1.0
    )
    return ServingBench(
        began_at="2026-11-21T10:00:00+00:00",
        machine="a processor, 2 cores",
        versions={"python": "3.11"},
        shape=Shape(),
        dtype="bfloat16",
        server_arguments=(),
        in_flight=32,
        seconds=5.0,
        rounds=len(ratios),
        saturated=tuple(
            Saturated.model_validate(cell | load | {"round": number, "ratio": ratio, "p99_ms": 2.0})
            for number, ratio in enumerate(ratios)
        ),
        unloaded=tuple(
            Unloaded.model_validate(
                cell
                | {"round": number, "mode": "two_shards", "p50_ms": 1.0 + extra, "limit_ms": 1.0, "extra_ms": extra}
            )
            for number, extra in enumerate(extras)
        ),
    )


def test_rounds_are_summed_up_by_their_median_and_shown_with_their_range() -> None:
    result = result_of([1.2, 9.0, 1.3], [0.9, 1.1, 1.4])
    assert result.ratios() == {("dlrm", 20, "oip-http"): Spread(median=1.3, least=1.2, most=9.0)}
    assert result.extra_ms() == {("dlrm", 20, "oip-http", "two_shards"): Spread(median=1.1, least=0.9, most=1.4)}
    console = Console(width=200, record=True, file=io.StringIO())
    show(result, console)
    text = console.export_text()
    assert "1.30× (1.20–9.00)" in text
    assert "≤ 1.25×" in text
    assert "1.10 (0.90–1.40)" in text
    assert ServingBench.model_validate_json(result.model_dump_json()) == result

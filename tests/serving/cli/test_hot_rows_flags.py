"""`--hot-rows-gb` and `--hot-rows`: refused where they buy nothing, and told to whoever serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.hot_rows import HotRowsConfig
from serving.cli.fleet import up
from serving.cli.serve import _source, serve, worker_arguments
from serving.cli.settings import hot_rows

FLAGS = ["--hot-rows-gb", "0.5", "--hot-rows", "static"]
CONFIG = HotRowsConfig(size_bytes=500_000_000, policy="static")


def test_nothing_is_held_by_default_and_children_are_told_nothing(tmp_path: Path):
    options = serve.make_context("serve", ["--snapshot", str(tmp_path), "--shard", "h:1"]).params
    assert hot_rows(options, all_here=True) is None
    assert _source(options, tmp_path, None).hot_rows is None
    assert "--hot-rows" not in worker_arguments(options, tmp_path)


def test_workers_and_the_serving_processes_of_a_fleet_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    options = serve.make_context("serve", ["--snapshot", str(tmp_path), "--shard", "h:1", *FLAGS]).params
    assert _source(options, tmp_path, None).hot_rows == CONFIG
    told = worker_arguments(options, tmp_path)
    assert hot_rows(serve.make_context("serve", told).params, all_here=False) == CONFIG
    configs = []
    monkeypatch.setattr("serving.cli.fleet._run", lambda config, scheme: configs.append(config))
    monkeypatch.setattr("serving.cli.fleet._what", lambda options: {"store": tmp_path, "models": ("m",)})
    with up.make_context("up", ["--store", str(tmp_path), *FLAGS]) as ctx:
        up.invoke(ctx)
    more = ["--registry", "r", "--store", "s", *configs[0].serve_arguments]
    assert hot_rows(serve.make_context("serve", more).params, all_here=False) == CONFIG

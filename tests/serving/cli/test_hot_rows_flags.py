"""`--hot-rows-gb` and `--hot-rows`: refused where they buy nothing, and told to whoever serves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from router.hot_rows import HotRowsConfig
from serving.cli import main
from serving.cli.fleet import up
from serving.cli.serve import _source, serve, worker_arguments
from serving.cli.settings import hot_rows
from shardrank_testing.serving_api import ApiModel

FLAGS = ["--hot-rows-gb", "0.5", "--hot-rows", "static"]
CONFIG = HotRowsConfig(size_bytes=500_000_000, policy="static")


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(main, arguments, prog_name="shardrank")
    assert result.exit_code == 2
    return re.sub(r"\s+", " ", result.output)


def test_they_are_refused_where_all_rows_are_in_the_process(api_model: ApiModel):
    text = "where a copy would save nothing"
    assert text in refusal("serve", "--snapshot", str(api_model.path), *FLAGS)
    assert text in refusal("serve", "--registry", "r", "--store", "s", "--local", *FLAGS)
    assert text in refusal("demo", "--local", *FLAGS)


@pytest.mark.parametrize("size", ["nan", "-1", "x"])
def test_a_size_that_is_none_is_refused(api_model: ApiModel, size: str):
    told = refusal("serve", "--snapshot", str(api_model.path), "--shard", "h:1", "--hot-rows-gb", size)
    assert "--hot-rows-gb" in told


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

"""`--replica-policy`: checked where it is given, and told to whoever serves."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from router.outliers import ReplicaPolicy
from serving.cli.fleet import up
from serving.cli.serve import _source, serve, worker_arguments
from serving.cli.settings import replica_policy

FLAGS = ["--replica-policy", "hedge_after_ms=50", "--replica-policy", "max_ejected_share=0"]
POLICY = ReplicaPolicy(hedge_after_ms=50, max_ejected_share=0)


@pytest.mark.parametrize(
    ("text", "told"), [("nosuch=1", "nosuch"), ("failures=0", "failures"), ("budget_share=2", "budget_share")]
)
def test_what_is_unknown_or_out_of_range_is_refused_by_name(tmp_path: Path, text: str, told: str):
    options = serve.make_context("serve", ["--snapshot", str(tmp_path), "--replica-policy", text]).params
    with pytest.raises(click.UsageError, match=rf"replica-policy: .*{told}"):
        _source(options, tmp_path, None)
    context = up.make_context("up", ["--store", str(tmp_path), "--replica-policy", text])
    with context, pytest.raises(click.UsageError, match=rf"replica-policy: .*{told}"):
        up.invoke(context)


def test_workers_and_the_serving_processes_of_a_fleet_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    options = serve.make_context("serve", ["--snapshot", str(tmp_path), "--shard", "h:1", *FLAGS]).params
    assert _source(options, tmp_path, None).replica_policy == POLICY
    told = worker_arguments(options, tmp_path)
    assert replica_policy(serve.make_context("serve", told).params) == POLICY
    configs = []
    monkeypatch.setattr("serving.cli.fleet._run", lambda config, scheme: configs.append(config))
    monkeypatch.setattr("serving.cli.fleet._what", lambda options: {"store": tmp_path, "models": ("m",)})
    with up.make_context("up", ["--store", str(tmp_path), *FLAGS]) as ctx:
        up.invoke(ctx)
    more = ["--registry", "r", "--store", "s", *configs[0].serve_arguments]
    assert replica_policy(serve.make_context("serve", more).params) == POLICY

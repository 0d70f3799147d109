"""Benchmarks of this project's parts, `shardrank loadtest bench NAME`: subjects measured in rounds, in alternation."""

from __future__ import annotations

import click

from serving.cli import LazyGroup

BENCHMARKS = ("lookup", "serving", "deltas", "hot-rows", "levers")


@click.group(cls=LazyGroup, modules={name: f"loadtest.bench.{name.replace('-', '_')}" for name in BENCHMARKS})
def bench() -> None:
    """Compare parts of this project, side by side on this machine, in rounds.

    Examples:
      shardrank loadtest bench lookup --quick
      shardrank loadtest bench serving --against COMMIT --json against.json
    """

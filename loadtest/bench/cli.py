"""`shardrank loadtest bench` and its benchmarks."""

from __future__ import annotations

import click

from loadtest.load.cli import LazyGroup

BENCHMARKS = {
    "lookup": "loadtest.bench.lookup:lookup",
    "serving": "loadtest.bench.serving:serving",
    "deltas": "loadtest.bench.deltas:deltas",
    "hot-rows": "loadtest.bench.hot_rows:hot_rows",
    "levers": "loadtest.bench.levers:levers",
}


@click.group(cls=LazyGroup, modules=BENCHMARKS)
def bench() -> None:
    """Compare parts of this project, side by side on this machine, in rounds.

    Examples:
      shardrank loadtest bench lookup --quick
      shardrank loadtest bench serving --against COMMIT --json against.json
    """

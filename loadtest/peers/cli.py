"""`shardrank loadtest peers`."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from loader.snapshot.tables import RowDtype
from loadtest.report.cli import FILE, PAGE
from loadtest.workloads.cli import same_option, side_split_option
from serving.cli import WithExamples
from serving.cli.options import numbers

if TYPE_CHECKING:
    from loadtest.workloads.catalog import SideSplit


FOLDER = click.Path(path_type=Path, file_okay=False)
ENVIRONMENTS = Path.home() / ".cache/shardrank/peers"
CORES = len(os.sched_getaffinity(0))
NAMES = ("fastapi", "mosec", "triton")


@click.command(cls=WithExamples)
@click.option("--peer", "names", type=click.Choice(NAMES), multiple=True, default=NAMES, help="Repeatable; else all.")
@click.option("--env-dir", type=FOLDER, default=ENVIRONMENTS, show_default=True, help="Has each environment.")
@click.option("--install", is_flag=True, help="Make the environments with pip, and measure nothing.")
@click.option("--rounds", type=click.IntRange(1, 100), default=5, show_default=True, metavar="N")
@click.option("--seconds", type=click.FloatRange(0.1, 3600), default=5.0, show_default=True, help="Of each load.")
@numbers("--hotness N,...", "Ids a bag.", 1, 1000, "1,20")
@click.option("--in-flight", type=click.IntRange(1, 1024), default=32, show_default=True, metavar="N")
@click.option("--rows", type=click.IntRange(1, 2**31), default=1_000_000, show_default=True, help="Of the one table.")
@side_split_option("product")
@same_option
@click.option("--workers", type=click.IntRange(1, 64), default=CORES, help="Of each server. Default: the cores.")
@click.option("--row-dtype", type=click.Choice(["int8", "fp16", "fp32"]), default="int8", help="Of shardrank's rows.")
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "int8"]), default="auto", show_default=True)
@click.option("--json", "json_file", type=FILE, metavar="FILE", help="Write the comparison to this file.")
@click.option("--html", "html_file", type=PAGE, metavar="FILE", help="Write a page with plots to this file.")
def peers(
    names: tuple[str, ...],
    env_dir: Path,
    install: bool,
    rows: int,
    row_dtype: RowDtype,
    varied: bool,
    side_split: SideSplit,
    json_file: Path | None,
    html_file: Path | None,
    hotness: tuple[float, ...],
    **options: Any,
) -> None:
    """Compare shardrank with what one would serve the model with instead, on this machine.

    Every server has the same weights and is sent the same requests by the same client, and scores are compared before
    anything is measured; each peer is sent the context's columns with every candidate, and once. Ratios are to the best
    peer of each round. --row-dtype and --dtype are of shardrank's rows and dense model; peers compute in float32. The
    exit code is 1 if the client was the bottleneck, so that the numbers can't be believed.

    Examples:
      shardrank loadtest peers --install --env-dir ~/peers
      shardrank loadtest peers --env-dir ~/peers --json peers.json --html peers.html
      shardrank loadtest peers --env-dir ~/peers --workload candidates --same
      shardrank loadtest peers --env-dir ~/peers --row-dtype fp32 --dtype float32
    """
    from loadtest.peers.run import PEERS, PeersConfig, run_peers

    chosen = tuple(PEERS[name] for name in dict.fromkeys(names))
    if install:
        for peer in chosen:
            click.echo(f"{peer.title}: installing {peer.requirements.name} into {env_dir / peer.name}")
            peer.install(env_dir)
        return

    from rich.console import Console

    from loadtest.load.run import write_files
    from loadtest.rounds import show_comparison
    from loadtest.workloads.catalog import BenchShape

    shape = BenchShape.of(rows, row_dtype, varied=varied, side_split=side_split)
    config = PeersConfig(shape=shape, peers=chosen, hotness=tuple(map(int, hotness)), **options)
    with tempfile.TemporaryDirectory(prefix="loadtest-peers-") as folder:
        comparison = run_peers(config, env_dir, Path(folder), click.echo)
    show_comparison(Console(width=150), comparison)
    write_files(comparison, json_file, html_file)
    sys.exit(0 if comparison.valid else 1)

"""`shardrank loadtest peers`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from loader.snapshot.tables import RowDtype
from loadtest.peers.catalog import PEERS, install_peer, installed_pythons
from loadtest.report.cli import PAGE
from loadtest.workloads.cli import same_option, side_split_option
from serving.cli import WithExamples

if TYPE_CHECKING:
    from loadtest.workloads.catalog import SideSplit

FILE = click.Path(path_type=Path, dir_okay=False)
CORES = len(os.sched_getaffinity(0))


def _hotness(ctx: click.Context, param: click.Parameter, text: str) -> tuple[int, ...]:
    del ctx, param
    try:
        found = tuple(int(one) for one in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1 or max(found) > 1000 or len(set(found)) < len(found):
        raise click.BadParameter(f"{text!r} is not different whole numbers from 1 to 1000, as in 1,20")
    return found


@click.command(cls=WithExamples)
@click.option(
    "--peer", "names", type=click.Choice(list(PEERS)), multiple=True, help="Repeatable. Default: all of them."
)
@click.option(
    "--env-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("~/.cache/shardrank/peers"),
    callback=lambda _ctx, _param, path: path.expanduser(),
    show_default=True,
    metavar="DIR",
    help="Has a virtual environment for each peer.",
)
@click.option("--install", "installs", is_flag=True, help="Make the environments with pip, and measure nothing.")
@click.option("--rounds", type=click.IntRange(1, 100), default=5, show_default=True, metavar="N")
@click.option(
    "--seconds", type=click.FloatRange(0.1, 3600), default=5.0, show_default=True, metavar="S", help="Of each load."
)
@click.option(
    "--warmup", "warmup_s", type=click.FloatRange(0, 3600), default=1.0, show_default=True, metavar="S", help="Before."
)
@click.option("--hotness", callback=_hotness, default="1,20", show_default=True, metavar="N,...", help="Ids a bag.")
@click.option("--in-flight", type=click.IntRange(1, 1024), default=32, show_default=True, metavar="N")
@click.option("--rows", type=click.IntRange(1, 2**31), default=1_000_000, show_default=True, help="Of the one table.")
@side_split_option("product")
@same_option
@click.option("--workers", type=click.IntRange(1, 64), default=CORES, help="Processes of a peer. Default: the cores.")
@click.option("--batch", type=click.IntRange(1, 64), default=8, show_default=True, help="Largest one of a peer.")
@click.option("--shardrank-workers", type=click.IntRange(1, 64), default=CORES, help="Default: the cores.")
@click.option(
    "--row-dtype",
    type=click.Choice(["int8", "fp16", "fp32"]),
    default="int8",
    show_default=True,
    help="Of shardrank's rows.",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "int8"]),
    default="auto",
    show_default=True,
    help="Of shardrank's dense model.",
)
@click.option(
    "--beside-float32/--no-beside-float32",
    default=True,
    show_default=True,
    help="Measure shardrank with fp32 rows and a float32 model as well.",
)
@click.option(
    "--against-equal",
    is_flag=True,
    help="Measure requests/s alone: varied requests (50 to 150 candidates) against equal ones (100).",
)
@click.option("--json", "json_file", type=FILE, metavar="FILE", help="Write the comparison to this file.")
@click.option("--html", "html_file", type=PAGE, metavar="FILE", help="Write a page with plots to this file.")
@click.pass_context
def peers(
    ctx: click.Context,
    /,
    names: tuple[str, ...],
    env_dir: Path,
    installs: bool,
    rows: int,
    row_dtype: RowDtype,
    varied: bool,
    side_split: SideSplit,
    against_equal: bool,
    json_file: Path | None,
    html_file: Path | None,
    **measuring: object,
) -> None:
    """Compare shardrank with what one would serve the model with instead, on this machine.

    Every server has the same weights, is asked the same requests by the same client, and its scores are checked before
    anything is measured; each peer is asked in the better of two forms, with the context's columns in every candidate's
    or sent once. In each round, every server is then offered half of what the best peer could answer, as a rate.
    The exit code is 1 if the client was the bottleneck, so that the numbers can't be believed.

    Examples:
      shardrank loadtest peers --install --env-dir ~/peers
      shardrank loadtest peers --env-dir ~/peers --json peers.json --html peers.html
      shardrank loadtest peers --env-dir ~/peers --peer fastapi --peer mosec --rounds 1 --seconds 2
      shardrank loadtest peers --env-dir ~/peers --workload candidates
      shardrank loadtest peers --env-dir ~/peers --against-equal --json varied.json
    """
    chosen = [PEERS[name] for name in dict.fromkeys(names or PEERS)]
    if installs:
        for peer in chosen:
            install_peer(peer, env_dir, click.echo)
        return
    pythons = installed_pythons(chosen, env_dir)

    from rich.console import Console

    from loadtest.load.run import write_files
    from loadtest.peers.run import Aims, PeersConfig, ahead, compared, run_peers, show
    from loadtest.peers.varied import compared_varied, run_varied, show_varied
    from loadtest.workloads.catalog import BenchShape

    shape = BenchShape.of(rows, row_dtype, varied=varied, side_split=side_split)
    config = PeersConfig.model_validate({"shape": shape, "peers": tuple(pythons), **measuring})
    console = Console(width=150)
    with tempfile.TemporaryDirectory(prefix="loadtest-peers-") as folder:
        if against_equal:
            comparison = compared_varied(config, *run_varied(config, pythons, Path(folder), click.echo))
            show_varied(console, config, comparison)
        else:
            rounds, trials = run_peers(config, pythons, Path(folder), click.echo)
            comparison = compared(config, rounds, trials=trials)
            show(console, comparison, ahead(config, comparison), Aims.of(shape))
    write_files(comparison, json_file, html_file)
    ctx.exit(0 if comparison.valid else 1)

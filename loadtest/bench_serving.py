"""What serving costs beyond computing: `python -m loadtest.bench_serving [--quick] [--json FILE]`.

Real servers on this machine, with a client of its own process: processor time of a server's processes for each request
when 32 are always in flight, as the operating system counts it, over gRPC, binary HTTP and JSON, against the same
batches computed without a server; and the median time of one request after the other, against a batch of one. Each
number of a server is taken next to its limit, and everything is repeated in rounds: trust the ratios.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, get_args

import click
from rich.console import Console

from loader.errors import ShardrankError
from loadtest.serving_cost.run import BenchConfig, run_bench
from loadtest.serving_cost.servers import Mode
from loadtest.serving_cost.shape import Head, Shape
from loadtest.serving_cost.tables import show
from loadtest.workloads.payloads import Api

MEASURED_APIS: tuple[Api, ...] = ("grpc", "oip-http", "json")


@click.command(help=__doc__)
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the result here.")
@click.option("--quick", is_flag=True, help="About a minute: the MLP alone, one round, short times.")
@click.option("--head", "heads", type=click.Choice(get_args(Head)), multiple=True, help="Repeatable. Default: both.")
@click.option("--hotness", type=click.IntRange(1, 1000), multiple=True, help="Repeatable. Default: 1 and 20.")
@click.option("--api", "apis", type=click.Choice(MEASURED_APIS), multiple=True, help="Repeatable. Default: all.")
@click.option(
    "--mode",
    "modes",
    type=click.Choice(get_args(Mode)),
    multiple=True,
    help="Where the rows are when one request is in flight. Repeatable. Default: both.",
)
@click.option("--rows", type=click.IntRange(1), default=1_000_000, show_default=True, help="Of the one table.")
@click.option("--rounds", type=click.IntRange(1, 100), help="Default: 5, with --quick 1.")
@click.option("--seconds", type=click.FloatRange(0.1), help="Of each full load. Default: 5, with --quick 2.")
@click.option("--in-flight", type=click.IntRange(1, 1024), default=32, show_default=True)
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16"]), default="auto", show_default=True)
@click.option("--workers", type=click.IntRange(1, 64), default=1, show_default=True, help="Processes of each server.")
@click.option("--ranking-replicas", type=click.IntRange(1, 64), help="Of each process. Default: the server's.")
@click.option(
    "--profile",
    "profile_folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True, resolve_path=True),
    help="A folder for the profiles of the servers under full load; keeping them costs a little.",
)
def main(json_file: Path | None, quick: bool, rows: int, **options: Any) -> None:
    """Runs the benchmark."""
    console = Console(width=150)
    config = bench_config(quick=quick, rows=rows, options=options)
    try:
        with tempfile.TemporaryDirectory(prefix="bench-serving-") as folder:
            result = run_bench(config, Path(folder), console.print)
    except ShardrankError as error:
        raise click.ClickException(str(error)) from error
    show(result, console)
    if json_file is not None:
        json_file.write_text(result.model_dump_json(indent=1) + "\n", encoding="utf-8")


def bench_config(*, quick: bool, rows: int, options: dict[str, Any]) -> BenchConfig:
    """What the flags ask for; what is not given is the default of the full or the quick form."""
    config = BenchConfig(shape=Shape(rows=rows))
    given = {name: value for name, value in options.items() if value not in (None, ())}
    if quick:
        config = config.quick()
    return BenchConfig.model_validate(config.model_dump() | given)


if __name__ == "__main__":
    main()

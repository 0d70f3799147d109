"""What serving costs beyond computing: `python -m loadtest.bench_serving [--quick] [--json FILE]`.

Real servers on this machine, with a client of its own process: processor time of a server's processes for each request
when 32 are always in flight, as the operating system counts it, over gRPC, binary HTTP and JSON, against the same
batches computed without a server; and the median time of one request after the other, against a batch of one. Each
number of a server is taken next to its limit, and everything is repeated in rounds: trust the ratios.

With `--against FOLDER`, another checkout of this repository: processor time of a request, this checkout's server and
that one's in alternation, and their ratio.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, get_args

import click
from rich.console import Console

from loader.errors import ShardrankError
from loadtest.servers import Mode
from loadtest.serving_cost.result import AgainstBench, ServingBench, show, show_against
from loadtest.serving_cost.run import OLD_APIS, BenchConfig, run_against, run_bench
from loadtest.workloads.catalog import BenchShape, Head
from loadtest.workloads.cli import same_option
from loadtest.workloads.payloads import APIS, Api


def _old_apis(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> dict[Api, Api]:
    """`NEW=OLD`, each an API."""
    del ctx, param
    found = dict(OLD_APIS)
    for text in texts:
        new, _, old = text.partition("=")
        if new not in APIS or old not in APIS:
            raise click.BadParameter(f"{text!r} is not NEW=OLD with two of {', '.join(APIS)}")
        found[new] = old
    return found


@click.command(help=__doc__)
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the result here.")
@click.option("--quick", is_flag=True, help="About a minute: the MLP alone, one round, short times.")
@click.option("--head", "heads", type=click.Choice(get_args(Head)), multiple=True, help="Repeatable. Default: both.")
@click.option("--hotness", type=click.IntRange(1, 1000), multiple=True, help="Repeatable. Default: 1 and 20.")
@click.option("--api", "apis", type=click.Choice(APIS), multiple=True, help="Repeatable. Default: all but oip-grpc.")
@click.option(
    "--mode",
    "modes",
    type=click.Choice(get_args(Mode)),
    multiple=True,
    help="Where the rows are when one request is in flight. Repeatable. Default: both.",
)
@click.option("--rows", type=click.IntRange(1), default=1_000_000, show_default=True, help="Of the one table.")
@same_option
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
@click.option(
    "--against",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="FOLDER",
    help="Another checkout: full load alone, on its server and this one's.",
)
@click.option(
    "--against-api",
    "old_apis",
    multiple=True,
    callback=_old_apis,
    metavar="NEW=OLD",
    help="With --against: what the old server is asked in place of an API that it lacks. Repeatable. "
    "Default: grpc-packed=grpc.",
)
def main(json_file: Path | None, against: Path | None, old_apis: dict[Api, Api], **options: Any) -> None:
    """Runs the benchmark."""
    console = Console(width=160)
    config = bench_config(**options)
    result: ServingBench | AgainstBench
    try:
        with tempfile.TemporaryDirectory(prefix="bench-serving-") as folder:
            if against is None:
                result = run_bench(config, Path(folder), console.print)
                show(result, console)
            else:
                result = run_against(config, against, old_apis, Path(folder), console.print)
                show_against(result, console)
    except ShardrankError as error:
        raise click.ClickException(str(error)) from error
    if json_file is not None:
        json_file.write_text(result.model_dump_json(indent=1) + "\n", encoding="utf-8")


def bench_config(*, quick: bool, rows: int, varied: bool, **options: Any) -> BenchConfig:
    """What the flags ask for; what is not given is the default of the full or the quick form."""
    config = BenchConfig(shape=BenchShape.of(rows, varied=varied))
    given = {name: value for name, value in options.items() if value not in (None, ())}
    if quick:
        config = config.quick()
    return BenchConfig.model_validate(config.model_dump() | given)


if __name__ == "__main__":
    main()

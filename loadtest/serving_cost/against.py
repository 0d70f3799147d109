"""This checkout's server against another checkout's: what a request costs each under full load, in alternation.

Both serve the same snapshot, run by the same Python, and are asked the same requests by the same client. In each round
both are started anew, so that what differs from one start to the next is in the spread; each API is then weighed on one
right after the other, and which of the two goes first turns with the rounds.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import Field
from rich.console import Console
from rich.table import Table

import loadtest
from loader.snapshot.manifest import Frozen
from loadtest.serving_cost.errors import ServingBenchError
from loadtest.serving_cost.helper_process import HelperProcess
from loadtest.serving_cost.messages import Weighed
from loadtest.serving_cost.one_answer import check_scores, scores_of
from loadtest.serving_cost.result import Spread, against_aim
from loadtest.serving_cost.run import (
    CHECKED_REQUESTS,
    TOLERANCES,
    BenchConfig,
    Say,
    all_versions,
    load_on,
    machine_text,
    served_dtype,
    server_arguments,
)
from loadtest.serving_cost.servers import Server, serving
from loadtest.serving_cost.shape import Head, Shape, model_spec, payloads
from loadtest.workloads.export import write_random_snapshot
from loadtest.workloads.payloads import Api

MAX_RATIO: dict[Api, float] = {"grpc-packed": 1.0, "oip-http": 1.05, "oip-grpc": 1.05, "json": 1.1, "grpc": 1.25}
"""What is aimed at: processor time of a request, the new server's to the old one's."""
OLD_APIS: dict[Api, Api] = {"grpc-packed": "grpc"}
"""What the old server is asked in place of an API that it may not have."""

SERVED_PACKAGES = ("loader", "shard_node", "router", "serving")

Side = Literal["new", "old"]


class Cost(Frozen):
    """Of one server under full load.

    Attributes:
        cpu_us: processor time of its processes for each request.
        requests_per_s: answered.
        client_cores: processor seconds a second of the client.
        p50_ms: of requests, under this load.
    """

    cpu_us: float
    requests_per_s: float
    client_cores: float
    p50_ms: float

    @classmethod
    def of(cls, load: Weighed) -> Cost:
        """From what the client weighed."""
        return cls(
            cpu_us=load.server_cpu_s / load.requests * 1e6,
            requests_per_s=load.requests / load.seconds,
            client_cores=load.client_cpu_s / load.seconds,
            p50_ms=load.p50_ms,
        )


class Pair(Frozen):
    """Both servers, one right after the other.

    Attributes:
        api: that the new one was asked in.
        old_api: that the old one was asked in.
    """

    round: int
    head: Head
    hotness: int
    api: Api
    old_api: Api
    new: Cost
    old: Cost


class AgainstBench(Frozen):
    """The document of `--json` with `--against`.

    Attributes:
        new_commit, old_commit: as `git describe` names what was run, with `-dirty` where files differ from it.
        server_arguments: flags of both servers beside those that every run has.
    """

    kind: Literal["serving_against"] = "serving_against"
    format_version: Literal[1] = 1
    began_at: str
    machine: str
    versions: dict[str, str]
    new_commit: str
    old_commit: str
    shape: Shape
    dtype: Literal["float32", "bfloat16"]
    server_arguments: tuple[str, ...]
    in_flight: int
    seconds: float
    rounds: int = Field(ge=1)
    pairs: tuple[Pair, ...]

    def groups(self) -> dict[tuple[Head, int, Api], list[Pair]]:
        """The rounds of each head, hotness and API."""
        found: dict[tuple[Head, int, Api], list[Pair]] = {}
        for one in self.pairs:
            found.setdefault((one.head, one.hotness, one.api), []).append(one)
        return found

    def ratios(self) -> dict[tuple[Head, int, Api], Spread]:
        """Processor time of a request, new to old."""
        return {
            key: Spread.of([one.new.cpu_us / one.old.cpu_us for one in pairs]) for key, pairs in self.groups().items()
        }


def run_against(config: BenchConfig, other: Path, old_apis: Mapping[Api, Api], folder: Path, say: Say) -> AgainstBench:
    """Measures everything.

    Args:
        config: what, as far as it is of the full load; nothing is profiled.
        other: the old checkout.
        old_apis: what the old server is asked in place of an API; for others, the same.
        folder: for snapshots and logs.
        say: told what is being done.

    Raises:
        ServingBenchError: `other` is no checkout, a process ended, a request failed, or the servers' scores differ.
        ShardrankError: the snapshots can't be written.
    """
    checkouts: dict[Side, Path] = {"new": Path(loadtest.__file__).resolve().parents[1], "old": other.resolve()}
    # Where one is missing, Python would take that of another checkout, such as the installed one.
    if missing := [name for name in SERVED_PACKAGES if not (checkouts["old"] / name / "__init__.py").is_file()]:
        raise ServingBenchError(f"{other}: not a checkout of this repository; it has no {missing[0]}/__init__.py")
    config = config.model_copy(update={"profile_folder": None})
    began_at = datetime.now(UTC).isoformat(timespec="seconds")
    dtype, pairs = served_dtype(config), []
    with HelperProcess("loadtest.serving_cost.client_process", config.shape) as client:
        for head in config.heads:
            say(f"{head}: writing {config.shape.rows} rows")
            snapshot = write_random_snapshot(model_spec(config.shape, head), folder / "store")
            arguments = server_arguments(config, dtype, head, "local")
            for number in range(config.rounds):
                say(f"{head}, round {number + 1}: starting both servers")
                with contextlib.ExitStack() as stack:
                    servers: dict[Side, Server] = {
                        side: stack.enter_context(
                            serving("local", snapshot, arguments, folder / f"{head}-{side}.log", checkout)
                        )
                        for side, checkout in checkouts.items()
                    }
                    pairs += _round(config, head, number, old_apis, client, servers, TOLERANCES[dtype], say)
    return AgainstBench(
        began_at=began_at,
        machine=machine_text(),
        versions=all_versions(),
        new_commit=_commit(checkouts["new"]),
        old_commit=_commit(checkouts["old"]),
        shape=config.shape,
        dtype=dtype,
        server_arguments=arguments,
        in_flight=config.in_flight,
        seconds=config.seconds,
        rounds=config.rounds,
        pairs=tuple(pairs),
    )


def _round(
    config: BenchConfig,
    head: Head,
    number: int,
    old_apis: Mapping[Api, Api],
    client: HelperProcess,
    servers: Mapping[Side, Server],
    tolerance: float,
    say: Say,
) -> list[Pair]:
    """Every hotness and API on both; in the first round, after their scores were compared."""
    found = []
    order: tuple[Side, ...] = ("new", "old") if number % 2 == 0 else ("old", "new")
    for hotness in config.hotness:
        for api in config.apis:
            asked: dict[Side, Api] = {"new": api, "old": old_apis.get(api, api)}
            if number == 0:
                _check_same(config.shape, head, hotness, asked, servers, tolerance)
            costs: dict[Side, Cost] = {}
            for side in order:
                say(f"{head}, hotness {hotness}, round {number + 1}: {asked[side]}, {side}")
                load = load_on(servers[side], config, head, hotness, asked[side], config.in_flight, config.seconds)
                costs[side] = Cost.of(client.measure(load, Weighed))
            found.append(
                Pair(round=number, head=head, hotness=hotness, api=api, old_api=asked["old"], **costs),
            )
    return found


def _check_same(
    shape: Shape, head: Head, hotness: int, asked: Mapping[Side, Api], servers: Mapping[Side, Server], tolerance: float
) -> None:
    """Raises WrongAnswerError unless both give the same scores to the first requests of the pool."""
    pools = {side: payloads(shape, head, hotness, api, CHECKED_REQUESTS) for side, api in asked.items()}
    for request in range(CHECKED_REQUESTS):
        check_scores(servers["new"], pools["new"], request, scores_of(servers["old"], pools["old"], request), tolerance)


def _commit(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return f"{checkout.name}, not under git"


def show_against(result: AgainstBench, console: Console) -> None:
    """Prints both costs and their ratio, beside what is aimed at."""
    console.print(
        f"{result.began_at}, {result.machine}, dense model in {result.dtype}, {result.rounds} rounds\n"
        f"requests: {result.shape.requests}\nnew: {result.new_commit}, old: {result.old_commit}"
    )
    table = Table(title=f"{result.in_flight} in flight: processor time of the server for each request, new to old")
    for column in ("head", "hotness", "api", "old api", "new / old (least–most)", "aim"):
        table.add_column(column)
    for column in ("new µs (least–most)", "old µs (least–most)", "new /s", "old /s", "client cores"):
        table.add_column(column, justify="right")
    ratios = result.ratios()
    for (head, hotness, api), pairs in result.groups().items():
        table.add_row(
            head,
            str(hotness),
            api,
            pairs[0].old_api,
            against_aim(ratios[head, hotness, api], MAX_RATIO[api], "×"),
            f"≤ {MAX_RATIO[api]:.2f}×",
            *(_spread([getattr(one, side).cpu_us for one in pairs]) for side in ("new", "old")),
            *(
                f"{Spread.of([getattr(one, side).requests_per_s for one in pairs]).median:.0f}"
                for side in ("new", "old")
            ),
            f"{max(max(one.new.client_cores, one.old.client_cores) for one in pairs):.2f}",
        )
    console.print(table)


def _spread(values: list[float]) -> str:
    found = Spread.of(values)
    return f"{found.median:.0f} ({found.least:.0f}–{found.most:.0f})"

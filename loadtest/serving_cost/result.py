"""What the serving benchmark found: the documents of `--json`, and their tables on screen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeVar

import numpy as np
from pydantic import Field
from rich.console import Console
from rich.table import Table

from loader.snapshot.manifest import Frozen
from loadtest.load.messages import Weighed
from loadtest.servers import Mode
from loadtest.workloads.catalog import BenchShape, Head
from loadtest.workloads.payloads import Api

MAX_CPU_RATIO: dict[Api, float] = {"grpc-packed": 1.25, "grpc": 1.25, "oip-grpc": 1.25, "oip-http": 1.25, "json": 1.6}
MAX_EXTRA_MS: dict[Mode, float] = {"local": 0.5, "two_shards": 1.0}
"""What is aimed at: processor time beyond the limit's, and time beyond that of its batch of one request."""
MAX_RATIO: dict[Api, float] = {"grpc-packed": 1.0, "oip-http": 1.05, "oip-grpc": 1.05, "json": 1.1, "grpc": 1.25}
"""What is aimed at: processor time of a request, the new server's to the old one's."""

One = TypeVar("One", bound=Frozen)
Key = TypeVar("Key")


class Saturated(Frozen):
    """One server under full load, and the limit right after it.

    Attributes:
        cpu_ms: processor time of the server's processes for each request.
        limit_cpu_ms: that of the same batches without a server.
        ratio: the one to the other.
        batch_requests: mean size of the server's batches, and of the limit's.
        requests_per_s: answered.
        server_cores, client_cores: processor seconds a second.
        p50_ms, p99_ms: of requests, under this load.
    """

    round: int
    head: Head
    hotness: int
    api: Api
    cpu_ms: float
    limit_cpu_ms: float
    ratio: float
    batch_requests: float
    requests_per_s: float
    server_cores: float
    client_cores: float
    p50_ms: float
    p99_ms: float


class Unloaded(Frozen):
    """One request after the other, and the limit's batches of one.

    Attributes:
        p50_ms: from sending to answer.
        limit_ms: median time of a batch of one request without a server.
        extra_ms: the difference.
    """

    round: int
    head: Head
    hotness: int
    api: Api
    mode: Mode
    p50_ms: float
    limit_ms: float
    extra_ms: float


class Spread(Frozen):
    """Of a number over the rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Sum up one or more values."""
        return cls(median=float(np.median(values)), least=min(values), most=max(values))

    def shown(self, digits: int, unit: str = "") -> str:
        """Write it as `1.20× (1.10–1.30)`."""
        return f"{self.median:.{digits}f}{unit} ({self.least:.{digits}f}–{self.most:.{digits}f})"

    def against(self, most: float, unit: str) -> str:
        """Write it as rich prints it: green if its median is at most `most`."""
        value, range_ = self.shown(2, unit).split(" ", 1)
        return f"[{'green' if self.median <= most else 'red'}]{value}[/] {range_}"


def grouped(ones: Iterable[One], key: Callable[[One], Key]) -> dict[Key, list[One]]:
    """Gather the rounds of each key."""
    found: dict[Key, list[One]] = {}
    for one in ones:
        found.setdefault(key(one), []).append(one)
    return found


class ServingRun(Frozen):
    """What every run of the benchmark tells.

    Attributes:
        began_at: wall clock, ISO 8601 with UTC offset.
        machine: processor and cores.
        versions: of shardrank, Python and the main libraries.
        server_arguments: flags of the servers beside those that every run has.
        in_flight: requests of the client under full load.
        seconds: that each full load was weighed for.
    """

    began_at: str
    machine: str
    versions: dict[str, str]
    shape: BenchShape
    dtype: Literal["float32", "bfloat16"]
    server_arguments: tuple[str, ...]
    in_flight: int
    seconds: float
    rounds: int = Field(ge=1)

    @property
    def about(self) -> str:
        """Say on screen when, where and what was measured."""
        return (
            f"{self.began_at}, {self.machine}, dense model in {self.dtype}, {self.rounds} rounds\n"
            f"requests: {self.shape.requests}"
        )


class ServingBench(ServingRun):
    """Servers against the same batches without one."""

    kind: Literal["serving_bench"] = "serving_bench"
    format_version: Literal[1] = 1
    saturated: tuple[Saturated, ...]
    unloaded: tuple[Unloaded, ...]

    def ratios(self) -> dict[tuple[Head, int, Api], Spread]:
        """Give processor time to the limit's, by head, hotness and API."""
        groups = grouped(self.saturated, lambda one: (one.head, one.hotness, one.api))
        return {key: Spread.of([one.ratio for one in ones]) for key, ones in groups.items()}

    def extra_ms(self) -> dict[tuple[Head, int, Api, Mode], Spread]:
        """Give time beyond the limit's batch of one, by head, hotness, API and where the rows are."""
        groups = grouped(self.unloaded, lambda one: (one.head, one.hotness, one.api, one.mode))
        return {key: Spread.of([one.extra_ms for one in ones]) for key, ones in groups.items()}


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
        """Take what the client weighed."""
        return cls(
            cpu_us=load.server_cpu_s / load.requests * 1e6,
            requests_per_s=load.requests / load.seconds,
            client_cores=load.client_cpu_s / load.seconds,
            p50_ms=load.p50_ms,
        )


class Pair(Frozen):
    """Both servers, one right after the other; each was asked in its API."""

    round: int
    head: Head
    hotness: int
    api: Api
    old_api: Api
    new: Cost
    old: Cost


class AgainstBench(ServingRun):
    """The document of `--json` with `--against`.

    Attributes:
        new_commit, old_commit: as `git describe` names what was run, with `-dirty` where files differ from it.
    """

    kind: Literal["serving_against"] = "serving_against"
    format_version: Literal[1] = 1
    new_commit: str
    old_commit: str
    pairs: tuple[Pair, ...]

    def groups(self) -> dict[tuple[Head, int, Api], list[Pair]]:
        """Gather the rounds of each head, hotness and API."""
        return grouped(self.pairs, lambda one: (one.head, one.hotness, one.api))

    def ratios(self) -> dict[tuple[Head, int, Api], Spread]:
        """Give processor time of a request, new to old."""
        return {
            key: Spread.of([one.new.cpu_us / one.old.cpu_us for one in pairs]) for key, pairs in self.groups().items()
        }


def show(result: ServingBench, console: Console) -> None:
    """Print what the benchmark found, beside what is aimed at."""
    console.print(result.about)
    numbers = ("CPU ms", "limit ms", "requests/s", "batch", "server cores", "client cores", "p50 ms", "p99 ms")
    title = f"{result.in_flight} in flight: processor time of the server for each request, to its limit"
    table = _table(title, ("head", "hotness", "api", "ratio (least–most)", "aim"), numbers)
    saturated = grouped(result.saturated, lambda one: (one.head, one.hotness, one.api))
    digits = {
        "cpu_ms": 3,
        "limit_cpu_ms": 3,
        "requests_per_s": 0,
        "batch_requests": 1,
        "server_cores": 2,
        "client_cores": 2,
        "p50_ms": 2,
        "p99_ms": 2,
    }
    for (head, hotness, api), ratio in result.ratios().items():
        medians = [f"{_median(saturated[head, hotness, api], name):.{count}f}" for name, count in digits.items()]
        aim = MAX_CPU_RATIO[api]
        table.add_row(head, str(hotness), api, ratio.against(aim, "×"), f"≤ {aim:.2f}×", *medians)
    console.print(table)
    if not result.unloaded:
        return
    title = "One in flight: p50, and what it is beyond the limit's batch of one"
    columns = ("head", "hotness", "rows", "api", "beyond the limit, ms (least–most)", "aim")
    table = _table(title, columns, ("p50 ms", "limit ms"))
    unloaded = grouped(result.unloaded, lambda one: (one.head, one.hotness, one.api, one.mode))
    for (head, hotness, api, mode), extra in result.extra_ms().items():
        rows, aim = unloaded[head, hotness, api, mode], MAX_EXTRA_MS[mode]
        medians = [f"{_median(rows, name):.2f}" for name in ("p50_ms", "limit_ms")]
        table.add_row(head, str(hotness), mode, api, extra.against(aim, ""), f"≤ {aim:.1f}", *medians)
    console.print(table)


def show_against(result: AgainstBench, console: Console) -> None:
    """Print both costs and their ratio, beside what is aimed at."""
    console.print(f"{result.about}\nnew: {result.new_commit}, old: {result.old_commit}")
    numbers = ("new µs (least–most)", "old µs (least–most)", "new /s", "old /s", "client cores")
    title = f"{result.in_flight} in flight: processor time of the server for each request, new to old"
    table = _table(title, ("head", "hotness", "api", "old api", "new / old (least–most)", "aim"), numbers)
    ratios = result.ratios()
    for (head, hotness, api), pairs in result.groups().items():
        sides = [[one.new for one in pairs], [one.old for one in pairs]]
        costs = [Spread.of([cost.cpu_us for cost in side]).shown(0) for side in sides]
        rates = [f"{_median(side, 'requests_per_s'):.0f}" for side in sides]
        cores = max(cost.client_cores for side in sides for cost in side)
        aim = MAX_RATIO[api]
        ratio = ratios[head, hotness, api].against(aim, "×")
        cells = (head, str(hotness), api, pairs[0].old_api, ratio, f"≤ {aim:.2f}×", *costs, *rates, f"{cores:.2f}")
        table.add_row(*cells)
    console.print(table)


def _table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title)
    for column in words:
        table.add_column(column)
    for column in numbers:
        table.add_column(column, justify="right")
    return table


def _median(ones: Sequence[Frozen], name: str) -> float:
    return float(np.median([getattr(one, name) for one in ones]))

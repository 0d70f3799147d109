"""What the benchmark found: the document of `--json`."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from loader.snapshot.manifest import Frozen
from loadtest.serving_cost.servers import Mode
from loadtest.serving_cost.shape import Head, Shape
from loadtest.workloads.payloads import Api

MAX_CPU_RATIO: dict[Api, float] = {"grpc-packed": 1.25, "grpc": 1.25, "oip-grpc": 1.25, "oip-http": 1.25, "json": 1.6}
MAX_EXTRA_MS: dict[Mode, float] = {"local": 0.5, "two_shards": 1.0}
"""What is aimed at: processor time beyond the limit's, and time beyond that of its batch of one request."""


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
    def of(cls, values: list[float]) -> Spread:
        """Of one or more values."""
        return cls(median=float(np.median(values)), least=min(values), most=max(values))


def against_aim(spread: Spread, most: float, unit: str) -> str:
    """A spread as rich prints it: green if its median is at most `most`."""
    style = "green" if spread.median <= most else "red"
    return f"[{style}]{spread.median:.2f}{unit}[/] ({spread.least:.2f}–{spread.most:.2f})"


class ServingBench(Frozen):
    """The whole run.

    Attributes:
        began_at: wall clock, ISO 8601 with UTC offset.
        machine: processor and cores.
        versions: of shardrank, Python and the main libraries.
        server_arguments: flags of the servers beside those that every run has.
        in_flight: requests of the client under full load.
        seconds: that each full load was weighed for.
    """

    kind: Literal["serving_bench"] = "serving_bench"
    format_version: Literal[1] = 1
    began_at: str
    machine: str
    versions: dict[str, str]
    shape: Shape
    dtype: Literal["float32", "bfloat16"]
    server_arguments: tuple[str, ...]
    in_flight: int
    seconds: float
    rounds: int = Field(ge=1)
    saturated: tuple[Saturated, ...]
    unloaded: tuple[Unloaded, ...]

    def ratios(self) -> dict[tuple[Head, int, Api], Spread]:
        """Processor time to the limit's, by head, hotness and API."""
        found: dict[tuple[Head, int, Api], list[float]] = {}
        for one in self.saturated:
            found.setdefault((one.head, one.hotness, one.api), []).append(one.ratio)
        return {key: Spread.of(values) for key, values in found.items()}

    def extra_ms(self) -> dict[tuple[Head, int, Api, Mode], Spread]:
        """Time beyond the limit's batch of one, by head, hotness, API and where the rows are."""
        found: dict[tuple[Head, int, Api, Mode], list[float]] = {}
        for one in self.unloaded:
            found.setdefault((one.head, one.hotness, one.api, one.mode), []).append(one.extra_ms)
        return {key: Spread.of(values) for key, values in found.items()}

"""What a load test sends, where and how often."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, Field, model_validator

from loader.snapshot.tables import Frozen
from loadtest.workloads.catalog import BENCH_REQUESTS, BENCH_SEED, BenchWorkload
from loadtest.workloads.payloads import GRPC_APIS, Encoding
from serving.description import ModelInfo, NumberFormat
from serving.limits import RequestLimits

APIS_BY_SCHEME: dict[str, tuple[Encoding, ...]] = {"http": ("json", "oip-http"), "grpc": GRPC_APIS}
OTHER_SERVERS_APIS: tuple[Encoding, ...] = ("flat", "flat-once", "tensors", "tensors-once")
Arrivals: TypeAlias = Literal["poisson", "constant"]
MAX_RUN_S = 3600.0
MAX_RATE = 200_000.0
MAX_TIMEOUT_MS = 60_000.0
RATE_SHARE, WARM_UP_SHARE = 0.5, 0.2
"""Of what a server answers when it is kept busy: a rate, if none is given; of a measurement's seconds, before them."""
TOLERANCES: dict[NumberFormat, float] = {"float32": 1e-4, "bfloat16": 0.02, "int8": 0.06}
"""Scores are between 0 and 1. A server's batches are of other sizes, so sums are rounded otherwise; random weights, of
which every layer is in int8, make of that what trained ones do not."""
INT8_SUMS_TOLERANCE = 0.01
"""Where shards may answer with sums as int8 rows."""


def parse_target(text: str) -> SplitResult:
    """Read `http://host[:port]` or `grpc://host:port`. Raises ValueError: it is something else, such as TLS."""
    parts = urlsplit(text)
    if parts.scheme not in APIS_BY_SCHEME:
        raise ValueError(f"{text!r} is not http://HOST[:PORT] or grpc://HOST:PORT; TLS is not supported")
    others = parts.path.strip("/") or parts.query or parts.fragment or parts.username
    if others or not parts.hostname or (parts.port is None and parts.scheme == "grpc"):
        raise ValueError(f"{text!r}: a host and a port are needed, and nothing else")
    return parts


class Sending(Frozen):
    """Where requests are sent, and the limits of that.

    Attributes:
        api: None for the target's first: JSON, or shardrank's gRPC.
        varied: whether each request is sent with another `traceparent` and `x-request-id`.
        timeout_ms: after which a request is given up, from its intended time.
        requests: distinct ones in each process.
        max_in_flight, max_connections, grpc_channels: of all processes together; connections are HTTP's.
    """

    target: Annotated[str, AfterValidator(lambda text: parse_target(text) and text)]
    api: Encoding | None = None
    model: str | None = None
    varied: bool = False
    timeout_ms: float = Field(default=1000, gt=0, le=MAX_TIMEOUT_MS)
    processes: int = Field(default=1, ge=1, le=64)
    requests: int = Field(default=1024, ge=1, le=1_000_000)
    max_in_flight: int = Field(default=4096, ge=1, le=1_000_000)
    max_connections: int = Field(default=512, ge=1, le=60_000)
    grpc_channels: int = Field(default=4, ge=1, le=1024)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        scheme = self.scheme
        if self.api not in (None, *APIS_BY_SCHEME[scheme], *OTHER_SERVERS_APIS):
            raise ValueError(f"api: {self.api!r} is not spoken at {scheme}://; {', '.join(APIS_BY_SCHEME[scheme])} are")
        for name in ("max_in_flight", "max_connections"):
            if getattr(self, name) < self.processes:
                raise ValueError(f"{name}: {getattr(self, name)} is less than processes, {self.processes}")
        return self

    @property
    def stated_timeout_ms(self) -> int | None:
        """The deadline that requests bring; None where the one that servers give them by default is enough."""
        return math.ceil(self.timeout_ms) if self.timeout_ms > RequestLimits().default_timeout_ms else None

    @property
    def scheme(self) -> str:
        """The target's: `http` or `grpc`."""
        return parse_target(self.target).scheme

    @property
    def spoken(self) -> Encoding:
        """The API that is used."""
        return self.api or APIS_BY_SCHEME[self.scheme][0]


class OfferedLoad(Sending):
    """What to send for all runs of one load test; what a workload is made of is as in `open_workload`.

    `slo_ms` is the deadline of goodput, from the intended time; `seed` is of requests and their times. `like` is a file
    or a folder whose requests are drawn, in place of ids, candidates and hotness.
    """

    workload: str | BenchWorkload | ModelInfo = "dlrm-v2:0.001"
    hotness: tuple[str, ...] = ()
    like: Path | None = None
    ids: str | None = None
    candidates: str | None = None
    varied: bool = True
    arrivals: Arrivals = "poisson"
    slo_ms: float = Field(default=60, gt=0, le=MAX_TIMEOUT_MS)
    seed: int = Field(default=0, ge=0, lt=2**31)

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        if self.slo_ms > self.timeout_ms:
            raise ValueError(f"slo_ms: {self.slo_ms:g} is more than timeout_ms, {self.timeout_ms:g}")
        if self.like and (self.ids or self.candidates or self.hotness):
            raise ValueError("like: ids, candidates and hotness are those of the requests that are drawn")
        if self.model is None and (self.like or self.hotness):
            raise ValueError("like, hotness: only for a served model (--model)")
        return self


def bench_load(target: str, api: Encoding, workload: BenchWorkload, **changed: Any) -> OfferedLoad:
    """Return the load of a benchmark: the same requests in every encoding."""
    same = {"requests": BENCH_REQUESTS, "seed": BENCH_SEED, "timeout_ms": MAX_TIMEOUT_MS, **changed}
    return OfferedLoad(target=target, api=api, workload=workload, varied=workload.shape.varied, **same)


class RunConfig(Frozen):
    """One run: requests a second of all processes together, seconds of sending before what counts, and that count."""

    rate: float = Field(default=50.0, gt=0, le=MAX_RATE)
    warmup_s: float = Field(default=2.0, ge=0, le=MAX_RUN_S)
    duration_s: float = Field(default=10.0, gt=0, le=MAX_RUN_S)
    seed: int = Field(default=0, ge=0)

    @property
    def until_s(self) -> float:
        """The end of sending, from the run's begin."""
        return self.warmup_s + self.duration_s

"""What the benchmark and its two helper processes say to each other: one JSON document a line, an answer to each."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from loader.snapshot.manifest import Frozen
from loadtest.serving_cost.shape import Head, Shape
from loadtest.workloads.payloads import Api


class AtServer(Frozen):
    """A load on a server, of whichever kind.

    Attributes:
        host, http_port, grpc_port: where it listens.
        channels: connections over gRPC, at most one for each request in flight. Over HTTP every request has its own.
        warmup_s: of the load, before anything is counted.
        seconds: that are counted.
    """

    host: str
    http_port: int
    grpc_port: int
    channels: int = Field(default=4, ge=1)
    warmup_s: float = Field(ge=0)
    seconds: float = Field(gt=0)


class ServerLoad(AtServer):
    """Keep a server busy.

    Attributes:
        in_flight: requests that are always out.
        process_ids: of the server, weighed at the begin and the end of the seconds.
    """

    in_flight: int = Field(ge=1)
    process_ids: tuple[int, ...]


class Load(ServerLoad):
    """To the client: keep a server busy with these requests, and tell what it took."""

    kind: Literal["load"] = "load"
    head: Head
    hotness: int
    api: Api


class Weighed(Frozen):
    """From the client.

    Attributes:
        requests: answered right within the seconds.
        seconds: that it were.
        server_cpu_s, client_cpu_s: processor time of the server's processes, and of the client's own.
        p50_ms, p99_ms: from sending to answer.
    """

    kind: Literal["weighed"] = "weighed"
    requests: int
    seconds: float
    server_cpu_s: float
    client_cpu_s: float
    p50_ms: float
    p99_ms: float


class Offered(Frozen):
    """From the client, of a server that was offered requests at a rate.

    Attributes:
        due: requests that came due within the seconds.
        answered: of these, answered right.
        p50_ms, p99_ms: of those due, from then to the answer; one without an answer is later than all others, and None
            says that the percentile is one of these.
        lag_p99_ms: how late the client came to requests; None without any.
        client_cpu_s: processor time of the client within the seconds.
    """

    kind: Literal["offered"] = "offered"
    due: int
    answered: int
    p50_ms: float | None
    p99_ms: float | None
    lag_p99_ms: float | None
    client_cpu_s: float
    seconds: float


class Compute(Frozen):
    """To the limit: score batches of so many requests for some time.

    Attributes:
        batch_requests: the mean; batches of the next smaller and the next larger size are mixed to it.
    """

    kind: Literal["compute"] = "compute"
    hotness: int
    batch_requests: float = Field(ge=1)
    seconds: float = Field(gt=0)


class Computed(Frozen):
    """From the limit.

    Attributes:
        requests: scored.
        cpu_s: processor time of its process meanwhile.
        seconds: of the clock.
        batch_p50_ms: of a batch.
    """

    kind: Literal["computed"] = "computed"
    requests: int
    cpu_s: float
    seconds: float
    batch_p50_ms: float


class Score(Frozen):
    """To the limit: what are the scores of this request of the pool?"""

    kind: Literal["score"] = "score"
    hotness: int
    request: int = Field(ge=0)


class Scores(Frozen):
    """From the limit, in the order of the candidates."""

    kind: Literal["scores"] = "scores"
    scores: tuple[float, ...]


class LimitConfig(Frozen):
    """What the limit's process is started with."""

    snapshot: str
    shape: Shape
    head: Head
    dtype: Literal["float32", "bfloat16"]


class Failed(Frozen):
    """From either, in place of an answer."""

    kind: Literal["failed"] = "failed"
    message: str


ToLimit: TypeAlias = Annotated[Compute | Score, Field(discriminator="kind")]
TO_LIMIT: TypeAdapter[Compute | Score] = TypeAdapter(ToLimit)
Told: TypeAlias = Annotated[Weighed | Offered | Computed | Scores | Failed, Field(discriminator="kind")]
TOLD: TypeAdapter[Weighed | Offered | Computed | Scores | Failed] = TypeAdapter(Told)

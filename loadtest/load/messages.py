"""What a measurement's main process and its generators say to each other: one JSON document in each line."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from loader.snapshot.manifest import Frozen
from loadtest.load.config import OfferedLoad, RunConfig
from loadtest.load.recorder import RecordedTimes, Records
from loadtest.load.result import Amount, Count


class Prepare(Frozen):
    """To a generator: make your requests. Answered with `Ready`; requests that were made are kept."""

    kind: Literal["prepare"] = "prepare"
    load: OfferedLoad
    process: Count = 0


class Offer(Frozen):
    """To a generator: do your part of a run. Answered with `Done`, after some `Status`.

    Attributes:
        process: its number, from 0.
        at: the begin, CLOCK_MONOTONIC seconds, which all processes of a machine share.
    """

    kind: Literal["offer"] = "offer"
    load: OfferedLoad
    process: Count = 0
    run: RunConfig
    at: float


class Busy(Frozen):
    """To a generator: keep a server busy. Answered with `Weighed`.

    Attributes:
        in_flight: requests that are always out.
        seconds: that are counted, after the warm-up.
        process_ids: of the server, weighed at the begin and the end of the seconds.
    """

    kind: Literal["busy"] = "busy"
    load: OfferedLoad
    in_flight: int = Field(ge=1)
    warmup_s: float = Field(ge=0)
    seconds: float = Field(gt=0)
    process_ids: tuple[int, ...]


class ScoresAsked(Frozen):
    """To a generator: what are the server's scores of one of your requests? Answered with `Scores`."""

    kind: Literal["scores_asked"] = "scores_asked"
    load: OfferedLoad
    request: Count


Asked: TypeAlias = Annotated[Prepare | Offer | Busy | ScoresAsked, Field(discriminator="kind")]
ASKED: TypeAdapter[Prepare | Offer | Busy | ScoresAsked] = TypeAdapter(Asked)


class Ready(Frozen):
    """How many requests a generator has made, the model that they ask for, and the workload's whole name."""

    kind: Literal["ready"] = "ready"
    requests: Count
    model: str
    workload: str


class Status(Frozen):
    """From a generator, some times a second.

    Attributes:
        due: requests that are over.
        ok: of these, answered right.
        in_flight: requests that are out.
        recent: latency of right answers since the last status.
    """

    kind: Literal["status"] = "status"
    due: Count
    ok: Count
    in_flight: Count
    recent: RecordedTimes


class Done(Frozen):
    """The run is over.

    Attributes:
        records: all of it.
        cpu_s: CPU seconds that the generator used from the end of the warm-up to the end of sending.
        connections: opened in this run.
    """

    kind: Literal["done"] = "done"
    records: Records
    cpu_s: Amount
    connections: Count


class Weighed(Frozen):
    """What a busy server took.

    Attributes:
        requests: answered right within the seconds.
        seconds: that it were.
        server_cpu_s, client_cpu_s: processor time of the server's processes, and of the generator's own.
        p50_ms, p99_ms: from sending to answer.
    """

    kind: Literal["weighed"] = "weighed"
    requests: int
    seconds: float
    server_cpu_s: float
    client_cpu_s: float
    p50_ms: float
    p99_ms: float


class Scores(Frozen):
    """Scores in the order of the candidates."""

    kind: Literal["scores"] = "scores"
    scores: tuple[float, ...]


class Refused(Frozen):
    """In place of an answer: an error's message, and whether it is in what was asked for."""

    kind: Literal["refused"] = "refused"
    message: str
    is_config: bool

"""What a load test's main process and the processes that send say to each other: one JSON document in each line."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from loader.snapshot.manifest import Frozen
from loadtest.load.config import LoadConfig, RunConfig
from loadtest.load.recorder import RecordedTimes, Records
from loadtest.load.result import Amount, Count


class ProcessConfig(Frozen):
    """What a process is started with.

    Attributes:
        load: what all do.
        process: its number, from 0.
    """

    load: LoadConfig
    process: Count


class Begin(Frozen):
    """To a process: do a run.

    Attributes:
        run: how.
        at: its begin, CLOCK_MONOTONIC seconds, which all processes of a machine share.
    """

    run: RunConfig
    at: float


class Ready(Frozen):
    """From a process: its requests are made.

    Attributes:
        requests: how many.
        model: that they ask for.
        workload: its name with everything that was chosen.
    """

    kind: Literal["ready"] = "ready"
    requests: Count
    model: str
    workload: str


class Failed(Frozen):
    """From a process: it can't do what it was told, and ends."""

    kind: Literal["failed"] = "failed"
    message: str


class Status(Frozen):
    """From a process, some times a second.

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
    """From a process: the run is over.

    Attributes:
        records: all of it.
        cpu_s: CPU seconds that it used from the end of the warm-up to the end of sending.
        connections: opened in this run.
    """

    kind: Literal["done"] = "done"
    records: Records
    cpu_s: Amount
    connections: Count


FromProcess: TypeAlias = Annotated[Ready | Failed | Status | Done, Field(discriminator="kind")]
FROM_PROCESS: TypeAdapter[Ready | Failed | Status | Done] = TypeAdapter(FromProcess)

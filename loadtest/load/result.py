"""What a load test measured: the JSON document of `--json`, and what reports are drawn from.

Times of a run (`at_s`) count from its begin, the first intended send time, so the first `warmup_s` of them are warm-up.
All counts and percentiles of a run are of the requests that were due after it; only the time line has all.

Latency counts from the intended send time to the answer, so whatever delayed the sending is in it. Service time counts
from when the request was written to a connection. Both are of answers that are right; what failed is in `errors`, and
in `latency_of_due`, where a failed request is later than any answer.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, TypeVar

import psutil
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from loader.snapshot.schema_errors import schema_errors
from loader.snapshot.tables import Frozen
from loadtest.errors import ResultFileError
from loadtest.workloads.payloads import Encoding

MAX_RESULT_BYTES = 256 << 20
LIBRARIES = ("shardrank", "uvloop", "httptools", "grpcio", "hdrhistogram")

Document = TypeVar("Document")
Arrivals: TypeAlias = Literal["poisson", "constant"]

Count: TypeAlias = Annotated[int, Field(ge=0)]
Amount: TypeAlias = Annotated[float, Field(ge=0)]


class Percentiles(Frozen):
    """Of times, in milliseconds; None where nothing was recorded or, in `latency_of_due`, that request failed."""

    min_ms: Amount | None
    mean_ms: Amount | None
    p50_ms: Amount | None
    p90_ms: Amount | None
    p99_ms: Amount | None
    p999_ms: Amount | None
    max_ms: Amount | None


class EncodedHistogram(Frozen):
    """An HDR histogram of `count` times in microseconds, as `hdrh.histogram.HdrHistogram.decode` reads it.

    That is HdrHistogram's V2 compressed form in base64 (github.com/HdrHistogram/HdrHistogram).
    """

    encoded: str
    count: Count
    unit: Literal["us"] = "us"


class Second(Frozen):
    """The requests that were due in one second of the run, which began at `at_s`.

    Attributes:
        warmup: whether it began in the warm-up, whose requests are left out of the run's numbers.
        due, ok, errors: requests, and how many of these were answered right and failed.
        p50_ms, p99_ms: latency of those answered right; None if there are none.
        in_flight: requests that were out, or waited for a connection, at its end.
    """

    at_s: Amount
    warmup: bool
    due: Count
    ok: Count
    errors: Count
    p50_ms: Amount | None
    p99_ms: Amount | None
    in_flight: Count


class Mark(Frozen):
    """Something that happened, such as a swap or a fault, so long after the run's begin (negative: before it)."""

    at_s: float
    label: str = Field(min_length=1, max_length=200)


class GeneratorProcess(Frozen):
    """One process that sent requests.

    Attributes:
        cpu_share: CPU seconds for each second after the warm-up: 1.0 is one core all the time.
        connections: opened during the whole run.
        lag_p99_ms, lag_max_ms: how late it came to its requests, not for how long these waited for a connection.
    """

    cpu_share: Amount
    due: Count
    connections: Count
    lag_p99_ms: Amount | None
    lag_max_ms: Amount | None


class Generator(Frozen):
    """What the generator itself did; what is not of a process is of all together.

    Attributes:
        max_lag_p99_ms, max_cpu_share: beyond these the run is not valid.
        max_in_flight: requests that could be out at a time.
    """

    processes: tuple[GeneratorProcess, ...]
    lag_p99_ms: Amount | None
    max_lag_p99_ms: Amount
    max_cpu_share: Amount
    max_in_flight: Count
    max_connections: Count


class Machine(Frozen):
    """Where the generator ran: host name, model of its processors, cores that it may use, RAM, and kernel."""

    name: str
    cpu: str
    cores: Count
    memory_bytes: Count
    system: str


class LoadResult(Frozen):
    """One run at one rate.

    What is not listed is as in `OfferedLoad` and `RunConfig`.

    Attributes:
        model: requested.
        workload: its complete name.
        ids, candidates: as they were given; None for the workload's own.
        varied: results that don't say are older, and their requests were not.
        requests: distinct ones, all processes together.
        started_at: wall clock of the run's begin, ISO 8601 with UTC offset.
        due: requests whose intended time was within the duration.
        sent, answered, within_slo: of these, written to a connection; of those, answered right; of those, in time.
        errors: how many failed, by kind; `due` = `answered` + the sum of these. Kinds: `too_many_in_flight` (not sent),
            `connect`, `connection`, `timeout`, `bad_answer`, `http_<status>`, `grpc_<status name>`.
        error_examples: messages of the first few.
        goodput, throughput: answers in time, and right answers, for each second of the duration.
        latency, service: of right answers, from the intended and from the actual send.
        latency_of_due: latency over all that were due, where a failed request is later than any answer.
        time_line: second by second, warm-up included.
        marks: by time.
        valid: whether the numbers are the server's and not the generator's.
        invalid_because: one sentence for each reason; empty if valid.
        versions: of shardrank, Python and the libraries the generator sends with, by name.
    """

    kind: Literal["run"] = "run"
    format_version: Literal[1] = 1
    target: str
    api: Encoding
    model: str
    workload: str
    ids: str | None = None
    candidates: str | None = None
    varied: bool = False
    requests: Count
    arrivals: Arrivals
    seed: int
    rate: Amount
    warmup_s: Amount
    duration_s: Amount
    timeout_ms: Amount
    slo_ms: Amount
    started_at: str
    due: Count
    sent: Count
    answered: Count
    within_slo: Count
    errors: dict[str, Count]
    error_examples: tuple[str, ...] = ()
    goodput: Amount
    throughput: Amount
    latency: Percentiles
    latency_of_due: Percentiles
    service: Percentiles
    latency_histogram: EncodedHistogram
    service_histogram: EncodedHistogram
    time_line: tuple[Second, ...]
    marks: tuple[Mark, ...] = ()
    generator: Generator
    valid: bool
    invalid_because: tuple[str, ...] = ()
    machine: Machine
    versions: dict[str, str]


class SweepResult(Frozen):
    """Runs at several rates, in the order in which they were made, and what they say together.

    Attributes:
        highest_rate: the highest at which p99 of `latency_of_due` was within `slo_ms` in a valid run; None for none.
        lowest_failed_rate: the lowest one above it that did not, in a valid run; None if none was found.
        limited_by: `server` when the rate is the server's; `generator` when a run above `highest_rate` was not valid,
            so that the server might do more; `max_rate` when the search was told to go no further.
        tolerance: the two rates are at most this part of the lower one apart, when `limited_by` is `server`.
    """

    kind: Literal["sweep"] = "sweep"
    format_version: Literal[1] = 1
    slo_ms: Amount
    steps: tuple[LoadResult, ...] = Field(min_length=1)
    highest_rate: Amount | None
    lowest_failed_rate: Amount | None
    limited_by: Literal["server", "generator", "max_rate"]
    tolerance: Amount


def check_writable(*files: Path | None) -> None:
    """Raise ResultFileError if a file can't be written. An older one stays until there is a new one."""
    for file in files:
        if file is not None:
            try:
                file.open("a").close()
            except OSError as error:
                raise ResultFileError(f"{file}: {error.strerror or error}") from error


def write_document(document: BaseModel, file: Path) -> None:
    """Write a document as JSON. Raises ResultFileError if the file can't be written."""
    try:
        file.write_text(document.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ResultFileError(f"{file}: {error.strerror or error}") from error


def read_document(
    file: Path,
    adapter: TypeAdapter[Document],
    models: Sequence[type[BaseModel]],
    is_none: str,
    max_problems: int | None = None,
) -> Document:
    """Read one of the documents `models` that was written as JSON.

    Raises:
        ResultFileError: no such file, too large, or not such a document but `is_none`, with the first problems.
    """
    try:
        if (size := file.stat().st_size) > MAX_RESULT_BYTES:
            raise ResultFileError(f"{file}: {size} bytes; at most {MAX_RESULT_BYTES} are read")
        return adapter.validate_json(file.read_bytes())
    except OSError as error:
        raise ResultFileError(f"{file}: {error.strerror or error}") from error
    except ValidationError as error:
        problems = [str(problem) for problem in schema_errors(error, models)]
        shown = problems[:max_problems]
        more = f" and {len(problems) - len(shown)} more" if len(shown) < len(problems) else ""
        raise ResultFileError(f"{file} is {is_none}: {'; '.join(shown)}{more}") from error


def this_machine() -> Machine:
    """Describe the machine that this process runs on."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return Machine(
        name=platform.node() or "unnamed",
        cpu=next(names, platform.processor() or platform.machine()),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        system=f"{platform.system()} {platform.release()}",
    )


def versions() -> dict[str, str]:
    """List the versions of Python and of the libraries that the generator sends with."""
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in LIBRARIES}}

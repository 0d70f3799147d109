"""The processes of a measurement, seen from the one that started them, and what they measured added up."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import IO, Self, TypeVar

import numpy as np

from loader.snapshot.manifest import Frozen
from loadtest.errors import GeneratorError, LoadConfigError
from loadtest.load.config import OfferedLoad, RunConfig
from loadtest.load.messages import Busy, Done, Offer, Prepare, Ready, Refused, Scores, ScoresAsked, Status, Weighed
from loadtest.load.recorder import DIGITS_OF_A_SECOND, LatencyHistogram, merged
from loadtest.load.result import Generator, GeneratorProcess, LoadResult, Second, this_machine, versions
from serving.fleet.process import PARENT_PID_VARIABLE, STOP_SIGNALS, StopRequestedError
from serving.fleet.supervisor import describe_exit
from shard_node.bags import Float32Array

READY_TIMEOUT_S = 600.0
# Beyond what was asked for.
ANSWER_SLACK_S = 120.0
# Between the order and the begin, for the order to reach every process.
LEAD_S = 0.3
LOG_TAIL_BYTES = 2000
MAX_CPU_SHARE = 0.9
"""A process that was busy for more of the time had requests waiting for itself."""
# The generator's lateness is part of the latency that it measures: p99 may be too high by a tenth, never too low.
MAX_LAG_SHARE = 0.1
MIN_MAX_LAG_MS = 2.0
MAX_EXAMPLES = 20

OnStatus = Callable[[int, Status], None]
Answer = TypeVar("Answer", bound=Frozen)


@contextlib.contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Raise StopRequestedError in the block at the first SIGINT or SIGTERM; further ones don't disturb the cleaning."""

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        for one in STOP_SIGNALS:
            signal.signal(one, signal.SIG_IGN)
        raise StopRequestedError(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True, slots=True)
class _Process:
    child: subprocess.Popen[str]
    errors: IO[bytes]

    def log_tail(self) -> str:
        self.errors.seek(max(0, self.errors.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
        return self.errors.read().decode("utf-8", "replace").strip()


class Workers:
    """Processes of one program that answer questions, one JSON document a line. `with` ends them.

    Args:
        module: run as `python -m module`, a program that calls `answer_lines`.
        arguments: of its command line.
        count: how many.
    """

    def __init__(self, module: str, *arguments: str, count: int = 1) -> None:
        self._module = module
        self._lines: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self._processes: list[_Process] = []
        # One thread for matrix products that a generator never makes: none may spin beside the one that sends.
        environment = {**os.environ, PARENT_PID_VARIABLE: str(os.getpid()), "OMP_NUM_THREADS": "1"}
        for number in range(count):
            errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
            child = subprocess.Popen(
                (sys.executable, "-m", module, *arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                # A terminal's Ctrl-C is for the process that started it.
                start_new_session=True,
            )
            self._processes.append(_Process(child, errors))
            assert child.stdout is not None
            threading.Thread(target=self._read, args=(number, child.stdout), daemon=True).start()

    def ask(
        self,
        questions: Sequence[Frozen],
        answer: type[Answer],
        limit_s: float,
        on_status: OnStatus = lambda process, status: None,
    ) -> tuple[Answer, ...]:
        """Ask each of the first processes its question, and wait for all answers.

        Raises:
            LoadConfigError: a process can't do what was asked for.
            GeneratorError: one failed or ended, or does not answer in time.
        """
        for question, process in zip(questions, self._processes, strict=False):
            assert process.child.stdin is not None
            # If it has ended, reading from it will tell why.
            with contextlib.suppress(OSError):
                process.child.stdin.write(question.model_dump_json() + "\n")
                process.child.stdin.flush()
        ends, found = time.monotonic() + limit_s, dict[int, Answer]()
        while len(found) < len(questions):
            try:
                number, line = self._lines.get(timeout=max(ends - time.monotonic(), 0))
            except queue.Empty:
                raise GeneratorError(f"{self._module} did not answer within {limit_s:g} s") from None
            if not line:
                raise self._ended(number)
            kind = json.loads(line)["kind"]
            if kind == "status":
                on_status(number, Status.model_validate_json(line))
            elif kind == "refused":
                refused = Refused.model_validate_json(line)
                raise (LoadConfigError if refused.is_config else GeneratorError)(refused.message)
            elif kind == answer.model_fields["kind"].default:
                found[number] = answer.model_validate_json(line)
            else:
                raise GeneratorError(f"{self._module} answered {kind!r} to {questions[number]!r}")
        return tuple(found[number] for number in range(len(questions)))

    def close(self) -> None:
        """End them. Idempotent."""
        for process in self._processes:
            process.child.kill()
        for process in self._processes:
            process.child.wait()
            assert process.child.stdin is not None
            with contextlib.suppress(OSError):
                process.child.stdin.close()
            process.errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, number: int, output: IO[str]) -> None:
        with output:
            for line in output:
                self._lines.put((number, line))
        self._lines.put((number, ""))

    def _ended(self, number: int) -> GeneratorError:
        process = self._processes[number]
        code = process.child.wait()
        return GeneratorError(f"{self._module}, process {number}, ended: {describe_exit(code)}\n{process.log_tail()}")


class Generators(Workers):
    """Processes that offer loads to servers, keep them busy, and ask for their scores."""

    def __init__(self, count: int = 1) -> None:
        super().__init__("loadtest.load.generator", count=count)

    def prepare(self, load: OfferedLoad) -> tuple[Ready, ...]:
        """Have the requests of a load made. Raises LoadConfigError if the workload can't be opened."""
        asked = [Prepare(load=load, process=number) for number in range(load.processes)]
        return self.ask(asked, Ready, READY_TIMEOUT_S)

    def offer(
        self,
        load: OfferedLoad,
        run: RunConfig,
        on_status: OnStatus = lambda process, status: None,
    ) -> LoadResult:
        """Do a run. Raises as `ask`."""
        ready = self.prepare(load)
        at, began = time.monotonic() + LEAD_S, time.time() + LEAD_S
        asked = [Offer(load=load, run=run, at=at, process=number) for number in range(load.processes)]
        done = self.ask(asked, Done, LEAD_S + run.until_s + load.timeout_ms / 1000 + ANSWER_SLACK_S, on_status)
        return make_result(load, run, ready, began, done)

    def busy(
        self, load: OfferedLoad, in_flight: int, warmup_s: float, seconds: float, process_ids: tuple[int, ...]
    ) -> Weighed:
        """Keep a server busy from the first process. Raises as `ask`; a request that fails is a GeneratorError."""
        self.prepare(load)
        asked = Busy(load=load, in_flight=in_flight, warmup_s=warmup_s, seconds=seconds, process_ids=process_ids)
        return self.ask([asked], Weighed, warmup_s + seconds + ANSWER_SLACK_S)[0]

    def scores(self, load: OfferedLoad, request: int) -> Float32Array:
        """Ask for a server's scores, float32 [candidates], of a request of the first process. Raises as `ask`."""
        self.prepare(load)
        told = self.ask([ScoresAsked(load=load, request=request)], Scores, ANSWER_SLACK_S)[0]
        return np.array(told.scores, np.float32)


def make_result(
    config: OfferedLoad,
    run: RunConfig,
    ready: Sequence[Ready],
    began: float,
    done: Sequence[Done],
) -> LoadResult:
    """Add up what the processes of one run measured, which began at `began`, wall clock in seconds since 1970."""
    records = [one.records for one in done]
    latency = merged(one.latency for one in records)
    service = merged(one.service for one in records)
    errors: Counter[str] = Counter()
    for one in records:
        errors.update(one.errors)
    due = latency.count + errors.total()
    within_slo = sum(one.within_slo for one in records)
    generator = _generator(config, run, done, latency)
    reasons = invalid_because(generator, due)
    return LoadResult(
        target=config.target,
        api=config.spoken,
        model=ready[0].model,
        workload=ready[0].workload,
        ids=config.ids,
        candidates=config.candidates,
        varied=config.varied,
        requests=sum(one.requests for one in ready),
        arrivals=config.arrivals,
        seed=config.seed,
        rate=run.rate,
        warmup_s=run.warmup_s,
        duration_s=run.duration_s,
        timeout_ms=config.timeout_ms,
        slo_ms=config.slo_ms,
        started_at=datetime.datetime.fromtimestamp(began, datetime.UTC).isoformat(),
        due=due,
        sent=sum(one.sent for one in records),
        answered=latency.count,
        within_slo=within_slo,
        errors=dict(sorted(errors.items())),
        error_examples=tuple(itertools.chain.from_iterable(one.examples for one in records))[:MAX_EXAMPLES],
        goodput=within_slo / run.duration_s,
        throughput=latency.count / run.duration_s,
        latency=latency.percentiles(),
        latency_of_due=latency.percentiles(out_of=due),
        service=service.percentiles(),
        latency_histogram=latency.encode(),
        service_histogram=service.encode(),
        time_line=_time_line(run, done),
        generator=generator,
        valid=not reasons,
        invalid_because=reasons,
        machine=this_machine(),
        versions=versions(),
    )


def invalid_because(generator: Generator, due: int) -> tuple[str, ...]:
    """Say why a run's numbers would be the generator's rather than the server's; nothing if they are the server's."""
    reasons = [
        f"process {number} that sends used {process.cpu_share:.0%} of a core; at most {generator.max_cpu_share:.0%} is "
        "allowed. More --processes may help, or a machine of its own."
        for number, process in enumerate(generator.processes)
        if process.cpu_share > generator.max_cpu_share
    ]
    lag = generator.lag_p99_ms
    if lag is not None and lag > generator.max_lag_p99_ms:
        reasons.append(
            f"the generator came to one of 100 requests {lag:.2f} ms late or more; at most "
            f"{generator.max_lag_p99_ms:.2f} ms is allowed: {MAX_LAG_SHARE:.0%} of the latency's p99, or "
            f"{MIN_MAX_LAG_MS:g} ms."
        )
    if due == 0:
        reasons.append("no request was due: the rate is too low for so short a run.")
    return tuple(reasons)


def not_busy_because(busy: Weighed) -> tuple[str, ...]:
    """Say why a closed loop's throughput would be the client's rather than the server's."""
    share = busy.client_cpu_s / busy.seconds
    if share <= MAX_CPU_SHARE:
        return ()
    return (f"throughput: the client used {share:.0%} of a core; at most {MAX_CPU_SHARE:.0%} is allowed",)


def _generator(config: OfferedLoad, run: RunConfig, done: Sequence[Done], latency: LatencyHistogram) -> Generator:
    processes = []
    for one in done:
        lag = merged([one.records.lag]).percentiles()
        processes.append(
            GeneratorProcess(
                cpu_share=one.cpu_s / run.duration_s,
                due=one.records.lag.histogram.count,
                connections=one.connections,
                lag_p99_ms=lag.p99_ms,
                lag_max_ms=lag.max_ms,
            )
        )
    p99_ms = latency.percentiles().p99_ms
    return Generator(
        processes=tuple(processes),
        lag_p99_ms=merged(one.records.lag for one in done).percentiles().p99_ms,
        max_lag_p99_ms=max(MIN_MAX_LAG_MS, MAX_LAG_SHARE * (p99_ms or 0.0)),
        max_cpu_share=MAX_CPU_SHARE,
        max_in_flight=config.max_in_flight,
        max_connections=config.max_connections if config.at.scheme == "http" else config.grpc_channels,
    )


def _time_line(run: RunConfig, done: Sequence[Done]) -> tuple[Second, ...]:
    records = [one.records for one in done]
    due = np.sum([one.due_by_second for one in records], axis=0)
    ok = np.sum([one.ok_by_second for one in records], axis=0)
    turns = np.sum([one.turns_by_second for one in records], axis=0)
    ends = np.sum([one.ends_by_second for one in records], axis=0)
    in_flight = np.cumsum(turns - ends)
    line = []
    for second in range(len(due)):
        parts = [one.latency_by_second[second] for one in records if second in one.latency_by_second]
        latency = merged(parts, digits=DIGITS_OF_A_SECOND).percentiles()
        line.append(
            Second(
                at_s=second,
                warmup=second < run.warmup_s,
                due=int(due[second]),
                ok=int(ok[second]),
                errors=int(due[second] - ok[second]),
                p50_ms=latency.p50_ms,
                p99_ms=latency.p99_ms,
                in_flight=int(in_flight[second]),
            )
        )
    return tuple(line)

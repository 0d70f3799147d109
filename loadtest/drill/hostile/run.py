"""`drill hostile`: one attack after the other on a server that answers valid clients meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import Field

from loader.progress import Progress, no_progress
from loader.snapshot.manifest import Frozen
from loadtest.drill.errors import LoadProcessError
from loadtest.drill.hostile.attack_process import child_environment
from loadtest.drill.hostile.attacker import AttackConfig, Tally
from loadtest.drill.hostile.catalog import ATTACKS, Attack, attack_named
from loadtest.drill.hostile.fuzz_run import run_fuzz
from loadtest.drill.hostile.probe import GRPC_PROBE, HTTP_PROBE
from loadtest.drill.hostile.report import (
    MAX_MEMORY_GROWTH_BYTES,
    AttackResult,
    FuzzResult,
    HostileReport,
    Seen,
    judge,
)
from loadtest.drill.hostile.target import Target, running_target
from loadtest.drill.hostile.valid import RECORD, WatchConfig
from loadtest.load.result import this_machine
from loadtest.workloads.catalog import BenchShape

SAMPLE_S = 0.02
READY_TIMEOUT_S = 120.0
PROBED_WITHIN_S = 60.0
# A stall that a message makes may begin after its answer: the probe that meets it was sent later.
AFTER_S = 0.2
ATTACK_SLACK_S = 180.0
WARM_UP_S = 30.0
WARM_GROWTH_BYTES = 2 << 20
REFUSED_S_EACH = 5.0
QUICK = {"seconds": 3.0, "mutations": 20_000, "refused": 50, "repeats": 1, "settle_s": 5.0, "steady_s": 5.0}


class HostileDrillConfig(Frozen):
    """What to do.

    Attributes:
        shape: of the model that is served.
        http, grpc, process_id: a server that runs already, `HOST:PORT` each and its process; None to start one.
        seconds: of each flood.
        only: names of attacks; none for all.
        refused: large messages of each kind that must leave nothing behind.
        repeats: of each single message.
        mutations: requests to mutate; 0 for none.
        fuzz_only: no attacks.
        rate: valid requests a second.
        steady_s: time without attacks.
        settle_s: time for the memory to come back.
        max_growth_bytes: a server that grows by so much is attacked no longer.
        seed: of all that is drawn.
    """

    shape: BenchShape = BenchShape(rows=100_000)
    http: str | None = None
    grpc: str | None = None
    process_id: int | None = Field(default=None, ge=1)
    seconds: float = Field(default=30.0, gt=0, le=3600)
    only: tuple[str, ...] = ()
    refused: int = Field(default=1000, ge=1, le=1_000_000)
    repeats: int = Field(default=3, ge=1, le=100)
    mutations: int = Field(default=1_000_000, ge=0)
    fuzz_only: bool = False
    rate: float = Field(default=40.0, gt=0, le=10_000)
    steady_s: float = Field(default=15.0, gt=0, le=600)
    settle_s: float = Field(default=10.0, ge=0, le=600)
    max_growth_bytes: int = Field(default=3 << 30, ge=MAX_MEMORY_GROWTH_BYTES)
    seed: int = Field(default=0, ge=0)


class _Watch:
    """What valid clients and probes have logged so far."""

    def __init__(self, logs: Sequence[Path]) -> None:
        self._logs = dict.fromkeys(logs, 0)
        self._records: npt.NDArray[np.void] = np.empty(0, RECORD)

    def read(self) -> npt.NDArray[np.void]:
        """All records."""
        new = [self._records]
        for path, read in self._logs.items():
            with path.open("rb") as file:
                file.seek(read)
                data = file.read()
            whole = len(data) // RECORD.itemsize * RECORD.itemsize
            self._logs[path] = read + whole
            new.append(np.frombuffer(data[:whole], RECORD))
        self._records = np.concatenate(new)
        return self._records

    def forget(self) -> None:
        """Drops what was read: the attacks before are judged."""
        self._records = np.empty(0, RECORD)

    def valid(self, begin: float, end: float) -> tuple[int, int, float | None]:
        """(requests that came due within, how many failed, their p99 in ms)."""
        records = self.read()
        chosen = records[(records["source"] < HTTP_PROBE) & (records["due"] >= begin) & (records["due"] <= end)]
        if not chosen.size:
            return 0, 0, None
        p99 = float(np.percentile((chosen["done"] - chosen["due"]) * 1e3, 99))
        return int(chosen.size), int((~chosen["ok"]).sum()), p99

    def stall_ms(self, begin: float, end: float) -> float:
        """The longest time from a probe to its answer, of those that were out within."""
        records = self.read()
        probes = records[(records["source"] >= HTTP_PROBE) & (records["due"] < end) & (records["done"] > begin)]
        return float((probes["done"] - probes["due"]).max() * 1e3) if probes.size else 0.0

    def failures(self, begin: float, end: float) -> tuple[str, ...]:
        """Why the first valid requests within failed."""
        found: list[str] = []
        for path in self._logs:
            for line in path.with_suffix(".txt").read_text(encoding="utf-8").splitlines():
                when, _, what = line.partition(" ")
                if begin <= float(when) <= end + 2 and len(found) < 5:
                    found.append(what)
        return tuple(found)

    async def caught_up(self, moment: float) -> None:
        """Waits until both probes have been answered that were sent after a moment, or no longer."""
        deadline = time.monotonic() + PROBED_WITHIN_S
        while time.monotonic() < deadline:
            records = self.read()
            later = records[records["due"] > moment]["source"]
            if (later == HTTP_PROBE).any() and (later == GRPC_PROBE).any():
                return
            await asyncio.sleep(0.1)


class _Drill:
    """A drill that runs."""

    def __init__(self, config: HostileDrillConfig, folder: Path, target: Target, watch: _Watch) -> None:
        self._config, self._folder, self._target, self._watch = config, folder, target, watch
        self._core = attack_core()

    def attack_config(self, attack: Attack, source: int) -> AttackConfig:
        target, config = self._target, self._config
        return AttackConfig(
            name=attack.name,
            host=target.host,
            http_port=target.http_port,
            grpc_port=target.grpc_port,
            model=target.model,
            features=target.features,
            dense=config.shape.dense,
            seconds=max(config.seconds, attack.least_s),
            repeats=config.repeats,
            refused=config.refused,
            core=self._core,
            source=source,
            seed=config.seed,
        )

    async def warmed_up(self) -> None:
        """Waits until valid requests are answered and the memory of the process does not grow by them any more."""
        deadline = time.monotonic() + min(WARM_UP_S, 3 * self._config.steady_s)
        memory = self._target.memory_bytes()
        while time.monotonic() < deadline:
            begin = time.monotonic()
            await asyncio.sleep(2)
            before, memory = memory, self._target.memory_bytes()
            requests, failures, _ = self._watch.valid(begin, time.monotonic() - 0.5)
            if requests and not failures and memory - before < WARM_GROWTH_BYTES:
                return

    async def steady(self) -> tuple[int, float, float]:
        """(requests, p99 in ms, longest stall in ms) with the attackers' core kept busy and nobody attacking."""
        code = (
            f"import os\nos.sched_setaffinity(0, {{{self._core}}})\nwhile True: pass" if self._core is not None else ""
        )
        spinner = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", code or "while True: pass"), env=child_environment()
        )
        try:
            begin = time.monotonic()
            await asyncio.sleep(self._config.steady_s)
        finally:
            spinner.kill()
            await spinner.wait()
        end = time.monotonic()
        await asyncio.sleep(1.5)
        requests, failures, p99 = self._watch.valid(begin, end)
        if not requests or failures or p99 is None:
            told = "; ".join(self._watch.failures(begin, end))
            raise LoadProcessError(f"steady: {failures} of {requests} valid requests failed: {told}")
        return requests, p99, self._watch.stall_ms(begin, end)

    async def attack(self, attack: Attack, source: int, steady_p99_ms: float) -> AttackResult:
        """Runs one attack and judges it."""
        target, watch = self._target, self._watch
        watch.forget()
        log_before = target.log_marks()
        before = peak = target.memory_bytes()
        begin = time.monotonic()
        attack_config = self.attack_config(attack, source)
        process = await self._start(attack_config)
        allowed_s = attack_config.seconds + ATTACK_SLACK_S
        if attack.kind == "refused":
            allowed_s += REFUSED_S_EACH * self._config.refused
        told = asyncio.create_task(process.communicate())
        stopped = ""
        while not told.done():
            await asyncio.sleep(SAMPLE_S)
            peak = max(peak, target.memory_bytes())
            if peak - before > self._config.max_growth_bytes:
                stopped = f"stopped: the server grew by {(peak - before) / 1e9:.1f} GB"
            elif time.monotonic() - begin > allowed_s:
                stopped = f"stopped after {allowed_s:.0f} s"
            elif not target.alive():
                stopped = "the server has ended"
            if stopped:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                break
        output, _ = await told
        if process.returncode and not stopped:
            stopped = f"the attacker failed: {self._attacker_log(attack)}"
        tally = Tally(messages=1) if stopped else Tally.model_validate_json(output)
        if not tally.spans:
            tally.spans.append((begin, time.monotonic()))
        begin, end = tally.spans[0][0], tally.spans[-1][1]
        if target.alive():
            await watch.caught_up(end + AFTER_S)
        peak, after = await self._settled(before, peak, end)
        requests, failures, p99 = watch.valid(begin, end + AFTER_S)
        marks = target.log_marks()
        spans = tally.spans if attack.kind == "message" else [(begin, end)]
        seen = Seen(
            bytes_sent=tally.bytes_sent,
            messages=tally.messages,
            connections=tally.connections,
            answers=tally.answers,
            ends=tally.ends,
            stalls_ms=tuple(watch.stall_ms(first, last + AFTER_S) for first, last in spans),
            valid_requests=requests,
            valid_failures=failures,
            valid_p99_ms=p99,
            seconds=end - begin,
            memory_before_bytes=before,
            memory_peak_bytes=peak,
            memory_after_bytes=after,
            log_lines=marks[0] - log_before[0],
            tracebacks=marks[1] - log_before[1],
            failures=watch.failures(begin, end + AFTER_S) if failures else (),
            stopped=stopped,
        )
        return judge(attack, seen, steady_p99_ms)

    async def _start(self, config: AttackConfig) -> asyncio.subprocess.Process:
        path = self._folder / f"{config.name}.attack.json"
        path.write_text(config.model_dump_json(), encoding="utf-8")
        with (self._folder / f"{config.name}.attack.log").open("wb") as log:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "loadtest.drill.hostile.attack_process", str(path)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=child_environment(),
                start_new_session=True,
            )

    def _attacker_log(self, attack: Attack) -> str:
        return (self._folder / f"{attack.name}.attack.log").read_text(encoding="utf-8", errors="replace")[-500:]

    async def _settled(self, before: int, peak: int, end: float) -> tuple[int, int]:
        """(highest, last) memory, until it is back or `settle_s` after the end."""
        while True:
            now = self._target.memory_bytes()
            peak = max(peak, now)
            if time.monotonic() - end > self._config.settle_s:
                return peak, now
            if now - before <= MAX_MEMORY_GROWTH_BYTES and time.monotonic() - end > min(1.0, self._config.settle_s):
                return peak, now
            await asyncio.sleep(0.1)


def attack_core() -> int | None:
    """The core that attackers have; None where there is but one."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[-1] if len(cores) > 1 else None


async def run_hostile_drill(
    config: HostileDrillConfig, folder: Path, progress: Progress = no_progress
) -> HostileReport:
    """Runs the drill.

    Args:
        config: what to do.
        folder: where the snapshot and logs go.
        progress: told the attacks done.

    Raises:
        DrillError: a process of the drill failed, or valid requests fail without any attack.
        ShardrankError: the server does not come up.
    """
    attacks = [] if config.fuzz_only else [attack_named(name) for name in config.only or ATTACKS]
    results: list[AttackResult] = []
    fuzz: tuple[FuzzResult, ...] = ()
    async with running_target(config, folder) as target:
        async with _watching(config, target, folder) as watch:
            drill = _Drill(config, folder, target, watch)
            progress("attacks", 0, len(attacks))
            await drill.warmed_up()
            requests, p99_ms, stall_ms = await drill.steady()
            for number, attack in enumerate(attacks):
                result = await drill.attack(attack, number, p99_ms)
                results.append(result)
                with (folder / "results.jsonl").open("a", encoding="utf-8") as file:
                    file.write(result.model_dump_json() + "\n")
                progress("attacks", number + 1, len(attacks))
                grown = result.memory_after_bytes - result.memory_before_bytes > MAX_MEMORY_GROWTH_BYTES
                if grown or not target.alive():
                    # The next attack starts from where this one started.
                    await target.restart()
                    await drill.warmed_up()
        # Scores are compared bit by bit, so nobody else's requests may be in the same batch.
        if config.mutations and not config.only:
            fuzz = await run_fuzz(config.mutations, config.seed, config.shape, folder, target, attack_core(), progress)
    machine = this_machine()
    return HostileReport(
        machine=f"{machine.cpu}, {machine.cores} cores",
        seed=config.seed,
        seconds=config.seconds,
        steady_p99_ms=p99_ms,
        steady_stall_ms=stall_ms,
        steady_requests=requests,
        attacks=tuple(results),
        fuzz=fuzz,
    )


@contextlib.asynccontextmanager
async def _watching(config: HostileDrillConfig, target: Target, folder: Path) -> AsyncIterator[_Watch]:
    """Valid clients and probes, while the block runs."""
    async with contextlib.AsyncExitStack() as stack:
        logs = []
        for name in ("valid", "probe"):
            log = folder / f"{name}.answers"
            log.touch()
            log.with_suffix(".txt").touch()
            watch = WatchConfig(
                host=target.host,
                http_port=target.http_port,
                grpc_port=target.grpc_port,
                shape=config.shape,
                rate=config.rate,
                log=log,
                seed=config.seed,
            )
            await stack.enter_async_context(_child(name, watch, folder))
            logs.append(log)
        yield _Watch(logs)


@contextlib.asynccontextmanager
async def _child(name: str, config: WatchConfig, folder: Path) -> AsyncIterator[None]:
    path = folder / f"{name}.json"
    path.write_text(config.model_dump_json(), encoding="utf-8")
    with (folder / f"{name}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", f"loadtest.drill.hostile.{name}", str(path)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=child_environment(),
            start_new_session=True,
        )
    try:
        assert process.stdout is not None
        if await asyncio.wait_for(process.stdout.readline(), READY_TIMEOUT_S) != b"ready\n":
            told = (folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")
            raise LoadProcessError(f"{name} did not begin: {told[-2000:]}")
        yield
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

"""`drill hostile`: one attack after the other on a server that valid clients ask meanwhile, then mutated requests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from pathlib import Path

import grpc
from pydantic import Field

from loader.progress import Progress, no_progress
from loadtest.drill.hostile.attacker import AttackConfig, Tally
from loadtest.drill.hostile.catalog import ATTACKS, Attack, attack_named
from loadtest.drill.hostile.fuzz import SHARES, FuzzConfig, FuzzTally
from loadtest.drill.hostile.report import (
    MAX_MEMORY_GROWTH_BYTES,
    AttackResult,
    FuzzResult,
    HostileReport,
    Seen,
    hostile_report,
    judge,
)
from loadtest.drill.hostile.target import Attacked, AttackedConfig, AttackedServer, running_node, running_target
from loadtest.drill.hostile.watch import Watch, WatchConfig, watching
from loadtest.drill.processes import child_process, finished, module_command
from loadtest.errors import DrillError, LoadProcessError
from loadtest.load.result import this_machine

SAMPLE_S = 0.02
# A server that grows by so much is attacked no longer.
MAX_GROWTH_BYTES = 3 << 30
PROBED_WITHIN_S = 60.0
# A stall that a message makes may begin after its answer: the probe that meets it was sent later.
AFTER_S = 0.2
ATTACK_SLACK_S = 180.0
WARM_UP_S = 30.0
WARM_GROWTH_BYTES = 2 << 20
REFUSED_S_EACH = 5.0
FUZZ_SETTLE_S = 10.0
FIRST_FUZZ_SOURCE = 1000
QUICK = {"seconds": 3.0, "mutations": 20_000, "refused": 50, "repeats": 1, "settle_s": 5.0, "steady_s": 5.0}


class HostileDrillConfig(AttackedConfig):
    """What to do, as the options of `drill hostile` say it; `only` are names of attacks, none for all."""

    seconds: float = Field(default=30.0, gt=0, le=3600)
    only: tuple[str, ...] = ()
    refused: int = Field(default=1000, ge=1, le=1_000_000)
    repeats: int = Field(default=3, ge=1, le=100)
    mutations: int = Field(default=1_000_000, ge=0)
    fuzz_only: bool = False
    rate: float = Field(default=40.0, gt=0, le=10_000)
    steady_s: float = Field(default=15.0, gt=0, le=600)
    settle_s: float = Field(default=10.0, ge=0, le=600)
    seed: int = Field(default=0, ge=0)


class HostileDrill:
    """A drill that runs: its settings, its folder, what is attacked, and what is asked meanwhile."""

    def __init__(self, config: HostileDrillConfig, folder: Path, target: AttackedServer) -> None:
        self._config, self._folder, self._target = config, folder, target
        # One core for attackers, where there is more than one.
        cores = sorted(os.sched_getaffinity(0))
        self._attacker = AttackConfig(
            name="",
            host=target.host,
            http_port=target.http_port,
            grpc_port=target.grpc_port,
            model=target.model,
            features=target.features,
            dense=config.shape.dense,
            seconds=config.seconds,
            repeats=config.repeats,
            refused=config.refused,
            core=cores[-1] if len(cores) > 1 else None,
            seed=config.seed,
        )

    async def warmed_up(self, watch: Watch) -> None:
        """Wait until valid requests are answered and the memory of the process does not grow by them any more."""
        deadline = time.monotonic() + min(WARM_UP_S, 3 * self._config.steady_s)
        memory = self._target.memory_bytes()
        while time.monotonic() < deadline:
            begin = time.monotonic()
            await asyncio.sleep(2)
            before, memory = memory, self._target.memory_bytes()
            valid = watch.valid(begin, time.monotonic() - 0.5)
            if valid.requests and not valid.failures and memory - before < WARM_GROWTH_BYTES:
                return

    async def steady(self, watch: Watch) -> tuple[int, float, float]:
        """Return (requests, p99 in ms, longest stall in ms) with the attackers' core kept busy and nobody attacking."""
        core = self._attacker.core
        pinned = "" if core is None else f"import os\nos.sched_setaffinity(0, {{{core}}})\n"
        async with child_process((sys.executable, "-c", f"{pinned}while True: pass"), self._folder / "spinner.log"):
            begin = time.monotonic()
            await asyncio.sleep(self._config.steady_s)
        end = time.monotonic()
        await asyncio.sleep(1.5)
        requests, failures, p99 = watch.valid(begin, end)
        if failures or p99 is None:
            told = "; ".join(watch.failures(begin, end))
            raise LoadProcessError(f"steady: {failures} of {requests} valid requests failed: {told}")
        return requests, p99, watch.stall_ms(begin, end)

    async def attack(self, attack: Attack, source: int, watch: Watch, steady_p99_ms: float) -> AttackResult:
        """Run one attack and judge it."""
        target = self._target
        watch.forget()
        lines, tracebacks = target.log_marks()
        before = target.memory_bytes()
        begin = time.monotonic()
        tally, stopped, peak = await self._attacked(attack, source, before)
        if not tally.spans:
            tally.spans.append((begin, time.monotonic()))
        begin, end = tally.spans[0][0], tally.spans[-1][1]
        if target.alive():
            await watch.caught_up(end + AFTER_S, PROBED_WITHIN_S)
        peak, after = await self._settled(before, peak, end)
        valid = watch.valid(begin, end + AFTER_S)
        lines_after, tracebacks_after = target.log_marks()
        spans = tally.spans if attack.kind == "message" else [(begin, end)]
        seen = Seen(
            **tally.model_dump(exclude={"spans"}),
            stalls_ms=tuple(watch.stall_ms(first, last + AFTER_S) for first, last in spans),
            valid_requests=valid.requests,
            valid_failures=valid.failures,
            valid_p99_ms=valid.p99_ms,
            seconds=end - begin,
            memory_before_bytes=before,
            memory_peak_bytes=peak,
            memory_after_bytes=after,
            log_lines=lines_after - lines,
            tracebacks=tracebacks_after - tracebacks,
            failures=watch.failures(begin, end + AFTER_S) if valid.failures else (),
            stopped=stopped,
        )
        return judge(attack, seen, steady_p99_ms)

    async def _attacked(self, attack: Attack, source: int, before: int) -> tuple[Tally, str, int]:
        """Run an attacker; what it tells, why it was stopped before its end, and the highest memory meanwhile."""
        target, peak, begin = self._target, before, time.monotonic()
        seconds = max(self._config.seconds, attack.least_s)
        config = self._attacker.model_copy(update={"name": attack.name, "seconds": seconds, "source": source})
        allowed_s = seconds + ATTACK_SLACK_S + (attack.kind == "refused") * REFUSED_S_EACH * config.refused
        path = self._folder / f"{attack.name}.attack.json"
        log = path.with_suffix(".log")
        async with child_process(module_command("loadtest.drill.hostile.catalog", config, path), log) as process:
            told = asyncio.create_task(finished(process, log))
            stopped = ""
            try:
                while not told.done() and not stopped:
                    await asyncio.sleep(SAMPLE_S)
                    peak = max(peak, target.memory_bytes())
                    if peak - before > MAX_GROWTH_BYTES:
                        stopped = f"stopped: the server grew by {(peak - before) / 1e9:.1f} GB"
                    elif time.monotonic() - begin > allowed_s:
                        stopped = f"stopped after {allowed_s:.0f} s"
                    elif not target.alive():
                        stopped = "the server has ended"
                if not stopped:
                    return Tally.model_validate_json(await told), "", peak
            except LoadProcessError as error:
                stopped = f"the attacker failed: {error}"
            finally:
                told.cancel()
        return Tally(messages=1), stopped, peak

    async def _settled(self, before: int, peak: int, end: float) -> tuple[int, int]:
        """Return (highest, last) memory, once it is back or `settle_s` after the end."""
        while True:
            now, since_s = self._target.memory_bytes(), time.monotonic() - end
            peak = max(peak, now)
            is_back = now - before <= MAX_MEMORY_GROWTH_BYTES
            if since_s > self._config.settle_s or (is_back and since_s > min(1.0, self._config.settle_s)):
                return peak, now
            await asyncio.sleep(0.1)

    async def fuzz(self, progress: Progress) -> tuple[FuzzResult, ...]:
        """Send mutated requests to the server, and mutated frames to a shard node if the server is the drill's own.

        Raises:
            DrillError: a process of the drill failed.
        """
        config, results = self._config, []
        async with contextlib.AsyncExitStack() as stack:
            node: Attacked | None = None
            if self._target.snapshot is not None:
                made = running_node(config.shape, self._target.snapshot, self._folder)
                node = await stack.enter_async_context(made)
            for number, (surface, share) in enumerate(SHARES.items()):
                progress("mutated requests", number, len(SHARES))
                target = node if surface.startswith("wire") else self._target
                if target is None:
                    continue
                ports = {"http_port": target.http_port, "grpc_port": target.grpc_port}
                own = {"name": surface, "source": FIRST_FUZZ_SOURCE + number, **ports}
                what = FuzzConfig(
                    attack=self._attacker.model_copy(update=own),
                    shape=config.shape,
                    surface=surface,
                    mutations=max(1, round(config.mutations * share)),
                    folder=self._folder,
                )
                results.append(await _fuzzed(what, target))
            progress("mutated requests", len(SHARES), len(SHARES))
        return tuple(results)


async def _fuzzed(config: FuzzConfig, target: Attacked) -> FuzzResult:
    """Send mutated requests of one kind, and tell whether the server is the same afterwards."""
    answers = await asyncio.to_thread(target.answers)
    if config.surface not in ("http1-bytes", "http2-bytes", "wire-bytes"):
        # What a process needs for its first thousand wrong requests it keeps.
        await _send(config.model_copy(update={"mutations": min(1000, config.mutations)}))
    before, (_, tracebacks) = target.memory_bytes(), target.log_marks()
    begin = time.monotonic()
    tally = await _send(config)
    seconds = time.monotonic() - begin
    stopped, same = "", False
    if target.alive():
        try:
            same = await asyncio.to_thread(target.answers) == answers
        except (OSError, grpc.RpcError, DrillError) as error:
            stopped = f"valid requests fail afterwards: {error!r}"
    else:
        stopped = "the process has ended"
    if target.memory_bytes() - before > MAX_MEMORY_GROWTH_BYTES:
        await asyncio.sleep(FUZZ_SETTLE_S)
    return FuzzResult(
        **tally.model_dump(),
        name=config.surface,
        seconds=seconds,
        tracebacks=target.log_marks()[1] - tracebacks,
        same_answers=same,
        memory_before_bytes=before,
        memory_after_bytes=target.memory_bytes(),
        stopped=stopped,
    )


async def _send(config: FuzzConfig) -> FuzzTally:
    path = config.folder / f"fuzz-{config.surface}.json"
    log = path.with_suffix(".log")
    async with child_process(module_command("loadtest.drill.hostile.fuzz", config, path), log) as process:
        return FuzzTally.model_validate_json(await finished(process, log))


async def run_hostile_drill(
    config: HostileDrillConfig, folder: Path, progress: Progress = no_progress
) -> HostileReport:
    """Run the drill; the snapshot and logs go into the folder.

    Raises:
        DrillError: a process of the drill failed, or valid requests fail without any attack.
        ShardrankError: the server does not come up.
    """
    attacks = [] if config.fuzz_only else [attack_named(name) for name in config.only or ATTACKS]
    results: list[AttackResult] = []
    fuzz: tuple[FuzzResult, ...] = ()
    async with running_target(config, folder) as target:
        drill = HostileDrill(config, folder, target)
        valid = WatchConfig(
            role="valid",
            host=target.host,
            http_port=target.http_port,
            grpc_port=target.grpc_port,
            shape=config.shape,
            rate=config.rate,
            log=folder / "valid.answers",
            seed=config.seed,
        )
        async with watching(valid) as watch:
            progress("attacks", 0, len(attacks))
            await drill.warmed_up(watch)
            requests, p99_ms, stall_ms = await drill.steady(watch)
            for number, attack in enumerate(attacks):
                result = await drill.attack(attack, number, watch, p99_ms)
                results.append(result)
                with (folder / "results.jsonl").open("a", encoding="utf-8") as file:
                    file.write(result.model_dump_json() + "\n")
                progress("attacks", number + 1, len(attacks))
                grown = result.memory_after_bytes - result.memory_before_bytes > MAX_MEMORY_GROWTH_BYTES
                if grown or not target.alive():
                    # The next attack starts from where this one started.
                    await target.restart()
                    await drill.warmed_up(watch)
        # Scores are compared bit by bit, so nobody else's requests may be in the same batch.
        if config.mutations and not config.only:
            fuzz = await drill.fuzz(progress)
    machine = this_machine()
    return hostile_report(
        results,
        fuzz,
        machine=f"{machine.cpu}, {machine.cores} cores",
        seed=config.seed,
        seconds=config.seconds,
        steady_p99_ms=p99_ms,
        steady_stall_ms=stall_ms,
        steady_requests=requests,
    )

"""`drill warm` and `drill shadow`: p99 in two kinds of time, in turn, round by round, under a load that checks answers.

The oracle's fleet is asked at one rate throughout. `warm`: the first requests after a swap against steady time before
it; serving processes record requests, and warm each version with them. `shadow`: time in which a version that is rolled
out scores a share of the requests too against time in which there is none.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field

from loader.progress import Progress, no_progress
from loader.registry.fleet import WantedModel
from loader.rollout.plan import SHADOW
from loader.rollout.requests import abort_rollout, start_rollout
from loadtest.drill.fleet import FleetReport, OracleFleet, OracleFleetConfig, oracle_fleet, polled
from loadtest.drill.load import Answers, TimeSpan, count_kinds, counted, latency_ms, percentile
from loadtest.drill.swap import WARMUP_S
from loadtest.errors import DrillError, RolloutTimeoutError
from loadtest.report.comparison import measured

MAX_RATIO_P99 = 1.1
STEP_TIMEOUT_S = 60.0
SETTLE_S = 2.0
"""After something else was done on the cores that the drill shares with the fleet."""
LONG_S = 24 * 3600.0

Latencies = npt.NDArray[np.float64]


class PairedConfig(OracleFleetConfig):
    """A drill of pairs. `max_ratio_p99`: the second kind of time to the first; more is a problem."""

    max_ratio_p99: float = Field(default=MAX_RATIO_P99, ge=1)


class WarmDrillConfig(PairedConfig):
    """Swaps, and the first requests after each.

    Attributes:
        first_requests: after each swap, and about as many before it.
        record_share: of the requests that are recorded.
        warm_requests: recorded ones that each version ranks before it is ready; 0 for none, to see what it is worth.
        workers: one, since a folder of recorded requests belongs to one process.
    """

    NAME: ClassVar[str] = "warm"
    workers: int = Field(default=1, ge=1, le=1)
    swaps: int = Field(default=20, ge=1, le=10_000)
    first_requests: int = Field(default=1000, ge=10, le=1_000_000)
    record_share: float = Field(default=0.2, gt=0, le=1)
    warm_requests: int = Field(default=512, ge=0, le=100_000)


class ShadowDrillConfig(PairedConfig):
    """Time with a shadow and time without.

    Attributes:
        rounds: of both.
        window_s: of each kind of time in a round.
        share: of the live requests that the shadow scores too.
    """

    NAME: ClassVar[str] = "shadow"
    rounds: int = Field(default=20, ge=1, le=10_000)
    window_s: float = Field(default=10.0, gt=0, le=3600)
    share: float = Field(default=0.05, gt=0, lt=1)


class PairedReport(FleetReport):
    """What `drill warm --json` and `drill shadow --json` write.

    Attributes:
        kinds: the two kinds of time, the base and the one that is compared with it.
        p50_ms_base, p99_ms_base: all rounds' answers pooled; from when a request was due; likewise of the other kind.
        ratio_p99: of these, the second to the first.
        ratio_p99_by_round: the geometric mean of each round's ratio, with its 95% interval, by bootstrap over rounds.
        p99_ms_by_round: both.
        requests: that the last version was warmed with, by version, or that a shadow was to score, by outcome.
    """

    kinds: tuple[str, str]
    rounds: int
    answers_base: int
    answers_compared: int
    p50_ms_base: float
    p50_ms_compared: float
    p99_ms_base: float
    p99_ms_compared: float
    ratio_p99: float
    ratio_p99_by_round: float
    ratio_p99_low: float | None
    ratio_p99_high: float | None
    p99_ms_by_round: tuple[tuple[float, float], ...]
    load_lag_p99_ms: float | None
    requests: dict[str, int]


def pair_rounds(rounds: Sequence[tuple[Latencies, Latencies]]) -> dict[str, Any]:
    """Compute the report's figures from both kinds' latencies in ms. Raises DrillError if a round has none of one."""
    if not rounds or not all(one.size and other.size for one, other in rounds):
        raise DrillError("a round without answers in one of its two kinds of time")
    base, compared = (np.concatenate(kind) for kind in zip(*rounds, strict=True))
    by_round = tuple((float(np.percentile(one, 99)), float(np.percentile(other, 99))) for one, other in rounds)
    p99_base, p99_compared = float(np.percentile(base, 99)), float(np.percentile(compared, 99))
    ratio = measured("p99", "ms", "lower", list(zip(*by_round, strict=True))).ratios[1]
    return {
        "rounds": len(rounds),
        "answers_base": base.size,
        "answers_compared": compared.size,
        "p50_ms_base": float(np.percentile(base, 50)),
        "p50_ms_compared": float(np.percentile(compared, 50)),
        "p99_ms_base": p99_base,
        "p99_ms_compared": p99_compared,
        "ratio_p99": p99_compared / p99_base,
        "ratio_p99_by_round": ratio.value,
        "ratio_p99_low": ratio.low,
        "ratio_p99_high": ratio.high,
        "p99_ms_by_round": by_round,
    }


def make_paired_report(
    answers: Answers,
    rounds: Sequence[tuple[Latencies, Latencies]],
    facts: Mapping[str, Any],
    max_ratio_p99: float = MAX_RATIO_P99,
    done: int | None = None,
) -> PairedReport:
    """Draw up the report; `facts` are the remaining fields.

    `done` requests were scored by a shadow, or warmed with: of none nothing was measured. None: that is not asked.
    """
    lag = percentile(1e3 * (answers["sent"] - answers["intended"]), 99)
    report = PairedReport.model_validate(
        {**count_kinds(answers), **pair_rounds(rounds), "load_lag_p99_ms": lag, **facts}
    )
    problems = counted({"failed": report.failed, "are mixed": report.mixed, "are wrong": report.wrong})
    if done == 0:
        problems.append(f"{report.kinds[1]}: no request was scored by a shadow, or warmed with")
    if report.ratio_p99 > max_ratio_p99:
        told = f"p99 of {report.kinds[1]} is {report.ratio_p99:.3f} times that of {report.kinds[0]}"
        problems.append(f"{told}, allowed is {max_ratio_p99:g}")
    return report.model_copy(update={"problems": tuple(problems)})


class Swapped(NamedTuple):
    """A swap to a version, and steady time before it."""

    steady: TimeSpan
    version: int


def first_of(answers: Answers, version: int, count: int) -> Answers:
    """Return the first answers of a version, by when they were due."""
    own = answers[answers["version"] == version]
    found: Answers = own[np.argsort(own["intended"], kind="stable")[:count]]
    return found


def due_within(answers: Answers, span: TimeSpan) -> Answers:
    """Return those that were due in a span."""
    found: Answers = answers[(answers["intended"] >= span.begin) & (answers["intended"] < span.end)]
    return found


async def run_warm_drill(config: WarmDrillConfig, folder: Path, progress: Progress = no_progress) -> PairedReport:
    """Swap again and again. Raises DrillError if a rollout does not end as `done`, or the load fails."""
    record = ("--record", str(folder / "recorded"), "--record-share", str(config.record_share))
    more = (*record, "--warm-requests", str(config.warm_requests))
    swaps, window_s = list[Swapped](), config.first_requests / config.rate
    async with oracle_fleet(config, folder, progress, more) as fleet:
        live = await fleet.live_version()
        # As much as a version is warmed with is recorded by then, or what the drill has time for.
        await asyncio.sleep(WARMUP_S)
        for number in range(config.swaps):
            progress("swaps", number, config.swaps)
            version = await fleet.publish_next(differs_from=live)
            await asyncio.sleep(SETTLE_S)
            steady = await _window(window_s)
            rollout = await fleet.roll_out(version)
            if rollout.state != "done":
                raise DrillError(f"the rollout of version {version} ended as {rollout.state}: {rollout.reason}")
            swaps.append(Swapped(steady, version))
            live = version
            await asyncio.sleep(window_s)
            fleet.load.check()
        progress("swaps", config.swaps, config.swaps)
        # Metrics of versions that were freed are gone: those of the last one.
        warmed = await fleet.counts("shardrank_warmed_requests_total", "version")
        facts = {**fleet.facts(), "kinds": ("steady time", "first requests"), "requests": warmed}
        answers = await fleet.load.stop()
    rounds = [
        (
            latency_ms(due_within(answers, one.steady)),
            latency_ms(first_of(answers, one.version, config.first_requests)),
        )
        for one in swaps
    ]
    done = sum(warmed.values()) if config.warm_requests else None
    return make_paired_report(answers, rounds, facts, config.max_ratio_p99, done)


async def run_shadow_drill(config: ShadowDrillConfig, folder: Path, progress: Progress = no_progress) -> PairedReport:
    """Measure in rounds, each kind of time first in turn. Raises DrillError, as a rollout or the load fails."""
    spans: dict[bool, list[TimeSpan]] = {True: [], False: []}
    async with oracle_fleet(config, folder, progress) as fleet:
        await asyncio.sleep(WARMUP_S)
        version = await fleet.publish_next(differs_from=await fleet.live_version())
        is_on, scored = False, dict[str, int]()
        for number in range(config.rounds):
            progress("rounds", number, config.rounds)
            for wanted in (number % 2 == 1, number % 2 == 0):
                if wanted and not is_on:
                    await _begin_shadow(fleet, version, config.share)
                elif is_on and not wanted:
                    _add(scored, await fleet.counts("shardrank_shadow_requests_total", "outcome"))
                    await _end_shadow(fleet)
                is_on = wanted
                await asyncio.sleep(SETTLE_S)
                spans[wanted].append(await _window(config.window_s))
                fleet.load.check()
        if is_on:
            _add(scored, await fleet.counts("shardrank_shadow_requests_total", "outcome"))
        progress("rounds", config.rounds, config.rounds)
        facts = {**fleet.facts(), "kinds": ("time without a shadow", "time with one"), "requests": scored}
        answers = await fleet.load.stop()
    rounds = [
        (latency_ms(due_within(answers, off)), latency_ms(due_within(answers, on)))
        for off, on in zip(spans[False], spans[True], strict=True)
    ]
    return make_paired_report(answers, rounds, facts, config.max_ratio_p99, scored.get("scored", 0))


async def _window(seconds: float) -> TimeSpan:
    begin = time.monotonic()
    await asyncio.sleep(seconds)
    return TimeSpan(begin, time.monotonic())


async def _begin_shadow(fleet: OracleFleet, version: int, share: float) -> None:
    """Start a rollout that stays in its shadow step, and wait until every serving process has acted on it."""
    await start_rollout(
        fleet.registry,
        fleet.model,
        version,
        shadow_share=share,
        shadow_s=LONG_S,
        rollout_id=secrets.token_hex(16),
    )

    async def is_applied() -> bool:
        rollout = await fleet.rollout()
        wanted: WantedModel | None = await fleet.registry.wanted_model(fleet.model)
        if rollout is None or rollout.step != SHADOW or wanted is None or wanted.shadow is None:
            return False
        serving = [node for node in await fleet.registry.nodes() if node.kind == "serving"]
        return bool(serving) and all(node.applied.get(fleet.model, 0) >= wanted.epoch for node in serving)

    await _until(fleet, is_applied, "reach its shadow step")


async def _end_shadow(fleet: OracleFleet) -> None:
    await abort_rollout(fleet.registry, fleet.model, "the drill's time without a shadow")

    async def is_over() -> bool:
        return (rollout := await fleet.rollout()) is not None and not rollout.active and not await fleet.lag()

    await _until(fleet, is_over, "be taken back")


async def _until(fleet: OracleFleet, is_so: Callable[[], Any], what: str) -> None:
    if not await polled(is_so, bool, STEP_TIMEOUT_S):
        raise RolloutTimeoutError(f"the rollout did not {what} within {STEP_TIMEOUT_S:g} s: {await fleet.rollout()}")


def _add(total: dict[str, int], more: Mapping[str, int]) -> None:
    for name, count in more.items():
        total[name] = total.get(name, 0) + count

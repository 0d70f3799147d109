"""What a swap drill found, from the log of its answers and the times of its swaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from loadtest.drill.answers import APIS, Answers
from loadtest.drill.memory import MemorySample, slope_mb_per_swap
from loadtest.drill.verdict import Kind

MAX_RATIO_P99 = 1.5
MAX_GROWTH = 0.1
"""Of a fleet's memory from swap to swap, in rows of one copy of a version."""


@dataclass(frozen=True, slots=True)
class Span:
    """A span of time, in seconds of CLOCK_MONOTONIC."""

    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Swap:
    """One rollout, from the moment in which it was asked for to when it was seen to be done.

    Attributes:
        span: that time.
        from_version, to_version: live before and after.
    """

    span: Span
    from_version: int
    to_version: int


class SwapReport(BaseModel):
    """What `drill swap --json` writes.

    Attributes:
        swaps: rollouts that ended as `done`.
        answers: requests that were due while the drill ran, answered or not.
        failed, mixed, wrong: of those, by their verdict.
        p99_ms_steady: of the answers that neither a rollout nor a time set apart overlaps, from when a request was due.
        p99_ms_during_swap: of the answers that a rollout overlaps.
        ratio_p99: during to steady.
        rss_mb_before, rss_mb_after: sum over the fleet's processes, after the warm-up swaps and after the last swap;
            pages that processes share (libraries) count in each.
        stale: right answers that name neither the version before nor the one after the swaps that they overlap.
        answers_steady, answers_during_swap: how many there were.
        answers_apart: neither: while the fleet was cold, or a version was exported and published on the same machine.
        p50_ms_steady, p50_ms_during_swap, p99_ms_apart, max_ms: likewise.
        load_lag_p99_ms: how late the load itself sent requests; it is part of every latency.
        by_api: answers, failures and both p99 of each API and method.
        uss_mb_before, uss_mb_after: as rss_mb, shared pages not counted.
        rss_mb_per_swap: slope of the sum of RSS over the later half of the swaps, by least squares; None for few swaps.
        rss_mb_by_swap: the sum of RSS after each swap from the warm-up on.
        rss_mb_by_process: first and last sample of each process.
        swap_s_median, swap_s_max: how long rollouts took.
        rows_mb: of one copy of one version.
        registry, shards, replicas, cards, workers, rate, strategy: what ran.
        retries: lookups that serving processes repeated on another replica, by kind.
        details: the first answers that were not right.
        problems: why the drill did not pass; empty if it did.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    swaps: int
    answers: int
    failed: int
    mixed: int
    wrong: int
    p99_ms_steady: float | None
    p99_ms_during_swap: float | None
    ratio_p99: float | None
    rss_mb_before: float
    rss_mb_after: float
    stale: int
    answers_steady: int
    answers_during_swap: int
    answers_apart: int
    p50_ms_steady: float | None
    p50_ms_during_swap: float | None
    p99_ms_apart: float | None
    max_ms: float | None
    load_lag_p99_ms: float | None
    by_api: dict[str, dict[str, float | int | None]]
    uss_mb_before: float
    uss_mb_after: float
    rss_mb_per_swap: float | None
    rss_mb_by_swap: tuple[float, ...]
    rss_mb_by_process: dict[str, tuple[float, float]]
    swap_s_median: float | None
    swap_s_max: float | None
    rows_mb: float
    registry: str
    shards: int
    replicas: int
    cards: int
    workers: int
    rate: float
    strategy: str
    retries: dict[str, int]
    details: tuple[str, ...]
    problems: tuple[str, ...]


def make_swap_report(
    answers: Answers,
    swaps: Sequence[Swap],
    apart: Sequence[Span],
    memory: Sequence[MemorySample],
    facts: Mapping[str, Any],
    *,
    max_ratio_p99: float = MAX_RATIO_P99,
) -> SwapReport:
    """Draws up the report.

    Args:
        answers: all of them.
        swaps: in order; they do not overlap.
        apart: when latencies count for neither: while the fleet was cold, and while versions were exported and
            published on the same machine; in order.
        memory: after the warm-up, after each swap from there on; at least one.
        facts: the remaining fields of the report, as they are: what ran, retries, details.
        max_ratio_p99: more than this is a problem.
    """
    latency_ms = 1e3 * (answers["ended"] - answers["intended"])
    during = overlaps(answers, [swap.span for swap in swaps])
    kept_apart = overlaps(answers, apart) & ~during
    steady = ~during & ~kept_apart
    kinds = np.bincount(answers["kind"], minlength=len(Kind))
    p99_steady, p99_during = percentile(latency_ms[steady], 99), percentile(latency_ms[during], 99)
    durations = [swap.span.end - swap.span.begin for swap in swaps]
    found: dict[str, Any] = {
        "swaps": len(swaps),
        "answers": len(answers),
        "failed": int(kinds[Kind.FAILED]),
        "mixed": int(kinds[Kind.MIXED]),
        "wrong": int(kinds[Kind.WRONG]),
        "p99_ms_steady": p99_steady,
        "p99_ms_during_swap": p99_during,
        "ratio_p99": p99_during / p99_steady if p99_steady and p99_during else None,
        "rss_mb_before": memory[0].total_rss_mb,
        "rss_mb_after": memory[-1].total_rss_mb,
        "stale": int(is_stale(answers, swaps).sum()),
        "answers_steady": int(steady.sum()),
        "answers_during_swap": int(during.sum()),
        "answers_apart": int(kept_apart.sum()),
        "p50_ms_steady": percentile(latency_ms[steady], 50),
        "p50_ms_during_swap": percentile(latency_ms[during], 50),
        "p99_ms_apart": percentile(latency_ms[kept_apart], 99),
        "max_ms": percentile(latency_ms, 100),
        "load_lag_p99_ms": percentile(1e3 * (answers["sent"] - answers["intended"]), 99),
        "by_api": _by_api(answers, latency_ms, steady, during),
        "uss_mb_before": memory[0].total_uss_mb,
        "uss_mb_after": memory[-1].total_uss_mb,
        "rss_mb_per_swap": slope_mb_per_swap(memory),
        "rss_mb_by_swap": tuple(round(one.total_rss_mb, 1) for one in memory),
        "rss_mb_by_process": {name: (mb, memory[-1].rss_mb[name]) for name, mb in memory[0].rss_mb.items()},
        "swap_s_median": percentile(np.array(durations), 50),
        "swap_s_max": percentile(np.array(durations), 100),
        "problems": (),
        **facts,
    }
    report = SwapReport.model_validate(found)
    return report.model_copy(update={"problems": tuple(_problems(report, max_ratio_p99))})


def overlaps(answers: Answers, spans: Sequence[Span]) -> npt.NDArray[np.bool_]:
    """Which requests were out at any time within one of the spans, which are in order and apart: bool [n]."""
    if not spans:
        return np.zeros(len(answers), np.bool_)
    begins = np.array([span.begin for span in spans])
    ends = np.array([span.end for span in spans])
    last_begun = np.searchsorted(begins, answers["ended"], side="right") - 1
    result: npt.NDArray[np.bool_] = (last_begun >= 0) & (ends[np.maximum(last_begun, 0)] >= answers["intended"])
    return result


def is_stale(answers: Answers, swaps: Sequence[Swap]) -> npt.NDArray[np.bool_]:
    """Which answers are right in themselves, but of a version that was not live while the request was out: bool [n].

    Versions ascend from swap to swap.
    """
    if not swaps:
        return np.zeros(len(answers), np.bool_)
    begins = np.array([swap.span.begin for swap in swaps])
    ends = np.array([swap.span.end for swap in swaps])
    live = np.array([swaps[0].from_version, *(swap.to_version for swap in swaps)])
    # Live when it was due: what the last swap that was done by then left. When it ended: any that had begun by then.
    oldest = np.searchsorted(ends, answers["intended"], side="left")
    newest = np.searchsorted(begins, answers["ended"], side="right")
    place = np.searchsorted(live, answers["version"])
    known = live[np.minimum(place, len(live) - 1)] == answers["version"]
    result: npt.NDArray[np.bool_] = (answers["kind"] == Kind.OK) & ~(known & (oldest <= place) & (place <= newest))
    return result


def percentile(values: npt.NDArray[np.floating], percent: float) -> float | None:
    """None of nothing."""
    return float(np.percentile(values, percent)) if values.size else None


def _by_api(
    answers: Answers,
    latency_ms: npt.NDArray[np.floating],
    steady: npt.NDArray[np.bool_],
    during: npt.NDArray[np.bool_],
) -> dict[str, dict[str, float | int | None]]:
    table: dict[str, dict[str, float | int | None]] = {}
    for number, name in enumerate(APIS):
        own = answers["api"] == number
        table[name] = {
            "answers": int(own.sum()),
            "not_ok": int((answers["kind"][own] != Kind.OK).sum()),
            "p99_ms_steady": percentile(latency_ms[own & steady], 99),
            "p99_ms_during_swap": percentile(latency_ms[own & during], 99),
        }
    return table


def _problems(report: SwapReport, max_ratio_p99: float) -> list[str]:
    found = [
        f"{count} answers {what}"
        for count, what in (
            (report.failed, "failed"),
            (report.mixed, "are mixed"),
            (report.wrong, "are wrong"),
            (report.stale, "name a version that was not live"),
        )
        if count
    ]
    if report.ratio_p99 is None:
        found.append("too few answers to compare latencies")
    elif report.ratio_p99 > max_ratio_p99:
        found.append(f"p99 during swaps is {report.ratio_p99:.2f} times the steady one, allowed is {max_ratio_p99:g}")
    # A version that is not freed adds its rows, once for each replica, with every swap.
    if report.rss_mb_per_swap is not None and report.rss_mb_per_swap > MAX_GROWTH * report.rows_mb:
        found.append(
            f"memory grows by {report.rss_mb_per_swap:.2f} MB with every swap; one version has {report.rows_mb:.2f} MB"
        )
    return found

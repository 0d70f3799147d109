"""From what was measured in rounds to a comparison."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from loadtest.compare.agreement import TOLERANCES
from loadtest.compare.arm_measure import ArmRound
from loadtest.compare.config import Arm, CompareConfig
from loadtest.compare.rounds import Agreed, Measurements
from loadtest.load.config import LoadConfig
from loadtest.load.merge import MAX_CPU_SHARE
from loadtest.load.result import LoadResult
from loadtest.report import comparison as report
from loadtest.report.comparison import measured
from loadtest.serving_cost.messages import Weighed
from loadtest.workloads.payloads import FORMS

# Kinds of failed requests that had too little time.
_LATE = frozenset({"timeout", "http_504", "grpc_deadline_exceeded"})
_PERCENTILES = {"p50": "p50_ms", "p99": "p99_ms", "p99.9": "p999_ms"}

COUNTED = "requests that count in a round"
"""In the setup: of fewer than a thousand, p99.9 is the slowest one."""
FORM = "requests are"


def compared(config: CompareConfig, load: LoadConfig, measurements: Measurements) -> report.Comparison:
    """Ratios to the first arm.

    Of requests at a rate, warm and cold: p50, p99 and p99.9 of all that were due, and right answers a second. Of a
    server that is kept busy: answers a second, and what one costs. A measure that some run does not have, since too
    many of its requests failed, is left out, and the comparison is not valid. Nor is it where a run is not.

    Args:
        config: arms and rounds.
        load: what was asked.
        measurements: with the rounds of each arm in the order of `config.arms`.

    Raises:
        ComparisonError: arms have other numbers of rounds, or there are none.
    """
    rounds = measurements.rounds
    found: list[report.Measured] = []
    reasons = _reasons(rounds)
    for name, unit, better, values in _values(config, rounds):
        if all(value > 0 for of_arm in values for value in of_arm):
            found.append(measured(name, unit, better, values, seed=config.seed))
        else:
            reasons.append(f"{name} is left out: some rounds have none; too many requests failed")
    runs = [one.warm for of_arm in rounds.values() for one in of_arm]
    return report.Comparison(
        title=f"{_listed(arm.name for arm in config.arms)}: {load.workload}",
        setup=_setup(config, load, measurements),
        arms=tuple(
            report.Arm(
                name=arm.name,
                runs=tuple(one.warm for one in of_arm),
                cold_runs=tuple(one.cold for one in of_arm),
            )
            for arm, of_arm in rounds.items()
        ),
        baseline=0,
        rounds=config.rounds,
        measures=tuple(found),
        seed=config.seed,
        valid=not reasons,
        invalid_because=tuple(reasons),
        machine=runs[0].machine,
        versions=runs[0].versions,
    )


def _runs(of_arm: Sequence[ArmRound], phase: str) -> list[LoadResult]:
    return [one.warm if phase == "warm" else one.cold for one in of_arm]


def _values(
    config: CompareConfig, rounds: Mapping[Arm, Sequence[ArmRound]]
) -> list[tuple[str, str, report.Better, list[list[float]]]]:
    """Name, unit, better and `[arms][rounds]` of each measure; 0 where there is none."""
    found: list[tuple[str, str, report.Better, list[list[float]]]] = []
    for phase in ("warm", "cold"):
        for name, field in _PERCENTILES.items():
            values = [
                [getattr(run.latency_of_due, field) or 0.0 for run in _runs(of_arm, phase)]
                for of_arm in rounds.values()
            ]
            found.append((f"{name}, {phase}", "ms", "lower", values))
        throughputs = [[run.throughput for run in _runs(of_arm, phase)] for of_arm in rounds.values()]
        found.append((f"throughput at {config.rate:g}/s, {phase}", "/s", "higher", throughputs))
    busy = [[one.busy for one in of_arm] for of_arm in rounds.values()]
    throughputs = [[one.requests / one.seconds for one in of_arm] for of_arm in busy]
    found.append((f"throughput, {config.in_flight} in flight", "/s", "higher", throughputs))
    cpu_ms = [[one.server_cpu_s / one.requests * 1e3 for one in of_arm] for of_arm in busy]
    found.append((f"CPU of a request, {config.in_flight} in flight", "ms", "lower", cpu_ms))
    return found


def _reasons(rounds: Mapping[Arm, Sequence[ArmRound]]) -> list[str]:
    return [
        f"{arm.name}, round {number}, {where}"
        for arm, of_arm in rounds.items()
        for number, one in enumerate(of_arm, 1)
        for where in (
            *(f"cold: {reason}" for reason in one.cold.invalid_because),
            *(f"warm: {reason}" for reason in one.warm.invalid_because),
            *(f"cold: {reason}" for reason in _why_failed(one.cold)),
            *(f"warm: {reason}" for reason in _why_failed(one.warm)),
            *_why_not_busy(one.busy),
        )
    ]


def _why_failed(run: LoadResult) -> list[str]:
    """Of a run in which so many requests failed that it has no p99."""
    if run.latency_of_due.p99_ms is not None or not run.errors:
        return []
    kinds = ", ".join(f"{kind} {count}" for kind, count in run.errors.items())
    advice = ""
    if all(kind in _LATE for kind in run.errors):
        advice = (
            f": not answered within {run.timeout_ms:g} ms. Offer less (--rate), give requests longer (--timeout-ms), "
            "or make them smaller (--candidates)"
        )
    return [f"{sum(run.errors.values())} of {run.due} requests failed ({kinds}){advice}"]


def _why_not_busy(busy: Weighed) -> list[str]:
    share = busy.client_cpu_s / busy.seconds
    if share <= MAX_CPU_SHARE:
        return []
    return [f"throughput: the client used {share:.0%} of a core; at most {MAX_CPU_SHARE:.0%} is allowed"]


def _setup(config: CompareConfig, load: LoadConfig, measurements: Measurements) -> dict[str, str]:
    """What all arms have alike."""
    rounds, agreed = measurements.rounds, measurements.agreed
    run = next(iter(rounds.values()))[0].warm
    budgets = config.budgets
    several = any(arm.shards is not None for arm in config.arms)
    given: dict[str, object] = {
        "workload": run.workload,
        "model": run.model,
        "api": run.api,
        "distinct requests": run.requests,
        FORM: FORMS[load.varied],
        "arrivals": run.arrivals,
        "rate": f"{config.rate:g}/s",
        "throughput": f"closed loop, {config.in_flight} requests always out",
        "cold": f"the first {config.cold_s:g} s after the server's start",
        "warm": f"{config.duration_s:g} s after {config.warmup_s:g} s of warm-up",
        "serving processes": config.workers,
        "dense model in": agreed.dtype if config.dtype == agreed.dtype else f"{agreed.dtype} ({config.dtype})",
        "same scores": _agreement(agreed),
        "rows": _where(config) if several else "in each serving process",
        "network": _network(config) if config.hosts else None,
        "sharding": config.sharding,
        "device": budgets.device,
        "memory of each card": _gb(budgets.card_memory_gb),
        "hot rows of each card": _gb(budgets.hot_gb),
        "pinned host memory, all processes": _gb(budgets.pinned_memory_gb),
        "RAM for rows, all processes": _gb(budgets.memory_budget_gb),
        "peer access": budgets.peer_access,
        "replicated tables": f"up to {budgets.replicate_bytes} bytes" if several else None,
        COUNTED: f"{_about(rounds, 'warm')} warm, {_about(rounds, 'cold')} cold",
        "timeout": f"{load.timeout_ms:g} ms",
        "seed of the requests": load.seed,
    }
    return {name: str(value) for name, value in given.items() if value is not None}


def _agreement(agreed: Agreed) -> str:
    return f"of {agreed.requests} requests, to {agreed.largest_difference:.2g}; allowed is {TOLERANCES[agreed.dtype]:g}"


def _where(config: CompareConfig) -> str:
    asked = "on hosts of their own (network namespaces), asked over TCP" if config.hosts else "asked over Unix sockets"
    return f"in shard processes, {asked}"


def _network(config: CompareConfig) -> str:
    delay = "no delay made" if config.delay_ms is None else f"netem adds {config.delay_ms:g} ms to a round trip"
    return f"a veth pair for each host, {delay}"


def _gb(size: float | None) -> str | None:
    return None if size is None else f"{size:g} GB"


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}"


def _about(rounds: Mapping[Arm, Sequence[ArmRound]], phase: str) -> str:
    """How many were due: arms have as many as each other in a round, rounds of Poisson arrivals differ."""
    due = [run.due for of_arm in rounds.values() for run in _runs(of_arm, phase)]
    return f"{min(due)}" if min(due) == max(due) else f"{min(due)} to {max(due)}"

"""Compare cards and shards: from settings to a model that is served, measured, and compared arm by arm."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from operator import methodcaller
from pathlib import Path
from typing import Literal, TypeAlias

from rich.console import Console

from loader.errors import ConfigError
from loader.progress import Progress, no_progress
from loader.snapshot.reader import Snapshot
from loader.snapshot.store import Store
from loadtest.compare.arms import (
    ASKED,
    TRANSPORTS,
    ArmRound,
    CompareConfig,
    Measurements,
    measure_rounds,
    rates_of,
    tolerance_of,
)
from loadtest.documents import check_writable
from loadtest.load.config import OfferedLoad
from loadtest.load.loops import LATE_KINDS, not_busy_because
from loadtest.load.result import LoadResult
from loadtest.load.run import checked, write_files
from loadtest.rounds import COUNTED, FORM, SHARES, Arm, Better, Comparison, Measure, compare_rounds, show_comparison
from loadtest.servers import stopping_on_signals
from loadtest.workloads.catalog import FilmsWorkload, open_workload
from loadtest.workloads.payloads import FORMS, GRPC_APIS
from loadtest.workloads.prepare import prepare_workload
from router.plan import Plan
from serving.cli.output import progress_bars, stdout_console
from serving.training.dataset import with_bucketing
from shard_node.cuda.card_set import DeviceChoice

Row: TypeAlias = tuple[str, Literal["ms", "/s", "B"]]
"""Name and unit."""


def compared_snapshot(config: CompareConfig, load: OfferedLoad, store: Path, progress: Progress = no_progress) -> Path:
    """Find the workload's model in a store: its latest version there, or else one that is written.

    Raises:
        ConfigError: the store's model of that name has other tables or features.
        PlanError: an arm can't divide the rows like this, since they are stored in another order.
        ShardrankError: as `prepare_workload`, `open_workload` and `Snapshot.open`.
    """
    assert isinstance(load.workload, str)
    workload = open_workload(
        load.workload, context_features=load.context_features, movielens=load.movielens, split_seed=load.split_seed
    )
    expected = workload.spec
    if not Store(store).versions(expected.model):
        prepare_workload(
            load.workload,
            store,
            context_features=load.context_features,
            movielens=load.movielens,
            # What is trained on ratings must not learn those that are asked for.
            seed=load.split_seed if isinstance(workload, FilmsWorkload) else load.seed,
            bucketing="range" if config.sharding == "range" else "mixed",
            progress=progress,
        )
    folder = Store(store).snapshot_path(expected.model)
    spec = Snapshot.open(folder, verify=False).spec
    for what in ("tables", "features"):
        # Rows may be stored in another order: which is right depends on the sharding.
        stored, wanted = (getattr(with_bucketing(model, "mixed"), what) for model in (spec, expected))
        if stored != wanted:
            raise ConfigError(
                f"{folder}: its {what} are not those of the workload {load.workload!r}; name another --store, or "
                "the workload and --context-features that it was prepared with"
            )
    for arm in config.arms:
        # What a server would refuse later.
        Plan.make(spec, arm.shards or 1, config.sharding, arm.cards, config.replicate_bytes)
    return folder.resolve()


def compared(config: CompareConfig, load: OfferedLoad, measurements: Measurements) -> Comparison:
    """Compute ratios to the first arm, as `compare_rounds`."""
    run = measurements.rounds[config.arms[0]][0].warm
    *first, last = (arm.name for arm in config.arms)
    arms, reasons = [], []
    for served, rounds in measurements.rounds.items():
        runs, cold_runs = tuple(one.warm for one in rounds), tuple(one.cold for one in rounds)
        arms.append((Arm(name=served.name, runs=runs, cold_runs=cold_runs), [_figures(config, one) for one in rounds]))
        for number, arm_round in enumerate(rounds, 1):
            reasons += [f"{served.name}, round {number}, {reason}" for reason in _reasons(config, arm_round)]
    measures: list[Measure[Mapping[Row, float | None]]] = []
    for name, unit in dict.fromkeys(row for _, rounds in arms for figures in rounds for row in figures):
        # Bytes and processor time by role are of shards, and bytes of some forms alone.
        everywhere = not name.startswith(("bytes", "CPU of a request, serve", "CPU of a request, nodes"))
        better: Better = "higher" if unit == "/s" else "lower"
        measures.append(Measure(name, unit, better, methodcaller("get", (name, unit)), everywhere))
    return compare_rounds(
        arms,
        measures,
        title=f"{', '.join(first)} and {last}: {load.workload}",
        setup=_setup(config, load, measurements),
        invalid_because=reasons,
        machine=run.machine,
        versions=run.versions,
        seed=config.seed,
    )


def _figures(config: CompareConfig, measured: ArmRound) -> dict[Row, float | None]:
    """Return what a round of an arm says, over all requests that were due; None for a percentile that failed."""
    figures: dict[Row, float | None] = {}
    busy = measured.busy
    for phase, run in (("warm", measured.warm), ("cold", measured.cold)):
        figures[f"p50, {phase}", "ms"] = run.latency_of_due.p50_ms
        figures[f"p99, {phase}", "ms"] = run.latency_of_due.p99_ms
        figures[f"p99.9, {phase}", "ms"] = run.latency_of_due.p999_ms
        figures[f"throughput at {config.rate:g}/s, {phase}", "/s"] = run.throughput
    figures["p50, 1 in flight", "ms"] = measured.alone.p50_ms
    figures["p99, 1 in flight", "ms"] = measured.alone.p99_ms
    for share, run in zip(config.shares, measured.shares, strict=True):
        figures[f"p50 at {share}% of capacity", "ms"] = run.latency_of_due.p50_ms
        figures[f"p99 at {share}% of capacity", "ms"] = run.latency_of_due.p99_ms
    figures[f"throughput, {config.in_flight} in flight", "/s"] = busy.requests_per_s
    figures[f"CPU of a request, {config.in_flight} in flight", "ms"] = busy.cpu_ms
    for role, cpu in busy.server_cpu.items() if config.shards else ():
        figures[f"CPU of a request, {role}", "ms"] = sum(cpu) / busy.requests * 1e3
        figures[f"CPU of a request, {role}, kernel", "ms"] = cpu.kernel_s / busy.requests * 1e3
    replies = {form: size for form, size in sorted(measured.wire.items()) if form != ASKED}
    if measured.wire:
        figures["bytes of a request, back", "B"] = sum(replies.values())
        figures |= {(f"bytes of a request, back as {form}", "B"): size for form, size in replies.items()}
        figures["bytes of a request, to shards", "B"] = measured.wire.get(ASKED)
    return figures


def _reasons(config: CompareConfig, arm_round: ArmRound) -> list[str]:
    """Return why a round's figures can't be believed."""
    names = ("cold", "warm", *(f"{share}% of capacity" for share in config.shares))
    runs = dict(zip(names, (arm_round.cold, arm_round.warm, *arm_round.shares), strict=True))
    reasons = [f"{name}: {reason}" for name, run in runs.items() for reason in (*run.invalid_because, *_failures(run))]
    return [*reasons, *not_busy_because(arm_round.busy)]


def _failures(run: LoadResult) -> list[str]:
    """Describe the failures of a run in which so many requests failed that it has no p99."""
    if run.latency_of_due.p99_ms is not None or not run.errors:
        return []
    kinds = ", ".join(f"{kind} {count}" for kind, count in run.errors.items())
    advice = ""
    if all(kind in LATE_KINDS for kind in run.errors):
        advice = (
            f": not answered within {run.timeout_ms:g} ms. Offer less (--rate, --shares), give requests longer "
            "(--timeout-ms), or make them smaller (--candidates)"
        )
    return [f"{sum(run.errors.values())} of {run.due} requests failed ({kinds}){advice}"]


def _setup(config: CompareConfig, load: OfferedLoad, measurements: Measurements) -> dict[str, str]:
    """Return what all arms have alike."""
    scores = measurements.scores[config.arms[0]]
    run = measurements.rounds[config.arms[0]][0].warm

    def counted(phase: Literal["warm", "cold"]) -> str:
        # Arms have as many requests as each other in a round, rounds of Poisson arrivals differ.
        due = {getattr(arm_round, phase).due for of_arm in measurements.rounds.values() for arm_round in of_arm}
        return f"{min(due)} to {max(due)}" if len(due) > 1 else f"{min(due)}"

    def gigabytes(size: float | None) -> str | None:
        return None if size is None else f"{size:g} GB"

    capacity = measurements.capacity
    slowest = min(capacity, key=capacity.__getitem__)
    rates = ", ".join(f"{rate:g}" for rate in rates_of(config.shares, capacity))
    shares = (
        f"{', '.join(map(str, config.shares))}% of the {capacity[slowest]:.0f}/s that {slowest.name} answered in the "
        f"rehearsal, the least of all arms: {rates}/s, open loop"
    )
    transports = " and ".join(dict.fromkeys(TRANSPORTS[arm.transport] for arm in config.arms if arm.shards is not None))
    given: dict[str, object] = {
        "workload": run.workload,
        "model": run.model,
        "api": run.api,
        "distinct requests": run.requests,
        FORM: FORMS[load.varied],
        "arrivals": run.arrivals,
        "rate": f"{config.rate:g}/s",
        "throughput": f"closed loop, {config.in_flight} requests always out",
        "alone": "closed loop, one request always out",
        SHARES: shares if config.shares else None,
        "cold": f"the first {config.cold_s:g} s after the server's start",
        "warm": f"{config.duration_s:g} s after {config.warmup_s:g} s of warm-up",
        "serving processes": config.workers,
        "sums of shards in": config.wire_dtype if config.shards else None,
        "dense model in": scores.dtype if config.dtype == scores.dtype else f"{scores.dtype} ({config.dtype})",
        "same scores": f"of {len(scores.scores)} requests, to {measurements.largest_difference:.2g}; "
        f"allowed is {tolerance_of(config, scores.dtype):g}",
        "rows": "in each serving process"
        + (f"; or in shard processes on this machine, asked over {transports}" if transports else ""),
        "sharding": config.sharding,
        "device": config.device,
        "memory of each card": gigabytes(config.card_memory_gb),
        "hot rows of each card": gigabytes(config.hot_gb),
        "pinned host memory, all processes": gigabytes(config.pinned_memory_gb),
        "RAM for rows, all processes": gigabytes(config.memory_budget_gb),
        "peer access": config.peer_access,
        "replicated tables": f"up to {config.replicate_bytes} bytes" if config.shards else None,
        COUNTED: f"{counted('warm')} warm, {counted('cold')} cold",
        "timeout": f"{load.timeout_ms:g} ms",
        "seed of the requests": load.seed,
    }
    return {name: str(value) for name, value in given.items() if value is not None}


def execute(store: Path | None, json_file: Path | None, html_file: Path | None, **given: object) -> int:
    """Run a comparison of what is given as fields of `CompareConfig` and `OfferedLoad`.

    Returns:
        The exit code: 0; 1 if a run can't be believed.

    Raises:
        click.UsageError: naming the option that does not fit.
        ShardrankError: it can't be run to its end, or a file can't be written.
    """
    # Until a server has its port: the settings are checked before anything is started.
    target = "grpc://127.0.0.1:1" if given["api"] in GRPC_APIS else "http://127.0.0.1:1"
    config, load = checked(CompareConfig, given), checked(OfferedLoad, {**given, "target": target})
    DeviceChoice.parse(config.device)
    check_writable(json_file, html_file)
    with stopping_on_signals(), tempfile.TemporaryDirectory(prefix="shardrank-compare-") as temporary:
        folder = Path(temporary)
        with progress_bars() as bars:
            snapshot = compared_snapshot(config, load, store or folder / "store", bars)
        comparison = compared(config, load, measure_rounds(config, load, snapshot, folder, Console(stderr=True)))
    write_files(comparison, json_file, html_file)
    show_comparison(stdout_console(), comparison)
    return 0 if comparison.valid else 1

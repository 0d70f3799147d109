"""Run a comparison from its settings to its result: the model, the rounds, ratios, a table on screen and files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from loader.progress import Progress, no_progress
from loader.snapshot.manifest import Frozen, ModelSpec
from loader.snapshot.reader import Snapshot
from loader.snapshot.store import Store
from loadtest.compare.arms import Budgets, CompareConfig, ServedArm
from loadtest.compare.hosts import check_hosts
from loadtest.compare.rounds import TOLERANCES, ArmRound, Measurements, measure_rounds
from loadtest.errors import CompareStoreError
from loadtest.load.closed_loop import LATE_KINDS
from loadtest.load.config import OfferedLoad
from loadtest.load.processes import not_busy_because, stopping_on_signals
from loadtest.load.result import LoadResult, check_writable
from loadtest.load.run import INTERRUPTED, checked, write_files
from loadtest.load.show import line
from loadtest.report import comparison as report
from loadtest.report import numbers
from loadtest.report.plots import ratio_text
from loadtest.workloads.catalog import FilmsWorkload, open_workload
from loadtest.workloads.payloads import FORMS, GRPC_APIS
from loadtest.workloads.prepare import prepare_workload
from router.plan import Plan
from serving.cli.output import progress_bars, stdout_console
from serving.fleet.process import StopRequestedError
from serving.training.dataset import with_bucketing
from shard_node.cuda.card_set import DeviceChoice

_PERCENTILES = {"p50": "p50_ms", "p99": "p99_ms", "p99.9": "p999_ms"}
COUNTED = "requests that count in a round"
"""In the setup: of fewer than a thousand, p99.9 is the slowest one."""
FORM = "requests are"


def compared_snapshot(config: CompareConfig, load: OfferedLoad, store: Path, progress: Progress = no_progress) -> Path:
    """Find the workload's model in a store: its latest version there, or else one that is written.

    Raises:
        CompareStoreError: the store's model of that name has other tables or features.
        PlanError: an arm can't divide the rows like this, since they are stored in another order.
        ShardrankError: as `prepare_workload`, `open_workload` and `Snapshot.open`.
    """
    assert isinstance(load.workload, str)
    workload = open_workload(
        load.workload, context_features=load.context_features, movielens=load.movielens, split_seed=load.split_seed
    )
    wanted = workload.spec
    if not Store(store).versions(wanted.model):
        folder, spec = prepare_workload(
            load.workload,
            store,
            context_features=load.context_features,
            movielens=load.movielens,
            # What is trained on ratings must not learn those that are asked for.
            seed=load.split_seed if isinstance(workload, FilmsWorkload) else load.seed,
            bucketing="range" if config.sharding == "range" else "hash",
            progress=progress,
        )
    else:
        folder = Store(store).snapshot_path(wanted.model)
        spec = Snapshot.open(folder, verify=False).spec
        _check_same(folder, spec, wanted, load.workload)
    for arm in config.arms:
        # What a server would refuse later.
        Plan.make(spec, arm.shards or 1, config.sharding, arm.cards, config.budgets.replicate_bytes)
    return folder.resolve()


def _check_same(folder: Path, found: ModelSpec, wanted: ModelSpec, workload: str) -> None:
    # Rows may lie in another order: which is right depends on the sharding.
    found, wanted = with_bucketing(found, "hash"), with_bucketing(wanted, "hash")
    for what in ("tables", "features"):
        there, asked = getattr(found, what), getattr(wanted, what)
        if there != asked:
            different = sorted({one.name for one in (*there, *asked) if one not in there or one not in asked})
            raise CompareStoreError(
                f"{folder}: its {what} {different[:5]} are not those of the workload {workload!r}; name another "
                "--store, or the workload and --context-features that it was prepared with"
            )


def compared(config: CompareConfig, load: OfferedLoad, measurements: Measurements) -> report.Comparison:
    """Compute ratios to the first arm.

    Of requests at a rate, warm and cold: p50, p99 and p99.9 of all that were due, and right answers a second. Of a
    server that is kept busy: answers a second, and what one costs. A measure that some run does not have, since too
    many of its requests failed, is left out, and the comparison is not valid. Nor is it where a run is not.

    Raises:
        ComparisonError: arms have other numbers of rounds, or there are none.
    """
    rounds = measurements.rounds
    found: list[report.ComparedMeasure] = []
    reasons = _reasons(rounds)
    for name, unit, better, values in _values(config, rounds):
        if all(value > 0 for of_arm in values for value in of_arm):
            found.append(report.measured(name, unit, better, values, seed=config.seed))
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
    config: CompareConfig, rounds: Mapping[ServedArm, Sequence[ArmRound]]
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


def _reasons(rounds: Mapping[ServedArm, Sequence[ArmRound]]) -> list[str]:
    return [
        f"{arm.name}, round {number}, {where}"
        for arm, of_arm in rounds.items()
        for number, one in enumerate(of_arm, 1)
        for where in (
            *(f"cold: {reason}" for reason in (*one.cold.invalid_because, *_why_failed(one.cold))),
            *(f"warm: {reason}" for reason in (*one.warm.invalid_because, *_why_failed(one.warm))),
            *not_busy_because(one.busy),
        )
    ]


def _why_failed(run: LoadResult) -> list[str]:
    """Of a run in which so many requests failed that it has no p99."""
    if run.latency_of_due.p99_ms is not None or not run.errors:
        return []
    kinds = ", ".join(f"{kind} {count}" for kind, count in run.errors.items())
    advice = ""
    if all(kind in LATE_KINDS for kind in run.errors):
        advice = (
            f": not answered within {run.timeout_ms:g} ms. Offer less (--rate), give requests longer (--timeout-ms), "
            "or make them smaller (--candidates)"
        )
    return [f"{sum(run.errors.values())} of {run.due} requests failed ({kinds}){advice}"]


def _setup(config: CompareConfig, load: OfferedLoad, measurements: Measurements) -> dict[str, str]:
    """Return what all arms have alike."""
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
        "same scores": f"of {agreed.requests} requests, to {agreed.largest_difference:.2g}; "
        f"allowed is {TOLERANCES[agreed.dtype]:g}",
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


def _about(rounds: Mapping[ServedArm, Sequence[ArmRound]], phase: str) -> str:
    """How many were due: arms have as many as each other in a round, rounds of Poisson arrivals differ."""
    due = [run.due for of_arm in rounds.values() for run in _runs(of_arm, phase)]
    return f"{min(due)}" if min(due) == max(due) else f"{min(due)} to {max(due)}"


def show_comparison(console: Console, comparison: report.Comparison) -> None:
    """Print a row for each measure: medians, and under them the ratios with their intervals."""
    line(console, comparison.title)
    if FORM in comparison.setup:
        line(console, f"{FORM} {comparison.setup[FORM]}")
    table = Table(box=box.SIMPLE)
    table.add_column("", no_wrap=True)
    for arm in comparison.arms:
        table.add_column(arm.name, justify="right", no_wrap=True)
    for one in comparison.measures:
        table.add_row(f"{one.name}, {one.unit}", *[numbers.significant(value) for value in one.middle])
        ratios = ["" if arm == comparison.baseline else ratio_text(one, arm) for arm in range(len(comparison.arms))]
        table.add_row("", *ratios)
    console.print(table)
    base = comparison.arms[comparison.baseline].name
    if comparison.rounds > 1:
        medians, sure = (
            f"medians of {comparison.rounds} rounds",
            f"with {comparison.confidence:.0%} confidence intervals",
        )
    else:
        medians, sure = "values of one round", "(one round has no confidence interval)"
    line(console, f"{medians}, and ratios to {base} {sure}")
    if COUNTED in comparison.setup:
        line(console, f"{COUNTED}: {comparison.setup[COUNTED]}; p99.9 of fewer than 1000 is the slowest one")
    for reason in comparison.invalid_because:
        line(console, f"not valid: {reason}")


def checked_configs(given: Mapping[str, object]) -> tuple[CompareConfig, OfferedLoad]:
    """Make the settings from a command line's options, by name; a value of None is the default.

    Raises:
        click.UsageError: naming the option that does not fit.
        DeviceChoiceError: no such device.
    """

    def own(schema: type[Frozen]) -> dict[str, object]:
        return {name: given[name] for name in schema.model_fields if name in given}

    # Until a server has its port: the settings are checked before anything is started.
    target = "grpc://127.0.0.1:1" if given["api"] in GRPC_APIS else "http://127.0.0.1:1"
    budgets = checked(Budgets, own(Budgets))
    DeviceChoice.parse(budgets.device)
    return (
        checked(CompareConfig, {**own(CompareConfig), "budgets": budgets}),
        checked(OfferedLoad, {**own(OfferedLoad), "target": target}),
    )


def execute(
    config: CompareConfig, load: OfferedLoad, store: Path | None, json_file: Path | None, html_file: Path | None
) -> int:
    """Run a comparison.

    Returns:
        The exit code: 0; 1 if a run can't be believed; 130 after a signal.

    Raises:
        ShardrankError: it can't be run to its end, or a file can't be written.
    """
    check_writable(json_file, html_file)
    if config.hosts:
        check_hosts(config.delay_ms)
    try:
        with stopping_on_signals():
            comparison = _measured(config, load, store)
    except StopRequestedError:
        return INTERRUPTED
    write_files(comparison, json_file, html_file)
    show_comparison(stdout_console(), comparison)
    return 0 if comparison.valid else 1


def _measured(config: CompareConfig, load: OfferedLoad, store: Path | None) -> report.Comparison:
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="shardrank-compare-") as temporary:
        folder = Path(temporary)
        with progress_bars() as bars:
            snapshot = compared_snapshot(config, load, store or folder / "store", bars)
        measurements = measure_rounds(config, load, snapshot, folder, console)
    return compared(config, load, measurements)

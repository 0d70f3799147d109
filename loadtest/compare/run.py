"""Compare cards and shards: from settings to a model that is served, measured, and compared arm by arm."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path

from rich.console import Console

from loader.progress import Progress, no_progress
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.reader import Snapshot
from loader.snapshot.store import Store
from loader.snapshot.tables import Frozen
from loadtest.compare.arms import TRANSPORTS, Budgets, CompareConfig, ServedArm
from loadtest.compare.measure import ASKED, ArmRound, Measurements, measure_rounds, rates_of, tolerance_of
from loadtest.errors import CompareStoreError
from loadtest.load.closed_loop import LATE_KINDS, CpuTime, Role, not_busy_because
from loadtest.load.config import OfferedLoad
from loadtest.load.result import LoadResult, check_writable
from loadtest.load.run import INTERRUPTED, checked, write_files
from loadtest.load.workers import stopping_on_signals
from loadtest.rounds import COUNTED, FORM, SHARES, Arm, Comparison, Measure, compare_rounds, show_comparison
from loadtest.workloads.catalog import FilmsWorkload, open_workload
from loadtest.workloads.payloads import FORMS, GRPC_APIS
from loadtest.workloads.prepare import prepare_workload
from router.plan import Plan
from serving.cli.output import progress_bars, stdout_console
from serving.fleet.process import StopRequestedError
from serving.training.dataset import with_bucketing
from shard_node.cuda.card_set import DeviceChoice

_PERCENTILES = {"p50": "p50_ms", "p99": "p99_ms", "p99.9": "p999_ms"}
_ROLES: tuple[Role, ...] = ("serve", "nodes")
_SPENT: dict[str, Callable[[CpuTime], float]] = {
    "": lambda time: time.all_s,
    ", kernel": lambda time: time.kernel_s,
}


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
            bucketing="range" if config.sharding == "range" else "mixed",
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
    found, wanted = with_bucketing(found, "mixed"), with_bucketing(wanted, "mixed")
    for what in ("tables", "features"):
        there, asked = getattr(found, what), getattr(wanted, what)
        if there != asked:
            different = sorted({one.name for one in (*there, *asked) if one not in there or one not in asked})
            raise CompareStoreError(
                f"{folder}: its {what} {different[:5]} are not those of the workload {workload!r}; name another "
                "--store, or the workload and --context-features that it was prepared with"
            )


def compared(config: CompareConfig, load: OfferedLoad, measurements: Measurements) -> Comparison:
    """Compute ratios to the first arm.

    Of requests at a rate, warm and cold: p50, p99 and p99.9 of all that were due, and right answers a second. Of one
    request after the other, and at each share of capacity: p50 and p99. Of a server that is kept busy: answers a
    second, and what one costs in processor time and in bytes to and from shards.

    Raises:
        ComparisonError: arms have other numbers of rounds, or there are none.
    """
    rounds = measurements.rounds
    run = next(iter(rounds.values()))[0].warm
    return compare_rounds(
        [
            (Arm(name=arm.name, runs=tuple(_runs(of_arm, "warm")), cold_runs=tuple(_runs(of_arm, "cold"))), of_arm)
            for arm, of_arm in rounds.items()
        ],
        _measures(config, rounds),
        title=f"{_listed(arm.name for arm in config.arms)}: {load.workload}",
        setup=_setup(config, load, measurements),
        invalid_because=_reasons(config, rounds),
        machine=run.machine,
        versions=run.versions,
        seed=config.seed,
    )


def _runs(of_arm: Sequence[ArmRound], phase: str) -> list[LoadResult]:
    return [getattr(one, phase) for one in of_arm]


def _measures(config: CompareConfig, rounds: Mapping[ServedArm, Sequence[ArmRound]]) -> list[Measure[ArmRound]]:
    found: list[Measure[ArmRound]] = []
    for phase in ("warm", "cold"):
        for name, percentile in _PERCENTILES.items():
            value = attrgetter(f"{phase}.latency_of_due.{percentile}")
            found.append(Measure(f"{name}, {phase}", "ms", "lower", value))
        throughput = attrgetter(f"{phase}.throughput")
        found.append(Measure(f"throughput at {config.rate:g}/s, {phase}", "/s", "higher", throughput))
    for name in ("p50", "p99"):
        found.append(Measure(f"{name}, 1 in flight", "ms", "lower", attrgetter(f"alone.{name}_ms")))
    for place, share in enumerate(config.shares):
        for name in ("p50", "p99"):
            found.append(Measure(f"{name} at {share}% of capacity", "ms", "lower", _at_share(place, f"{name}_ms")))
    busy = f"{config.in_flight} in flight"
    forms = {form for of_arm in rounds.values() for one in of_arm for form in one.wire} - {ASKED}
    return [
        *found,
        Measure(f"throughput, {busy}", "/s", "higher", lambda one: one.busy.requests_per_s),
        Measure(f"CPU of a request, {busy}", "ms", "lower", lambda one: one.busy.cpu_ms),
        *(
            Measure(f"CPU of a request, {role}{part}", "ms", "lower", _cpu_ms(role, spent), everywhere=False)
            for role in (_ROLES if config.shards else ())
            for part, spent in _SPENT.items()
        ),
        Measure("bytes of a request, back", "B", "lower", _bytes(*forms), everywhere=False),
        *(
            Measure(f"bytes of a request, back as {form}", "B", "lower", _bytes(form), everywhere=False)
            for form in sorted(forms)
        ),
        Measure("bytes of a request, to shards", "B", "lower", _bytes(ASKED), everywhere=False),
    ]


def _at_share(place: int, percentile: str) -> Callable[[ArmRound], float | None]:
    return lambda one: getattr(one.shares[place].latency_of_due, percentile)


def _cpu_ms(role: Role, spent: Callable[[CpuTime], float]) -> Callable[[ArmRound], float]:
    return lambda one: spent(one.busy.server_cpu.get(role, CpuTime())) / one.busy.requests * 1e3


def _bytes(*forms: str) -> Callable[[ArmRound], float]:
    return lambda one: sum(one.wire.get(form, 0.0) for form in forms)


def _reasons(config: CompareConfig, rounds: Mapping[ServedArm, Sequence[ArmRound]]) -> list[str]:
    return [
        f"{arm.name}, round {number}, {where}"
        for arm, of_arm in rounds.items()
        for number, one in enumerate(of_arm, 1)
        for where in (
            *(f"{name}: {reason}" for name, run in _named_runs(config, one) for reason in _why_not_believed(run)),
            *not_busy_because(one.busy),
        )
    ]


def _named_runs(config: CompareConfig, one: ArmRound) -> list[tuple[str, LoadResult]]:
    at_shares = zip(config.shares, one.shares, strict=True)
    return [("cold", one.cold), ("warm", one.warm), *((f"{share}% of capacity", run) for share, run in at_shares)]


def _why_not_believed(run: LoadResult) -> list[str]:
    return [*run.invalid_because, *_why_failed(run)]


def _why_failed(run: LoadResult) -> list[str]:
    """Of a run in which so many requests failed that it has no p99."""
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
    rounds, dtype = measurements.rounds, measurements.dtype
    run = next(iter(rounds.values()))[0].warm
    budgets = config.budgets
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
        SHARES: _shares(config, measurements) if config.shares else None,
        "cold": f"the first {config.cold_s:g} s after the server's start",
        "warm": f"{config.duration_s:g} s after {config.warmup_s:g} s of warm-up",
        "serving processes": config.workers,
        "sums of shards in": config.wire_dtype if config.shards else None,
        "dense model in": dtype if config.dtype == dtype else f"{dtype} ({config.dtype})",
        "same scores": f"of {measurements.checked_requests} requests, to {measurements.largest_difference:.2g}; "
        f"allowed is {tolerance_of(config, dtype):g}",
        "rows": _where(config),
        "sharding": config.sharding,
        "device": budgets.device,
        "memory of each card": _gb(budgets.card_memory_gb),
        "hot rows of each card": _gb(budgets.hot_gb),
        "pinned host memory, all processes": _gb(budgets.pinned_memory_gb),
        "RAM for rows, all processes": _gb(budgets.memory_budget_gb),
        "peer access": budgets.peer_access,
        "replicated tables": f"up to {budgets.replicate_bytes} bytes" if config.shards else None,
        COUNTED: f"{_about(rounds, 'warm')} warm, {_about(rounds, 'cold')} cold",
        "timeout": f"{load.timeout_ms:g} ms",
        "seed of the requests": load.seed,
    }
    return {name: str(value) for name, value in given.items() if value is not None}


def _where(config: CompareConfig) -> str:
    if not config.shards:
        return "in each serving process"
    asked = " and ".join(dict.fromkeys(TRANSPORTS[arm.transport] for arm in config.arms if arm.shards is not None))
    return f"in each serving process; or in shard processes on this machine, asked over {asked}"


def _shares(config: CompareConfig, measurements: Measurements) -> str:
    slowest = min(measurements.capacity, key=measurements.capacity.__getitem__)
    rates = ", ".join(f"{rate:g}" for rate in rates_of(config.shares, measurements.capacity))
    shares = ", ".join(map(str, config.shares))
    return (
        f"{shares}% of the {measurements.capacity[slowest]:.0f}/s that {slowest.name} answered in the rehearsal, the "
        f"least of all arms: {rates}/s, open loop"
    )


def _gb(size: float | None) -> str | None:
    return None if size is None else f"{size:g} GB"


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}"


def _about(rounds: Mapping[ServedArm, Sequence[ArmRound]], phase: str) -> str:
    """How many were due: arms have as many as each other in a round, rounds of Poisson arrivals differ."""
    due = [run.due for of_arm in rounds.values() for run in _runs(of_arm, phase)]
    return f"{min(due)}" if min(due) == max(due) else f"{min(due)} to {max(due)}"


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
    try:
        with stopping_on_signals():
            comparison = _measured(config, load, store)
    except StopRequestedError:
        return INTERRUPTED
    write_files(comparison, json_file, html_file)
    show_comparison(stdout_console(), comparison)
    return 0 if comparison.valid else 1


def _measured(config: CompareConfig, load: OfferedLoad, store: Path | None) -> Comparison:
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="shardrank-compare-") as temporary:
        folder = Path(temporary)
        with progress_bars() as bars:
            snapshot = compared_snapshot(config, load, store or folder / "store", bars)
        measurements = measure_rounds(config, load, snapshot, folder, console)
    return compared(config, load, measurements)

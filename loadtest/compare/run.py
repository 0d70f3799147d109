"""Compare cards: every arm is measured in every round, and what that comes to.

Each time an arm's server is started anew: it is asked cold, warm and as fast as it answers, and ended. So what differs
from one start to the next (which memory the kernel gives, which core a thread begins on) is in the rounds, over which
confidence intervals are drawn, and not frozen in a ratio; there is a cold measure in every round; and an arm never
shares memory and cores with the servers of the others. In the first round all arms must give the same scores of a few
requests.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from loader.progress import Progress, no_progress
from loader.snapshot.manifest import Frozen, ModelSpec
from loader.snapshot.reader import Snapshot
from loader.snapshot.store import Store
from loadtest.compare.arms import Budgets, CompareConfig, Dtype, ServedArm, server_commands
from loadtest.compare.hosts import check_hosts, running_hosts
from loadtest.errors import CompareStoreError, ScoresDifferError, ServerFailedError
from loadtest.load.closed_loop import LATE_KINDS, Weighed, not_busy_because
from loadtest.load.config import OfferedLoad, RunConfig
from loadtest.load.generator import Generators
from loadtest.load.result import LoadResult, check_writable
from loadtest.load.run import INTERRUPTED, checked, offered, write_files
from loadtest.load.workers import stopping_on_signals
from loadtest.report.comparison import Arm, Comparison
from loadtest.rounds import COUNTED, FORM, Measure, compare_rounds, in_turn, show_comparison
from loadtest.servers import HOST, LOG_TAIL_BYTES, Server, check_scores, ports_in, running
from loadtest.tables import line
from loadtest.workloads.catalog import FilmsWorkload, open_workload
from loadtest.workloads.payloads import FORMS, GRPC_APIS
from loadtest.workloads.prepare import prepare_workload
from router.plan import Plan
from serving.cli.output import progress_bars, stdout_console
from serving.client import Client, ClientError
from serving.fleet.process import StopRequestedError
from serving.training.dataset import with_bucketing
from shard_node.bags import Float32Array
from shard_node.cuda.card_set import DeviceChoice

CHECKED_REQUESTS = 8
ASK_TIMEOUT_S = 5.0
REHEARSAL_S = 1.0
TOLERANCES: dict[Dtype, float] = {"float32": 1e-5, "bfloat16": 0.01}
"""Of scores, which are between 0 and 1. Where rows are divided otherwise, parts of a sum are added in another order; in
bfloat16, a sum whose last bit differs may become the next number, 0.4% away, at the input of every layer. Measured with
random models, whose scores spread by 0.03 to 0.05: up to 3e-7 between arms in float32 and 0.0016 in bfloat16."""

_DTYPE: TypeAdapter[Dtype] = TypeAdapter(Dtype)
_PERCENTILES = {"p50": "p50_ms", "p99": "p99_ms", "p99.9": "p999_ms"}


@dataclass(frozen=True, slots=True)
class ArmScores:
    """What an arm's server answered: scores, float32 [candidates], and the dtype of its dense model."""

    dtype: Dtype
    scores: tuple[Float32Array, ...]


@dataclass(frozen=True, slots=True)
class ArmRound:
    """What was measured of an arm in a round: from its server's start, after the warm-up, and kept busy."""

    cold: LoadResult
    warm: LoadResult
    busy: Weighed


@dataclass(frozen=True, slots=True)
class Measurements:
    """What was measured, and what all arms answered alike in the first round.

    Attributes:
        rounds: of each arm, in the order of the table.
        dtype: of all arms' dense models.
        checked_requests: whose scores were compared.
        largest_difference: of scores, to the first arm's.
    """

    rounds: dict[ServedArm, list[ArmRound]]
    dtype: Dtype
    checked_requests: int
    largest_difference: float


def served_dtype(arm: ServedArm, http_port: int, model: str) -> Dtype:
    """Ask in which dtype a server computes its dense model. Raises ServerFailedError if it does not say."""
    address = f"http://{HOST}:{http_port}"
    try:
        with Client(address, timeout_ms=int(1000 * ASK_TIMEOUT_S)) as client:
            description = client.describe(model)
        return _DTYPE.validate_python(description.dense_model.dtype)
    except (ClientError, ValidationError) as error:
        message = f"the server with {arm.name} does not describe its model at {address}: {error}"
        raise ServerFailedError(message) from error


def check_agreement(first: ServedArm, expected: ArmScores, arm: ServedArm, found: ArmScores) -> None:
    """Compare an arm's answers with the first one's. Raises ScoresDifferError, naming arm, request and difference."""
    if found.dtype != expected.dtype:
        raise ScoresDifferError(
            f"{arm.name}: its dense model is computed in {found.dtype}, that of {first.name} in {expected.dtype}; "
            "choose one with --dtype"
        )
    for number, (one, other) in enumerate(zip(expected.scores, found.scores, strict=True)):
        who = f"{arm.name} against {first.name} in {expected.dtype}, request {number}"
        check_scores(who, other, one, TOLERANCES[expected.dtype])


def largest_difference(answers: Sequence[ArmScores]) -> float:
    """Find the largest difference between the first arm's scores and any other's."""
    first = answers[0].scores
    pairs = itertools.chain.from_iterable(zip(first, arm.scores, strict=True) for arm in answers[1:])
    return max((float(np.abs(other - one).max()) for one, other in pairs), default=0.0)


@dataclass(slots=True)
class ArmMeasure:
    """Measure one server after the other, asked by the same processes with the same requests."""

    config: CompareConfig
    load: OfferedLoad
    generators: Generators
    snapshot: Path
    folder: Path
    console: Console
    _starts: int = field(default=0, init=False)

    def rehearse(self, arm: ServedArm) -> None:
        """Start a server and ask it a little; nothing is kept."""
        with self.serving(arm) as server:
            load = self._load(server)
            self._run(load, RunConfig(rate=self.config.rate, warmup_s=0, duration_s=REHEARSAL_S, seed=0))
            self.generators.busy(load, self.config.in_flight, 0.0, REHEARSAL_S, server.process_ids)

    def arm(self, arm: ServedArm, number: int) -> tuple[ArmRound, ArmScores | None]:
        """Measure an arm in a round, from 0.

        Scores are asked in the first round alone, and last, so that no measure of such a round has seen other requests
        than those of the others. Raises LoadError.
        """
        config, seed = self.config, self.config.seed + 2 * number
        cold = RunConfig(rate=config.rate, warmup_s=0, duration_s=config.cold_s, seed=seed)
        warm = RunConfig(rate=config.rate, warmup_s=config.warmup_s, duration_s=config.duration_s, seed=seed + 1)
        with self.serving(arm) as server:
            load = self._load(server)
            runs = self._run(load, cold), self._run(load, warm)
            busy = self.generators.busy(load, config.in_flight, config.warmup_s, config.duration_s, server.process_ids)
            return ArmRound(*runs, busy), self._scores(arm, server) if number == 0 else None

    def _scores(self, arm: ServedArm, server: Server) -> ArmScores:
        load = self._load(server)
        ready = self.generators.prepare(load)[0]
        asked = range(min(CHECKED_REQUESTS, ready.requests))
        scores = tuple(self.generators.scores(load, number) for number in asked)
        return ArmScores(served_dtype(arm, server.http_port, ready.model), scores)

    def _load(self, server: Server) -> OfferedLoad:
        return self.load.model_copy(update={"target": server.target(self.load.spoken)})

    def _run(self, load: OfferedLoad, run: RunConfig) -> LoadResult:
        return offered(self.generators, load, run, self.console)

    @contextlib.contextmanager
    def serving(self, arm: ServedArm) -> Iterator[Server]:
        """Start an arm's server, with hosts of its own if it has some, and end it with the block."""
        self._starts += 1
        folder = self.folder / f"{self._starts}"
        folder.mkdir()
        config = self.config
        with contextlib.ExitStack() as stack:
            count = arm.shards if config.hosts else None
            hosts = stack.enter_context(running_hosts(count, config.delay_ms)) if count else ()
            commands = server_commands(arm, config, self.snapshot, folder, hosts)
            log = commands[-1].log
            started = stack.enter_context(running(arm.name, commands, lambda: _why_not_ready(log)))
            ports = ports_in(log)
            assert ports is not None
            yield Server(*ports, started.process_ids)
            started.check()


def _why_not_ready(log: Path) -> str:
    if (ports := ports_in(log)) is None:
        return "it has not said where it serves"
    try:
        with urllib.request.urlopen(f"http://{HOST}:{ports[0]}/readyz", timeout=ASK_TIMEOUT_S):
            return ""
    except urllib.error.HTTPError as error:
        return error.read(LOG_TAIL_BYTES).decode("utf-8", "replace") or str(error)
    except OSError as error:
        return str(error)


def measure_rounds(
    config: CompareConfig, load: OfferedLoad, snapshot: Path, folder: Path, console: Console
) -> Measurements:
    """Measure all rounds.

    Before the first one the first arm's server is started and asked once, and that is thrown away: what the first
    start on a machine pays, reading files from the disk for example, would be in one arm alone.

    Raises:
        LoadError: a server ended, or did not get ready; arms disagree; hosts can't be made; a load can't be run.
    """
    first = config.arms[0]
    found: dict[ServedArm, list[ArmRound]] = {arm: [] for arm in config.arms}
    scores: dict[ServedArm, ArmScores] = {}
    with Generators(load.processes) as generators:
        measure = ArmMeasure(config, load, generators, snapshot, folder, console)
        line(console, f"rehearsal: {first.name}")
        measure.rehearse(first)
        for number in range(config.rounds):
            for arm in in_turn(config.arms, number):
                line(console, f"round {number + 1} of {config.rounds}: {arm.name}")
                of_arm, answered = measure.arm(arm, number)
                found[arm].append(of_arm)
                if answered is not None:
                    scores[arm] = answered
                    check_agreement(first, scores[first], arm, answered)
    expected = scores[first]
    return Measurements(found, expected.dtype, len(expected.scores), largest_difference(list(scores.values())))


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


def compared(config: CompareConfig, load: OfferedLoad, measurements: Measurements) -> Comparison:
    """Compute ratios to the first arm.

    Of requests at a rate, warm and cold: p50, p99 and p99.9 of all that were due, and right answers a second. Of a
    server that is kept busy: answers a second, and what one costs.

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
        _measures(config),
        title=f"{_listed(arm.name for arm in config.arms)}: {load.workload}",
        setup=_setup(config, load, measurements),
        invalid_because=_reasons(rounds),
        machine=run.machine,
        versions=run.versions,
        seed=config.seed,
    )


def _runs(of_arm: Sequence[ArmRound], phase: str) -> list[LoadResult]:
    return [getattr(one, phase) for one in of_arm]


def _measures(config: CompareConfig) -> list[Measure[ArmRound]]:
    found: list[Measure[ArmRound]] = []
    for phase in ("warm", "cold"):
        for name, percentile in _PERCENTILES.items():
            value = attrgetter(f"{phase}.latency_of_due.{percentile}")
            found.append(Measure(f"{name}, {phase}", "ms", "lower", value))
        throughput = attrgetter(f"{phase}.throughput")
        found.append(Measure(f"throughput at {config.rate:g}/s, {phase}", "/s", "higher", throughput))
    busy = f"{config.in_flight} in flight"
    return [
        *found,
        Measure(f"throughput, {busy}", "/s", "higher", lambda one: one.busy.requests_per_s),
        Measure(f"CPU of a request, {busy}", "ms", "lower", lambda one: one.busy.cpu_ms),
    ]


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
    rounds, dtype = measurements.rounds, measurements.dtype
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
        "dense model in": dtype if config.dtype == dtype else f"{dtype} ({config.dtype})",
        "same scores": f"of {measurements.checked_requests} requests, to {measurements.largest_difference:.2g}; "
        f"allowed is {TOLERANCES[dtype]:g}",
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


def _measured(config: CompareConfig, load: OfferedLoad, store: Path | None) -> Comparison:
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="shardrank-compare-") as temporary:
        folder = Path(temporary)
        with progress_bars() as bars:
            snapshot = compared_snapshot(config, load, store or folder / "store", bars)
        measurements = measure_rounds(config, load, snapshot, folder, console)
    return compared(config, load, measurements)

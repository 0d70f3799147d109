"""`shardrank demo`, from ratings to ranked films: every number is of what came back from the running server."""

from __future__ import annotations

import asyncio
import itertools
import json
import shlex
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from rich.console import Console

from loader.errors import ShardrankError
from loader.progress import Progress
from loader.snapshot.golden import GoldenRequests
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.reader import Snapshot
from loader.snapshot.tables import Frozen
from router.plan import Plan
from router.plan_file import PlanFile
from serving.cli.output import human_bytes, progress_bars, table_of
from serving.client import AsyncClient, Ragged, RetryPolicy
from serving.config import ServeConfig
from serving.errors import InternalError
from serving.fleet.config import FleetConfig
from serving.fleet.local_fleet import running_fleet
from serving.fleet.process import StopRequestedError, run_until_signalled
from serving.fleet.workers import WorkerPorts, connectable_host, reserved_ports
from serving.rank.service import RankingService
from serving.server import Listening, running_server
from serving.training.dataset import HISTORY_LIMIT, NO_FOLD, FilmsDataset
from serving.training.trainer import Expectation, TrainedVersion, auc, expectation, read_interactions, train_version
from serving.versions.loading import ModelSource, load_served_model
from shard_node.bags import Float32Array, Int64Array
from shard_node.cuda.card_set import CardSet, DeviceChoice

# Tables of at most this size go to every shard: small, because the demo's tables are. With the default of a real fleet
# nothing would be divided.
REPLICATE_BYTES = 4096
WARMUP_REQUESTS = 50
TIMEOUT_MS = 2000
LIKED_SHOWN = 3
TOP_FILMS = 10
MAX_CANDIDATES = 2000
MAX_ERROR_EXAMPLES = 5
_PASTED_IDS = 5


class DemoConfig(Frozen):
    """What `shardrank demo` was asked to do; its options say what each means, and check it."""

    movielens: Path | None = None
    ratings: int
    epochs: int | None = None
    seed: int
    store: Path | None = None
    shards: int
    cards: int
    device: str
    sharding: Literal["hash", "range", "table"]
    plan_file: Path | None = None
    local: bool
    host: str
    http_port: int
    grpc_port: int
    hot_rows_gb: float = 0.0
    hot_rows: Literal["learning", "static"] = "learning"


class DemoReport(Frozen):
    """What `--json` writes. Latencies are with one request in flight, after a warm-up, over every test request.

    The AUCs over the test part are of the float32 model in-process, of the scores that came over HTTP, and of scoring
    each film by its mean training label. `errors` were not answered with a score for each candidate; `float32_bytes`
    are the snapshot's rows unquantised.
    """

    source: str
    users: int
    films: int
    ratings: int
    test_ratings: int
    auc_fp32: float
    auc_served: float | None
    auc_item_mean: float
    max_score_diff: float | None
    scores_identical: bool
    requests: int
    errors: int
    error_examples: tuple[str, ...]
    http_p50_ms: float | None
    http_p99_ms: float | None
    grpc_p50_ms: float | None
    grpc_p99_ms: float | None
    snapshot_bytes: int
    float32_bytes: int
    shards: int
    cards: int
    sharding: str
    local: bool
    version: int
    dense_dtype: str
    seed: int
    stage_seconds: dict[str, float]


@dataclass(slots=True, eq=False)
class Answers:
    """What came back over one API: float32 [N] scores of all requests' candidates, NaN where a request failed.

    Latencies have the client's packing, but no warm-up; `requests` and `errors` have it.
    """

    scores: Float32Array
    latencies_ms: list[float] = field(default_factory=list)
    requests: int = 0
    errors: int = 0
    error_examples: list[str] = field(default_factory=list)
    versions: set[int] = field(default_factory=set)

    def percentile_ms(self, percent: float) -> float | None:
        """Return a percentile of the latencies; None if nothing was answered."""
        return float(np.percentile(self.latencies_ms, percent)) if self.latencies_ms else None

    def failed(self, error: Exception) -> None:
        """Count a failed request."""
        self.errors += 1
        if len(self.error_examples) < MAX_ERROR_EXAMPLES:
            self.error_examples.append(str(error))


def rank_arguments(request: GoldenRequests, spec: ModelSpec) -> dict[str, Any]:
    """Turn one request of the training, of a model without dense inputs, into arguments of `AsyncClient.rank`."""
    sides: dict[str, dict[str, Any]] = {"context": {}, "candidate": {}}
    for name, side in ((feature.name, feature.side) for feature in spec.features):
        ids = request.values[name]
        sides[side][name] = ids if side == "context" else Ragged(ids, request.lengths[name])
    return {"context": sides["context"], "candidates": sides["candidate"]}


async def rank_all(
    api: str,
    client: AsyncClient,
    model: str,
    requests: Sequence[dict[str, Any]],
    num_candidates: list[int],
    progress: Progress,
) -> Answers:
    """Rank every request (arguments of `AsyncClient.rank`) once, after a warm-up with the first ones."""
    answers = Answers(np.full(sum(num_candidates), np.nan, np.float32))
    schedule = [(index % len(num_candidates), False) for index in range(WARMUP_REQUESTS)]
    schedule += [(index, True) for index in range(len(num_candidates))]
    starts = np.cumsum([0, *num_candidates])
    for done, (index, counts) in enumerate(schedule, start=1):
        answers.requests += 1
        try:
            began = time.perf_counter()
            answer = await client.rank(model, **requests[index])
            seconds = time.perf_counter() - began
            if answer.scores.size != num_candidates[index]:
                raise InternalError(f"{answer.scores.size} scores for {num_candidates[index]} candidates")
        except ShardrankError as error:
            answers.failed(error)
        else:
            answers.versions.add(answer.version)
            if counts:
                answers.scores[starts[index] : starts[index + 1]] = answer.scores
                answers.latencies_ms.append(1000 * seconds)
        progress(f"ranking over {api}", done, len(schedule))
    return answers


@dataclass(frozen=True, slots=True)
class UsersFilms:
    """The position of a user, and of films: liked in training, latest first; not rated there, the most rated first."""

    dataset: FilmsDataset
    user: int
    history: Int64Array
    unseen: Int64Array

    @classmethod
    def of(cls, dataset: FilmsDataset, user: int) -> UsersFilms:
        """Gathers what a product would know of a user when it asks for a ranking."""
        data = dataset.interactions
        _, history = dataset.histories(np.array([user]), np.array([NO_FOLD]), HISTORY_LIMIT)
        users, films = data.user_index[dataset.train], data.film_index[dataset.train]
        popular_first = np.argsort(-np.bincount(films, minlength=data.films.ids.size), kind="stable")
        unseen = popular_first[~np.isin(popular_first, films[users == user])]
        return cls(dataset, user, history, unseen[:MAX_CANDIDATES])

    def body(self, most_ids: int | None = None) -> dict[str, Any]:
        """Write a rank request for the unseen films in its JSON form, with at most `most_ids` of a kind."""
        users, films = self.dataset.interactions.users, self.dataset.interactions.films
        unseen = self.unseen[:most_ids]
        context = {"user_id": [int(users.ids[self.user])], "history": films.ids[self.history[:most_ids]].tolist()}
        candidates = {"film_id": films.ids[unseen].tolist(), "genre": [films.genres_of(film) for film in unseen]}
        return {"context": {"sparse": context}, "candidates": {"sparse": candidates}}

    async def ask(self, client: AsyncClient, model: str) -> list[tuple[str, str, float]]:
        """Ask the running server for the user's top films: (title, genres, score). Raises ShardrankError."""
        films, top = self.dataset.interactions.films, []
        ids = {side: given["sparse"] for side, given in self.body().items()}
        answer = await client.rank(model, **ids, top_k=TOP_FILMS)
        for position in answer.order.tolist():
            film = self.unseen[position]
            genres = ", ".join(films.genre_names[genre] for genre in films.genres_of(film))
            top.append((films.titles[film], genres, float(answer.scores[position])))
        return top

    def request_lines(self, at: Listening, model: str) -> list[str]:
        """Write a short request as a `curl` and as a `grpcurl` command."""
        body = {**self.body(_PASTED_IDS), "timeout_ms": TIMEOUT_MS}
        message: dict[str, Any] = {"model": model, "timeout_ms": TIMEOUT_MS}
        for side in ("context", "candidates"):
            sparse = {name: {"ids": ids} for name, ids in body[side]["sparse"].items() if name != "genre"}
            message[side] = {"sparse": sparse}
        bags = body["candidates"]["sparse"]["genre"]
        message["candidates"]["sparse"]["genre"] = {
            "ids": list(itertools.chain(*bags)),
            "lengths": [len(bag) for bag in bags],
        }
        return [
            f"curl -s http://{at.host}:{at.http_port}/v1/models/{model}:rank -d {shlex.quote(json.dumps(body))}",
            f"grpcurl -plaintext -d {shlex.quote(json.dumps(message))} {at.host}:{at.grpc_port} "
            "shardrank.v1.RankingService/Rank",
        ]


class Ranked(NamedTuple):
    """What came back from the server; `top` is (title, genres, score) of the best of `films`."""

    http: Answers
    grpc: Answers
    top: list[tuple[str, str, float]]
    films: UsersFilms
    dense_dtype: str


def run_demo(config: DemoConfig, console: Console, *, once: bool, json_file: Path | None) -> int:
    """Run the demo. Returns the exit code: 0, or 1 if a request failed.

    With `once` it stops after the report, which also goes to `json_file`, rather than serve until a signal. Raises
    ShardrankError if a stage fails; for a port, a device or a file that can't be used, before the work.
    """
    with ExitStack() as stack:
        ports = stack.enter_context(reserved_ports(config.host, config.http_port, config.grpc_port, workers=1))
        if json_file is not None:
            # An older report stays as it is until there is a new one.
            try:
                json_file.open("a").close()
            except OSError as error:
                folder = json_file.parent
                problem = error.strerror if folder.is_dir() else f"there is no folder {str(folder)!r}"
                raise InternalError(f"--json {json_file}: {problem}") from error
        DeviceChoice.parse(config.device)
        # Shard nodes open cards of their own, and later.
        card_set = CardSet.open(config.device, config.cards) if config.local else None
        store = config.store or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shardrank-demo-")))
        seconds: dict[str, float] = {}
        began = time.monotonic()

        def on_stage(stage: str) -> None:
            seconds[stage] = round(time.monotonic() - began - sum(seconds.values()), 3)

        with progress_bars() as bars:
            interactions = read_interactions(config.movielens, config.ratings, config.seed)
            on_stage("read")
            version = train_version(
                interactions,
                store,
                seed=config.seed,
                epochs=config.epochs,
                bucketing="range" if config.sharding == "range" else "mixed",
                on_stage=on_stage,
                progress=bars,
            )
            expected = expectation(version)
            on_stage("expect")
        snapshot = Snapshot.open(version.folder, verify=False)
        file = None if config.plan_file is None else PlanFile.read(config.plan_file)
        plan = Plan.of_snapshot(snapshot, config.shards, config.sharding, config.cards, REPLICATE_BYTES, file)
        console.print(f"{plan.num_shards} shards, plan {plan.digest[:12]}", markup=False, highlight=False)

        async def serve() -> int:
            async with _serving(config, ports, card_set, version.folder) as at:
                on_stage("start")
                ranked = await _rank(version, expected, at)
                on_stage("rank")
                report = _report(config, version, expected, ranked, seconds)
                _show(console, ranked, report, json_file)
                if not once:
                    await _serve_on(console, version, ranked, at)
                return 1 if report.errors else 0

        try:
            return run_until_signalled(serve)
        except StopRequestedError:
            # During the report: not finished. Afterwards it was the way to end: `serve` returned then.
            return 130


@asynccontextmanager
async def _serving(
    config: DemoConfig, ports: WorkerPorts, card_set: CardSet | None, folder: Path
) -> AsyncIterator[Listening]:
    """Serve the snapshot while the block runs; the host is written as in a URL."""
    async with AsyncExitStack() as stack:
        with progress_bars() as bars:
            if config.local:
                source = ModelSource(
                    snapshot=folder,
                    cards=config.cards,
                    card_set=card_set,
                    sharding=config.sharding,
                    replicate_bytes=REPLICATE_BYTES,
                    plan=None if config.plan_file is None else PlanFile.read(config.plan_file),
                )
                service = RankingService()
                stack.push_async_callback(asyncio.to_thread, service.close)
                service.install(await asyncio.to_thread(load_served_model, source, service, bars))
                server = ServeConfig(host=config.host, http_port=ports.http, grpc_port=ports.grpc)
                await stack.enter_async_context(running_server(service, server))
            else:
                ready, total = itertools.count(1), config.shards + 2
                bars("starting processes", 0, total)
                # A registry of its own, gone with the demo: the store's may be that of a real fleet.
                registry = stack.enter_context(tempfile.TemporaryDirectory(prefix="shardrank-demo-"))
                model, version = folder.parent.name, int(folder.name)
                fleet = FleetConfig(
                    store=folder.parent.parent.resolve(),
                    models=(model,),
                    versions={model: version},
                    registry=registry,
                    shards=config.shards,
                    cards=config.cards,
                    sharding=config.sharding,
                    replicate_bytes=REPLICATE_BYTES,
                    plan_file=config.plan_file,
                    host=config.host,
                    device=config.device,
                    hot_rows_gb=config.hot_rows_gb,
                    hot_rows=config.hot_rows,
                )

                def on_ready(name: str) -> None:
                    bars("starting processes", next(ready), total)

                await stack.enter_async_context(running_fleet(fleet, on_ready, ports))
        host = connectable_host(config.host)
        yield Listening(f"[{host}]" if ":" in host else host, ports.http, ports.grpc)


async def _rank(version: TrainedVersion, expected: Expectation, at: Listening) -> Ranked:
    model, dataset = version.trained.spec.model, version.dataset
    requests, spec = expected.labelled.requests, version.trained.spec
    arguments = [rank_arguments(requests.request(index), spec) for index in range(requests.num_requests)]
    num_candidates: list[int] = requests.num_candidates.tolist()
    films = UsersFilms.of(dataset, int(dataset.interactions.user_index[expected.labelled.samples[0]]))
    # A request that fails is counted, so none is sent again.
    client_of = partial(AsyncClient, timeout_ms=TIMEOUT_MS, retry=RetryPolicy(max_attempts=1))
    async with (
        client_of(f"http://{at.host}:{at.http_port}") as http,
        client_of(f"grpc://{at.host}:{at.grpc_port}") as grpc,
    ):
        answers = {}
        for api, client in (("http", http), ("grpc", grpc)):
            with progress_bars() as bars:
                answers[api] = await rank_all(api, client, model, arguments, num_candidates, bars)
            if answers[api].versions - {int(version.folder.name)}:
                found = answers[api].versions
                raise InternalError(f"{api}: versions {found} answered, expected {version.folder.name}")
        answers["http"].requests += 1
        top = []
        try:
            top = await films.ask(http, model)
        except ShardrankError as error:
            answers["http"].failed(error)
        try:
            dense_dtype = (await http.describe(model)).dense_model.dtype
        except ShardrankError as error:
            raise InternalError(f"http: {error}") from error
    return Ranked(answers["http"], answers["grpc"], top, films, dense_dtype)


def _report(
    config: DemoConfig, version: TrainedVersion, expected: Expectation, ranked: Ranked, seconds: dict[str, float]
) -> DemoReport:
    data, snapshot = version.dataset.interactions, Snapshot.open(version.folder, verify=False)
    http, grpc = ranked.http, ranked.grpc
    answered = np.isfinite(http.scores)
    differences = np.abs(np.stack([http.scores, grpc.scores]) - expected.scores)
    return DemoReport(
        source=data.source,
        users=data.users.ids.size,
        films=data.films.ids.size,
        ratings=data.ratings.size,
        test_ratings=version.dataset.test.size,
        auc_fp32=expected.auc_fp32,
        auc_served=auc(expected.labelled.labels[answered], http.scores[answered]) if answered.any() else None,
        auc_item_mean=expected.auc_item_mean,
        max_score_diff=None if np.isnan(differences).all() else float(np.nanmax(differences)),
        scores_identical=bool(np.array_equal(http.scores, grpc.scores)),
        requests=http.requests + grpc.requests,
        errors=http.errors + grpc.errors,
        error_examples=(*http.error_examples, *grpc.error_examples),
        http_p50_ms=http.percentile_ms(50),
        http_p99_ms=http.percentile_ms(99),
        grpc_p50_ms=grpc.percentile_ms(50),
        grpc_p99_ms=grpc.percentile_ms(99),
        snapshot_bytes=snapshot.size_bytes,
        float32_bytes=snapshot.float32_bytes,
        version=int(version.folder.name),
        dense_dtype=ranked.dense_dtype,
        stage_seconds=dict(seconds),
        **config.model_dump(include={"shards", "cards", "sharding", "local", "seed"}),
    )


def _show(console: Console, ranked: Ranked, report: DemoReport, json_file: Path | None) -> None:
    films, data = ranked.films, ranked.films.dataset.interactions
    who = f"user {data.users.ids[films.user]} ({data.users.occupations[films.user]}, {data.users.ages[films.user]})"
    rows = [(place, title, genres, f"{score:.4f}") for place, (title, genres, score) in enumerate(ranked.top, start=1)]
    console.print(table_of(f"Films for {who}", ("#", "film", "genres", "#score"), rows))
    liked = "; ".join(data.films.titles[film] for film in films.history[:LIKED_SHOWN]) or "nothing yet"
    console.print(f"  liked lately: {liked}\n", markup=False, highlight=False)
    quality = (
        ("each film's mean label", _number(report.auc_item_mean, 4)),
        ("the float32 model, in this process", _number(report.auc_fp32, 4)),
        ("the running server, int8 rows", _number(report.auc_served, 4)),
    )
    console.print(table_of("Quality on held-out ratings", ("scores from", "#AUC"), quality))
    if report.max_score_diff is not None:
        same = "the same bits" if report.scores_identical else "DIFFERENT scores"
        console.print(f"  largest difference of a score: {report.max_score_diff:.4f}; HTTP and gRPC gave {same}\n")
    latency = (
        ("HTTP", _number(report.http_p50_ms, 2), _number(report.http_p99_ms, 2)),
        ("gRPC", _number(report.grpc_p50_ms, 2), _number(report.grpc_p99_ms, 2)),
    )
    console.print(table_of("Latency, one request in flight", ("API", "#p50 ms", "#p99 ms"), latency))
    where = "in this process" if report.local else f"on {report.shards} shards × {report.cards} cards"
    console.print(
        f"  {report.requests} requests, {report.errors} errors; version {report.version}, rows {where}; "
        f"snapshot {human_bytes(report.snapshot_bytes)}, its rows as float32 {human_bytes(report.float32_bytes)}"
    )
    for example in report.error_examples:
        console.print(f"  error: {example}", markup=False, highlight=False)
    if json_file is not None:
        json_file.write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


async def _serve_on(console: Console, version: TrainedVersion, ranked: Ranked, at: Listening) -> None:
    console.print("\nStill serving. Ask it yourself, or press Ctrl-C:\n")
    for line in ranked.films.request_lines(at, version.trained.spec.model):
        console.print(f"{line}\n", soft_wrap=True, markup=False, highlight=False)
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        # The report is complete, so this is the end that was asked for. Leaving the block stops the server.
        console.print("stopping")

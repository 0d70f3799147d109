"""`shardrank demo`, from ratings to ranked films: every number is of what came back from the running fleet."""

from __future__ import annotations

import asyncio
import itertools
import json
import shlex
import tempfile
import time
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from loader.errors import ShardrankError
from loader.progress import Progress
from loader.snapshot.golden import GoldenRequests
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.publishing import rows_bytes_of
from loader.snapshot.reader import Snapshot
from loader.snapshot.tables import Frozen
from serving.cli.output import print_document, progress_bars, stdout_console, table_of
from serving.cli.settings import Options
from serving.client import AsyncClient, Ragged, RetryPolicy
from serving.errors import InternalError
from serving.fleet.config import FleetConfig
from serving.fleet.local_fleet import LocalFleet, running_fleet
from serving.fleet.process import run_until_signalled
from serving.fleet.workers import connectable_host, reserved_ports
from serving.training.dataset import NO_FOLD, FilmsDataset, FilmsOptions
from serving.training.trainer import Expectation, TrainedVersion, auc, expectation, read_interactions, train_version
from shard_node.bags import Float32Array, Int64Array
from shard_node.cuda.card_set import DeviceChoice

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


class DemoReport(Frozen):
    """What `--json` writes. Latencies are with one request in flight, after a warm-up, over every test request.

    The AUCs over the test part are of the float32 model in-process, of the scores that came over HTTP, and of scoring
    each film by its mean training label. `errors` were not answered with a score for each candidate; `rows_bytes`
    are the snapshot's rows, `float32_bytes` the same unquantised, `snapshot_bytes` all of its files.
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
    rows_bytes: int
    float32_bytes: int
    snapshot_bytes: int
    shards: int
    cards: int
    sharding: str
    version: int
    seed: int


@dataclass(slots=True, eq=False)
class Answers:
    """What came back over one API: float32 [N] scores of all requests' candidates, NaN where a request failed.

    Latencies have the client's packing, but no warm-up; `requests` and `errors` have it.
    """

    scores: Float32Array
    latencies_ms: list[float] = field(default_factory=list)
    requests: int = 0
    errors: list[str] = field(default_factory=list)


def percentiles(values: list[float], p50: str, p99: str) -> dict[str, float | None]:
    """Return the 50th and 99th percentile by their names in a report; None without any value."""
    both = np.percentile(values, (50, 99)).tolist() if values else (None, None)
    return dict(zip((p50, p99), both, strict=True))


def rank_arguments(request: GoldenRequests, spec: ModelSpec) -> dict[str, Any]:
    """Turn one request of the training, of a model without dense inputs, into arguments of `AsyncClient.rank`."""
    sides: dict[str, dict[str, Any]] = {"context": {}, "candidate": {}}
    for name, side in ((feature.name, feature.side) for feature in spec.features):
        ids = request.values[name]
        sides[side][name] = ids if side == "context" else Ragged(ids, request.lengths[name])
    return {"context": sides["context"], "candidates": sides["candidate"]}


async def rank_all(
    api: str, client: AsyncClient, version: TrainedVersion, requests: GoldenRequests, progress: Progress
) -> Answers:
    """Rank every request once, after a warm-up with the last ones."""
    spec, counts, expected = version.trained.spec, requests.num_candidates, int(version.folder.name)
    arguments = [rank_arguments(requests.request(index), spec) for index in range(requests.num_requests)]
    starts, answers = np.cumsum([0, *counts]), Answers(np.full(int(counts.sum()), np.nan, np.float32))
    for number in range(-WARMUP_REQUESTS, len(arguments)):
        index = number % len(arguments)
        answers.requests += 1
        try:
            began = time.perf_counter()
            answer = await client.rank(spec.model, **arguments[index])
            seconds = time.perf_counter() - began
            if (answer.scores.size, answer.version) != (counts[index], expected):
                got = f"{answer.scores.size} scores of version {answer.version}"
                raise InternalError(f"{got} for {counts[index]} candidates and version {expected}")
        except ShardrankError as error:
            answers.errors.append(str(error))
        else:
            if number >= 0:
                answers.scores[starts[index] : starts[index + 1]] = answer.scores
                answers.latencies_ms.append(1000 * seconds)
        progress(f"ranking over {api}", answers.requests, WARMUP_REQUESTS + len(arguments))
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
        _, history = dataset.histories(np.array([user]), np.array([NO_FOLD]))
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

    async def rank(self, client: AsyncClient, model: str) -> list[tuple[str, str, float]]:
        """Ask the running fleet for the user's top films: (title, genres, score). Raises ShardrankError."""
        films, top = self.dataset.interactions.films, []
        ids = {side: given["sparse"] for side, given in self.body().items()}
        answer = await client.rank(model, **ids, top_k=TOP_FILMS)
        for position in answer.order.tolist():
            film = self.unseen[position]
            genres = ", ".join(films.genre_names[genre] for genre in films.genres_of(film))
            top.append((films.titles[film], genres, float(answer.scores[position])))
        return top


def run_demo(options: Options, fleet: FleetConfig, *, once: bool, json_file: Path | None) -> int:
    """Train, serve by a fleet of these settings, rank and report. Returns the exit code: 0, or 1 if a request failed.

    `options` are those of `shardrank demo`, which say what is trained. With `once` it stops after the report, which
    also goes to `json_file`, rather than serve until a signal. Raises ShardrankError if a stage fails; for a port or a
    device that can't be used, before the work.
    """
    with ExitStack() as stack:
        ports = stack.enter_context(reserved_ports(fleet, workers=1))
        DeviceChoice.parse(fleet.device)
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shardrank-demo-")))
        with progress_bars() as bars:
            version = train_version(
                read_interactions(options["movielens"], options["ratings"], options["seed"]),
                options["store"] or temporary / "store",
                seed=options["seed"],
                epochs=options["epochs"],
                options=FilmsOptions(bucketing="range" if fleet.sharding == "range" else "mixed"),
                progress=bars,
            )
        expected, folder = expectation(version), version.folder
        # A registry of its own, gone with the demo: the store's may be that of a real fleet.
        served = {"store": folder.parent.parent.resolve(), "registry": str(temporary / "registry")}
        versions = {"models": (folder.parent.name,), "versions": {folder.parent.name: int(folder.name)}}
        fleet = fleet.model_copy(update={**served, **versions, "replicate_bytes": REPLICATE_BYTES})

        async def serve() -> int:
            async with AsyncExitStack() as running:
                with progress_bars() as bars:
                    ready, total = itertools.count(1), fleet.shards + 2
                    bars("starting processes", 0, total)
                    starting = running_fleet(fleet, lambda name: bars("starting processes", next(ready), total), ports)
                    at = await running.enter_async_context(starting)
                films, report = await _rank(fleet, version, expected, at, json_file)
                if not once:
                    await _serve_on(films, url_of(at, "http"), version.trained.spec.model)
                return 1 if report.errors else 0

        code = run_until_signalled(serve)
        # During the report: not finished. Afterwards it was the way to end: `serve` returned then.
        return 130 if code is None else code


def url_of(at: LocalFleet, scheme: Literal["http", "grpc"]) -> str:
    """Return where a fleet serves, as a client takes it."""
    host = connectable_host(at.ports.host)
    port = at.ports.http_port if scheme == "http" else at.ports.grpc_port
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


async def _rank(
    fleet: FleetConfig, version: TrainedVersion, expected: Expectation, at: LocalFleet, json_file: Path | None
) -> tuple[UsersFilms, DemoReport]:
    """Rank the test part over both APIs; show what came back, and write it."""
    dataset, model = version.dataset, version.trained.spec.model
    films = UsersFilms.of(dataset, int(dataset.interactions.user_index[expected.labelled.samples[0]]))
    answers: dict[str, Answers] = {}
    top: list[tuple[str, str, float]] = []
    for scheme in get_args(Literal["http", "grpc"]):
        # A request that fails is counted, so none is sent again.
        async with AsyncClient(url_of(at, scheme), timeout_ms=TIMEOUT_MS, retry=RetryPolicy(max_attempts=1)) as client:
            with progress_bars() as bars:
                answers[scheme] = await rank_all(scheme, client, version, expected.labelled.requests, bars)
            if scheme == "http":
                answers[scheme].requests += 1
                try:
                    top = await films.rank(client, model)
                except ShardrankError as error:
                    answers[scheme].errors.append(str(error))
    report = _report(fleet, version, expected, **answers)
    _show(films, top, report, json_file)
    return films, report


def _report(
    fleet: FleetConfig, version: TrainedVersion, expected: Expectation, http: Answers, grpc: Answers
) -> DemoReport:
    data, snapshot = version.dataset.interactions, Snapshot.open(version.folder, verify=False)
    answered = np.isfinite(http.scores)
    differences = np.abs(np.stack([http.scores, grpc.scores]) - expected.scores)
    errors = [*http.errors, *grpc.errors]
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
        errors=len(errors),
        error_examples=tuple(errors[:MAX_ERROR_EXAMPLES]),
        rows_bytes=rows_bytes_of(snapshot.spec),
        float32_bytes=snapshot.float32_bytes,
        snapshot_bytes=snapshot.size_bytes,
        version=int(version.folder.name),
        seed=int(snapshot.manifest.metadata["seed"]),
        **percentiles(http.latencies_ms, "http_p50_ms", "http_p99_ms"),
        **percentiles(grpc.latencies_ms, "grpc_p50_ms", "grpc_p99_ms"),
        **fleet.model_dump(include={"shards", "cards", "sharding"}),
    )


def _show(films: UsersFilms, top: list[tuple[str, str, float]], report: DemoReport, json_file: Path | None) -> None:
    data, console = films.dataset.interactions, stdout_console()
    who = f"user {data.users.ids[films.user]} ({data.users.occupations[films.user]}, {data.users.ages[films.user]})"
    rows = [(place, title, genres, f"{score:.4f}") for place, (title, genres, score) in enumerate(top, start=1)]
    console.print(table_of(f"Films for {who}", ("#", "film", "genres", "#score"), rows))
    liked = "; ".join(data.films.titles[film] for film in films.history[:LIKED_SHOWN]) or "nothing yet"
    console.print(f"  liked lately: {liked}\n", markup=False, highlight=False)
    quality = (
        ("each film's mean label", f"{report.auc_item_mean:.4f}"),
        ("the float32 model, in this process", f"{report.auc_fp32:.4f}"),
        ("the running fleet, int8 rows", "-" if report.auc_served is None else f"{report.auc_served:.4f}"),
    )
    console.print(table_of("Quality on held-out ratings", ("scores from", "#AUC"), quality))
    print_document(report.model_dump(exclude={name for name in DemoReport.model_fields if name.startswith("auc_")}))
    if json_file is not None:
        json_file.write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")


async def _serve_on(films: UsersFilms, url: str, model: str) -> None:
    """Print a short request as a command, and serve until a signal."""
    body = json.dumps({**films.body(_PASTED_IDS), "timeout_ms": TIMEOUT_MS})
    console = stdout_console()
    console.print("\nStill serving. Ask it yourself, or press Ctrl-C:\n")
    line = f"curl -s {url}/v1/models/{model}:rank -d {shlex.quote(body)}\n"
    console.print(line, soft_wrap=True, markup=False, highlight=False)
    await until_stopped()


async def until_stopped() -> None:
    """Wait for a signal, once the report is complete: then it is the end that was asked for."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        # Leaving the block stops the fleet.
        stdout_console().print("stopping")

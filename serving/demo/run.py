"""The demo from beginning to end."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from loader.progress import Progress
from router.plan import Plan
from serving.cli.fleet import placement_line
from serving.cli.output import progress_bars
from serving.client import Client, ClientError, RetryPolicy
from serving.demo.config import DemoConfig
from serving.demo.errors import DemoError, RankCallError
from serving.demo.local import local_server
from serving.demo.measure import Measured, measure, rank_arguments
from serving.demo.prepare import (
    Expectation,
    Stopwatch,
    TrainedVersion,
    bucketing_for,
    expectation,
    read_interactions,
    snapshot_sizes,
    train_version,
)
from serving.demo.report import DemoReport, make_report
from serving.demo.show import print_report, print_top_films
from serving.demo.top_films import (
    TopFilm,
    UsersFilms,
    curl_line,
    films_of_user,
    grpcurl_line,
    liked_titles,
    rank_top_films,
    short_request,
)
from serving.fleet.local_fleet import FleetConfig, WorkerPorts, held_ports, running_fleet
from serving.fleet.process import StopRequestedError, run_until_signalled
from serving.training.requests import evaluation_json
from shard_node.cuda.card_set import CardSet
from shard_node.cuda.device_choice import DeviceChoice


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where the demo's server answers."""

    host: str
    http_port: int
    grpc_port: int


@dataclass(frozen=True, slots=True)
class Ranked:
    """What came back from the server."""

    http: Measured
    grpc: Measured
    top: list[TopFilm]
    films: UsersFilms
    dense_dtype: str


def run_demo(config: DemoConfig, console: Console, *, once: bool, json_file: Path | None) -> int:
    """Runs the demo. Returns the exit code: 0, or 1 if a request failed.

    Args:
        config: what to do.
        console: where to print.
        once: stop after the report, rather than serve until a signal.
        json_file: where to write the report.

    Raises:
        ShardrankError: if a stage fails. A port that is taken, a device that can't be used or a file that can't be
            written is told before the work.
    """
    stopwatch = Stopwatch()
    with ExitStack() as stack:
        ports = stack.enter_context(held_ports(config.host, config.http_port, config.grpc_port, workers=1))
        if json_file is not None:
            _check_writable(json_file)
        card_set = _open_card_set(config)
        store = config.store or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shardrank-demo-")))
        with progress_bars() as bars:
            with stopwatch.stage("read"):
                interactions = read_interactions(config.movielens, config.ratings, config.seed)
            version = train_version(
                interactions,
                store,
                seed=config.seed,
                epochs=config.epochs,
                bucketing=bucketing_for(config),
                stopwatch=stopwatch,
                progress=bars,
            )
            with stopwatch.stage("expect"):
                expected = expectation(version)
        plan = Plan.make(version.trained.spec, config.shards, config.sharding, config.cards, config.replicate_bytes)
        console.print(placement_line(plan), markup=False, highlight=False, soft_wrap=True)
        try:
            return run_until_signalled(
                lambda: _serve_and_rank(config, ports, card_set, version, expected, stopwatch, console, once, json_file)
            )
        except StopRequestedError:
            # During the report: not finished. Afterwards it was the way to end: `_serve_and_rank` returned then.
            return 130


def _open_card_set(config: DemoConfig) -> CardSet | None:
    """The cards of rows in this process. Raises as `CardSet.open`; shard nodes open cards of their own, and later."""
    if config.local:
        return CardSet.open(config.device, config.cards)
    DeviceChoice.parse(config.device)
    return None


def _check_writable(json_file: Path) -> None:
    """Raises DemoError. An older report stays as it is until there is a new one."""
    try:
        with json_file.open("a"):
            pass
    except OSError as error:
        folder = json_file.parent
        problem = error.strerror if folder.is_dir() else f"there is no folder {str(folder)!r}"
        raise DemoError(f"--json {json_file}: {problem}") from error


async def _serve_and_rank(
    config: DemoConfig,
    ports: WorkerPorts,
    card_set: CardSet | None,
    version: TrainedVersion,
    expected: Expectation,
    stopwatch: Stopwatch,
    console: Console,
    once: bool,
    json_file: Path | None,
) -> int:
    start = time.monotonic()
    async with _serving(config, ports, card_set, version.folder) as endpoints:
        stopwatch.seconds["start"] = round(time.monotonic() - start, 3)
        with stopwatch.stage("rank"):
            ranked = await _in_thread(lambda stop: _rank(config, version, expected, endpoints, stop))
        report = _report(config, version, expected, ranked, stopwatch)
        _show(console, version, ranked, report, json_file)
        if not once:
            await _serve_on(console, config, version, ranked, endpoints)
        return 1 if report.errors else 0


def _report(
    config: DemoConfig, version: TrainedVersion, expected: Expectation, ranked: Ranked, stopwatch: Stopwatch
) -> DemoReport:
    snapshot_bytes, float32_bytes = snapshot_sizes(version.folder)
    data = version.dataset.interactions
    return make_report(
        config,
        expected,
        ranked.http,
        ranked.grpc,
        source=data.source,
        users=data.users.ids.size,
        films=data.films.ids.size,
        ratings=data.num_ratings,
        test_ratings=version.dataset.test.size,
        snapshot_bytes=snapshot_bytes,
        float32_bytes=float32_bytes,
        version=int(version.folder.name),
        dense_dtype=ranked.dense_dtype,
        stage_seconds=dict(stopwatch.seconds),
    )


async def _in_thread(work: Callable[[threading.Event], Ranked]) -> Ranked:
    """Runs blocking work beside the loop, which keeps watching the fleet; a cancelled wait stops the work as well."""
    stop = threading.Event()
    running = asyncio.create_task(asyncio.to_thread(work, stop))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.gather(running, return_exceptions=True)
        raise


def _rank(
    config: DemoConfig, version: TrainedVersion, expected: Expectation, endpoints: Endpoints, stop: threading.Event
) -> Ranked:
    spec = version.trained.spec
    documents = [body for body, _ in evaluation_json(expected.labelled, spec, version.trained.vocabularies)]
    requests = [rank_arguments(document) for document in documents]
    counts: list[int] = expected.requests.num_candidates.tolist()
    films = films_of_user(version.dataset, int(version.dataset.interactions.user_index[expected.labelled.samples[0]]))
    host = f"[{endpoints.host}]" if ":" in endpoints.host else endpoints.host
    expected_version, warmup = int(version.folder.name), config.warmup_requests
    # A request that fails is counted, so none is sent again.
    client_of = partial(Client, timeout_ms=config.timeout_ms, retry=RetryPolicy(max_attempts=1))

    def over(api: str, client: Client, progress: Progress) -> Measured:
        measured = measure(
            api, client, spec.model, requests, counts, warmup_requests=warmup, stop=stop, progress=progress
        )
        if measured.versions - {expected_version}:
            raise RankCallError(f"{api}: versions {measured.versions} answered, expected {expected_version}")
        return measured

    with (
        progress_bars() as bars,
        client_of(f"http://{host}:{endpoints.http_port}") as http,
        client_of(f"grpc://{host}:{endpoints.grpc_port}") as grpc,
    ):
        over_http, over_grpc = over("http", http, bars), over("grpc", grpc, bars)
        over_http.requests += 1
        try:
            top = rank_top_films(http, spec.model, version.dataset, films)
        except ClientError as error:
            over_http.failed(error)
            top = []
        try:
            dense_dtype = http.describe(spec.model).dense_model.dtype
        except ClientError as error:
            raise RankCallError(f"http: {error}") from error
    return Ranked(over_http, over_grpc, top, films, dense_dtype)


def _show(
    console: Console, version: TrainedVersion, ranked: Ranked, report: DemoReport, json_file: Path | None
) -> None:
    users = version.dataset.interactions.users
    user = ranked.films.user
    who = f"user {users.ids[user]} ({users.occupations[user]}, {users.ages[user]})"
    print_top_films(console, who, liked_titles(version.dataset, ranked.films), ranked.top)
    print_report(console, report)
    if json_file is not None:
        json_file.write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")


async def _serve_on(
    console: Console, config: DemoConfig, version: TrainedVersion, ranked: Ranked, endpoints: Endpoints
) -> None:
    """Prints how to ask, and serves until a signal."""
    model = version.trained.spec.model
    document = short_request(version.dataset, ranked.films, config.timeout_ms)
    console.print("\nStill serving. Ask it yourself, or press Ctrl-C:\n")
    for line in (
        curl_line(endpoints.host, endpoints.http_port, model, document),
        grpcurl_line(endpoints.host, endpoints.grpc_port, model, document),
    ):
        console.print(f"{line}\n", soft_wrap=True, markup=False, highlight=False)
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        # The report is complete, so this is the end that was asked for. Leaving the block stops the server.
        console.print("stopping")


def _fleet(config: DemoConfig, folder: Path, registry: str) -> FleetConfig:
    return FleetConfig(
        store=folder.parent.parent.resolve(),
        models=(folder.parent.name,),
        versions={folder.parent.name: int(folder.name)},
        registry=registry,
        shards=config.shards,
        cards=config.cards,
        sharding=config.sharding,
        replicate_bytes=config.replicate_bytes,
        host=config.host,
        http_port=config.http_port,
        grpc_port=config.grpc_port,
        shard_node_arguments=("--device", config.device),
    )


@asynccontextmanager
async def _serving(
    config: DemoConfig, ports: WorkerPorts, card_set: CardSet | None, folder: Path
) -> AsyncIterator[Endpoints]:
    with ExitStack() as starting:
        bars = starting.enter_context(progress_bars())
        if config.local:
            async with local_server(config, folder, card_set, ports, bars) as listening:
                starting.close()
                yield Endpoints(listening.host, listening.http_port, listening.grpc_port)
            return
        total, ready = config.shards + 2, 0

        def on_ready(name: str) -> None:
            nonlocal ready
            ready += 1
            bars("starting processes", ready, total)

        bars("starting processes", 0, total)
        # A registry of its own, gone with the demo: the store's may be that of a real fleet.
        with tempfile.TemporaryDirectory(prefix="shardrank-demo-") as registry:
            async with running_fleet(_fleet(config, folder, registry), on_ready, ports) as running:
                starting.close()
                yield Endpoints(running.host, running.http_port, running.grpc_port)

"""`shardrank demo --online`: a fleet that is fed while it serves, beside a copy of its model that stays as it is.

Ratings come in order of time. Each is scored by both models over HTTP before the workers may read it, so that the
difference of their AUC is what fresh rows are worth.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path

import numpy as np

from loader.errors import ShardrankError
from loader.registry import open_registry
from loader.registry.fleet import FleetRegistry, Quality
from loader.snapshot.tables import Frozen
from serving.cli.output import print_document, progress_bars, stdout_console
from serving.cli.settings import Options
from serving.client import AsyncClient, Ragged, RetryPolicy
from serving.demo import TIMEOUT_MS, percentiles, until_stopped, url_of
from serving.fleet.config import FleetConfig
from serving.fleet.local_fleet import running_fleet
from serving.fleet.process import run_until_signalled
from serving.training.dataset import TrainingError
from serving.training.fleet_feed import FeedConfig, FleetFeed
from serving.training.online import OnlineTraining, running_training
from serving.training.online_model import OnlineConfig
from serving.training.rating_stream import Ratings, labels_of, read_ratings
from serving.training.trainer import auc
from shard_node.bags import Float32Array

FRESH, FROZEN = "ratings", "ratings-frozen"
RECENT = 5000
QUALITY_TTL_S = 15.0
ANNOUNCE_S = 1.0
MAX_IN_FLIGHT = 16
POLL_S = 0.02
STRANGER = -1
"""A user that never comes: what its scores are, those of a user without a row are."""


class OnlineDemoReport(Frozen):
    """What `--json` writes. AUCs are of the same ratings, each scored before it was learned.

    `seconds_to_score` are from the moment in which a new user's first rating could be read by the workers until the
    served scores of that user differ from those of an unknown one; `unseen_users` got no row within 15 s.
    """

    ratings: int
    scored: int
    auc: dict[str, float]
    errors: int
    error_examples: tuple[str, ...]
    request_p50_ms: float
    request_p99_ms: float
    seconds_to_score_p50: float | None
    seconds_to_score_p99: float | None
    unseen_users: int
    worker_steps: int
    restarts: dict[str, int]


class LiveScores:
    """Scores of ratings by several models of one fleet, in the order of the ratings; NaN where a request failed."""

    def __init__(self, client: AsyncClient, models: Sequence[str]) -> None:
        self._client, self.models, self._in_flight = client, models, asyncio.Semaphore(MAX_IN_FLIGHT)
        self._scores: dict[str, list[Float32Array]] = {model: [] for model in models}
        self._labels: list[Float32Array] = []
        self.latencies_ms: list[float] = []
        self.seconds_to_score: list[float] = []
        self.errors: list[str] = []
        self.unseen = 0

    async def score(self, ratings: Ratings) -> None:
        """Score ratings by each model, with a request for each user."""
        order = np.argsort(ratings["user"], kind="stable")
        users, starts = np.unique(ratings["user"][order], return_index=True)
        groups = np.split(order, starts[1:])
        for model in self.models:
            scores = np.full(ratings.size, np.nan, np.float32)
            answers = (self._rank(model, user, ratings["film"][of]) for user, of in zip(users, groups, strict=True))
            for of, answer in zip(groups, await asyncio.gather(*answers), strict=True):
                scores[of] = answer
            self._scores[model].append(scores)
        self._labels.append(labels_of(ratings))

    async def _rank(self, model: str, user: int, films: np.ndarray, *, is_timed: bool = True) -> Float32Array | float:
        candidates = {"film_id": Ragged(films, np.ones(films.size, np.int32))}
        async with self._in_flight:
            started_at = time.perf_counter()
            try:
                answer = await self._client.rank(model, context={"user_id": np.array([user])}, candidates=candidates)
            except ShardrankError as error:
                self.errors.append(f"{model}: {error}")
                return np.nan
            if is_timed:
                self.latencies_ms.append(1000 * (time.perf_counter() - started_at))
            return answer.scores

    async def watch(self, model: str, user: int, film: int) -> None:
        """Wait until a user has a row, and note the seconds that it took; count it as unseen if it gets none."""
        started_at, films = time.monotonic(), np.array([film])
        while time.monotonic() - started_at < QUALITY_TTL_S:
            # What changes for all users between two requests is no row of this one's.
            users = (STRANGER, user, STRANGER)
            before, known, after = [await self._rank(model, each, films, is_timed=False) for each in users]
            if np.isfinite(known).all() and np.array_equal(before, after) and not np.array_equal(known, before):
                self.seconds_to_score.append(time.monotonic() - started_at)
                return
            await asyncio.sleep(POLL_S)
        # The last ratings are no step of all workers, and are not learned.
        self.unseen += 1

    def auc(self, model: str, last: int | None = None) -> float:
        """Return the area under the ROC curve of all scores, or the last ones. Raises TrainingError without any."""
        labels, scores = (np.concatenate(parts)[-(last or 0) :] for parts in (self._labels, self._scores[model]))
        is_there = np.isfinite(scores)
        return auc(labels[is_there], scores[is_there])

    def quality(self, model: str) -> Quality:
        """Return what the status page shows. Raises as `auc`."""
        return Quality(model=model, auc=self.auc(model), recent_auc=self.auc(model, RECENT), scored=self.scored)

    @property
    def scored(self) -> int:
        """Count the ratings."""
        return sum(labels.size for labels in self._labels)


async def replay(
    training: OnlineTraining,
    live: LiveScores,
    ratings: Ratings,
    *,
    chunk: int,
    ratings_per_s: float,
    on_chunk: Callable[[int], Awaitable[None]],
) -> None:
    """Score ratings, then append them to the workers' stream, a chunk at a time and so many a second.

    The first model is the one that is fed. `on_chunk` is called after each chunk, with how many ratings have come.
    """
    known = set(np.unique(training.stream.read_now(0, len(training.stream))["user"]).tolist())
    started_at, watching = time.monotonic(), set[asyncio.Task[None]]()
    for begin in range(0, ratings.size, chunk):
        some = ratings[begin : begin + chunk]
        await live.score(some)
        training.stream.append(some)
        new = [at for at, user in enumerate(some["user"].tolist()) if user not in known]
        known |= set(some["user"].tolist())
        if new and len(watching) < 4:
            task = asyncio.create_task(live.watch(live.models[0], *some[["user", "film"]][new[0]].tolist()))
            watching.add(task)
            task.add_done_callback(watching.discard)
        await on_chunk(begin + some.size)
        await asyncio.sleep(max(0.0, started_at + (begin + some.size) / ratings_per_s - time.monotonic()))
    if watching:
        await asyncio.wait(watching)


def run_online_demo(options: Options, fleet: FleetConfig, *, once: bool, json_file: Path | None) -> int:
    """Train online, serve by a fleet of these settings, and report. Returns as `serving.demo.run_demo`."""
    ratings = read_ratings(options["movielens"], options["ratings"], options["seed"])
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shardrank-demo-")))
        store = (options["store"] or folder / "models").resolve()
        served = {"store": store, "registry": str(folder / "registry"), "models": (FRESH, FROZEN), "replicas": 2}
        fleet = fleet.model_copy(update={**served, "replicate_bytes": 0, "admin_port": 0})
        config = OnlineConfig(folder=folder / "online", model=FRESH, seed=options["seed"], write_dense_s=1.0)

        async def run() -> int:
            async with AsyncExitStack() as running:
                report = await _run(config, fleet, ratings, options["ratings_per_s"], running)
                print_document(report.model_dump())
                if json_file is not None:
                    await asyncio.to_thread(json_file.write_text, report.model_dump_json(indent=2) + "\n", "utf-8")
                if not once:
                    stdout_console().print("\nStill serving. Press Ctrl-C to stop.")
                    await until_stopped()
                return 1 if report.errors else 0

        code = run_until_signalled(run)
        return 130 if code is None else code


async def _run(
    config: OnlineConfig, fleet: FleetConfig, ratings: Ratings, ratings_per_s: float, running: AsyncExitStack
) -> OnlineDemoReport:
    """Train on a fifth of the ratings, serve what that comes to twice, and go on with one of them."""
    per_step = config.workers * config.batch
    learned = ratings.size // 5 // per_step * per_step
    settings = {"publish_registry": fleet.registry, "publish_rows_s": 0.5}
    assert fleet.registry is not None
    assert isinstance(fleet.store, Path)
    ready = itertools.count(1)
    with progress_bars() as bars:
        total = config.servers + config.workers + fleet.shards * 2 + 2
        on_ready = lambda name: bars("starting processes", next(ready), total)  # noqa: E731
        training = await running.enter_async_context(running_training(config, settings, on_ready))
        training.stream.append(ratings[:learned])
        feed = FeedConfig(store=fleet.store, registry=fleet.registry, publish_dense_s=1.0)
        feeding = FleetFeed(training, feed)
        running.push_async_callback(feeding.close)
        await feeding.until_learned(learned // per_step)
        for model in (FRESH, FROZEN):
            await feeding.export(model)
        at = await running.enter_async_context(running_fleet(fleet, on_ready))
    page = f"http://{at.ports.host}:{at.ports.admin_port}/"
    stdout_console().print(f"AUC of {FRESH}, and of {FROZEN} beside it, live: {page}", soft_wrap=True)
    registry = FleetRegistry(open_registry(fleet.registry))
    running.push_async_callback(registry.registry.close)
    client = AsyncClient(url_of(at, "http"), timeout_ms=TIMEOUT_MS, retry=RetryPolicy(max_attempts=1))
    live, ending = LiveScores(await running.enter_async_context(client), (FRESH, FROZEN)), asyncio.Event()
    task = asyncio.create_task(feeding.run(ending))
    announced_at = -ANNOUNCE_S
    with progress_bars() as bars:

        async def on_chunk(count: int) -> None:
            nonlocal announced_at
            bars("ratings", count, ratings.size - learned)
            # An AUC is of all ratings so far: with each chunk it would be the square of their number.
            if time.monotonic() - announced_at < ANNOUNCE_S:
                return
            for model in live.models:
                # Of the first ones all may be liked, or none.
                with suppress(TrainingError):
                    quality = await asyncio.to_thread(live.quality, model)
                    await registry.announce_quality(quality, QUALITY_TTL_S)
            announced_at = time.monotonic()

        await replay(training, live, ratings[learned:], chunk=200, ratings_per_s=ratings_per_s, on_chunk=on_chunk)
    training.stream.end()
    trained = await training.wait()
    ending.set()
    await task
    return report_of(live, trained.step, trained.restarts, ratings.size)


def report_of(live: LiveScores, steps: int, restarts: Mapping[str, int], ratings: int) -> OnlineDemoReport:
    """Put together what was measured."""
    return OnlineDemoReport(
        ratings=ratings,
        scored=live.scored,
        auc={model: live.auc(model) for model in live.models},
        errors=len(live.errors),
        error_examples=tuple(live.errors[:5]),
        unseen_users=live.unseen,
        worker_steps=steps,
        restarts=dict(restarts),
        **percentiles(live.latencies_ms, "request_p50_ms", "request_p99_ms"),
        **percentiles(live.seconds_to_score, "seconds_to_score_p50", "seconds_to_score_p99"),
    )

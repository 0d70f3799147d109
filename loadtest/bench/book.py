"""`bench hot-rows --book` and `bench levers --book`: the textbook's draw, and its practical example measured."""

from __future__ import annotations

import asyncio
import bisect
import itertools
import random
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from loader.snapshot.publishing import rows_bytes_of
from loadtest.bench import harness
from loadtest.compare import wire_bytes
from loadtest.errors import LoadError
from loadtest.servers import Server, summed
from router.hot_rows import HotSet
from router.plan import table_bytes
from router.planning.inputs import catalog_model
from serving.cli import options as opts
from serving.cli.output import progress_bars
from serving.client import AsyncClient
from serving.demo import rank_all, url_of
from serving.fleet.config import FleetConfig
from serving.fleet.local_fleet import running_fleet
from serving.training import trainer
from serving.training.dataset import CROSSES, FilmsOptions
from shard_node.bags import Bags, Int64Array, TableLayout

LOOKUPS, HEAD, HEAD_SHARE, EXPONENT, DRAWN = 65_536 * 40, 5_000, 0.85, 1.1, 20_000
"""Of a step; rows that are drawn by the power law, and how many of the lookups; lookups that are drawn."""
LINK_GB_PER_S = 100.0
CACHED = (100, 1_000, 5_000)


def drawn_rows(rows: int, exponent: float = EXPONENT) -> list[int]:
    """Draw the textbook's rows of a table, by Python's generator with seed 0, in its order."""
    draw, sums = random.Random(0), list(itertools.accumulate(r**-exponent for r in range(1, HEAD + 1)))
    drawn = []
    for _ in range(DRAWN):
        row = bisect.bisect_left(sums, draw.random() * sums[-1]) if draw.random() < HEAD_SHARE else HEAD
        drawn.append(row if row < HEAD else draw.randint(HEAD, rows - 1))
    return drawn


def lru_hits(rows: list[int], capacity: int) -> int:
    """Count the hits of a cache of so many rows that inserts each miss in place of the least recently used."""
    read = lru_cache(capacity)(lambda row: row)
    for row in rows:
        read(row)
    return read.cache_info().hits


def hot_hits(layout: TableLayout, rows: Int64Array, count: int) -> int:
    """Count the lookups that a router's `HotSet` of the first rows of a table answers."""
    bag = Bags.from_lengths(np.zeros(1, np.int32), np.ones(1, np.int64), np.array([rows.size]), rows)
    return int(HotSet(layout, np.arange(count)).find(bag).is_hit.sum())


book_option = opts.switch("--book", "The textbook's; there is no other.", required=True, expose_value=False)
DRAW_MEASURES = (
    harness.Measure("hit rate", "of 1", "higher"),
    harness.Measure("moved", "MB"),
    harness.Measure("time", "ms"),
    harness.Measure("LRU hit rate", "of 1", "higher"),
)


@harness.bench_command
@book_option
def hot_rows(bench: harness.Bench) -> None:
    """Count the hits of hot rows, and of an LRU cache, in the textbook's draw of 20,000 lookups; a second.

    Hits are those of the index that routers have. Bytes are those of a step of 65,536 samples of 40 lookups, of float32
    rows of 128 that are missed, and their time is at 100 GB/s. The draw is always the same, so there is one round.

    Examples:
      shardrank loadtest bench hot-rows --book
    """
    spec, _ = catalog_model("textbook", "fp32")
    table, layout = spec.tables[0], TableLayout.of(spec)
    rows, bench.rounds = drawn_rows(table.num_embeddings), 1

    def measure(count: int, number: int) -> harness.Values:
        hit_rate = hot_hits(layout, np.array(rows), count) / DRAWN if count else 0.0
        moved_mb = (1 - hit_rate) * LOOKUPS * table.embedding_dim * 4 / 1e6
        values = (hit_rate, moved_mb, moved_mb / LINK_GB_PER_S, lru_hits(rows, count) / DRAWN)
        return {measure.name: value for measure, value in zip(DRAW_MEASURES, values, strict=True)}

    subjects: dict[str, harness.Subject] = {f"{count} rows": partial(measure, count) for count in (0, *CACHED)}
    bench.run([harness.BenchTable("hot rows of the textbook's draw", DRAW_MEASURES, subjects)])


PLAIN, LEVERED = "float32 sums", "hot rows, int8"
MOVED, ROWS, FOOTPRINT = "bytes of a request", "bytes of rows", "cold rows, of float32"
LEVER_MEASURES = (
    harness.Measure("AUC", "of 1", "higher"),
    harness.Measure(MOVED, "B"),
    harness.Measure(ROWS, "MB"),
    harness.Measure(FOOTPRINT, "of 1"),
    harness.Measure("hit rate", "of 1", "higher"),
)
MAX_MOVED, MAX_AUC_LOSS = 0.20, 0.001
ROW_OVERHEAD_BYTES = 78
"""Of a row at the router: what it is counted by, its entries of the index, and what building that takes."""


async def measure_served(version: trainer.TrainedVersion, **serve: Any) -> dict[str, float]:
    """Rank the test part by two shards and a router with float32 arithmetic; return what is measured of a request."""
    labelled, store = trainer.expectation(version).labelled, version.folder.parent.parent
    settings: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "serve": {"dtype": "float32", **serve}}
    config = FleetConfig(store=store, registry=f"{store}-registry", shards=2, replicate_bytes=0, **settings)
    async with running_fleet(config) as fleet, AsyncClient(url_of(fleet, "http")) as client:
        server = Server(fleet.ports.http_port, fleet.ports.grpc_port, ())
        before = await asyncio.to_thread(server.metrics)
        with progress_bars() as bars:
            answers = await rank_all("http", client, version, labelled.requests, bars)
        after = await asyncio.to_thread(server.metrics)
    if answers.errors:
        raise LoadError(f"{len(answers.errors)} requests failed, such as: {answers.errors[0]}")
    sizes = wire_bytes(before, after)
    lookups, hits = (sum(summed(after, f"shardrank_hot_{what}_total").values()) for what in ("lookups", "hits"))
    return {
        "AUC": trainer.auc(labelled.labels, answers.scores),
        MOVED: sum(sizes.get(f"{MOVED}, {way}", 0.0) for way in ("back", "to shards")),
        "hit rate": hits / lookups if lookups else 0.0,
    }


@harness.bench_command
@book_option
@opts.option("--movielens", "Folder of MovieLens 100K, in place of ratings that are generated.", opts.EXISTING_FOLDER)
@opts.count("--ratings", "How many are generated.", 1000, 10_000_000, 40_000)
@opts.option("--hot-share X", "Of the rows of each table, that stay float32.", opts.PART, 0.05)
@opts.count("--epochs", "Passes over the data.", 1, 1000, 4)
@opts.count("--dim", "Numbers of a row.", 2, 512, 16)
def levers(bench: harness.Bench, movielens: Path | None, ratings: int, hot_share: float, epochs: int, dim: int) -> None:
    """Measure the textbook's practical example on a model with hashed crosses, served by two shards.

    The hottest rows of each table stay float32, with copies at the router; cold rows are int8, and sums are int8 on the
    wire. Against the same training with float32 rows and sums and no copies. A round is another seed and takes a minute
    or two. The exit code is 1 if more than 20 % of the bytes are moved, or AUC is more than 0.001 lower.

    Examples:
      shardrank loadtest bench levers --book --movielens ml-100k --rounds 1 --json levers.json
    """
    plain = FilmsOptions(kind="dcn_v2", crosses=True, embedding_dim=dim, dtype="fp32")
    by_popularity = {"dtype": {"hot": "fp32", "cold": "int8", "hot_share": hot_share}}
    tables = dict.fromkeys(("users", "films", "genres", *CROSSES), by_popularity)
    options = {PLAIN: plain, LEVERED: plain.model_copy(update={"tables": tables})}
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in options}

    def measure(name: str, number: int) -> harness.Values:
        data, store = trainer.read_interactions(movielens, ratings, number), bench.folder / f"{number}-{name}"
        version = trainer.train_version(data, store, seed=number, epochs=epochs, options=options[name])
        spec = version.trained.spec
        hot, cold = ([table for table in spec.tables if table.dtype == dtype] for dtype in ("fp32", "int8"))
        serve: dict[str, Any] = {"wire_dtype": "float32"}
        footprint = 1.0
        if cold:
            hot_bytes = sum(table.num_embeddings for table in hot) * (4 * dim + ROW_OVERHEAD_BYTES)
            serve = {"wire_dtype": "int8", "hot_rows": "static", "hot_rows_gb": hot_bytes / 1e9}
            footprint = sum(map(table_bytes, cold)) / sum(4 * dim * table.num_embeddings for table in cold)
        values = bench.runner.run(measure_served(version, **serve))
        measured[name].append(values | {ROWS: rows_bytes_of(spec) / 1e6, FOOTPRINT: footprint})
        return measured[name][-1]

    subjects: dict[str, harness.Subject] = {name: partial(measure, name) for name in options}
    bench.run([harness.BenchTable("the textbook's levers", LEVER_MEASURES, subjects)])
    for plain_values, levered in zip(*measured.values(), strict=True):
        moved, lost = levered[MOVED] / plain_values[MOVED], plain_values["AUC"] - levered["AUC"]
        if moved > MAX_MOVED or lost > MAX_AUC_LOSS:
            bench.problems.append(f"{moved:.1%} of the bytes are moved, and AUC is {lost:.4f} lower")
            click.echo(f"not as the textbook says: {bench.problems[-1]}")

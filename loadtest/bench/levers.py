"""`bench levers`: what each way to make tables smaller costs at lookup and in quality, and saves in bytes."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import click
import numpy as np
import torch

from loader.description import ModelDescription
from loader.divided_rows import divide_rows, kept_rows
from loader.snapshot.codecs import RowCodec
from loader.snapshot.publishing import rows_bytes_of
from loader.snapshot.reader import Snapshot
from loader.snapshot.row_source import RowSource, rows_of
from loader.snapshot.writer import export_snapshot
from loadtest.bench.harness import Bench, BenchTable, Subject, Values, bench_command, make_node, make_router, measure
from loadtest.workloads.workload import Zipf
from router.feature_schema import FeatureSchema
from router.plan import Plan
from serving.models.inputs import InputAssembler
from serving.models.ranking_models import build_model
from serving.training.dataset import (
    CROSSES,
    FilmsDataset,
    FilmsOptions,
    Interactions,
    evaluation_requests,
    films_description,
    read_movielens,
)
from serving.training.network import TrainedModel, float32_scores
from serving.training.trainer import Pruning, auc, train_described
from shard_node.bags import Int64Array, KeyedBags
from shard_node.node import LocalShard

Words: TypeAlias = Mapping[str, Any]
"""Words of a table's description, instead of its own."""
Call: TypeAlias = Callable[[KeyedBags], Awaitable[None]]

MODEL = "levers"
FEATURES, DIM, ZIPF = 26, 64, 1.05
CANDIDATES = (50, 100, 200, 500)
BATCHES = 16
LOOKUP_MEASURES = (
    measure("bytes of rows", "MB"),
    measure("time of a batch, 1 id a bag", "µs"),
    measure("time of a batch, 20 ids a bag", "µs"),
)
FILMS_DIM = 16
MIN_DIVIDED_ROWS = 100
FILMS_MEASURES = (measure("bytes of rows", "MB"), measure("pairs ranked wrongly", "%"))
"""The pairs are 100 - AUC in percent."""
PRUNED = "rows never asked for pruned"


def levers_for(dim: int) -> dict[str, Words]:
    """Return what is done to each table, by name; the first is the baseline."""
    return {
        **{dtype: {"dtype": dtype} for dtype in ("int8", "fp32", "fp16", "int4")},
        "hot fp16, cold int4": {"dtype": {"hot": "fp16", "cold": "int4", "hot_share": 0.1}},
        "hot int8, cold int4": {"dtype": {"hot": "int8", "cold": "int4", "hot_share": 0.1}},
        PRUNED: {},
        "narrower by popularity": {"blocks": [{"share": 0.1}, {"share": 0.3, "dim": dim // 2}, {"dim": dim // 4}]},
        "narrower, projected": {"embedding_dim": dim // 2, "project_to": dim},
    }


def serve_tables(folder: Path, words: Words, counts: Int64Array, *, pruned: bool) -> tuple[float, Call]:
    """Write and load a model, given the lookups of each row of any table; return its MB of rows and its lookup."""
    names = [f"f{number:02d}" for number in range(FEATURES)]
    table = {"num_embeddings": counts.size, "embedding_dim": DIM, **words}
    description = ModelDescription.model_validate(
        {
            "model": MODEL,
            "tables": [{"name": name, "feature_names": [name], **table} for name in names],
            "features": [{"name": name, "side": "candidate"} for name in names],
            "dense_model": {"kind": "mlp", "config": {"hidden": [8]}},
        }
    )
    kept = dict.fromkeys(names, kept_rows("f", counts)) if pruned else None
    spec, rng, rows = description.compiled(kept), np.random.default_rng(1), dict[str, RowSource]()
    for logical in spec.logical_tables:
        parts = spec.parts(logical)
        shapes = {part.name: (part.num_embeddings, part.embedding_dim) for part in parts}
        # Parts that have all columns are cut out of the undivided table at export.
        if all(part.embedding_dim == DIM for part in parts) and "id_mapping" not in words:
            shapes = {logical.name: (counts.size, DIM)}
        rows |= {name: rows_of(rng.standard_normal(shape, np.float32)) for name, shape in shapes.items()}
    cut, model = divide_rows(spec, rows, dict.fromkeys(names, counts)), build_model(spec)
    dense = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    path = export_snapshot(folder, spec, rows=cut.rows, dense=dense, row_classes=cut.row_classes, version=1)
    snapshot, plan = Snapshot.open(path, verify=False), Plan.make(spec)
    router = make_router(snapshot, plan, [LocalShard(make_node(snapshot, plan))])
    assembler = InputAssembler(spec, FeatureSchema.of(spec), torch.float32)
    buffer = assembler.buffer()
    model.pack("float32")

    async def call(bags: KeyedBags) -> None:
        """Look a batch up and lay out the model's input."""
        candidates = int(bags.bags_per_key[0])
        embeddings = await router.lookup(MODEL, 1, bags, time.monotonic() + 60)
        owner, nothing = np.zeros(candidates, np.int64), np.zeros((candidates, 0), np.float32)
        with torch.inference_mode():
            assembler.assemble(embeddings, owner, nothing[:1], nothing, buffer, model.projections_by_part)

    return rows_bytes_of(spec) / 1e6, call


def measure_lookups(bench: Bench, rows: int, seconds: float) -> None:
    """Measure lookups in tables with each lever, on the same ids."""
    rng = np.random.default_rng(7)
    popular, law = rng.permutation(rows), Zipf(ZIPF)

    def draw(count: int) -> Int64Array:
        return popular[law.ranks(rng, np.full(count, rows, np.int64))]

    def draw_batch(candidates: int, ids: int) -> KeyedBags:
        lengths = rng.integers(1, 2 * ids, FEATURES * candidates)
        keys = np.arange(FEATURES, dtype=np.int32)
        return KeyedBags.from_lengths(keys, np.full(FEATURES, candidates), lengths, draw(int(lengths.sum())))

    counts = np.bincount(draw(20 * rows), minlength=rows)
    batches = {ids: [draw_batch(CANDIDATES[number % 4], ids) for number in range(BATCHES)] for ids in (1, 20)}

    def subject(rows_mb: float, call: Call) -> Subject:
        return lambda number: {
            "bytes of rows": rows_mb,
            "time of a batch, 1 id a bag": bench.median_call_us(call, batches[1], seconds),
            "time of a batch, 20 ids a bag": bench.median_call_us(call, batches[20], seconds),
        }

    levers, subjects = levers_for(DIM), {}
    levers["sums"] = {"id_mapping": {"kind": "quotient_remainder", "buckets": 2000}}
    for name, words in levers.items():
        bench.say(f"writing {FEATURES} tables of {rows} rows: {name}")
        subjects[name] = subject(*serve_tables(bench.folder / name, words, counts, pruned=name == PRUNED))
    bench.run([BenchTable("lookups", LOOKUP_MEASURES, subjects, {"rows of a table": f"{rows}"})])


def describe_films(
    interactions: Interactions, tables: Mapping[str, Words], *, crosses: bool = True
) -> ModelDescription:
    """Describe the films' model in int8 with words for some of its tables."""
    options = FilmsOptions(
        kind="dcn_v2", dtype="int8", embedding_dim=FILMS_DIM, profile=True, crosses=crosses, tables=tables
    )
    return films_description(interactions, options)


def describe_levers(interactions: Interactions) -> dict[str, ModelDescription]:
    """Describe the films' model with each lever, by name; the first is the baseline."""
    spec = describe_films(interactions, {}).compiled()
    rows = {table.name: table.num_embeddings for table in spec.tables}

    def hashed(share: float) -> dict[str, Words]:
        return {name: {"num_embeddings": max(1, round(share * rows[name]))} for name in CROSSES}

    def divided(words: Words) -> dict[str, Words]:
        return {name: words for name in rows if "blocks" not in words or rows[name] > MIN_DIVIDED_ROWS}

    return {
        **{name: describe_films(interactions, divided(words)) for name, words in levers_for(FILMS_DIM).items()},
        **{f"crosses hashed to {x:.0%} of their ids": describe_films(interactions, hashed(x)) for x in (0.1, 0.01)},
        "no crosses": describe_films(interactions, {}, crosses=False),
    }


def as_stored(model: TrainedModel) -> TrainedModel:
    """Encode and decode a model's rows."""
    tables = {}
    for table in model.spec.tables:
        codec = RowCodec(table.dtype, table.embedding_dim)
        tables[table.name] = codec.decode(codec.encode(model.tables[table.name]))
    return replace(model, tables=tables)


def films_table(interactions: Interactions, epochs: int) -> BenchTable:
    """Train and score a model with each lever; a round is a seed, of the split and of the training."""

    def subject(description: ModelDescription, pruning: Pruning | None) -> Subject:
        def run(seed: int) -> Values:
            dataset = FilmsDataset.split(interactions, seed=seed)
            model = train_described(dataset, description, pruning=pruning, seed=seed, epochs=epochs)
            labelled = evaluation_requests(dataset, model.spec)
            area = auc(labelled.labels, float32_scores(as_stored(model), labelled.requests))
            return {"bytes of rows": rows_bytes_of(model.spec) / 1e6, "pairs ranked wrongly": 100 * (1 - area)}

        return run

    subjects = {
        name: subject(description, Pruning() if name == PRUNED else None)
        for name, description in describe_levers(interactions).items()
    }
    return BenchTable("films", FILMS_MEASURES, subjects, {"data": interactions.source, "epochs": f"{epochs}"})


@bench_command
@click.option("--rows", type=click.IntRange(100), default=100_000, show_default=True, help="Of each of the 26 tables.")
@click.option("--seconds", type=click.FloatRange(0), default=0.5, show_default=True, help="Of each measurement.")
@click.option(
    "--movielens",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder with MovieLens 100K: trains a model with each lever, too, with another seed in each round.",
)
@click.option("--epochs", type=click.IntRange(1, 100), default=4, show_default=True, help="Of each training.")
def levers(bench: Bench, rows: int, seconds: float, movielens: Path | None, epochs: int) -> None:
    """Measure what each way to make tables smaller costs and saves.

    Bytes of the tables; the time of a lookup; and on MovieLens with hashed crosses of its features the share of pairs,
    a film that the user liked and one that they did not, that are ranked wrongly, of rows as they are stored.

    Examples:
      shardrank loadtest bench levers --quick
      shardrank loadtest bench levers --movielens ml-100k --rounds 10 --json levers.json
    """
    measure_lookups(bench, rows, bench.seconds(seconds))
    if movielens is not None:
        bench.run([films_table(read_movielens(movielens), epochs)])

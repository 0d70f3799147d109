"""`bench levers`: what each way to make tables smaller costs at lookup, and saves in bytes."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import click
import numpy as np
import torch

from loader.description import ModelDescription
from loader.divided_rows import divide_rows, kept_rows
from loader.snapshot.publishing import rows_bytes_of
from loader.snapshot.reader import Snapshot
from loader.snapshot.row_source import ArrayRows, RowSource
from loader.snapshot.writer import export_snapshot
from loadtest.bench.harness import Bench, BenchTable, Subject, bench_command, make_node, make_router
from loadtest.rounds import Measure
from loadtest.workloads.workload import Zipf
from router.feature_schema import FeatureSchema
from router.plan import Plan
from serving.models.inputs import InputAssembler
from serving.models.ranking_models import build_model
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
    Measure("bytes of rows", "MB"),
    Measure("time of a batch, 1 id a bag", "µs"),
    Measure("time of a batch, 20 ids a bag", "µs"),
)
PRUNED = "rows never asked for pruned"


LEVERS: Mapping[str, Words] = {
    **{dtype: {"dtype": dtype} for dtype in ("int8", "fp32", "fp16", "int4")},
    "hot fp16, cold int4": {"dtype": {"hot": "fp16", "cold": "int4", "hot_share": 0.1}},
    "hot int8, cold int4": {"dtype": {"hot": "int8", "cold": "int4", "hot_share": 0.1}},
    PRUNED: {},
    "narrower by popularity": {"blocks": [{"share": 0.1}, {"share": 0.3, "dim": DIM // 2}, {"dim": DIM // 4}]},
    "narrower, projected": {"embedding_dim": DIM // 2, "project_to": DIM},
    "sums": {"id_mapping": {"kind": "quotient_remainder", "buckets": 2000}},
}
"""What is done to each table, by name; the first is the baseline."""


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
        rows |= {name: ArrayRows(rng.standard_normal(shape, np.float32)) for name, shape in shapes.items()}
    cut, model = divide_rows(spec, rows, dict.fromkeys(names, counts)), build_model(spec)
    dense = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    path = export_snapshot(folder, spec, rows=cut.rows, dense=dense, row_classes=cut.row_classes, version=1)
    snapshot, plan = Snapshot.open(path, verify=False), Plan.make(spec)
    router = make_router(snapshot, plan, [LocalShard(make_node(snapshot, plan))])
    assembler = InputAssembler(spec, FeatureSchema.of(spec), torch.float32)
    buffer = assembler.buffer()
    model.pack("float32")

    async def call(bags: KeyedBags) -> None:
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

    subjects = {}
    for name, words in LEVERS.items():
        bench.say(f"writing {FEATURES} tables of {rows} rows: {name}")
        subjects[name] = subject(*serve_tables(bench.folder / name, words, counts, pruned=name == PRUNED))
    bench.run([BenchTable("lookups", LOOKUP_MEASURES, subjects, {"rows of a table": f"{rows}"})])


@bench_command
@click.option("--rows", type=click.IntRange(100), default=100_000, show_default=True, help="Of each of the 26 tables.")
@click.option("--seconds", type=click.FloatRange(0), default=0.5, show_default=True, help="Of each measurement.")
def levers(bench: Bench, rows: int, seconds: float) -> None:
    """Measure what each way to make tables smaller saves in bytes, and costs in the time of a lookup.

    Examples:
      shardrank loadtest bench levers --quick
      shardrank loadtest bench levers --rounds 10 --json levers.json
    """
    measure_lookups(bench, rows, bench.seconds(seconds))

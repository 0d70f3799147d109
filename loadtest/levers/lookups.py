"""What divided tables cost at lookup: the router and the model's input, beside the same features in whole tables."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loader.description import ModelDescription
from loader.divided_rows import divide_rows, kept_rows
from loader.snapshot.codecs import codec_for
from loader.snapshot.reader import Snapshot
from loader.snapshot.row_source import RowSource, rows_of
from loader.snapshot.tables import Frozen
from loader.snapshot.writer import export_snapshot
from router.feature_schema import FeatureSchema
from router.id_mapping import IdMapper
from router.plan import Plan
from router.router import Router
from serving.models.inputs import InputAssembler
from serving.models.ranking_models import RankingModel, build_model
from shard_node.bags import Int64Array, KeyedBags
from shard_node.engine.loading import load_tables
from shard_node.node import LocalShard, ShardNode

MODEL = "levers"
FEATURES, ROWS, DIM = 26, 100_000, 64
ZIPF = 1.05
CANDIDATES = (50, 100, 200, 500)
"""Of the batches, in turns: each is another one."""
BATCHES = 16
LEVERS: dict[str, dict[str, Any]] = {
    "whole int8": {},
    "pruned": {"prune": True},
    "hot fp16, cold int4": {"dtype": {"hot": "fp16", "cold": "int4", "hot_share": 0.1}},
    "hot int8, cold int4": {"dtype": {"hot": "int8", "cold": "int4", "hot_share": 0.1}},
    "blocks 64, 16, 4": {"blocks": [{"share": 0.1}, {"share": 0.3, "dim": 16}, {"dim": 4}]},
    "16 columns projected": {"embedding_dim": 16, "project_to": DIM},
    "quotient-remainder, add": {"id_mapping": {"kind": "quotient_remainder", "buckets": 2000}},
    "quotient-remainder, multiply": {
        "id_mapping": {"kind": "quotient_remainder", "buckets": 2000, "combine": "multiply"}
    },
}


class LookupCost(Frozen):
    """Of one lever: bytes of all rows, and microseconds of a batch by ids a bag, medians, beside the first lever's."""

    lever: str
    table_bytes: int
    us_per_batch: dict[str, float]
    ratio: dict[str, float]


@dataclass(frozen=True, slots=True)
class _Arm:
    router: Router
    assembler: InputAssembler
    model: RankingModel
    table_bytes: int

    async def call(self, bags: KeyedBags) -> None:
        """Look a batch up and lay out the model's input."""
        candidates = int(bags.bags_per_key[0])
        embeddings = await self.router.lookup(MODEL, 1, bags, time.monotonic() + 60)
        owner, nothing = np.zeros(candidates, np.int64), np.zeros((candidates, 0), np.float32)
        projections = self.model.projections_by_part
        with torch.inference_mode():
            self.assembler.assemble(embeddings, owner, nothing[:1], nothing, None, projections)


def measure_lookups(rounds: int, told: Callable[[str], None]) -> list[LookupCost]:
    """Measure all levers on the same ids, batch by batch in turns, with 1 and with 20 ids a bag."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(7)
    weights = (1.0 / np.arange(1, ROWS + 1) ** ZIPF).cumsum()
    popular = rng.permutation(ROWS)

    def draw(count: int) -> Int64Array:
        drawn: Int64Array = popular[np.searchsorted(weights, rng.random(count) * weights[-1])]
        return drawn

    counts = np.bincount(draw(20 * ROWS), minlength=ROWS)
    with tempfile.TemporaryDirectory(prefix="levers-") as folder:
        arms = {name: _arm(Path(folder) / str(at), LEVERS[name], counts) for at, name in enumerate(LEVERS)}
        taken: dict[str, dict[str, list[float]]] = {name: {} for name in arms}
        for ids in (1, 20):
            told(f"{ids} ids a bag")
            batches = [_batch(draw, rng, candidates, ids) for candidates in CANDIDATES * (BATCHES // len(CANDIDATES))]
            seconds: dict[str, list[float]] = {name: [] for name in arms}
            asyncio.run(_time(arms, batches, rounds, seconds))
            for name, found in taken.items():
                found[f"{ids} id{'s' * (ids > 1)}"] = seconds[name]
    medians = {
        name: {ids: float(np.median(seconds)) * 1e6 for ids, seconds in found.items()} for name, found in taken.items()
    }
    first = medians[next(iter(LEVERS))]
    return [
        LookupCost(
            lever=name,
            table_bytes=arms[name].table_bytes,
            us_per_batch=found,
            ratio={ids: us / first[ids] for ids, us in found.items()},
        )
        for name, found in medians.items()
    ]


async def _time(
    arms: Mapping[str, _Arm], batches: Sequence[KeyedBags], rounds: int, taken: Mapping[str, list[float]]
) -> None:
    for number in range(rounds + 1):
        for bags in batches:
            for name, arm in arms.items():
                began = time.perf_counter()
                await arm.call(bags)
                if number:  # The first round warms up.
                    taken[name].append(time.perf_counter() - began)


def _batch(draw: Callable[[int], Int64Array], rng: np.random.Generator, candidates: int, ids: int) -> KeyedBags:
    lengths = rng.integers(1, 2 * ids, FEATURES * candidates) if ids > 1 else np.ones(FEATURES * candidates, np.int64)
    keys = np.arange(FEATURES, dtype=np.int32)
    return KeyedBags.from_lengths(keys, np.full(FEATURES, candidates), lengths, draw(int(lengths.sum())))


def _arm(folder: Path, lever: Mapping[str, Any], counts: Int64Array) -> _Arm:
    words = {name: value for name, value in lever.items() if name != "prune"}
    names = [f"f{number:02d}" for number in range(FEATURES)]
    table = {"num_embeddings": ROWS, "embedding_dim": DIM, **words}
    described = ModelDescription.model_validate(
        {
            "model": MODEL,
            "tables": [{"name": name, "feature_names": [name], **table} for name in names],
            "features": [{"name": name, "side": "candidate"} for name in names],
            "dense_model": {"kind": "mlp", "config": {"hidden": [8]}},
        }
    )
    spec = described.compiled(dict.fromkeys(names, kept_rows("f", counts)) if lever.get("prune") else None)
    rng = np.random.default_rng(1)
    rows: dict[str, RowSource] = {}
    for one in spec.logical_tables:
        parts = spec.parts(one)
        is_cut = all(part.embedding_dim == DIM for part in parts) and "id_mapping" not in words
        for name, count, dim in (
            [(one.name, ROWS, DIM)]
            if is_cut
            else [(part.name, part.num_embeddings, part.embedding_dim) for part in parts]
        ):
            rows[name] = rows_of(rng.standard_normal((count, dim), np.float32))
    made = divide_rows(spec, rows, dict.fromkeys(names, counts))
    model = build_model(spec)
    dense = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    path = export_snapshot(folder, spec, rows=made.rows, dense=dense, row_classes=made.row_classes, version=1)
    snapshot, schema, plan = Snapshot.open(path, verify=False), FeatureSchema.of(spec), Plan.make(spec)
    node = ShardNode(plan.identity(0))
    node.stage(MODEL, 1, load_tables(snapshot, plan.partition(0), plan.digest))
    node.flip(MODEL, 1)
    return _Arm(
        Router(schema, IdMapper.of_snapshot(snapshot, schema), plan, [LocalShard(node)]),
        InputAssembler(spec, schema, torch.float32),
        model,
        sum(codec_for(one.dtype, one.embedding_dim).row_bytes * one.num_embeddings for one in spec.stored_tables),
    )

"""Models to rank on cards, batches of them, and services whose rows are on cards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from loader.description import ModelDescription
from loader.snapshot.manifest import DenseInputs, DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.reader import Snapshot
from loader.snapshot.tables import Pooling, RowDtype
from serving.cards.ranking import CardRanking, CardScorer
from serving.embedded import ModelSource, load_served_model
from serving.limits import RequestLimits
from serving.rank.ranking import MergedBatch, Ranking, Scored, merge
from serving.rank.replica import Replica
from serving.rank.service import RankingService
from serving.versions.loaded_version import LoadedVersion
from shard_node.bags import Float32Array
from shard_node.engine.base import Engine
from shard_node.node import LocalShard
from shardrank_testing.card_engines import OnCards
from shardrank_testing.divided import describe
from shardrank_testing.parsing import parse_json
from shardrank_testing.ranking import CONFIGS, random_tensors
from shardrank_testing.snapshots import random_rows, table_of, write_snapshot

MODEL = "shop"
FAR_S = 1e9
"""A deadline that no test meets."""

DENSE = CONFIGS | {"dlrm": {"bottom_mlp": [6, 8], "top_mlp": [8]}}

SHOP_LEVERS: dict[str, dict[str, Any]] = {
    "users": {"blocks": [{"share": 0.2, "dtype": "fp16"}, {"share": 0.3, "dim": 4}, {"dim": 2}]},
    "films": {"dtype": {"hot": "fp16", "cold": "int4", "hot_share": 0.1}},
    "genres": {"column_dims": (3, 5)},
    "tags": {"id_mapping": {"kind": "quotient_remainder", "buckets": 16}},
    "cities": {"embedding_dim": 3},
}
"""Every way to divide a table of the shop, or to slice it; for `shop_levers`."""


def shop_levers(spec: ModelSpec, levers: Mapping[str, Mapping[str, Any]] = SHOP_LEVERS) -> ModelDescription:
    """Describe the shop with levers; narrow cities are projected to the width that the spec has."""
    cities = {"project_to": spec.table_of("city").embedding_dim} if "cities" in levers else {}
    return describe(spec, {**levers, "cities": {**levers.get("cities", {}), **cities}})


def shop_spec(kind: str = "mlp", *, dense: tuple[int, int] = (2, 3)) -> ModelSpec:
    """Every dtype, several dims, sum and mean and, for target attention, none; weights; shared tables; both sides."""
    history: Pooling = "none" if kind == "target_attention" else "mean"
    tables: tuple[tuple[str, int, int, RowDtype, tuple[str, ...], dict[str, str]], ...] = (
        ("users", 300, 8, "int8", ("user", "friend"), {}),
        ("films", 500, 16, "int8", ("film", "seen", "history"), {}),
        ("genres", 19, 8, "fp32", ("genre",), {"pooling": "mean", "unknown_id": "skip"}),
        ("tags", 257, 12, "int4", ("tag", "liked"), {}),
        ("cities", 40, 4, "fp16", ("city",), {}),
    )
    return ModelSpec(
        model=MODEL,
        tables=tuple(
            table_of(name, rows, 8 if kind == "dlrm" else dim, *features, dtype=dtype, **extra)
            for name, rows, dim, dtype, features, extra in tables
        ),
        features=(
            FeatureSpec(name="user", side="context"),
            FeatureSpec(name="film", side="candidate"),
            FeatureSpec(name="history", side="context", pooling=history),
            FeatureSpec(name="friend", side="context", weighted=True),
            FeatureSpec(name="genre", side="candidate"),
            FeatureSpec(name="seen", side="candidate", pooling="mean"),
            FeatureSpec(name="tag", side="candidate", weighted=True),
            FeatureSpec(name="liked", side="context", weighted=True),
            FeatureSpec(name="city", side="candidate"),
        ),
        dense_inputs=DenseInputs(context=dense[0], candidate=dense[1]),
        dense_model=DenseModelSpec(kind=kind, config=DENSE[kind]),
    )


KEYED: dict[str, dict[str, Any]] = {
    "users": {"missing": "mean"},
    "films": {"missing": "skip"},
    "genres": {"missing": "skip", "unknown_id": "reject", "column_dims": (3, 5)},
    "tags": {},
}
"""Tables of the shop as ones with keys: of every `missing`, one in slices; all are of some mean or sequence."""


def write_keyed_shop(store: Path, kind: str, seed: int = 0) -> tuple[Path, dict[str, np.ndarray]]:
    """Write the shop with keys, random ones of two thirds of the numbers that requests have; returns these too."""
    spec, rng = shop_spec(kind), np.random.default_rng(seed)
    tables = [
        table.model_copy(update={"keys": "int64", **KEYED[table.name]}) if table.name in KEYED else table
        for table in spec.tables
    ]
    spec = ModelSpec.model_validate(spec.model_dump() | {"tables": [table.model_dump() for table in tables]})
    keys = {
        table.name: rng.permutation(table.num_embeddings)[: 2 * table.num_embeddings // 3]
        for table in spec.tables
        if table.keys is not None
    }
    rows = {
        table.name: random_rows(rng, keys[table.name].size if table.keys else table.num_embeddings, table.embedding_dim)
        for table in spec.tables
    }
    return write_shop(store, spec, seed=seed, tables=rows, keys=keys), keys


def write_shop(store: Path, spec: ModelSpec, version: int = 1, seed: int = 0, **more: Any) -> Path:
    """A snapshot of random rows and weights."""
    path, _ = write_snapshot(store, spec, seed, dense=random_tensors(spec, seed), version=version, **more)
    return path


def shop_request(
    spec: ModelSpec, rng: np.random.Generator, num_candidates: int, longest: int = 4, weights: bool = True
) -> dict[str, Any]:
    """A rank request in the JSON form: bags of up to `longest` ids, some empty."""

    def bag(name: str) -> list[int]:
        limit = spec.table_of(name).num_embeddings
        return rng.integers(0, limit, int(rng.integers(0, longest + 1))).tolist()

    def floats(*shape: int) -> Any:
        return rng.standard_normal(shape, dtype=np.float32).tolist()

    parts: dict[str, dict[str, Any]] = {
        "context": {"sparse": {}, "weights": {}, "dense": floats(spec.dense_inputs.context)},
        "candidates": {"sparse": {}, "weights": {}, "dense": floats(num_candidates, spec.dense_inputs.candidate)},
    }
    for feature in spec.features:
        is_context = feature.side == "context"
        bags = bag(feature.name) if is_context else [bag(feature.name) for _ in range(num_candidates)]
        part = parts["context" if is_context else "candidates"]
        part["sparse"][feature.name] = bags
        if feature.weighted and weights:
            part["weights"][feature.name] = floats(len(bags)) if is_context else [floats(len(one)) for one in bags]
    return {**parts, "timeout_ms": 30_000}


def shop_batch(served: LoadedVersion, rng: np.random.Generator, candidates: Sequence[int], **how: Any) -> MergedBatch:
    """Requests with that many candidates each, merged as a replica merges them."""
    spec = served.schema.features.spec
    requests = [shop_request(spec, rng, count, **how) for count in candidates]
    return merge([parse_json(served.schema, request) for request in requests])


def ask(replica: Replica, work: Any) -> Any:
    """What a coroutine function makes of a replica's ranking, on its thread."""
    return replica.call(work).result(60)


def score(served: LoadedVersion, batch: MergedBatch, replica: int = 0) -> Float32Array:
    """A batch's scores from one replica."""
    return scored(served, batch, replica).scores


def scored(served: LoadedVersion, batch: MergedBatch, replica: int = 0) -> Scored:
    """What one replica answers to a batch, whose ids all have rows or are keys."""

    async def work(ranking: Ranking) -> Scored:
        scored = await ranking.score(batch, FAR_S)
        assert not len(scored.rejected)
        return scored

    return ask(served.replicas[replica], work)


def engine_of(served: LoadedVersion) -> Engine:
    """The engine of a version with all rows in this process."""
    (shard,) = served.rankings[0].shards
    assert isinstance(shard, LocalShard)
    return shard.node.generations.payload(MODEL, 1).engine


def ranking_of(served: LoadedVersion, replica: int = 0) -> CardRanking:
    """A replica's ranking, which must be one on a card."""

    async def work(ranking: Ranking) -> Ranking:
        return ranking

    ranking = ask(served.replicas[replica], work)
    assert isinstance(ranking, CardRanking)
    return ranking


def num_graphs(scorer: CardScorer) -> int:
    """Classes of batches whose work is recorded."""
    return sum(one.is_captured for one in scorer._batches.values())


def num_replays(scorer: CardScorer) -> int:
    """Batches of those classes, as far as they are kept."""
    return sum(one.num_uses for one in scorer._batches.values() if one.is_captured)


@contextmanager
def served_on(
    path: Path, on: OnCards | None, limits: RequestLimits | None = None, **options: Any
) -> Iterator[LoadedVersion]:
    """A version with its rows on cards, or, for None, in RAM; closed at the end. In float32 if nothing else is said."""
    service = RankingService(limits or RequestLimits(max_batch_candidates=64))
    source: Mapping[str, Any] = {"snapshot": path, "dtype": "float32"}
    if on is not None:
        source = {**source, "cards": on.num_cards, "card_set": on.card_set(Snapshot.open(path).spec)}
    served = load_served_model(ModelSource(**{**source, **options}), service)
    try:
        yield served
    finally:
        served.close()

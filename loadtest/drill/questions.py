"""The questions that the load asks, with the answers of both versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from loader.snapshot.manifest import ModelSpec
from loadtest.drill.oracle import FACTORS, MAX_HOTNESS, Float32Array, Int64Array, logits, patterns, sigmoid

Method = Literal["rank", "lookup"]
MAX_CANDIDATES = 16
MAX_LOOKUP_BAGS = 4


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """One request and what A and B answer to it.

    Attributes:
        method: rank or lookup.
        features: those asked for, in the order in which `expected` has them.
        counts: int64, ids per bag: [candidates, features] for rank; [bags] for lookup, feature after feature.
        embedding_dim: of a lookup's vectors.
        expected: float32 [2, values], the answers of A and B: scores, or all features' vectors one after the other.
        arguments: of `Client.rank` or `Client.lookup`, the model's name apart.
    """

    method: Method
    features: tuple[str, ...]
    counts: Int64Array
    embedding_dim: int
    expected: Float32Array
    arguments: Mapping[str, Any]


def make_questions(spec: ModelSpec, num_each: int, seed: int = 0) -> dict[Method, list[Question]]:
    """`num_each` questions of each method, the same ones for the same arguments.

    Args:
        spec: the oracle's.
        num_each: how many of each method.
        seed: of the ids.
    """
    rng = np.random.default_rng(seed)
    return {
        "rank": [rank_question(spec, rng) for _ in range(num_each)],
        "lookup": [lookup_question(spec, rng) for _ in range(num_each)],
    }


def rank_question(spec: ModelSpec, rng: np.random.Generator) -> Question:
    """All features, 1 to 16 candidates, 1 to 8 ids a bag."""
    candidates = int(rng.integers(1, MAX_CANDIDATES + 1))
    bags = {
        feature.name: _random_bags(spec, feature.name, 1 if feature.side == "context" else candidates, rng)
        for feature in spec.features
    }
    counts = np.stack(
        [np.broadcast_to([len(bag) for bag in bags[feature.name]], candidates) for feature in spec.features], axis=1
    )
    return Question(
        method="rank",
        features=tuple(bags),
        counts=counts.astype(np.int64),
        embedding_dim=0,
        expected=sigmoid(logits(counts)).astype(np.float32),
        arguments={
            "context": {one.name: bags[one.name][0] for one in spec.features if one.side == "context"},
            "candidates": {one.name: bags[one.name] for one in spec.features if one.side == "candidate"},
        },
    )


def lookup_question(spec: ModelSpec, rng: np.random.Generator) -> Question:
    """One to all features, 1 to 4 bags each, 1 to 8 ids a bag."""
    names = [feature.name for feature in spec.features]
    chosen = rng.permutation(len(names))[: rng.integers(1, len(names) + 1)]
    bags = {
        names[index]: _random_bags(spec, names[index], int(rng.integers(1, MAX_LOOKUP_BAGS + 1)), rng)
        for index in chosen.tolist()
    }
    sums = np.concatenate([_bag_sums(spec, name, own) for name, own in bags.items()])
    return Question(
        method="lookup",
        features=tuple(bags),
        counts=np.array([len(bag) for own in bags.values() for bag in own], np.int64),
        embedding_dim=spec.tables[0].embedding_dim,
        expected=FACTORS[:, None] * sums.reshape(-1),
        arguments={"features": bags},
    )


def _random_bags(spec: ModelSpec, feature: str, num_bags: int, rng: np.random.Generator) -> list[list[int]]:
    rows = spec.table_of(feature).num_embeddings
    return [rng.integers(0, rows, int(rng.integers(1, MAX_HOTNESS + 1))).tolist() for _ in range(num_bags)]


def _bag_sums(spec: ModelSpec, feature: str, bags: list[list[int]]) -> Float32Array:
    """float32 [bags, dim], of the rows' patterns; whole numbers below 2^24 even times 1024, so exact in any order."""
    table = spec.table_of(feature)
    starts = np.cumsum([0] + [len(bag) for bag in bags[:-1]])
    rows = np.array([one for bag in bags for one in bag], np.int64)
    sums: Float32Array = np.add.reduceat(patterns(table, rows), starts, axis=0)
    return sums

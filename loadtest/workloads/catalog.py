"""Workloads by name: published models at a scale, films, and the one table that the benchmarks serve."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from pydantic import Field

from loader.errors import ConfigError
from loader.snapshot.manifest import DenseInputs, DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.tables import Frozen, RowDtype, TableSpec, fingerprint_strings
from loadtest.workloads.payloads import FORMS, Encoding, Payloads
from loadtest.workloads.workload import (
    MLPERF_CANDIDATES,
    VARIED_CANDIDATES,
    CandidateCounts,
    IdDistribution,
    SyntheticWorkload,
    Uniform,
    Workload,
    Zipf,
    parse_candidates,
    parse_ids,
)
from router.feature_schema import FeatureSchema
from router.planning.inputs import catalog_model
from serving.formats.requests import RankRequest
from serving.training.dataset import (
    NO_FOLD,
    FilmsDataset,
    FilmsOptions,
    Interactions,
    evaluation_requests,
    films_spec,
    positions_in,
    read_movielens,
)
from shard_node.bags import Float32Array, KeyedBags

MAX_HOTNESS = 1000

Head: TypeAlias = Literal["mlp", "dlrm"]


class FilmsWorkload:
    """Makes requests to the model that `shardrank demo` and `shardrank train` make.

    A request is a user of the test part, each as likely, with the history from the training part. Its candidates are
    the films that the user rated in the test part; with `candidates`, that many: those first, then others at random.
    The data is split as by a trainer with the same seed. Raises TrainingError if it can't be.
    """

    def __init__(
        self,
        interactions: Interactions,
        options: FilmsOptions,
        *,
        candidates: CandidateCounts | None = None,
        split_seed: int = 0,
    ) -> None:
        self.interactions, self.options = interactions, options
        self.spec = films_spec(interactions, options)
        self.schema = FeatureSchema.of(self.spec)
        chosen = "their own" if candidates is None else candidates.name
        self.name = f"films{':profile' if options.profile else ''}, {interactions.source}, candidates {chosen}"
        if split_seed:
            self.name += f", split {split_seed}"
        self._candidates = candidates
        dataset = FilmsDataset.split(interactions, seed=split_seed)
        labelled = evaluation_requests(dataset, self.spec)
        requests = labelled.requests
        self._films = interactions.films
        self._rated = np.split(interactions.film_index[labelled.samples], np.cumsum(requests.num_candidates)[:-1])
        self._context = {
            feature.name: np.split(requests.values[feature.name], np.cumsum(requests.lengths[feature.name])[:-1])
            for feature in self.spec.features
            if feature.side == "context"
        }
        every_film = np.arange(self._films.ids.size)
        statistics = dataset.film_statistics(every_film, np.full(every_film.size, NO_FOLD))
        self._film_dense: Float32Array = statistics[:, : self.spec.dense_inputs.candidate]
        words = sorted(set(interactions.users.occupations))
        self._words = dict(zip(fingerprint_strings(words).tolist(), words, strict=True))

    def request(self, rng: np.random.Generator) -> RankRequest:
        """Draw a user and make the request."""
        user = int(rng.integers(len(self._rated)))
        films = self._rated[user]
        if self._candidates is not None:
            count, every_film = self._candidates.draw(rng), np.arange(self._films.ids.size)
            missing = max(0, count - films.size)
            others = np.setdiff1d(every_film, films) if films.size < every_film.size else every_film
            # Where there are too few films, one comes more than once, as a request may have it.
            films = np.concatenate([films, rng.choice(others, missing, replace=missing > others.size)])[:count]
        genre_lengths, genres = positions_in(self._films.genre_offsets, films)
        bags = {
            "film_id": (self._films.ids[films], np.ones(films.size, np.int64)),
            "genre": (self._films.genre_ids[genres], genre_lengths),
        }
        for name, by_user in self._context.items():
            bags[name] = by_user[user], np.array([by_user[user].size], np.int64)
        values, lengths = zip(*(bags[feature.name] for feature in self.schema.features), strict=True)
        keys, bags_per_key = np.arange(len(lengths), dtype=np.int32), np.array(list(map(len, lengths)), np.int64)
        return RankRequest(
            bags=KeyedBags.from_lengths(keys, bags_per_key, np.concatenate(lengths), np.concatenate(values)),
            num_candidates=films.size,
            context_dense=np.zeros(0, np.float32),
            candidate_dense=np.ascontiguousarray(self._film_dense[films]),
            timeout_s=math.inf,
            texts=[
                self._words[number]
                for feature in self.schema.features
                if feature.name in self.schema.string_features
                for number in bags[feature.name][0].tolist()
            ],
        )


WORKLOADS_TEXT = "dlrm-v2[:SCALE], merlin-tiny[:SCALE], bench-mlp[:HOTNESS], bench-dlrm[:HOTNESS], films[:profile]"
_SCALE = re.compile(r"(?:\d+\.?\d*|\.\d+)(?:e-?\d+)?")


def open_workload(
    text: str,
    *,
    ids: str | None = None,
    candidates: str | None = None,
    context_features: int = 0,
    movielens: Path | None = None,
    split_seed: int = 0,
    varied: bool = True,
) -> Workload:
    """Open the workload that the options of `shardrank loadtest run` describe, where None is the workload's own.

    If not `varied`, bags and numbers of candidates are the published ones. Requests of films are always as they were.
    Raises ConfigError: naming what does not fit. TrainingError: the ratings of MovieLens can't be read or split.
    """
    family, colon, suffix = text.partition(":")
    counts = None if candidates is None else parse_candidates(candidates)
    drawn_ids: IdDistribution = Uniform()
    if text in ("films", "films:profile"):
        if ids is not None or context_features:
            raise ConfigError(f"workload {text!r}: its ids and features are those of its ratings; none can be chosen")
        if movielens is None:
            raise ConfigError(f"workload {text!r}: it needs a folder with the files of MovieLens 100K (--movielens)")
        options = FilmsOptions(profile=bool(colon))
        return FilmsWorkload(read_movielens(movielens), options, candidates=counts, split_seed=split_seed)
    if family in ("dlrm-v2", "merlin-tiny"):
        if colon and (not _SCALE.fullmatch(suffix) or not 0 < float(suffix) <= 1):
            raise ConfigError(f"workload: {text!r}: the scale {suffix!r} is not a number above 0 and at most 1")
        scale = float(suffix or 1)
        spec, profile = catalog_model(family, scale=scale)
        text, hotness = f"{family}:{scale:.12g}", {name: int(ids) for name, ids in profile.hotness.items()}
        if profile.zipf:
            drawn_ids = Zipf(profile.zipf)
    elif family in ("bench-mlp", "bench-dlrm"):
        spec = bench_spec(BenchShape(), "mlp" if family == "bench-mlp" else "dlrm")
        if colon and not (suffix.isascii() and suffix.isdigit() and 1 <= int(suffix[:5]) <= MAX_HOTNESS):
            raise ConfigError(f"workload: {text!r}: {suffix!r} is not a whole number of ids from 1 to {MAX_HOTNESS}")
        hotness = dict.fromkeys((feature.name for feature in spec.features), int(suffix or 1))
    else:
        raise ConfigError(f"workload: {text!r} is not one of {WORKLOADS_TEXT}")
    drawn_ids = drawn_ids if ids is None else parse_ids(ids)
    counts = counts or (VARIED_CANDIDATES if varied else MLPERF_CANDIDATES)
    name = f"{text}, ids {drawn_ids.name}, candidates {counts.name}, {'ragged' if varied else 'fixed'} bags"
    if context_features:
        name += f", context features {context_features}"
    count = len(spec.features)
    if not 0 <= context_features < count:
        problem = f"{context_features} is not in 0..{count - 1}, so that one of {count} features is a candidate's"
        raise ConfigError(f"context_features: {problem}")
    in_context = sorted(hotness, key=lambda name: -hotness[name])[:context_features]
    features = tuple(
        feature.model_copy(update={"side": "context"}) if feature.name in in_context else feature
        for feature in spec.features
    )
    spec = spec.model_copy(update={"features": features})
    return SyntheticWorkload(name, spec, hotness, drawn_ids, counts, ragged=varied)


BENCH_REQUESTS = 64
BENCH_SEED = 11
MAX_BENCH_BYTES = 1 << 30
SideSplit: TypeAlias = Literal["product", "candidates"]
"""Which inputs of the benchmarks' model come once a request."""
EQUAL_REQUESTS = {"candidates": "100", "varied": False}
"""What changes in a shape so that requests are alike."""


class BenchShape(Frozen):
    """Of the model that the benchmarks serve, one table that all features share, and of every request.

    The first `context_features` of the features and `context_dense` of the floats come once a request, all others once
    a candidate. Varied requests have ragged bags, and each another `traceparent` and `x-request-id`.
    """

    features: int = 26
    context_features: int = 0
    embedding_dim: int = 64
    rows: int = Field(default=1_000_000, ge=1, le=2**31)
    row_dtype: RowDtype = "int8"
    dense: int = 13
    context_dense: int = 0
    candidates: str = VARIED_CANDIDATES.name
    varied: bool = True

    @classmethod
    def of(
        cls, rows: int, row_dtype: RowDtype = "int8", *, varied: bool, side_split: SideSplit = "candidates"
    ) -> BenchShape:
        """Return the benchmarks' shape; requests that are not varied have 100 candidates.

        `product` has 20 of the 26 features and, in the same proportion, 10 of the 13 dense inputs once a request.
        """
        shape = cls(rows=rows, row_dtype=row_dtype)
        if side_split == "product":
            shape = shape.model_copy(update={"context_features": 20, "context_dense": 10})
        return shape if varied else shape.model_copy(update=EQUAL_REQUESTS)

    @property
    def requests(self) -> str:
        """Say what results say of the requests."""
        context = f"{self.context_features} features and {self.context_dense} floats once a request"
        others = f"{self.features - self.context_features} and {self.dense - self.context_dense} a candidate"
        return f"{self.candidates} candidates, {context}, {others}, {FORMS[self.varied]}"


class BenchWorkload(Frozen):
    """A model of that shape under an MLP or DLRM, asked for `hotness` ids a bag, or about as many."""

    shape: BenchShape
    head: Head
    hotness: int


def bench_spec(shape: BenchShape, head: Head) -> ModelSpec:
    """Describe the model, named `bench-<head>`."""
    layers: dict[Head, dict[str, object]] = {
        "mlp": {"hidden": [256, 64]},
        "dlrm": {"bottom_mlp": [512, 256, shape.embedding_dim], "top_mlp": [512, 256]},
    }
    features = tuple(
        FeatureSpec(name=f"feature-{number:03d}", side="context" if number < shape.context_features else "candidate")
        for number in range(shape.features)
    )
    table = TableSpec(
        name="rows",
        num_embeddings=shape.rows,
        embedding_dim=shape.embedding_dim,
        feature_names=tuple(feature.name for feature in features),
        dtype=shape.row_dtype,
    )
    return ModelSpec(
        model=f"bench-{head}",
        tables=(table,),
        features=features,
        dense_inputs=DenseInputs(context=shape.context_dense, candidate=shape.dense - shape.context_dense),
        dense_model=DenseModelSpec(kind=head, config=layers[head]),
    )


def bench_workload(shape: BenchShape, head: Head, hotness: int) -> SyntheticWorkload:
    """Open a `BenchWorkload`; ids are uniform, the worst case for caches."""
    spec = bench_spec(shape, head)
    counts = parse_candidates(shape.candidates)
    of_each = dict.fromkeys((feature.name for feature in spec.features), hotness)
    return SyntheticWorkload(f"{spec.model}, hotness {hotness}", spec, of_each, Uniform(), counts, ragged=shape.varied)


def bench_payloads(
    shape: BenchShape,
    head: Head,
    hotness: int,
    api: Encoding,
    count: int = BENCH_REQUESTS,
    *,
    timeout_ms: int | None = 60_000,
) -> Payloads:
    """Make the first `count` requests of the pool, which is the same for every API.

    Raises ConfigError: they are larger than MAX_BENCH_BYTES; fewer would be other requests than those of another API.
    """
    made = bench_workload(shape, head, hotness)
    pool = Payloads(made, api, count=count, seed=BENCH_SEED, timeout_ms=timeout_ms, max_bytes=MAX_BENCH_BYTES)
    if len(pool) < count:
        raise ConfigError(f"hotness {hotness}: {count} requests of {api} are more than {MAX_BENCH_BYTES} bytes")
    return pool

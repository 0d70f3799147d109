"""Workloads by name: published models at a scale, and the one table that the benchmarks serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Literal, TypeAlias

from pydantic import Field

from loader.errors import ConfigError
from loader.snapshot.manifest import DenseInputs, DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.tables import Frozen, IdentityMapping, RowDtype, TableSpec, VocabularyMapping
from loadtest.workloads.payloads import FORMS, Encoding, Pool, drawn_payloads
from loadtest.workloads.served import described_spec
from loadtest.workloads.workload import (
    MLPERF_CANDIDATES,
    VARIED_CANDIDATES,
    CandidateCounts,
    IdDistribution,
    Uniform,
    Workload,
    Zipf,
    parse_candidates,
    parse_hotness,
    parse_ids,
)
from router.planning.inputs import CATALOG, catalog_model
from serving.description import ModelInfo

Head: TypeAlias = Literal["mlp", "dlrm"]


def open_workload(
    source: str | ModelInfo,
    *,
    ids: str | None = None,
    candidates: str | None = None,
    hotness: Sequence[str] = (),
    varied: bool = True,
) -> Workload:
    """Open the workload that the options of `shardrank loadtest run` describe, where None is the workload's own.

    Bags of a served model have 1 id, unless `hotness` says more (`parse_hotness`). If not `varied`, bags and numbers of
    candidates are the published ones. Raises ConfigError: naming what does not fit.
    """
    text = source if isinstance(source, str) else f"{source.model} version {source.version}"
    family, colon, suffix = text.partition(":")
    counts = parse_candidates(candidates) if candidates else VARIED_CANDIDATES if varied else MLPERF_CANDIDATES
    drawn_ids: IdDistribution = Uniform()
    if isinstance(source, ModelInfo):
        spec, unknown = described_spec(source), _unknown_ids(source)
        of_each = parse_hotness(["1", *hotness], spec)
        text += f", hotness {' '.join(hotness) or 1}{unknown}"
        _check_limits(source, counts, of_each, varied=varied)
    elif family in CATALOG:
        spec, profile = catalog_model(text)
        of_each = {name: int(ids) for name, ids in profile.hotness.items()}
        if profile.zipf:
            drawn_ids = Zipf(profile.zipf)
    elif family in ("bench-mlp", "bench-dlrm"):
        spec = bench_spec(BenchShape(), "mlp" if family == "bench-mlp" else "dlrm")
        of_each = parse_hotness([suffix if colon else "1"], spec)
    else:
        known = ", ".join([*(f"{name}[:SCALE]" for name in CATALOG), "bench-mlp[:HOTNESS]", "bench-dlrm[:HOTNESS]"])
        raise ConfigError(f"workload: {text!r} is not one of {known}")
    drawn_ids = drawn_ids if ids is None else parse_ids(ids)
    name = f"{text}, ids {drawn_ids.name}, candidates {counts.name}, {'ragged' if varied else 'fixed'} bags"
    return Workload(name, spec, of_each, drawn_ids, counts, ragged=varied)


def _check_limits(described: ModelInfo, counts: CandidateCounts, hotness: Mapping[str, int], *, varied: bool) -> None:
    """Raise ConfigError: the largest request that may be drawn is more than a server takes."""
    longest = {name: max(2, 2 * ids - 1) if varied else ids for name, ids in hotness.items()}
    bags = {feature.name: counts.most if feature.side == "candidate" else 1 for feature in described.features}
    reached = {"max_candidates": counts.most, "max_ids_per_bag": max(longest.values())}
    reached["max_ids_per_request"] = sum(ids * bags[name] for name, ids in longest.items())
    for limit, size in reached.items():
        if size > (allowed := getattr(described.limits, limit)):
            problem = f"a request may have {size}, the server's limit {limit} is {allowed}"
            raise ConfigError(f"candidates {counts.name}, hotness: {problem}")


def _unknown_ids(described: ModelInfo) -> str:
    """Return what a name says of made-up ids of vocabularies. Raises ConfigError: a table refuses what it has not."""
    listed = [table for table in described.tables if table.id_mapping == "vocabulary"]
    if refusing := [table.name for table in listed if table.unknown_id == "reject"]:
        problem = "a server does not tell a vocabulary, and unknown_id is reject; draw from requests with --like FILE"
        raise ConfigError(f"model {described.model!r}: ids of {', '.join(refusing)} can't be made up: {problem}")
    return f", unknown ids of {', '.join(table.name for table in listed)}" if listed else ""


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
    a candidate. Varied requests have ragged bags, and each another `traceparent` and `x-request-id`. Rows that are not
    `named_by` their numbers are by `scattered_ids`.
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
    named_by: Literal["numbers", "vocabulary", "keys"] = "numbers"

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
        keys="int64" if shape.named_by == "keys" else None,
        id_mapping=VocabularyMapping() if shape.named_by == "vocabulary" else IdentityMapping(),
    )
    return ModelSpec(
        model=f"bench-{head}",
        tables=(table,),
        features=features,
        dense_inputs=DenseInputs(context=shape.context_dense, candidate=shape.dense - shape.context_dense),
        dense_model=DenseModelSpec(kind=head, config=layers[head]),
    )


def bench_workload(bench: BenchWorkload) -> Workload:
    """Open it; ids are uniform, the worst case for caches."""
    spec, hotness = bench_spec(bench.shape, bench.head), bench.hotness
    counts = parse_candidates(bench.shape.candidates)
    of_each = dict.fromkeys((feature.name for feature in spec.features), hotness)
    ragged, scattered = bench.shape.varied, bench.shape.named_by != "numbers"
    name = f"{spec.model}, hotness {hotness}"
    return Workload(name, spec, of_each, Uniform(), counts, ragged=ragged, scattered=scattered)


def bench_payloads(
    bench: BenchWorkload, api: Encoding, count: int = BENCH_REQUESTS, *, timeout_ms: int | None = 60_000
) -> Pool:
    """Make the first `count` requests of the pool, which is the same for every API.

    Raises ConfigError: they are larger than MAX_BENCH_BYTES; fewer would be other requests than those of another API.
    """
    workload = bench_workload(bench)
    drawn = islice(drawn_payloads(workload, api, BENCH_SEED, timeout_ms), count)
    pool = Pool(api, workload.spec.model, drawn, MAX_BENCH_BYTES)
    if len(pool) < count:
        raise ConfigError(f"hotness {bench.hotness}: {count} requests of {api} are more than {MAX_BENCH_BYTES} bytes")
    return pool

"""What is served: one table that all features share, under an MLP or DLRM."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import Field

from loader.snapshot.manifest import DenseInputs, DenseModelSpec, FeatureSpec, Frozen, ModelSpec, TableSpec
from loadtest.workloads.candidates import VARIED_CANDIDATES, parse_candidates
from loadtest.workloads.errors import WorkloadError
from loadtest.workloads.ids import Uniform
from loadtest.workloads.payloads import FORMS, Api, Payloads
from loadtest.workloads.synthetic import SyntheticWorkload

Head: TypeAlias = Literal["mlp", "dlrm"]

REQUESTS_IN_POOL = 64
SEED = 11
SAME_CANDIDATES = "100"
MAX_POOL_BYTES = 1 << 30


class Shape(Frozen):
    """Of the model and of every request.

    Attributes:
        features: all of candidates, looked up in one table.
        embedding_dim: of it.
        rows: of it, int8.
        dense: floats of a candidate.
        candidates: of a request, as `parse_candidates` reads it.
        varied: whether bags are ragged, and each request is sent with a `traceparent` and `x-request-id` of its own.
    """

    features: int = Field(default=26, ge=1, le=1000)
    embedding_dim: int = Field(default=64, ge=1, le=1024)
    rows: int = Field(default=1_000_000, ge=1, le=2**31)
    dense: int = Field(default=13, ge=1, le=1000)
    candidates: str = VARIED_CANDIDATES.name
    varied: bool = True

    @classmethod
    def of(cls, rows: int, *, varied: bool) -> Shape:
        """The benchmarks'; requests that are not varied have 100 candidates."""
        return cls(rows=rows) if varied else cls(rows=rows, candidates=SAME_CANDIDATES, varied=False)

    @property
    def requests(self) -> str:
        """What results say of the requests."""
        return f"{self.candidates} candidates, {FORMS[self.varied]}"


def model_spec(shape: Shape, head: Head) -> ModelSpec:
    """The model, named `bench-<head>`."""
    names = tuple(f"feature-{number:03d}" for number in range(shape.features))
    dense_models = {
        "mlp": DenseModelSpec(kind="mlp", config={"hidden": [256, 64]}),
        "dlrm": DenseModelSpec(
            kind="dlrm", config={"bottom_mlp": [512, 256, shape.embedding_dim], "top_mlp": [512, 256]}
        ),
    }
    table = TableSpec(
        name="rows", num_embeddings=shape.rows, embedding_dim=shape.embedding_dim, feature_names=names, dtype="int8"
    )
    return ModelSpec(
        model=f"bench-{head}",
        tables=(table,),
        features=tuple(FeatureSpec(name=name, side="candidate") for name in names),
        dense_inputs=DenseInputs(candidate=shape.dense),
        dense_model=dense_models[head],
    )


def workload(shape: Shape, head: Head, hotness: int) -> SyntheticWorkload:
    """Requests with so many ids for each feature of each candidate, or about as many. Uniform: caches' worst case."""
    spec = model_spec(shape, head)
    names = [feature.name for feature in spec.features]
    name = f"{spec.model}, hotness {hotness}"
    counts = parse_candidates(shape.candidates)
    return SyntheticWorkload(name, spec, dict.fromkeys(names, hotness), Uniform(), counts, ragged=shape.varied)


def payloads(shape: Shape, head: Head, hotness: int, api: Api, count: int = REQUESTS_IN_POOL) -> Payloads:
    """The first `count` requests of the pool, which is the same for every API.

    Raises:
        WorkloadError: they are larger than MAX_POOL_BYTES; fewer would be other requests than those of another API.
    """
    made = workload(shape, head, hotness)
    pool = Payloads(made, api, count=count, seed=SEED, timeout_ms=60_000, max_bytes=MAX_POOL_BYTES)
    if len(pool) < count:
        raise WorkloadError(f"hotness {hotness}: {count} requests of {api} are more than {MAX_POOL_BYTES} bytes")
    return pool

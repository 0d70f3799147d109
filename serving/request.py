"""A parsed request and its answer: the same for HTTP, gRPC and the in-process call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shard_node.bags import Float32Array, Int64Array, KeyedBags
from shard_node.generation import Lease

if TYPE_CHECKING:
    from serving.served_model import ServedModel
    from serving.stages import BatchTimes


@dataclass(slots=True, eq=False)
class RankRequest:
    """A rank request, checked against the very version that will answer it.

    Attributes:
        lease: keeps that version until the request is answered or failed; whoever finishes the request releases it.
        bags: raw ids. keys are all the model's flat feature indices; a context feature has 1 bag, a candidate
            feature num_candidates.
        num_candidates: N, at least 1.
        context_dense: float32 [Kc], finite.
        candidate_dense: float32 [N, Kd], finite.
        deadline: absolute time on the monotonic clock, in seconds.
        top_k: how many positions `order` has, or None for all N.
        request_id: the caller's own name for the request, or "".
        texts: the strings behind the fingerprints among the ids, in their order, for error messages.
        queue_s: how long it waited for a replica; set by that.
        batch: where the time of its batch went; set by the replica once it has an answer.
    """

    lease: Lease[ServedModel]
    bags: KeyedBags
    num_candidates: int
    context_dense: Float32Array
    candidate_dense: Float32Array
    deadline: float
    top_k: int | None = None
    request_id: str = ""
    texts: Sequence[str] = ()
    queue_s: float = 0.0
    batch: BatchTimes | None = None


@dataclass(slots=True, eq=False)
class LookupRequest:
    """A request for pooled embeddings.

    Attributes:
        lease: as in `RankRequest`.
        bags: raw ids of any of the model's features, with any number of bags each; keys are flat feature indices.
        deadline: absolute time on the monotonic clock, in seconds.
        request_id: the caller's own name for the request, or "".
        texts: the strings behind the fingerprints among the ids, in their order, for error messages.
        queue_s, batch: as in `RankRequest`.
    """

    lease: Lease[ServedModel]
    bags: KeyedBags
    deadline: float
    request_id: str = ""
    texts: Sequence[str] = ()
    queue_s: float = 0.0
    batch: BatchTimes | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RankAnswer:
    """Scores of one request, all from one version.

    Attributes:
        scores: float32 [N], in the order of the candidates.
        order: int64 [min(top_k, N)], positions of the candidates by descending score; equal scores by position.
    """

    model: str
    version: int
    scores: Float32Array
    order: Int64Array
    request_id: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class FeatureEmbeddings:
    """Embeddings of one feature.

    Attributes:
        values: float32 [bags, embedding_dim] if pooled, [ids, embedding_dim] if not.
        lengths: int64 [bags], rows of each bag, if the feature is not pooled; else None.
    """

    values: Float32Array
    lengths: Int64Array | None


@dataclass(frozen=True, slots=True, eq=False)
class LookupAnswer:
    """Embeddings by feature name, all from one version."""

    model: str
    version: int
    embeddings: dict[str, FeatureEmbeddings]
    request_id: str = ""

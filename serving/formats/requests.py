"""A parsed request and its answer: arrays and nothing else, the same for HTTP, gRPC and the in-process call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeAlias

from serving.formats.schema import RequestSchema
from serving.limits import RequestLimits
from shard_node.bags import Float32Array, Int64Array, KeyedBags

Buffer: TypeAlias = bytes | bytearray | memoryview
Method: TypeAlias = Literal["rank", "lookup"]
JSON = "application/json"


class Options(NamedTuple):
    """What a request says beside its numbers, not checked yet.

    Attributes:
        timeout_ms: its deadline; None for the server's default.
        timeout_us: the same as the Open Inference Protocol has it; the earlier one counts.
        top_k: how many positions `order` shall have; None for all.
        routing_key: what a canary is chosen by, or "".
    """

    timeout_ms: int | None = None
    timeout_us: int | None = None
    top_k: int | None = None
    request_id: str = ""
    routing_key: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class RankRequest:
    """A rank request, checked against the schema of the version that will answer it.

    Attributes:
        bags: raw ids, of all the model's features in flat order; 1 bag for a context feature, else num_candidates.
        num_candidates: N, at least 1.
        context_dense, candidate_dense: float32 [Kc] and [N, Kd], finite.
        timeout_s: the deadline, from when the call began.
        top_k: how many positions `order` has, or None for all N.
        request_id: the caller's own name for the request, or "".
        texts: the strings behind the fingerprints among the ids, in their order, for error messages.
    """

    bags: KeyedBags
    num_candidates: int
    context_dense: Float32Array
    candidate_dense: Float32Array
    timeout_s: float
    top_k: int | None = None
    request_id: str = ""
    texts: Sequence[str] = ()


@dataclass(frozen=True, slots=True, eq=False)
class LookupRequest:
    """A request for pooled embeddings.

    Attributes:
        bags: raw ids of any of the model's features, with any number of bags each; keys are flat feature indices.
        num_floats: of the answer; each row and each bag of rows counts as one more.
    """

    bags: KeyedBags
    timeout_s: float
    num_floats: int
    request_id: str = ""
    texts: Sequence[str] = ()


@dataclass(frozen=True, slots=True, eq=False)
class RankAnswer:
    """Scores of one request, all from one version.

    Attributes:
        scores: float32 [N], in the order of the candidates.
        order: int64 [min(top_k, N)], positions of the candidates by descending score; equal scores by position.
        dense_step: of the dense model's weights that gave every score; 0 for those of the snapshot itself.
        outputs: float32 [N] for each output that the model names, in its order; none of a built-in model.
        delta_sequence: every row was of this delta or a later one; negative where a shard did not tell.
    """

    model: str
    version: int
    scores: Float32Array
    order: Int64Array
    request_id: str = ""
    dense_step: int = 0
    outputs: Mapping[str, Float32Array] = field(default_factory=dict)
    delta_sequence: int = -1


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


Request: TypeAlias = RankRequest | LookupRequest
Answer: TypeAlias = RankAnswer | LookupAnswer


class Encoded(NamedTuple):
    """An answer as bytes.

    Attributes:
        body: all of it, or its beginning.
        headers: further HTTP headers; names in lower case.
        more: the rest of the body. Each piece is made when it is asked for, so that others may have a turn before.
    """

    body: bytes
    content_type: str = JSON
    headers: tuple[tuple[str, str], ...] = ()
    more: Iterable[bytes] = ()


class Unparsed(Protocol):
    """A request of which only is known who shall answer it: what its numbers mean depends on the version.

    Attributes:
        version: that must answer; None for the live one, or the canary.
        key: what a canary is chosen by, or "".
    """

    model: str
    version: int | None
    key: str

    def parse(self, schema: RequestSchema) -> Request:
        """Read and check everything else. Raises InvalidRequestError."""
        ...

    def encode(self, answer: Answer) -> Encoded:
        """Write the answer in the form that the request asked for."""
        ...


class Codec(Protocol):
    """A form of requests and answers. Pure: it knows no service, no clock and no connection.

    Attributes:
        api: its name in metrics: `http`, `grpc`, `oip_http`, `oip_grpc` or `embedded`.
        method: what is asked for.
    """

    api: str
    method: Method

    def read(self, body: Buffer, limits: RequestLimits) -> Unparsed:
        """Read a request as far as that needs no schema. Raises InvalidRequestError if it is not of this form."""
        ...

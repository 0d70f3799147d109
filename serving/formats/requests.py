"""A parsed request and its response: arrays, the same for HTTP, gRPC and the in-process call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from serving.errors import invalid_field, limit_exceeded
from serving.formats.schema import RequestSchema
from serving.limits import RequestLimits
from shard_node.bags import Float32Array, Int64Array, KeyedBags

Buffer: TypeAlias = bytes | bytearray | memoryview
Method: TypeAlias = Literal["rank", "lookup"]
JSON = "application/json"


@dataclass(frozen=True, slots=True, eq=False)
class RankRequest:
    """A rank request, checked against the schema of the version that will answer it.

    Attributes:
        bags: raw ids, of all the model's features in flat order; 1 bag for a context feature, else num_candidates.
        num_candidates: N, at least 1.
        context_dense, candidate_dense: float32 [Kc] and [N, Kd], finite.
        timeout_s: the deadline, from when the call began.
        top_k: how many positions `order` has, or None for all N.
        texts: the string ids, in their order, whose fingerprints are in `bags`.
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
    """A request for embeddings of any features, with any number of bags each.

    `num_floats` are those of the response; each row and each bag of rows counts as one more.
    """

    bags: KeyedBags
    timeout_s: float
    num_floats: int
    request_id: str = ""
    texts: Sequence[str] = ()


@dataclass(frozen=True, slots=True, eq=False)
class RankResponse:
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
    """Embeddings of one feature: float32 [bags, embedding_dim] if pooled.

    If not, [ids, embedding_dim], and `lengths`, int64 [bags], the rows of each bag.
    """

    values: Float32Array
    lengths: Int64Array | None


@dataclass(frozen=True, slots=True, eq=False)
class LookupResponse:
    """Embeddings by feature name, all from one version."""

    model: str
    version: int
    embeddings: dict[str, FeatureEmbeddings]
    request_id: str = ""


Request: TypeAlias = RankRequest | LookupRequest
Response: TypeAlias = RankResponse | LookupResponse


class Encoded(NamedTuple):
    """A response as bytes: a body, and `more` pieces that are made one by one, so that others run between.

    Names of `headers` are in lower case.
    """

    body: bytes
    content_type: str = JSON
    headers: tuple[tuple[str, str], ...] = ()
    more: Iterable[bytes] = ()


class Codec(msgspec.Struct, eq=False):
    """A form of requests and responses, and once it has `read` one, that request's document.

    A request's numbers are not read before the version that answers it is known: what they mean depends on it.

    Attributes:
        api: its name in metrics.
        version: that must answer, or the live one or the canary if None.
        key: what a canary is chosen by, or "".
        timeout_s: the deadline, from when the call began.
    """

    method: Method = "rank"
    model: str = ""
    api: str = "http"
    version: int | None = None
    key: str = ""
    timeout_s: float = 0.0
    top_k: int | None = None
    request_id: str = ""

    def read(self, body: Buffer, limits: RequestLimits) -> Codec:
        """Return the codec of a request, read as far as that needs no schema. Raises InvalidRequestError."""
        raise NotImplementedError

    def parse(self, schema: RequestSchema) -> Request:
        """Read and check everything else, once. Raises InvalidRequestError."""
        raise NotImplementedError

    def encode(self, response: Response) -> Encoded:
        """Write the response in the form that the request asked for."""
        raise NotImplementedError

    def rank_request(
        self,
        bags: KeyedBags,
        num_candidates: int,
        context_dense: Float32Array,
        candidate_dense: Float32Array,
        texts: Sequence[str],
    ) -> RankRequest:
        """Make a rank request with the options that were read. Raises InvalidRequestError: a number is not finite."""
        # Not `all` of arrays: by fewer steps of the interpreter.
        for path, dense in (("context.dense", context_dense), ("candidates.dense", candidate_dense)):
            if dense.size and not np.logical_and.reduce(np.isfinite(dense), axis=None):
                position = np.argwhere(~np.isfinite(dense))[0].tolist()
                index = "".join(f"[{index}]" for index in position)
                raise invalid_field(path + index, f"{dense[tuple(position)]} is not a finite float32")
        return RankRequest(
            bags, num_candidates, context_dense, candidate_dense, self.timeout_s, self.top_k, self.request_id, texts
        )

    def lookup_request(self, schema: RequestSchema, bags: KeyedBags, texts: Sequence[str]) -> LookupRequest:
        """Make a lookup with the options that were read. Raises InvalidRequestError: too large a response."""
        # A row is a list in the response, and so is a bag of rows: each takes about as long to write as a float.
        row, is_none = schema.embedding_dims[bags.keys] + 1, schema.features.is_none[bags.keys]
        rows, bags_of_rows = np.where(is_none, bags.values_per_key(), bags.bags_per_key), bags.bags_per_key[is_none]
        floats = int((rows * row).sum() + bags_of_rows.sum())
        if floats > (allowed := schema.limits.max_lookup_floats):
            raise limit_exceeded("sparse", "max_lookup_floats", allowed, floats, "floats in the answer")
        return LookupRequest(bags, self.timeout_s, floats, self.request_id, texts)


def check_options(
    limits: RequestLimits,
    request_id: str,
    routing_key: str,
    top_k: int | None,
    timeout_ms: int | None,
    timeout_us: int | None = None,
) -> float:
    """Check what every request may have.

    Returns seconds until the deadline: of `timeout_ms` and `timeout_us` (of the Open Inference Protocol) the earlier,
    or the default if both are None. Raises InvalidRequestError.
    """
    if request_id or routing_key:
        for field, text in (("request_id", request_id), ("routing_key", routing_key)):
            limit = f"max_{field}_chars"
            if len(text) > getattr(limits, limit):
                raise limit_exceeded(field, limit, getattr(limits, limit), len(text), "characters")
    if top_k is not None and top_k < 1:
        raise invalid_field("top_k", f"{top_k} is not 1 or more")
    allowed, timeouts_s = limits.max_timeout_ms, list[float]()
    for field, timeout, per_ms in (("timeout_ms", timeout_ms, 1), ("timeout", timeout_us, 1000)):
        if timeout is None:
            continue
        if timeout < 1:
            raise invalid_field(field, f"{timeout} is not in 1..{allowed * per_ms}")
        if timeout > allowed * per_ms:
            raise limit_exceeded(field, "max_timeout_ms", allowed, -(-timeout // per_ms), "ms")
        timeouts_s.append(timeout / (1000 * per_ms))
    return min(timeouts_s, default=limits.default_timeout_ms / 1000)

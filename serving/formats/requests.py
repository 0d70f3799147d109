"""A parsed request and its response: arrays, the same for HTTP, gRPC and the in-process call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from loader.snapshot.tables import fingerprint_strings
from serving.errors import count_mismatch, invalid_field, invalid_id, limit_exceeded, malformed
from serving.formats.schema import Part, RequestSchema, part_path
from serving.limits import MAX_ID, RequestLimits
from serving.results import LookupResult, RankResult
from shard_node.bags import Bags, Float32Array, Int32Array, Int64Array
from shard_node.freshness import FreshnessBound

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
        bound: how old its rows may be; None for any age.
        return_missing: whether to tell which keys their tables have not.
    """

    bags: Bags
    num_candidates: int
    context_dense: Float32Array
    candidate_dense: Float32Array
    timeout_s: float
    top_k: int | None = None
    request_id: str = ""
    texts: Sequence[str] = ()
    bound: FreshnessBound | None = None
    return_missing: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class LookupRequest:
    """A request for embeddings of any features, with any number of bags each.

    `num_floats` are those of the response; each row and each bag of rows counts as one more.
    """

    bags: Bags
    timeout_s: float
    num_floats: int
    request_id: str = ""
    texts: Sequence[str] = ()
    bound: FreshnessBound | None = None
    return_missing: bool = False


Request: TypeAlias = RankRequest | LookupRequest
Response: TypeAlias = RankResult | LookupResult


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
        bound, return_missing: as of `RankRequest`.
    """

    method: Method = "rank"
    model: str = ""
    api: str = "http"
    version: int | None = None
    key: str = ""
    timeout_s: float = 0.0
    top_k: int | None = None
    request_id: str = ""
    bound: FreshnessBound | None = None
    return_missing: bool = False

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
        bags: Bags,
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
        options = self.timeout_s, self.top_k, self.request_id, texts, self.bound, self.return_missing
        return RankRequest(bags, num_candidates, context_dense, candidate_dense, *options)

    def lookup_request(self, schema: RequestSchema, bags: Bags, texts: Sequence[str]) -> LookupRequest:
        """Make a lookup with the options that were read. Raises InvalidRequestError: too large a response."""
        # A row is a list in the response, and so is a bag of rows: each takes about as long to write as a float.
        row, is_none = schema.embedding_dims[bags.keys] + 1, schema.features.is_none[bags.keys]
        rows, bags_of_rows = np.where(is_none, bags.values_per_key(), bags.bags_per_key), bags.bags_per_key[is_none]
        floats = int((rows * row).sum() + bags_of_rows.sum())
        if floats > (allowed := schema.limits.max_lookup_floats):
            raise limit_exceeded("sparse", "max_lookup_floats", allowed, floats, "floats in the answer")
        return LookupRequest(bags, self.timeout_s, floats, self.request_id, texts, self.bound, self.return_missing)


def check_options(
    limits: RequestLimits,
    request_id: str,
    routing_key: str,
    top_k: int | None,
    timeout_ms: int | None,
    bounds: Sequence[int | None],
    timeout_us: int | None = None,
) -> tuple[float, FreshnessBound | None]:
    """Check what every request may have.

    Returns seconds until the deadline: of `timeout_ms` and `timeout_us` (of the Open Inference Protocol) the earlier,
    or the default if both are None; and the bound of `bounds`, which are `max_age_ms` and `min_sequence`, if there is
    one. Raises InvalidRequestError.
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
    timeout_s = min(timeouts_s, default=limits.default_timeout_ms / 1000)
    max_age_ms, min_sequence = bounds
    if max_age_ms is None and min_sequence is None:
        return timeout_s, None
    for field, value in (("max_age_ms", max_age_ms), ("min_sequence", min_sequence)):
        if value is not None and not 0 <= value <= MAX_ID:
            raise invalid_field(field, f"{value} is not in 0..{MAX_ID}")
    return timeout_s, FreshnessBound(min_sequence or 0, max_age_ms)


RAGGED = -1
"""The width of a feature that says how many ids each of its bags has."""


class FeatureCounts(msgspec.Struct, eq=False):
    """How many ids and bags each feature of a request has, [S] in flat order.

    Attributes:
        keys: int32 [S], flat indices of the features that the request has; a lookup may have any.
        widths: ids in each bag of a feature; `RAGGED` if it has lengths.
        weighted: positions in `keys` of features with weights.
    """

    keys: Int32Array
    num_ids: Sequence[int] | Int64Array
    num_bags: Sequence[int] | Int64Array
    widths: Sequence[int]
    weighted: Sequence[int] | slice = ()

    def check(self, schema: RequestSchema, num_candidates: int | None, path: Callable[[str], str]) -> None:
        """Refuse too many ids or bags, before any is read.

        And unless it is a lookup, with None for candidates, a feature with other than one bag, or one for each
        candidate. `path` names a feature in errors.
        """
        total, allowed = sum(self.num_ids), schema.limits.max_ids_per_request
        if total > allowed:
            for key, count in zip(self.keys.tolist(), self.num_ids, strict=True):
                if count > allowed:
                    raise limit_exceeded(path(schema.names[key]), "max_ids_per_request", allowed, count, "ids")
            raise limit_exceeded("sparse", "max_ids_per_request", allowed, total, "ids over all features")
        if num_candidates is None:
            allowed, count = schema.limits.max_bags_per_feature, max(self.num_bags, default=0)
            if count > allowed:
                name = schema.names[self.keys[list(self.num_bags).index(count)]]
                raise limit_exceeded(path(name), "max_bags_per_feature", allowed, count, "bags")
            return
        given, expected = self.num_bags, schema.bags_per_key(num_candidates).tolist()
        if given != expected:
            key = next(key for key, count in enumerate(expected) if given[key] != count)
            name, is_context, _ = schema.kinds[key]
            unit = "bags" if is_context else "candidates"
            raise count_mismatch(path(name), f"{given[key]} {unit}, expected {expected[key]}")

    def bags(
        self,
        schema: RequestSchema,
        lengths: Int64Array,
        ids: Int64Array,
        texts: Sequence[str] = (),
        weights: Float32Array | None = None,
        *,
        is_lookup: bool = False,
    ) -> Bags:
        """Make bags of what was counted, if the numbers agree and are within the limits.

        `lengths` are those of all bags of `RAGGED` features, `ids` all integer ids, `texts` all string ids, `weights`
        all of `weighted` features, each in flat order.

        Raises InvalidRequestError: a negative length or id, lengths that do not add up to the ids, too many ids, or a
        weight that is not finite.
        """
        keys, limits, longest = self.keys, schema.limits, 1
        num_ids, num_bags = np.array(self.num_ids, np.int64), np.array(self.num_bags, np.int64)
        values, flat_weights = ids, None
        if texts:
            is_text = np.repeat(schema.is_string[keys], num_ids)
            values = np.empty(is_text.size, np.int64)
            values[is_text] = fingerprint_strings(texts)
            values[~is_text] = ids
        if (total := values.size) > (allowed := limits.max_ids_per_request):
            raise limit_exceeded("sparse", "max_ids_per_request", allowed, total, "ids over all features")
        if weights is not None:
            flat_weights = np.ones(total, np.float32)
            is_weighted = np.zeros(keys.size, np.bool_)
            is_weighted[self.weighted] = True
            flat_weights[np.repeat(is_weighted, num_ids)] = weights
        if self.widths.count(1) == len(self.widths):
            bags = Bags(keys, num_bags, np.arange(total + 1), values, flat_weights)
            described = num_bags
        else:
            flat_lengths = np.repeat(np.array(self.widths, np.int64), num_bags)
            if lengths.size:
                flat_lengths[flat_lengths == RAGGED] = lengths
            # Bounded one by one before they are summed, so that the sum can't wrap around.
            if flat_lengths.size:
                longest = int(np.maximum.reduce(flat_lengths))
                if not 0 <= int(np.minimum.reduce(flat_lengths)) <= longest <= total:
                    bag, ends = int(((flat_lengths < 0) | (flat_lengths > total)).argmax()), np.cumsum(num_bags)
                    segment = int(np.searchsorted(ends, bag, side="right"))
                    path = schema.feature_path(schema.names[int(keys[segment])], is_lookup=is_lookup)
                    path += f".lengths[{bag - int(ends[segment] - num_bags[segment])}]"
                    raise invalid_field(path, f"{flat_lengths[bag]} is not in 0..{total}, the number of ids")
            bags = Bags.from_lengths(keys, num_bags, flat_lengths, values, flat_weights)
            described = bags.values_per_key()
        if not np.array_equal(described, num_ids):
            segment = int((described != num_ids).argmax())
            path = schema.feature_path(schema.names[int(keys[segment])], is_lookup=is_lookup)
            raise count_mismatch(
                f"{path}.lengths", f"they add up to {described[segment]}, but there are {num_ids[segment]} ids"
            )
        if longest > limits.max_ids_per_bag:
            path = value_path(schema, bags, int(bags.offsets[int(bags.lengths.argmax())]), is_lookup=is_lookup)
            path = path.rsplit("[", 1)[0]
            raise limit_exceeded(path, "max_ids_per_bag", limits.max_ids_per_bag, longest, "ids in one bag")
        if total and int(np.minimum.reduce(values)) < 0:
            _check_not_negative(schema, bags, is_lookup=is_lookup)
        if flat_weights is not None and not np.logical_and.reduce(np.isfinite(flat_weights)):
            index = int((~np.isfinite(flat_weights)).argmax())
            path = value_path(schema, bags, index, "weights", is_lookup=is_lookup)
            raise invalid_field(path, f"{flat_weights[index]} is not a finite float32")
        return bags


def _check_not_negative(schema: RequestSchema, bags: Bags, *, is_lookup: bool) -> None:
    # Of tables with keys any number is an id.
    is_wrong = (bags.values < 0) & ~np.repeat(schema.is_keyed[bags.keys], bags.values_per_key())
    if is_wrong[index := int(is_wrong.argmax())]:
        path = value_path(schema, bags, index, is_lookup=is_lookup)
        raise invalid_id(path, f"{bags.values[index]} is not in 0..{MAX_ID}")


def value_path(
    schema: RequestSchema, bags: Bags, value_index: int, member: str = "sparse", *, is_lookup: bool = False
) -> str:
    """Path of one value, such as `candidates.sparse.film_id[3][0]`; a context feature has one index."""
    bag = int(np.searchsorted(bags.offsets, value_index, side="right")) - 1
    starts = bags.bag_starts()
    segment = int(np.searchsorted(starts, bag, side="right")) - 1
    name = schema.names[int(bags.keys[segment])]
    part: Part = "" if is_lookup else schema.part_of(name)
    bag_index = "" if part == "context" else f"[{bag - int(starts[segment])}]"
    return part_path(part, f"{member}.{name}{bag_index}[{value_index - int(bags.offsets[bag])}]")


def array_of(buffer: Buffer, dtype: str, path: str) -> npt.NDArray[Any]:
    """View a buffer as numbers such as `<f4`. Raises InvalidRequestError for a part of one.

    Joining buffers in a `bytearray` makes them aligned and writable, and keeps nothing of the message.
    """
    width, size = int(dtype[-1]), len(buffer)
    if size % width:
        raise malformed(path, f"{size} bytes, which is not a multiple of {width}")
    return np.frombuffer(buffer, dtype)


def text_of(path: str, position: int, element: Buffer) -> str:
    """Decode a string id. Raises InvalidRequestError if it is not UTF-8."""
    try:
        return str(element, "utf-8")
    except UnicodeDecodeError as error:
        raise invalid_id(f"{path}[{position}]", f"it is not UTF-8: {error.reason}") from None

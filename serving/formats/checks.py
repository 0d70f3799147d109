"""Checks that need the whole request's flat arrays: a fixed number of vector operations, whatever the API.

Only when one fails is the position looked for that the error names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from serving.errors import CountMismatchError, InvalidFieldError, InvalidIdError, LimitExceededError
from serving.formats.requests import LookupRequest, Options, RankRequest
from serving.formats.schema import Part, RequestSchema, part_path
from serving.limits import MAX_ID, RequestLimits
from shard_node.bags import Float32Array, Int32Array, Int64Array, KeyedBags

TextField: TypeAlias = Literal["request_id", "routing_key"]
MAX_FLOAT32 = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Place:
    """Where one value of the flat arrays stood in the request."""

    part: Part
    feature: str
    bag: int
    position: int

    def path(self, member: str = "sparse") -> str:
        """Such as `candidates.sparse.film_id[3][0]`; a context feature is one bag, so it has one index."""
        bag = "" if self.part == "context" else f"[{self.bag}]"
        return part_path(self.part, f"{member}.{self.feature}{bag}[{self.position}]")


def place_of(schema: RequestSchema, bags: KeyedBags, value_index: int, *, lookup: bool = False) -> Place:
    """Finds the feature, bag and position of one value."""
    bag = int(np.searchsorted(bags.offsets, value_index, side="right")) - 1
    starts = bags.bag_starts()
    segment = int(np.searchsorted(starts, bag, side="right")) - 1
    name = schema.names[int(bags.keys[segment])]
    part: Part = "" if lookup else schema.part_of(name)
    return Place(part, name, bag - int(starts[segment]), value_index - int(bags.offsets[bag]))


def rank_request(
    schema: RequestSchema,
    bags: KeyedBags,
    num_candidates: int,
    context_dense: Float32Array,
    candidate_dense: Float32Array,
    options: Options,
    texts: Sequence[str] = (),
) -> RankRequest:
    """Check the numbers of a rank request; `keyed_bags` made its bags, so their counts agree.

    Raises:
        InvalidIdError: a negative id.
        InvalidFieldError: a number that is not finite, or an option out of its range.
        LimitExceededError: an option above its limit.
    """
    limits, values, weights = schema.limits, bags.values, bags.weights
    # One look for each kind of thing; where one fails, or there is something rare, it is gone over again to say what.
    if options.request_id or options.routing_key:
        check_text(limits, "routing_key", options.routing_key)
        check_text(limits, "request_id", options.request_id)
    if weights is not None or (values.size and int(np.minimum.reduce(values)) < 0):
        check_values(schema, bags)
    if context_dense.size and not np.logical_and.reduce(np.isfinite(context_dense)):
        check_dense("context", context_dense)
    if candidate_dense.size and not np.logical_and.reduce(np.isfinite(candidate_dense), axis=None):
        check_dense("candidates", candidate_dense)
    timeout_s = check_timeout(limits, options)
    top_k = None if options.top_k is None else check_top_k(options.top_k)
    request_id = options.request_id
    return RankRequest(bags, num_candidates, context_dense, candidate_dense, timeout_s, top_k, request_id, texts)


def lookup_request(
    schema: RequestSchema, bags: KeyedBags, options: Options, texts: Sequence[str] = ()
) -> LookupRequest:
    """Check the numbers of a lookup. Raises as `rank_request`, and for an answer that would be too large."""
    limits = schema.limits
    check_text(limits, "routing_key", options.routing_key)
    floats = check_lookup_size(schema, bags.keys, bags.bags_per_key, bags.values_per_key())
    check_values(schema, bags, lookup=True)
    timeout_s = check_timeout(limits, options)
    return LookupRequest(bags, timeout_s, floats, check_text(limits, "request_id", options.request_id), texts)


def keyed_bags(
    schema: RequestSchema,
    keys: Int32Array,
    bags_per_key: Int64Array,
    lengths: Int64Array | None,
    ids_per_key: Int64Array,
    values: Int64Array,
    weights: Float32Array | None = None,
    *,
    lookup: bool = False,
) -> KeyedBags:
    """Make bags of what a request says, if its counts agree and are within the limits.

    Args:
        schema: of the model.
        keys: int32 [S], flat feature indices, ascending.
        bags_per_key: int64 [S].
        lengths: int64 [B], ids in each bag; None if each has one.
        ids_per_key: int64 [S], the ids that are there.
        values: int64 [n], the ids.
        weights: float32 [n], or None.
        lookup: whether it is a lookup, which has no context and no candidates.

    Raises:
        InvalidFieldError: a negative length.
        CountMismatchError: lengths that do not add up to the ids.
        LimitExceededError: too many ids, in all or in one bag.
    """
    limits, num_ids, longest = schema.limits, values.size, 1
    if num_ids > limits.max_ids_per_request:
        check_num_ids(schema, num_ids)
    if lengths is None:
        bags = KeyedBags(keys, bags_per_key, np.arange(num_ids + 1), values, weights)
        described = bags_per_key
    else:
        # Bounded one by one before they are summed, so that the sum can't wrap around.
        if lengths.size:
            longest = int(np.maximum.reduce(lengths))
            if not 0 <= int(np.minimum.reduce(lengths)) <= longest <= num_ids:
                _refuse_length(schema, keys, bags_per_key, lengths, num_ids, lookup=lookup)
        bags = KeyedBags.from_lengths(keys, bags_per_key, lengths, values, weights)
        described = bags.values_per_key()
    if not np.array_equal(described, ids_per_key):
        segment = int((described != ids_per_key).argmax())
        name = schema.names[int(keys[segment])]
        path = part_path("" if lookup else schema.part_of(name), f"sparse.{name}")
        said, given = int(described[segment]), int(ids_per_key[segment])
        raise CountMismatchError(f"{path}.lengths", f"they add up to {said}, but there are {given} ids")
    if longest > limits.max_ids_per_bag:
        check_bag_lengths(schema, bags, lookup=lookup)
    return bags


def _refuse_length(
    schema: RequestSchema,
    keys: Int32Array,
    bags_per_key: Int64Array,
    lengths: Int64Array,
    num_ids: int,
    *,
    lookup: bool,
) -> None:
    bag = int(((lengths < 0) | (lengths > num_ids)).argmax())
    ends = np.cumsum(bags_per_key)
    segment = int(np.searchsorted(ends, bag, side="right"))
    name = schema.names[int(keys[segment])]
    position = bag - int(ends[segment] - bags_per_key[segment])
    path = part_path("" if lookup else schema.part_of(name), f"sparse.{name}.lengths[{position}]")
    raise InvalidFieldError(path, f"{int(lengths[bag])} is not in 0..{num_ids}, the number of ids")


def check_num_ids(schema: RequestSchema, num_ids: int) -> None:
    """Raises LimitExceededError for too many ids in a request."""
    allowed = schema.limits.max_ids_per_request
    if num_ids > allowed:
        raise LimitExceededError("sparse", "max_ids_per_request", allowed, num_ids, "ids over all features")


def check_bag_lengths(schema: RequestSchema, bags: KeyedBags, *, lookup: bool = False) -> None:
    """Raises LimitExceededError for too many ids in one bag. Values are not looked at."""
    lengths = bags.lengths
    if lengths.size and int(np.maximum.reduce(lengths)) > schema.limits.max_ids_per_bag:
        bag = int(lengths.argmax())
        raise _bag_too_long(schema, bags, int(bags.offsets[bag]), int(lengths[bag]), lookup=lookup)


def check_values(schema: RequestSchema, bags: KeyedBags, *, lookup: bool = False) -> None:
    """Checks ids and weights, whatever bags they are in.

    Raises:
        InvalidIdError: a negative id.
        InvalidFieldError: a weight that is NaN or infinite.
    """
    values, weights = bags.values, bags.weights
    if values.size and int(np.minimum.reduce(values)) < 0:
        index = int((values < 0).argmax())
        path = place_of(schema, bags, index, lookup=lookup).path()
        raise InvalidIdError(path, f"{int(values[index])} is not in 0..{MAX_ID}")
    if weights is not None and not np.isfinite(weights).all():
        index = int((~np.isfinite(weights)).argmax())
        path = place_of(schema, bags, index, lookup=lookup).path("weights")
        raise InvalidFieldError(path, f"{weights[index]} is not a finite float32")


def _bag_too_long(
    schema: RequestSchema, bags: KeyedBags, first_value: int, length: int, *, lookup: bool
) -> LimitExceededError:
    path = place_of(schema, bags, first_value, lookup=lookup).path().rsplit("[", 1)[0]
    return LimitExceededError(path, "max_ids_per_bag", schema.limits.max_ids_per_bag, length, "ids in one bag")


def check_bags_of_feature(schema: RequestSchema, part: Part, name: str, count: int) -> None:
    """Raises LimitExceededError for more bags of a feature than any request may have, or ids of a context feature."""
    limits = schema.limits
    if part == "context":
        limit, allowed, unit = "max_ids_per_bag", limits.max_ids_per_bag, "ids in one bag"
    elif part == "candidates":
        limit, allowed, unit = "max_candidates", limits.max_candidates, "candidates"
    else:
        limit, allowed, unit = "max_bags_per_feature", limits.max_bags_per_feature, "bags"
    if count > allowed:
        path = part if part == "candidates" else part_path(part, f"sparse.{name}")
        raise LimitExceededError(path, limit, allowed, count, unit)


def check_num_candidates(limits: RequestLimits, num_candidates: int) -> None:
    """Raises CountMismatchError for none, LimitExceededError for too many."""
    if num_candidates < 1:
        raise CountMismatchError("candidates", "0 candidates; a rank request needs at least 1")
    if num_candidates > limits.max_candidates:
        raise LimitExceededError("candidates", "max_candidates", limits.max_candidates, num_candidates, "candidates")


def check_lookup_size(
    schema: RequestSchema, keys: Int32Array, bags_per_key: Int64Array, values_per_key: Int64Array | None = None
) -> int:
    """Count the floats in the answer to a lookup. Raises LimitExceededError for too many of them, or of bags.

    Args:
        schema: of the model.
        keys: int32 [S], flat feature indices.
        bags_per_key: int64 [S].
        values_per_key: int64 [S]; None if it is not known yet, which leaves out what depends on it.
    """
    limits = schema.limits
    too_many = bags_per_key > limits.max_bags_per_feature
    if too_many.any():
        segment = int(too_many.argmax())
        path = f"sparse.{schema.names[int(keys[segment])]}"
        count = int(bags_per_key[segment])
        raise LimitExceededError(path, "max_bags_per_feature", limits.max_bags_per_feature, count, "bags")
    # A row is a list in the answer, and so is a bag of rows: each takes about as long to write as a float.
    row, is_none = schema.embedding_dims[keys] + 1, schema.features.is_none[keys]
    floats = int((bags_per_key * np.where(is_none, 1, row)).sum())
    if values_per_key is not None:
        floats += int((values_per_key * np.where(is_none, row, 0)).sum())
    if floats > limits.max_lookup_floats:
        allowed = limits.max_lookup_floats
        raise LimitExceededError("sparse", "max_lookup_floats", allowed, floats, "floats in the answer")
    return floats


def check_dense(part: Part, values: Float32Array) -> None:
    """Raises InvalidFieldError, naming the position, for NaN, inf, or what float32 can't hold.

    Args:
        part: the part of the request.
        values: float32 [Kc] or [N, Kd].
    """
    # As `all`, by fewer steps of the interpreter.
    if not values.size or np.logical_and.reduce(np.isfinite(values), axis=None):
        return
    where = np.argwhere(~np.isfinite(values))[0].tolist()
    path = part_path(part, "dense") + "".join(f"[{index}]" for index in where)
    raise InvalidFieldError(path, f"{values[tuple(where)]} is not a finite float32")


def check_timeout(limits: RequestLimits, options: Options) -> float:
    """Seconds until the deadline, the earlier one if two are given. Raises LimitExceededError or InvalidFieldError."""
    timeout_ms, timeout_us = options.timeout_ms, options.timeout_us
    timeout_s = limits.default_timeout_ms / 1000
    if timeout_ms is not None:
        if timeout_ms < 1:
            raise InvalidFieldError("timeout_ms", f"{timeout_ms} is not in 1..{limits.max_timeout_ms}")
        if timeout_ms > limits.max_timeout_ms:
            raise LimitExceededError("timeout_ms", "max_timeout_ms", limits.max_timeout_ms, timeout_ms, "ms")
        timeout_s = timeout_ms / 1000
    if timeout_us is not None:
        if timeout_us < 1:
            raise InvalidFieldError("timeout", f"{timeout_us} is not in 0..{1000 * limits.max_timeout_ms}")
        if timeout_us > 1000 * limits.max_timeout_ms:
            raise LimitExceededError("timeout", "max_timeout_ms", limits.max_timeout_ms, -(-timeout_us // 1000), "ms")
        timeout_s = timeout_us / 1e6 if timeout_ms is None else min(timeout_s, timeout_us / 1e6)
    return timeout_s


def check_top_k(top_k: int | None) -> int | None:
    """Raises InvalidFieldError for a top_k below 1. One above the number of candidates means all of them."""
    if top_k is not None and top_k < 1:
        raise InvalidFieldError("top_k", f"{top_k} is not 1 or more")
    return top_k


def check_text(limits: RequestLimits, field: TextField, text: str) -> str:
    """Raises LimitExceededError for text that is too long, InvalidFieldError if it is not valid Unicode."""
    allowed = limits.max_request_id_chars if field == "request_id" else limits.max_routing_key_chars
    if len(text) > allowed:
        raise LimitExceededError(field, f"max_{field}_chars", allowed, len(text), "characters")
    if not text.isascii() and has_lone_surrogate(text):
        raise InvalidFieldError(field, "it is not valid Unicode: it has a lone surrogate")
    return text


def dense_matrix(flat: npt.NDArray[np.float32], num_candidates: int, width: int) -> Float32Array:
    """Row-major values as float32 [N, width]. Raises CountMismatchError if they do not fill it."""
    if flat.size != num_candidates * width:
        raise CountMismatchError(
            "candidates.dense",
            f"{flat.size} values; {num_candidates} candidates of {width} values need {num_candidates * width}",
        )
    return flat.reshape(num_candidates, width)


def has_lone_surrogate(text: str) -> bool:
    """Whether text is not valid Unicode; JSON's escapes can say such text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def is_finite_number(value: object) -> bool:
    """Whether a decoded JSON value is a number (not a boolean) that float32 can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value) and abs(value) <= MAX_FLOAT32
    except OverflowError:
        return False

"""Checks that need the whole request's flat arrays: a fixed number of vector operations, whatever the API.

Only when one fails is the position looked for that the error names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.errors import CountMismatchError, InvalidFieldError, InvalidIdError, LimitExceededError
from serving.formats.requests import LookupRequest, Options, RankRequest
from serving.formats.schema import Part, RequestSchema, part_path
from serving.limits import MAX_ID, RequestLimits
from shard_node.bags import Float32Array, Int32Array, Int64Array, KeyedBags


def place_of(
    schema: RequestSchema, bags: KeyedBags, value_index: int, member: str = "sparse", *, lookup: bool = False
) -> str:
    """Path of one value, such as `candidates.sparse.film_id[3][0]`; a context feature is one bag: it has one index."""
    bag = int(np.searchsorted(bags.offsets, value_index, side="right")) - 1
    starts = bags.bag_starts()
    segment = int(np.searchsorted(starts, bag, side="right")) - 1
    name = schema.names[int(bags.keys[segment])]
    part: Part = "" if lookup else schema.part_of(name)
    bag_index = "" if part == "context" else f"[{bag - int(starts[segment])}]"
    return part_path(part, f"{member}.{name}{bag_index}[{value_index - int(bags.offsets[bag])}]")


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
    timeout_s = _check_common(schema, bags, options, lookup=False)
    # Not `all` of arrays: by fewer steps of the interpreter.
    if context_dense.size and not np.logical_and.reduce(np.isfinite(context_dense)):
        raise _not_finite("context.dense", context_dense)
    if candidate_dense.size and not np.logical_and.reduce(np.isfinite(candidate_dense), axis=None):
        raise _not_finite("candidates.dense", candidate_dense)
    if options.top_k is not None and options.top_k < 1:
        raise InvalidFieldError("top_k", f"{options.top_k} is not 1 or more")
    return RankRequest(
        bags, num_candidates, context_dense, candidate_dense, timeout_s, options.top_k, options.request_id, texts
    )


def lookup_request(
    schema: RequestSchema, bags: KeyedBags, options: Options, texts: Sequence[str] = ()
) -> LookupRequest:
    """Check the numbers of a lookup. Raises as `rank_request`, and for an answer that would be too large."""
    floats = check_lookup_size(schema, bags.keys, bags.bags_per_key, bags.values_per_key())
    timeout_s = _check_common(schema, bags, options, lookup=True)
    return LookupRequest(bags, timeout_s, floats, options.request_id, texts)


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
        allowed = limits.max_ids_per_request
        raise LimitExceededError("sparse", "max_ids_per_request", allowed, num_ids, "ids over all features")
    if lengths is None:
        bags = KeyedBags(keys, bags_per_key, np.arange(num_ids + 1), values, weights)
        described = bags_per_key
    else:
        # Bounded one by one before they are summed, so that the sum can't wrap around.
        if lengths.size:
            longest = int(np.maximum.reduce(lengths))
            if not 0 <= int(np.minimum.reduce(lengths)) <= longest <= num_ids:
                bag, ends = int(((lengths < 0) | (lengths > num_ids)).argmax()), np.cumsum(bags_per_key)
                segment = int(np.searchsorted(ends, bag, side="right"))
                path = _lengths_path(schema, keys, segment, lookup=lookup)
                path += f"[{bag - int(ends[segment] - bags_per_key[segment])}]"
                raise InvalidFieldError(path, f"{lengths[bag]} is not in 0..{num_ids}, the number of ids")
        bags = KeyedBags.from_lengths(keys, bags_per_key, lengths, values, weights)
        described = bags.values_per_key()
    if not np.array_equal(described, ids_per_key):
        segment = int((described != ids_per_key).argmax())
        path = _lengths_path(schema, keys, segment, lookup=lookup)
        raise CountMismatchError(path, f"they add up to {described[segment]}, but there are {ids_per_key[segment]} ids")
    if longest > limits.max_ids_per_bag:
        path = place_of(schema, bags, int(bags.offsets[int(bags.lengths.argmax())]), lookup=lookup).rsplit("[", 1)[0]
        raise LimitExceededError(path, "max_ids_per_bag", limits.max_ids_per_bag, longest, "ids in one bag")
    return bags


def _lengths_path(schema: RequestSchema, keys: Int32Array, segment: int, *, lookup: bool) -> str:
    name = schema.names[int(keys[segment])]
    return part_path("" if lookup else schema.part_of(name), f"sparse.{name}.lengths")


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
        path, count = f"sparse.{schema.names[int(keys[segment])]}", int(bags_per_key[segment])
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


def dense_matrix(flat: npt.NDArray[np.float32], num_candidates: int, width: int) -> Float32Array:
    """Row-major values as float32 [N, width]. Raises CountMismatchError if they do not fill it."""
    if flat.size != num_candidates * width:
        needed = f"{num_candidates} candidates of {width} values need {num_candidates * width}"
        raise CountMismatchError("candidates.dense", f"{flat.size} values; {needed}")
    return flat.reshape(num_candidates, width)


def _check_common(schema: RequestSchema, bags: KeyedBags, options: Options, *, lookup: bool) -> float:
    """Check what every request has. Returns seconds until the deadline, the earlier one if two are given."""
    limits, values, weights = schema.limits, bags.values, bags.weights
    if options.request_id or options.routing_key:
        for field in ("request_id", "routing_key"):
            limit, count = f"max_{field}_chars", len(getattr(options, field))
            if count > getattr(limits, limit):
                raise LimitExceededError(field, limit, getattr(limits, limit), count, "characters")
    if values.size and int(np.minimum.reduce(values)) < 0:
        index = int((values < 0).argmax())
        raise InvalidIdError(place_of(schema, bags, index, lookup=lookup), f"{values[index]} is not in 0..{MAX_ID}")
    if weights is not None and not np.logical_and.reduce(np.isfinite(weights)):
        index = int((~np.isfinite(weights)).argmax())
        path = place_of(schema, bags, index, "weights", lookup=lookup)
        raise InvalidFieldError(path, f"{weights[index]} is not a finite float32")
    most, timeouts_s = limits.max_timeout_ms, list[float]()
    for field, timeout, per_ms in (("timeout_ms", options.timeout_ms, 1), ("timeout", options.timeout_us, 1000)):
        if timeout is None:
            continue
        if timeout < 1:
            raise InvalidFieldError(field, f"{timeout} is not in 1..{most * per_ms}")
        if timeout > most * per_ms:
            raise LimitExceededError(field, "max_timeout_ms", most, -(-timeout // per_ms), "ms")
        timeouts_s.append(timeout / (1000 * per_ms))
    return min(timeouts_s, default=limits.default_timeout_ms / 1000)


def _not_finite(path: str, values: npt.NDArray[Any]) -> InvalidFieldError:
    where = np.argwhere(~np.isfinite(values))[0].tolist()
    path += "".join(f"[{index}]" for index in where)
    return InvalidFieldError(path, f"{values[tuple(where)]} is not a finite float32")

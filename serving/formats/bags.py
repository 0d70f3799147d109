"""From a request's numbers in any form to keyed bags, and the checks that need all of them.

A binary form reads its layout first, a count for each feature. When all counts are within the limits, its buffers of
little-endian numbers are joined to arrays of the request. Checks are a fixed number of vector operations; only when one
fails is the position searched for that the error names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from loader.snapshot.tables import fingerprint_strings
from serving.errors import InvalidRequestError, count_mismatch, invalid_field, invalid_id, limit_exceeded, malformed
from serving.formats.requests import Buffer, LookupRequest, Options, RankRequest
from serving.formats.schema import MAX_NAME_CHARS, Part, RequestSchema, part_path
from serving.limits import MAX_ID, RequestLimits
from shard_node.bags import Float32Array, Int32Array, Int64Array, KeyedBags

INTEGERS = ("INT64", "INT32")
DTYPES = {"INT64": "<i8", "INT32": "<i4", "FP32": "<f4"}
_WIDTHS = {"INT64": 8, "INT32": 4, "FP32": 4}
RAGGED = -1
"""The width of a feature that says how many ids each of its bags has."""


class FeatureCounts:
    """How many ids and bags each feature of a request has, in flat order. `path` names a feature in errors.

    Attributes:
        keys: int32 [S], flat indices of the features that the request has; a lookup may have any.
        widths: ids in each bag of a feature; `RAGGED` if it has lengths.
        weighted: positions in `keys` of features with weights.
    """

    def __init__(
        self, schema: RequestSchema, keys: Int32Array, path: Callable[[str], str], *, lookup: bool = False
    ) -> None:
        self.keys = keys
        self.num_ids: list[int] = []
        self.num_bags: list[int] = []
        self.widths: list[int] = []
        self.weighted: list[int] = []
        self._schema, self._path, self._lookup = schema, path, lookup

    def add(self, num_ids: int, num_bags: int, width: int) -> None:
        """Add the next feature."""
        self.num_ids.append(num_ids)
        self.num_bags.append(num_bags)
        self.widths.append(width)

    def check(self, num_candidates: int) -> None:
        """Refuse a rank request with too many ids, or a feature with other than one bag, or one for each candidate."""
        self.check_num_ids()
        given, expected = self.num_bags, self._schema.bags_per_key(num_candidates).tolist()
        if given != expected:
            key = next(key for key, count in enumerate(expected) if given[key] != count)
            name, is_context, _ = self._schema.kinds[key]
            unit = "bags" if is_context else "candidates"
            raise count_mismatch(self._path(name), f"{given[key]} {unit}, expected {expected[key]}")

    def check_num_ids(self) -> None:
        """Raise InvalidRequestError for too many ids, before any is read."""
        total, allowed = sum(self.num_ids), self._schema.limits.max_ids_per_request
        if total > allowed:
            for key, count in zip(self.keys.tolist(), self.num_ids, strict=True):
                if count > allowed:
                    path = self._path(self._schema.names[key])
                    raise limit_exceeded(path, "max_ids_per_request", allowed, count, "ids")
            raise limit_exceeded("sparse", "max_ids_per_request", allowed, total, "ids over all features")

    def bags(
        self, ids: Iterable[Buffer], texts: Sequence[str], lengths: Int64Array, weights: Sequence[Buffer]
    ) -> KeyedBags:
        """Make the bags of what was counted.

        `ids` are int64, of the features with integer ids, one after the other; `texts` the other features' ids;
        `lengths` int64, of `RAGGED` features; `weights` float32, of `weighted` ones.
        """
        num_ids, num_bags = np.array(self.num_ids, np.int64), np.array(self.num_bags, np.int64)
        flat_lengths: Int64Array | None = lengths
        if self.widths.count(RAGGED) < len(self.widths):
            widths = np.repeat(np.array(self.widths, np.int64), num_bags)
            if lengths.size:
                widths[widths == RAGGED] = lengths
            flat_lengths = None if self.widths.count(1) == len(self.widths) else widths
        flat_weights = None
        if weights:
            flat_weights = np.ones(sum(self.num_ids), np.float32)
            is_weighted = np.zeros(num_ids.size, np.bool_)
            is_weighted[self.weighted] = True
            flat_weights[np.repeat(is_weighted, num_ids)] = array_of(bytearray().join(weights), "<f4", "weights")
        values = values_of(self._schema, self.keys, num_ids, array_of(bytearray().join(ids), "<i8", "ids"), texts)
        return keyed_bags(
            self._schema, self.keys, num_bags, flat_lengths, num_ids, values, flat_weights, lookup=self._lookup
        )


def values_of(
    schema: RequestSchema, keys: Int32Array, num_ids: Int64Array, integers: Int64Array, texts: Sequence[str]
) -> Int64Array:
    """All ids in flat order, int64 [n]: integers, and between them fingerprints of the strings."""
    if not texts:
        return integers
    is_text = np.repeat(schema.is_string[keys], num_ids)
    values = np.empty(is_text.size, np.int64)
    values[is_text] = fingerprint_strings(texts)
    values[~is_text] = integers
    return values


def array_of(buffer: Buffer, dtype: str, path: str) -> npt.NDArray[Any]:
    """View a buffer as numbers such as `<f4`. Raises InvalidRequestError for a part of one.

    Joining buffers in a `bytearray` makes them aligned and writable, and keeps nothing of the message.
    """
    width, size = int(dtype[-1]), len(buffer)
    if size % width:
        raise malformed(path, f"{size} bytes, which is not a multiple of {width}")
    return np.frombuffer(buffer, dtype)


def place_of(
    schema: RequestSchema, bags: KeyedBags, value_index: int, member: str = "sparse", *, lookup: bool = False
) -> str:
    """Path of one value, such as `candidates.sparse.film_id[3][0]`; a context feature has one index."""
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
    """Check the numbers of a rank request. Raises InvalidRequestError."""
    timeout_s = _check_common(schema, bags, options, lookup=False)
    # Not `all` of arrays: by fewer steps of the interpreter.
    if context_dense.size and not np.logical_and.reduce(np.isfinite(context_dense)):
        raise _not_finite("context.dense", context_dense)
    if candidate_dense.size and not np.logical_and.reduce(np.isfinite(candidate_dense), axis=None):
        raise _not_finite("candidates.dense", candidate_dense)
    if options.top_k is not None and options.top_k < 1:
        raise invalid_field("top_k", f"{options.top_k} is not 1 or more")
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
    """Make bags of a request, if its counts agree and are within the limits.

    `keys`, `bags_per_key` and `ids_per_key` are [S]: each feature's flat index, ascending, its bags and its ids.
    `lengths` is int64 [B], ids in each bag, or None if each has one; `values` and `weights` are [n]. A `lookup` has no
    context and no candidates.

    Raises:
        InvalidRequestError: a negative length, lengths that do not add up to the ids, or too many ids.
    """
    limits, num_ids, longest = schema.limits, values.size, 1
    if num_ids > limits.max_ids_per_request:
        allowed = limits.max_ids_per_request
        raise limit_exceeded("sparse", "max_ids_per_request", allowed, num_ids, "ids over all features")
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
                raise invalid_field(path, f"{lengths[bag]} is not in 0..{num_ids}, the number of ids")
        bags = KeyedBags.from_lengths(keys, bags_per_key, lengths, values, weights)
        described = bags.values_per_key()
    if not np.array_equal(described, ids_per_key):
        segment = int((described != ids_per_key).argmax())
        path = _lengths_path(schema, keys, segment, lookup=lookup)
        raise count_mismatch(path, f"they add up to {described[segment]}, but there are {ids_per_key[segment]} ids")
    if longest > limits.max_ids_per_bag:
        path = place_of(schema, bags, int(bags.offsets[int(bags.lengths.argmax())]), lookup=lookup).rsplit("[", 1)[0]
        raise limit_exceeded(path, "max_ids_per_bag", limits.max_ids_per_bag, longest, "ids in one bag")
    return bags


def _lengths_path(schema: RequestSchema, keys: Int32Array, segment: int, *, lookup: bool) -> str:
    name = schema.names[int(keys[segment])]
    return part_path("" if lookup else schema.part_of(name), f"sparse.{name}.lengths")


def check_num_candidates(limits: RequestLimits, num_candidates: int) -> None:
    """Raise InvalidRequestError for none or too many."""
    if num_candidates < 1:
        raise count_mismatch("candidates", "0 candidates; a rank request needs at least 1")
    if num_candidates > limits.max_candidates:
        raise limit_exceeded("candidates", "max_candidates", limits.max_candidates, num_candidates, "candidates")


def check_lookup_size(
    schema: RequestSchema, keys: Int32Array, bags_per_key: Int64Array, values_per_key: Int64Array | None = None
) -> int:
    """Count the floats in the answer to a lookup. Raises InvalidRequestError for too many of them, or of bags.

    All arrays are [S], by feature; without `values_per_key`, what depends on it is left out.
    """
    limits = schema.limits
    too_many = bags_per_key > limits.max_bags_per_feature
    if too_many.any():
        segment = int(too_many.argmax())
        path, count = f"sparse.{schema.names[int(keys[segment])]}", int(bags_per_key[segment])
        raise limit_exceeded(path, "max_bags_per_feature", limits.max_bags_per_feature, count, "bags")
    # A row is a list in the answer, and so is a bag of rows: each takes about as long to write as a float.
    row, is_none = schema.embedding_dims[keys] + 1, schema.features.is_none[keys]
    floats = int((bags_per_key * np.where(is_none, 1, row)).sum())
    if values_per_key is not None:
        floats += int((values_per_key * np.where(is_none, row, 0)).sum())
    if floats > limits.max_lookup_floats:
        allowed = limits.max_lookup_floats
        raise limit_exceeded("sparse", "max_lookup_floats", allowed, floats, "floats in the answer")
    return floats


def _check_common(schema: RequestSchema, bags: KeyedBags, options: Options, *, lookup: bool) -> float:
    """Check what every request has. Returns seconds until the deadline, the earlier one if two are given."""
    limits, values, weights = schema.limits, bags.values, bags.weights
    if options.request_id or options.routing_key:
        for field in ("request_id", "routing_key"):
            limit, count = f"max_{field}_chars", len(getattr(options, field))
            if count > getattr(limits, limit):
                raise limit_exceeded(field, limit, getattr(limits, limit), count, "characters")
    if values.size and int(np.minimum.reduce(values)) < 0:
        index = int((values < 0).argmax())
        raise invalid_id(place_of(schema, bags, index, lookup=lookup), f"{values[index]} is not in 0..{MAX_ID}")
    if weights is not None and not np.logical_and.reduce(np.isfinite(weights)):
        index = int((~np.isfinite(weights)).argmax())
        path = place_of(schema, bags, index, "weights", lookup=lookup)
        raise invalid_field(path, f"{weights[index]} is not a finite float32")
    most, timeouts_s = limits.max_timeout_ms, list[float]()
    for field, timeout, per_ms in (("timeout_ms", options.timeout_ms, 1), ("timeout", options.timeout_us, 1000)):
        if timeout is None:
            continue
        if timeout < 1:
            raise invalid_field(field, f"{timeout} is not in 1..{most * per_ms}")
        if timeout > most * per_ms:
            raise limit_exceeded(field, "max_timeout_ms", most, -(-timeout // per_ms), "ms")
        timeouts_s.append(timeout / (1000 * per_ms))
    return min(timeouts_s, default=limits.default_timeout_ms / 1000)


def _not_finite(path: str, values: npt.NDArray[Any]) -> InvalidRequestError:
    where = np.argwhere(~np.isfinite(values))[0].tolist()
    path += "".join(f"[{index}]" for index in where)
    return invalid_field(path, f"{values[tuple(where)]} is not a finite float32")


class Tensor(msgspec.Struct, gc=False):
    """A named array, as the client describes it: `shape` is not checked.

    Raw data are little-endian and row-major, a string is a 4-byte length and its bytes. Other data are a function that
    decodes them: of the path for errors, the datatype and a count, it returns a buffer of numbers or a list of strings.
    """

    name: str
    datatype: str
    shape: list[int]
    data: memoryview | Callable[[str, str, int], Any]

    def sizes(self) -> tuple[int, int]:
        """Rows of one or two dimensions, and elements of each row."""
        shape = self.shape
        if len(shape) == 1 and 0 <= shape[0] <= MAX_ID:
            return shape[0], 1
        if len(shape) == 2 and 0 <= shape[0] <= MAX_ID and 0 <= shape[1] <= MAX_ID:
            return shape[0], shape[1]
        raise self.wrong_shape("it must have one or two dimensions, each 0 or more")

    def integers(self, count: int) -> Buffer:
        """int64 elements, as many as `count`."""
        elements: Buffer = self._elements(count, INTEGERS)
        return elements if self.datatype == "INT64" else np.frombuffer(elements, "<i4").astype("<i8").data

    def floats(self, count: int) -> Buffer:
        """float32 elements, as many as `count`; they may be NaN and inf."""
        elements: Buffer = self._elements(count, ("FP32",))
        return elements

    def texts(self, count: int) -> list[str]:
        """Strings, as many as `count`."""
        data = self._elements(count, ("BYTES",))
        if isinstance(data, list):
            return data
        start, path, texts = 0, input_path(self.name), list[str]()
        while start < len(data) and len(texts) <= count:
            first = start + 4
            start = first + int.from_bytes(data[start:first], "little")
            if start > len(data):
                raise malformed(path, f"BYTES element {len(texts)} is longer than what is left")
            texts.append(text_of(path, len(texts), data[first:start]))
        if len(texts) != count:
            raise wrong_count(path, count, f"{len(texts)}" if len(texts) < count else f"at least {len(texts)}")
        return texts

    def wrong_shape(self, allowed: str) -> InvalidRequestError:
        """Make the error for a shape."""
        return count_mismatch(f"{input_path(self.name)}.shape", f"{self.shape[:8]}; {allowed}")

    def _elements(self, count: int, allowed: tuple[str, ...]) -> Any:
        datatype, data = self.datatype, self.data
        if datatype not in allowed:
            kind = "invalid_field" if allowed == ("FP32",) else "invalid_id"
            problem = f"{datatype[:16]!r}; it must be {' or '.join(allowed)}"
            raise InvalidRequestError(f"{input_path(self.name)}.datatype", problem, kind=kind)
        if not isinstance(data, memoryview):
            return data(input_path(self.name), datatype, count)
        if datatype != "BYTES" and len(data) != count * _WIDTHS[datatype]:
            wanted = f"{count} elements of {datatype}, {count * _WIDTHS[datatype]} bytes"
            raise count_mismatch(input_path(self.name), f"{len(data)} bytes of data; its shape holds {wanted}")
        return data


def input_path(name: str) -> str:
    """Name an input in errors."""
    return f"inputs.{name[:MAX_NAME_CHARS]}"


def text_of(path: str, position: int, element: Buffer) -> str:
    """Decode a string. Raises InvalidRequestError if it is not UTF-8."""
    try:
        return str(element, "utf-8")
    except UnicodeDecodeError as error:
        raise invalid_id(f"{path}[{position}]", f"it is not UTF-8: {error.reason}") from None


def wrong_count(path: str, count: int, got: str) -> InvalidRequestError:
    """Make the error for another number of elements than a shape holds."""
    return count_mismatch(path, f"its shape holds {count} elements, its data {got}")

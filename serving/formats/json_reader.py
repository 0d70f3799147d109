"""The JSON form of requests: simdjson reads the text, and no Python object is made for a number.

One reader takes everything that is allowed. What it does not take is wrong, and `json_refusal` goes over the text
again to say what. Reading flattens lists; that they are nested as they must be is proven by counting brackets, see
`_Brackets`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias, cast

import msgspec
import numpy as np
import numpy.typing as npt
import simdjson

from loader.fingerprint import fingerprint_strings
from serving.errors import BadRequestError, BodyTooLargeError, InvalidFieldError, LimitExceededError
from serving.formats.checks import (
    check_bags_of_feature,
    check_lookup_size,
    check_num_candidates,
    keyed_bags,
    lookup_request,
    rank_request,
)
from serving.formats.json_refusal import MAX_KEYS, decode_plainly, key_twice, refusal_of
from serving.formats.json_text import count_above
from serving.formats.json_writer import encode, encode_lookup, rank_document
from serving.formats.requests import (
    Answer,
    Buffer,
    Encoded,
    LookupRequest,
    Method,
    Options,
    RankAnswer,
    RankRequest,
    Request,
)
from serving.formats.schema import Part, RequestSchema
from serving.limits import MAX_ID, RequestLimits
from shard_node.bags import Float32Array, Int64Array

# A parser keeps several times its longest text in memory, one for each thread: longer texts get one of their own.
MAX_KEPT_BYTES = 2**20
# A column of so few is cheap whatever it holds; its count is checked with all others.
_FEW_BAGS = 1024
_BRACKET, _QUOTE = ord("["), ord('"')
_OPTION_KEYS = frozenset({"timeout_ms", "version", "request_id", "routing_key"})
_RANK_KEYS = frozenset({"context", "candidates", "top_k"}) | _OPTION_KEYS
_LOOKUP_KEYS = frozenset({"sparse", "weights"}) | _OPTION_KEYS
_PART_KEYS = frozenset({"sparse", "weights", "dense"})
_NONE: frozenset[str] = frozenset()
_THREADS = threading.local()
# What simdjson, NumPy and the checks below say of a text that is not as it should be.
_NOT_TAKEN = (TypeError, ValueError, OverflowError, RuntimeError, KeyError, IndexError)
Column: TypeAlias = Any


class NotTakenError(ValueError):
    """The text is not a request as it must be; `json_refusal` says why. Never leaves this file."""


class JsonCodec:
    """Reads the JSON form of a request to a model and writes its answer.

    Args:
        method: what is asked for.
        model: from the path.
        api: name of the API in metrics.
    """

    def __init__(self, method: Method, model: str, api: str = "http") -> None:
        self.method: Method = method
        self.api = api
        self._model = model

    def read(self, body: Buffer, limits: RequestLimits) -> UnparsedJson | RefusedJson:
        """Parse the text, and read what it says beside numbers.

        Raises:
            BodyTooLargeError: it is longer than JSON may be.
            MalformedRequestError: it is not JSON, or no object.
            InvalidFieldError: an option that is not what it must be, or a key that there is not.
        """
        allowed = limits.max_json_bytes
        if len(body) > allowed:
            raise BodyTooLargeError("", "max_json_bytes", allowed, len(body), "bytes of JSON in the body")
        text = bytes(body) if isinstance(body, memoryview) else body
        try:
            document = _parse(text)
            keys = _keys(document, _RANK_KEYS if self.method == "rank" else _LOOKUP_KEYS)
            return UnparsedJson(self.method, self._model, text, document, keys)
        except _NOT_TAKEN:
            # Said outside, so that the error does not refer to this one and what it holds.
            pass
        return RefusedJson(self.method, self._model, decode_plainly(text, self.method, limits))


class UnparsedJson:
    """A document whose features were not looked at yet.

    Args:
        method: what is asked for.
        model: from the path.
        text: of the document.
        document: of simdjson; valid until the next text is parsed on this thread.
        keys: of the document.

    Attributes:
        model, version, key: see `Unparsed`.
    """

    def __init__(
        self,
        method: Method,
        model: str,
        text: bytes | bytearray,
        document: Any,
        keys: frozenset[str],
    ) -> None:
        self.model = model
        self._method = method
        self._text = text
        self._document = document
        self._keys = keys
        self.version = self._integer("version", 1)
        self._options = Options(
            self._integer("timeout_ms", 1),
            None,
            self._integer("top_k", 1),
            self._string("request_id"),
            self._string("routing_key"),
        )
        self.key = self._options.routing_key or self._options.request_id

    def parse(self, schema: RequestSchema) -> Request:
        """See `Unparsed`."""
        is_rank = self._method == "rank"
        if schema.is_string.any():
            self._count_strings(schema.limits)
        try:
            return self._rank(schema) if is_rank else self._lookup(schema)
        except _NOT_TAKEN:
            pass
        except BadRequestError as error:
            # Its frames hold what was read with the parser, which is free for another text once nothing of it is left.
            raise error.with_traceback(None) from None
        finally:
            self._document = None
        raise refusal_of(schema, self._method, self._text)

    def encode(self, answer: Answer) -> Encoded:
        """See `Unparsed`."""
        return Encoded(encode(rank_document(answer)) if isinstance(answer, RankAnswer) else encode_lookup(answer))

    def _rank(self, schema: RequestSchema) -> RankRequest:
        brackets = _Brackets(self._text)
        context, candidates = (self._part(schema, part) for part in ("context", "candidates"))
        columns = [
            _Column.of(schema, "context", name, context.sparse[name], context.weights.get(name), is_string)
            if is_context
            else _Column.of(
                schema, "candidates", name, candidates.sparse[name], candidates.weights.get(name), is_string
            )
            for name, is_context, is_string in schema.kinds
        ]
        num_candidates = 0 if candidates.dense is None else len(_array(candidates.dense))
        if schema.candidate_names:
            num_candidates = columns[schema.features.index[schema.candidate_names[0]]].num_bags
        check_num_candidates(schema.limits, num_candidates)
        context_dense = _context_dense(context.dense, schema.num_context_dense, brackets)
        dense = _candidate_dense(candidates.dense, num_candidates, schema.num_candidate_dense, brackets)
        bags, texts = _bags(schema, schema.keys, columns, brackets, lookup=False)
        if not np.array_equal(bags.bags_per_key, schema.bags_per_key(num_candidates)):
            raise NotTakenError
        brackets.check()
        return rank_request(schema, bags, num_candidates, context_dense, dense, self._options, texts)

    def _lookup(self, schema: RequestSchema) -> LookupRequest:
        brackets = _Brackets(self._text)
        sparse = self._document["sparse"]
        given = _keys(sparse, frozenset(schema.names))
        weights = _weights(self._document["weights"], schema.weighted_names & given) if "weights" in self._keys else {}
        keys = sorted(schema.features.index[name] for name in given)
        names, are_strings = [schema.names[key] for key in keys], schema.is_string[keys].tolist()
        columns = [
            _Column.of(schema, "", name, sparse[name], weights.get(name), is_string)
            for name, is_string in zip(names, are_strings, strict=True)
        ]
        bags, texts = _bags(schema, np.array(keys, np.int32), columns, brackets, lookup=True)
        brackets.check()
        return lookup_request(schema, bags, self._options, texts)

    def _part(self, schema: RequestSchema, part: Part) -> _PartObject:
        """One part of a rank request. Raises NotTakenError unless it has just the features that it must have."""
        if part not in self._keys:
            if schema.names_of(part):
                raise NotTakenError
            return _PartObject({}, {}, None)
        found = self._document[part]
        keys = _keys(found, _PART_KEYS)
        names = schema.name_sets[part]
        sparse: Any = found["sparse"] if "sparse" in keys else {}
        if (_keys(sparse, names) if "sparse" in keys else _NONE) != names:
            raise NotTakenError
        weights = _weights(found["weights"], schema.weighted_names & names) if "weights" in keys else {}
        return _PartObject(sparse, weights, found["dense"] if "dense" in keys else None)

    def _count_strings(self, limits: RequestLimits) -> None:
        """Raise LimitExceededError for more strings than ids and keys of a request can be."""
        allowed = limits.max_string_ids
        # Each string has two quotes; keys and options are few.
        quotes = int(np.count_nonzero(np.frombuffer(self._text, np.uint8) == _QUOTE)) - self._text.count(b'\\"')
        if quotes // 2 > 2 * allowed:
            raise LimitExceededError("sparse", "max_string_ids", allowed, f"about {quotes // 2}", "strings in the body")

    def _integer(self, name: str, least: int) -> int | None:
        if name not in self._keys:
            return None
        value = self._document[name]
        if type(value) is not int or not least <= value <= MAX_ID:
            raise NotTakenError
        return value

    def _string(self, name: str) -> str:
        value = self._document[name] if name in self._keys else ""
        if type(value) is not str:
            raise NotTakenError
        return value


class RefusedJson:
    """A document that the reader does not take, though it is JSON; why, its model's schema tells.

    Args:
        method: what is asked for.
        model: from the path.
        request: the document, decoded with Python's own types; what it says beside numbers was checked.

    Attributes:
        model, version, key: see `Unparsed`.
    """

    def __init__(self, method: Method, model: str, request: Mapping[str, Any]) -> None:
        self.model = model
        self.version: int | None = request.get("version")
        self.key: str = request.get("routing_key", "") or request.get("request_id", "")
        self._method = method
        self._request = request

    def parse(self, schema: RequestSchema) -> Request:
        """Raise what is wrong."""
        raise self._refusal(schema)

    def encode(self, answer: Answer) -> Encoded:
        """See `Unparsed`; there is never an answer."""
        raise NotImplementedError

    def _refusal(self, schema: RequestSchema) -> BadRequestError:
        # What was decoded is not to live as long as the error.
        request, self._request = self._request, {}
        return refusal_of(schema, self._method, request)


def encode_request(request: Mapping[str, Any]) -> bytes:
    """Write a request that is given as plain Python values as JSON text.

    Raises:
        InvalidFieldError: something in it that JSON has no form for.
    """
    try:
        return msgspec.json.encode(request)
    except (TypeError, ValueError, OverflowError, RecursionError):
        # It does not write integers beyond 64 bits; the reader shall name where they stand.
        try:
            return json.dumps(request).encode("utf-8", "surrogatepass")
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidFieldError("", f"the request has no JSON form: {error}") from None


class _PartObject:
    """A part of a rank request: features by name, weights by name, and the dense inputs or None."""

    __slots__ = ("dense", "sparse", "weights")

    def __init__(self, sparse: Any, weights: dict[str, Any], dense: Any) -> None:
        self.sparse = sparse
        self.weights = weights
        self.dense = dense


class _Column:
    """One feature's ids: a list of bags, or of ids with one in each bag; of the context one bag.

    Attributes:
        ids: simdjson's list of integers; a Python list of strings or of lists of strings.
        weights: in the shape of the ids; None if there are none.
        is_context: whether it is a feature of the context.
        is_nested: whether it is a list of bags.
        is_string: whether its ids are strings.
        num_bags: in it.
    """

    __slots__ = ("ids", "is_context", "is_nested", "is_string", "num_bags", "weights")

    def __init__(self, ids: Any, weights: Any, *, is_context: bool, is_nested: bool, is_string: bool) -> None:
        self.ids = ids
        self.weights = weights
        self.is_context = is_context
        self.is_nested = is_nested
        self.is_string = is_string
        self.num_bags = 1 if is_context else len(ids)

    @classmethod
    def of(cls, schema: RequestSchema, part: Part, name: str, found: Any, weights: Any, is_string: bool) -> _Column:
        """Look at a list.

        Raises:
            NotTakenError: it is none, or its weights are no list of the same length.
            LimitExceededError: it has more bags than any request may have.
        """
        if not isinstance(found, simdjson.Array):
            raise NotTakenError
        count, is_context = len(found), part == "context"
        if count > _FEW_BAGS:
            check_bags_of_feature(schema, part, name, count)
        if weights is not None and len(_array(weights)) != count:
            raise NotTakenError
        is_nested = not is_context and count > 0 and isinstance(found[0], simdjson.Array)
        if is_string:
            # Lists that stand in place of strings are not to become objects either.
            if count_above(cast(bytes, found.mini), _BRACKET, 1 + count * is_nested):
                raise NotTakenError
            found = found.as_list()
        return cls(found, weights, is_context=is_context, is_nested=is_nested, is_string=is_string)

    def lengths(self, brackets: _Brackets) -> Int64Array:
        """int64 [bags], the ids of each bag; accounts for the brackets."""
        if self.is_nested:
            return brackets.nested(self.ids)
        brackets.left -= 1
        size = len(self.ids)
        return np.array([size], np.int64) if self.is_context else np.ones(size, np.int64)

    def integers(self) -> bytes:
        """All ids, as int64 in memory. Raises TypeError or ValueError for what is no such integer."""
        return self.ids.as_buffer(of_type="i") if len(self.ids) else b""

    def strings(self) -> list[str]:
        """All string ids. Raises NotTakenError for what is none."""
        bags = self.ids if self.is_nested else [self.ids]
        if set(map(type, bags)) - {list}:
            raise NotTakenError
        texts = list(chain.from_iterable(bags))
        if set(map(type, texts)) - {str}:
            raise NotTakenError
        return texts


class _Brackets:
    """Proves that lists are nested as deep as they were read.

    Reading flattens: it can't tell `[1, [2, 3], []]` from `[1, 2, 3]`. But a flat list has at least one opening
    bracket, and a list of n lists at least n + 1. So if the text has just as many as these numbers add up to, no list
    has more.

    Args:
        text: the JSON text.

    Attributes:
        left: brackets that are not accounted for, those within strings too.
    """

    def __init__(self, text: bytes | bytearray) -> None:
        self._text = text
        # Several times faster than the count that bytes have.
        self._all = self.left = int(np.count_nonzero(np.frombuffer(text, np.uint8) == _BRACKET))

    def nested(self, found: Any) -> Int64Array:
        """Account for a list of lists; int64 [n], their lengths. Raises TypeError if it is none."""
        lengths = np.fromiter(map(len, found), np.int64, count=len(found))
        self.left -= 1 + lengths.size
        return lengths

    def check(self) -> None:
        """Raise NotTakenError if there are more lists than were accounted for."""
        accounted = self._all - self.left
        if self.left and (accounted < 0 or count_above(self._text, _BRACKET, accounted) or self.left < 0):
            raise NotTakenError


def _bags(
    schema: RequestSchema, keys: Any, columns: Sequence[_Column], brackets: _Brackets, *, lookup: bool
) -> tuple[Any, Sequence[str]]:
    """Flat bags of all features, and the strings among their ids."""
    counts = np.array([column.num_bags for column in columns], np.int64)
    if lookup:
        check_lookup_size(schema, keys, counts)
    lengths = [column.lengths(brackets) for column in columns]
    all_lengths = np.concatenate(lengths) if lengths else np.empty(0, np.int64)
    values, texts = _values(schema, columns, lengths)
    weights = _flat_weights(columns, lengths, values.size, brackets)
    ids_per_key = np.fromiter(map(np.add.reduce, lengths), np.int64, count=len(lengths))
    if int(ids_per_key.sum()) != values.size:
        raise NotTakenError
    return keyed_bags(schema, keys, counts, all_lengths, ids_per_key, values, weights, lookup=lookup), texts


def _values(
    schema: RequestSchema, columns: Sequence[_Column], lengths: Sequence[Int64Array]
) -> tuple[Int64Array, Sequence[str]]:
    if not any(column.is_string for column in columns):
        return np.frombuffer(bytearray().join([column.integers() for column in columns]), np.int64), ()
    texts: list[str] = []
    parts: list[Int64Array] = []
    for column in columns:
        if not column.is_string:
            parts.append(np.frombuffer(column.integers(), np.int64))
            continue
        own = column.strings()
        if len(texts) + len(own) > schema.limits.max_string_ids:
            allowed = schema.limits.max_string_ids
            raise LimitExceededError("sparse", "max_string_ids", allowed, len(texts) + len(own), "string ids")
        texts += own
        parts.append(fingerprint_strings(own))
    return np.concatenate(parts), texts


def _flat_weights(
    columns: Sequence[_Column], lengths: Sequence[Int64Array], num_values: int, brackets: _Brackets
) -> Float32Array | None:
    """float32 [n], 1 where a feature has no weights; None if none has."""
    if all(column.weights is None for column in columns):
        return None
    weights = np.ones(num_values, np.float32)
    start = 0
    for column, own in zip(columns, lengths, strict=True):
        end = start + int(own.sum())
        if column.weights is not None:
            if column.is_nested:
                if not np.array_equal(brackets.nested(column.weights), own):
                    raise NotTakenError
            else:
                brackets.left -= 1
            weights[start:end] = _floats(column.weights)
        start = end
    return weights


def _context_dense(found: Any, width: int, brackets: _Brackets) -> Float32Array:
    """float32 [Kc]."""
    if found is None:
        if width:
            raise NotTakenError
        return np.empty(0, np.float32)
    values = _floats(_array(found))
    brackets.left -= 1
    if len(values) != width or len(found) != width:
        raise NotTakenError
    return values


def _candidate_dense(found: Any, num_candidates: int, width: int, brackets: _Brackets) -> Float32Array:
    """float32 [N, Kd]. Raises NotTakenError for another number of rows, or of values in them."""
    if found is None and not width:
        return np.empty((num_candidates, 0), np.float32)
    if len(_array(found)) != num_candidates and (len(found) or width):
        raise NotTakenError
    if (brackets.nested(found) != width).any():
        raise NotTakenError
    return _floats(found).reshape(num_candidates, width)


def _weights(found: Any, allowed: frozenset[str]) -> dict[str, Any]:
    """Weights by feature; null is as if absent."""
    if found is None:
        return {}
    return {name: one for name in _keys(found, allowed) if (one := found[name]) is not None}


def _keys(found: Any, allowed: frozenset[str]) -> frozenset[str]:
    """The keys of an object.

    Raises:
        NotTakenError: it is none, or has another key than allowed.
        InvalidFieldError: a key is there twice.
    """
    # They become Python objects, so there must be few.
    if not isinstance(found, simdjson.Object) or len(found) > MAX_KEYS:
        raise NotTakenError
    keys = list(found.keys())
    different = frozenset(keys)
    if len(different) != len(keys):
        raise key_twice(keys)
    if not different <= allowed:
        raise NotTakenError
    return different


def _array(found: Any) -> Any:
    if not isinstance(found, simdjson.Array):
        raise NotTakenError
    return found


def _floats(found: Any) -> Float32Array:
    """float32 [n], all numbers of a list. What float32 can't hold becomes inf, and is refused by name afterwards."""
    values: npt.NDArray[np.float64] = np.frombuffer(found.as_buffer(of_type="d") if len(found) else b"", np.float64)
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _parse(text: bytes | bytearray) -> Any:
    if len(text) > MAX_KEPT_BYTES:
        return simdjson.Parser().parse(text)
    parser: simdjson.Parser | None = getattr(_THREADS, "parser", None)
    if parser is None:
        parser = _THREADS.parser = simdjson.Parser()
    try:
        return parser.parse(text)
    except RuntimeError:
        # Integers beyond 64 bits, or something read from another text is still held.
        parser = _THREADS.parser = simdjson.Parser()
        return parser.parse(text)

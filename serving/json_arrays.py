"""Rank requests from JSON text straight to arrays: simdjson reads the numbers, and no Python object is made for any.

It takes what requests are almost always made of and gives up on everything else: whoever calls it has a slower way that
knows all of JSON and says what is wrong. That lists are nested as they must be is proven by counting brackets, see
`_Brackets`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import simdjson

from serving.limits import MAX_ID
from serving.parse_checks import dense_matrix
from serving.parse_schema import Part, RequestSchema
from shard_node.bags import Float32Array, Int64Array, KeyedBags

Float64Array: TypeAlias = npt.NDArray[np.float64]

# A parser keeps several times its longest text in memory, one for each thread: longer texts get one of their own.
MAX_KEPT_BYTES = 2 << 20
_BRACKET = ord("[")
_BEGIN = b"{ \t\r\n"
_INTEGERS = ("timeout_ms", "top_k", "version")
_TEXTS = ("request_id", "routing_key")
_KEYS = frozenset({"context", "candidates", *_INTEGERS, *_TEXTS})
_PART_KEYS = frozenset({"sparse", "dense"})
_NONE: frozenset[str] = frozenset()
_NOTHING = object()


class NotPlainError(Exception):
    """The body is not what is taken here, which is not to say that it is wrong. Never leaves `JsonArrays.read`."""


@dataclass(frozen=True, slots=True)
class RankArrays:
    """What a body says, in the types that it must have; of numbers only that they fit these.

    Attributes:
        bags: raw ids of all features.
        num_candidates: bags of each candidate feature, or rows of their dense inputs.
        context_dense: float32 [n].
        candidate_dense: float32 [rows, model's width].
        timeout_ms, top_k, version: None if the body has none.
        request_id, routing_key: "" if it has none.
    """

    bags: KeyedBags
    num_candidates: int
    context_dense: Float32Array
    candidate_dense: Float32Array
    timeout_ms: int | None
    top_k: int | None
    version: int | None
    request_id: str
    routing_key: str


class JsonArrays:
    """Reads the rank requests of one model version. Thread-safe.

    Args:
        schema: of a model without string ids.
    """

    def __init__(self, schema: RequestSchema) -> None:
        self._schema = schema
        self._is_context = schema.features.is_context.tolist()
        self._names: dict[Part, frozenset[str]] = {
            "context": frozenset(schema.context_names),
            "candidates": frozenset(schema.candidate_names),
        }
        self._threads = threading.local()

    def read(self, body: bytes | bytearray) -> RankArrays | None:
        """Reads a body; None if it is not plain."""
        if body[:1] not in _BEGIN or not body:
            return None
        try:
            return self._read(self._parser(len(body)).parse(body), body)
        except (NotPlainError, TypeError, ValueError, OverflowError):
            return None
        except RuntimeError:
            # How simdjson tells of integers beyond 64 bits, and of a parser that something read with it still holds.
            self._threads.parser = None
            return None

    def _parser(self, num_bytes: int) -> simdjson.Parser:
        if num_bytes > MAX_KEPT_BYTES:
            return simdjson.Parser()
        parser: simdjson.Parser | None = getattr(self._threads, "parser", None)
        if parser is None:
            parser = self._threads.parser = simdjson.Parser()
        return parser

    def _read(self, document: Any, body: bytes | bytearray) -> RankArrays:
        schema, given = self._schema, _keys(document, _KEYS)
        context, candidates = (self._part(document, given, part) for part in ("context", "candidates"))
        brackets = _Brackets()
        bags = self._bags(context, candidates, brackets)
        context_dense = _floats_in(context, brackets)
        candidate_dense = _rows_in(candidates, schema.num_candidate_dense, brackets)
        brackets.check(body)
        counts = set(bags.bags_per_key[~schema.features.is_context].tolist()) or {len(candidate_dense)}
        if len(counts) != 1 or len(context_dense) != schema.num_context_dense:
            raise NotPlainError
        num_candidates = counts.pop()
        integers = [_integer(document[name]) if name in given else None for name in _INTEGERS]
        texts = [_text(document[name]) if name in given else "" for name in _TEXTS]
        return RankArrays(
            bags,
            num_candidates,
            context_dense,
            dense_matrix(candidate_dense.reshape(-1), num_candidates, schema.num_candidate_dense),
            timeout_ms=integers[0],
            top_k=integers[1],
            version=integers[2],
            request_id=texts[0],
            routing_key=texts[1],
        )

    def _part(self, document: Any, given: frozenset[str], part: Part) -> _PartObject:
        """Raises NotPlainError unless it has just the features that it must have."""
        found: Any = document[part] if part in given else _NOTHING
        keys = _NONE if found is _NOTHING else _keys(found, _PART_KEYS)
        sparse: Any = found["sparse"] if "sparse" in keys else _NOTHING
        if (_NONE if sparse is _NOTHING else _keys(sparse)) != self._names[part]:
            raise NotPlainError
        return _PartObject(sparse, _array(found["dense"]) if "dense" in keys else None)

    def _bags(self, context: _PartObject, candidates: _PartObject, brackets: _Brackets) -> KeyedBags:
        schema, is_context = self._schema, self._is_context
        columns = [
            _array((context if of_context else candidates).sparse[name])
            for name, of_context in zip(schema.names, is_context, strict=True)
        ]
        size_of = list(map(len, columns))
        values = np.frombuffer(
            bytearray().join([one.as_buffer(of_type="i") for one, size in zip(columns, size_of, strict=True) if size]),
            np.int64,
        )
        # A context feature is one bag; a candidate feature has a bag of one id for each entry, or a list for each.
        sizes = np.array(size_of, np.int64)
        counts = np.where(schema.features.is_context, 1, sizes)
        starts = np.cumsum(counts) - counts
        lengths = np.ones(int(counts.sum()), np.int64)
        lengths[starts[schema.features.is_context]] = sizes[schema.features.is_context]
        for column, size, of_context, start in zip(columns, size_of, is_context, starts.tolist(), strict=True):
            if of_context or not size or type(column[0]) is int:
                brackets.flat()
            else:
                lengths[start : start + size] = brackets.nested(column)
        bags = KeyedBags.from_lengths(schema.keys, counts, lengths, values)
        if bags.offsets[-1] != values.size:
            raise NotPlainError
        return bags


@dataclass(frozen=True, slots=True)
class _PartObject:
    """A part of the document: its object `sparse`, if it has features, and its list `dense`, or None."""

    sparse: Any
    dense: Any


class _Brackets:
    """Proves that lists are nested as deep as they were read.

    Reading flattens: it can't tell `[1, [2, 3], []]` from `[1, 2, 3]`. But a flat list has at least one opening
    bracket, and a list of n lists at least n + 1. So if the text has just as many as these numbers add up to, no list
    has more.
    """

    def __init__(self) -> None:
        self._wanted = 0

    def flat(self) -> None:
        """Counts a flat list."""
        self._wanted += 1

    def nested(self, found: Any) -> Int64Array:
        """Counts a list of lists; int64 [n], their lengths. Raises NotPlainError if it is none."""
        lengths = np.fromiter(map(len, found), np.int64, count=len(found))
        self._wanted += 1 + lengths.size
        return lengths

    def check(self, body: bytes | bytearray) -> None:
        """Raises NotPlainError if there are others. Brackets within strings count as well."""
        # Several times faster than the count that bytes have.
        if np.count_nonzero(np.frombuffer(body, np.uint8) == _BRACKET) != self._wanted:
            raise NotPlainError


def _keys(found: Any, allowed: frozenset[str] | None = None) -> frozenset[str]:
    """The keys of an object. Raises NotPlainError if it is none, has a key twice, or another one than allowed."""
    if not isinstance(found, simdjson.Object):
        raise NotPlainError
    keys = list(found.keys())
    different = frozenset(keys)
    if len(different) != len(keys) or (allowed is not None and not different <= allowed):
        raise NotPlainError
    return different


def _array(found: Any) -> Any:
    if not isinstance(found, simdjson.Array):
        raise NotPlainError
    return found


def _floats_in(part: _PartObject, brackets: _Brackets) -> Float32Array:
    """float32 [n], the dense inputs of the context."""
    if part.dense is None:
        return np.empty(0, np.float32)
    brackets.flat()
    return _narrow(_floats(part.dense))


def _rows_in(part: _PartObject, width: int, brackets: _Brackets) -> Float32Array:
    """float32 [rows, width], the dense inputs of candidates. Raises NotPlainError for rows of another width."""
    if part.dense is None:
        return np.empty((0, width), np.float32)
    if (brackets.nested(part.dense) != width).any():
        raise NotPlainError
    return _narrow(_floats(part.dense)).reshape(len(part.dense), width)


def _floats(found: Any) -> Float64Array:
    return np.frombuffer(found.as_buffer(of_type="d"), np.float64) if len(found) else np.empty(0, np.float64)


def _narrow(values: Float64Array) -> Float32Array:
    # What float32 can't hold becomes inf, and is refused by name afterwards.
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _integer(value: object) -> int:
    if type(value) is not int or not -MAX_ID <= value <= MAX_ID:
        raise NotPlainError
    return value


def _text(value: object) -> str:
    if type(value) is not str:
        raise NotPlainError
    return value

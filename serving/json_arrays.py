"""Rank requests from JSON text straight to arrays: simdjson reads the numbers, and no Python object is made for any.

It takes what requests are almost always made of and gives up on everything else: whoever calls it has a slower way that
knows all of JSON and says what is wrong. That lists are nested as they must be is proven by counting brackets, see
`_Brackets`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import simdjson

from serving.form_cache import FormCache
from serving.limits import MAX_ID
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
_VARIES = -1
# Of an int in a tuple, beside what it counts, in multiples of an int64.
_NUMBER_BYTES = 5


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
        texts: the strings behind the fingerprints among the ids, in their order.
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
    texts: Sequence[str] = ()


@dataclass(frozen=True, slots=True, eq=False)
class _Shape:
    """What bags of equal numbers have in common. Its arrays are shared by requests, and not to be changed.

    Attributes:
        bags: without values.
        num_candidates: bags of each candidate feature; None if there is no such feature.
    """

    bags: KeyedBags
    num_candidates: int | None

    @property
    def size_bytes(self) -> int:
        """Of its arrays, and of the numbers that it is found by."""
        return self.bags.offsets.nbytes + (2 + _NUMBER_BYTES) * self.bags.bags_per_key.nbytes


class JsonArrays:
    """Reads the rank requests of one model version. Thread-safe.

    Args:
        schema: of a model without string ids.
    """

    def __init__(self, schema: RequestSchema) -> None:
        self._schema = schema
        self._is_context = schema.features.is_context.tolist()
        # By the entries of each feature's list, and by the ids of each candidate's bag if all have as many.
        self._shapes: FormCache[tuple[tuple[int, ...], int], _Shape] = FormCache()
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
        brackets = _Brackets(body)
        context_dense = _floats_in(context, brackets)
        candidate_dense = _rows_in(candidates, schema.num_candidate_dense, brackets)
        bags, num_candidates = self._bags(context, candidates, brackets)
        if brackets.left or len(context_dense) != schema.num_context_dense:
            raise NotPlainError
        if num_candidates is None:
            num_candidates = len(candidate_dense)
        if len(candidate_dense) != num_candidates and (len(candidate_dense) or schema.num_candidate_dense):
            raise NotPlainError
        integers = [_integer(document[name]) if name in given else None for name in _INTEGERS]
        texts = [_text(document[name]) if name in given else "" for name in _TEXTS]
        return RankArrays(
            bags,
            num_candidates,
            context_dense,
            candidate_dense.reshape(num_candidates, schema.num_candidate_dense),
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
        names = self._names[part]
        if (_NONE if sparse is _NOTHING else _keys(sparse, names)) != names:
            raise NotPlainError
        return _PartObject(sparse, _array(found["dense"]) if "dense" in keys else None)

    def _bags(self, context: _PartObject, candidates: _PartObject, brackets: _Brackets) -> tuple[KeyedBags, int | None]:
        """Flat bags, and how many each candidate feature has; None if there is no such feature."""
        columns = [
            _array((context if of_context else candidates).sparse[name])
            for name, of_context in zip(self._schema.names, self._is_context, strict=True)
        ]
        sizes = tuple(map(len, columns))
        values = np.frombuffer(
            bytearray().join([one.as_buffer(of_type="i") for one, size in zip(columns, sizes, strict=True) if size]),
            np.int64,
        )
        # Every list has a bracket. If there are no more of them, no list has lists in it.
        if brackets.left == len(columns):
            brackets.left, width, lengths = 0, 1, None
        else:
            lengths = np.concatenate(
                [self._lengths(*column, brackets) for column in zip(columns, sizes, self._is_context, strict=True)]
            )
            width = int(lengths[-1]) if lengths.size and (lengths == lengths[-1]).all() else _VARIES
        key = sizes, width
        shape = None if width == _VARIES else self._shapes.find(key)
        if shape is None:
            shape = self._shape(sizes, lengths)
            if width != _VARIES:
                self._shapes.add(key, shape)
        if shape.bags.offsets[-1] != values.size:
            raise NotPlainError
        return shape.bags.with_values(values, None), shape.num_candidates

    def _lengths(self, column: Any, size: int, of_context: bool, brackets: _Brackets) -> Int64Array:
        """int64, the ids of each bag of one feature."""
        # A context feature is one bag; a candidate feature has a bag of one id for each entry, or a list for each.
        if of_context or not size or type(column[0]) is int:
            brackets.left -= 1
            return np.array([size], np.int64) if of_context else np.ones(size, np.int64)
        return brackets.nested(column)

    def _shape(self, sizes: tuple[int, ...], lengths: Int64Array | None) -> _Shape:
        """Of lists of so many entries; every bag of a candidate has one id if there are no lengths."""
        is_context = self._schema.features.is_context
        counts = np.where(is_context, 1, np.array(sizes, np.int64))
        of_candidates = set(counts[~is_context].tolist())
        if len(of_candidates) > 1:
            raise NotPlainError
        if lengths is None:
            lengths = np.repeat(np.where(is_context, np.array(sizes, np.int64), 1), counts)
        bags = KeyedBags.from_lengths(self._schema.keys, counts, lengths, np.empty(0, np.int64))
        # Whoever would change what later requests share is told so.
        for shared in (counts, bags.offsets, bags.bag_starts(), bags.value_starts()):
            shared.flags.writeable = False
        return _Shape(bags, of_candidates.pop() if of_candidates else None)


@dataclass(frozen=True, slots=True)
class _PartObject:
    """A part of the document: its object `sparse`, if it has features, and its list `dense`, or None."""

    sparse: Any
    dense: Any


class _Brackets:
    """Proves that lists are nested as deep as they were read.

    Reading flattens: it can't tell `[1, [2, 3], []]` from `[1, 2, 3]`. But a flat list has at least one opening
    bracket, and a list of n lists at least n + 1. So if the text has just as many as these numbers add up to, no list
    has more. Brackets within strings count as well.

    Args:
        body: the text.

    Attributes:
        left: brackets that are not accounted for.
    """

    def __init__(self, body: bytes | bytearray) -> None:
        # Several times faster than the count that bytes have.
        self.left = int(np.count_nonzero(np.frombuffer(body, np.uint8) == _BRACKET))

    def nested(self, found: Any) -> Int64Array:
        """Accounts for a list of lists; int64 [n], their lengths. Raises NotPlainError if it is none."""
        lengths = np.fromiter(map(len, found), np.int64, count=len(found))
        self.left -= 1 + lengths.size
        return lengths


def _keys(found: Any, allowed: frozenset[str]) -> frozenset[str]:
    """The keys of an object. Raises NotPlainError if it is none, has a key twice, or another one than allowed."""
    # They become Python objects, so there must be few.
    if not isinstance(found, simdjson.Object) or len(found) > len(allowed):
        raise NotPlainError
    keys = list(found.keys())
    different = frozenset(keys)
    if len(different) != len(keys) or not different <= allowed:
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
    brackets.left -= 1
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

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
from typing import Any, NamedTuple, TypeAlias, cast

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
from serving.formats.json_writer import lookup_pieces
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
from shard_node.bags import Float32Array, Int32Array, Int64Array, KeyedBags

# A parser keeps several times its longest text in memory, one for each thread: longer texts get one of their own.
MAX_KEPT_BYTES = 2**20
_BRACKET, _QUOTE = ord("["), ord('"')
_INTEGERS, _TEXTS = ("version", "timeout_ms", "top_k"), ("request_id", "routing_key")
_OPTION_KEYS = frozenset((*_INTEGERS, *_TEXTS))
_RANK_KEYS = _OPTION_KEYS | {"context", "candidates"}
_LOOKUP_KEYS = (_OPTION_KEYS - {"top_k"}) | {"sparse", "weights"}
_PART_KEYS = frozenset({"sparse", "weights", "dense"})
_NONE: frozenset[str] = frozenset()
_THREADS = threading.local()
_ENCODER = msgspec.json.Encoder()
_NO_DENSE: Float32Array = np.empty(0, np.float32)
# What simdjson, NumPy and the checks below say of a text that is not as it should be.
_NOT_TAKEN = (TypeError, ValueError, OverflowError, RuntimeError, KeyError, IndexError)
# Of one feature: its ids, their weights or None, its name, its part of the request, and whether its ids are strings.
_Source: TypeAlias = tuple[Any, Any, str, Part, bool]


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
        integers: list[int | None] = [None, None, None]
        texts = ["", ""]
        if not keys.isdisjoint(_OPTION_KEYS):
            for number, name in enumerate(_INTEGERS):
                if name in keys:
                    value = document[name]
                    if type(value) is not int or not 1 <= value <= MAX_ID:
                        raise NotTakenError
                    integers[number] = value
            for number, name in enumerate(_TEXTS):
                if name in keys:
                    value = document[name]
                    if type(value) is not str:
                        raise NotTakenError
                    texts[number] = value
        self.version = integers[0]
        self._options = Options(integers[1], None, integers[2], *texts)
        self.key = texts[1] or texts[0]

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
        if isinstance(answer, RankAnswer):
            return Encoded(_ENCODER.encode(rank_document(answer)))
        return Encoded(b"", more=lookup_pieces(answer))

    def _rank(self, schema: RequestSchema) -> RankRequest:
        brackets = _Brackets(self._text)
        context, candidates = self._part(schema, "context"), self._part(schema, "candidates")
        sources: list[_Source] = []
        for name, is_context, is_string in schema.kinds:
            part = context if is_context else candidates
            weights = part.weights.get(name) if part.weights else None
            sources.append((part.sparse[name], weights, name, "context" if is_context else "candidates", is_string))
        num_candidates = 0 if candidates.dense is None else len(candidates.dense)
        if schema.candidate_names:
            first = schema.features.index[schema.candidate_names[0]]
            num_candidates = len(cast(Any, sources[first][0]))
        check_num_candidates(schema.limits, num_candidates)
        context_dense = _NO_DENSE
        if context.dense is not None or schema.num_context_dense:
            context_dense = _context_dense(context.dense, schema.num_context_dense, brackets)
        dense = _candidate_dense(candidates.dense, num_candidates, schema.num_candidate_dense, brackets)
        bags_per_key = np.where(schema.features.is_context, 1, num_candidates)
        bags, texts = _bags(schema, schema.keys, sources, brackets, bags_per_key)
        if brackets.left:
            brackets.check()
        return rank_request(schema, bags, num_candidates, context_dense, dense, self._options, texts)

    def _lookup(self, schema: RequestSchema) -> LookupRequest:
        brackets = _Brackets(self._text)
        sparse = self._document["sparse"]
        given = _keys(sparse, frozenset(schema.names))
        weights = _weights(self._document["weights"], schema.weighted_names & given) if "weights" in self._keys else {}
        keys = sorted(schema.features.index[name] for name in given)
        sources: list[_Source] = [
            (sparse[name], weights.get(name), name, "", is_string)
            for name, _, is_string in (schema.kinds[key] for key in keys)
        ]
        flat_keys = np.array(keys, np.int32)
        counts = np.array([len(_array(source[0])) for source in sources], np.int64)
        check_lookup_size(schema, flat_keys, counts)
        bags, texts = _bags(schema, flat_keys, sources, brackets, counts)
        if brackets.left:
            brackets.check()
        return lookup_request(schema, bags, self._options, texts)

    def _part(self, schema: RequestSchema, part: Part) -> _PartObject:
        """One part of a rank request. Raises NotTakenError unless it has just the features that it must have."""
        if part not in self._keys:
            if schema.name_sets[part]:
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


def rank_document(answer: RankAnswer) -> dict[str, Any]:
    """The JSON form of an answer. A float32 score is written with all digits, so it reads back as the same float32."""
    document: dict[str, Any] = {
        "model": answer.model,
        "version": answer.version,
        "scores": answer.scores.tolist(),
        "order": answer.order.tolist(),
    }
    if answer.request_id:
        document["request_id"] = answer.request_id
    return document


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


class _PartObject(NamedTuple):
    """A part of a rank request: features by name, weights by name, and the dense inputs or None."""

    sparse: Any
    weights: dict[str, Any]
    dense: Any


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
    schema: RequestSchema,
    keys: Int32Array,
    sources: Sequence[_Source],
    brackets: _Brackets,
    bags_per_key: Int64Array,
) -> tuple[KeyedBags, Sequence[str]]:
    """Flat bags of all features, and the strings among their ids: one pass over the features, none over ids.

    Raises:
        NotTakenError, TypeError, ValueError: lists that are not nested alike, or hold what is no id.
        LimitExceededError: more bags or strings than any request may have.
    """
    limits = schema.limits
    most = {"context": limits.max_ids_per_bag, "candidates": limits.max_candidates, "": limits.max_bags_per_feature}
    texts: list[str] = []
    buffers: list[Any] = []
    lengths: list[Int64Array] = []
    has_weights = is_lookup = False
    for (found, weights, name, part, is_string), expected in zip(sources, bags_per_key.tolist(), strict=True):
        if not isinstance(found, simdjson.Array):
            raise NotTakenError
        count, is_context, is_lookup = len(found), part == "context", part == ""
        if count > most[part]:
            check_bags_of_feature(schema, part, name, count)
        if count != expected and not is_context:
            raise NotTakenError
        if count and not is_context and isinstance(found[0], simdjson.Array):
            own = np.fromiter(map(len, cast(Any, found)), np.int64, count=count)
            brackets.left -= 1 + count
        else:
            own = np.array([count], np.int64) if is_context else np.ones(count, np.int64)
            brackets.left -= 1
        lengths.append(own)
        has_weights |= weights is not None
        if is_string:
            strings = _strings(found, own, limits.max_string_ids - len(texts))
            texts += strings
            buffers.append(fingerprint_strings(strings))
        else:
            buffers.append(found.as_buffer(of_type="i") if count else b"")
    values = np.frombuffer(bytearray().join(buffers), np.int64)
    flat_weights = _flat_weights(sources, lengths, values.size, brackets) if has_weights else None
    ids_per_key = np.array(list(map(np.add.reduce, lengths)), np.int64)
    if int(np.add.reduce(ids_per_key)) != values.size:
        raise NotTakenError
    flat = np.concatenate(lengths) if lengths else np.empty(0, np.int64)
    bags = keyed_bags(schema, keys, bags_per_key, flat, ids_per_key, values, flat_weights, lookup=is_lookup)
    return bags, texts


def _strings(found: Any, lengths: Int64Array, most: int) -> list[str]:
    """All string ids of a feature.

    Raises:
        NotTakenError: for what is none.
        LimitExceededError: more than may be left.
    """
    is_nested = len(found) > 0 and isinstance(found[0], simdjson.Array)
    # Lists that stand in place of strings are not to become objects either.
    if count_above(found.mini, _BRACKET, 1 + len(found) * is_nested):
        raise NotTakenError
    if int(lengths.sum()) > most:
        raise LimitExceededError("sparse", "max_string_ids", most, int(lengths.sum()), "string ids more")
    bags = found.as_list() if is_nested else [found.as_list()]
    if set(map(type, bags)) - {list}:
        raise NotTakenError
    texts = list(chain.from_iterable(bags))
    if set(map(type, texts)) - {str}:
        raise NotTakenError
    return texts


def _flat_weights(
    sources: Sequence[_Source], lengths: Sequence[Int64Array], num_values: int, brackets: _Brackets
) -> Float32Array:
    """float32 [n], 1 where a feature has no weights."""
    flat = np.ones(num_values, np.float32)
    start = 0
    for (found, weights, _, part, _), own in zip(sources, lengths, strict=True):
        end = start + int(own.sum())
        if weights is not None:
            if len(_array(weights)) != len(found):
                raise NotTakenError
            if part != "context" and len(found) and isinstance(found[0], simdjson.Array):
                if not np.array_equal(brackets.nested(weights), own):
                    raise NotTakenError
            else:
                brackets.left -= 1
            flat[start:end] = _floats(weights)
        start = end
    return flat


def _context_dense(found: Any, width: int, brackets: _Brackets) -> Float32Array:
    """float32 [Kc]."""
    values = _floats(_array(found))
    brackets.left -= 1
    if len(values) != width or len(found) != width:
        raise NotTakenError
    return values


def _candidate_dense(found: Any, num_candidates: int, width: int, brackets: _Brackets) -> Float32Array:
    """float32 [N, Kd]. Raises NotTakenError for another number of rows, or of values in them."""
    if found is None and not width:
        return np.empty((num_candidates, 0), np.float32)
    if not isinstance(found, simdjson.Array) or (len(found) != num_candidates and (len(found) or width)):
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

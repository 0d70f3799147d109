"""The JSON form of requests and answers: simdjson reads the text, and no Python object is made for a number.

Counts and names are checked as they are read. Lists are copied whole; only if that fails are they decoded, up to the
first wrong element. Reading flattens lists; `UnparsedJson._check_nesting` proves their nesting by counting brackets.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise, starmap
from typing import Annotated, Any, Literal, TypeAlias, cast

import msgspec
import numpy as np
import numpy.typing as npt
import simdjson

from loader.snapshot.tables import fingerprint_strings
from serving.errors import (
    InvalidRequestError,
    count_mismatch,
    invalid_field,
    invalid_id,
    limit_exceeded,
    malformed,
    missing_feature,
)
from serving.formats.bags import check_lookup_size, check_num_candidates, keyed_bags, lookup_request, rank_request
from serving.formats.requests import (
    Answer,
    Buffer,
    Encoded,
    LookupAnswer,
    LookupRequest,
    Method,
    Options,
    RankAnswer,
    RankRequest,
    Request,
)
from serving.formats.schema import Part, RequestSchema, part_path
from serving.limits import MAX_ID, RequestLimits
from shard_node.bags import Float32Array, Int32Array, Int64Array, KeyedBags

# A parser keeps several times its longest text in memory, one for each thread: longer texts get one of their own.
MAX_KEPT_BYTES = 2**20
# In texts up to this length, what can't be parsed is located by Python's decoder.
MAX_SEARCHED_BYTES = 2**18
# Twice as many keys as features, and some more, to name the wrong one.
MAX_KEYS = 16_384
PIECE_FLOATS = 8192
"""Written at once: about a millisecond's worth."""
_SHOWN_CHARS = 40
_BRACKET, _QUOTE = ord("["), ord('"')
_TYPES = {int: "an integer", str: "a string"}
_OPTIONS: dict[str, type] = {"version": int, "timeout_ms": int, "top_k": int, "request_id": str, "routing_key": str}
_KEYS: dict[Method, frozenset[str]] = {
    "rank": frozenset({*_OPTIONS, "context", "candidates"}),
    "lookup": frozenset({*_OPTIONS, "sparse", "weights"}) - {"top_k"},
}
_PART_KEYS = frozenset({"sparse", "weights", "dense"})
_NO_KEYS: frozenset[str] = frozenset()
_NO_DENSE: Float32Array = np.empty(0, np.float32)
# Raised by simdjson, NumPy and the methods below for a list that is not as it should be.
_WRONG_LIST = (TypeError, ValueError, OverflowError, RuntimeError)
_SURROGATE = re.compile("[\ud800-\udfff]")
_THREADS = threading.local()
_ENCODER = msgspec.json.Encoder()
# Of one feature: its ids, their weights or None, its name, its part of the request, and whether its ids are strings.
_Source: TypeAlias = tuple[Any, Any, str, Part, bool]
_Kind: TypeAlias = Literal["integers", "strings", "floats"]
_ALLOWED: dict[_Kind, str] = {
    "integers": f"one of the integers in 0..{MAX_ID}, as ids are here",
    "strings": "one of the strings that ids are here",
    "floats": "a finite float32",
}
# Of flat lists, and of nested ones.
_Id: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_ID)]
_DECODERS: dict[_Kind, tuple[msgspec.json.Decoder[Any], msgspec.json.Decoder[Any]]] = {
    "integers": (msgspec.json.Decoder(list[_Id]), msgspec.json.Decoder(list[list[_Id]])),
    "strings": (msgspec.json.Decoder(list[str]), msgspec.json.Decoder(list[list[str]])),
    "floats": (msgspec.json.Decoder(list[float]), msgspec.json.Decoder(list[list[float]])),
}


class JsonCodec:
    """Reads the JSON form of a request to a model and writes its answer; `api` is its name in metrics."""

    def __init__(self, method: Method, model: str, api: str = "http") -> None:
        self.method: Method = method
        self.api = api
        self._model = model

    def read(self, body: Buffer, limits: RequestLimits) -> UnparsedJson:
        """Parse the text, and read the options. Raises InvalidRequestError for them, and for what is no JSON object."""
        allowed, unit = limits.max_json_bytes, "bytes of JSON in the body"
        if len(body) > allowed:
            raise limit_exceeded("", "max_json_bytes", allowed, len(body), unit, kind="body_too_large")
        text = bytes(body) if isinstance(body, memoryview) else body
        try:
            document = _parse(text)
        except (ValueError, RuntimeError) as error:
            raise _unparsable(text, str(error)) from None
        if not isinstance(document, simdjson.Object):
            raise malformed("", f"the body is {_shown(document)}, not an object")
        keys = _keys(document)
        if not keys <= _KEYS[self.method]:
            raise _unknown_key("", keys, _KEYS[self.method])
        return UnparsedJson(self.method, self._model, text, document, keys)


class UnparsedJson:
    """A document whose features are not read yet; valid until the next text is parsed on this thread."""

    def __init__(
        self, method: Method, model: str, text: bytes | bytearray, document: Any, keys: frozenset[str]
    ) -> None:
        self.model = model
        self._method = method
        self._text = text
        self._document = document
        self._keys = keys
        self._lists = 0
        self._sources: list[_Source] = []
        self._dense: dict[Part, Any] = {}
        options: dict[str, Any] = {}
        for name in keys & _OPTIONS.keys():
            value = document[name]
            if type(value) is not _OPTIONS[name]:
                raise invalid_field(name, f"{_shown(value)} is not {_TYPES[_OPTIONS[name]]}")
            if type(value) is int and name != "timeout_ms" and not 1 <= value <= MAX_ID:
                raise invalid_field(name, f"{value} is not in 1..{MAX_ID}")
            options[name] = value
        self.version: int | None = options.pop("version", None)
        self._options = Options(**options)
        self.key = self._options.routing_key or self._options.request_id

    def parse(self, schema: RequestSchema) -> Request:
        """See `Unparsed`."""
        try:
            try:
                return self._rank(schema) if self._method == "rank" else self._lookup(schema)
            except InvalidRequestError as error:
                # Its frames hold what was read with the parser.
                raise error.with_traceback(None) from None
            except _WRONG_LIST:
                pass
            # Raised outside of `except`, it does not refer to the other error; without a name, it is in no cycle.
            raise self._refusal()
        finally:
            self._text, self._document, self._sources, self._dense = b"", None, [], {}

    def encode(self, answer: Answer) -> Encoded:
        """See `Unparsed`."""
        if isinstance(answer, RankAnswer):
            return Encoded(_ENCODER.encode(rank_document(answer)))
        return Encoded(b"", more=lookup_pieces(answer))

    def _rank(self, schema: RequestSchema) -> RankRequest:
        if "candidates" not in self._keys:
            raise invalid_field("candidates", "missing; a rank request needs its candidates")
        context, context_weights = self._features(schema, "context")
        candidates, candidate_weights = self._features(schema, "candidates")
        for name, is_context, is_string in schema.kinds:
            if is_context:
                self._sources.append((context[name], context_weights.get(name), name, "context", is_string))
            else:
                self._sources.append((candidates[name], candidate_weights.get(name), name, "candidates", is_string))
        counted = self._dense.get("candidates", ())
        if schema.candidate_names:
            counted = self._sources[schema.features.index[schema.candidate_names[0]]][0]
        num_candidates = len(counted)
        check_num_candidates(schema.limits, num_candidates)
        # As `schema.bags_per_key`, without a call.
        bags_per_key = np.where(schema.features.is_context, 1, num_candidates)
        bags, texts = self._bags(schema, schema.keys, bags_per_key)
        context_dense = _NO_DENSE
        if schema.num_context_dense or "context" in self._dense:
            context_dense = self._context_dense(schema.num_context_dense)
        candidate_dense = self._candidate_dense(num_candidates, schema.num_candidate_dense)
        self._check_nesting()
        return rank_request(schema, bags, num_candidates, context_dense, candidate_dense, self._options, texts)

    def _lookup(self, schema: RequestSchema) -> LookupRequest:
        if "sparse" not in self._keys:
            raise invalid_field("sparse", "missing; a lookup needs the ids of at least one feature")
        sparse, weights = self._features(schema, "")
        keys = np.array(sorted(schema.features.index[name] for name in sparse), np.int32)
        self._sources = [
            (sparse[name], weights.get(name), name, "", is_string)
            for name, _, is_string in (schema.kinds[key] for key in keys.tolist())
        ]
        counts = np.array([len(source[0]) for source in self._sources], np.int64)
        check_lookup_size(schema, keys, counts)
        bags, texts = self._bags(schema, keys, counts)
        self._check_nesting()
        return lookup_request(schema, bags, self._options, texts)

    def _features(self, schema: RequestSchema, part: Part) -> tuple[Any, dict[str, Any]]:
        """Ids and weights by name, of one part of a rank request or of a lookup."""
        found, keys = self._document, self._keys
        if part:
            found, keys = (found[part], _keys(found[part], part)) if part in keys else ({}, _NO_KEYS)
            if not keys <= _PART_KEYS:
                raise _unknown_key(part, keys, _PART_KEYS)
            if "dense" in keys and (dense := found["dense"]) is not None:
                self._dense[part] = dense
        sparse, names = {}, _NO_KEYS
        if "sparse" in keys:
            sparse = found["sparse"]
            names = _keys(sparse, part, "sparse")
        if names != schema.name_sets[part]:
            schema.check_names(part, names, all_needed=bool(part))
        weights = found["weights"] if "weights" in keys else None
        if weights is None:
            return sparse, {}
        given = _keys(weights, part, "weights")
        if not given <= schema.weighted_names & names:
            raise _wrong_weights(schema, part, min(given - (schema.weighted_names & names)))
        return sparse, {name: one for name in given if (one := weights[name]) is not None}

    def _bags(
        self, schema: RequestSchema, keys: Int32Array, bags_per_key: Int64Array
    ) -> tuple[KeyedBags, Sequence[str]]:
        """Flat bags of all features, and their string ids, in one pass over the features."""
        most = schema.limits.max_string_ids
        texts: list[str] = []
        buffers: list[Any] = []
        lengths: list[Int64Array] = []
        has_weights = False
        for (found, weights, name, part, is_string), expected in zip(self._sources, bags_per_key.tolist(), strict=True):
            if not isinstance(found, simdjson.Array):
                raise TypeError
            count = len(found)
            if part == "context":
                own = np.array([count], np.int64)
                is_nested = False
            elif count != expected:
                path = part_path(part, f"sparse.{name}")
                raise count_mismatch(path, f"{count} candidates, but others have {expected}")
            elif is_nested := count > 0 and isinstance(found[0], simdjson.Array):
                own = np.fromiter(map(len, cast(Any, found)), np.int64, count=count)
                self._lists += count
            else:
                own = np.ones(count, np.int64)
            self._lists += 1
            lengths.append(own)
            has_weights |= weights is not None
            if is_string:
                if (num_texts := len(texts) + int(own.sum())) > most:
                    raise limit_exceeded("sparse", "max_string_ids", most, num_texts, "string ids")
                decoded = _DECODERS["strings"][is_nested].decode(found.mini)
                strings = list(chain.from_iterable(decoded)) if is_nested else decoded
                texts += strings
                buffers.append(fingerprint_strings(strings))
            else:
                buffers.append(found.as_buffer(of_type="i") if count else b"")
        values = np.frombuffer(bytearray().join(buffers), np.int64)
        ids_per_key = np.array(list(map(np.add.reduce, lengths)), np.int64)
        if int(np.add.reduce(ids_per_key)) != values.size:
            raise TypeError
        flat_weights = self._flat_weights(lengths, values.size) if has_weights else None
        flat = np.concatenate(lengths) if lengths else np.empty(0, np.int64)
        is_lookup = self._method == "lookup"
        return keyed_bags(schema, keys, bags_per_key, flat, ids_per_key, values, flat_weights, lookup=is_lookup), texts

    def _flat_weights(self, lengths: Sequence[Int64Array], num_values: int) -> Float32Array:
        """float32 [n], 1 where a feature has no weights."""
        flat = np.ones(num_values, np.float32)
        start = 0
        for (found, weights, name, part, _), own in zip(self._sources, lengths, strict=True):
            end = start + int(own.sum())
            if weights is not None:
                path = part_path(part, f"weights.{name}")
                if len(weights) != len(found):
                    raise count_mismatch(path, f"{len(weights)} entries, but its ids have {len(found)}")
                self._lists += 1
                if part != "context" and len(found) and isinstance(found[0], simdjson.Array):
                    counts = np.fromiter(map(len, cast(Any, weights)), np.int64, count=len(weights))
                    if (different := counts != own).any():
                        bag = int(different.argmax())
                        raise count_mismatch(f"{path}[{bag}]", f"{counts[bag]} weights for {own[bag]} ids")
                    self._lists += len(weights)
                flat[start:end] = _floats(weights)
            start = end
        return flat

    def _context_dense(self, width: int) -> Float32Array:
        """float32 [Kc]."""
        found = self._dense.get("context", ())
        if len(found) != width:
            raise count_mismatch("context.dense", f"{len(found)} values, the model takes {width}")
        values = _floats(found)
        if len(values) != width:
            raise TypeError
        self._lists += 1
        return values

    def _candidate_dense(self, num_candidates: int, width: int) -> Float32Array:
        """float32 [N, Kd]."""
        found = self._dense.get("candidates")
        if found is None and not width:
            return np.empty((num_candidates, 0), np.float32)
        num_rows = 0 if found is None else len(found)
        if num_rows != num_candidates and (num_rows or width):
            raise count_mismatch("candidates.dense", f"{num_rows} rows for {num_candidates} candidates")
        widths = np.fromiter(map(len, cast(Any, found)), np.int64, count=num_rows)
        if (different := widths != width).any():
            row = int(different.argmax())
            raise count_mismatch(f"candidates.dense[{row}]", f"{widths[row]} values, the model takes {width}")
        self._lists += 1 + num_rows
        return _floats(found).reshape(num_candidates, width)

    def _check_nesting(self) -> None:
        """Raise TypeError unless lists are nested as deep as they were read.

        Reading can't tell `[1, [2, 3], []]` from `[1, 2, 3]`. But a flat list has one opening bracket or more, and a
        list of n lists n + 1 or more. So if the text has as many as these add up to, no list has more.
        """
        # Several times faster than `bytes.count`; those in strings are counted too.
        count = int(np.count_nonzero(np.frombuffer(self._text, np.uint8) == _BRACKET))
        if count != self._lists and (count < self._lists or count_above(self._text, _BRACKET, self._lists)):
            raise TypeError

    def _refusal(self) -> InvalidRequestError:
        """Return the error for the first element of all lists that is not what it must be."""
        lists: list[tuple[str, Any, _Kind, bool]] = []
        for found, weights, name, part, is_string in self._sources:
            is_nested = part != "context" and isinstance(found, simdjson.Array) and len(found) > 0
            is_nested = is_nested and isinstance(found[0], simdjson.Array)
            lists.append((part_path(part, f"sparse.{name}"), found, "strings" if is_string else "integers", is_nested))
            if weights is not None:
                lists.append((part_path(part, f"weights.{name}"), weights, "floats", is_nested))
        for part, dense in self._dense.items():
            lists.append((f"{part}.dense", dense, "floats", part == "candidates"))
        wrong = invalid_field("", "its lists are not nested as they must be")
        return next(filter(None, starmap(_wrong_element, lists)), wrong)


def rank_document(answer: RankAnswer) -> dict[str, Any]:
    """Write an answer as JSON; float32 scores read back as the same float32."""
    document: dict[str, Any] = {
        "model": answer.model,
        "version": answer.version,
        "dense_step": answer.dense_step,
        "delta_sequence": answer.delta_sequence,
        "scores": answer.scores.tolist(),
        "order": answer.order.tolist(),
    }
    if answer.outputs:
        document["outputs"] = {name: values.tolist() for name, values in answer.outputs.items()}
    if answer.request_id:
        document["request_id"] = answer.request_id
    return document


def encode_request(request: Mapping[str, Any]) -> bytes:
    """Write a request of plain Python values as JSON. Raises InvalidRequestError for what JSON has no form for."""
    try:
        return _ENCODER.encode(request)
    except (TypeError, ValueError, OverflowError, RecursionError):
        # It does not write integers beyond 64 bits, whose field the reader names.
        try:
            return json.dumps(request).encode("utf-8", "surrogatepass")
        except (TypeError, ValueError, RecursionError) as error:
            raise invalid_field("", f"the request has no JSON form: {error}") from None


def _wrong_element(path: str, found: Any, kind: _Kind, is_nested: bool) -> InvalidRequestError | None:
    """Return the error for the first element of a list that is not what it must be."""
    text = found.mini if isinstance(found, simdjson.Array | simdjson.Object) else _ENCODER.encode(found)
    try:
        _DECODERS[kind][is_nested].decode(text)
    except msgspec.ValidationError as error:
        positions = re.findall(r"\[(\d+)\]", str(error))
    else:
        return None
    for position in positions:
        found = found[int(position)]
        path += f"[{position}]"
    if len(positions) <= is_nested:
        return invalid_field(path, f"{_shown(found)} is not a list")
    refusal = invalid_field if kind == "floats" or isinstance(found, simdjson.Array) else invalid_id
    return refusal(path, f"{_shown(found)} is not {_ALLOWED[kind]}")


def _wrong_weights(schema: RequestSchema, part: Part, name: str) -> InvalidRequestError:
    path = part_path(part, f"weights.{name}")
    if name not in schema.name_sets[part]:
        return schema.unknown_feature(part, name)
    if name not in schema.weighted_names:
        return invalid_field(path, f"feature {name!r} takes no weights")
    return missing_feature(part_path(part, f"sparse.{name}"), f"{path} is given, but not its ids")


def _keys(found: Any, *path: str) -> frozenset[str]:
    """Return an object's keys. Raises InvalidRequestError for no object, too many keys, or one twice."""
    if not isinstance(found, simdjson.Object):
        raise invalid_field(".".join(filter(None, path)), f"{_shown(found)} is not an object")
    if len(found) > MAX_KEYS:
        raise invalid_field(".".join(filter(None, path)), f"{len(found)} keys; a request has at most {MAX_KEYS}")
    keys = list(found.keys())
    different = frozenset(keys)
    if len(different) != len(keys):
        raise invalid_field(Counter(keys).most_common(1)[0][0], "the key is there twice")
    return different


def _unknown_key(path: Part, keys: frozenset[str], allowed: frozenset[str]) -> InvalidRequestError:
    return invalid_field(part_path(path, min(keys - allowed)), f"unknown key; allowed are {sorted(allowed)}")


def _shown(value: Any) -> str:
    """Return a value as it looked in JSON, cut short."""
    if isinstance(value, simdjson.Array):
        return "a list"
    if isinstance(value, simdjson.Object):
        return "an object"
    text = _ENCODER.encode(value).decode()
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."


def _floats(found: Any) -> Float32Array:
    """float32 [n], all numbers of a list. What float32 can't hold becomes inf, and is refused by name afterwards."""
    if not isinstance(found, simdjson.Array):
        raise TypeError
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
        # Integers beyond 64 bits, or objects of another text are still referred to.
        parser = _THREADS.parser = simdjson.Parser()
        return parser.parse(text)


def _unparsable(text: bytes | bytearray, problem: str) -> InvalidRequestError:
    """Return the error for a text that the parser has a `problem` with, with the field if it is short."""
    steps: tuple[Any, ...] = ()
    try:
        if len(text) > MAX_SEARCHED_BYTES:
            msgspec.json.decode(text, type=msgspec.Raw)
            problem += f"; numbers have at most 64 bits, ids are in 0..{MAX_ID}"
        else:
            with many_lists():
                # int() would refuse more than 4,300 digits by an error without a field.
                steps = _without_form([json.loads(text.decode(), parse_int=lambda digits: int(digits[:4000]))])
    except (ValueError, RecursionError) as error:
        problem = str(error)
    if not steps:
        return malformed("", f"the body is not JSON that can be read: {problem}")
    _, *path, value = steps
    field = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    problem = "it is not valid Unicode: it has a lone surrogate"
    if not isinstance(value, str):
        problem = f"{json.dumps(value)[:_SHOWN_CHARS]} is not in 0..{MAX_ID}, and no finite number of 64 bits"
    return InvalidRequestError(field[1:], problem, kind="invalid_id" if ".sparse." in field else "invalid_field")


def _without_form(document: dict[str, Any] | list[Any]) -> tuple[Any, ...]:
    """Step to the first number or text that no array has a form for, and that itself; () if there is none."""
    for step, value in document.items() if isinstance(document, dict) else enumerate(document):
        if isinstance(value, dict | list):
            if steps := _without_form(value):
                return step, *steps
        elif isinstance(value, str):
            if _SURROGATE.search(value):
                return step, value
        elif value is not None and not (
            math.isfinite(value) if isinstance(value, float) else -(2**63) <= value < 2**64
        ):
            return step, value
        if isinstance(step, str) and _SURROGATE.search(step):
            return step, step
    return ()


@contextlib.contextmanager
def many_lists() -> Iterator[None]:
    """Hold off the garbage collector, which would go over many new lists again and again."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def count_above(body: Buffer, character: int, most: int) -> int:
    """Count a character outside of strings if it is there more than `most` times; else return 0. Exact for JSON."""
    # Within strings too at first, several times faster than `bytes.count`.
    if len(body) <= most or int(np.count_nonzero(np.frombuffer(body, np.uint8) == character)) <= most:
        return 0
    plain = bytes(body)
    if b"\\" in plain:
        # First pairs of backslashes, then escaped quotes: what is left has a quote only where a string begins or ends.
        plain = plain.replace(b"\\\\", b"").replace(b'\\"', b"")
    text = np.frombuffer(plain, np.uint8)
    is_outside = np.cumsum(text == _QUOTE, dtype=np.uint8) & 1 == 0
    count = int(np.count_nonzero((text == character) & is_outside))
    return count if count > most else 0


def lookup_pieces(answer: LookupAnswer) -> Iterator[bytes]:
    """Write the answer to a lookup, in pieces of about `PIECE_FLOATS` numbers.

    It has [bags][dim] floats by feature, or [bags][ids][dim] for a feature that is not pooled.
    """
    head: dict[str, Any] = {"model": answer.model, "version": answer.version}
    if answer.request_id:
        head["request_id"] = answer.request_id
    yield _ENCODER.encode(head)[:-1] + b',"embeddings":{'
    for number, (name, feature) in enumerate(answer.embeddings.items()):
        yield (b"," if number else b"") + _ENCODER.encode(name) + b":["
        yield from _rows(feature.values) if feature.lengths is None else _bags(feature.values, feature.lengths)
        yield b"]"
    yield b"}}"


def _rows(values: Float32Array) -> Iterator[bytes]:
    """Write rows [n, dim] without the brackets around them."""
    step = max(1, PIECE_FLOATS // (values.shape[1] + 1))
    for begin in range(0, len(values), step):
        yield (b"," if begin else b"") + _ENCODER.encode(values[begin : begin + step].tolist())[1:-1]


def _bags(values: Float32Array, lengths: Int64Array) -> Iterator[bytes]:
    """Write bags of rows likewise: several at once, or one that is long in pieces of its own."""
    ends = np.cumsum(lengths)
    step, begin = max(1, PIECE_FLOATS // (values.shape[1] + 2)), 0
    while begin < len(ends):
        separator, first = (b",", int(ends[begin - 1])) if begin else (b"", 0)
        stop = min(int(np.searchsorted(ends, first + step, "right")), begin + PIECE_FLOATS)
        if stop > begin:
            bounds = [0, *(ends[begin:stop] - first).tolist()]
            with many_lists():
                rows = values[first : ends[stop - 1]].tolist()
                text = _ENCODER.encode([rows[at:end] for at, end in pairwise(bounds)])
            yield separator + text[1:-1]
        else:
            yield separator + b"["
            yield from _rows(values[first : ends[begin]])
            yield b"]"
            stop = begin + 1
        begin = stop

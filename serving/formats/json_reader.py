"""The JSON form of requests and responses: simdjson reads the text, and no Python object is made for a number.

Counts and names are checked as they are read. Lists are copied in one go; only if that fails are they decoded, up to
the first wrong element. Copying flattens lists; their nesting is proven by counting the brackets of the text.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import re
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Annotated, Any, Literal, TypeAlias, cast

import msgspec
import numpy as np
import simdjson

from serving import errors
from serving.errors import InvalidRequestError, count_mismatch, invalid_field, limit_exceeded
from serving.formats import requests
from serving.formats.schema import Part, RequestSchema, part_path
from serving.limits import MAX_ID, RequestLimits
from serving.results import LookupResult, Ragged, RankResult
from shard_node.bags import Float32Array, Int64Array

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
_TYPES = {int: "an integer", str: "a string", bool: "true or false"}
_OPTIONS: dict[str, type] = dict.fromkeys(("version", "timeout_ms", "top_k", "max_age_ms", "min_sequence"), int)
_OPTIONS |= {"return_missing": bool, "request_id": str, "routing_key": str}
_KEYS: dict[requests.Method, frozenset[str]] = {
    "rank": frozenset({*_OPTIONS, "context", "candidates"}),
    "lookup": frozenset({*_OPTIONS, "sparse", "weights"}) - {"top_k"},
}
_PARTS: dict[requests.Method, tuple[Part, ...]] = {"rank": ("context", "candidates"), "lookup": ("",)}
_PART_KEYS = frozenset({"sparse", "weights", "dense"})
_OBJECTS = (simdjson.Object, dict)
# Raised by simdjson, NumPy and msgspec for a list that is not as it should be.
_WRONG_LIST = (TypeError, ValueError, OverflowError, RuntimeError)
_SURROGATE = re.compile("[\ud800-\udfff]")
_ENCODER = msgspec.json.Encoder()
_Kind: TypeAlias = Literal["integers", "strings", "floats"]
_ALLOWED: dict[_Kind, str] = {
    "integers": f"one of the integers in 0..{MAX_ID}, as ids are here",
    "strings": "one of the strings that ids are here",
    "floats": "a finite float32",
}
# Of flat lists, and of nested ones.
_Id: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=MAX_ID)]
_DECODERS: dict[_Kind, tuple[msgspec.json.Decoder[Any], msgspec.json.Decoder[Any]]] = {
    "integers": (msgspec.json.Decoder(list[_Id]), msgspec.json.Decoder(list[list[_Id]])),
    "strings": (msgspec.json.Decoder(list[str]), msgspec.json.Decoder(list[list[str]])),
    "floats": (msgspec.json.Decoder(list[float]), msgspec.json.Decoder(list[list[float]])),
}


class _ThreadParser(threading.local):
    def __init__(self) -> None:
        self.parser = simdjson.Parser()


_THREAD = _ThreadParser()


class _Lists(msgspec.Struct):
    ids: dict[str, Any]
    weights: dict[str, Any]
    dense: dict[Part, Any]


class JsonCodec(requests.Codec, eq=False):
    """The JSON form; a document is valid until the next text is parsed on this thread."""

    text: bytes | bytearray = b""
    document: dict[str, Any] = {}  # noqa: RUF012  # msgspec makes one for each

    def read(self, body: requests.Buffer, limits: RequestLimits) -> JsonCodec:
        """Parse the text, and read the options. Raises InvalidRequestError for them, and for what is no JSON object."""
        if (size := len(body)) > (allowed := limits.max_json_bytes):
            raise limit_exceeded("", "max_json_bytes", allowed, size, "bytes of JSON in the body", "body_too_large")
        text = bytes(body) if isinstance(body, memoryview) else body
        try:
            parser = simdjson.Parser() if size > MAX_KEPT_BYTES else _THREAD.parser
            try:
                parsed = parser.parse(text)
            except RuntimeError:
                # Integers beyond 64 bits, or objects of another text are still referred to.
                parser = simdjson.Parser()
                parsed = parser.parse(text)
                if size <= MAX_KEPT_BYTES:
                    _THREAD.parser = parser
        except (ValueError, RuntimeError) as error:
            raise _unparsable(text, str(error)) from None
        if not isinstance(parsed, simdjson.Object):
            raise errors.malformed("", f"the body is {_shown(parsed)}, not an object")
        document = _members(parsed, _KEYS[self.method])
        options: dict[str, Any] = dict.fromkeys(_OPTIONS)
        for name in document.keys() & _OPTIONS.keys():
            value = options[name] = document[name]
            if type(value) is not _OPTIONS[name]:
                raise invalid_field(name, f"{_shown(value)} is not {_TYPES[_OPTIONS[name]]}")
            if type(value) is int and name in ("version", "top_k") and not 1 <= value <= MAX_ID:
                raise invalid_field(name, f"{value} is not in 1..{MAX_ID}")
        version, timeout_ms, top_k, *bounds, returns_missing, request_id, routing_key = options.values()
        request_id, routing_key = request_id or "", routing_key or ""
        timeout_s, bound = requests.check_options(limits, request_id, routing_key, top_k, timeout_ms, bounds)
        key = routing_key or request_id
        return JsonCodec(
            self.method, self.model, self.api, version, key, timeout_s, top_k, request_id, bound,
            bool(returns_missing), text, document,
        )  # fmt: skip

    def parse(self, schema: RequestSchema) -> requests.Request:
        """See `Codec`."""
        try:
            return self._parse(schema)
        except InvalidRequestError as error:
            # Its frames hold what was read with the parser.
            raise error.with_traceback(None) from None
        finally:
            self.text, self.document = b"", {}

    def encode(self, response: requests.Response) -> requests.Encoded:
        """See `Codec`."""
        if not isinstance(response, RankResult):
            return requests.Encoded(b"", more=lookup_pieces(response))
        # Digits enough that float32 scores read back as the same float32.
        document: dict[str, Any] = {
            "model": response.model,
            "version": response.version,
            "dense_step": response.dense_step,
            "delta_sequence": response.delta_sequence,
            "age_ms": response.age_ms,
            "scores": response.scores.tolist(),
            "order": response.order.tolist(),
        }
        if response.outputs:
            document["outputs"] = {name: values.tolist() for name, values in response.outputs.items()}
        if response.missing is not None:
            document["missing"] = _missing(response)
        if response.request_id:
            document["request_id"] = response.request_id
        return requests.Encoded(_ENCODER.encode(document))

    def _parse(self, schema: RequestSchema) -> requests.Request:
        if self.method == "rank" and "candidates" not in self.document:
            raise invalid_field("candidates", "missing; a rank request needs its candidates")
        if self.method == "lookup" and "sparse" not in self.document:
            raise invalid_field("sparse", "missing; a lookup needs the ids of at least one feature")
        lists = _Lists({}, {}, {})
        for part in _PARTS[self.method]:
            members = self.document
            if part:
                members = _members(members[part], _PART_KEYS, part) if part in members else {}
                if (dense := members.get("dense")) is not None:
                    lists.dense[part] = dense
            sparse, names, ids = members.get("sparse", {}), schema.name_sets[part], None
            if isinstance(sparse, _OBJECTS) and len(sparse) == len(names):
                keys = list(sparse.keys())
                ids = dict(zip(keys, map(sparse.__getitem__, keys), strict=True))
            if ids is None or ids.keys() != names:
                ids = _members(sparse, None, part, "sparse")
                schema.check_names(part, ids, all_needed=bool(part))
            lists.ids |= ids
            if (weights := members.get("weights")) is not None:
                weights = _members(weights, None, part, "weights")
                for name in sorted(weights.keys() - (schema.weighted_names & ids.keys())):
                    path = part_path(part, f"weights.{name}")
                    if name not in names:
                        raise schema.unknown_feature(part, name)
                    if name not in schema.weighted_names:
                        raise invalid_field(path, f"feature {name!r} takes no weights")
                    raise errors.missing_feature(part_path(part, f"sparse.{name}"), f"{path} is given, but not its ids")
                lists.weights |= weights
        try:
            return self._request(schema, lists)
        except _WRONG_LIST:
            pass
        # Raised outside of `except`, it does not refer to the other error.
        raise _refusal(schema, lists, is_lookup=self.method == "lookup")

    def _request(self, schema: RequestSchema, lists: _Lists) -> requests.Request:
        """Flat bags of all features, and dense values, in one pass. Raises as `_WRONG_LIST`, too."""
        limits, is_lookup, keys = schema.limits, self.method == "lookup", schema.keys
        num_candidates, kinds = 0, schema.kinds
        if is_lookup:
            keys = np.array(sorted(schema.features.index[name] for name in lists.ids), np.int32)
            kinds = tuple((name, False, is_string) for name, _, is_string in map(kinds.__getitem__, keys.tolist()))
        else:
            names = schema.candidate_names
            num_candidates = len(lists.ids[names[0]] if names else lists.dense.get("candidates", ()))
            schema.check_num_candidates(num_candidates)
        num_ids, num_bags, widths, weighted = list[int](), list[int](), list[int](), list[int]()
        texts, buffers, lengths, factors = list[str](), list[Any](), list[Int64Array](), list[Any]()
        num_lists = len(kinds)
        for position, (name, is_context, is_string) in enumerate(kinds):
            ids = lists.ids[name]
            if not isinstance(ids, simdjson.Array):
                raise TypeError
            count = total = len(ids)
            bag_sizes = None
            if is_context:
                num_bags.append(1)
                widths.append(count)
            elif is_lookup and count > (allowed := limits.max_bags_per_feature):
                raise limit_exceeded(f"sparse.{name}", "max_bags_per_feature", allowed, count, "bags")
            elif count != num_candidates and not is_lookup:
                raise count_mismatch(f"candidates.sparse.{name}", f"{count} candidates, expected {num_candidates}")
            else:
                num_bags.append(count)
                if count and isinstance(ids[0], simdjson.Array):
                    bag_sizes = np.fromiter(map(len, cast(Any, ids)), np.int64, count=count)
                    total = int(np.add.reduce(bag_sizes))
                    lengths.append(bag_sizes)
                    num_lists += count
                widths.append(1 if bag_sizes is None else requests.RAGGED)
            num_ids.append(total)
            if is_string:
                if (num_texts := len(texts) + total) > (allowed := limits.max_string_ids):
                    raise limit_exceeded("sparse", "max_string_ids", allowed, num_texts, "string ids")
                decoded = _DECODERS["strings"][bag_sizes is not None].decode(ids.mini)
                texts += decoded if bag_sizes is None else chain.from_iterable(decoded)
            elif count:
                buffers.append(ids.as_buffer(of_type="i"))
            if (given := lists.weights.get(name)) is not None:
                part: Part = "" if is_lookup else "context" if is_context else "candidates"
                num_lists += _check_weights(given, count, bag_sizes, part_path(part, f"weights.{name}"))
                weighted.append(position)
                factors.append(given)
        values = np.frombuffer(bytearray().join(buffers), np.int64)
        floats, num_float_lists = _floats(schema, factors, lists.dense, num_candidates)
        num_weights = int(np.array(num_ids)[weighted].sum()) if weighted else 0
        num_dense = num_candidates and schema.num_context_dense + num_candidates * schema.num_candidate_dense
        if values.size + len(texts) != sum(num_ids) or floats.size != num_weights + num_dense:
            raise TypeError
        # A flat list has an opening bracket or more, and a list of n lists n + 1 or more. So if the text has as many as
        # these add up to, no list has more: `[1, [2, 3], []]` is not `[1, 2, 3]`. Counted several times faster than by
        # `bytes.count`; those in strings, too.
        num_lists += num_float_lists
        count = int(np.count_nonzero(np.frombuffer(self.text, np.uint8) == _BRACKET))
        if count != num_lists and (count < num_lists or count_above(self.text, _BRACKET, num_lists)):
            raise TypeError
        flat_lengths = np.concatenate(lengths) if lengths else np.empty(0, np.int64)
        counts = requests.FeatureCounts(keys, num_ids, num_bags, widths, weighted)
        weights = floats[:num_weights] if weighted else None
        bags = counts.bags(schema, flat_lengths, values, texts, weights, is_lookup=is_lookup)
        if is_lookup:
            return self.lookup_request(schema, bags, texts)
        start = num_weights + schema.num_context_dense
        context, rows = floats[num_weights:start], floats[start:].reshape(num_candidates, schema.num_candidate_dense)
        return self.rank_request(bags, num_candidates, context, rows, texts)


def _check_weights(weights: Any, count: int, bag_sizes: Int64Array | None, path: str) -> int:
    """Return the number of lists that the weights of a feature are, if they are like its ids."""
    if len(weights) != count:
        raise count_mismatch(path, f"{len(weights)} entries, but its ids have {count}")
    if bag_sizes is None:
        return 1
    counts = np.fromiter(map(len, weights), np.int64, count=count)
    if (different := counts != bag_sizes).any():
        bag = int(different.argmax())
        raise count_mismatch(f"{path}[{bag}]", f"{counts[bag]} weights for {bag_sizes[bag]} ids")
    return 1 + count


def _floats(
    schema: RequestSchema, factors: list[Any], dense: dict[Part, Any], num_candidates: int
) -> tuple[Float32Array, int]:
    """float32 [n], all numbers of the weights and of the dense values, and of how many lists the latter are.

    What float32 can't hold becomes inf, and is refused later.
    """
    num_rows = 0
    if num_candidates:
        num_context, width = schema.num_context_dense, schema.num_candidate_dense
        if (count := len(dense.get("context", ()))) != num_context:
            raise count_mismatch("context.dense", f"{count} values, the model takes {num_context}")
        rows = dense.get("candidates", ())
        num_rows = len(rows)
        if num_rows != num_candidates and (num_rows or width):
            raise count_mismatch("candidates.dense", f"{num_rows} rows for {num_candidates} candidates")
        widths = np.fromiter(map(len, rows), np.int64, count=num_rows)
        if (different := widths != width).any():
            row = int(different.argmax())
            raise count_mismatch(f"candidates.dense[{row}]", f"{widths[row]} values, the model takes {width}")
    buffers = []
    for numbers in (*factors, *dense.values()):
        if not isinstance(numbers, simdjson.Array):
            raise TypeError
        if len(numbers):
            buffers.append(numbers.as_buffer(of_type="d"))
    with np.errstate(over="ignore"):
        return np.frombuffer(bytearray().join(buffers), np.float64).astype(np.float32), len(dense) + num_rows


def _refusal(schema: RequestSchema, lists: _Lists, *, is_lookup: bool) -> InvalidRequestError:
    """Return the error for the first element of all lists that is not what it must be."""
    checked: list[tuple[str, Any, _Kind, bool]] = []
    for name, is_context, is_string in schema.kinds:
        if name not in lists.ids:
            continue
        part: Part = "" if is_lookup else "context" if is_context else "candidates"
        ids = lists.ids[name]
        is_nested = part != "context" and isinstance(ids, simdjson.Array) and len(ids) > 0
        is_nested = is_nested and isinstance(ids[0], simdjson.Array)
        checked.append((part_path(part, f"sparse.{name}"), ids, "strings" if is_string else "integers", is_nested))
        if (weights := lists.weights.get(name)) is not None:
            checked.append((part_path(part, f"weights.{name}"), weights, "floats", is_nested))
    for part, dense in lists.dense.items():
        checked.append((f"{part}.dense", dense, "floats", part == "candidates"))
    for list_path, numbers, kind, is_nested in checked:
        path, value = list_path, numbers
        text = value.mini if isinstance(value, simdjson.Array | simdjson.Object) else _ENCODER.encode(value)
        try:
            _DECODERS[kind][is_nested].decode(text)
        except msgspec.ValidationError as error:
            positions = re.findall(r"\[(\d+)\]", str(error))
        else:
            continue
        for position in positions:
            value = value[int(position)]
            path += f"[{position}]"
        if len(positions) <= is_nested:
            return invalid_field(path, f"{_shown(value)} is not a list")
        refusal = invalid_field if kind == "floats" or isinstance(value, simdjson.Array) else errors.invalid_id
        return refusal(path, f"{_shown(value)} is not {_ALLOWED[kind]}")
    return invalid_field("", "its lists are not nested as they must be")


def _members(value: Any, allowed: frozenset[str] | None, *path: str) -> dict[str, Any]:
    if not isinstance(value, _OBJECTS):
        raise invalid_field(".".join(filter(None, path)), f"{_shown(value)} is not an object")
    if len(value) > MAX_KEYS:
        raise invalid_field(".".join(filter(None, path)), f"{len(value)} keys; a request has at most {MAX_KEYS}")
    # `items` would make Python objects of all that is in there.
    keys = list(value.keys())
    members = dict(zip(keys, map(value.__getitem__, keys), strict=True))
    if len(members) != len(keys):
        raise invalid_field(Counter(keys).most_common(1)[0][0], "the key is there twice")
    if allowed is not None and not members.keys() <= allowed:
        name = ".".join((*path, min(members.keys() - allowed)))
        raise invalid_field(name, f"unknown key; allowed are {sorted(allowed)}")
    return members


def _shown(value: Any) -> str:
    if isinstance(value, simdjson.Array):
        return "a list"
    if isinstance(value, simdjson.Object):
        return "an object"
    text = _ENCODER.encode(value).decode()
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."


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
        return errors.malformed("", f"the body is not JSON that can be read: {problem}")
    _, *path, value = steps
    field = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    is_id, problem = ".sparse." in field, "it is not valid Unicode: it has a lone surrogate"
    if not isinstance(value, str):
        allowed = f"an id: one of the integers in 0..{MAX_ID}, or a string" if is_id else "a finite number of 64 bits"
        problem = f"{json.dumps(value)[:_SHOWN_CHARS]} is not {allowed}"
    return InvalidRequestError(field[1:], problem, kind="invalid_id" if is_id else "invalid_field")


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


def count_above(body: requests.Buffer, character: int, limit: int) -> int:
    """Count a character outside of strings if it is there more than `limit` times; else return 0. Exact for JSON."""
    # Within strings too at first, several times faster than `bytes.count`.
    if len(body) <= limit or int(np.count_nonzero(np.frombuffer(body, np.uint8) == character)) <= limit:
        return 0
    plain = bytes(body)
    if b"\\" in plain:
        # First pairs of backslashes, then escaped quotes: what is left has a quote only where a string begins or ends.
        plain = plain.replace(b"\\\\", b"").replace(b'\\"', b"")
    text = np.frombuffer(plain, np.uint8)
    is_outside = np.cumsum(text == _QUOTE, dtype=np.uint8) & 1 == 0
    count = int(np.count_nonzero((text == character) & is_outside))
    return count if count > limit else 0


def lookup_pieces(response: LookupResult) -> Iterator[bytes]:
    """Write the response to a lookup, in pieces of about `PIECE_FLOATS` numbers.

    It has [bags][dim] floats by feature, or [bags][ids][dim] for a feature that is not pooled.
    """
    head: dict[str, Any] = {"model": response.model, "version": response.version}
    head |= {"delta_sequence": response.delta_sequence, "age_ms": response.age_ms}
    if response.missing is not None:
        head["missing"] = _missing(response)
    if response.request_id:
        head["request_id"] = response.request_id
    yield _ENCODER.encode(head)[:-1] + b',"embeddings":{'
    for number, (name, feature) in enumerate(response.embeddings.items()):
        yield (b"," if number else b"") + _ENCODER.encode(name) + b":["
        yield from _bags(feature.values, feature.lengths) if isinstance(feature, Ragged) else _rows(feature)
        yield b"]"
    yield b"}}"


def _missing(response: requests.Response) -> dict[str, dict[str, list[int]]]:
    missing = (response.missing or {}).items()
    return {name: {"bags": keys.bags.tolist(), "keys": keys.keys.tolist()} for name, keys in missing}


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

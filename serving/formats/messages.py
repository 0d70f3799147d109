"""The protobuf form of requests and answers (`shardrank.v1`), by maps of features or packed.

A message is walked over twice at most: its outer fields, which say what model is meant, and once that is known its
features. The map form names every feature; the packed form has all of them in the order of the model's schema, as four
arrays, under a digest of that schema. Numbers become arrays where they lie.
"""

from __future__ import annotations

from itertools import chain
from operator import itemgetter
from typing import cast

import numpy as np
import numpy.typing as npt

from loader.fingerprint import fingerprint_strings
from serving.description import ModelDescription
from serving.errors import (
    CountMismatchError,
    InvalidFieldError,
    InvalidIdError,
    LimitExceededError,
    MalformedRequestError,
    SchemaDigestError,
)
from serving.formats.checks import (
    check_lookup_size,
    check_num_candidates,
    dense_matrix,
    keyed_bags,
    lookup_request,
    rank_request,
)
from serving.formats.protobuf import Message, encode_field, encode_integer, packed_bytes, signed
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
from serving.limits import RequestLimits
from serving.proto.shardrank.v1 import ranking_pb2
from shard_node.bags import Float32Array, Int32Array, Int64Array, KeyedBags

CONTENT_TYPE = "application/x-protobuf"
_NAMES = {"rank": "shardrank.v1.RankRequest", "lookup": "shardrank.v1.LookupRequest"}
_MAX_TEXT_BYTES = 4096
_UINT32 = 2**32 - 1
# Numbers of fields with their wire types: 0 varint, 1 eight bytes, 2 with a length, 5 four bytes.
_MODEL, _VERSION = 1 << 3 | 2, 2 << 3
_RANK_PARTS = {3 << 3 | 2: "context", 4 << 3 | 2: "candidates", 10 << 3 | 2: "packed"}
_RANK_NUMBERS = {5 << 3: "num_candidates", 6 << 3: "timeout_ms", 7 << 3: "top_k"}
_RANK_TEXTS = {8 << 3 | 2: "request_id", 9 << 3 | 2: "routing_key"}
_LOOKUP_NUMBERS = {4 << 3: "timeout_ms"}
_LOOKUP_TEXTS = {5 << 3 | 2: "request_id", 6 << 3 | 2: "routing_key"}
_SPARSE, _DENSE, _DENSE_ONE = 1 << 3 | 2, 2 << 3 | 2, 2 << 3 | 5
_LOOKUP_SPARSE = 3 << 3 | 2
_KEY, _VALUE = 1 << 3 | 2, 2 << 3 | 2
# Columns of a feature: ids, lengths, weights. Packed as a rule; one by one they have the wire type of a number.
_COLUMNS = {1 << 3 | 2: 0, 1 << 3 | 1: 0, 2 << 3 | 2: 1, 2 << 3 | 5: 1, 3 << 3 | 2: 2, 3 << 3 | 5: 2}
_STRING_IDS = 4 << 3 | 2
_COLUMN_NAMES, _COLUMN_WIDTHS = ("ids", "lengths", "weights"), (8, 4, 4)
_PACKED = {1: "schema_digest", 2: "ids", 3: "lengths", 4: "weights", 5: "context_dense", 6: "candidate_dense"}
_PACKED_STRING_IDS = 7 << 3 | 2


class MessageCodec:
    """Reads `RankRequest` or `LookupRequest` and writes their answers.

    Args:
        method: which of them.
        model: over HTTP, the model that the path names; None over gRPC.
    """

    def __init__(self, method: Method, model: str | None = None) -> None:
        self.method: Method = method
        self.api = "grpc" if model is None else "http"
        self._model = model

    def read(self, body: Buffer, limits: RequestLimits) -> UnparsedMessage:
        """Read the outer fields.

        Raises:
            MalformedRequestError: it is no such message.
            LimitExceededError: it has more fields than allowed.
            InvalidFieldError: it names no model, or another one than the path.
        """
        data = bytes(body) if isinstance(body, memoryview) else body
        message = Message(data, _NAMES[self.method], limits.max_message_fields, "max_message_fields")
        unparsed = (UnparsedRank if self.method == "rank" else UnparsedLookup)(message)
        if self._model is not None:
            if unparsed.model not in ("", self._model):
                raise InvalidFieldError("model", f"{unparsed.model[:80]!r}, but the path names {self._model!r}")
            unparsed.model = self._model
        if not unparsed.model:
            raise InvalidFieldError("model", "it is empty; it must be the name of a served model")
        return unparsed


class UnparsedMessage:
    """A message whose outer fields were read.

    Args:
        message: to read.

    Attributes:
        model, version, key: see `Unparsed`.
    """

    _parts: dict[int, str]
    _number_fields: dict[int, str]
    _text_fields: dict[int, str]

    def __init__(self, message: Message) -> None:
        self._message = message
        self.model = ""
        self.version: int | None = None
        self._numbers: dict[str, int] = {}
        self._texts: dict[str, str] = {}
        self._spans: dict[str, tuple[int, int]] = {}
        self._features: list[tuple[int, int]] = []
        for tag, start, end in message.fields():
            if (name := self._parts.get(tag)) is not None:
                self._take_part(name, start, end)
            elif tag == _MODEL:
                self.model = self._text("model", start, end)
            elif tag == _VERSION:
                self.version = signed(start)
            elif (name := self._number_fields.get(tag)) is not None:
                self._numbers[name] = start & _UINT32
            elif (name := self._text_fields.get(tag)) is not None:
                self._texts[name] = self._text(name, start, end)
        self.key = self._texts.get("routing_key", "") or self._texts.get("request_id", "")

    def parse(self, schema: RequestSchema) -> Request:
        """See `Unparsed`."""
        raise NotImplementedError

    def encode(self, answer: Answer) -> Encoded:
        """See `Unparsed`."""
        encoded = encode_rank(answer) if isinstance(answer, RankAnswer) else encode_lookup(answer)
        return Encoded(encoded, CONTENT_TYPE)

    def _take_part(self, name: str, start: int, end: int) -> None:
        if name in self._spans:
            # Protobuf would merge the two. No encoder writes that, and no two readers would agree on its limits.
            raise MalformedRequestError(name, "it is there twice")
        self._spans[name] = start, end

    def _text(self, name: str, start: int, end: int) -> str:
        if end - start > _MAX_TEXT_BYTES:
            raise LimitExceededError(name, "text", _MAX_TEXT_BYTES, end - start, "bytes")
        return self._message.text(start, end, name)

    def _options(self) -> Options:
        numbers, texts = self._numbers, self._texts
        return Options(
            numbers.get("timeout_ms") or None,
            None,
            numbers.get("top_k") or None,
            texts.get("request_id", ""),
            texts.get("routing_key", ""),
        )


class UnparsedRank(UnparsedMessage):
    """A `RankRequest`, whichever form its features have."""

    _parts, _number_fields, _text_fields = _RANK_PARTS, _RANK_NUMBERS, _RANK_TEXTS

    def parse(self, schema: RequestSchema) -> RankRequest:
        """See `Unparsed`.

        Raises:
            SchemaDigestError: it is packed for another schema.
        """
        if "packed" in self._spans:
            if len(self._spans) > 1:
                raise InvalidFieldError("packed", "it is given beside context or candidates")
            return self._packed(schema)
        data, message = self._message.data, self._message
        features = FeatureSpans(schema, message)
        context_dense, candidate_dense = (self._read_part(features, part) for part in ("context", "candidates"))
        columns = MapColumns(schema, features, lookup=False)
        dense = _floats(data, candidate_dense, "candidates.dense")
        num_candidates = self._num_candidates(schema, columns, dense)
        check_num_candidates(schema.limits, num_candidates)
        bags = columns.bags(schema.bags_per_key(num_candidates))
        context = _context_dense(schema, _floats(data, context_dense, "context.dense"))
        candidates = dense_matrix(dense, num_candidates, schema.num_candidate_dense)
        return rank_request(schema, bags, num_candidates, context, candidates, self._options(), columns.texts)

    def _read_part(self, features: FeatureSpans, part: Part) -> list[tuple[int, int]]:
        """Walk over the features of a part. Returns where its dense values lie."""
        dense: list[tuple[int, int]] = []
        start, end = self._spans.get(part, (0, 0))
        for tag, at, stop in self._message.fields(start, end):
            if tag == _SPARSE:
                features.add(part, at, stop)
            elif tag in (_DENSE, _DENSE_ONE):
                dense.append((at, stop))
        return dense

    def _num_candidates(self, schema: RequestSchema, columns: MapColumns, dense: Float32Array) -> int:
        if explicit := self._numbers.get("num_candidates", 0):
            return explicit
        if schema.candidate_names:
            return columns.num_bags(schema.features.index[schema.candidate_names[0]])
        width = schema.num_candidate_dense
        return dense.size // width if width else 0

    def _packed(self, schema: RequestSchema) -> RankRequest:
        """Read the packed form: as many steps whatever the number of features."""
        data, spans, texts = self._message.data, dict[str, tuple[int, int]](), list[str]()
        for tag, start, end in self._message.fields(*self._spans["packed"]):
            if tag == _PACKED_STRING_IDS:
                texts.append(self._message.text(start, end, "packed.string_ids"))
            elif tag & 7 == 2 and (name := _PACKED.get(tag >> 3)) is not None:
                spans[name] = start, end
        digest = self._text("packed.schema_digest", *spans.get("schema_digest", (0, 0)))
        if digest != schema.features.digest:
            raise SchemaDigestError(schema.features.spec.model, digest, schema.features.digest)
        num_candidates = self._numbers.get("num_candidates", 0)
        check_num_candidates(schema.limits, num_candidates)
        bags_per_key = schema.bags_per_key(num_candidates)
        integers = _numbers(data, spans.get("ids"), "<i8", "packed.ids")
        lengths: Int64Array | None = None
        if spans.get("lengths", (0, 0))[0] < spans.get("lengths", (0, 0))[1]:
            lengths = _numbers(data, spans["lengths"], "<i4", "packed.lengths", np.int64)
            if lengths.size != int(bags_per_key.sum()):
                raise CountMismatchError("packed.lengths", f"{lengths.size} of them for {bags_per_key.sum()} bags")
        values, ids_per_key = _packed_values(schema, bags_per_key, lengths, integers, texts)
        weights = None
        if "weights" in spans:
            weights = _packed_weights(schema, _numbers(data, spans["weights"], "<f4", "packed.weights"), ids_per_key)
        bags = keyed_bags(schema, schema.keys, bags_per_key, lengths, ids_per_key, values, weights)
        context = _numbers(data, spans.get("context_dense"), "<f4", "packed.context_dense")
        candidates = _numbers(data, spans.get("candidate_dense"), "<f4", "packed.candidate_dense")
        matrix = dense_matrix(candidates, num_candidates, schema.num_candidate_dense)
        context = _context_dense(schema, context)
        return rank_request(schema, bags, num_candidates, context, matrix, self._options(), texts)


class UnparsedLookup(UnparsedMessage):
    """A `LookupRequest`."""

    _parts, _number_fields, _text_fields = {_LOOKUP_SPARSE: "sparse"}, _LOOKUP_NUMBERS, _LOOKUP_TEXTS

    def parse(self, schema: RequestSchema) -> LookupRequest:
        """See `Unparsed`."""
        features = FeatureSpans(schema, self._message)
        for start, end in self._features:
            features.add("", start, end)
        columns = MapColumns(schema, features, lookup=True)
        return lookup_request(schema, columns.bags(None), self._options(), columns.texts)

    def _take_part(self, name: str, start: int, end: int) -> None:
        # A map is one field for each of its entries.
        self._features.append((start, end))


class FeatureSpans:
    """Where the numbers of a message's features lie.

    Args:
        schema: of the model.
        message: that they are in.

    Attributes:
        columns: for each feature, where the pieces of its ids, lengths and weights lie, and its string ids.
    """

    def __init__(self, schema: RequestSchema, message: Message) -> None:
        self.message = message
        self.columns: dict[str, tuple[list[tuple[int, int]], ...]] = {}
        self._schema = schema

    def add(self, part: Part, start: int, end: int) -> None:
        """Walk over one entry of a map of features.

        Raises:
            MalformedRequestError: it is no such entry.
            UnknownFeatureError: it is none of the part's features.
            InvalidFieldError: it was given before.
        """
        message, name = self.message, ""
        value: tuple[int, int] | None = None
        for tag, at, stop in message.fields(start, end):
            if tag == _KEY:
                name = message.text(at, stop, part_path(part, "sparse"))
            elif tag == _VALUE:
                if value is not None:
                    raise MalformedRequestError(part_path(part, "sparse"), "a feature's value is there twice")
                value = at, stop
        if name not in self._schema.name_sets[part]:
            raise self._schema.unknown_feature(part, name)
        if name in self.columns:
            raise InvalidFieldError(part_path(part, f"sparse.{name}"), "it is given twice")
        columns: tuple[list[tuple[int, int]], ...] = ([], [], [], [])
        for tag, at, stop in message.fields(*(value or (0, 0))):
            if (column := _COLUMNS.get(tag)) is not None:
                columns[column].append((at, stop))
            elif tag == _STRING_IDS:
                columns[3].append((at, stop))
        self.columns[name] = columns


class MapColumns:
    """The features of a message by map, in flat order, as arrays.

    Args:
        schema: of the model.
        features: of the message.
        lookup: whether it is a lookup, which need not have all features.

    Raises:
        MissingFeatureError: one that a rank request must have is not there.
        MalformedRequestError: bytes that are no whole numbers.
        InvalidIdError: integers where strings belong, or the other way round.
        LimitExceededError: more ids than allowed.

    Attributes:
        texts: string ids of all features, in flat order.
    """

    def __init__(self, schema: RequestSchema, features: FeatureSpans, *, lookup: bool) -> None:
        self._schema, self._lookup, self._data = schema, lookup, features.message.data
        if lookup:
            given = sorted(schema.features.index[name] for name in features.columns)
            self._keys: Int32Array = np.array(given, dtype=np.int32)
        else:
            # Only features of the model are there, each once, so that their number tells whether all are.
            parts: tuple[Part, ...] = ("context", "candidates")
            for part in parts if len(features.columns) < len(schema.names) else ():
                schema.check_names(part, features.columns.keys() & schema.name_sets[part], all_needed=True)
            self._keys = schema.keys
        columns = [features.columns[schema.names[key]] for key in self._keys.tolist()]
        ids, lengths, self._weights, strings = (list(map(itemgetter(column), columns)) for column in range(4))
        sizes = [self._sizes(pieces, column) for column, pieces in enumerate((ids, lengths, self._weights))]
        num_strings = np.array(list(map(len, strings)), np.int64)
        self._num_integers, self._num_lengths, self._num_weights = sizes
        self._num_ids = self._num_integers + num_strings
        self._check_id_types(num_strings)
        if lookup:
            check_lookup_size(schema, self._keys, np.where(self._num_lengths > 0, self._num_lengths, self._num_ids))
        elif (most := int(self._num_lengths.max(initial=0))) > schema.limits.max_candidates:
            check_num_candidates(schema.limits, most)
        total, allowed = int(self._num_ids.sum()), schema.limits.max_ids_per_request
        if total > allowed:
            raise LimitExceededError("sparse", "max_ids_per_request", allowed, total, "ids over all features")
        message = features.message
        self.texts = [message.text(start, end, "string_ids") for start, end in chain.from_iterable(strings)]
        integers = np.frombuffer(self._joined(ids), "<i8")
        self._lengths = np.frombuffer(self._joined(lengths), "<u4").astype(np.int64)
        self._values = integers
        if self.texts:
            self._values = _with_texts(np.repeat(num_strings > 0, self._num_ids), integers, self.texts)

    def num_bags(self, segment: int) -> int:
        """Bags of one feature: as many as it has lengths, else ids."""
        return int(self._num_lengths[segment]) or int(self._num_ids[segment])

    def bags(self, bags_per_key: Int64Array | None) -> KeyedBags:
        """Make flat bags.

        Args:
            bags_per_key: int64 [S], how many bags each feature must have; None to take what is given.

        Raises:
            CountMismatchError: for a feature with another number of bags, or lengths that don't add up to its ids.
        """
        has_lengths = self._num_lengths > 0
        is_one_bag = ~has_lengths & (not self._lookup) & self._schema.features.is_context[self._keys]
        given = np.where(has_lengths, self._num_lengths, np.where(is_one_bag, 1, self._num_ids))
        if bags_per_key is not None and not np.array_equal(given, bags_per_key):
            segment = int((given != bags_per_key).argmax())
            what = "bags" if self._schema.features.is_context[segment] else "candidates"
            raise CountMismatchError(
                self._path(segment), f"{int(given[segment])} {what}, expected {int(bags_per_key[segment])}"
            )
        lengths: Int64Array | None = None
        if has_lengths.all():
            lengths = self._lengths
        elif has_lengths.any() or is_one_bag.any():
            lengths = np.ones(int(given.sum()), dtype=np.int64)
            lengths[np.repeat(has_lengths, given)] = self._lengths
            lengths[np.repeat(is_one_bag, given)] = self._num_ids[is_one_bag]
        return keyed_bags(
            self._schema, self._keys, given, lengths, self._num_ids, self._values, self._flat_weights(),
            lookup=self._lookup,
        )  # fmt: skip

    def _flat_weights(self) -> Float32Array | None:
        counts = self._num_weights
        given = counts > 0
        if not given.any():
            return None
        weighted = self._schema.is_weighted[self._keys]
        if (given & ~weighted).any():
            segment = int((given & ~weighted).argmax())
            name = self._schema.names[int(self._keys[segment])]
            raise InvalidFieldError(f"{self._path(segment)}.weights", f"feature {name!r} takes no weights")
        if (counts[given] != self._num_ids[given]).any():
            segment = int((given & (counts != self._num_ids)).argmax())
            raise CountMismatchError(
                f"{self._path(segment)}.weights", f"{counts[segment]} weights for {self._num_ids[segment]} ids"
            )
        weights = np.ones(int(self._num_ids.sum()), dtype=np.float32)
        weights[np.repeat(given, self._num_ids)] = np.frombuffer(self._joined(self._weights), "<f4")
        return weights

    def _check_id_types(self, num_strings: Int64Array) -> None:
        is_string = self._schema.is_string[self._keys]
        wrong = np.where(is_string, self._num_integers, num_strings) > 0
        if wrong.any():
            segment = int(wrong.argmax())
            name = self._schema.names[int(self._keys[segment])]
            field, type_name = ("ids", "strings") if is_string[segment] else ("string_ids", "integers")
            raise InvalidIdError(f"{self._path(segment)}.{field}", f"ids of {name!r} are {type_name}, not given here")

    def _sizes(self, pieces: list[list[tuple[int, int]]], column: int) -> Int64Array:
        """int64 [S], the numbers of a column. Raises MalformedRequestError for one that breaks off."""
        width = _COLUMN_WIDTHS[column]
        sizes = [sum(end - start for start, end in own) for own in pieces]
        numbers, rest = np.divmod(np.array(sizes, np.int64), width)
        if rest.any():
            path = f"{self._path(int(rest.argmax()))}.{_COLUMN_NAMES[column]}"
            raise MalformedRequestError(path, f"a packed field whose length is not a multiple of {width} bytes")
        return cast(Int64Array, numbers)

    def _joined(self, pieces: list[list[tuple[int, int]]]) -> bytearray:
        # Arrays over a bytearray may be written to, which torch wants of memory that it shares.
        view = memoryview(self._data)
        return bytearray().join([view[start:end] for start, end in chain.from_iterable(pieces)])

    def _path(self, segment: int) -> str:
        name = self._schema.names[int(self._keys[segment])]
        return part_path("" if self._lookup else self._schema.part_of(name), f"sparse.{name}")


def _numbers(
    data: bytes | bytearray, span: tuple[int, int] | None, dtype: str, path: str, wanted: npt.DTypeLike | None = None
) -> npt.NDArray:  # type: ignore[type-arg]
    """An array of the numbers at a place, of another dtype if one is wanted.

    A copy: in the message they are seldom aligned and often read-only, and as a view they would keep all of it.
    """
    start, end = span or (0, 0)
    width, size = int(dtype[-1]), end - start
    if size % width:
        raise MalformedRequestError(path, f"{size} bytes, which is not a multiple of {width}")
    return np.frombuffer(data, dtype, size // width, start).astype(wanted or dtype)


def _floats(data: bytes | bytearray, spans: list[tuple[int, int]], path: str) -> Float32Array:
    if len(spans) <= 1:
        return cast(Float32Array, _numbers(data, spans[0] if spans else None, "<f4", path))
    return np.concatenate([_numbers(data, span, "<f4", path) for span in spans])


def _context_dense(schema: RequestSchema, values: Float32Array) -> Float32Array:
    if values.size != schema.num_context_dense:
        raise CountMismatchError("context.dense", f"{values.size} values, the model takes {schema.num_context_dense}")
    return values


def _packed_values(
    schema: RequestSchema,
    bags_per_key: Int64Array,
    lengths: Int64Array | None,
    integers: Int64Array,
    texts: list[str],
) -> tuple[Int64Array, Int64Array]:
    """All ids in flat order, int64 [n], and how many each feature has, int64 [F]."""
    ids_per_key = bags_per_key
    if lengths is not None:
        # Bounded one by one before they are summed, so that no sum wraps around.
        most = integers.size + len(texts)
        if lengths.size and not 0 <= int(lengths.min()) <= int(lengths.max()) <= most:
            bag = int(((lengths < 0) | (lengths > most)).argmax())
            raise InvalidFieldError(f"packed.lengths[{bag}]", f"{lengths[bag]} is not in 0..{most}, the number of ids")
        starts = np.zeros(bags_per_key.size, np.int64)
        np.cumsum(bags_per_key[:-1], out=starts[1:])
        ids_per_key = np.add.reduceat(lengths, starts) if lengths.size else bags_per_key
    is_string = schema.is_string
    wanted_texts = int(ids_per_key[is_string].sum())
    wanted = int(ids_per_key.sum()) - wanted_texts
    if (wanted, wanted_texts) != (integers.size, len(texts)):
        raise CountMismatchError(
            "packed.ids",
            f"{integers.size} integers and {len(texts)} strings; the lengths say {wanted} and {wanted_texts}",
        )
    if not texts:
        return integers, ids_per_key
    return _with_texts(np.repeat(is_string, ids_per_key), integers, texts), ids_per_key


def _packed_weights(schema: RequestSchema, weights: Float32Array, ids_per_key: Int64Array) -> Float32Array | None:
    if not weights.size:
        return None
    if weights.size != int(ids_per_key.sum()):
        raise CountMismatchError("packed.weights", f"{weights.size} of them for {ids_per_key.sum()} ids")
    others = weights[~np.repeat(schema.is_weighted, ids_per_key)]
    if not (others == 1).all():
        raise InvalidFieldError("packed.weights", "a feature that takes no weights has one that is not 1")
    return weights


def _with_texts(of_text: npt.NDArray[np.bool_], integers: Int64Array, texts: list[str]) -> Int64Array:
    """Put fingerprints of strings between integers; bool [n] says where."""
    values = np.empty(of_text.size, dtype=np.int64)
    values[of_text] = fingerprint_strings(texts)
    values[~of_text] = integers
    return values


def encode_rank(answer: RankAnswer) -> bytes:
    """Encode a RankResponse."""
    return b"".join(
        (
            encode_field(1, answer.model.encode()),
            encode_integer(2, answer.version),
            encode_field(3, packed_bytes(answer.scores, "<f4")),
            encode_field(4, packed_bytes(answer.order, "<u4")),
            encode_field(5, answer.request_id.encode()),
        )
    )


def encode_lookup(answer: LookupAnswer) -> bytes:
    """Encode a LookupResponse."""
    parts = [encode_field(1, answer.model.encode()), encode_integer(2, answer.version)]
    for name, feature in answer.embeddings.items():
        lengths = b"" if feature.lengths is None else packed_bytes(feature.lengths, "<u4")
        embedding = b"".join(
            (
                encode_field(1, packed_bytes(feature.values, "<f4")),
                encode_integer(2, feature.values.shape[1]),
                encode_field(3, lengths),
            )
        )
        parts.append(encode_field(3, encode_field(1, name.encode()) + encode_field(2, embedding)))
    parts.append(encode_field(4, answer.request_id.encode()))
    return b"".join(parts)


def encode_model(description: ModelDescription) -> bytes:
    """Encode a GetModelResponse."""
    return ranking_pb2.GetModelResponse(
        model=description.model,
        version=description.version,
        identity=description.identity,
        schema_digest=description.schema_digest,
        features=[ranking_pb2.FeatureInfo(**one.model_dump()) for one in description.features],
        tables=[ranking_pb2.TableInfo(**one.model_dump()) for one in description.tables],
        dense_inputs=ranking_pb2.DenseInputsInfo(**description.dense_inputs.model_dump()),
        dense_model=ranking_pb2.DenseModelInfo(**description.dense_model.model_dump()),
        limits={name: float(value) for name, value in description.limits.model_dump().items()},
    ).SerializeToString()

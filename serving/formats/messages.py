"""The protobuf form of requests and answers (`shardrank.v1`), by maps of features or packed.

The outer fields are read first, which name the model, then the features. The map form names every feature; the packed
form has all in the order of the model's schema, as four arrays, under a digest of that schema.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from serving.description import ModelInfo
from serving.errors import InvalidRequestError, count_mismatch, invalid_field, invalid_id, malformed
from serving.formats.bags import (
    RAGGED,
    FeatureCounts,
    array_of,
    check_lookup_size,
    check_num_candidates,
    keyed_bags,
    lookup_request,
    rank_request,
    text_of,
    values_of,
)
from serving.formats.protobuf import (
    ProtobufMessage,
    encode_field,
    encode_message,
    encode_varint,
    packed_bytes,
    signed,
    tags_of,
)
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
from shard_node.bags import Float32Array, Int64Array, KeyedBags

CONTENT_TYPE = "application/x-protobuf"
_NAMES = {"rank": "shardrank.v1.RankRequest", "lookup": "shardrank.v1.LookupRequest"}
_UINT32 = 2**32 - 1
_FIELDS: dict[Method, dict[int, str]] = {
    "rank": tags_of(ranking_pb2.RankRequest),
    "lookup": tags_of(ranking_pb2.LookupRequest),
}
_PART, _PACKED = tags_of(ranking_pb2.FeatureSet), tags_of(ranking_pb2.PackedFeatures)
_WIDTHS = {"ids": 8, "lengths": 4, "weights": 4}
_COLUMNS = ("ids", "lengths", "weights", "string_ids")
_COLUMN_OF = {tag: _COLUMNS.index(name) for tag, name in tags_of(ranking_pb2.SparseFeature).items()}


class MessageCodec:
    """Reads `RankRequest` or `LookupRequest`; over HTTP the path names the model too."""

    def __init__(self, method: Method, model: str | None = None) -> None:
        self.method: Method = method
        self.api = "grpc" if model is None else "http"
        self._model = model

    def read(self, body: Buffer, limits: RequestLimits) -> UnparsedMessage:
        """See `Codec`: read the outer fields."""
        unparsed = UnparsedMessage(ProtobufMessage(body, _NAMES[self.method], limits.max_message_fields), self.method)
        if self._model is not None:
            if unparsed.model not in ("", self._model):
                raise invalid_field("model", f"{unparsed.model[:80]!r}, but the path names {self._model!r}")
            unparsed.model = self._model
        if not unparsed.model:
            raise invalid_field("model", "it is empty; it must be the name of a served model")
        return unparsed


class UnparsedMessage:
    """A message whose outer fields were read. See `Unparsed`."""

    def __init__(self, message: ProtobufMessage, method: Method) -> None:
        self._message = message
        self._is_lookup = method == "lookup"
        self._numbers: dict[str, int] = {}
        self._spans: dict[str, tuple[int, int]] = {}
        self._entries: list[tuple[int, int]] = []
        texts = {"model": "", "request_id": "", "routing_key": ""}
        fields = _FIELDS[method]
        for tag, start, end in message.fields():
            name = fields.get(tag)
            if name is None:
                continue
            if not tag & 7:
                self._numbers[name] = start
            elif name in texts:
                texts[name] = message.text(start, end, name)
            elif name == "sparse":
                # A map is one field for each of its entries.
                self._entries.append((start, end))
            elif name in self._spans:
                # Protobuf would merge the two. No encoder writes that, and no two readers would agree on its limits.
                raise malformed(name, "it is there twice")
            else:
                self._spans[name] = start, end
        self.model = texts["model"]
        self.version = signed(self._numbers["version"]) if "version" in self._numbers else None
        self.key = texts["routing_key"] or texts["request_id"]
        self._options = Options(
            self._number("timeout_ms") or None, None, self._number("top_k") or None, texts["request_id"],
            texts["routing_key"],
        )  # fmt: skip

    def parse(self, schema: RequestSchema) -> Request:
        """See `Unparsed`. Raises InvalidRequestError for a request that is packed for another schema."""
        if self._is_lookup:
            return self._lookup(schema)
        if "packed" not in self._spans:
            return self._rank(schema)
        if len(self._spans) > 1:
            raise invalid_field("packed", "it is given beside context or candidates")
        return self._packed(schema)

    def encode(self, answer: Answer) -> Encoded:
        """See `Unparsed`."""
        encoded = encode_rank(answer) if isinstance(answer, RankAnswer) else encode_lookup(answer)
        return Encoded(encoded, CONTENT_TYPE)

    def _number(self, name: str) -> int:
        return self._numbers.get(name, 0) & _UINT32

    def _lookup(self, schema: RequestSchema) -> LookupRequest:
        features = _Features(schema, self._message, lookup=True)
        for start, end in self._entries:
            features.add("", start, end)
        layout = features.layout()
        check_lookup_size(schema, layout.keys, np.array(layout.num_bags, np.int64))
        layout.check_num_ids()
        return lookup_request(schema, features.bags(layout), self._options, features.texts)

    def _rank(self, schema: RequestSchema) -> RankRequest:
        features = _Features(schema, self._message)
        dense = self._read_part(features, "context"), self._read_part(features, "candidates")
        layout = features.layout()
        num_candidates = self._number("num_candidates")
        if not num_candidates and schema.candidate_names:
            num_candidates = layout.num_bags[schema.features.index[schema.candidate_names[0]]]
        elif not num_candidates and schema.num_candidate_dense:
            num_candidates = dense[1].size // schema.num_candidate_dense
        check_num_candidates(schema.limits, num_candidates)
        layout.check(num_candidates)
        return self._request(schema, num_candidates, features.bags(layout), dense, features.texts)

    def _read_part(self, features: _Features, part: Part) -> Float32Array:
        """Walk over the features of a part. Returns its dense values, float32."""
        message, dense = self._message, list[Buffer]()
        for tag, start, end in message.fields(*self._spans.get(part, (0, 0))):
            name = _PART.get(tag)
            if name == "sparse":
                features.add(part, start, end)
            elif name == "dense":
                dense.append(message.view[start:end])
        return array_of(bytearray().join(dense), "<f4", part_path(part, "dense"))

    def _request(
        self, schema: RequestSchema, count: int, bags: KeyedBags, dense: Sequence[Float32Array], texts: list[str]
    ) -> RankRequest:
        context, candidates = dense
        if context.size != schema.num_context_dense:
            problem = f"{context.size} values, the model takes {schema.num_context_dense}"
            raise count_mismatch("context.dense", problem)
        if candidates.size != count * (width := schema.num_candidate_dense):
            needed = f"{count} candidates of {width} values need {count * width}"
            raise count_mismatch("candidates.dense", f"{candidates.size} values; {needed}")
        return rank_request(schema, bags, count, context, candidates.reshape(count, width), self._options, texts)

    def _packed(self, schema: RequestSchema) -> RankRequest:
        """Read the packed form: as many steps whatever the number of features."""
        message, texts = self._message, list[str]()
        found = dict.fromkeys(_PACKED.values(), message.view[:0])
        for tag, start, end in message.fields(*self._spans["packed"]):
            name = _PACKED.get(tag)
            if name == "string_ids":
                texts.append(text_of("packed.string_ids", len(texts), message.view[start:end]))
            elif name is not None:
                found[name] = message.view[start:end]
        digest = bytes(found["schema_digest"][:80]).decode(errors="backslashreplace")
        if digest != schema.features.digest:
            says = f"{digest!r}; that of model {schema.features.spec.model!r} is {schema.features.digest!r}"
            raise InvalidRequestError("packed.schema_digest", says, kind="schema_digest")
        num_candidates = self._number("num_candidates")
        check_num_candidates(schema.limits, num_candidates)
        bags_per_key = ids_per_key = schema.bags_per_key(num_candidates)
        lengths: Int64Array | None = None
        if found["lengths"]:
            lengths = array_of(found["lengths"], "<i4", "packed.lengths").astype(np.int64)
            if lengths.size != int(bags_per_key.sum()):
                raise count_mismatch("packed.lengths", f"{lengths.size} of them for {bags_per_key.sum()} bags")
            # Sums of so few int32 can't wrap around.
            ids_per_key = np.add.reduceat(lengths, np.cumsum(bags_per_key) - bags_per_key)
        ids = array_of(bytearray(found["ids"]), "<i8", "packed.ids")
        weights, *dense = (
            array_of(bytearray(found[name]), "<f4", f"packed.{name}")
            for name in ("weights", "context_dense", "candidate_dense")
        )
        wanted_texts = int(ids_per_key[schema.is_string].sum()) if schema.features.string_features else 0
        wanted = int(ids_per_key.sum()) - wanted_texts
        is_mismatch = (wanted, wanted_texts) != (ids.size, len(texts))
        # A feature of fewer than none would let the others have more; what repeats by these counts can't do that.
        if is_mismatch or ((weights.size or texts) and (ids_per_key < 0).any()):
            self._refuse_lengths(lengths, ids.size, len(texts), f"{wanted} and {wanted_texts}")
        if weights.size:
            if weights.size != wanted + wanted_texts:
                raise count_mismatch("packed.weights", f"{weights.size} of them for {wanted + wanted_texts} ids")
            if not (weights[~np.repeat(schema.is_weighted, ids_per_key)] == 1).all():
                raise invalid_field("packed.weights", "a feature that takes no weights has one that is not 1")
        values = values_of(schema, schema.keys, ids_per_key, ids, texts)
        bags = keyed_bags(
            schema, schema.keys, bags_per_key, lengths, ids_per_key, values, weights if weights.size else None
        )
        return self._request(schema, num_candidates, bags, dense, texts)

    def _refuse_lengths(self, lengths: Int64Array | None, num_ids: int, num_texts: int, said: str) -> None:
        most = num_ids + num_texts
        if lengths is not None and (wrong := (lengths < 0) | (lengths > most)).any():
            bag = int(wrong.argmax())
            raise invalid_field(f"packed.lengths[{bag}]", f"{lengths[bag]} is not in 0..{most}, the number of ids")
        raise count_mismatch("packed.ids", f"{num_ids} integers and {num_texts} strings; the lengths say {said}")


class _Features:
    """The features of a message by maps; `texts` are all string ids in flat order, once `bags` has read them."""

    def __init__(self, schema: RequestSchema, message: ProtobufMessage, *, lookup: bool = False) -> None:
        self._schema, self._message, self._lookup = schema, message, lookup
        # Of each feature the bytes of its columns, and where those lie.
        self._found: dict[str, tuple[list[int], tuple[list[Buffer], ...]]] = {}
        self._columns: tuple[list[Buffer], ...] = ([], [], [], [])
        self.texts: list[str] = []

    def add(self, part: Part, start: int, end: int) -> None:
        """Walk over one entry of a map."""
        message = self._message
        name, value = message.entry(start, end, part_path(part, "sparse"))
        if name not in self._schema.name_sets[part]:
            raise self._schema.unknown_feature(part, name)
        if name in self._found:
            raise invalid_field(part_path(part, f"sparse.{name}"), "it is given twice")
        sizes: list[int] = [0, 0, 0, 0]
        columns: tuple[list[Buffer], ...] = ([], [], [], [])
        self._found[name] = sizes, columns
        for tag, at, stop in message.fields(*value):
            if (column := _COLUMN_OF.get(tag)) is not None:
                sizes[column] += stop - at
                columns[column].append(message.view[at:stop])

    def layout(self) -> FeatureCounts:
        """Count ids and bags."""
        schema, found, lookup = self._schema, self._found, self._lookup
        keys = schema.keys
        if lookup:
            keys = np.array(sorted(schema.features.index[name] for name in found), np.int32)
        elif len(found) < len(schema.names):
            # Only features of the model are there, each once, so that their number tells whether all are.
            for part in cast(tuple[Part, ...], ("context", "candidates")):
                schema.check_names(part, found.keys() & schema.name_sets[part], all_needed=True)
        layout = FeatureCounts(schema, keys, self._path, lookup=lookup)
        for key in keys.tolist():
            name, is_context, is_string = schema.kinds[key]
            sizes, columns = found[name]
            num_texts, num_ids, num_lengths, num_weights = len(columns[3]), sizes[0] >> 3, sizes[1] >> 2, sizes[2] >> 2
            if sizes[0] & 7 or sizes[1] & 3 or sizes[2] & 3 or (num_ids if is_string else num_texts):
                self._refuse(name, sizes, is_string=is_string)
            num_ids += num_texts
            if num_weights and name not in schema.weighted_names:
                raise invalid_field(f"{self._path(name)}.weights", f"feature {name!r} takes no weights")
            if num_weights not in (0, num_ids):
                raise count_mismatch(f"{self._path(name)}.weights", f"{num_weights} weights for {num_ids} ids")
            if num_weights:
                layout.weighted.append(len(layout.num_ids))
            if num_lengths:
                layout.add(num_ids, num_lengths, RAGGED)
            elif is_context and not lookup:
                layout.add(num_ids, 1, num_ids)
            else:
                layout.add(num_ids, num_ids, 1)
            for joined_column, column in zip(self._columns, columns, strict=True):
                joined_column.extend(column)
        return layout

    def bags(self, layout: FeatureCounts) -> KeyedBags:
        """Make flat bags of features that were counted, and are within the limits."""
        ids, lengths, weights, strings = self._columns
        self.texts = [text_of("string_ids", position, one) for position, one in enumerate(strings)]
        own = array_of(bytearray().join(lengths), "<u4", "lengths").astype(np.int64)
        return layout.bags(ids, self.texts, own, weights)

    def _path(self, name: str) -> str:
        return part_path("" if self._lookup else self._schema.part_of(name), f"sparse.{name}")

    def _refuse(self, name: str, sizes: list[int], *, is_string: bool) -> None:
        path = self._path(name)
        for size, (column, width) in zip(sizes, _WIDTHS.items(), strict=False):
            if size % width:
                raise malformed(f"{path}.{column}", f"a packed field whose length is not a multiple of {width} bytes")
        field, type_name = ("ids", "strings") if is_string else ("string_ids", "integers")
        raise invalid_id(f"{path}.{field}", f"ids of {name!r} are {type_name}, not given here")


def encode_rank(answer: RankAnswer) -> bytes:
    """Encode a RankResponse."""
    scores, order = packed_bytes(answer.scores, "<f4"), packed_bytes(answer.order, "<u4")
    fields = answer.model.encode(), answer.version, scores, order, answer.request_id.encode(), answer.dense_step
    parts = [encode_message(*fields)]
    if answer.delta_sequence >= 0:
        # Also 0, which differs from unknown.
        parts.append(encode_varint(8 << 3) + encode_varint(answer.delta_sequence))
    for name, values in answer.outputs.items():
        output = encode_message(name.encode(), encode_message(packed_bytes(values, "<f4")))
        parts.append(encode_field(7, output))
    return b"".join(parts)


def encode_lookup(answer: LookupAnswer) -> bytes:
    """Encode a LookupResponse."""
    parts = [encode_message(answer.model.encode(), answer.version)]
    for name, feature in answer.embeddings.items():
        lengths = b"" if feature.lengths is None else packed_bytes(feature.lengths, "<u4")
        embedding = encode_message(packed_bytes(feature.values, "<f4"), feature.values.shape[1], lengths)
        parts.append(encode_field(3, encode_message(name.encode(), embedding)))
    parts.append(encode_field(4, answer.request_id.encode()))
    return b"".join(parts)


def encode_model(description: ModelInfo) -> bytes:
    """Encode a GetModelResponse."""
    return ranking_pb2.GetModelResponse(**description.model_dump()).SerializeToString()

"""The protobuf form of requests and responses (`shardrank.v1`), by maps of features or packed.

The outer fields are read first, which name the model, then the features. The map form names every feature; the packed
form has all in the order of the model's schema, as four arrays, under a digest of that schema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from router.feature_schema import FeatureSchema
from serving.description import ModelInfo
from serving.errors import InvalidRequestError, count_mismatch, invalid_field, invalid_id, malformed
from serving.formats import requests
from serving.formats.protobuf import ProtobufMessage, encode_array, encode_field, packed_bytes, signed, tags_of
from serving.formats.requests import Buffer, RankRequest, Response, array_of, text_of
from serving.formats.schema import PARTS, Part, RequestSchema, part_path
from serving.limits import RequestLimits
from serving.proto.shardrank.v1 import ranking_pb2
from serving.results import LookupResult, Ragged, RankResult
from shard_node.bags import Bags, Float32Array

CONTENT_TYPE = "application/x-protobuf"
_NAMES = {"rank": "shardrank.v1.RankRequest", "lookup": "shardrank.v1.LookupRequest"}
_FIELDS: dict[requests.Method, dict[int, str]] = {
    "rank": tags_of(ranking_pb2.RankRequest),
    "lookup": tags_of(ranking_pb2.LookupRequest),
}
_PART, _PACKED = tags_of(ranking_pb2.FeatureSet), tags_of(ranking_pb2.PackedFeatures)
_WIDTHS = {"ids": 8, "lengths": 4, "weights": 4}
_COLUMNS = ("ids", "lengths", "weights", "string_ids")
# Of one feature: the bytes of its columns, and their views.
_Columns: TypeAlias = tuple[list[int], tuple[list[Buffer], ...]]
_COLUMN_OF = {tag: _COLUMNS.index(name) for tag, name in tags_of(ranking_pb2.SparseFeature).items()}


class MessageCodec(requests.Codec, eq=False):
    """`RankRequest` or `LookupRequest`; with a `model`, which a path names, the message need not name it."""

    num_candidates: int = 0
    message: Any = None
    # Where the fields that are messages lie, and the entries of a lookup's map.
    spans: dict[str, tuple[int, int]] = {}  # noqa: RUF012
    entries: list[tuple[int, int]] = []  # noqa: RUF012

    def read(self, body: Buffer, limits: RequestLimits) -> MessageCodec:
        """See `Codec`: read the outer fields."""
        message = ProtobufMessage(body, _NAMES[self.method], limits.max_message_fields)
        texts, numbers = {"model": "", "request_id": "", "routing_key": ""}, dict[str, int]()
        spans, entries, fields = dict[str, tuple[int, int]](), list[tuple[int, int]](), _FIELDS[self.method]
        for tag, start, end in message.fields():
            name = fields.get(tag)
            if name is None:
                continue
            if not tag & 7:
                numbers[name] = start
            elif name in texts:
                texts[name] = message.text(start, end, name)
            elif name == "sparse":
                # A map is one field for each of its entries.
                entries.append((start, end))
            elif name in spans:
                # Protobuf would merge the two. No encoder writes that, and no two readers would agree on its limits.
                raise malformed(name, "it is there twice")
            else:
                spans[name] = start, end
        model, request_id, routing_key = texts.values()
        if self.model and model not in ("", self.model):
            raise invalid_field("model", f"{model[:80]!r}, but the path names {self.model!r}")
        if not (model := self.model or model):
            raise invalid_field("model", "it is empty; it must be the name of a served model")
        version = signed(numbers["version"]) if "version" in numbers else None
        # Of these 0 is as good as absent.
        timeout_ms, top_k, num_candidates = (
            numbers.get(name, 0) & 0xFFFF_FFFF or None for name in ("timeout_ms", "top_k", "num_candidates")
        )
        bounds = [signed(numbers[name]) if name in numbers else None for name in ("max_age_ms", "min_sequence")]
        timeout_s, bound = requests.check_options(limits, request_id, routing_key, top_k, timeout_ms, bounds)
        return MessageCodec(
            self.method, model, self.api, version, routing_key or request_id, timeout_s, top_k, request_id,
            bound, bool(numbers.get("return_missing")), num_candidates or 0, message, spans, entries,
        )  # fmt: skip

    def parse(self, schema: RequestSchema) -> requests.Request:
        """See `Codec`. Raises InvalidRequestError for a request that is packed for another schema."""
        if "packed" in self.spans:
            if len(self.spans) > 1:
                raise invalid_field("packed", "it is given beside context or candidates")
            return self._packed(schema)
        is_lookup, num_candidates = self.method == "lookup", None
        path = partial(schema.feature_path, is_lookup=is_lookup)
        dense: dict[Part, list[Buffer]] = {"context": [], "candidates": []}
        features: dict[str, _Columns] = {}
        for part, start, end in self._entries(dense):
            self._add_feature(schema, features, part, start, end)
        context, candidates = (
            array_of(bytearray().join(values), "<f4", f"{part}.dense") for part, values in dense.items()
        )
        counts, (ids, lengths, weights, strings) = self._counts(schema, features, path)
        if not is_lookup:
            num_candidates = self.num_candidates
            if not num_candidates and schema.candidate_names:
                num_candidates = counts.num_bags[schema.features.index[schema.candidate_names[0]]]
            elif not num_candidates and schema.num_candidate_dense:
                num_candidates = candidates.size // schema.num_candidate_dense
            schema.check_num_candidates(num_candidates)
        counts.check(schema, num_candidates, path)
        texts = [text_of("string_ids", position, text) for position, text in enumerate(strings)]
        flat_lengths = array_of(bytearray().join(lengths), "<u4", "lengths").astype(np.int64)
        integers = array_of(bytearray().join(ids), "<i8", "ids")
        flat_weights = array_of(bytearray().join(weights), "<f4", "weights") if weights else None
        bags = counts.bags(schema, flat_lengths, integers, texts, flat_weights, is_lookup=is_lookup)
        if num_candidates is None:
            return self.lookup_request(schema, bags, texts)
        return self._request(schema, num_candidates, bags, context, candidates, texts)

    def encode(self, response: Response) -> requests.Encoded:
        """See `Codec`."""
        encoded = encode_rank(response) if isinstance(response, RankResult) else encode_lookup(response)
        return requests.Encoded(encoded, CONTENT_TYPE)

    def _entries(self, dense: dict[Part, list[Buffer]]) -> Iterator[tuple[Part, int, int]]:
        """Yield where the entries of all maps of features lie; dense values are appended to `dense`."""
        for start, end in self.entries:
            yield "", start, end
        for part, values in dense.items():
            for tag, start, end in self.message.fields(*self.spans.get(part, (0, 0))):
                name = _PART.get(tag)
                if name == "sparse":
                    yield part, start, end
                elif name == "dense":
                    values.append(self.message.view[start:end])

    def _add_feature(
        self, schema: RequestSchema, features: dict[str, _Columns], part: Part, start: int, end: int
    ) -> None:
        message = self.message
        name, value = message.entry(start, end, part_path(part, "sparse"))
        if name not in schema.name_sets[part]:
            raise schema.unknown_feature(part, name)
        if name in features:
            raise invalid_field(part_path(part, f"sparse.{name}"), "it is given twice")
        sizes, columns = features[name] = [0, 0, 0, 0], ([], [], [], [])
        for tag, at, stop in message.fields(*value):
            if (column := _COLUMN_OF.get(tag)) is not None:
                sizes[column] += stop - at
                columns[column].append(message.view[at:stop])

    def _counts(
        self, schema: RequestSchema, features: dict[str, _Columns], path: Callable[[str], str]
    ) -> tuple[requests.FeatureCounts, tuple[list[Buffer], ...]]:
        """Count ids and bags, and return them with all features' columns in flat order."""
        keys, is_lookup = schema.keys, self.method == "lookup"
        if is_lookup:
            keys = np.array(sorted(schema.features.index[name] for name in features), np.int32)
        elif len(features) < len(schema.names):
            # Only features of the model are there, each once, so that their number says whether all are.
            for part in PARTS[:2]:
                schema.check_names(part, features.keys() & schema.name_sets[part], all_needed=True)
        num_ids, num_bags, widths, weighted = list[int](), list[int](), list[int](), list[int]()
        joined: tuple[list[Buffer], ...] = ([], [], [], [])
        for position, (name, is_context, is_string) in enumerate(map(schema.kinds.__getitem__, keys.tolist())):
            sizes, columns = features[name]
            num_texts, count, num_lengths, num_weights = len(columns[3]), sizes[0] >> 3, sizes[1] >> 2, sizes[2] >> 2
            if sizes[0] & 7 or sizes[1] & 3 or sizes[2] & 3:
                broken, width = next(item for item, size in zip(_WIDTHS.items(), sizes, strict=False) if size % item[1])
                problem = f"a packed field whose length is not a multiple of {width} bytes"
                raise malformed(f"{path(name)}.{broken}", problem)
            if count if is_string else num_texts:
                field, type_name = ("ids", "strings") if is_string else ("string_ids", "integers")
                raise invalid_id(f"{path(name)}.{field}", f"ids of {name!r} are {type_name}, not given here")
            count += num_texts
            if num_weights and name not in schema.weighted_names:
                raise invalid_field(f"{path(name)}.weights", f"feature {name!r} takes no weights")
            if num_weights not in (0, count):
                raise count_mismatch(f"{path(name)}.weights", f"{num_weights} weights for {count} ids")
            if num_weights:
                weighted.append(position)
            is_bag = is_context and not is_lookup
            num_ids.append(count)
            num_bags.append(num_lengths or (1 if is_bag else count))
            widths.append(requests.RAGGED if num_lengths else count if is_bag else 1)
            for joined_column, column in zip(joined, columns, strict=True):
                joined_column.extend(column)
        return requests.FeatureCounts(keys, num_ids, num_bags, widths, weighted), joined

    def _request(
        self,
        schema: RequestSchema,
        count: int,
        bags: Bags,
        context: Float32Array,
        candidates: Float32Array,
        texts: list[str],
    ) -> RankRequest:
        if context.size != schema.num_context_dense:
            raise count_mismatch("context.dense", f"{context.size} values, the model takes {schema.num_context_dense}")
        if candidates.size != count * (width := schema.num_candidate_dense):
            needed = f"{count} candidates of {width} values need {count * width}"
            raise count_mismatch("candidates.dense", f"{candidates.size} values; {needed}")
        return self.rank_request(bags, count, context, candidates.reshape(count, width), texts)

    def _packed(self, schema: RequestSchema) -> RankRequest:
        """Read the packed form: as many steps whatever the number of features."""
        message, texts = self.message, list[str]()
        fields = dict.fromkeys(_PACKED.values(), message.view[:0])
        for tag, start, end in message.fields(*self.spans["packed"]):
            name = _PACKED.get(tag)
            if name == "string_ids":
                texts.append(text_of("packed.string_ids", len(texts), message.view[start:end]))
            elif name is not None:
                fields[name] = message.view[start:end]
        digest = bytes(fields["schema_digest"][:80]).decode(errors="backslashreplace")
        if digest != schema.features.digest:
            problem = f"{digest!r}; that of model {schema.features.spec.model!r} is {schema.features.digest!r}"
            raise InvalidRequestError("packed.schema_digest", problem, kind="schema_digest")
        schema.check_num_candidates(self.num_candidates)
        num_bags = num_ids = schema.bags_per_key(self.num_candidates)
        lengths, widths = array_of(fields["lengths"], "<i4", "packed.lengths").astype(np.int64), [1] * num_bags.size
        if lengths.size:
            if lengths.size != int(num_bags.sum()):
                raise count_mismatch("packed.lengths", f"{lengths.size} of them for {num_bags.sum()} bags")
            # Sums of so few int32 can't wrap around.
            num_ids, widths = (
                np.add.reduceat(lengths, np.cumsum(num_bags) - num_bags),
                [requests.RAGGED] * num_bags.size,
            )
        ids = array_of(bytearray(fields["ids"]), "<i8", "packed.ids")
        weights, context, candidates = (
            array_of(bytearray(fields[name]), "<f4", f"packed.{name}")
            for name in ("weights", "context_dense", "candidate_dense")
        )
        expected_texts = int(num_ids[schema.is_string].sum()) if schema.features.string_features else 0
        expected = int(num_ids.sum()) - expected_texts
        is_mismatch = (expected, expected_texts) != (ids.size, len(texts))
        # A feature of fewer than none would let the others have more; what repeats by these counts can't do that.
        if is_mismatch or ((weights.size or texts) and (num_ids < 0).any()):
            total = ids.size + len(texts)
            if (wrong := (lengths < 0) | (lengths > total)).any():
                bag = int(wrong.argmax())
                raise invalid_field(f"packed.lengths[{bag}]", f"{lengths[bag]} is not in 0..{total}, the number of ids")
            problem = f"{ids.size} integers and {len(texts)} strings; the lengths say {expected} and {expected_texts}"
            raise count_mismatch("packed.ids", problem)
        if weights.size:
            if weights.size != expected + expected_texts:
                raise count_mismatch("packed.weights", f"{weights.size} of them for {expected + expected_texts} ids")
            if not (weights[~np.repeat(schema.is_weighted, num_ids)] == 1).all():
                raise invalid_field("packed.weights", "a feature that takes no weights has one that is not 1")
        counts = requests.FeatureCounts(schema.keys, num_ids, num_bags, widths, slice(None))
        bags = counts.bags(schema, lengths, ids, texts, weights if weights.size else None)
        return self._request(schema, self.num_candidates, bags, context, candidates, texts)


def packed_request(features: FeatureSchema, request: RankRequest) -> ranking_pb2.RankRequest:
    """Return a request as a message in the order of its model's features, without model, id, key and deadline."""
    bags, ids, texts = request.bags, request.bags.values, features.string_features
    if texts:
        is_text = np.array([feature.name in texts for feature in features.features], np.bool_)
        ids = ids[~np.repeat(is_text, bags.values_per_key())]
    packed = ranking_pb2.PackedFeatures(
        schema_digest=features.digest,
        ids=packed_bytes(ids, "<i8"),
        lengths=b"" if (bags.lengths == 1).all() else packed_bytes(bags.lengths, "<i4"),
        weights=b"" if bags.weights is None else packed_bytes(bags.weights, "<f4"),
        context_dense=packed_bytes(request.context_dense, "<f4"),
        candidate_dense=packed_bytes(request.candidate_dense, "<f4"),
        string_ids=request.texts,
    )
    return ranking_pb2.RankRequest(num_candidates=request.num_candidates, packed=packed)


def encode_rank(response: RankResult) -> bytes:
    """Encode a RankResponse: numbers as they are in memory, the rest by the library. Fields may be in any order."""
    message = ranking_pb2.RankResponse(
        model=response.model,
        version=response.version,
        request_id=response.request_id,
        dense_step=response.dense_step,
        missing=_missing(response),
        **_freshness(response),
    )
    parts = [
        message.SerializeToString(),
        encode_array(3, response.scores, "<f4"),
        encode_array(4, response.order, "<u4"),
    ]
    for name, values in response.outputs.items():
        parts.append(encode_field(7, encode_field(1, name.encode()) + encode_field(2, encode_array(1, values, "<f4"))))
    return b"".join(parts)


def encode_lookup(response: LookupResult) -> bytes:
    """Encode a LookupResponse likewise."""
    model, version, request_id = response.model, response.version, response.request_id
    about = {"request_id": request_id, **_freshness(response)}
    message = ranking_pb2.LookupResponse(model=model, version=version, missing=_missing(response), **about)
    parts = [message.SerializeToString()]
    for name, feature in response.embeddings.items():
        rows = feature.values if isinstance(feature, Ragged) else feature
        embedding = ranking_pb2.Embedding(embedding_dim=rows.shape[1]).SerializeToString()
        embedding += encode_array(1, rows, "<f4")
        if isinstance(feature, Ragged):
            embedding += encode_array(3, feature.lengths, "<u4")
        parts.append(encode_field(3, encode_field(1, name.encode()) + encode_field(2, embedding)))
    return b"".join(parts)


def _freshness(response: Response) -> dict[str, Any]:
    """Return the fields that are known: 0 differs from unknown."""
    return {name: value for name in ("delta_sequence", "age_ms") if (value := getattr(response, name)) >= 0}


def _missing(response: Response) -> dict[str, ranking_pb2.MissingKeys]:
    missing = (response.missing or {}).items()
    return {name: ranking_pb2.MissingKeys(bags=keys.bags.tolist(), keys=keys.keys.tolist()) for name, keys in missing}


def encode_model(description: ModelInfo) -> bytes:
    """Encode a GetModelResponse."""
    return ranking_pb2.GetModelResponse(**description.model_dump()).SerializeToString()

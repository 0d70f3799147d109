"""A workload with one of everything that a request can have, and how a server reads a workload's payloads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loader.fingerprint import fingerprint_strings
from loadtest.workloads.oip_payload import HEADER_LENGTH
from loadtest.workloads.payloads import Api, Payload
from loadtest.workloads.workload import Workload, WorkloadRequest
from router.feature_schema import FeatureSchema
from serving.limits import RequestLimits
from serving.oip import read_grpc, read_http
from serving.oip.parser import InferParser
from serving.parse_json import JsonParser
from serving.parse_proto import ProtoParser
from serving.parse_schema import RequestSchema
from serving.proto.shardrank.v1 import ranking_pb2
from serving.read_proto import read_rank
from serving.request import RankRequest
from shard_node.bags import KeyedBags
from shardrank_testing.serving_api import CITIES, api_spec

MAX_HOTNESS = 4


class MixedWorkload:
    """The model of `serving_api`: ragged bags, empty bags, weights, strings, dense inputs on both sides."""

    name = "mixed"

    def __init__(self, num_candidates: int = 5, max_hotness: int = MAX_HOTNESS) -> None:
        self.spec = api_spec()
        self.schema = FeatureSchema.of(self.spec)
        self._num_candidates = num_candidates
        self._max_hotness = max_hotness

    def request(self, rng: np.random.Generator) -> WorkloadRequest:
        schema, count = self.schema, self._num_candidates
        bags_per_key = np.where(schema.is_context, 1, count).astype(np.int64)
        lengths = rng.integers(0, self._max_hotness + 1, int(bags_per_key.sum()))
        of_bag = np.repeat(np.arange(bags_per_key.size), bags_per_key)
        # The target of the attention has one id.
        lengths[of_bag == schema.index["film"]] = 1
        key = np.repeat(of_bag, lengths)
        values = rng.integers(0, self._rows[key])
        words = tuple(CITIES[index] for index in values[key == schema.index["city"]])
        values[key == schema.index["city"]] = fingerprint_strings(words)
        weights = np.ones(values.size, np.float32)
        for name in ("tag", "liked-tag"):
            chosen = key == schema.index[name]
            weights[chosen] = rng.standard_normal(int(chosen.sum()), dtype=np.float32)
        dense = self.spec.dense_inputs
        return WorkloadRequest(
            bags=KeyedBags.from_lengths(
                np.arange(bags_per_key.size, dtype=np.int32), bags_per_key, lengths, values, weights
            ),
            num_candidates=count,
            context_dense=rng.standard_normal(dense.context, dtype=np.float32),
            candidate_dense=rng.standard_normal((count, dense.candidate), dtype=np.float32),
            texts={"city": words},
        )

    @property
    def _rows(self) -> np.ndarray:
        tables = self.schema.layout.tables
        return np.array([table.num_embeddings for table in tables], np.int64)[self.schema.table_index]


@dataclass
class Unpacked:
    """What a packed rank message says, read as ranking.proto describes it."""

    message: ranking_pb2.RankRequest
    num_candidates: int
    bags: KeyedBags
    context_dense: np.ndarray
    candidate_dense: np.ndarray
    texts: tuple[str, ...]

    @property
    def deadline(self) -> float:
        return (self.message.timeout_ms or RequestLimits().default_timeout_ms) / 1000


def unpack(schema: FeatureSchema, body: bytes) -> Unpacked:
    """By hand: ids feature by feature, bag by bag."""
    message = ranking_pb2.RankRequest.FromString(body)
    packed, count = message.packed, message.num_candidates
    assert not message.HasField("context")
    assert not message.HasField("candidates")
    assert packed.schema_digest == schema.digest
    bags_per_key = [1 if feature.side == "context" else count for feature in schema.features]
    lengths = np.frombuffer(packed.lengths, "<i4").tolist() or [1] * sum(bags_per_key)
    assert len(lengths) == sum(bags_per_key)
    ids, texts = iter(np.frombuffer(packed.ids, "<i8").tolist()), iter(packed.string_ids)
    of_bags, values = iter(lengths), []
    for feature, bags in zip(schema.features, bags_per_key, strict=True):
        for _ in range(sum(next(of_bags) for _ in range(bags))):
            is_string = feature.name in schema.string_features
            values.append(fingerprint_strings([next(texts)])[0] if is_string else next(ids))
    assert [*ids, *texts] == []
    weights = np.frombuffer(packed.weights, "<f4") if packed.weights else None
    assert weights is None or weights.size == len(values)
    return Unpacked(
        message,
        count,
        KeyedBags.from_lengths(
            np.arange(len(bags_per_key), dtype=np.int32),
            np.array(bags_per_key, np.int64),
            np.array(lengths, np.int64),
            np.array(values, np.int64),
            weights,
        ),
        np.frombuffer(packed.context_dense, "<f4"),
        np.frombuffer(packed.candidate_dense, "<f4").reshape(count, -1 if packed.candidate_dense else 0),
        tuple(packed.string_ids),
    )


def read_payload(workload: Workload, api: Api, payload: Payload) -> RankRequest | Unpacked:
    """The request as the server's own parser reads it; it has no lease, and arrives at time 0.

    A packed one is read by hand.
    """
    if api == "grpc-packed":
        return unpack(workload.schema, payload.body)
    limits = RequestLimits()
    schema = RequestSchema(workload.schema, limits)
    if api == "json":
        return JsonParser(schema).rank(payload.body, None, 0.0)
    if api == "grpc":
        return ProtoParser(schema).rank(read_rank(payload.body), None, 0.0)
    if api == "oip-grpc":
        return InferParser(schema).rank(read_grpc.read_infer(payload.body), None, 0.0)
    length = read_http.parse_header_length(dict(payload.headers)[HEADER_LENGTH], len(payload.body))
    return InferParser(schema).rank(
        read_http.read_infer(workload.spec.model, None, payload.body, length, limits), None, 0.0
    )


def assert_same_request(found: RankRequest | Unpacked, expected: WorkloadRequest) -> None:
    """The parsed request is the workload's, array by array."""
    bags = expected.bags
    ones = np.ones(bags.num_values, np.float32)
    assert found.num_candidates == expected.num_candidates
    for name in ("keys", "bags_per_key", "offsets", "values"):
        np.testing.assert_array_equal(getattr(found.bags, name), getattr(bags, name), err_msg=name)
    weights = [ones if one is None else one for one in (found.bags.weights, bags.weights)]
    np.testing.assert_array_equal(*weights)
    np.testing.assert_array_equal(found.context_dense, expected.context_dense)
    np.testing.assert_array_equal(found.candidate_dense, expected.candidate_dense)
    assert sorted(found.texts) == sorted(word for words in expected.texts.values() for word in words)

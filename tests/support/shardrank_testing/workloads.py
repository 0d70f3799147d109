"""A workload with one of everything that a request can have, and how a server reads a workload's payloads."""

from __future__ import annotations

import math

import numpy as np

from loader.snapshot.tables import fingerprint_strings
from loadtest.workloads.payloads import HEADER_LENGTH, Api, Payload
from loadtest.workloads.workload import Workload
from router.feature_schema import FeatureSchema
from serving.formats.requests import RankRequest
from serving.formats.schema import RequestSchema
from serving.limits import RequestLimits
from shard_node.bags import Bags
from shardrank_testing.parsing import (
    assert_same_arrays,
    parse_infer_body,
    parse_infer_message,
    parse_json,
    parse_message,
)
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

    def request(self, rng: np.random.Generator) -> RankRequest:
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
        return RankRequest(
            bags=Bags.from_lengths(
                np.arange(bags_per_key.size, dtype=np.int32), bags_per_key, lengths, values, weights
            ),
            num_candidates=count,
            context_dense=rng.standard_normal(dense.context, dtype=np.float32),
            candidate_dense=rng.standard_normal((count, dense.candidate), dtype=np.float32),
            timeout_s=math.inf,
            texts=words,
        )

    @property
    def _rows(self) -> np.ndarray:
        tables = self.schema.layout.tables
        return np.array([table.num_embeddings for table in tables], np.int64)[self.schema.table_index]


def read_payload(workload: Workload, api: Api, payload: Payload) -> RankRequest:
    """The request as the server's own codec reads it."""
    schema = RequestSchema(workload.schema, RequestLimits())
    if api == "json":
        return parse_json(schema, payload.body)
    if api in ("grpc", "grpc-packed"):
        return parse_message(schema, payload.body)
    if api == "oip-grpc":
        return parse_infer_message(schema, payload.body)
    return parse_infer_body(schema, payload.body, dict(payload.headers)[HEADER_LENGTH])


assert_same_request = assert_same_arrays
"""The parsed request is the workload's."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.fingerprint import fingerprint_strings
from loader.manifest import DenseInputs, DenseModelSpec, FeatureSpec, ModelSpec, TableSpec
from router.feature_schema import FeatureSchema
from serving.errors import BadRequestError, LimitExceededError
from serving.formats.schema import RequestSchema
from serving.limits import RequestLimits
from serving.parse_json import JsonParser, peek_key, peek_version
from serving.parse_proto import ProtoParser
from serving.read_proto import read_rank
from shard_node.generation import Generations
from shardrank_testing.serving_api import CITIES, MODEL, api_request, api_spec, rank_message

SCHEMA = RequestSchema(FeatureSchema.of(api_spec()), RequestLimits())
PARSER = JsonParser(SCHEMA)


def nested(request: dict[str, Any], name: str) -> list[list[Any]]:
    """The bags of a feature as the request has them, by plain loops."""
    if name in request["context"]["sparse"]:
        return [request["context"]["sparse"][name]]
    return [one if isinstance(one, list) else [one] for one in request["candidates"]["sparse"][name]]


def parsed_bags(bags: Any) -> dict[str, list[list[int]]]:
    found, bag = {}, 0
    for key, count in zip(bags.keys.tolist(), bags.bags_per_key.tolist(), strict=True):
        own = []
        for _ in range(count):
            own.append(bags.values[int(bags.offsets[bag]) : int(bags.offsets[bag + 1])].tolist())
            bag += 1
        found[SCHEMA.names[key]] = own
    return found


@pytest.mark.parametrize("as_bytes", [True, False])
@given(seed=st.integers(0, 1000), count=st.integers(1, 6))
@settings(max_examples=20)
def test_parsed_arrays_hold_what_the_request_says(as_bytes, seed, count):
    request = api_request(seed, count)
    parsed = PARSER.rank(json.dumps(request).encode() if as_bytes else request, None, now=100.0)
    expected = {name: nested(request, name) for name in SCHEMA.names}
    expected["city"] = [fingerprint_strings(expected["city"][0]).tolist()]
    assert parsed_bags(parsed.bags) == expected
    parsed.bags.validate()
    assert parsed.num_candidates == count
    assert parsed.deadline == 130.0
    assert list(parsed.texts) == request["context"]["sparse"]["city"]
    np.testing.assert_array_equal(parsed.context_dense, np.array(request["context"]["dense"], "f4"))
    np.testing.assert_array_equal(parsed.candidate_dense, np.array(request["candidates"]["dense"], "f4"))


def test_weights_stand_beside_their_ids_and_are_one_elsewhere():
    request = api_request(3)
    parsed = PARSER.rank(request, None, 0.0)
    segment_values = np.split(parsed.bags.weights, np.cumsum(parsed.bags.values_per_key())[:-1])
    by_name = dict(zip(SCHEMA.names, segment_values, strict=True))
    tag = [weight for bag in request["candidates"]["weights"]["tag"] for weight in bag]
    np.testing.assert_array_equal(by_name["tag"], np.array(tag, "f4"))
    assert by_name["liked-tag"].tolist() == [0.5, -1.0, 2.0]
    assert all((by_name[name] == 1).all() for name in SCHEMA.names if name not in ("tag", "liked-tag"))


def test_without_weights_there_is_no_weights_array():
    request = api_request(3)
    del request["context"]["weights"], request["candidates"]["weights"]
    assert PARSER.rank(request, None, 0.0).bags.weights is None


def test_flat_and_nested_ids_are_the_same():
    flat, deep = api_request(5), api_request(5)
    deep["candidates"]["sparse"]["film"] = [[one] for one in flat["candidates"]["sparse"]["film"]]
    assert parsed_bags(PARSER.rank(flat, None, 0.0).bags) == parsed_bags(PARSER.rank(deep, None, 0.0).bags)


def test_a_lookup_takes_any_features_and_any_number_of_bags():
    body = {"sparse": {"film": [[1, 2], [], [776]], "city": ["Oslo", "Lima"], "tag": [[5, 6]]}, "weights": {}}
    body["weights"] = {"tag": [[0.5, 2.0]]}
    parsed = PARSER.lookup(body, None, 0.0)
    assert parsed_bags(parsed.bags) == {
        "film": [[1, 2], [], [776]],
        "city": [[one] for one in fingerprint_strings(["Oslo", "Lima"]).tolist()],
        "tag": [[5, 6]],
    }
    assert sorted(parsed.bags.weights.tolist()) == [0.5, 1, 1, 1, 1, 1, 2.0]


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.sampled_from([*CITIES, "film", "\ud800", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["film", "x", "dense"]), inner),
    max_leaves=6,
)
GENERATIONS: Generations[str] = Generations(lambda payload: None)
GENERATIONS.stage(MODEL, 1, "nothing")
PATHS = [
    (),
    ("context",),
    ("candidates",),
    ("timeout_ms",),
    ("top_k",),
    ("version",),
    ("request_id",),
    ("routing_key",),
    ("context", "sparse"),
    ("context", "weights"),
    ("context", "dense"),
    ("context", "sparse", "city"),
    ("context", "sparse", "history"),
    ("context", "sparse", "history", 1),
    ("context", "weights", "liked-tag"),
    ("candidates", "sparse"),
    ("candidates", "dense"),
    ("candidates", "dense", 1),
    ("candidates", "dense", 1, 2),
    ("candidates", "sparse", "film"),
    ("candidates", "sparse", "film", 2),
    ("candidates", "sparse", "genre", 0),
    ("candidates", "weights", "tag"),
    ("candidates", "weights", "tag", 0),
]


@given(st.sampled_from(PATHS), JSON_VALUES, st.booleans())
@settings(max_examples=400)
def test_whatever_stands_anywhere_is_parsed_or_refused_by_name(path, value, as_bytes):
    request: Any = api_request(2)
    place: Any = request
    for step in path[:-1]:
        place = place[step]
    if path:
        place[path[-1]] = value
    else:
        request = value
    if not as_bytes and not isinstance(request, dict):
        return
    body = json.dumps(request).encode() if as_bytes else request
    parsed, refusal = None, None
    try:
        with GENERATIONS.lease(MODEL, 1) as lease:
            parsed = PARSER.rank(body, lease, 0.0)
    except BadRequestError as error:
        refusal = error
    if parsed is not None:
        parsed.bags.validate()
        assert np.isfinite(parsed.candidate_dense).all()
    else:
        assert str(refusal)
        assert not path or refusal.field.startswith(path[0]) or refusal.field == ""


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_refused(body):
    with pytest.raises(BadRequestError):
        PARSER.rank(body, None, 0.0)


def test_an_endlessly_nested_body_is_refused():
    for body in (b"[" * 100_000, b'{"context":' * 100_000):
        with pytest.raises(BadRequestError):
            PARSER.rank(body, None, 0.0)


@pytest.mark.parametrize(
    ("limit", "value"),
    [("max_body_bytes", 100), ("max_candidates", 4), ("max_ids_per_bag", 3), ("max_ids_per_request", 20)],
)
def test_a_limit_is_named_with_its_value(limit, value):
    parser = JsonParser(RequestSchema(SCHEMA.features, RequestLimits(**{limit: value})))
    with pytest.raises(LimitExceededError, match=rf"{limit} = {value}"):
        parser.rank(json.dumps(api_request(2)).encode(), None, 0.0)


def test_the_version_is_seen_before_the_body_is_parsed():
    assert peek_version(b'{"context": {"version": 3}, "version": 12}') == 12
    assert peek_version(b'{"context": {"version": 3}}') is None
    assert peek_version(b'{"version": "x"}') is None
    assert peek_version({"version": 4}) == 4
    assert peek_version({"version": True}) is None


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ({"routing_key": "a", "request_id": "b"}, "a"),
        ({"request_id": "b"}, "b"),
        ({"routing_key": "", "request_id": "b"}, "b"),
        ({"context": {"routing_key": "c"}}, ""),
        ({"routing_key": 7}, ""),
        ({"routing_key": ["a"]}, ""),
        ({}, ""),
    ],
)
def test_the_key_is_seen_before_the_body_is_parsed(body, key):
    assert peek_key(body) == peek_key(json.dumps(body).encode()) == key


def test_of_a_key_that_comes_twice_the_last_one_counts_as_it_does_when_the_body_is_parsed():
    assert peek_key(rb'{"routing_key": "a", "routing\u005fkey": "b"}') == "b"
    assert peek_key(b'{"routing_key": "a"') == ""


def other_schema(*, context: bool, candidates: bool, dense: tuple[int, int]) -> RequestSchema:
    features = [FeatureSpec(name="c", side="context")] * context + [
        FeatureSpec(name="x", side="candidate")
    ] * candidates
    names = tuple(feature.name for feature in features)
    spec = ModelSpec(
        model="films",
        tables=(TableSpec(name="t", num_embeddings=10, embedding_dim=4, feature_names=names),),
        features=tuple(features),
        dense_inputs=DenseInputs(context=dense[0], candidate=dense[1]),
        dense_model=DenseModelSpec(kind="mlp"),
    )
    return RequestSchema(FeatureSchema.of(spec), RequestLimits())


def test_a_model_without_context_needs_no_context():
    schema = other_schema(context=False, candidates=True, dense=(0, 0))
    expected = [[1], [2]]
    for request in (
        {"candidates": {"sparse": {"x": [1, 2]}}},
        {"context": {}, "candidates": {"sparse": {"x": [[1], [2]]}, "dense": []}},
        {"context": {"sparse": {}, "dense": []}, "candidates": {"sparse": {"x": [1, 2]}, "dense": [[], []]}},
    ):
        parsed = JsonParser(schema).rank(json.dumps(request).encode(), None, 0.0)
        assert np.split(parsed.bags.values, parsed.bags.offsets[1:-1])[0].tolist() == expected[0]
        assert (parsed.num_candidates, parsed.candidate_dense.shape, parsed.context_dense.shape) == (2, (2, 0), (0,))
        message = rank_message(request)
        proto = ProtoParser(schema).rank(read_rank(message.SerializeToString()), None, 0.0)
        assert (proto.bags.values.tolist(), proto.num_candidates) == ([1, 2], 2)


def test_a_model_without_candidate_features_counts_candidates_by_their_dense_rows():
    schema = other_schema(context=True, candidates=False, dense=(1, 2))
    request = {"context": {"sparse": {"c": [7, 8]}, "dense": [0.5]}, "candidates": {"dense": [[1, 2], [3, 4], [5, 6]]}}
    parsed = JsonParser(schema).rank(request, None, 0.0)
    assert (parsed.num_candidates, parsed.bags.bags_per_key.tolist(), parsed.bags.lengths.tolist()) == (3, [1], [2])
    proto = ProtoParser(schema).rank(read_rank(rank_message(request).SerializeToString()), None, 0.0)
    np.testing.assert_array_equal(proto.candidate_dense, parsed.candidate_dense)
    assert proto.num_candidates == 3

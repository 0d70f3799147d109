"""The JSON form: the arrays that a request says, and what is refused by name, in errors that can be written."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.snapshot.manifest import DenseInputs, DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.tables import VocabularyMapping, fingerprint_strings
from router.feature_schema import FeatureSchema
from serving.errors import InvalidRequestError, error_document
from serving.formats.json_reader import MAX_SEARCHED_BYTES, JsonCodec, count_above
from serving.formats.schema import RequestSchema
from serving.limits import RequestLimits
from shardrank_testing.errors import raises_kind
from shardrank_testing.parsing import SCHEMA, parse_json, parse_message
from shardrank_testing.serving_api import MODEL, api_request, rank_message
from shardrank_testing.snapshots import model_of, table_of


def nested(request: dict[str, Any], name: str) -> list[list[Any]]:
    """The bags of a feature as the request has them, by plain loops."""
    if name in request["context"]["sparse"]:
        return [request["context"]["sparse"][name]]
    return [one if isinstance(one, list) else [one] for one in request["candidates"]["sparse"][name]]


def parsed_bags(bags: Any, schema: RequestSchema = SCHEMA) -> dict[str, list[list[int]]]:
    found, bag = {}, 0
    for key, count in zip(bags.keys.tolist(), bags.bags_per_key.tolist(), strict=True):
        own = []
        for _ in range(count):
            own.append(bags.values[int(bags.offsets[bag]) : int(bags.offsets[bag + 1])].tolist())
            bag += 1
        found[schema.names[key]] = own
    return found


@pytest.mark.parametrize("as_bytes", [True, False])
@given(seed=st.integers(0, 1000), count=st.integers(1, 6))
@settings(max_examples=20)
def test_parsed_arrays_hold_what_the_request_says(as_bytes, seed, count):
    request = api_request(seed, count)
    parsed = parse_json(SCHEMA, json.dumps(request).encode() if as_bytes else request)
    expected = {name: nested(request, name) for name in SCHEMA.names}
    expected["city"] = [fingerprint_strings(expected["city"][0]).tolist()]
    assert parsed_bags(parsed.bags) == expected
    parsed.bags.validate()
    assert parsed.num_candidates == count
    assert parsed.timeout_s == 30.0
    assert list(parsed.texts) == request["context"]["sparse"]["city"]
    np.testing.assert_array_equal(parsed.context_dense, np.array(request["context"]["dense"], "f4"))
    np.testing.assert_array_equal(parsed.candidate_dense, np.array(request["candidates"]["dense"], "f4"))


def test_weights_stand_beside_their_ids_and_are_one_elsewhere():
    request = api_request(3)
    parsed = parse_json(SCHEMA, request)
    segment_values = np.split(parsed.bags.weights, np.cumsum(parsed.bags.values_per_key())[:-1])
    by_name = dict(zip(SCHEMA.names, segment_values, strict=True))
    tag = [weight for bag in request["candidates"]["weights"]["tag"] for weight in bag]
    np.testing.assert_array_equal(by_name["tag"], np.array(tag, "f4"))
    assert by_name["liked-tag"].tolist() == [0.5, -1.0, 2.0]
    assert all((by_name[name] == 1).all() for name in SCHEMA.names if name not in ("tag", "liked-tag"))


def test_a_lookup_takes_any_features_and_any_number_of_bags():
    body = {"sparse": {"film": [[1, 2], [], [776]], "city": ["Oslo", "Lima"], "tag": [[5, 6]]}, "weights": {}}
    body["weights"] = {"tag": [[0.5, 2.0]]}
    parsed = parse_json(SCHEMA, body, "lookup")
    assert parsed_bags(parsed.bags) == {
        "film": [[1, 2], [], [776]],
        "city": [[one] for one in fingerprint_strings(["Oslo", "Lima"]).tolist()],
        "tag": [[5, 6]],
    }
    assert sorted(parsed.bags.weights.tolist()) == [0.5, 1, 1, 1, 1, 1, 2.0]


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_refused(body):
    with pytest.raises(InvalidRequestError):
        parse_json(SCHEMA, body)


def read(body: Any) -> Any:
    return JsonCodec("rank", "films").read(json.dumps(body).encode(), SCHEMA.limits)


def test_the_version_is_known_before_the_features_are_looked_at():
    assert read({"context": {"version": 3}, "version": 12}).version == 12
    assert read({"context": {"version": 3}}).version is None
    for wrong in ("x", True, 0, -7, 10**23, 1.0, None):
        with raises_kind("invalid_field", match=r"^version: "):
            read({"version": wrong})


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ({"routing_key": "a", "request_id": "b"}, "a"),
        ({"request_id": "b"}, "b"),
        ({"routing_key": "", "request_id": "b"}, "b"),
        ({"context": {"routing_key": "c"}}, ""),
        ({}, ""),
    ],
)
def test_the_key_is_known_before_the_features_are_looked_at(body, key):
    assert read(body).key == key


@pytest.mark.parametrize(
    "text",
    [
        r'{"routing_key": "a", "routing\u005fkey": "b"}',
        '{"context":{"sparse":{"user":[1],"user":[2,3]},"dense":[1]}, "candidates": {}}',
        '{"candidates": {}, "candidates": {}}',
        '{"timeout_ms":1,"timeout_ms":2}',
    ],
)
def test_a_key_that_comes_twice_is_refused_by_name(text):
    with raises_kind("invalid_field", match=r"^(routing_key|user|candidates|timeout_ms): the key is there twice"):
        parse_json(SCHEMA, text)


def other_schema(*, context: bool, candidates: bool, dense: tuple[int, int]) -> RequestSchema:
    features = [FeatureSpec(name="c", side="context")] * context + [
        FeatureSpec(name="x", side="candidate")
    ] * candidates
    names = tuple(feature.name for feature in features)
    spec = ModelSpec(
        model="films",
        tables=(table_of("t", 10, 4, *names),),
        features=tuple(features),
        dense_inputs=DenseInputs(context=dense[0], candidate=dense[1]),
        dense_model=DenseModelSpec(kind="mlp"),
    )
    return RequestSchema(FeatureSchema.of(spec), RequestLimits())


def test_a_model_without_context_needs_no_context():
    schema = other_schema(context=False, candidates=True, dense=(0, 0))
    for request in (
        {"candidates": {"sparse": {"x": [1, 2]}}},
        {"context": {}, "candidates": {"sparse": {"x": [[1], [2]]}, "dense": []}},
        {"context": {"sparse": {}, "dense": []}, "candidates": {"sparse": {"x": [1, 2]}, "dense": [[], []]}},
    ):
        parsed = parse_json(schema, json.dumps(request).encode())
        assert parsed_bags(parsed.bags, schema) == {"x": [[1], [2]]}
        assert (parsed.num_candidates, parsed.candidate_dense.shape, parsed.context_dense.shape) == (2, (2, 0), (0,))
        by_message = parse_message(schema, rank_message(request))
        assert (by_message.bags.values.tolist(), by_message.num_candidates) == ([1, 2], 2)


def test_a_model_without_candidate_features_counts_candidates_by_their_dense_rows():
    schema = other_schema(context=True, candidates=False, dense=(1, 2))
    request = {"context": {"sparse": {"c": [7, 8]}, "dense": [0.5]}, "candidates": {"dense": [[1, 2], [3, 4], [5, 6]]}}
    parsed = parse_json(schema, request)
    assert (parsed.num_candidates, parsed.bags.bags_per_key.tolist(), parsed.bags.lengths.tolist()) == (3, [1], [2])
    by_message = parse_message(schema, rank_message(request))
    np.testing.assert_array_equal(by_message.candidate_dense, parsed.candidate_dense)
    assert by_message.num_candidates == 3


def string_schema(names: tuple[str, ...] = ("code",)) -> RequestSchema:
    table = table_of("t", 10, 4, *names, id_mapping=VocabularyMapping(id_type="string"))
    return RequestSchema(FeatureSchema.of(model_of([table], MODEL)), RequestLimits())


@pytest.mark.parametrize("column", [[["a"], "bc"], [["a"], "b"], [[], "bc", ["d"]]])
def test_a_bare_string_among_bags_is_refused_and_not_read_as_its_characters(column):
    schema = string_schema()
    for body in ({"sparse": {"code": column}}, json.dumps({"sparse": {"code": column}}).encode()):
        with raises_kind("invalid_field", match=r"sparse\.code\[1\]: .* is not a list"):
            parse_json(schema, body, "lookup")
    with raises_kind("invalid_field", match=r"candidates\.sparse\.code\[1\]"):
        parse_json(schema, {"candidates": {"sparse": {"code": column}}})


@pytest.mark.parametrize(
    "body",
    [
        rb'{"\ud800": 1}',
        rb'{"sparse": {"\udc00": [1]}}',
        rb'{"sparse": {"film": [1]}, "weights": {"\ud800": [1]}}',
        rb'{"sparse": {"city": ["\ud800"]}}',
        rb'{"sparse": {"film": [1]}, "request_id": "\ud800"}',
        rb'{"sparse": {"film": [1]}, "routing_key": "\ud800"}',
    ],
)
def test_a_lone_surrogate_is_refused_in_an_error_that_can_be_written(body):
    for given_body in (body, json.loads(body)):
        with pytest.raises(InvalidRequestError) as refusal:
            parse_json(SCHEMA, given_body, "lookup")
        assert json.loads(msgspec.json.encode(error_document(refusal.value)))["error"]["field"]


def test_the_error_of_a_wide_model_names_what_is_spelled_alike_and_stays_short():
    schema = string_schema(tuple(f"feature_{number:04}" for number in range(1100)))
    for body in ({"sparse": {"featur_0042": [[1]]}}, {"sparse": {"x" * 100_000: [[1]]}}):
        with pytest.raises(InvalidRequestError, match="it has 1100, such as") as refusal:
            parse_json(schema, body, "lookup")
        assert len(str(refusal.value)) < 1024
    for near in ("featur_0042", "eature_0042", "feature0042", "feature_0042x", "faeture_0042"):
        with pytest.raises(InvalidRequestError, match="feature_0042'"):
            parse_json(schema, {"sparse": {near: [[1]]}}, "lookup")
    with pytest.raises(InvalidRequestError, match="one of 1100 that are missing") as refusal:
        parse_json(schema, {"candidates": {}})
    assert len(str(refusal.value)) < 1024


@given(st.lists(st.sampled_from([",", ":", '"', "\\", "[", "é", "a", "\n"]), max_size=30).map("".join))
def test_what_stands_in_strings_does_not_count(text):
    for ascii_only in (True, False):
        for character, document in ((",", [text + 20 * ",", text, 1, 2]), (":", [{text: 20 * ":"}] * 3)):
            encoded = json.dumps(document, ensure_ascii=ascii_only).encode()
            assert count_above(encoded, ord(character), 2) == 3
            assert count_above(encoded, ord(character), 3) == 0


def test_the_one_wrong_id_among_many_is_named():
    bags = [[1, 2]] * 1500
    for position, wrong in ((0, -1), (2999, -1), (777, 2**63), (2047, 2**64), (5, True), (6, 1.0), (7, "x"), (8, None)):
        column = [list(bag) for bag in bags]
        column[position // 2][position % 2] = wrong
        with raises_kind("invalid_id", match=rf"sparse\.film\[{position // 2}\]\[{position % 2}\]: "):
            parse_json(SCHEMA, {"sparse": {"film": column}}, "lookup")


def test_what_is_not_quite_json_is_named_by_its_field_in_short_texts_and_by_its_byte_in_long_ones():
    film = [1] * 1000
    with raises_kind("invalid_id", match=r"sparse\.film\[1000\]: NaN is not an id: one of the integers in 0\.\."):
        parse_json(SCHEMA, json.dumps({"sparse": {"film": [*film, float("nan")]}}).encode(), "lookup")
    with raises_kind("invalid_id", match=r"sparse\.film\[1000\]: 1{40}"):
        text = json.dumps({"sparse": {"film": film}}).replace("]", f", {'1' * 5000}]")
        parse_json(SCHEMA, text.encode(), "lookup")
    long = json.dumps({"sparse": {"film": [*film, float("nan")]}}).encode() + b" " * MAX_SEARCHED_BYTES
    with raises_kind("malformed", match=r"not JSON .*\(byte 3021\)"):
        parse_json(SCHEMA, long, "lookup")
    with raises_kind("invalid_field", match=r"the key is there twice"):
        parse_json(SCHEMA, b'{"sparse": {}, "sparse": {}}' + b" " * MAX_SEARCHED_BYTES, "lookup")


def test_a_list_with_a_bracket_more_is_not_made_good_by_another_with_one_less():
    request = api_request(1)
    request["candidates"]["sparse"] |= {"film": [1, [2, 3], 4, 5, []], "genre": [[1], 2, 3, 4, 5]}
    with raises_kind("invalid_field", match=r"candidates\.sparse\.(film|genre)\[1\]"):
        parse_json(SCHEMA, request)
    request = api_request(1)
    request["candidates"]["sparse"]["film"] = [1, 2, 3, 4, [5]]
    with raises_kind("invalid_field", match=r"candidates\.sparse\.film\[4\]"):
        parse_json(SCHEMA, request | {"request_id": "["})

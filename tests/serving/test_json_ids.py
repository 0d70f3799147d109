"""Ids that are never decoded: the same arrays as when they are, or none at all."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.manifest import DenseInputs, DenseModelSpec, FeatureSpec, ModelSpec, TableSpec
from router.feature_schema import FeatureSchema
from serving.errors import BadRequestError
from serving.json_ids import bags_of_json
from serving.limits import MAX_ID, RequestLimits
from serving.parse_columns import bags_of_columns
from serving.parse_json import MIN_RAW_BYTES, JsonParser
from serving.parse_schema import RequestSchema
from shard_node.bags import KeyedBags

NUMBERS = st.one_of(
    st.integers(0, 99),
    st.integers(0, MAX_ID),
    st.sampled_from([10**digits + step for digits in range(19) for step in (-1, 0)]),
)
IDS = st.lists(NUMBERS, max_size=4)
CANDIDATE_COLUMN = IDS | st.lists(IDS, max_size=4)
BLANKS = st.sampled_from(["", " ", "\n", "\t\r "])


def written(draw: st.DrawFn, value: Any) -> str:
    """JSON with blanks wherever they may stand."""
    if not isinstance(value, list):
        return json.dumps(value)
    blank = draw(BLANKS)
    return "[" + blank + f"{blank},{draw(BLANKS)}".join(written(draw, one) for one in value) + draw(BLANKS) + "]"


@st.composite
def columns(draw: st.DrawFn) -> tuple[list[Any], list[bool], list[msgspec.Raw]]:
    given: list[Any] = []
    is_one_bag = draw(st.lists(st.booleans(), min_size=1, max_size=5))
    for is_context in is_one_bag:
        given.append(draw(IDS if is_context else CANDIDATE_COLUMN))
    return given, is_one_bag, [msgspec.Raw(written(draw, one).encode()) for one in given]


def same(actual: KeyedBags, expected: KeyedBags) -> None:
    for name in ("keys", "bags_per_key", "offsets", "values"):
        found = getattr(actual, name)
        np.testing.assert_array_equal(found, getattr(expected, name), err_msg=name)
        assert found.dtype == getattr(expected, name).dtype


@given(columns())
@settings(max_examples=300)
def test_ids_that_are_not_decoded_are_those_that_are(drawn):
    given, is_one_bag, raw = drawn
    keys = np.arange(len(given), dtype=np.int32)
    nested = [[one] if is_context else one for one, is_context in zip(given, is_one_bag, strict=True)]
    expected, _ = bags_of_columns(keys, nested, [False] * len(given))
    actual = bags_of_json(keys, raw, np.array(is_one_bag))
    assert actual is not None
    same(actual, expected)
    actual.validate()


@pytest.mark.parametrize(
    "column",
    [
        "5", "null", "true", '"1"', "{}", '{"a": [1]}', "[-1]", "[-0]", "[1.0]", "[1e2]", "[1E2]", "[true]", "[null]",
        '["1"]', "[[[1]]]", "[[[]]]", "[1, [2]]", "[[1], 2]", "[[], 2]", '[{"a": 1}]', "[9223372036854775808]",
        "[18446744073709551616]", "[" + "1" * 20 + "]", "[" + "7" * 5000 + "]",
    ],
)  # fmt: skip
def test_what_is_no_list_of_ids_is_left_to_others(column):
    for place in range(3):
        raw = [msgspec.Raw(b"[1,2]")] * 3
        raw[place] = msgspec.Raw(column.encode())
        assert bags_of_json(np.arange(3, dtype=np.int32), raw, np.zeros(3, np.bool_)) is None


def test_bags_in_place_of_a_context_features_ids_are_left_to_others():
    assert bags_of_json(np.zeros(1, np.int32), [msgspec.Raw(b"[[1]]")], np.ones(1, np.bool_)) is None


def schema() -> RequestSchema:
    spec = ModelSpec(
        model="films",
        tables=(TableSpec(name="t", num_embeddings=10, embedding_dim=4, feature_names=("user", "film", "tag")),),
        features=(
            FeatureSpec(name="user", side="context"),
            FeatureSpec(name="film", side="candidate"),
            FeatureSpec(name="tag", side="candidate", weighted=True),
        ),
        dense_inputs=DenseInputs(context=1, candidate=2),
        dense_model=DenseModelSpec(kind="mlp"),
    )
    limits = RequestLimits(max_candidates=6, max_ids_per_bag=5, max_ids_per_request=25)
    return RequestSchema(FeatureSchema.of(spec), limits)


PARSER = JsonParser(schema())
ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(-3, 2**64),
    st.text(max_size=3),
    st.lists(st.one_of(st.integers(-1, 3), st.booleans(), st.lists(st.integers(-1, 3), max_size=6)), max_size=7),
)
PLACES = [
    (),
    ("timeout_ms",),
    ("top_k",),
    ("request_id",),
    ("routing_key",),
    ("context", "sparse", "user"),
    ("context", "sparse", "film"),
    ("context", "dense"),
    ("candidates", "sparse"),
    ("candidates", "sparse", "film"),
    ("candidates", "sparse", "tag"),
    ("candidates", "sparse", "tag", 1),
    ("candidates", "weights"),
    ("candidates", "dense"),
    ("candidates", "dense", 0, 1),
    ("candidates", "more"),
]


def outcome(body: Any) -> Any:
    try:
        return PARSER.rank(body, None, 3.0)
    except BadRequestError as error:
        return type(error), str(error)


@given(st.sampled_from(PLACES), ANYTHING, st.integers(0, 7))
@settings(max_examples=400)
def test_a_long_body_has_the_answer_or_the_error_that_the_same_dict_has(place, value, count):
    request: Any = {
        "context": {"sparse": {"user": [4, 5]}, "dense": [0.5]},
        "candidates": {
            "sparse": {"film": list(range(count)), "tag": [[7] * (number % 3) for number in range(count)]},
            "dense": [[number, -0.25] for number in range(count)],
        },
    }
    at: Any = request
    for step in place[:-1]:
        at = at[step] if isinstance(at, dict) or step < len(at) else {}
    if place and (isinstance(at, dict) or place[-1] < len(at)):
        at[place[-1]] = value
    # Blanks make it long, and no dict of it is read without decoding.
    by_text, by_dict = outcome(json.dumps(request).encode() + b" " * MIN_RAW_BYTES), outcome(request)
    if isinstance(by_dict, tuple):
        assert by_text == by_dict
        return
    same(by_text.bags, by_dict.bags)
    np.testing.assert_array_equal(by_text.bags.weights, by_dict.bags.weights)
    np.testing.assert_array_equal(by_text.candidate_dense, by_dict.candidate_dense)
    np.testing.assert_array_equal(by_text.context_dense, by_dict.context_dense)
    assert (by_text.num_candidates, by_text.top_k, by_text.deadline, by_text.request_id) == (
        by_dict.num_candidates,
        by_dict.top_k,
        by_dict.deadline,
        by_dict.request_id,
    )


@pytest.mark.parametrize("cut", range(1, 200, 3))
def test_a_long_body_that_breaks_off_is_malformed(cut):
    request = {"context": {"sparse": {"user": [4]}, "dense": [1]}, "candidates": {"sparse": {"film": [1], "tag": [2]}}}
    text = json.dumps(request)[:-cut].encode()
    with pytest.raises(BadRequestError):
        PARSER.rank(b" " * MIN_RAW_BYTES + text, None, 0.0)


def test_of_a_feature_that_comes_twice_the_last_one_counts():
    context = b'{"sparse":{"user":[1],"user":[2,3]},"dense":[1]}'
    candidates = b'{"sparse":{"film":[4],"tag":[5]},"dense":[[0,0]]}'
    text = b'{"context":' + context + b',"candidates":' + candidates + b"}"
    for body in (text, text + b" " * MIN_RAW_BYTES):
        assert PARSER.rank(body, None, 0.0).bags.values.tolist() == [2, 3, 4, 5]

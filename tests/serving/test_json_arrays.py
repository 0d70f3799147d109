"""Bodies whose numbers are read without Python objects: the same arrays as when they are decoded, or left to others."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.manifest import DenseInputs, DenseModelSpec, FeatureSpec, ModelSpec, TableSpec
from router.feature_schema import FeatureSchema
from serving.errors import BadRequestError, InvalidIdError
from serving.formats.schema import RequestSchema
from serving.json_arrays import MAX_KEPT_BYTES, JsonArrays
from serving.limits import MAX_ID, RequestLimits
from serving.parse_json import JsonParser
from shard_node.bags import KeyedBags


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


SCHEMA = schema()
PARSER = JsonParser(SCHEMA)
ARRAYS = JsonArrays(SCHEMA)
NUMBERS = st.one_of(
    st.integers(0, 99),
    st.integers(0, MAX_ID),
    st.sampled_from([10**digits + step for digits in range(19) for step in (-1, 0)]),
)
IDS = st.lists(NUMBERS, max_size=4)
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


def same(actual: KeyedBags, expected: KeyedBags) -> None:
    for name in ("keys", "bags_per_key", "offsets", "values"):
        found = getattr(actual, name)
        np.testing.assert_array_equal(found, getattr(expected, name), err_msg=name)
        assert found.dtype == getattr(expected, name).dtype


def request_of(count: int) -> Any:
    return {
        "context": {"sparse": {"user": [4, 5]}, "dense": [0.5]},
        "candidates": {
            "sparse": {"film": list(range(count)), "tag": [[7] * (number % 3) for number in range(count)]},
            "dense": [[number, -0.25] for number in range(count)],
        },
    }


def column(text: str, others: str = "[1,2]", tail: str = "") -> bytes:
    """A body of two candidates whose feature `film` is what is given."""
    sparse = '"sparse":{"film":' + text + ',"tag":' + others + "}"
    context = '{"sparse":{"user":[4]},"dense":[0.5]}'
    return f'{{"context":{context},"candidates":{{{sparse},"dense":[[0,1],[2,3]]}}{tail}}}'.encode()


def same_request(actual: Any, expected: Any) -> None:
    same(actual.bags, expected.bags)
    np.testing.assert_array_equal(actual.bags.weights, expected.bags.weights)
    for name in ("candidate_dense", "context_dense"):
        np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name))
        assert getattr(actual, name).dtype == np.float32
    for name in ("num_candidates", "top_k", "deadline", "request_id"):
        assert getattr(actual, name) == getattr(expected, name)


@given(
    st.lists(st.tuples(NUMBERS, IDS), min_size=1, max_size=6),
    IDS,
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from([(",", ":"), (" ,\n", " : "), (",\t", ":\r\n")]),
)
@settings(max_examples=300)
def test_numbers_that_are_not_decoded_are_those_that_are(candidates, user, value, separators):
    request = {
        "candidates": {
            "dense": [[value, number] for number in range(len(candidates))],
            "sparse": {"tag": [ids for _, ids in candidates], "film": [film for film, _ in candidates]},
        },
        "top_k": 3,
        "request_id": "a",
        "context": {"dense": [-value], "sparse": {"user": user}},
        "timeout_ms": 20,
    }
    body = json.dumps(request, separators=separators).encode()
    read = ARRAYS.read(body)
    assert read is not None
    assert (read.top_k, read.timeout_ms, read.version, read.request_id, read.routing_key) == (3, 20, None, "a", "")
    read.bags.validate()
    by_dict = outcome(request)
    if not isinstance(by_dict, tuple):
        same_request(outcome(body), by_dict)


@pytest.mark.parametrize(
    "text",
    [
        "5", "null", "true", '"1"', '""', "{}", '{"a": [1]}', "[1.0,2]", "[1e2,2]", "[true,1]", "[null,1]",
        '["1",1]', '["",1]',
        "[[[1]],[]]", "[[[]],[]]", "[1,[2]]", "[[1],2]", "[[],2]", '[{"a": 1},2]', "[{},2]", "[[1],{}]",
        "[9223372036854775808,1]", "[18446744073709551616,1]", "[" + "7" * 5000 + ",1]", "[1,[2,3],[]]",
        "[1,2,]", "[1 2]",
    ],
)  # fmt: skip
def test_what_is_no_list_of_ids_is_left_to_others(text):
    assert ARRAYS.read(column("[1,2]")) is not None
    assert ARRAYS.read(column(text)) is None
    assert ARRAYS.read(column("[1,2]", text)) is None


def test_a_list_with_a_bracket_more_is_not_made_good_by_another_with_one_less():
    # Read flat, film has three ids in three places; tag has a bracket less than a list of three lists.
    assert ARRAYS.read(column("[1,[2,3],[]]", "[[1],2,3]")) is None
    assert ARRAYS.read(column("[[1],[2]]", "[1,2]", ',"request_id":"["')) is None


@pytest.mark.parametrize(
    "tail",
    [
        ',"timeout_ms":1.0', ',"timeout_ms":true', ',"timeout_ms":null', ',"top_k":"1"',
        ',"version":18446744073709551615',
        ',"request_id":5', ',"request_id":null', ',"more":1', ',"timeout_ms":1,"timeout_ms":2', ',"candidates":{}', " ",
    ],
)  # fmt: skip
def test_other_fields_that_are_not_plain_are_left_to_others(tail):
    body = column("[1,2]", tail=tail)
    assert (ARRAYS.read(body) is None) == bool(tail.strip())
    assert ARRAYS.read(b"\xef\xbb\xbf" + column("[1,2]")) is None
    assert ARRAYS.read(b"") is None


def test_a_body_that_was_given_up_on_does_not_stand_in_the_way_of_the_next():
    for wrong in (column("[" + "7" * 50 + ",1]"), column("[true,1]"), b"{", column("[1,2]", "5")):
        assert ARRAYS.read(wrong) is None
        assert ARRAYS.read(column("[1,2]")).bags.values.tolist() == [4, 1, 2, 1, 2]


def test_bodies_of_one_shape_share_what_follows_from_it():
    for one, alike, other in (
        (column("[1,2]"), column("[3,4]", "[5,6]"), column("[[1],[2,3]]")),
        (column("[[1],[2]]", "[[1],[2]]"), column("[3,4]"), column("[[],[2]]")),
        (column("[1,2]", tail=',"top_k":1'), column("[7,8]"), column("[1]", "[1]")),
    ):
        bags = [ARRAYS.read(body) for body in (one, alike)]
        assert bags[0].bags.offsets is bags[1].bags.offsets
        assert bags[0].bags.bags_per_key is bags[1].bags.bags_per_key
        found = bags[0].bags
        for shared in (found.offsets, found.bags_per_key, found.bag_starts(), found.value_starts()):
            with pytest.raises(ValueError, match="read-only"):
                shared[0] = 1
        # Ids are a request's own.
        assert found.values.flags.writeable
        assert not np.shares_memory(found.values, bags[1].bags.values)
        different = ARRAYS.read(other)
        assert different is None or different.bags.offsets is not bags[0].bags.offsets


def test_a_shape_is_of_all_lists_and_not_only_of_their_sum():
    bodies = [column(film, tag) for film in ("[1,2]", "[[1,2],[]]", "[[],[1,2]]") for tag in ("[1,2]", "[[3],[4]]")]
    for body in bodies * 2:
        same(ARRAYS.read(body).bags, outcome(json.loads(body)).bags)


def test_long_bodies_are_read_alike_and_their_memory_is_not_kept():
    body = column("[1,2]") + b" " * MAX_KEPT_BYTES
    assert ARRAYS.read(bytearray(body)).bags.values.tolist() == [4, 1, 2, 1, 2]


@given(st.sampled_from(PLACES), ANYTHING, st.integers(0, 7))
@settings(max_examples=400)
def test_a_body_has_the_answer_or_the_error_that_the_same_dict_has(place, value, count):
    request = request_of(count)
    at: Any = request
    for step in place[:-1]:
        at = at[step] if isinstance(at, dict) or step < len(at) else {}
    if place and (isinstance(at, dict) or place[-1] < len(at)):
        at[place[-1]] = value
    by_text, by_dict = outcome(json.dumps(request).encode()), outcome(request)
    if isinstance(by_dict, tuple):
        assert by_text == by_dict
        return
    same_request(by_text, by_dict)


@pytest.mark.parametrize("films", [[[], [0] * 6, [-1]], [[-1], [0] * 20, [1] * 20], [-1] + [0] * 6])
def test_a_negative_id_is_named_before_a_limit_whichever_way_a_body_is_read(films):
    request = request_of(len(films))
    request["candidates"]["sparse"]["film"] = films
    by_text = outcome(json.dumps(request).encode())
    assert by_text == outcome(request)
    assert by_text[0] is InvalidIdError


@pytest.mark.parametrize("cut", range(1, 200, 3))
def test_a_body_that_breaks_off_is_malformed(cut):
    request = {"context": {"sparse": {"user": [4]}, "dense": [1]}, "candidates": {"sparse": {"film": [1], "tag": [2]}}}
    text = json.dumps(request)[:-cut].encode()
    with pytest.raises(BadRequestError):
        PARSER.rank(text, None, 0.0)


def test_of_a_feature_that_comes_twice_the_last_one_counts():
    context = b'{"sparse":{"user":[1],"user":[2,3]},"dense":[1]}'
    candidates = b'{"sparse":{"film":[4],"tag":[5]},"dense":[[0,0]]}'
    text = b'{"context":' + context + b',"candidates":' + candidates + b"}"
    assert PARSER.rank(text, None, 0.0).bags.values.tolist() == [2, 3, 4, 5]

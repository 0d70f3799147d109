"""Requests whose inputs are of a form that the parser has met: read once, and never taken for another's."""

from __future__ import annotations

import dataclasses
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loader.errors import ShardrankError
from router.feature_schema import FeatureSchema
from serving.errors import CountMismatchError, InvalidFieldError, InvalidIdError, LimitExceededError
from serving.formats.schema import RequestSchema
from serving.limits import RequestLimits
from serving.oip.parser import InferParser
from serving.oip.read_grpc import read_infer as read_message
from serving.oip.read_http import read_infer as read_body
from serving.parse_json import JsonParser
from shardrank_testing.inference_requests import binary_body, bytes_tensor, json_body, message_of, tensors_of
from shardrank_testing.serving_api import MODEL, api_request, api_spec

LIMITS = RequestLimits()
SCHEMA = RequestSchema(FeatureSchema.of(api_spec()), LIMITS)


def http(tensors, **members):
    body, headers = binary_body(tensors, **members)
    return read_body(MODEL, None, body, int(headers["inference-header-content-length"]), LIMITS)


def grpc(tensors, **fields):
    return read_message(message_of(tensors, MODEL, **fields).SerializeToString())


READERS = pytest.mark.parametrize("read", [http, grpc])


def tensors(seed=0, num_candidates=5):
    return tensors_of(api_spec(), api_request(seed, num_candidates))


def like(given_tensors, **arrays):
    """The same inputs, some with other elements."""
    return [dataclasses.replace(one, array=arrays.get(one.name, one.array)) for one in given_tensors]


def outcome(parser, request):
    """What becomes of a request, comparable."""
    try:
        parsed = parser.rank(request(), None, 100.0)
    except ShardrankError as error:
        return type(error), str(error)
    bags = parsed.bags
    arrays = (bags.keys, bags.bags_per_key, bags.offsets, bags.values, parsed.context_dense, parsed.candidate_dense)
    weights = None if bags.weights is None else bags.weights.tobytes()
    texts = list(parsed.texts)
    return [one.tobytes() for one in arrays], weights, texts, parsed.top_k, parsed.request_id, parsed.deadline


def fail():
    raise AssertionError("the inputs are read again")


@READERS
def test_inputs_of_a_form_that_was_met_are_not_decoded_again(read):
    parser, request = InferParser(SCHEMA), read(tensors())
    first = outcome(parser, lambda: request)
    request.inputs = dataclasses.replace(request.inputs, read=fail)
    assert outcome(parser, lambda: request) == first


@READERS
@settings(max_examples=40, deadline=None)
@given(seeds=st.lists(st.integers(0, 10_000), min_size=2, max_size=3), num_candidates=st.integers(1, 20))
def test_a_parser_that_has_met_others_reads_what_a_new_one_reads(read, seeds, num_candidates):
    warm = InferParser(SCHEMA)
    for seed in [*seeds, *seeds]:
        request = api_request(seed, num_candidates)
        given_tensors = tensors_of(api_spec(), request)
        assert outcome(warm, lambda made=given_tensors: read(made)) == outcome(
            InferParser(SCHEMA), lambda made=given_tensors: read(made)
        )
        values = warm.rank(read(given_tensors), None, 0.0).bags.values
        np.testing.assert_array_equal(values, JsonParser(SCHEMA).rank(request, None, 0.0).bags.values)
        assert values.flags.aligned
        assert values.flags.writeable


@st.composite
def varied_tensors(draw):
    """Inputs that are like those of other examples in much, and differ in datatypes, shapes, order, or one element."""
    made = tensors(draw(st.integers(0, 1)), 2)
    narrow = draw(st.sets(st.sampled_from(["user", "film", "genre", "genre.lengths", "tag.lengths"]), max_size=1))
    made = [
        dataclasses.replace(one, datatype="INT32", array=one.array.astype(np.int32)) if one.name in narrow else one
        for one in made
    ]
    number = draw(st.integers(0, len(made) - 1))
    array = made[number].array
    other = {
        "as it is": array,
        "[1, n]": array.reshape(1, -1),
        "[n, 1]": array.reshape(-1, 1),
        "one less": array.reshape(-1)[1:],
        "negative": array if array.dtype == object else -1 - array,
    }
    kind = draw(st.sampled_from(sorted(other)))
    made[number] = dataclasses.replace(made[number], array=other[kind].astype(array.dtype))
    # Two that change places are often of one size.
    first, second = (draw(st.integers(0, len(made) - 1)) for _ in range(2))
    made[first], made[second] = made[second], made[first]
    return made


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from([http, grpc]), varied_tensors()), min_size=4, max_size=12))
def test_forms_that_are_like_each_other_are_never_taken_for_each_other(requests):
    warm = InferParser(SCHEMA)
    for read, made in requests * 2:
        cold = outcome(InferParser(SCHEMA), lambda: read(made))  # noqa: B023
        assert outcome(warm, lambda: read(made)) == cold  # noqa: B023


@READERS
def test_requests_of_one_form_share_no_elements(read):
    parser = InferParser(SCHEMA)
    parser.rank(read(tensors()), None, 0.0)
    first, second = (parser.rank(read(tensors()), None, 0.0) for _ in range(2))
    for ours, theirs in (
        (first.bags.values, second.bags.values),
        (first.context_dense, second.context_dense),
        (first.candidate_dense, second.candidate_dense),
    ):
        before = theirs.copy()
        ours[...] = 0
        np.testing.assert_array_equal(theirs, before)


def test_what_is_not_about_inputs_does_not_change_their_form():
    parser = InferParser(SCHEMA)
    parser.rank(http(tensors(), id="a", parameters={"top_k": 1}), None, 0.0)
    other = http(tensors(), id="b", parameters={"top_k": 3, "timeout_ms": 40}, outputs=[{"name": "order"}])
    other.inputs = dataclasses.replace(other.inputs, read=fail)
    parsed = parser.rank(other, None, 100.0)
    assert (parsed.request_id, parsed.top_k, parsed.deadline) == ("b", 3, pytest.approx(100.04))


@READERS
def test_the_same_bytes_in_other_shapes_are_other_inputs(read):
    parser = InferParser(SCHEMA)
    ids = np.arange(20, dtype=np.int64)
    rest = [one for one in tensors() if not one.name.startswith("genre")]
    genre = dataclasses.replace(next(one for one in tensors() if one.name == "genre"), array=ids.reshape(5, 4))
    for _ in range(2):
        bags = parser.rank(read([*rest, genre]), None, 0.0).bags
        assert bags.values_per_key()[SCHEMA.features.index["genre"]] == 20
        with pytest.raises(CountMismatchError, match=r"inputs\.genre has 4"):
            parser.rank(read([*rest, dataclasses.replace(genre, array=ids.reshape(4, 5))]), None, 0.0)


@READERS
@pytest.mark.parametrize(
    ("arrays", "error", "message"),
    [
        ({"film": np.array([1, 2, -3, 4, 5])}, InvalidIdError, r"candidates\.sparse\.film\[2\]\[0\]: -3"),
        ({"liked-tag.weights": np.full(3, np.inf, np.float32)}, InvalidFieldError, "finite"),
        ({"candidates.dense": np.full((5, 3), np.nan, np.float32)}, InvalidFieldError, r"dense\[0\]\[0\]"),
        ({"context.dense": np.full(2, np.nan, np.float32)}, InvalidFieldError, r"context\.dense\[0\]"),
        ({"genre.lengths": np.array([99, 0, 0, 0, -1])}, InvalidFieldError, r"genre\.lengths\[0\]: 99 is not in"),
        ({"genre.lengths": np.zeros(5, np.int64)}, CountMismatchError, r"genre\.lengths: they add up to 0"),
    ],
)
def test_elements_are_checked_in_every_request(read, arrays, error, message):
    parser = InferParser(SCHEMA)
    parser.rank(read(tensors()), None, 0.0)
    for _ in range(2):
        with pytest.raises(error, match=message):
            parser.rank(read(like(tensors(), **arrays)), None, 0.0)
    parser.rank(read(tensors()), None, 0.0)


@READERS
def test_the_length_of_a_ragged_bag_is_checked_in_every_request(read):
    parser = InferParser(RequestSchema(SCHEMA.features, RequestLimits(max_ids_per_bag=4)))
    count = next(one for one in tensors() if one.name == "genre").array.size
    assert 8 < count <= 12
    spread = np.array([4, count - 8, 4, 0, 0])
    parser.rank(read(like(tensors(), **{"genre.lengths": spread})), None, 0.0)
    with pytest.raises(LimitExceededError, match="max_ids_per_bag = 4"):
        parser.rank(read(like(tensors(), **{"genre.lengths": np.array([0, 0, 0, 0, count])})), None, 0.0)


@READERS
def test_strings_are_read_in_every_request(read):
    parser = InferParser(SCHEMA)
    for words in (["Oslo", "Rome"], ["Rome", "Oslo"], ["Oslo", "Rome"]):
        parsed = parser.rank(read(like(tensors(), city=np.array(words, dtype=object))), None, 0.0)
        assert list(parsed.texts) == words
    message = message_of(tensors(), MODEL)
    position = [one.name for one in message.inputs].index("city")
    for raw in (bytes_tensor(["Oslo", "Rome"]), struct.pack("<I", 6) + b"Oslo\xff\xfe" + struct.pack("<I", 2) + b"xy"):
        message.raw_input_contents[position] = raw
        request = message.SerializeToString()
        assert outcome(parser, lambda made=request: read_message(made)) == outcome(
            InferParser(SCHEMA), lambda made=request: read_message(made)
        )


def test_a_body_that_is_longer_or_shorter_than_an_earlier_one_is_refused():
    parser = InferParser(SCHEMA)
    body, headers = binary_body(tensors())
    length = int(headers["inference-header-content-length"])
    parser.rank(read_body(MODEL, None, body, length, LIMITS), None, 0.0)
    with pytest.raises(InvalidFieldError, match="1 bytes are left behind the last"):
        parser.rank(read_body(MODEL, None, body + b"x", length, LIMITS), None, 0.0)
    with pytest.raises(InvalidFieldError, match="the bytes left behind the JSON object"):
        parser.rank(read_body(MODEL, None, body[:-1], length, LIMITS), None, 0.0)


def test_elements_in_json_are_read_in_every_request():
    parser = InferParser(SCHEMA)
    for seed in (1, 2, 1):
        given_tensors = tensors(seed)
        expected = outcome(InferParser(SCHEMA), lambda made=given_tensors: http(made))
        body = json_body(given_tensors)
        whole = outcome(parser, lambda made=body: read_body(MODEL, None, made, None, LIMITS))
        told = outcome(parser, lambda made=body: read_body(MODEL, None, made, len(made), LIMITS))
        assert whole == told == expected


_BODY, _HEADERS = binary_body(tensors(), id="a", parameters={"top_k": 1})
_LENGTH = int(_HEADERS["inference-header-content-length"])
_MESSAGE = message_of(tensors(), MODEL).SerializeToString()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(position=st.integers(0, len(_BODY) - 1), flipped=st.integers(1, 255))
def test_a_damaged_request_is_the_same_to_a_parser_that_has_met_the_good_one(position, flipped):
    for good, read in ((_BODY, lambda body: read_body(MODEL, None, body, _LENGTH, LIMITS)), (_MESSAGE, read_message)):
        damaged = bytearray(good)
        damaged[position % len(good)] ^= flipped
        warm = InferParser(SCHEMA)
        warm.rank(read(good), None, 100.0)
        assert outcome(warm, lambda: read(bytes(damaged))) == outcome(  # noqa: B023
            InferParser(SCHEMA),
            lambda: read(bytes(damaged)),  # noqa: B023
        )

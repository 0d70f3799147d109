from __future__ import annotations

import json
import struct
from dataclasses import replace

import numpy as np
import pytest

from loader.errors import ShardrankError
from loader.snapshot.manifest import ModelSpec
from router.feature_schema import FeatureSchema
from serving.errors import InvalidRequestError
from serving.formats.infer import InferGrpcCodec, InferHttpCodec
from serving.formats.schema import RequestSchema
from serving.limits import RequestLimits
from serving.proto.inference import open_inference_pb2 as messages
from shardrank_testing.errors import raises_kind
from shardrank_testing.inference_requests import Tensor, binary_body, bytes_tensor, json_body, message_of, tensors_of
from shardrank_testing.parsing import SCHEMA, assert_same_request
from shardrank_testing.ranking import ranking_spec
from shardrank_testing.serving_api import MODEL, api_request, api_spec

LIMITS = RequestLimits()


def parse(request, schema=SCHEMA):
    return request.parse(schema)


def read_body(body, header_length=None, limits=LIMITS):
    length = None if header_length is None else str(header_length)
    return InferHttpCodec(model=MODEL, header_length=length).read(body, limits)


def read_message(data):
    return InferGrpcCodec().read(data, LIMITS)


def http_request(tensors, form="binary", limits=LIMITS, **members):
    if form == "json":
        return read_body(json_body(tensors, **members))
    body, headers = binary_body(tensors, **members)
    return read_body(body, int(headers["inference-header-content-length"]), limits)


def grpc_request(tensors, *, raw=True, **fields):
    return read_message(message_of(tensors, MODEL, raw=raw, **fields).SerializeToString())


def tensors(seed=0, num_candidates=5):
    return tensors_of(api_spec(), api_request(seed, num_candidates))


def changed(which, **fields):
    """A request's tensors with one of them changed."""
    return [replace(one, **fields) if one.name == which else one for one in tensors()]


def without(name):
    """A request's tensors without one of them."""
    return [one for one in tensors() if one.name != name]


def test_rectangular_and_int32_ids_are_read_as_ragged_ones():
    ids = np.arange(10, dtype=np.int64).reshape(5, 2)
    ragged = [
        *[one for one in tensors() if one.name.split(".")[0] != "genre"],
        Tensor("genre", "INT64", ids.reshape(-1)),
        Tensor("genre.lengths", "INT64", np.full(5, 2)),
    ]
    rectangular = [*[one for one in ragged if one.name != "genre.lengths"]]
    rectangular = [replace(one, array=ids) if one.name == "genre" else one for one in rectangular]
    narrow = [
        replace(one, array=ids.astype(np.int32), datatype="INT32") if one.name == "genre" else one
        for one in rectangular
    ]
    expected = parse(http_request(ragged))
    assert expected.bags.num_values > 0
    for form in ("binary", "json"):
        assert_same_request(parse(http_request(rectangular, form)), expected)
        assert_same_request(parse(http_request(narrow, form)), expected)
    assert_same_request(parse(grpc_request(narrow, raw=False)), expected)


def test_context_features_may_be_empty_or_one_row():
    flat = parse(http_request(changed("history", array=np.arange(4))))
    assert_same_request(parse(http_request(changed("history", array=np.arange(4).reshape(1, 4)))), flat)
    for shape in ((0,), (1, 0)):
        for form in ("binary", "json"):
            empty = parse(http_request(changed("history", array=np.empty(shape, np.int64)), form))
            assert empty.bags.values_per_key()[SCHEMA.features.index["history"]] == 0


def test_bags_may_be_empty_in_each_form():
    empty = [one for one in changed("genre", array=np.empty((5, 0), np.int64)) if one.name != "genre.lengths"]
    for request in (http_request(empty), http_request(empty, "json"), grpc_request(empty)):
        assert parse(request).bags.values_per_key()[SCHEMA.features.index["genre"]] == 0


def test_parameters_set_deadline_order_and_key():
    request = http_request(
        tensors(),
        id="mine",
        parameters={"timeout_ms": 40, "timeout": 50_000, "top_k": 2, "routing_key": "u", "other": []},
    )
    assert request.key == "u"
    parsed = parse(request)
    assert parsed.timeout_s == pytest.approx(0.04)
    assert (parsed.top_k, parsed.request_id) == (2, "mine")
    message = message_of(tensors(), MODEL, id="mine")
    message.parameters["timeout"].int64_param = 30_000
    message.parameters["top_k"].uint64_param = 3
    from_message = read_message(message.SerializeToString())
    assert from_message.key == "mine"
    assert parse(from_message).timeout_s == pytest.approx(0.03)
    assert parse(from_message).top_k == 3
    no_timeout = parse(http_request(tensors(), parameters={"timeout": 0}))
    assert no_timeout.timeout_s == LIMITS.default_timeout_ms / 1000


WRONG_INPUTS = [
    (without("film"), "missing_feature", r"inputs\.film: .* needs it"),
    (without("context.dense"), "missing_feature", r"inputs\.context\.dense"),
    (changed("film", name="flim"), "unknown_feature", "flim"),
    (changed("film", name="genre"), "invalid_field", r"inputs\.genre: it is given twice"),
    (changed("film", datatype="FP32"), "invalid_id", r"inputs\.film\.datatype: 'FP32'; it must be INT64 or INT32"),
    (changed("city", datatype="INT64", array=np.arange(2)), "invalid_id", r"inputs\.city\.datatype.*BYTES"),
    (changed("context.dense", datatype="INT64"), "invalid_field", "must be FP32"),
    (changed("film", array=np.arange(4)), "count_mismatch", r"inputs\.film: 4 candidates"),
    (changed("film", array=np.arange(5).reshape(5, 1, 1)), "count_mismatch", "one or two dimensions"),
    (changed("film", array=np.array([1, 2, -3, 4, 5])), "invalid_id", r"candidates\.sparse\.film\[2\]\[0\]: -3"),
    (changed("user", array=np.arange(4).reshape(2, 2)), "count_mismatch", r"\[ids\] or \[1, ids\]"),
    (changed("genre", array=np.arange(10).reshape(5, 2)), "count_mismatch",
        r"with genre\.lengths it must be \[ids\]"),
    (changed("genre.lengths", array=np.array([1, 1, 1, 1, -1])), "invalid_field", r"genre\.lengths\[4\]: -1"),
    (changed("genre.lengths", array=np.array([2**62] * 5)), "invalid_field", r"genre\.lengths\[0\]"),
    (changed("genre.lengths", array=np.zeros(5, np.int64)), "count_mismatch", "add up to 0"),
    (changed("genre.lengths", array=np.zeros(4, np.int64)), "count_mismatch", r"candidates, expected 4"),
    (changed("liked-tag.weights", array=np.ones(2, np.float32)), "count_mismatch", "that of its ids"),
    (changed("liked-tag.weights", array=np.full(3, np.nan, np.float32)), "invalid_field", "finite"),
    (changed("candidates.dense", array=np.full((5, 3), np.inf, np.float32)), "invalid_field", r"dense\[0\]\[0\]"),
    (changed("candidates.dense", array=np.ones((5, 4), np.float32)), "count_mismatch", r"it must be \[5, 3\]"),
    (changed("context.dense", array=np.ones(3, np.float32)), "count_mismatch", r"it must be \[2\]"),
]  # fmt: skip


@pytest.mark.parametrize(("given_tensors", "kind", "message"), WRONG_INPUTS)
def test_a_wrong_input_is_refused_by_name(given_tensors, kind, message):
    for request in (lambda: http_request(given_tensors), lambda: grpc_request(given_tensors)):
        with raises_kind(kind, match=message):
            parse(request())


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (RequestLimits(max_candidates=4), "5 candidates, more than the limit max_candidates = 4"),
        (RequestLimits(max_ids_per_request=1), r"inputs\.\S+: \d ids, more than the limit max_ids_per_request = 1"),
        (RequestLimits(max_ids_per_request=15), "ids over all features, more than the limit max_ids_per_request = 15"),
        (RequestLimits(max_ids_per_bag=3), "4 ids in one bag, more than the limit max_ids_per_bag = 3"),
        (RequestLimits(max_timeout_ms=1000), "timeout: 2000 ms, more than the limit max_timeout_ms = 1000"),
        (RequestLimits(max_request_id_chars=3), "request_id: 4 characters, more than the limit max_request_id_chars"),
        (RequestLimits(max_routing_key_chars=3), "routing_key: 5 characters, more than the limit"),
    ],
)
def test_the_limits_hold(limits, message):
    schema = RequestSchema(SCHEMA.features, limits)
    parameters = {"timeout": 2_000_000, "routing_key": "users"}
    with raises_kind("limit_exceeded", match=message):
        parse(http_request(tensors(), limits=limits, id="mine", parameters=parameters), schema)


def header_of(given_tensors, **members):
    body, headers = binary_body(given_tensors, **members)
    length = int(headers["inference-header-content-length"])
    return json.loads(body[:length]), body[length:]


def read_parts(header, binary):
    encoded = json.dumps(header).encode()
    return read_body(encoded + binary, len(encoded))


def test_binary_data_must_fill_the_body_and_the_shapes():
    header, binary = header_of(tensors())
    with raises_kind("invalid_field", match="3 bytes are left behind the last"):
        parse(read_parts(header, binary + b"abc"))
    with raises_kind("invalid_field", match=r"candidates\.dense\.parameters\.binary_data_size: 60 is not in 0\.\.59"):
        parse(read_parts(header, binary[:-1]))
    header["inputs"][0]["shape"] = [3]
    with pytest.raises(InvalidRequestError, match=r"inputs\.user: 8 bytes"):
        parse(read_parts(header, binary))
    header["inputs"][0]["parameters"]["binary_data_size"] = -1
    with raises_kind("invalid_field", match="-1 is not in"):
        parse(read_parts(header, binary))


@pytest.mark.parametrize("shape", [[2**70, 0], [-1, -2], [2**62, 4], [], [2**63 - 1]])
def test_a_shape_that_lies_about_its_size_is_refused_at_once(shape):
    header, binary = header_of(tensors())
    film = next(one for one in header["inputs"] if one["name"] == "film")
    film["shape"] = shape
    with pytest.raises(InvalidRequestError, match=r"inputs\.film"):
        parse(read_parts(header, binary))


def test_too_many_candidates_are_refused_before_anything_is_made_of_them():
    header, binary = header_of([one for one in tensors() if one.name != "genre.lengths"])
    for one in header["inputs"]:
        if one["name"] == "genre":
            one["shape"], size = [2**60, 0], one["parameters"]["binary_data_size"]
            one["parameters"]["binary_data_size"] = 0
            start = sum(o["parameters"]["binary_data_size"] for o in header["inputs"][: header["inputs"].index(one)])
            binary = binary[:start] + binary[start + size :]
    with pytest.raises(InvalidRequestError, match="candidates"):
        parse(read_parts(header, binary))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"\x05\x00\x00\x00Oslo", "longer than what is left"),
        (b"\x04\x00\x00\x00Oslo\x01", "BYTES element 1 is longer than what is left"),
        (bytes_tensor(["Oslo"]), "2 elements, its data 1"),
        (bytes_tensor(["Oslo"] * 3), "2 elements, its data at least 3"),
        (struct.pack("<I", 2) + b"\xff\xfe" + bytes_tensor(["Oslo"]), r"city\[0\]: it is not UTF-8"),
    ],
)
def test_broken_bytes_elements_are_refused(raw, message):
    given_message = message_of(tensors(), MODEL)
    position = [one.name for one in given_message.inputs].index("city")
    given_message.raw_input_contents[position] = raw
    with pytest.raises(ShardrankError, match=message):
        parse(read_message(given_message.SerializeToString()))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("film", [1, 2, 3, 4, 5.5], "not what its datatype says"),
        ("film", [1, 2, 3, 4, True], "not what its datatype says"),
        ("film", [1, 2, 3, 4, 2**63], r"inputs\.film: .*Expected `int` <= 9223372036854775807 - at `\$\[4\]`"),
        ("film", [1, 2, 3, 4], "5 elements, its data 4"),
        ("film", list(range(1000)), "5 elements, its data at least 9"),
        ("film", [[1, 2, 3, 4, 5]], "does not have the shape"),
        ("candidates.dense", [[1, 2, 3]] * 4 + [[1, 2]], "does not have the shape"),
        ("candidates.dense", [[1, 2, 3]] * 4 + [[1, 2, 1e39]], "not a finite float32"),
        ("film", [[[1], [2]], [[3], [4]], [[5]], [], [], []], "nested data does not have the shape"),
        ("city", ["Oslo", 7], "not what its datatype says"),
        ("city", ["Oslo", "\udc00"], "invalid utf-16 surrogate"),
    ],
)
def test_json_data_must_be_what_shape_and_datatype_say(name, data, message):
    body = json.loads(json_body(tensors()))
    next(one for one in body["inputs"] if one["name"] == name)["data"] = data
    with pytest.raises(ShardrankError, match=message):
        parse(read_body(json.dumps(body).encode()))


def test_flat_json_data_is_taken_for_any_shape():
    body = json.loads(json_body(tensors()))
    dense = next(one for one in body["inputs"] if one["name"] == "candidates.dense")
    dense["data"] = [one for row in dense["data"] for one in row]
    assert_same_request(parse(read_body(json.dumps(body).encode())), parse(http_request(tensors())))


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"parameters": {"sequence_id": 5}}, "sequence_id"),
        ({"outputs": [{"name": "scores", "parameters": {"classification": 3}}]}, "classification"),
        ({"outputs": [{"name": "scores", "parameters": {"shared_memory_region": "x"}}]}, "shared_memory_region"),
    ],
)
def test_extensions_that_would_change_the_answer_are_refused(members, message):
    with raises_kind("unsupported_extension", match=message):
        http_request(tensors(), **members)


def test_shared_memory_inputs_and_mixed_contents_are_refused_over_grpc():
    message = message_of(tensors(), MODEL)
    message.inputs[0].parameters["shared_memory_region"].string_param = "x"
    with raises_kind("unsupported_extension", match="shared_memory_region"):
        parse(read_message(message.SerializeToString()))
    message = message_of(tensors(), MODEL)
    message.inputs[1].contents.int64_contents.append(1)
    with raises_kind("invalid_field", match="beside raw_input_contents"):
        parse(read_message(message.SerializeToString()))
    message = message_of(tensors(), MODEL)
    del message.raw_input_contents[0]
    with raises_kind("invalid_field", match="one for each"):
        parse(read_message(message.SerializeToString()))
    with raises_kind("malformed", match=r"inference\.ModelInferRequest"):
        read_message(b"\xff")
    with raises_kind("invalid_field", match="model: it is empty"):
        read_message(messages.ModelInferRequest().SerializeToString())


@pytest.mark.parametrize(
    ("name", "message"), [("scores", "an output is asked for twice"), ("click", "there is no output 'click'")]
)
def test_outputs_are_those_of_the_model_each_once(name, message):
    with raises_kind("invalid_field", match=f"outputs: {message}"):
        parse(http_request(tensors(), outputs=[{"name": "scores"}, {"name": name}]))


def test_a_model_of_dense_candidates_alone_counts_their_rows():
    """Names of a model with few inputs are all told."""
    spec = ranking_spec("mlp", dense=(0, 3)).model_dump()
    spec["tables"], spec["features"] = spec["tables"][:1], spec["features"][:1]
    schema = RequestSchema(FeatureSchema.of(ModelSpec.model_validate(spec)), LIMITS)
    user = Tensor("user", "INT64", np.array([3]))
    rows = Tensor("candidates.dense", "FP32", np.ones((4, 3), np.float32))
    assert parse(http_request([user, rows]), schema).num_candidates == 4
    with raises_kind("invalid_field", match=r"no such input; it has \['user', 'candidates\.dense'"):
        parse(http_request([user, rows, replace(user, name="film")]), schema)

"""JSON made to mislead the parser or to break its error path: refused by name, in errors that can be written."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.snapshot.tables import VocabularyMapping
from router.feature_schema import FeatureSchema
from serving.errors import (
    BadRequestError,
    InvalidFieldError,
    InvalidIdError,
    MalformedRequestError,
)
from serving.formats.json_reader import MAX_SEARCHED_BYTES
from serving.formats.json_text import count_above, encode, error_document
from serving.formats.schema import RequestSchema
from serving.limits import RequestLimits
from shardrank_testing.parsing import SCHEMA, parse_json
from shardrank_testing.serving_api import MODEL, api_request
from shardrank_testing.snapshots import model_of, table_spec


def string_schema(names: tuple[str, ...] = ("code",)) -> RequestSchema:
    table = table_spec("t", 10, 4, *names, id_mapping=VocabularyMapping(id_type="string"))
    return RequestSchema(FeatureSchema.of(model_of([table], MODEL)), RequestLimits())


@pytest.mark.parametrize("column", [[["a"], "bc"], [["a"], "b"], [[], "bc", ["d"]]])
def test_a_bare_string_among_bags_is_refused_and_not_read_as_its_characters(column):
    schema = string_schema()
    for body in ({"sparse": {"code": column}}, json.dumps({"sparse": {"code": column}}).encode()):
        with pytest.raises(InvalidFieldError, match=r"sparse\.code\[1\]: .* is not a list"):
            parse_json(schema, body, "lookup")
    with pytest.raises(InvalidFieldError, match=r"candidates\.sparse\.code\[1\]"):
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
        with pytest.raises(BadRequestError) as refusal:
            parse_json(SCHEMA, given_body, "lookup")
        assert json.loads(encode(error_document(refusal.value)))["error"]["field"]


def test_the_error_of_a_wide_model_names_what_is_spelled_alike_and_stays_short():
    schema = string_schema(tuple(f"feature_{number:04}" for number in range(1100)))
    for body in ({"sparse": {"featur_0042": [[1]]}}, {"sparse": {"x" * 100_000: [[1]]}}):
        with pytest.raises(BadRequestError, match="it has 1100, such as") as refusal:
            parse_json(schema, body, "lookup")
        assert len(str(refusal.value)) < 1024
    for near in ("featur_0042", "eature_0042", "feature0042", "feature_0042x", "faeture_0042"):
        with pytest.raises(BadRequestError, match="feature_0042'"):
            parse_json(schema, {"sparse": {near: [[1]]}}, "lookup")
    with pytest.raises(BadRequestError, match="one of 1100 that are missing") as refusal:
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
        with pytest.raises(InvalidIdError, match=rf"sparse\.film\[{position // 2}\]\[{position % 2}\]: "):
            parse_json(SCHEMA, {"sparse": {"film": column}}, "lookup")


def test_what_is_not_quite_json_is_named_by_its_field_in_short_texts_and_by_its_byte_in_long_ones():
    film = [1] * 1000
    with pytest.raises(InvalidIdError, match=r"sparse\.film\[1000\]: NaN is not in 0\.\."):
        parse_json(SCHEMA, json.dumps({"sparse": {"film": [*film, float("nan")]}}).encode(), "lookup")
    long = json.dumps({"sparse": {"film": [*film, float("nan")]}}).encode() + b" " * MAX_SEARCHED_BYTES
    with pytest.raises(MalformedRequestError, match=r"not JSON .*\(byte 3021\)"):
        parse_json(SCHEMA, long, "lookup")
    with pytest.raises(InvalidFieldError, match=r"the key is there twice"):
        parse_json(SCHEMA, b'{"sparse": {}, "sparse": {}}' + b" " * MAX_SEARCHED_BYTES, "lookup")


def test_a_list_with_a_bracket_more_is_not_made_good_by_another_with_one_less():
    request = api_request(1)
    request["candidates"]["sparse"] |= {"film": [1, [2, 3], 4, 5, []], "genre": [[1], 2, 3, 4, 5]}
    with pytest.raises(InvalidFieldError, match=r"candidates\.sparse\.(film|genre)\[1\]"):
        parse_json(SCHEMA, request)
    request = api_request(1)
    request["candidates"]["sparse"]["film"] = [1, 2, 3, 4, [5]]
    with pytest.raises(InvalidFieldError, match=r"candidates\.sparse\.film\[4\]"):
        parse_json(SCHEMA, request | {"request_id": "["})

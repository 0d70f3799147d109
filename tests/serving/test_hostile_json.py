"""Bodies that are made to mislead the parser, to keep it busy, or to break its error path."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.manifest import DenseModelSpec, FeatureSpec, ModelSpec, TableSpec, VocabularyMapping
from router.feature_schema import FeatureSchema
from serving.errors import BadRequestError, InvalidFieldError, InvalidIdError, ModelNotFoundError, TooManyEntriesError
from serving.formats.json_refusal import diagnose_lookup
from serving.formats.json_writer import encode, error_document
from serving.formats.schema import RequestSchema
from serving.json_size import JsonSize
from serving.limits import RequestLimits
from serving.parse_json import JsonParser, peek_version
from shard_node.generation import Generations
from shardrank_testing.serving_api import MODEL, api_request, api_spec

SCHEMA = RequestSchema(FeatureSchema.of(api_spec()), RequestLimits())
PARSER = JsonParser(SCHEMA)


def string_schema(names: tuple[str, ...] = ("code",)) -> RequestSchema:
    spec = ModelSpec(
        model=MODEL,
        tables=(
            TableSpec(
                name="t",
                num_embeddings=10,
                embedding_dim=4,
                feature_names=names,
                id_mapping=VocabularyMapping(id_type="string"),
            ),
        ),
        features=tuple(FeatureSpec(name=name, side="candidate") for name in names),
        dense_model=DenseModelSpec(kind="mlp"),
    )
    return RequestSchema(FeatureSchema.of(spec), RequestLimits())


@pytest.mark.parametrize("column", [[["a"], "bc"], [["a"], "b"], [[], "bc", ["d"]]])
def test_a_bare_string_among_bags_is_refused_and_not_read_as_its_characters(column):
    parser = JsonParser(string_schema())
    for body in ({"sparse": {"code": column}}, json.dumps({"sparse": {"code": column}}).encode()):
        with pytest.raises(InvalidFieldError, match=r"sparse\.code\[1\]: .* is not a list of ids"):
            parser.lookup(body, None, 0.0)
    with pytest.raises(InvalidFieldError, match=r"candidates\.sparse\.code\[1\]"):
        parser.rank({"candidates": {"sparse": {"code": column}}}, None, 0.0)


def test_a_version_is_seen_however_its_key_is_written():
    assert peek_version(rb'{"\u0076ersion": 99}') == 99
    assert peek_version(rb'{"version": 1, "v\u0065rsion": 2}') == 2
    for out_of_range in (b"0", b"-7", b"100000000000000000000000"):
        assert peek_version(b'{"version": ' + out_of_range + b"}") is None


def test_no_other_version_than_the_one_asked_for_answers():
    generations: Generations[str] = Generations(lambda payload: None)
    generations.stage(MODEL, 1, "payload")
    generations.flip(MODEL, 1)
    with generations.lease(MODEL) as lease:
        assert PARSER.rank(api_request(1) | {"version": 1}, lease, 0.0).num_candidates == 5
        with pytest.raises(InvalidFieldError, match="version: 99 is asked for, but 1 would answer"):
            PARSER.rank(api_request(1) | {"version": 99}, lease, 0.0)
        with pytest.raises(InvalidFieldError, match="version: 99 is asked for"):
            PARSER.lookup(rb'{"sparse": {"film": [1]}, "\u0076ersion": 99}', lease, 0.0)


@pytest.mark.parametrize("value", [0, -7, 10**23])
def test_a_version_out_of_range_is_named(value):
    with pytest.raises(InvalidFieldError, match=r"version: .* is not in 1\.\."):
        PARSER.rank(api_request(1) | {"version": value}, None, 0.0)


def test_a_timeout_below_one_names_the_limit():
    with pytest.raises(InvalidFieldError, match=r"timeout_ms: -1 is not in 1\.\.max_timeout_ms = 60000"):
        PARSER.rank(api_request(1) | {"timeout_ms": -1}, None, 0.0)


@pytest.mark.parametrize("sign", ["", "-"])
def test_an_id_of_five_thousand_digits_is_named_by_its_field(sign):
    body = b'{"sparse": {"film": [1, ' + sign.encode() + b"7" * 5000 + b"]}}"
    with pytest.raises(InvalidIdError, match=r"sparse\.film\[1\]: a huge integer is not in 0\.\."):
        PARSER.lookup(body, None, 0.0)


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
            PARSER.lookup(given_body, None, 0.0)
        assert json.loads(encode(error_document(refusal.value)))["error"]["field"]


def test_any_error_can_be_written():
    document = json.loads(encode(error_document(ModelNotFoundError("model: \ud800"))))
    assert document["error"]["message"] == "model: \\ud800"


def test_the_error_of_a_wide_model_names_what_is_spelled_alike_and_stays_short():
    parser = JsonParser(string_schema(tuple(f"feature_{number:04}" for number in range(1100))))
    for body in ({"sparse": {"featur_0042": [[1]]}}, {"sparse": {"x" * 100_000: [[1]]}}):
        with pytest.raises(BadRequestError, match="it has 1100, such as") as refusal:
            parser.lookup(body, None, 0.0)
        assert len(str(refusal.value)) < 1024
    with pytest.raises(BadRequestError, match="feature_0042"):
        parser.lookup({"sparse": {"featur_0042": [[1]]}}, None, 0.0)
    with pytest.raises(BadRequestError, match="one of 1100 that are missing") as refusal:
        parser.rank({"candidates": {}}, None, 0.0)
    assert len(str(refusal.value)) < 1024


@pytest.mark.parametrize("entry", ["1", "[]", "[1]", '"a,b"'])
def test_more_entries_than_a_request_can_have_are_refused_undecoded(entry):
    # Cut off in the middle: had it been decoded, it would be malformed.
    body = ('{"sparse":{"film":[' + ",".join([entry] * 4_000_000)).encode()[: 16 * 2**20]
    with pytest.raises(TooManyEntriesError, match="max_ids_per_request = 1048576"):
        JsonParser(RequestSchema(SCHEMA.features, RequestLimits(max_bags_per_feature=1000))).lookup(body, None, 0.0)


def test_more_keys_than_a_request_can_have_are_refused_undecoded():
    body = ('{"sparse":{' + ",".join(f'"{number}":1' for number in range(200_000))).encode()
    with pytest.raises(InvalidFieldError, match="keys; a request to this model has at most"):
        PARSER.lookup(body, None, 0.0)


@given(seed=st.integers(0, 50), spaces=st.booleans())
def test_the_largest_requests_within_the_limits_are_never_refused_for_their_size(seed, spaces):
    limits = RequestLimits(max_candidates=7, max_ids_per_request=200, max_bags_per_feature=9, max_lookup_floats=400)
    schema = RequestSchema(SCHEMA.features, limits)
    separators = (", ", ": ") if spaces else (",", ":")
    rank = json.dumps(api_request(seed, 7), separators=separators).encode()
    assert JsonParser(schema).rank(rank, None, 0.0).num_candidates == 7
    rng = random.Random(seed)
    bags = [[5] * rng.randint(0, 3) for _ in range(9)]
    request: Any = {"sparse": dict.fromkeys(("tag", "genre", "liked-tag"), bags) | {"history": [[]] * 9}}
    request["weights"] = {"tag": [[0.5] * len(bag) for bag in bags]}
    lookup = json.dumps(request, separators=separators).encode()
    assert JsonParser(schema).lookup(lookup, None, 0.0).bags.bags_per_key.tolist() == [9] * 4


@given(st.lists(st.sampled_from([",", ":", '"', "\\", "[", "é", "a", "\n"]), max_size=30).map("".join))
def test_what_stands_in_strings_does_not_count(text):
    # In bodies that are long enough to be counted at all.
    size = JsonSize(entries=3, keys=3, limits=RequestLimits())
    for ascii_only in (True, False):
        allowed = json.dumps({"a": [text + 20 * ",:", "b"], "c": text, "d": 1}, ensure_ascii=ascii_only).encode()
        size.check_entries(allowed)
        size.check_keys(allowed)
        with pytest.raises(TooManyEntriesError, match=r"^4 list entries"):
            size.check_entries(json.dumps([text + 20 * ",", text, text, 1, 2], ensure_ascii=ascii_only).encode())
        with pytest.raises(InvalidFieldError, match=r"^4 keys"):
            size.check_keys(json.dumps([{text: text + 20 * ":"}] * 4, ensure_ascii=ascii_only).encode())


def test_the_diagnosis_finds_the_one_wrong_id_among_many():
    bags = [[1, 2]] * 1000
    for position, wrong in ((0, -1), (1999, -1), (777, 2**63), (5, True), (6, 1.0), (7, "x")):
        column = [list(bag) for bag in bags]
        column[position // 2][position % 2] = wrong
        with pytest.raises(InvalidIdError, match=rf"sparse\.film\[{position // 2}\]\[{position % 2}\]"):
            diagnose_lookup(SCHEMA, {"sparse": {"film": column}})

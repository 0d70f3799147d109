"""The JSON reader against pydantic: texts that are almost requests, read or refused alike, with the same arrays."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import pytest
from annotated_types import Len
from hypothesis import event, given
from hypothesis import strategies as st
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model

from loader.snapshot.manifest import DenseInputs, DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.tables import VocabularyMapping, fingerprint_strings
from router.feature_schema import FeatureSchema
from serving.errors import InvalidRequestError
from serving.formats.schema import RequestSchema
from serving.limits import MAX_ID, RequestLimits
from shardrank_testing.parsing import parse_json
from shardrank_testing.snapshots import table_of

LIMITS = RequestLimits(max_candidates=5, max_ids_per_bag=4, max_ids_per_request=25, max_bags_per_feature=6)
SPEC = ModelSpec(
    model="films",
    tables=(
        table_of("t", 10, 4, "user", "film", "tag"),
        table_of("w", 9, 4, "word", id_mapping=VocabularyMapping(id_type="string")),
    ),
    features=(
        FeatureSpec(name="user", side="context"),
        FeatureSpec(name="film", side="candidate"),
        FeatureSpec(name="tag", side="candidate", weighted=True),
        FeatureSpec(name="word", side="candidate"),
    ),
    dense_inputs=DenseInputs(context=1, candidate=2),
    dense_model=DenseModelSpec(kind="mlp"),
)  # fmt: skip
SCHEMA = RequestSchema(FeatureSchema.of(SPEC), LIMITS)
MAX_FLOAT = float(np.finfo(np.float32).max)
# What rounds to a float32 is one: half a step beyond the largest is the first that does not.
ROUNDED_TO_INF = MAX_FLOAT + 2.0**103


def check_float(value: Any) -> Any:
    assert -(2**63) <= value < 2**64 if type(value) is int else type(value) is float
    assert type(value) is int or abs(value) < ROUNDED_TO_INF
    return value


def strict(**fields: Any) -> type[BaseModel]:
    """An object with these members and no others; a tuple has a default."""
    members = {name: kind if isinstance(kind, tuple) else (kind, ...) for name, kind in fields.items()}
    return create_model("Strict", __config__=ConfigDict(extra="forbid", strict=True), **members)


Number = Annotated[Any, AfterValidator(check_float)]
Positive = Annotated[int, Field(ge=1, le=MAX_ID)]
Id = Annotated[int, Field(ge=0, le=MAX_ID)]
Bag = Annotated[list[Id], Field(max_length=LIMITS.max_ids_per_bag)]
Ids = list[Id] | list[Bag]
Words = list[str] | list[Annotated[list[str], Field(max_length=LIMITS.max_ids_per_bag)]]
ShortText = Annotated[str, Field(max_length=128)]
Timeout = Annotated[int, Field(ge=1, le=LIMITS.max_timeout_ms)]
OPTIONS = {
    "timeout_ms": (Timeout, 1),
    "version": (Positive, 1),
    "request_id": (ShortText, ""),
    "routing_key": (ShortText, ""),
}
Weights = strict(tag=(list[Number] | list[list[Number]] | None, None))
Rank = strict(
    context=strict(sparse=strict(user=Bag), weights=(strict() | None, None), dense=Annotated[list[Number], Len(1, 1)]),
    candidates=strict(
        sparse=strict(film=Ids, tag=Ids, word=Words),
        weights=(Weights | None, None),
        dense=list[Annotated[list[Number], Len(2, 2)]],
    ),
    top_k=(Positive, 1),
    **OPTIONS,
)
Lookup = strict(
    sparse=strict(user=(Ids, []), film=(Ids, []), tag=(Ids, []), word=(Words, [])),
    weights=(Weights | None, None),
    **OPTIONS,
)


def nested(column: list[Any]) -> list[list[Any]]:
    return [item if isinstance(item, list) else [item] for item in column]


def flattened(column: list[Any]) -> list[Any]:
    return [element for bag in nested(column) for element in bag]


def without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def flat(sparse: dict[str, Any], weights: Any) -> Any:
    """Lengths, ids and weights of all bags in the order of the schema."""
    lengths, values, ones = [], [], []
    given = weights and weights.tag
    assert "tag" in sparse or not (weights and weights.model_fields_set)
    for name in (name for name in SCHEMA.names if name in sparse):
        lengths += map(len, nested(sparse[name]))
        ids = flattened(sparse[name])
        values += fingerprint_strings(ids).tolist() if name == "word" else ids
        ones += [1.0] * len(ids) if name != "tag" or given is None else flattened(given)
    assert len(values) <= LIMITS.max_ids_per_request
    if given is None:
        return lengths, values, None
    shapes = [[len(item) if isinstance(item, list) else -1 for item in column] for column in (given, sparse["tag"])]
    assert shapes[0] == shapes[1]
    return lengths, values, np.array(ones, "f4").tolist()


def read_rank(request: Any) -> Any:
    context, candidates = request.context, request.candidates
    columns, dense = dict(candidates.sparse), candidates.dense
    assert 1 <= len(dense) <= LIMITS.max_candidates
    assert {len(column) for column in columns.values()} == {len(dense)}
    numbers = flat({"user": [context.sparse.user], **columns}, candidates.weights)
    return numbers, np.array(context.dense, "f4").tolist(), np.array(dense, "f4").tolist()


def read_lookup(request: Any) -> Any:
    columns = {name: getattr(request.sparse, name) for name in request.sparse.model_fields_set}
    assert all(len(column) <= LIMITS.max_bags_per_feature for column in columns.values())
    return flat(columns, request.weights)


def by_reference(text: bytes, method: str) -> Any:
    try:
        request = json.loads(text.decode(), object_pairs_hook=without_twins)
        return read_rank(Rank(**request)) if method == "rank" else read_lookup(Lookup(**request))
    except (AssertionError, TypeError, ValueError, RecursionError):
        return None


def by_reader(text: bytes, method: str) -> Any:
    try:
        parsed = parse_json(SCHEMA, text, method)
    except InvalidRequestError as error:
        is_named = error.field or isinstance(error, InvalidRequestError)
        return None if is_named else f"a refusal that names no field: {error}"
    parsed.bags.validate()
    bags = parsed.bags
    weights = None if bags.weights is None else bags.weights.tolist()
    numbers = bags.lengths.tolist(), bags.values.tolist(), weights
    return numbers if method == "lookup" else (numbers, parsed.context_dense.tolist(), parsed.candidate_dense.tolist())


ODD = [MAX_ID, MAX_ID + 1, -1, 0, 2**63, 2**64, 10**18, 1.0, True, None, "7", MAX_FLOAT, 3.4028235677973366e38, 1e39,
       math.nan, "", "[", "[[", '"', "\\", "\\\\[", "é", "\ud800", '["[', "{:", [], [[]], [1, 2], {}]  # fmt: skip


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Owner and key of everything in a document."""
    for key in list(node) if isinstance(node, dict) else range(len(node)):
        yield node, key
        if isinstance(node[key], dict | list):
            yield from places(node[key])


@st.composite
def requests(draw: st.DrawFn, method: str) -> Any:
    """Requests that are right, or wrong in a few places."""
    count = draw(st.integers(1, LIMITS.max_candidates))
    ids, floats = st.integers(0, 99), st.floats(-8, 8, width=32)

    def column(element: st.SearchStrategy[Any]) -> Any:
        item = st.lists(element, max_size=3) if draw(st.booleans()) else element
        return draw(st.lists(item, min_size=count, max_size=count))

    def like(item: Any) -> Any:
        return [draw(floats) for _ in item] if isinstance(item, list) else draw(floats)

    sparse = {"film": column(ids), "tag": column(ids), "word": column(st.sampled_from(["a", "", "[", '"[', "é\\"]))}
    weights = draw(st.sampled_from([{"tag": [*map(like, sparse["tag"])]}, {}, None]))
    options = {"timeout_ms": st.just(1), "request_id": st.just("["), "routing_key": st.just("a" * 128)}
    request: Any = draw(st.fixed_dictionaries({}, optional=options))
    if method == "lookup":
        request |= {"sparse": sparse, "weights": weights}
    else:
        rows = draw(st.lists(st.lists(floats, min_size=2, max_size=2), min_size=count, max_size=count))
        context = {"sparse": {"user": draw(st.lists(ids, max_size=4))}, "dense": [draw(floats)]}
        request |= {"context": context, "candidates": {"sparse": sparse, "weights": weights, "dense": rows}, "top_k": 1}
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2]))):
        change = draw(st.sampled_from(["replace", "remove", "wrap", "add"]))
        owner, key = draw(st.sampled_from(list(places(request)) or [({0: 0}, 0)]))
        if change == "remove":
            del owner[key]
        elif change == "wrap":
            owner[key] = [owner[key]]
        elif change == "add" and isinstance(owner, list):
            owner.insert(key, owner[key])
        else:
            owner["more" if change == "add" else key] = draw(st.sampled_from(ODD))
    return request


@st.composite
def texts(draw: st.DrawFn, method: str) -> bytes:
    """JSON of a request, written in some way, and now and then damaged."""
    separators = draw(st.sampled_from([(",", ":"), (" ,\n", " : "), (",\t", ":\r\n")]))
    text = json.dumps(draw(requests(method)), separators=separators, ensure_ascii=draw(st.booleans()))
    damage = draw(st.sampled_from(["none", "none", "none", "cut", "replaced", "doubled"]))
    at = draw(st.integers(0, len(text)))
    if damage == "cut":
        text = text[:at]
    elif damage == "replaced":
        text = text[:at] + draw(st.sampled_from('[],{}"1-0.e ')) + text[at + 1 :]
    elif damage == "doubled":
        text = text[: text.rfind("}")] + ',"top_k":1,"top_k":1}'
    return text.encode("utf-8", "surrogatepass")


@pytest.mark.parametrize("method", ["rank", "lookup"])
@given(data=st.data())
def test_a_request_is_read_as_a_plain_reader_reads_it(method, data):
    text = data.draw(texts(method))
    expected = by_reference(text, method)
    event("taken" if expected is not None else "refused")
    assert by_reader(text, method) == expected

"""What the client makes of arrays and lists is what the server reads of the same request in JSON."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.snapshot.reader import Snapshot
from serving.client import Client, Ragged
from serving.client.features import Column, Layout, RankFeatures, lookup_request, read_lookup, read_message
from serving.description import ModelInfo
from serving.embedded import Ranker
from serving.errors import InvalidRequestError
from serving.formats.messages import encode_model
from serving.limits import RequestLimits
from serving.proto.shardrank.v1 import ranking_pb2
from shardrank_testing.client_calls import Caller, calling, rank_arguments
from shardrank_testing.errors import raises_kind
from shardrank_testing.parsing import SCHEMA, assert_same_request, parse_json, parse_message
from shardrank_testing.serving_api import CITIES, MODEL, api_request, running_api

CONTEXT, CANDIDATES = ("user", "history", "liked-tag", "city"), ("film", "genre", "tag", "device")


@pytest.fixture(scope="session")
def layout(api_model) -> Layout:
    description = ModelInfo.of(Snapshot.open(api_model.path), RequestLimits(), "float32", "")
    return Layout(read_message(ranking_pb2.GetModelResponse, encode_model(description)))


def given_of(request: dict[str, Any]) -> RankFeatures:
    """The JSON form as arguments of a client."""
    context, candidates = request["context"], request["candidates"]
    weights = {**context.get("weights", {}), **candidates.get("weights", {})}
    return RankFeatures(context["sparse"], candidates["sparse"], weights, context.get("dense"), candidates.get("dense"))


def encoded(request: ranking_pb2.RankRequest) -> bytes:
    request.model = MODEL
    return request.SerializeToString()


IDS = st.integers(0, 2**63 - 1)


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Rank requests in the JSON form, all bags as nested lists, of any ids, with and without weights."""
    request = api_request(draw(st.integers(0, 10_000)), count := draw(st.integers(1, 5)))
    del request["timeout_ms"]
    context, candidates = request["context"], request["candidates"]
    context["sparse"]["city"] = draw(st.lists(st.sampled_from(CITIES) | st.text(max_size=3), max_size=3))
    context["sparse"]["user"] = draw(st.lists(IDS, max_size=4))
    candidates["sparse"]["film"] = [[film] for film in candidates["sparse"]["film"]]
    candidates["sparse"]["genre"] = draw(st.lists(st.lists(IDS, max_size=3), min_size=count, max_size=count))
    for part in (context, candidates):
        if draw(st.booleans()):
            del part["weights"]
    return request


def ragged(bags: list[list[Any]]) -> Ragged:
    return Ragged(np.array([one for bag in bags for one in bag]), np.array([len(bag) for bag in bags]))


def other_forms(bags: list[list[Any]]) -> list[Any]:
    """The same bags in all forms that can say them."""
    forms: list[Any] = [
        bags,
        tuple(map(tuple, bags)),
        ragged(bags),
        Ragged([one for bag in bags for one in bag], [len(bag) for bag in bags]),
        [np.array(bag) for bag in bags],
    ]
    lengths = set(map(len, bags))
    if len(lengths) == 1:
        forms.append(np.array(bags))
    if lengths == {1}:
        forms += [[bag[0] for bag in bags], np.array([bag[0] for bag in bags])]
    return forms


@given(request=requests(), data=st.data())
def test_a_request_in_any_form_is_read_as_its_json(layout, request, data):
    expected = parse_json(SCHEMA, request)
    arrays = {**request, "candidates": dict(request["candidates"])}
    for member in ("sparse", "weights"):
        if member in request["candidates"]:
            forms = {
                name: data.draw(st.sampled_from(other_forms(bags)), f"{member} {name}")
                for name, bags in request["candidates"][member].items()
            }
            arrays["candidates"][member] = forms
    arrays["candidates"]["dense"] = np.array(request["candidates"]["dense"])
    for form in (request, arrays):
        given = given_of(form)
        assert_same_request(parse_message(SCHEMA, encoded(layout.packed(given))), expected, may_spell_ones=True)
        assert_same_request(parse_message(SCHEMA, encoded(given.by_name())), expected, may_spell_ones=True)


@given(request=requests(), data=st.data())
def test_a_lookup_in_any_form_is_read_as_its_json(request, data):
    features = {**request["candidates"]["sparse"], "city": [[one] for one in request["context"]["sparse"]["city"]]}
    weights = request["candidates"].get("weights", {})
    expected = parse_json(SCHEMA, {"sparse": features, "weights": weights}, "lookup")
    forms = {name: data.draw(st.sampled_from(other_forms(bags)), name) for name, bags in features.items()}
    message = lookup_request(forms, weights)
    message.model = MODEL
    found = parse_message(SCHEMA, message, "lookup")
    for name in ("keys", "bags_per_key", "offsets", "values"):
        np.testing.assert_array_equal(getattr(found.bags, name), getattr(expected.bags, name), name)


@pytest.mark.parametrize("strings", [["a", "ü"], np.array(["a", "ü"]), np.array(["a", "ü"], object)])
def test_strings_are_ids_from_lists_and_arrays(strings):
    column = Column.of("candidates.sparse.city", strings, None)
    assert (list(column.texts), column.num_bags, column.ids.size) == (["a", "ü"], 2, 0)


def test_rows_of_another_width_than_stated_are_refused():
    message = ranking_pb2.LookupResponse(model=MODEL)
    message.embeddings["film"].MergeFrom(ranking_pb2.Embedding(values=[1, 2, 3], embedding_dim=2))
    with raises_kind("malformed_answer", match="'film' has 3 numbers in rows of 2"):
        read_lookup(message.SerializeToString())


WRONG = [
    ("candidates.sparse.film", [1.0] * 5, "invalid_id", r"film\[0\]: 1.0 is a float"),
    ("candidates.sparse.film", [1, 2, True, 4, 5], "invalid_id", r"film\[2\]: True is a bool"),
    ("candidates.sparse.film", [1, 2, "3", 4, 5], "invalid_id", r"film\[2\]: '3' is a str"),
    ("candidates.sparse.film", [1, 2, 3, 4, 2**63], "invalid_id", r"film\[4\]: 9223372036854775808 is not in 0.."),
    ("candidates.sparse.film", np.full(5, 2**63, np.uint64), "invalid_id", "9223372036854775808 is not in 0.."),
    ("candidates.sparse.film", np.array([1, np.nan]), "invalid_id", r"film\[0\]: 1.0 is a float"),
    ("candidates.sparse.genre", [[1], [], [2, None], [3], []], "invalid_id", r"genre\[2\]\[1\]: None is a NoneType"),
    (
        "candidates.sparse.genre",
        Ragged(np.array([np.nan]), [0, 0, 0, 1, 0]),
        "invalid_id",
        r"\[3\]\[0\]: nan is a float",
    ),
    ("candidates.sparse.film", np.ones(5, bool), "invalid_id", "True is a bool"),
    ("candidates.sparse.film", ["a"] * 5, "invalid_id", "are integers, not given here"),
    ("candidates.sparse.film", ["\ud800"] * 5, "invalid_id", "lone surrogate"),
    ("candidates.sparse.film", [1, [2], 3, 4, 5], "invalid_id", r"film\[1\]: \[2\] is a list"),
    ("candidates.sparse.film", [[1], 2, 3, 4, 5], "invalid_field", "lists and single values"),
    ("candidates.sparse.film", [[[1]]] * 5, "invalid_id", "is a list"),
    ("candidates.sparse.film", np.ones((5, 1, 1), int), "invalid_field", r"shape \(5, 1, 1\)"),
    ("candidates.sparse.film", [np.array(3)] * 5, "invalid_field", "without dimensions"),
    ("candidates.sparse.genre", [1, 2, 3], "count_mismatch", "3 candidates, expected 5"),
    ("candidates.sparse.genre", Ragged([1, 2], [1, 0, 0, 0, 0]), "count_mismatch", "add up to 1; there are 2 values"),
    ("candidates.sparse.genre", Ragged([1, 2], [1, -1, 2, 0, 0]), "invalid_field", "none below 0"),
    ("candidates.sparse.genre", Ragged([1, 2], [0.5] * 5), "invalid_field", "must be integers"),
    ("candidates.sparse.nothing", [1] * 5, "unknown_feature", "model 'films' has no such feature"),
    ("candidates.sparse.user", [1] * 5, "unknown_feature", "it is a context feature"),
    ("context.sparse.user", None, "missing_feature", "model 'films' needs it"),
    ("candidates.sparse.device", None, "missing_feature", "model 'films' needs it"),
    ("context.sparse.city", [3], "invalid_id", "are strings, not given here"),
    ("context.sparse.history", [[3, 4]], "invalid_id", "is a list"),
    ("context.sparse.history", Ragged([3], [1]), "invalid_field", "must be flat"),
    ("context.dense", [1.0], "count_mismatch", "1 values, the model takes 2"),
    ("context.dense", ["1", "2"], "invalid_field", "must be numbers"),
    ("context.dense", [0.5, np.nan], "invalid_field", r"dense\[1\]: nan is not a finite float32"),
    ("context.weights.liked-tag", [1, 2, np.nan], "invalid_field", r"liked-tag\[2\]: nan is not a finite float32"),
    ("candidates.dense", np.ones((5, 2)), "count_mismatch", "10 values; 5 candidates of 3 values need 15"),
    ("candidates.dense", np.ones((4, 3)), "count_mismatch", "4 rows for 5 candidates"),
    ("candidates.dense", np.ones(15), "count_mismatch", r"shape \(15,\)"),
    ("candidates.dense", [[1.0], [1.0, 2.0]], "count_mismatch", "different lengths"),
    ("candidates.weights.film", [1.0] * 5, "invalid_field", "takes no weights"),
    ("candidates.weights.tag", [[1.0]] * 5, "count_mismatch", "weights"),
    ("context.weights.liked-tag", [1.0], "count_mismatch", "1 weights for 3 ids"),
    ("weights.nothing", [1.0], "unknown_feature", "no ids"),
]


async def test_what_does_not_fit_is_refused_by_its_field(api_service):
    async with running_api(api_service) as api:
        address = f"grpc://{api.listening.host}:{api.listening.grpc_port}"
        async with calling(Client, address, timeout_ms=30_000) as remote:
            for (field, value, kind, message), call in product(WRONG, (remote, Caller(Ranker(api_service)))):
                request = api_request(seed=1)
                path = (field if field.count(".") != 1 or "dense" in field else f"context.{field}").split(".")
                owner = request[path[0]]
                for member in path[1:-1]:
                    owner = owner.setdefault(member, {})
                if value is None:
                    del owner[path[-1]]
                else:
                    owner[path[-1]] = value
                with pytest.raises(InvalidRequestError, match=message) as found:
                    await call("rank", MODEL, **rank_arguments(request))
                # The server has another path for the parts of a feature than JSON.
                names = {field, f"{field}.ids", f"{field}.string_ids", f"{field.replace('weights', 'sparse')}.weights"}
                assert found.value.kind == kind, field
                assert found.value.field.partition("[")[0] in names
                assert str(found.value).startswith(f"{found.value.field}: ")
            nothing = dict.fromkeys(CANDIDATES, ())
            context = rank_arguments(api_request())["context"]
            with pytest.raises(InvalidRequestError, match="at least 1") as found:
                await remote("rank", MODEL, context, nothing, context_dense=[0, 0])
            assert (found.value.kind, found.value.field) == ("count_mismatch", "candidates")


def test_the_client_imports_nothing_of_the_server():
    heavy = ("torch", "pydantic", "fastapi", "uvicorn", "starlette", "loader.", "shard_node", "router")
    code = f"import sys, serving.client; print([name for name in sys.modules if name.startswith({heavy})])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "['loader.errors']\n"

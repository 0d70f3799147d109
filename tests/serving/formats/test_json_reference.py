"""The JSON reader against a plain one: texts that are almost requests, taken or refused alike, with the same arrays."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from loader.snapshot.manifest import DenseInputs, DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.tables import TableSpec, VocabularyMapping, fingerprint_strings
from router.feature_schema import FeatureSchema
from serving.errors import BadRequestError, MalformedRequestError
from serving.formats.schema import RequestSchema
from serving.limits import MAX_ID, RequestLimits
from shardrank_testing.parsing import parse_json

LIMITS = RequestLimits(max_candidates=5, max_ids_per_bag=4, max_ids_per_request=25, max_bags_per_feature=6)
SPEC = ModelSpec(
    model="films",
    tables=(
        TableSpec(name="t", num_embeddings=10, embedding_dim=4, feature_names=("user", "film", "tag")),
        TableSpec(name="w", num_embeddings=9, embedding_dim=4, feature_names=("word",),
                  id_mapping=VocabularyMapping(id_type="string")),
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
OPTIONS = {"timeout_ms", "version", "request_id", "routing_key"}
MAX_FLOAT = float(np.finfo(np.float32).max)
# What rounds to a float32 is one: half a step beyond the largest is the first that does not.
ROUNDED_TO_INF = MAX_FLOAT + 2.0**103


class WrongError(Exception):
    pass


def need(condition: bool) -> None:
    if not condition:
        raise WrongError


def no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    need(len(dict(pairs)) == len(pairs))
    return dict(pairs)


def is_int(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def is_text(value: Any) -> bool:
    return isinstance(value, str) and not any(0xD800 <= ord(one) < 0xE000 for one in value)


def is_float(value: Any) -> bool:
    if type(value) is int:
        return -(2**63) <= value < 2**64
    return type(value) is float and abs(value) < ROUNDED_TO_INF


def read_column(name: str, ids: Any, weights: Any, *, context: bool, most: int) -> tuple[list[list[Any]], Any]:
    need(isinstance(ids, list))
    need(context or len(ids) <= most)
    nested = not context and bool(ids) and isinstance(ids[0], list)
    bags = [ids] if context else ids if nested else [[one] for one in ids]
    need(all(isinstance(bag, list) and len(bag) <= LIMITS.max_ids_per_bag for bag in bags))
    valid = is_text if name == "word" else lambda one: is_int(one, 0, MAX_ID)
    need(all(valid(one) for bag in bags for one in bag))
    if weights is None:
        return bags, None
    need(isinstance(weights, list) and len(weights) == len(ids))
    given = [weights] if context else weights if nested else [[one] for one in weights]
    need(all(isinstance(own, list) and len(own) == len(bag) for own, bag in zip(given, bags, strict=True)))
    need(all(is_float(one) for own in given for one in own))
    return bags, given


def read_columns(sparse: Any, weights: Any, names: list[str], *, context: bool, most: int, all_of: bool) -> dict:
    need(isinstance(sparse, dict) and set(sparse) <= set(names) and (not all_of or len(sparse) == len(names)))
    weights = {} if weights is None else weights
    need(isinstance(weights, dict) and set(weights) <= {"tag"} & set(sparse))
    return {name: read_column(name, ids, weights.get(name), context=context, most=most) for name, ids in sparse.items()}


def read_options(request: Any, others: set[str]) -> None:
    need(isinstance(request, dict) and set(request) <= others | OPTIONS)
    need(is_int(request.get("timeout_ms", 1), 1, LIMITS.max_timeout_ms))
    need(all(is_int(request.get(name, 1), 1, MAX_ID) for name in ("version", "top_k")))
    need(all(is_text(request.get(name, "")) and len(request.get(name, "")) <= 128 for name in OPTIONS & {
        "request_id", "routing_key"}))  # fmt: skip


def flat(columns: dict[str, tuple[list[list[Any]], Any]], num_names: list[str]) -> Any:
    lengths, values, weights = [], [], []
    for name in [one for one in num_names if one in columns]:
        bags, own = columns[name]
        lengths += [len(bag) for bag in bags]
        ids = [one for bag in bags for one in bag]
        values += fingerprint_strings(ids).tolist() if name == "word" else ids
        weights += [1.0] * len(ids) if own is None else [one for bag in own for one in bag]
    need(len(values) <= LIMITS.max_ids_per_request)
    has_weights = any(own is not None for _, own in columns.values())
    return lengths, values, np.array(weights, np.float64).astype("f4").tolist() if has_weights else None


def read_rank(request: Any) -> Any:
    read_options(request, {"context", "candidates", "top_k"})
    parts = [request.get(part, {}) for part in ("context", "candidates")]
    need(all(isinstance(part, dict) and set(part) <= {"sparse", "weights", "dense"} for part in parts))
    context, candidates = parts
    columns = read_columns(
        context.get("sparse", {}), context.get("weights"), ["user"], context=True, most=0, all_of=True
    )
    columns |= read_columns(
        candidates.get("sparse", {}), candidates.get("weights"), ["film", "tag", "word"], context=False,
        most=LIMITS.max_candidates, all_of=True,
    )  # fmt: skip
    count = len(columns["film"][0])
    need(count >= 1 and all(len(columns[name][0]) == count for name in ("tag", "word")))
    dense, rows = context.get("dense", []), candidates.get("dense", [])
    need(isinstance(dense, list) and len(dense) == 1 and all(map(is_float, dense)))
    need(isinstance(rows, list) and len(rows) == count)
    need(all(isinstance(row, list) and len(row) == 2 and all(map(is_float, row)) for row in rows))
    return flat(columns, list(SCHEMA.names)), np.array(dense, "f4").tolist(), np.array(rows, "f4").tolist()


def read_lookup(request: Any) -> Any:
    read_options(request, {"sparse", "weights"})
    need("sparse" in request)
    columns = read_columns(
        request["sparse"], request.get("weights"), list(SCHEMA.names), context=False, most=6, all_of=False
    )
    return flat(columns, list(SCHEMA.names))


def by_reference(text: bytes, method: str) -> Any:
    try:
        request = json.loads(text.decode(), object_pairs_hook=no_twins)
        return (read_rank if method == "rank" else read_lookup)(request)
    except (WrongError, ValueError, RecursionError):
        return None


def by_reader(text: bytes, method: str) -> Any:
    try:
        parsed = parse_json(SCHEMA, text, method)
    except BadRequestError as error:
        is_named = error.field or isinstance(error, MalformedRequestError)
        return None if is_named else f"a refusal that names no field: {error}"
    parsed.bags.validate()
    bags = parsed.bags
    weights = None if bags.weights is None else bags.weights.tolist()
    numbers = bags.lengths.tolist(), bags.values.tolist(), weights
    return numbers if method == "lookup" else (numbers, parsed.context_dense.tolist(), parsed.candidate_dense.tolist())


IDS = st.integers(0, 3) | st.sampled_from([MAX_ID, MAX_ID + 1, -1, 2**64, 1.0, True, None, "7", 10**18])
WORDS = st.sampled_from(["a", "", "[", "[[", '"', "\\", "\\\\[", "é", "\ud800", '["[', "{:"]) | IDS
FLOATS = st.sampled_from(
    [0, -1, 2**63, 2**64, 1e39, MAX_FLOAT, 3.4028235677973366e38, "1", None, math.nan]
) | st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def columns(draw: st.DrawFn, count: int, element: Any, wrong: Any, is_wrong: bool) -> Any:
    """Lists of as many bags, or ids; now and then with something in them that is none."""
    nested = draw(st.booleans())
    lists: Any = [draw(st.lists(element, max_size=3)) if nested else draw(element) for _ in range(count)]
    if is_wrong and draw(st.booleans()):
        place = draw(st.integers(0, max(count, 1) - 1))
        strange = draw(wrong | st.lists(wrong, max_size=2) | st.lists(st.lists(element, max_size=2), max_size=2))
        if nested and count and draw(st.booleans()):
            lists[place] = [*lists[place], strange]
        else:
            lists[place : place + draw(st.integers(0, 1))] = [strange]
    return lists


def like(column: Any, element: Any) -> st.SearchStrategy[Any]:
    """Weights in the shape of a column."""
    if isinstance(column, list):
        return st.tuples(*(like(one, element) for one in column)).map(list)
    return element


@st.composite
def requests(draw: st.DrawFn, method: str) -> Any:
    """Requests that are right, or wrong in a few places."""
    count = draw(st.sampled_from([1, 2, 3, 3, 5, 6, 0]))
    bad = draw(st.sampled_from(["", "", "ids", "weights", "dense", "counts"]))
    good_ids, good_floats = st.integers(0, 99), st.floats(-8, 8, width=32)
    good_words = st.sampled_from(["a", "", "[", '"[', "é\\"])

    def column(good: Any, wrong: Any) -> Any:
        size = draw(st.integers(0, 6)) if bad == "counts" else count
        return draw(columns(size, good, wrong, bad == "ids"))

    sparse = {"film": column(good_ids, IDS), "tag": column(good_ids, IDS), "word": column(good_words, WORDS)}
    tag_weights = draw(like(sparse["tag"], FLOATS if bad == "weights" else good_floats) | st.none())
    weights = draw(st.sampled_from([{"tag": tag_weights}, {}, None] + [{"film": tag_weights}, 5] * (bad == "weights")))
    if method == "lookup":
        chosen = draw(st.sets(st.sampled_from(sorted(sparse))))
        request: Any = {"sparse": {name: sparse[name] for name in chosen}, "weights": weights}
    else:
        number = FLOATS if bad == "dense" else good_floats
        width = draw(st.sampled_from([2, 2, 2, 3])) if bad == "dense" else 2
        rows = [draw(st.lists(number, min_size=width, max_size=width)) for _ in range(count)]
        user = draw(st.lists(IDS if bad == "ids" else good_ids, max_size=5))
        request = {
            "context": {"sparse": {"user": user}, "dense": draw(st.lists(number, min_size=1, max_size=1))},
            "candidates": {"sparse": sparse, "weights": weights, "dense": rows},
        }
    for option, values in {"top_k": [1, 0, 2**63], "timeout_ms": [1, 0, True], "request_id": ["[", "\ud800"]}.items():
        if draw(st.integers(0, 9)) == 0:
            request[option] = draw(st.sampled_from(values))
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
        text = (
            text[:at]
            + draw(st.sampled_from(["[", "]", ",", "{", "}", '"', "1", "-", "0", ".", "e", " "]))
            + text[at + 1 :]
        )
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

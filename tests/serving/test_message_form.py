"""Rank messages of a form that the parser has met: taken apart by their bytes, and never taken for another's."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loader.errors import ShardrankError
from loader.manifest import DenseInputs, DenseModelSpec, FeatureSpec, ModelSpec, TableSpec
from router.feature_schema import FeatureSchema
from serving.errors import InvalidFieldError, InvalidIdError
from serving.formats.schema import RequestSchema
from serving.limits import RequestLimits
from serving.message_form import MessageForm
from serving.message_places import places_of
from serving.parse_proto import ProtoParser
from serving.proto.shardrank.v1 import ranking_pb2
from serving.read_proto import RankMessage, read_rank

SPEC = ModelSpec(
    model="plain",
    tables=(TableSpec(name="rows", num_embeddings=50, embedding_dim=4, feature_names=("user", "film", "tag")),),
    features=(
        FeatureSpec(name="user", side="context"),
        FeatureSpec(name="film", side="candidate"),
        FeatureSpec(name="tag", side="candidate", weighted=True),
    ),
    dense_inputs=DenseInputs(context=2, candidate=3),
    dense_model=DenseModelSpec(kind="mlp", config={"hidden": [4]}),
)
SCHEMA = RequestSchema(FeatureSchema.of(SPEC), RequestLimits())
LENGTHS = (2, 0, 1, 1)


def rank_message(seed: int = 0, lengths: tuple[int, ...] = LENGTHS, names: tuple[str, ...] = ("film", "tag")):
    rng = np.random.default_rng(seed)
    message = ranking_pb2.RankRequest(model="plain")
    message.context.sparse["user"].ids.append(int(rng.integers(50)))
    for name in names:
        feature = message.candidates.sparse[name]
        count = len(lengths) if name == "film" else sum(lengths)
        feature.ids.extend(rng.integers(0, 50, count).tolist())
        if name == "tag":
            feature.lengths.extend(lengths)
    message.context.dense.extend(rng.standard_normal(2).tolist())
    message.candidates.dense.extend(rng.standard_normal(3 * len(lengths)).tolist())
    return message


def outcome(parser: ProtoParser, data: bytes):
    """What becomes of a message, comparable."""
    try:
        parsed = parser.rank(read_rank(data), None, 100.0)
    except ShardrankError as error:
        return type(error), str(error)
    bags = parsed.bags
    arrays = (bags.keys, bags.bags_per_key, bags.offsets, bags.values, parsed.context_dense, parsed.candidate_dense)
    shapes = [one.shape for one in arrays]
    return [one.tobytes() for one in arrays], shapes, bags.weights, parsed.top_k, parsed.request_id, parsed.deadline


def warm_parser(*messages: bytes) -> ProtoParser:
    """A parser that has met each message twice, which is when it learns a form."""
    parser = ProtoParser(SCHEMA)
    for data in messages * 2:
        parser.rank(read_rank(data), None, 0.0)
    return parser


def test_a_form_is_learned_from_the_second_message_on():
    Watched.decoded = 0
    parser = ProtoParser(SCHEMA)
    counts = []
    for seed in range(4):
        parser.rank(Watched(rank_message(seed).SerializeToString()), None, 0.0)
        counts.append(Watched.decoded)
    assert counts == [1, 2, 2, 2]


@settings(max_examples=60, deadline=None)
@given(
    seeds=st.lists(st.integers(0, 1000), min_size=1, max_size=4),
    lengths=st.lists(st.permutations(LENGTHS), min_size=1, max_size=3),
    top_k=st.integers(0, 3),
    request_id=st.text(max_size=5),
)
def test_a_parser_that_has_met_others_reads_what_a_new_one_reads(seeds, lengths, top_k, request_id):
    warm = warm_parser(rank_message().SerializeToString())
    for own in lengths:
        for seed in [*seeds, *seeds]:
            message = rank_message(seed, tuple(own))
            message.top_k, message.request_id = top_k, request_id
            data = message.SerializeToString()
            assert outcome(warm, data) == outcome(ProtoParser(SCHEMA), data)


def test_a_form_that_is_too_large_to_be_kept_is_not_learned_again(monkeypatch):
    learned = []
    make = MessageForm.of
    monkeypatch.setattr(MessageForm, "of", lambda *given: learned.append(1) or make(*given))
    # Lengths are part of the form.
    lengths = (0,) * 600_000
    schema = RequestSchema(SCHEMA.features, RequestLimits(max_candidates=len(lengths), max_ids_per_request=2**20))
    data, parser = rank_message(lengths=lengths).SerializeToString(), ProtoParser(schema)
    for _ in range(4):
        parser.rank(read_rank(data), None, 0.0)
    assert learned == [1]


@pytest.mark.parametrize("num_features", [2, 200])
def test_the_size_of_a_form_is_that_of_the_memory_it_takes(num_features):
    names = [f"feature-{number}" for number in range(num_features)]
    spec = ModelSpec(
        model="plain",
        tables=(TableSpec(name="rows", num_embeddings=50, embedding_dim=4, feature_names=tuple(names)),),
        features=tuple(FeatureSpec(name=name, side="candidate") for name in names),
        dense_model=DenseModelSpec(kind="mlp", config={"hidden": [4]}),
    )
    schema = RequestSchema(FeatureSchema.of(spec), RequestLimits())
    messages = []
    for num_candidates in range(1, 11):
        message = ranking_pb2.RankRequest(model="plain")
        for name in names:
            message.candidates.sparse[name].ids.extend(range(num_candidates))
        messages.append(RankMessage(message.SerializeToString()))
    requests = [ProtoParser(schema).rank(message, None, 0.0) for message in messages]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        forms = [MessageForm.of(schema, *one) for one in zip(messages, requests, strict=True)]
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    shared = sum(one.bags.offsets.nbytes + one.bags.bags_per_key.nbytes for one in forms)
    assert taken + shared <= 1.2 * sum(one.size_bytes for one in forms)


def test_messages_of_one_form_share_no_numbers():
    data = rank_message().SerializeToString()
    parser = warm_parser(data)
    first, second = (parser.rank(read_rank(data), None, 0.0) for _ in range(2))
    for ours, theirs in (
        (first.bags.values, second.bags.values),
        (first.context_dense, second.context_dense),
        (first.candidate_dense, second.candidate_dense),
    ):
        before = theirs.copy()
        ours[...] = 0
        np.testing.assert_array_equal(theirs, before)


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def parts_of(message) -> tuple[bytes, bytes]:
    return message.context.SerializeToString(), message.candidates.SerializeToString()


class Watched(RankMessage):
    """Counts how often messages are decoded."""

    decoded = 0

    def parts(self):
        type(self).decoded += 1
        return super().parts()


def entry(name: str, ids: list[int]) -> bytes:
    return field(1, field(1, name.encode()) + field(2, field(1, np.array(ids, "<i8").tobytes())))


@pytest.mark.parametrize(
    "names", [("film", "tag"), ("tag", "film"), ("film", "film"), ("film", "user"), ("film", "tug")]
)
@pytest.mark.parametrize("dense_first", [False, True])
def test_features_may_come_in_another_order_but_no_others_and_none_twice(names, dense_first):
    context, dense = rank_message().context.SerializeToString(), field(2, np.arange(6, dtype="<f4").tobytes())
    entries = entry(names[0], [1, 2]) + entry(names[1], [3, 4])
    start = field(1, b"plain") + field(3, context)
    good = start + field(4, entry("film", [7, 8]) + entry("tag", [5, 6]) + dense)
    other = start + field(4, dense + entries if dense_first else entries + dense)
    parser = warm_parser(good)
    assert outcome(parser, other) == outcome(ProtoParser(SCHEMA), other)
    if set(names) == {"film", "tag"} and len(good) == len(other):
        Watched.decoded = 0
        parser.rank(Watched(other), None, 0.0)
        assert Watched.decoded == 0


@pytest.mark.parametrize("kind", ["swapped parts", "part twice", "unknown field", "no context", "padded length"])
def test_messages_that_are_put_together_otherwise_are_read_as_the_library_reads_them(kind):
    message = rank_message()
    context, candidates = parts_of(message)
    model = field(1, b"plain")
    data = {
        "swapped parts": field(4, candidates) + field(3, context) + model,
        "part twice": model + field(3, context) + field(4, candidates[:0]) + field(4, candidates),
        "unknown field": model + field(3, context) + field(4, candidates) + varint(99 << 3 | 5) + b"1234",
        "no context": model + field(4, candidates),
        "padded length": model
        + field(3, context)
        + varint(4 << 3 | 2)
        + bytes([len(candidates) & 127 | 128, len(candidates) >> 7 | 128, 0])
        + candidates,
    }[kind]
    parser = ProtoParser(SCHEMA)
    again = ranking_pb2.RankRequest.FromString(data).SerializeToString()
    for _ in range(3):
        assert outcome(parser, data) == outcome(ProtoParser(SCHEMA), again)


def test_numbers_are_checked_in_every_message():
    parser = warm_parser(rank_message().SerializeToString())
    for _ in range(3):
        message = rank_message()
        message.candidates.sparse["film"].ids[2] = -3
        with pytest.raises(InvalidIdError, match=r"candidates\.sparse\.film\[2\]\[0\]: -3"):
            parser.rank(read_rank(message.SerializeToString()), None, 0.0)
        message = rank_message()
        message.candidates.dense[4] = float("nan")
        with pytest.raises(InvalidFieldError, match=r"candidates\.dense\[1\]\[1\]"):
            parser.rank(read_rank(message.SerializeToString()), None, 0.0)


def test_messages_with_weights_keep_them():
    message = rank_message()
    message.candidates.sparse["tag"].weights.extend([0.5] * sum(LENGTHS))
    data = message.SerializeToString()
    parser = ProtoParser(SCHEMA)
    for _ in range(4):
        weights = parser.rank(read_rank(data), None, 0.0).bags.weights
        assert weights.tolist() == [1.0] * (1 + len(LENGTHS)) + [0.5] * sum(LENGTHS)


_MESSAGE = rank_message().SerializeToString()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(position=st.integers(0, len(_MESSAGE) - 1), flipped=st.integers(1, 255))
def test_a_damaged_message_is_the_same_to_a_parser_that_has_met_the_good_one(position, flipped):
    damaged = bytearray(_MESSAGE)
    damaged[position] ^= flipped
    data = bytes(damaged)
    # Learns the form of the damaged one too, if it is a message.
    warm = warm_parser(_MESSAGE)
    expected = outcome(ProtoParser(SCHEMA), data)
    assert [repr(outcome(warm, data)) for _ in range(3)] == [repr(expected)] * 3


@given(st.binary(max_size=60))
def test_places_are_within_the_message_and_in_order(data):
    places = places_of(data)
    if places is not None:
        for begin, content, end in (places[:3], places[3:]):
            assert 0 <= begin <= content <= end <= len(data)

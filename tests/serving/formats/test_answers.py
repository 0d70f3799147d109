"""Answers in every form, read back by the libraries that clients read them with."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from serving.client.features import read_lookup, read_rank
from serving.formats.infer import InferGrpcCodec, InferHttpCodec
from serving.formats.json_reader import PIECE_FLOATS, JsonCodec
from serving.formats.messages import encode_lookup, encode_rank
from serving.limits import RequestLimits
from serving.proto.inference import open_inference_pb2
from serving.proto.shardrank.v1 import ranking_pb2
from serving.results import LookupResult, Ragged, RankResult

LIMITS = RequestLimits()
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
ORIGIN = ("dense_step", "delta_sequence", "age_ms")
FRESHNESS = st.tuples(*[st.integers(-1, 0) | st.integers(1, 2**63 - 1)] * 2)


@st.composite
def rank_answers(draw: st.DrawFn) -> RankResult:
    scores = draw(hnp.arrays(np.float32, st.integers(1, 40), elements=FLOATS))
    order = np.argsort(-scores, kind="stable")[: draw(st.integers(1, 40))]
    outputs = {
        name: draw(hnp.arrays(np.float32, scores.size, elements=FLOATS))
        for name in draw(st.sets(NAMES.filter(lambda name: name not in ("scores", "order")), max_size=3))
    }
    numbers = st.integers(1, 2**63 - 1)
    request_id, step = draw(st.just("") | NAMES), draw(st.just(0) | numbers)
    freshness = draw(FRESHNESS)
    return RankResult(draw(NAMES), draw(numbers), scores, order, request_id, step, outputs, *freshness)


@st.composite
def lookup_answers(draw: st.DrawFn) -> LookupResult:
    embeddings = {}
    for name in draw(st.sets(NAMES, max_size=4)):
        lengths = draw(st.none() | hnp.arrays(np.int64, st.integers(0, 4), elements=st.integers(0, 3)))
        rows = draw(st.integers(0, 5)) if lengths is None else int(lengths.sum())
        values = draw(hnp.arrays(np.float32, (rows, draw(st.integers(1, 5))), elements=FLOATS))
        embeddings[name] = values if lengths is None else Ragged(values, lengths)
    request_id, freshness = draw(st.just("") | NAMES), draw(FRESHNESS)
    return LookupResult(draw(NAMES), draw(st.integers(1, 2**63 - 1)), embeddings, request_id, *freshness)


def origin_of(answer: RankResult) -> dict[str, int]:
    return {name: getattr(answer, name) for name in ORIGIN}


def bits(answer: RankResult) -> dict[str, bytes]:
    return {name: values.tobytes() for name, values in answer.outputs.items()}


@given(rank_answers())
def test_scores_read_back_from_a_message(answer):
    read = ranking_pb2.RankResponse.FromString(encode_rank(answer))
    assert (read.model, read.version, read.request_id) == (answer.model, answer.version, answer.request_id)
    assert np.array(read.scores, "f4").tobytes() == answer.scores.tobytes()
    assert list(read.order) == answer.order.tolist()
    assert read.dense_step == answer.dense_step
    assert {name: np.array(one.values, "f4").tobytes() for name, one in read.outputs.items()} == bits(answer)
    ranked = read_rank(encode_rank(answer))
    assert {name: values.tobytes() for name, values in ranked.outputs.items()} == bits(answer)
    assert origin_of(ranked) == origin_of(answer)


@given(lookup_answers())
def test_embeddings_read_back_from_a_message(answer):
    read = ranking_pb2.LookupResponse.FromString(encode_lookup(answer))
    assert (read.model, read.version, read.request_id) == (answer.model, answer.version, answer.request_id)
    assert set(read.embeddings) == set(answer.embeddings)
    looked_up = read_lookup(encode_lookup(answer))
    assert (looked_up.delta_sequence, looked_up.age_ms) == (answer.delta_sequence, answer.age_ms)
    for name, feature in answer.embeddings.items():
        found, rows = read.embeddings[name], getattr(feature, "values", feature)
        assert found.embedding_dim == rows.shape[1]
        assert np.array(found.values, "f4").tobytes() == rows.tobytes()
        assert list(found.lengths) == (feature.lengths.tolist() if isinstance(feature, Ragged) else [])


@given(rank_answers(), lookup_answers())
def test_json_answers_read_back_to_the_same_float32(ranked, looked_up):
    codec = JsonCodec("rank", "films").read(b"{}", LIMITS)
    read = json.loads(codec.encode(ranked).body)
    assert (read["model"], read["version"], read.get("request_id", "")) == (
        ranked.model,
        ranked.version,
        ranked.request_id,
    )
    assert np.array(read["scores"], "f4").tobytes() == ranked.scores.tobytes()
    assert read["order"] == ranked.order.tolist()
    assert {name: read[name] for name in ORIGIN} == origin_of(ranked)
    outputs = read.get("outputs", {})
    assert {name: np.array(values, "f4").tobytes() for name, values in outputs.items()} == bits(ranked)
    encoded = codec.encode(looked_up)
    read = json.loads(b"".join((encoded.body, *encoded.more)))
    assert (read["delta_sequence"], read["age_ms"]) == (looked_up.delta_sequence, looked_up.age_ms)
    for name, feature in looked_up.embeddings.items():
        rows, values = read["embeddings"][name], getattr(feature, "values", feature)
        if isinstance(feature, Ragged):
            assert [len(bag) for bag in rows] == feature.lengths.tolist()
            rows = [row for bag in rows for row in bag]
        flat = [one for row in rows for one in row]
        assert np.array(flat, "f4").tobytes() == values.tobytes()
        assert all(len(row) == values.shape[1] for row in rows)


def infer_message(outputs: list[str]) -> bytes:
    message = open_inference_pb2.ModelInferRequest(model_name="films")
    for name in outputs:
        message.outputs.add(name=name)
    return message.SerializeToString()


def expected_output(answer: RankResult, name: str) -> tuple[str, Any]:
    if name == "order":
        return "INT64", answer.order
    return "FP32", answer.scores if name == "scores" else answer.outputs[name]


def is_id(found: str, answer: RankResult) -> bool:
    """That of the request, or one of its own."""
    return found == answer.request_id if answer.request_id else re.fullmatch("[0-9a-f]{32}", found) is not None


OUTPUTS = st.sampled_from([[], ["scores"], ["order"], ["order", "scores"]])


@given(rank_answers(), OUTPUTS)
def test_an_inference_message_reads_back(answer, outputs):
    unparsed = InferGrpcCodec().read(infer_message(outputs), LIMITS)
    read = open_inference_pb2.ModelInferResponse.FromString(unparsed.encode(answer).body)
    assert (read.model_name, read.model_version) == (answer.model, str(answer.version))
    assert is_id(read.id, answer)
    names = outputs or ["scores", "order", *answer.outputs]
    assert {name: value.int64_param for name, value in read.parameters.items()} == origin_of(answer)
    assert read.parameters["dense_step"].HasField("int64_param")
    assert [one.name for one in read.outputs] == names
    for output, raw in zip(read.outputs, read.raw_output_contents, strict=True):
        datatype, values = expected_output(answer, output.name)
        assert (output.datatype, list(output.shape), raw) == (datatype, [values.size], values.tobytes())


@given(rank_answers(), OUTPUTS, st.booleans())
def test_an_inference_body_reads_back(answer, outputs, binary):
    named = [{"name": name} for name in outputs]
    body = json.dumps({"inputs": [], "outputs": named, "parameters": {"binary_data_output": binary}}).encode()
    encoded = InferHttpCodec(model="films", header_length=None).read(body, LIMITS).encode(answer)
    length = int(dict(encoded.headers).get("inference-header-content-length", len(encoded.body)))
    header, tail = json.loads(encoded.body[:length]), encoded.body[length:]
    assert is_id(header["id"], answer)
    assert header["model_version"] == str(answer.version)
    assert header["parameters"] == origin_of(answer)
    assert [one["name"] for one in header["outputs"]] == (outputs or ["scores", "order", *answer.outputs])
    for output in header["outputs"]:
        datatype, values = expected_output(answer, output["name"])
        assert (output["datatype"], output["shape"]) == (datatype, [values.size])
        if binary:
            size = output["parameters"]["binary_data_size"]
            assert tail[:size] == values.tobytes()
            tail = tail[size:]
        else:
            assert np.array(output["data"], values.dtype).tobytes() == values.tobytes()
    assert tail == b""


def test_a_long_answer_is_written_in_pieces_wherever_its_bags_end():
    lengths = np.array([0, 3, 2 * PIECE_FLOATS, 0, 1, PIECE_FLOATS // 4, 5, 0])
    values = np.arange(lengths.sum() * 3, dtype=np.float32).reshape(-1, 3)
    answer = LookupResult("films", 3, {"bags": Ragged(values, lengths), "rows": values})
    pieces = list(JsonCodec("lookup", "films").read(b"{}", LIMITS).encode(answer).more)
    assert max(map(len, pieces)) < 12 * PIECE_FLOATS
    read = json.loads(b"".join(pieces))["embeddings"]
    assert read["rows"] == values.tolist()
    assert read["bags"] == [rows.tolist() for rows in np.split(values, np.cumsum(lengths)[:-1])]

"""Each attack's message is what its name says, read by protobuf and JSON themselves."""

from __future__ import annotations

import gzip
import json
import zlib

import numpy as np
import pytest

from loadtest.drill.hostile import messages
from loadtest.drill.hostile.attacker import AttackConfig
from serving.proto.inference import open_inference_pb2
from serving.proto.shardrank.v1 import ranking_pb2

LIMIT = 16 << 20
CONFIG = AttackConfig(
    name="x",
    http_port=1,
    grpc_port=2,
    model="bench-mlp",
    features=tuple(f"feature-{number:03d}" for number in range(26)),
    dense=13,
    seconds=1,
)


def built(name: str) -> bytes:
    return messages.MESSAGES[name].build(CONFIG)


def infer(name: str) -> open_inference_pb2.ModelInferRequest:
    return open_inference_pb2.ModelInferRequest.FromString(built(name))


def test_sixteen_kilobytes_become_eight_million_outputs():
    body = built("grpc-outputs")
    assert len(messages.compressed(body)) < 20_000
    message = open_inference_pb2.ModelInferRequest.FromString(body)
    assert len(message.outputs) == 8_000_000
    assert message.model_name == CONFIG.model


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("grpc-parameters", lambda message: len(message.parameters)),
        ("grpc-input-parameters", lambda message: len(message.inputs[0].parameters)),
        ("grpc-shape-dims", lambda message: len(message.inputs[0].shape) // 16),
        ("grpc-int64-contents", lambda message: len(message.inputs[0].contents.int64_contents) // 16),
        ("grpc-int64-unpacked", lambda message: (len(message.inputs[0].contents.int64_contents) + 100) // 8),
        ("grpc-bytes-raw", lambda message: len(message.raw_input_contents[0]) // 16),
    ],
)
def test_an_infer_request_has_as_many_parts_as_it_says(name, count):
    assert count(infer(name)) == 1_000_000


def test_a_lookup_and_a_rank_request_have_a_million_features():
    assert len(ranking_pb2.LookupRequest.FromString(built("grpc-lookup-features")).sparse) == 1_000_000
    assert len(ranking_pb2.RankRequest.FromString(built("grpc-rank-features")).candidates.sparse) == 1_000_000
    message = ranking_pb2.RankRequest.FromString(built("grpc-ids-unpacked"))
    assert len(message.candidates.sparse[CONFIG.features[0]].ids) == 1_000_000


@pytest.mark.parametrize("name", [one.name for one in messages.MESSAGES.values() if one.form == "both"])
def test_a_message_stays_within_the_limit_in_bytes(name):
    assert 20_000 < len(built(name)) <= LIMIT


@pytest.mark.parametrize("name", [one.name for one in messages.MESSAGES.values() if one.form == "post"])
def test_a_body_stays_within_the_limit_in_bytes_as_it_is_sent(name):
    body = built(name)
    assert 0 < len(body) <= LIMIT
    head, _, rest = messages.MESSAGES[name].encode(CONFIG, "post").partition(b"\r\n\r\n")
    assert rest == body
    assert f"content-length: {len(rest)}".encode() in head
    assert CONFIG.model.encode() in head


def test_json_is_as_long_as_it_may_be():
    short = CONFIG.model_copy(update={"json_bytes": 10_000})
    for name in ("json-open-lists", "json-keys", "json-one-key", "json-not-utf8", "oip-json-inputs"):
        assert 7_000 < len(messages.MESSAGES[name].build(short)) <= 10_000
    assert set(json.loads(messages.MESSAGES["json-one-key"].build(short))["sparse"]) == {CONFIG.features[0]}


def test_empty_blocks_of_deflate_hold_nothing():
    body = built("oip-deflate-empty-blocks")
    assert len(body) > LIMIT - 100
    unpacked = zlib.decompressobj()
    assert unpacked.decompress(body[:1_000_000]) == b""
    assert not unpacked.eof


def test_what_is_wrong_stands_at_the_very_end():
    lookup = json.loads(messages.full_lookup(CONFIG, '"x"'))["sparse"]
    assert lookup[CONFIG.features[-1]][-1][-1] == "x"
    ids = [one for bags in lookup.values() for bag in bags for one in bag]
    assert 1_000_000 < len(ids) <= 1 << 20
    assert [one for one in ids if not isinstance(one, int)] == ["x"]
    rank = json.loads(messages.full_rank(CONFIG, '"x"'))["candidates"]
    assert rank["dense"][-1][-1] == "x"
    assert {len(row) for row in rank["dense"]} == {13}


def test_what_is_as_large_as_allowed_is_within_the_limits():
    bags = json.loads(messages.full_lookup(CONFIG))["sparse"]
    assert sum(map(len, bags.values())) * messages.DIM <= messages.MAX_FLOATS
    answer = messages.full_answer(CONFIG)
    assert 0.99 < sum(map(len, json.loads(answer)["sparse"].values())) * messages.DIM / messages.MAX_FLOATS <= 1


def test_a_bomb_grows_a_thousandfold():
    assert len(messages.bomb(900)) <= LIMIT
    assert len(gzip.decompress(messages.bomb(2))) == 2 * messages.BOMB_BYTES


def test_groups_are_as_deep_as_the_message_is_long():
    body = built("grpc-unknown-groups")
    opened = np.frombuffer(body, np.uint8) == messages.tag(15, messages.GROUP)[0]
    assert int(opened.sum()) > 7_999_000


@pytest.mark.parametrize("name", [one.name for one in messages.MESSAGES.values() if one.form == "raw"])
def test_a_head_that_is_wrong_is_of_a_lookup_of_the_model(name):
    request = messages.MESSAGES[name].encode(CONFIG, "raw")
    assert request.startswith(b"POST /v1/models/bench-mlp:lookup HTTP/1.1\r\n")
    assert len(request) < LIMIT + 1_000_000


def test_a_body_that_is_not_whole_ends_in_the_middle_of_its_message():
    half = messages.half_message(CONFIG)
    assert int.from_bytes(half[1:5], "big") == LIMIT
    assert len(half) - 5 == LIMIT // 2

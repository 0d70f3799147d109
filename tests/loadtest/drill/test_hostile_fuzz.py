"""Mutators, the connections that they are sent on, and the HTTP/2 that attackers speak."""

from __future__ import annotations

import json
import random
import struct
from functools import partial

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.drill.hostile import peer as h2
from loadtest.drill.hostile.attacker import Responses
from loadtest.drill.hostile.fuzz import (
    LAST_GET,
    MUTATIONS,
    SHARES,
    Calls,
    MutatedRequests,
    Mutator,
    RawHttp2,
    Wire,
    blames_server,
    corpus,
    lookups,
    pool_frames,
)
from loadtest.drill.hostile.messages import HTTP_RANK, JSON, post
from loadtest.drill.hostile.target import without_id
from loadtest.workloads.catalog import BenchShape
from serving.api.grpc import wire
from serving.proto.inference import open_inference_pb2
from serving.proto.shardrank.v1 import ranking_pb2
from shard_node.wire.frame import HEADER

SHAPE = BenchShape(features=3, embedding_dim=8, rows=200, dense=2)
corpora = st.lists(st.binary(min_size=1, max_size=200), min_size=1, max_size=5)


@given(seed=st.text(max_size=8), requests=corpora, keep=st.integers(0, 20))
def test_the_same_seed_gives_the_same_mutations(seed, requests, keep):
    one, other = (Mutator(seed, requests, keep) for _ in range(2))
    made = [one.next() for _ in range(30)]
    assert made == [other.next() for _ in range(30)]
    kept = {request[:keep] for request in requests}
    assert all(any(one.startswith(begin) for begin in kept) for one in made)


def test_mutations_change_most_requests_and_differ():
    made = [Mutator("0", [b"a request of some length"]).next() for _ in range(2)]
    assert made[0] == made[1]
    mutator = Mutator("0", [b"a request of some length", b"another one, with 17 digits"])
    assert len({mutator.next() for _ in range(1000)}) > 800


@given(seed=st.integers(0, 2**32), data=st.binary(min_size=1, max_size=100))
@pytest.mark.parametrize("name", list(MUTATIONS))
def test_a_mutation_takes_any_request(name, seed, data):
    rng = random.Random(seed)
    at = rng.randrange(len(data))
    first, end, instead = MUTATIONS[name](rng, data, at, [data, b"x"])
    assert at <= first <= end
    assert len(instead) <= 300


def test_up_to_four_bits_are_flipped():
    rng, data = random.Random(0), bytes(range(20))
    seen = set()
    for at in [*range(20)] * 20:
        first, end, instead = MUTATIONS["flip up to four bits"](rng, data, at, [data])
        made = data[:first] + instead + data[end:]
        assert len(made) == len(data)
        seen.add((int.from_bytes(made, "big") ^ int.from_bytes(data, "big")).bit_count())
    assert seen == {1, 2, 3, 4}


def test_corpora_are_valid_requests():
    for body in corpus(SHAPE, "json"):
        assert {len(bags) for bags in json.loads(body)["candidates"]["sparse"].values()} <= {1, 2, 3}
    assert all(json.loads(body)["sparse"] for body in lookups(SHAPE))
    for body in corpus(SHAPE, "grpc-packed"):
        request = ranking_pb2.RankRequest.FromString(body)
        assert len(request.packed.candidate_dense) == 4 * SHAPE.dense * request.num_candidates
    for frame in pool_frames(SHAPE, "m"):
        assert HEADER.unpack_from(frame)[4] == len(frame) - HEADER.size
    assert sum(SHARES.values()) == pytest.approx(1)


@pytest.mark.parametrize("answer", ["HTTP 500", "HTTP 502", "INTERNAL", "UNKNOWN", "wire 500", "grpc 99"])
def test_an_answer_that_blames_the_server_is_wrong(answer):
    assert blames_server(answer)


@pytest.mark.parametrize(
    "answer", ["HTTP 400", "HTTP 503", "HTTP 504", "DEADLINE_EXCEEDED", "OK", "wire 400", "closed"]
)
def test_other_answers_are_not(answer):
    assert not blames_server(answer)


@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=5), cut=st.integers(1, 40))
def test_responses_are_cut_wherever_they_arrive(sizes, cut):
    whole = b"".join(b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n%s" % (400 + n, n, b"y" * n) for n in sizes)
    responses = Responses()
    found = [one for first in range(0, len(whole), cut) for one in responses.feed(whole[first : first + cut])]
    assert found == [400 + size for size in sizes]


def test_each_answer_is_told_with_the_body_that_got_it():
    bodies = MutatedRequests([(partial(post, HTTP_RANK, "m", JSON), Mutator("0", [b'{"a": 1}']))])
    data, count = bodies.batch()
    assert data.count(b"POST /v1/models/m:rank HTTP/1.1\r\n") == count
    first = bodies.feed(b"HTTP/1.1 400 x\r\ncontent-length: 0\r\n\r\n")
    assert [answer for answer, _ in first] == ["HTTP 400"]
    assert data.startswith(first[0][1])
    assert not bodies.done
    bodies.feed(b"HTTP/1.1 200 x\r\ncontent-length: 0\r\n\r\n" * (count - 1))
    assert bodies.done


def test_both_answers_on_a_connection_that_is_closed_are_those_of_the_mutated_request():
    requests = MutatedRequests([(bytes, Mutator("0", [b"GET / HTTP/1.1\r\n\r\n"]))], LAST_GET)
    data, count = requests.batch()
    assert count == 1
    assert data.endswith(LAST_GET)
    answers = requests.feed(b"HTTP/1.1 400 x\r\ncontent-length: 0\r\n\r\nHTTP/1.1 200 x\r\ncontent-length: 0\r\n\r\n")
    assert answers == [("HTTP 400", data.removesuffix(LAST_GET)), ("HTTP 200", data.removesuffix(LAST_GET))]
    assert not requests.done


def test_answers_are_compared_without_the_ids_that_a_server_draws():
    for answer_id in ("0a", "0b"):
        message = open_inference_pb2.ModelInferResponse(id=answer_id, model_name="m", raw_output_contents=[b"1234"])
        expected = open_inference_pb2.ModelInferResponse(model_name="m", raw_output_contents=[b"1234"])
        assert without_id("oip-grpc", message.SerializeToString()) == expected.SerializeToString()
        assert without_id("oip-http", b'{"id":"%s","outputs":[]}1234' % answer_id.encode()) == b'{"outputs":[]}1234'
    assert without_id("json", b'{"id":"0a"}') == b'{"id":"0a"}'


def test_calls_are_counted_against_the_window_of_the_server():
    calls = Calls([("/a/B", Mutator("0", [bytes(30_000)]))])
    _, count = calls.batch()
    assert count in (1, 2, 3)
    assert calls.feed(wire.window_update(0, 1)) == []
    answer = hpack.Encoder().encode([(b":status", b"200"), (b"grpc-status", b"3"), (b"grpc-message", b"a%20b")])
    told = calls.feed(wire.frame(wire.HEADERS, wire.END_HEADERS | wire.END_STREAM, 1, answer))
    assert [answer for answer, _ in told] == ["INVALID_ARGUMENT"]


def test_frames_to_a_node_have_true_lengths_and_ids_of_their_own_unless_headers_are_mutated():
    channel = Wire(Mutator("0", pool_frames(SHAPE, "m"), keep=HEADER.size), raw=False)
    data, count = channel.batch()
    found = []
    while data:
        _, _, _, request_id, size, _ = HEADER.unpack_from(data)
        found.append(request_id)
        data = data[HEADER.size + size :]
    assert found == [*range(1, count + 1), 2**63]
    assert not channel.done
    channel.feed(HEADER.pack(b"SHRK", 1, 4, 2**63, 0, 0))
    assert channel.done


def test_a_header_block_is_read_by_the_library():
    pairs = [(b":method", b"POST"), (b"x-long", b"y" * 5000)]
    assert [tuple(one) for one in hpack.Decoder().decode(h2.block(pairs), raw=True)] == pairs
    decoder = hpack.Decoder()
    decoder.decode(h2.header(b"x", b"y", indexed=True))
    assert [tuple(one) for one in decoder.decode(b"\xbe", raw=True)] == [(b"x", b"y")]


@given(cut=st.integers(1, 60))
def test_an_answer_is_read_wherever_its_bytes_are_cut(cut):
    encoder, peer = hpack.Encoder(), h2.Http2Peer()
    stream = peer.open()
    whole = (
        wire.settings({wire.INITIAL_WINDOW_SIZE: 100})
        + wire.frame(wire.HEADERS, wire.END_HEADERS, stream, encoder.encode([(b":status", b"200")]))
        + wire.frame(wire.DATA, 0, stream, b"abc")
        + wire.frame(wire.HEADERS, wire.END_HEADERS | wire.END_STREAM, stream, encoder.encode([(b"grpc-status", b"0")]))
        + wire.frame(wire.PING, 0, 0, bytes(8))
        + wire.frame(wire.GOAWAY, 0, 0, struct.pack(">II", 1, 11))
    )
    for first in range(0, len(whole), cut):
        peer.feed(whole[first : first + cut])
    reply = peer.replies[stream]
    assert (str(reply), reply.ended, peer.goaway) == ("OK", True, 11)
    assert peer.initial_window == 100
    assert wire.frame(wire.PING, wire.ACK, 0, bytes(8)) in bytes(peer.out)


def test_mutated_frames_of_http2_are_over_with_the_answer_to_the_ping_behind_them():
    raw = RawHttp2(Mutator("0", [wire.frame(wire.HEADERS, wire.END_HEADERS, 1, b"x" * 50)]))
    data, count = raw.batch()
    assert count == 4
    assert data.endswith(wire.frame(wire.PING, 0, 0, b"drilling"))
    reset = wire.frame(wire.RST_STREAM, 0, 3, struct.pack(">I", 1))
    assert [answer for answer, _ in raw.feed(reset)] == ["RST_STREAM 1"]
    assert not raw.over
    raw.feed(wire.frame(wire.PING, wire.ACK, 0, b"drilling"))
    assert raw.over

"""Payloads: what a server's parser reads from the bytes is the request itself."""

from __future__ import annotations

import itertools
import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.errors import RequestFailedError
from loadtest.workloads.catalog import BenchShape, BenchWorkload, bench_payloads, open_workload
from loadtest.workloads.payloads import APIS, HEADER_LENGTH, MAX_POOL_BYTES, Api, Pool, changing_headers, drawn_payloads
from loadtest.workloads.workload import Workload
from serving.formats.infer import InferGrpcCodec, InferHttpCodec
from serving.formats.json_reader import JsonCodec
from serving.formats.messages import MessageCodec, encode_rank
from serving.limits import RequestLimits
from serving.proto.shardrank.v1 import ranking_pb2
from serving.results import RankResult
from shardrank_testing.serving_api import MODEL
from shardrank_testing.workloads import MixedWorkload, assert_same_request, read_payload

TIMEOUT_MS = 70


def small_workload(name: str):
    if name == "mixed":
        return MixedWorkload()
    return open_workload(name, candidates="3-9:5")


def pool_of(
    workload: Workload,
    api: Api,
    count: int,
    *,
    seed: int = 0,
    timeout_ms: int | None = None,
    max_bytes: int = MAX_POOL_BYTES,
) -> Pool:
    return Pool(api, "m", itertools.islice(drawn_payloads(workload, api, seed, timeout_ms), count), max_bytes)


def assert_read_back(workload: Workload, api: Api, seed: int) -> None:
    made, rng = pool_of(workload, api, 2, seed=seed, timeout_ms=TIMEOUT_MS), np.random.default_rng(seed)
    assert len(made) == 2
    for payload in made:
        request, found = workload.request(rng), read_payload(workload, api, payload)
        assert_same_request(found, request)
        assert payload.num_candidates == request.num_candidates
        assert found.timeout_s == pytest.approx(TIMEOUT_MS / 1000)


@pytest.mark.parametrize("api", APIS)
@given(candidates=st.integers(1, 12), max_hotness=st.integers(0, 5), seed=st.integers(0, 2**32 - 1))
def test_the_servers_parser_reads_any_request_back(api, candidates, max_hotness, seed):
    assert_read_back(MixedWorkload(candidates, max_hotness), api, seed)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", ["dlrm-v2:0.0001", "merlin-tiny:0.001"])
def test_the_servers_parser_reads_workloads_back(name, api):
    assert_read_back(small_workload(name), api, 3)


@pytest.mark.parametrize("api", APIS)
def test_payloads_follow_from_their_seed(api):
    first, again, other = (pool_of(small_workload("mixed"), api, 4, seed=seed) for seed in (1, 1, 2))
    assert list(first) == list(again)
    assert len({payload.body for payload in first} | {payload.body for payload in other}) == 8


def test_single_ids_are_flat_and_floats_are_short():
    body = json.loads(pool_of(open_workload("dlrm-v2:0.0001", candidates="5", varied=False), "json", 1)[0].body)
    candidates = body["candidates"]
    assert all(isinstance(one, int) for one in candidates["sparse"]["f2"])
    assert {len(bag) for bag in candidates["sparse"]["f0"]} == {3}
    assert max(len(repr(value)) for row in candidates["dense"] for value in row) <= len("-1.12345678e-05")
    assert "context" not in body


@pytest.mark.parametrize(
    ("api", "codec", "path"),
    [
        ("json", None, f"/v1/models/{MODEL}:rank"),
        ("grpc", MessageCodec("rank"), "/shardrank.v1.RankingService/Rank"),
        ("grpc-packed", MessageCodec("rank"), "/shardrank.v1.RankingService/Rank"),
        ("oip-http", None, f"/v2/models/{MODEL}/infer"),
        ("oip-grpc", InferGrpcCodec(), "/inference.GRPCInferenceService/ModelInfer"),
    ],
)
def test_a_path_or_a_message_names_the_model(api, codec, path):
    payload = pool_of(small_workload("mixed"), api, 1)[0]
    assert payload.path == path
    assert codec is None or codec.read(payload.body, RequestLimits()).model == MODEL


def test_a_packed_request_of_single_ids_has_no_lengths():
    shape = BenchShape(features=4, rows=9, candidates="5", varied=False)
    bench = BenchWorkload(shape=shape, head="mlp", hotness=1)
    message = ranking_pb2.RankRequest.FromString(bench_payloads(bench, "grpc-packed", 1)[0].body)
    assert message.packed.lengths == b""
    assert len(message.packed.ids) == 8 * 4 * 5


def test_headers_are_traces_and_ids_that_never_come_again():
    drawn = list(itertools.islice(changing_headers(True), 1000))
    traces, ids = zip(*(dict(headers).values() for headers in drawn), strict=True)
    assert {tuple(dict(headers)) for headers in drawn} == {("traceparent", "x-request-id")}
    assert all(re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-0[01]", trace) for trace in traces)
    assert 1 <= sum(trace.endswith("-01") for trace in traces) <= 25
    assert [len(set(column)) for column in zip(*(trace.split("-")[1:3] for trace in traces), strict=True)] == [1000] * 2
    assert len(set(ids)) == 1000
    assert next(changing_headers(True)) not in drawn
    assert list(itertools.islice(changing_headers(False), 3)) == [(), (), ()]


def test_memory_is_bounded_but_one_payload_is_always_made():
    workload = small_workload("dlrm-v2:0.0001")
    many = pool_of(workload, "grpc", 200, max_bytes=100_000)
    assert 1 < len(many) < 200
    assert sum(len(payload.body) for payload in many) <= 100_000
    assert len(pool_of(workload, "grpc", 200, max_bytes=1)) == 1


def answer(num_scores: int) -> RankResult:
    scores = np.linspace(0, 1, num_scores, dtype=np.float32)
    return RankResult("m", 7, scores, np.argsort(-scores), "id")


@pytest.mark.parametrize("num_scores", [1, 300])
def test_scores_are_read_from_the_server_s_answers(num_scores):
    expected, pools = answer(num_scores), {api: pool_of(small_workload("mixed"), api, 1) for api in APIS}
    over_http = InferHttpCodec(model=MODEL, header_length=dict(pools["oip-http"][0].headers)[HEADER_LENGTH])
    over_grpc = InferGrpcCodec()
    answers = {
        "json": JsonCodec().encode(expected).body,
        "grpc": encode_rank(expected),
        "grpc-packed": encode_rank(expected),
        "oip-http": over_http.read(pools["oip-http"][0].body, RequestLimits()).encode(expected).body,
        "oip-grpc": over_grpc.read(pools["oip-grpc"][0].body, RequestLimits()).encode(expected).body,
    }
    for api, pool in pools.items():
        np.testing.assert_allclose(pool.scores(answers[api]), expected.scores, rtol=1e-6, err_msg=api)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("body", [b"", b"{}", b'{"scores": "many"}', b"\xff\xff\xff", b'{"outputs": []}'])
def test_what_is_no_answer_has_no_scores(api, body):
    made = pool_of(small_workload("mixed"), api, 1)
    if api in ("grpc", "grpc-packed") and not body:
        # An empty message is one without scores, which are too few.
        assert len(made.scores(body)) == 0
        return
    with pytest.raises(RequestFailedError):
        made.scores(body)

"""Recorded requests: what was sent comes back, nothing else is in the folder, and the folder stays within its bound."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from prometheus_client.parser import text_string_to_metric_families

from loader.errors import ConfigError
from loader.snapshot.tables import fingerprint_strings
from router.feature_schema import FeatureSchema
from serving.errors import RecordingDamagedError
from serving.formats.messages import MessageCodec
from serving.formats.requests import RankRequest
from serving.formats.schema import RequestSchema
from serving.limits import RequestLimits
from serving.observe.recording import (
    FILES,
    RecordedRequest,
    RequestRecorder,
    last_requests,
    read_file,
    recorded_files,
)
from serving.rank.service import RankingService
from serving.results import RankResult
from shard_node.bags import Bags
from shardrank_testing.parsing import parse, parse_json
from shardrank_testing.serving_api import MODEL, ApiModel, api_request, api_spec, rank_message, run, running_api
from shardrank_testing.serving_api import api_service as service_of

SCHEMA = RequestSchema(FeatureSchema.of(api_spec()), RequestLimits())
SECRETS = ("tok-7f31c9", "user-key-b02d", "req-5a11ee", "traced-91aa")


def recorder(folder: Path, **options: Any) -> RequestRecorder:
    config = {"folder": folder, "share": 1.0, **options}
    return RequestRecorder(**config, clock=lambda: 100.0, wall_clock=lambda: 1_000_000.0)


def read_folder(folder: Path) -> list[RecordedRequest]:
    return [one for path in recorded_files(folder) for one in read_file(path)]


def answer_of(request: RankRequest, seed: int = 0, **fields: Any) -> RankResult:
    scores = np.random.default_rng(seed).random(request.num_candidates, np.float32)
    return RankResult(MODEL, 3, scores, np.argsort(-scores), **fields)


def bits(array: np.ndarray | None) -> object:
    # Weights of no ids are no weights.
    return None if array is None or not array.nbytes else (array.dtype, array.shape, array.tobytes())


def same(found: RecordedRequest, request: RankRequest, answer: RankResult) -> None:
    read = parse(SCHEMA, MessageCodec(model=MODEL), found.request)
    assert isinstance(read, RankRequest)
    for name in ("keys", "bags_per_key", "offsets", "values", "weights"):
        assert bits(getattr(read.bags, name)) == bits(getattr(request.bags, name)), name
    for name in ("context_dense", "candidate_dense"):
        assert bits(getattr(read, name)) == bits(getattr(request, name)), name
    assert read.num_candidates == request.num_candidates
    assert list(read.texts) == list(request.texts)
    assert bits(np.array(found.scores, np.float32)) == bits(answer.scores)
    stamps = answer.version, answer.delta_sequence, answer.dense_step
    assert (found.version, found.delta_sequence, found.dense_step) == stamps


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
NUMBERS = st.integers(1, 2**63 - 1)


@st.composite
def requests(draw: st.DrawFn) -> RankRequest:
    """Any that fits the schema: empty bags, extreme ids, weights or none, a text for each string id."""
    count = draw(st.integers(1, 5))
    bags_per_key = SCHEMA.bags_per_key(count)
    num_bags = int(bags_per_key.sum())
    lengths = (
        np.ones(num_bags, np.int64)
        if draw(st.booleans())
        else draw(hnp.arrays(np.int64, num_bags, elements=st.integers(0, 3)))
    )
    total = int(lengths.sum())
    values = draw(hnp.arrays(np.int64, total, elements=st.integers(0, 2**63 - 1)))
    weights = draw(st.none() | hnp.arrays(np.float32, total, elements=FLOATS))
    bags = Bags.from_lengths(SCHEMA.keys, bags_per_key, lengths, values, weights)
    if weights is not None:
        # Of features that take none all are 1, as requests bring it.
        weights[~np.repeat(SCHEMA.is_weighted, bags.values_per_key())] = 1
    is_text = np.repeat(SCHEMA.is_string, bags.values_per_key())
    num_texts = int(is_text.sum())
    texts = draw(st.lists(st.text(st.characters(codec="utf-8"), max_size=6), min_size=num_texts, max_size=num_texts))
    if texts:
        values[is_text] = fingerprint_strings(texts)
    context = draw(hnp.arrays(np.float32, SCHEMA.num_context_dense, elements=FLOATS))
    candidates = draw(hnp.arrays(np.float32, (count, SCHEMA.num_candidate_dense), elements=FLOATS))
    return RankRequest(bags, count, context, candidates, 1.0, texts=texts, request_id=SECRETS[2])


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(requests(), st.sampled_from([-1, 0]) | NUMBERS, NUMBERS)
def test_a_request_reads_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, request_: RankRequest, delta, step):
    folder, answer = tmp_path_factory.mktemp("r"), answer_of(request_, delta_sequence=delta, dense_step=step)
    with_one = recorder(folder)
    with_one.offer(SCHEMA, request_, answer, 102.5)
    with_one.close()
    (found,) = read_folder(folder)
    same(found, request_, answer)
    assert found.arrived_at == 1_000_002.5
    assert (found.model, found.schema_digest) == (MODEL, SCHEMA.features.digest)
    assert SECRETS[2].encode() not in recorded_files(folder)[0].read_bytes()


def test_requests_of_every_api_are_recorded_without_headers_and_keys(api_model: ApiModel, tmp_path: Path) -> None:
    # Nor bounds: a replay would be refused where no row is new any more.
    key = {"routing_key": SECRETS[1], "request_id": SECRETS[2], "min_sequence": 0}
    asked = [api_request(seed, 3 + seed) | key for seed in range(3)]
    headers = {"authorization": f"Bearer {SECRETS[0]}", "x-request-id": SECRETS[3], "traceparent": SECRETS[3]}

    async def ask_all(service: RankingService) -> list[list[float]]:
        async with running_api(service) as api:
            found = []
            for one in asked:
                told = await api.http.post(f"/v1/models/{MODEL}:rank", json=one, headers=headers)
                found.append(told.json()["scores"])
            told = await api.stub.Rank(rank_message(asked[0]), metadata=list(headers.items()))
            found.append(list(told.scores))
            # No rank requests that were answered.
            assert (await api.http.post(f"/v1/models/{MODEL}:rank", json={"candidates": {}})).status_code == 400
            await api.http.post(f"/v1/models/{MODEL}:lookup", json={"sparse": {"film": [[3]]}})
            return found

    with service_of(api_model) as service:
        own = RequestRecorder(tmp_path, 1.0, on_counted=service.metrics.recorded)
        service.on_ranked += (own.offer,)
        scores = run(ask_all(service))
        own.close()
        families = text_string_to_metric_families(service.metrics.render().decode())
        samples = {one.name: (one.labels, one.value) for family in families for one in family.samples}
    found = read_folder(tmp_path)
    assert [one.scores for one in found] == [np.array(one, np.float32).tolist() for one in scores]
    for one, sent in zip(found, [*asked, asked[0]], strict=True):
        expected = parse_json(SCHEMA, sent)
        given = np.array(one.scores, np.float32)
        same(one, expected, RankResult(MODEL, 1, given, given, delta_sequence=0))
        assert MessageCodec(model=MODEL).read(one.request, RequestLimits()).bound is None
    written = b"".join(path.read_bytes() for path in recorded_files(tmp_path))
    assert [secret for secret in SECRETS if secret.encode() in written] == []
    assert samples["shardrank_recorded_requests_total"] == ({"outcome": "written"}, 4.0)
    assert samples["shardrank_recorded_bytes_total"][1] == len(written)


def test_the_folder_stays_within_its_bound_and_keeps_the_newest(tmp_path: Path) -> None:
    request = parse_json(SCHEMA, api_request(0, 400))
    most, number = 1_000_000, 0
    for _ in range(2):
        own = recorder(tmp_path, max_bytes=most)
        for _ in range(80):
            own.offer(SCHEMA, request, answer_of(request, dense_step=number), 100.0)
            number += 1
        own.close()
        sizes = [path.stat().st_size for path in recorded_files(tmp_path)]
        assert most / 2 < sum(sizes) <= most
        assert max(sizes) <= most // FILES
    steps = [one.dense_step for one in read_folder(tmp_path)]
    assert steps == list(range(160 - len(steps), 160))
    assert len(steps) < 160
    last = last_requests(tmp_path, SCHEMA, 5, 1 << 30)
    assert [one.bags.values.tolist() for one in last] == 5 * [request.bags.values.tolist()]


def test_what_does_not_fit_is_dropped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []

    def offer(name: str, request: RankRequest, **limits: int) -> None:
        own = RequestRecorder(tmp_path / name, 1.0, on_counted=lambda *event: counted.append(event), **limits)
        own.offer(SCHEMA, request, answer_of(request), 0.0)
        own.close()
        assert read_folder(tmp_path / name) == []

    offer("small", parse_json(SCHEMA, api_request(0, 4000)), max_bytes=1_000_000)
    request = parse_json(SCHEMA, api_request(0, 1000))
    bags = request.bags
    with monkeypatch.context() as patch:
        patch.setattr("serving.observe.recording.MAX_LINE_BYTES", bags.values.nbytes)
        offer("long", request)
    # Scores and texts take room too.
    assert request.texts
    arrays = bags.values.nbytes + bags.offsets.nbytes + request.candidate_dense.nbytes
    monkeypatch.setattr("serving.observe.recording.MAX_QUEUED_BYTES", arrays + 4 * request.num_candidates)
    offer("full", request)
    assert counted == 3 * [("dropped", 1, 0)]


@pytest.fixture(scope="module")
def recorded_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("recorded")
    own = recorder(folder)
    for seed in range(3):
        request = parse_json(SCHEMA, api_request(seed))
        own.offer(SCHEMA, request, answer_of(request, seed), 101.0)
    own.close()
    return recorded_files(folder)[0].read_bytes()


def test_a_line_that_is_cut_off_is_the_end_of_a_file(recorded_file: bytes, tmp_path: Path) -> None:
    path, draw = tmp_path / "x.jsonl", Random(0)
    for cut in (0, len(recorded_file), *(draw.randrange(len(recorded_file)) for _ in range(40))):
        path.write_bytes(recorded_file[:cut])
        assert len(list(read_file(path))) == recorded_file[:cut].count(b"\n")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (b"{", b"{{", "line 2: JSON is malformed"),
        (b'"version":3', b'"version":"3"', "line 2: Expected `int`, got `str` - at `$.version`"),
        (b'"scores":[', b'"scores":[null,', "line 2: Expected `float`, got `null`"),
        (b'"schema_digest"', b'"schema"', "line 2: Object missing required field `schema_digest`"),
        (b'"model":"', b'"model":"\xff', "line 2: "),
        (b'"request":', b'"request":' + b" " * 100_000, "line 2 has more than 100000 bytes"),
        (b"{", b'{"more":' + b"[" * 90_000, "line 2: maximum recursion depth exceeded"),
    ],
)
def test_lines_that_no_recorder_wrote_are_refused_by_number(
    old: bytes, new: bytes, problem: str, recorded_file: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To warm a version what stands before them is taken."""
    monkeypatch.setattr("serving.observe.recording.MAX_LINE_BYTES", 100_000)
    first, second, _ = recorded_file.splitlines(keepends=True)
    (tmp_path / "0.jsonl").write_bytes(first + second.replace(old, new, 1))
    with pytest.raises(RecordingDamagedError, match=re.escape(problem)):
        list(read_file(tmp_path / "0.jsonl"))
    assert len(last_requests(tmp_path, SCHEMA, 5, 1 << 30)) == 1


def test_what_no_server_of_today_would_take_warms_no_version(tmp_path: Path) -> None:
    with closing(recorder(tmp_path)) as own:
        for seed, count in ((0, 3), (1, 40), (2, 4)):
            request = parse_json(SCHEMA, api_request(seed, count))
            own.offer(SCHEMA, request, answer_of(request), 100.0)
    (path,) = recorded_files(tmp_path)
    first, second, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second + third.replace(SCHEMA.features.digest.encode(), b"other"))
    smaller = RequestSchema(SCHEMA.features, RequestLimits(max_candidates=10))
    assert len(list(read_file(path))) == 3
    assert [one.num_candidates for one in last_requests(tmp_path, smaller, 5, 1 << 30)] == [3]


def test_recordings_are_for_their_owner_alone(tmp_path: Path) -> None:
    """Whatever the umask, the folder of a worker and the one around it too."""
    request, before = parse_json(SCHEMA, api_request(0)), os.umask(0)
    with closing(recorder(tmp_path / "r" / "0")) as own:
        own.offer(SCHEMA, request, answer_of(request), 100.0)
    os.umask(before)
    assert sorted(path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")) == [0o600, 0o700, 0o700]


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="File exists"):
        recorder(tmp_path / "file")


def test_two_processes_that_share_a_folder_write_files_of_their_own(tmp_path: Path) -> None:
    request = parse_json(SCHEMA, api_request(0))
    for own in (first := recorder(tmp_path), second := recorder(tmp_path)):
        own.offer(SCHEMA, request, answer_of(request), 100.0)
        own.close()
    assert first is not second
    assert [len(list(read_file(path))) for path in recorded_files(tmp_path)] == [1, 1]


def test_a_failing_disk_is_reported_once_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "serving")
    outcomes, times, draws, folder = SimpleQueue[str](), [0.0], [0.5], tmp_path / "r"
    request = parse_json(SCHEMA, api_request(0))
    own = RequestRecorder(
        folder, 0.5, on_counted=lambda outcome, *_: outcomes.put(outcome), draw=lambda: draws[0], clock=lambda: times[0]
    )
    own.offer(SCHEMA, request, answer_of(request), 0.0)  # not drawn
    shutil.rmtree(folder)
    draws[0] = 0.4
    for times[0], outcome in ((1.0, "dropped"), (2.0, "dropped"), (20.0, "dropped"), (40.0, "written")):
        if outcome == "written":
            folder.mkdir()
        own.offer(SCHEMA, request, answer_of(request), times[0])
        assert outcomes.get(timeout=10) == outcome
    own.close()
    assert len(re.findall(r"requests are not recorded: \[Errno 2\]", caplog.text)) == 1
    assert caplog.text.count("requests are recorded again") == 1
    assert len(read_folder(folder)) == 1

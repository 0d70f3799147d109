"""Verdicts on made-up numbers."""

from __future__ import annotations

import pytest

from loadtest.drill.hostile.catalog import ATTACKS, Attack, attack_named
from loadtest.drill.hostile.report import FuzzResult, HostileReport, Seen, hostile_report, judge

MB = 1_000_000
MESSAGE = attack_named("grpc-outputs")
FLOOD = attack_named("h2-ping")
STEADY_MS = 8.0


def seen(**changed: object) -> Seen:
    values: dict[str, object] = {
        "bytes_sent": 16_000,
        "messages": 3,
        "connections": 3,
        "answers": {"INVALID_ARGUMENT": 3},
        "ends": {},
        "stalls_ms": (12.0, 400.0, 14.0),
        "valid_requests": 1200,
        "valid_failures": 0,
        "valid_p99_ms": 20.0,
        "seconds": 30.0,
        "memory_before_bytes": 400 * MB,
        "memory_peak_bytes": 900 * MB,
        "memory_after_bytes": 410 * MB,
    }
    return Seen.model_validate(values | changed)


def problems(attack: Attack, **changed: object) -> tuple[str, ...]:
    result = judge(attack, seen(**changed), STEADY_MS)
    assert result.passed == (not result.problems)
    return result.problems


def test_a_message_that_is_refused_and_stalls_nobody_passes():
    result = judge(MESSAGE, seen(), STEADY_MS)
    assert result.problems == ()
    # One stall of three is chance, a message's own comes each time.
    assert result.longest_stall_ms == 14.0
    assert (result.ended_by, result.row, result.kind) == ("INVALID_ARGUMENT ×3", "1", "message")


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"stalls_ms": (60.0, 51.0, 400.0)}, "the loop stood for 60 ms, allowed are 50"),
        ({"valid_failures": 2}, "2 of 1200 valid requests failed"),
        ({"answers": {"OK": 3}}, "answered OK, must be refused"),
        ({"answers": {"INTERNAL": 1}}, "answered INTERNAL, must be refused"),
        ({"answers": {}, "ends": {"closed": 3}}, "no answer: closed"),
        ({"memory_after_bytes": 468 * MB}, "memory is 68 MB above before, allowed are 64 MiB"),
        ({"tracebacks": 1}, "1 tracebacks in the log"),
        ({"stopped": "the server has ended"}, "the server has ended"),
        ({"messages": 0, "answers": {}}, "nothing was sent"),
    ],
)
def test_what_a_message_must_not_do(changed, told):
    assert problems(MESSAGE, **changed) == (told,)


def test_json_of_its_full_limit_may_stall_for_100_ms():
    attack = attack_named("json-lookup-wrong-end")
    assert problems(attack, answers={"HTTP 400": 3}, stalls_ms=(99.0,)) == ()
    assert len(problems(attack, answers={"HTTP 400": 3}, stalls_ms=(101.0,))) == 1


def test_a_message_that_must_be_served_is_not_refused():
    attack = attack_named("http1-upgrade-h2c")
    assert problems(attack, answers={"HTTP 200": 3}) == ()
    assert problems(attack, answers={"HTTP 400": 3}) == ("answered HTTP 400, must be served",)


def test_a_message_that_costs_more_than_a_connection_may_is_refused_or_its_connection_ended():
    attack = attack_named("oip-deflate-empty-blocks")
    assert problems(attack, answers={}, ends={"reset": 3}) == ()
    assert problems(attack, answers={"HTTP 400": 3}) == ()
    assert problems(attack, answers={"HTTP 200": 3}) == ("answered HTTP 200, must be ended",)


@pytest.mark.parametrize("how", [{"ends": {"GOAWAY 11": 4}}, {"answers": {"HTTP 429": 1}}])
def test_a_flood_whose_source_is_ended_or_refused_passes(how):
    assert problems(FLOOD, **{"answers": {}, "stalls_ms": (500.0,), **how}) == ()


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"ends": {}, "answers": {"OK": 9}}, "the source was never ended or refused"),
        ({"valid_p99_ms": 24.1}, "p99 is 3.0 times that of steady, allowed are 3"),
        ({"valid_p99_ms": None}, "no valid request came due"),
        ({"log_lines": 400}, "400 lines in the log"),
    ],
)
def test_what_a_flood_must_not_do(changed, told):
    assert problems(FLOOD, **{"ends": {"closed": 1}, "answers": {}, **changed}) == (told,)


def test_load_that_is_answered_as_it_asks_need_not_be_ended():
    assert problems(attack_named("http1-metrics"), answers={"HTTP 200": 900}) == ()


def test_large_messages_that_were_refused_must_leave_no_memory_behind_however_their_source_was_ended():
    attack = attack_named("refused-grpc-int64")
    ends = {"reset": 100, "no connection: Connection refused": 500}
    assert problems(attack, answers={"INVALID_ARGUMENT": 400}, ends=ends, stalls_ms=(900.0,)) == ()
    assert len(problems(attack, memory_after_bytes=5_808 * MB)) == 1


def test_mutated_requests_are_judged_by_answers_tracebacks_memory_and_what_comes_after():
    good = FuzzResult(
        name="json",
        mutations=1000,
        seconds=1.0,
        answers={"HTTP 400": 1000},
        wrong_answers=0,
        tracebacks=0,
        same_answers=True,
        memory_before_bytes=MB,
        memory_after_bytes=2 * MB,
    )
    assert good.problems == ()
    changes = {"wrong_answers": 1, "tracebacks": 1, "same_answers": False, "memory_after_bytes": 100 * MB}
    bad = good.model_copy(update={**changes, "stopped": "ended"})
    assert len(bad.problems) == 5
    report = hostile_report(
        (judge(FLOOD, seen(), STEADY_MS), judge(MESSAGE, seen(valid_failures=1), STEADY_MS)),
        (good, bad),
        machine="m",
        seed=0,
        seconds=30,
        steady_p99_ms=STEADY_MS,
        steady_stall_ms=9,
        steady_requests=600,
    )
    assert len(report.problems) == 7
    assert report.problems[0] == "h2-ping: the source was never ended or refused"
    assert HostileReport.model_validate_json(report.model_dump_json()) == report


def test_every_row_that_is_an_attack_has_one_and_sources_have_addresses_of_their_own():
    assert {one.row for one in ATTACKS.values()} == {str(row) for row in range(1, 16)} | {"own"}
    assert len(ATTACKS) < 1000

"""What the drill found, and whether it is as it must be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from loader.snapshot.tables import Frozen
from loadtest.drill.hostile.catalog import Attack
from loadtest.drill.running import Report

MAX_RATIO_P99 = 3.0
MAX_MEMORY_GROWTH_BYTES = 64 << 20
# Lines in the server's log, of which a flood may cause some and not one for each of its messages.
MAX_LOG_LINES_PER_S = 10.0
SERVED = frozenset({"HTTP 200", "OK"})
REFUSED = frozenset(
    {
        "INVALID_ARGUMENT",
        "NOT_FOUND",
        "RESOURCE_EXHAUSTED",
        "FAILED_PRECONDITION",
        "OUT_OF_RANGE",
        "UNIMPLEMENTED",
        "PERMISSION_DENIED",
        "UNAUTHENTICATED",
    }
)
# How HTTP/2 says it of a stream that breaks its rules.
_PROTOCOL_ERRORS = frozenset({"RST_STREAM 1", "GOAWAY 1", "RST_STREAM 11", "GOAWAY 11"})


class AttackMeasures(Frozen):
    """What a record and what was seen of an attack have in common.

    Attributes:
        bytes_sent, messages: of the attacker.
        valid_requests, valid_failures, valid_p99_ms: of the valid clients, from the attack's begin to its end; latency
            from when requests were due.
        memory_before_bytes, memory_peak_bytes, memory_after_bytes: resident, of the server.
    """

    bytes_sent: int
    messages: int
    valid_requests: int
    valid_failures: int
    valid_p99_ms: float | None
    memory_before_bytes: int
    memory_peak_bytes: int
    memory_after_bytes: int


class Seen(AttackMeasures):
    """What was measured of one attack.

    Attributes:
        stalls_ms: longest time in which a probe got no answer, of each message or of the whole flood.
        log_lines, tracebacks: that the server wrote; 0 if its log isn't the drill's.
        failures: of the first valid requests that failed.
        stopped: why the attack was stopped before its end; empty if it was not.
    """

    connections: int
    answers: Mapping[str, int]
    ends: Mapping[str, int]
    stalls_ms: tuple[float, ...]
    seconds: float
    log_lines: int = 0
    tracebacks: int = 0
    failures: tuple[str, ...] = ()
    stopped: str = ""

    @property
    def longest_stall_ms(self) -> float:
        """Of a flood the longest; of a message that is sent several times the median, since other stalls are chance."""
        return float(np.median(self.stalls_ms)) if self.stalls_ms else 0.0

    @property
    def ended_by(self) -> str:
        """The most frequent answers and ends."""
        most = Counter({**self.answers, **self.ends}).most_common(3)
        return ", ".join(f"{name} ×{count}" if count > 1 else name for name, count in most)


class AttackResult(AttackMeasures):
    """One attack's record; `steady_p99_ms` is of the valid clients before, with the attackers' core busy."""

    name: str
    row: str
    kind: str
    ended_by: str
    longest_stall_ms: float
    steady_p99_ms: float
    passed: bool
    problems: tuple[str, ...]
    seen: Seen


class FuzzResult(Frozen):
    """What came of mutated requests of one kind.

    Attributes:
        wrong_answers: how many were statuses that no client's mistake may have; `examples` has requests that got them.
        tracebacks: in the server's log.
        same_answers: whether valid requests are answered as before, bit by bit.
        stopped: why it ended early; empty if it did not.
    """

    name: str
    mutations: int
    seconds: float
    answers: Mapping[str, int]
    wrong_answers: int
    tracebacks: int
    same_answers: bool
    memory_before_bytes: int
    memory_after_bytes: int
    examples: tuple[str, ...] = ()
    stopped: str = ""

    @property
    def problems(self) -> tuple[str, ...]:
        """What is not as it must be."""
        found = []
        if self.wrong_answers:
            found.append(f"{self.wrong_answers} answers blame the server")
        if self.tracebacks:
            found.append(f"{self.tracebacks} tracebacks in the log")
        if not self.same_answers:
            found.append("valid requests are not answered as before")
        found += memory_problems(self.memory_before_bytes, self.memory_after_bytes)
        return (*found, *((self.stopped,) if self.stopped else ()))


class HostileReport(Report):
    """What the drill found; `steady_*` is of valid clients and probes, with the attackers' core busy."""

    COLUMNS = (
        *("name", "row", "bytes_sent", "messages", "mutations", "seconds", "longest_stall_ms", "valid_failures"),
        *("valid_p99_ms", "wrong_answers", "tracebacks", "same_answers"),
        *("memory_before_bytes", "memory_peak_bytes", "memory_after_bytes", "ended_by", "passed"),
    )

    machine: str
    seed: int
    seconds: float
    steady_p99_ms: float
    steady_stall_ms: float
    steady_requests: int
    attacks: tuple[AttackResult, ...]
    fuzz: tuple[FuzzResult, ...] = ()


def hostile_report(attacks: Sequence[AttackResult], fuzz: Sequence[FuzzResult], **facts: Any) -> HostileReport:
    """Draw up the report; `facts` are its remaining fields."""
    problems = [f"{one.name}: {problem}" for one in attacks for problem in one.problems]
    problems += [f"fuzz {one.name}: {problem}" for one in fuzz for problem in one.problems]
    details = tuple(f"{one.name}: {example}" for one in fuzz for example in one.examples)
    return HostileReport(attacks=tuple(attacks), fuzz=tuple(fuzz), problems=tuple(problems), details=details, **facts)


def judge(attack: Attack, seen: Seen, steady_p99_ms: float) -> AttackResult:
    """Make the record of an attack."""
    problems = tuple(_problems(attack, seen, steady_p99_ms))
    return AttackResult(
        **seen.model_dump(include=set(AttackMeasures.model_fields)),
        name=attack.name,
        row=attack.row,
        kind=attack.kind,
        ended_by=seen.ended_by,
        longest_stall_ms=seen.longest_stall_ms,
        steady_p99_ms=steady_p99_ms,
        passed=not problems,
        problems=problems,
        seen=seen,
    )


def _problems(attack: Attack, seen: Seen, steady_p99_ms: float) -> Sequence[str]:
    found = [seen.stopped] if seen.stopped else []
    if seen.valid_failures:
        found.append(f"{seen.valid_failures} of {seen.valid_requests} valid requests failed")
    if not seen.messages and not seen.ends:
        found.append("nothing was sent")
    if attack.kind == "message" and seen.longest_stall_ms > attack.limit_ms:
        found.append(f"the loop stood for {seen.longest_stall_ms:.0f} ms, allowed are {attack.limit_ms:g}")
    if attack.kind != "flood":
        found += _answer_problems(attack, seen)
    if attack.kind == "flood":
        if seen.valid_p99_ms is None:
            found.append("no valid request came due")
        elif seen.valid_p99_ms > MAX_RATIO_P99 * steady_p99_ms:
            ratio = seen.valid_p99_ms / steady_p99_ms
            found.append(f"p99 is {ratio:.1f} times that of steady, allowed are {MAX_RATIO_P99:g}")
        if attack.must_end and not seen.ends and not any(_turns_away(answer) for answer in seen.answers):
            found.append("the source was never ended or refused")
    found += memory_problems(seen.memory_before_bytes, seen.memory_after_bytes)
    if seen.tracebacks:
        found.append(f"{seen.tracebacks} tracebacks in the log")
    if seen.log_lines > MAX_LOG_LINES_PER_S * (seen.seconds + 1):
        found.append(f"{seen.log_lines} lines in the log")
    return found


def _answer_problems(attack: Attack, seen: Seen) -> Sequence[str]:
    """Of messages: was the answer a clear one? An end without an answer is none, but for an address that waits."""
    wrong = {answer: count for answer, count in seen.answers.items() if not _fits(attack, answer)}
    ends = {how: count for how, count in seen.ends.items() if how not in _PROTOCOL_ERRORS}
    if attack.kind == "refused":
        # Whoever sends so much may be turned away.
        return [f"answered {name} ×{count}" for name, count in wrong.items()]
    found = [f"answered {name}, must be {attack.outcome}" for name in wrong]
    # Some rules of HTTP/1.1 leave nothing to say but the end of the connection, and a 400 may be lost with it.
    if attack.outcome == "served" or (attack.outcome != "ended" and not seen.answers):
        found += [f"no answer: {how}" for how in ends]
    return found


def _fits(attack: Attack, answer: str) -> bool:
    if attack.outcome == "any":
        return answer in SERVED or _is_refusal(answer)
    return answer in SERVED if attack.outcome == "served" else _is_refusal(answer)


def _is_refusal(answer: str) -> bool:
    is_4xx = answer.startswith("HTTP 4") and len(answer) == len("HTTP 4xx")
    return is_4xx or answer in REFUSED or answer in _PROTOCOL_ERRORS


def _turns_away(answer: str) -> bool:
    """Whether an answer to a flood refuses its source, not just a call as anybody's would be refused."""
    return answer.startswith("HTTP 4") or answer in ("HTTP 503", "RESOURCE_EXHAUSTED", "closed")


def memory_problems(before: int, after: int) -> list[str]:
    """Whether memory stayed."""
    if after - before <= MAX_MEMORY_GROWTH_BYTES:
        return []
    return [f"memory is {(after - before) / 1e6:.0f} MB above before, allowed are {MAX_MEMORY_GROWTH_BYTES >> 20} MiB"]

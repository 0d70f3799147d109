"""What was promised and what happened, as nobody in the fleet sees it all; and the rules that must hold.

See the list of invariants in docs/decisions/simulation.md.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from loader.deltas.batch import DeltaBatch
from loader.deltas.chain import NUM_PARTITIONS, Commit, entry_digest, is_commit
from loader.registry.registry import StreamEntry
from tests.simulation.model import NUM_ROWS, SCALE, VERSIONS, Code, decode, row_bits


class ViolationError(Exception):
    """A rule is broken; `rule` is its name."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule


@dataclass
class Attempt:
    """Rows that were offered to a stream, and as which deltas they were acknowledged."""

    base: int
    rows: list[int]
    by: str
    numbers: set[int] = field(default_factory=set)
    acknowledged: set[int] = field(default_factory=set)
    may_be_lost: bool = False


@dataclass(frozen=True)
class StreamRow:
    """The last writer of a row in a stream."""

    number: int
    stamp: int


@functools.lru_cache(maxsize=4096)
def _decoded(payload: bytes, rows: bytes) -> tuple[bytes, dict[int, int]]:
    stated: DeltaBatch | None
    if is_commit(payload):
        commit = Commit.decode(payload)
        partitions = np.ones(NUM_PARTITIONS, np.bool_)
        pieces = [rows[begin:end] for begin, end in commit.ranges(partitions)]
        stated = commit.decode_parts(partitions, pieces, {})[0]
    else:
        stated = DeltaBatch.decode(payload)
    stamps = {}
    if stated is not None:
        codes = np.rint(stated.stored.view(np.float32)[:, 0] / SCALE).astype(np.int64)
        stamps = dict(zip(stated.rows.tolist(), (codes >> 9 & 255).tolist(), strict=True))
    return entry_digest(payload), stamps


def entries_of(stream: dict[int, tuple[bytes, bytes]]) -> list[tuple[int, bytes, dict[int, int]]]:
    """Return number, digest and stamps by row of each entry of a stream, ascending."""
    return [(number, *_decoded(*entry)) for number, entry in sorted(stream.items())]


class History:
    """Promises by stamp, dense steps by version, and answers judged."""

    def __init__(self) -> None:
        self.attempts: dict[int, Attempt] = {}
        self.required: dict[tuple[int, int], tuple[int, bytes, dict[int, StreamRow]]] = {}
        self.num_answers = 0
        # When each version answered requests that named none.
        self.answers_of: dict[int, list[float]] = defaultdict(list)

    def attempted(self, stamp: int, base: int, rows: list[int], by: str) -> None:
        """Note what a trainer is about to publish."""
        self.attempts.setdefault(stamp, Attempt(base, rows, by))

    def acknowledged(self, stamp: int, number: int) -> None:
        """Note that it was told that its rows are in the stream."""
        self.attempts[stamp].acknowledged.add(number)

    def lost_told(self, by: str, numbers: tuple[int, ...]) -> None:
        """Note which of its deltas a trainer was told to be lost."""
        for attempt in self.attempts.values():
            if attempt.acknowledged & set(numbers) or attempt.numbers & set(numbers):
                attempt.may_be_lost |= attempt.by == by

    def died(self, name: str) -> None:
        """Note that a trainer is gone, with what it remembered: whom a loss could be told."""
        for attempt in self.attempts.values():
            attempt.may_be_lost |= attempt.by == name

    def written(self, entry: StreamEntry, rows: bytes) -> None:
        """Note an entry that was written to a stream."""
        for number, _, stamps in entries_of({entry.sequence: (entry.payload, rows)}):
            for stamp in set(stamps.values()):
                if stamp in self.attempts:
                    self.attempts[stamp].numbers.add(number)

    def step_written(self, version: int, step: int, sequence: int, digest: str, stream: dict[int, Any]) -> None:
        """Note a dense step with what rows must have of the stream as it is now."""
        required: dict[int, StreamRow] = {}
        for number, _, stamps in entries_of(stream):
            if number <= sequence:
                required |= {row: StreamRow(number, stamp) for row, stamp in stamps.items()}
        self.required[version, step] = sequence, bytes.fromhex(digest), required

    def judge(self, answer: dict[str, Any], rows: list[int], digests: set[bytes]) -> str:
        """Judge an answer, with the digests of its stream; return what must not stay so. Raises ViolationError."""
        version, self.num_answers = answer["version"], self.num_answers + 1
        known = VERSIONS[version]
        codes = [decode(score) for score in answer["scores"]]
        if len(codes) != len(rows):
            raise ViolationError("mixed", f"{len(codes)} scores of {len(rows)} rows")
        if known.is_broken:
            raise ViolationError("refused version answers", f"version {version} has wrong golden scores")
        bits = row_bits(version, np.array(rows)).tolist()
        for row, code, expected in zip(rows, codes, bits, strict=True):
            self._judge_row(version, row, code, expected)
        steps = {code.dense_step for code in codes}
        if len(steps) > 1:
            raise ViolationError("mixed", f"dense steps {sorted(steps)} in one answer of version {version}")
        (step,) = steps
        return self._judge_step(version, step, dict(zip(rows, codes, strict=True)), digests) if step else ""

    def _judge_row(self, version: int, row: int, code: Code, bits: int) -> None:
        base = VERSIONS[version].base
        where = f"version {version}, row {row}: {code}"
        if code.dense_version != version or (code.stamp == 0 and code.row_version != version) or code.row != bits:
            raise ViolationError("mixed", where)
        if code.stamp:
            attempt = self.attempts.get(code.stamp)
            if attempt is None or row not in attempt.rows or code.row_version != base or attempt.base != base:
                raise ViolationError("rows of another stream", f"{where}, {attempt}")

    def _judge_step(self, version: int, step: int, codes: dict[int, Code], digests: set[bytes]) -> str:
        if (version, step) not in self.required:
            raise ViolationError("dense step", f"version {version} answers with step {step}, which was not published")
        sequence, digest, required = self.required[version, step]
        if digest and digest not in digests:
            return f"dense step {step} of version {version} answers, whose delta {sequence} is lost"
        for row, code in codes.items():
            needed = required.get(row)
            if needed is None or needed.number <= VERSIONS[version].last_delta or code.stamp == needed.stamp:
                continue
            there = self.attempts[code.stamp].numbers if code.stamp else set()
            if max(there, default=0) < needed.number:
                raise ViolationError(
                    "dense step over older rows",
                    f"version {version}, step {step} needs delta {sequence}: row {row} has stamp {code.stamp} of "
                    f"{sorted(there)}, needed is {needed}",
                )
        return ""

    def expected_rows(self, version: int, stream: dict[int, Any]) -> dict[int, int]:
        """Return by row the stamp that it must have in the end."""
        known = VERSIONS[version]
        stamps = dict.fromkeys(range(NUM_ROWS), 0)
        for number, _, of_entry in entries_of(stream):
            if number > known.last_delta:
                stamps |= of_entry
        return stamps

    def check_promises(self, streams: dict[int, dict[int, Any]], *, may_be_lost: bool) -> None:
        """Check that what was acknowledged is in its stream, or was told to be lost. Raises ViolationError."""
        for stamp, attempt in self.attempts.items():
            if not attempt.acknowledged or (attempt.may_be_lost and may_be_lost):
                continue
            there = {
                number for number, _, stamps in entries_of(streams.get(attempt.base, {})) if stamp in stamps.values()
            }
            if not there:
                raise ViolationError(
                    "acknowledged delta is lost",
                    f"stamp {stamp} of {attempt.by}, acknowledged as {attempt.acknowledged}",
                )

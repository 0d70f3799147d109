"""What was promised and what happened, as nobody in the fleet sees it all; and the rules that must hold.

See the list of invariants in docs/decisions/simulation.md.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from loader.deltas.batch import DELETE_KEYS, DeltaBatch
from loader.deltas.chain import NUM_PARTITIONS, Commit, entry_digest, is_commit
from loader.registry.registry import StreamEntry
from tests.simulation.model import EVERYTHING, KEYS, MARK, MISSING, SCALE, VERSIONS, Code, decode, row_bits, rows_of

Entries = list[tuple[int, bytes, dict[int, int]]]


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
    deletes: bool = False
    numbers: set[int] = field(default_factory=set)
    acknowledged: set[int] = field(default_factory=set)
    may_be_lost: bool = False


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
    if stated is not None and stated.operation == DELETE_KEYS:
        (mark,) = (key for key in stated.rows.tolist() if key >> 8 == MARK >> 8)
        stamps = {key: MARK - mark for key in stated.rows.tolist() if key != mark}
    elif stated is not None:
        codes = np.rint(stated.stored.view(np.float32)[:, 0] / SCALE).astype(np.int64)
        stamps = dict(zip(stated.rows.tolist(), (codes >> 9 & 255).tolist(), strict=True))
    return entry_digest(payload), stamps


def entries_of(stream: dict[int, tuple[bytes, bytes]]) -> Entries:
    """Return number, digest and stamps by row, below 0 of those taken out, of each entry of a stream, ascending."""
    return [(number, *_decoded(*entry)) for number, entry in sorted(stream.items())]


class History:
    """Promises by stamp, dense steps by version, and answers judged.

    Shards of versions that a fleet begins with take `capacity` keys; `keeps_all` is whether streams lose nothing.
    """

    def __init__(self, num_shards: int, capacity: int, *, keeps_all: bool) -> None:
        self._num_shards, self._capacity, self._keeps_all = num_shards, capacity, keeps_all
        self._contents: dict[int, tuple[Any, dict[int, list[tuple[int, int]]], dict[int, int]]] = {}
        self.attempts: dict[int, Attempt] = {}
        self._deletions = defaultdict[tuple[int, int], list[Attempt]](list)
        # By version and dense step: its delta, that one's digest, and number and stamp of the last writer of each row.
        self.required: dict[tuple[int, int], tuple[int, bytes, dict[int, tuple[int, int]]]] = {}
        self.num_answers = 0
        # When each version answered requests that named none.
        self.answers_of: dict[int, list[float]] = defaultdict(list)

    def attempted(self, stamp: int, base: int, rows: list[int], by: str, *, deletes: bool = False) -> None:
        """Note what a trainer is about to publish."""
        if stamp not in self.attempts:
            self.attempts[stamp] = attempt = Attempt(base, rows, by, deletes)
            for row in rows if deletes else ():
                self._deletions[base, row].append(attempt)

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
            for stamp in set(map(abs, stamps.values())):
                if stamp in self.attempts:
                    self.attempts[stamp].numbers.add(number)

    def step_written(self, version: int, step: int, sequence: int, digest: str, stream: dict[int, Any]) -> None:
        """Note a dense step with what rows must have of the stream as it is now."""
        required: dict[int, tuple[int, int]] = {}
        for number, _, stamps in entries_of(stream):
            if number <= sequence:
                required |= {row: (number, stamp) for row, stamp in stamps.items()}
        self.required[version, step] = sequence, bytes.fromhex(digest), required

    def judge(self, answer: dict[str, Any], rows: list[int], entries: Entries) -> str:
        """Judge an answer, with the entries of its stream; return what must not stay so. Raises ViolationError."""
        version, self.num_answers = answer["version"], self.num_answers + 1
        known = VERSIONS[version]
        codes = [decode(score) for score in answer["scores"]]
        if len(codes) != len(rows):
            raise ViolationError("mixed", f"{len(codes)} scores of {len(rows)} rows")
        if known.is_broken:
            raise ViolationError("refused version answers", f"version {version} has wrong golden scores")
        bits = row_bits(version, np.array(rows)).tolist()
        by_row = dict(zip(rows, codes, strict=True))
        for (row, code), expected in zip(by_row.items(), bits, strict=True):
            self._judge_row(version, row, code, expected)
        missing = [(at, row) for at, (row, code) in enumerate(by_row.items()) if code.seen == MISSING]
        told = answer.get("missing", {}).get("key", {"bags": [], "keys": []})
        if list(zip(told["bags"], told["keys"], strict=True)) != missing:
            raise ViolationError("missing keys not told", f"of version {version} {missing} are missing, {told} is told")
        if self._keeps_all:
            self._judge_sequence(version, answer["delta_sequence"], by_row, entries)
        steps = {code.dense_step for code in codes}
        if len(steps) > 1:
            raise ViolationError("mixed", f"dense steps {sorted(steps)} in one answer of version {version}")
        (step,) = steps
        return self._judge_step(version, step, by_row, {digest for _, digest, _ in entries}) if step else ""

    def _judge_row(self, version: int, row: int, code: Code, bits: int) -> None:
        base = VERSIONS[version].base
        where = f"version {version}, row {row}: {code}"
        if code.seen == MISSING:
            is_right = row in KEYS and (row not in VERSIONS[version].keys or self._deletions[base, row])
            if not is_right or code.dense_version != version:
                raise ViolationError("mixed", f"{where}, which is missing")
            return
        if code.dense_version != version or (code.stamp == 0 and code.row_version != version) or code.row != bits:
            raise ViolationError("mixed", where)
        if code.stamp:
            attempt = self.attempts.get(code.stamp)
            is_wrong = attempt is None or attempt.deletes or row not in attempt.rows or attempt.base != base
            if is_wrong or code.row_version != base:
                raise ViolationError("rows of another stream", f"{where}, {attempt}")

    def _judge_step(self, version: int, step: int, codes: dict[int, Code], digests: set[bytes]) -> str:
        if (version, step) not in self.required:
            raise ViolationError("dense step", f"version {version} answers with step {step}, which was not published")
        sequence, digest, required = self.required[version, step]
        if digest and digest not in digests:
            return f"dense step {step} of version {version} answers, whose delta {sequence} is lost"
        for row, code in codes.items():
            number, stamp = required.get(row, (0, 0))
            if number <= VERSIONS[version].last_delta or code.seen == max(stamp, MISSING):
                continue
            deletions = self._deletions[VERSIONS[version].base, row] if code.seen == MISSING else ()
            writers = deletions or ([self.attempts[code.stamp]] if code.stamp else ())
            there = set[int]().union(*(writer.numbers for writer in writers))
            if max(there, default=0) < number:
                says = f"row {row} has stamp {code.seen} of {sorted(there)}, needed is {stamp} of {number}"
                says = f"version {version}, step {step} needs delta {sequence}: {says}"
                raise ViolationError("dense step over older rows", says)
        return ""

    def _judge_sequence(self, version: int, sequence: int, codes: dict[int, Code], entries: Entries) -> None:
        writes, _ = self.contents(version, entries)
        for row, code in codes.items():
            wrote = writes[row]
            first = max(at for at, (number, _) in enumerate(wrote) if number <= sequence)
            if code.seen not in {max(stamp, MISSING) for _, stamp in wrote[first:]}:
                says = f"version {version} with delta {sequence}, row {row}: {code.seen}, not one of {wrote[first:]}"
                raise ViolationError("not the rows of its deltas", says)

    def contents(self, version: int, entries: Entries) -> tuple[dict[int, list[tuple[int, int]]], dict[int, int]]:
        """Return what rows of a version must be, and by shard the delta that has too many keys for it.

        By row it is numbers and stamps of its writers, 0 of the snapshot, stamps below 0 of what took it out. A shard
        that has refused a delta takes none that follow.
        """
        known, last = VERSIONS[version], entries[-1] if entries else None
        if version in self._contents and self._contents[version][0] == last:
            return self._contents[version][1:]
        writes = {row: [(0, MISSING if row in KEYS and row not in known.keys else 0)] for row in EVERYTHING}
        shards, full = [rows_of(shard, self._num_shards) for shard in range(self._num_shards)], dict[int, int]()
        counts = [sum(key in rows for key in known.keys) for rows in shards]
        for number, _, stamps in entries:
            for shard, rows in enumerate(shards if number > known.last_delta else ()):
                mine = {row: stamp for row, stamp in stamps.items() if row in rows}
                added = sum((stamp > 0) - (writes[row][-1][1] >= 0) for row, stamp in mine.items())
                if shard in full or counts[shard] + added > known.capacity(self._capacity):
                    full.setdefault(shard, number)
                    continue
                counts[shard] += added
                for row, stamp in mine.items():
                    writes[row].append((number, stamp))
        self._contents[version] = last, writes, full
        return writes, full

    def check_promises(self, streams: dict[int, dict[int, Any]], *, may_be_lost: bool) -> None:
        """Check that what was acknowledged is in its stream, or was told to be lost. Raises ViolationError."""
        for stamp, attempt in self.attempts.items():
            if not attempt.acknowledged or (attempt.may_be_lost and may_be_lost):
                continue
            entries = entries_of(streams.get(attempt.base, {}))
            if not any(stamp in map(abs, stamps.values()) for _, _, stamps in entries):
                says = f"stamp {stamp} of {attempt.by}, acknowledged as {attempt.acknowledged}"
                raise ViolationError("acknowledged delta is lost", says)

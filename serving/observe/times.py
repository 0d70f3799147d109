"""The record of times that each call and each batch leaves. All that is told of either is made of it.

docs/profiling.md says what each stage is; the stages of a request follow each other without overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from router.embeddings import LookupTimes
from shard_node.generation import Generation

BEFORE_BATCH = ("receive", "decode", "parse", "queue")
IN_BATCH = ("merge", "map", "split", "shard_wait", "add", "rank", "answer")
AFTER_BATCH = ("hand_back", "encode")
STAGES = BEFORE_BATCH + IN_BATCH + AFTER_BATCH
"""All stages of a request, in order."""

NUM_BEFORE_BATCH = len(BEFORE_BATCH)
NUM_UNTIL_BATCH_END = NUM_BEFORE_BATCH + len(IN_BATCH)


@dataclass(slots=True, eq=False)
class BatchTimes:
    """Where the time of one batch went, in seconds. Every request in it has waited for all of it.

    Attributes:
        num_requests, num_candidates: in the batch; a lookup has no candidates.
        merge_s: its requests joined.
        lookup: its rows looked up, by part; None where that is part of ranking, on cards.
        lookup_s: the same in all; on cards, ids mapped and packed.
        rank_s: the dense model and its inputs.
        answer_s: scores checked, counted and sorted, answers made.
        ended: when the answers were there, monotonic seconds.
    """

    num_requests: int = 1
    num_candidates: int = 0
    merge_s: float = 0.0
    lookup: LookupTimes | None = None
    lookup_s: float = 0.0
    rank_s: float = 0.0
    answer_s: float = 0.0
    ended: float = 0.0

    def seconds(self) -> tuple[float, ...]:
        """By stage, in the order of `IN_BATCH`."""
        times = self.lookup
        if times is None:
            # On cards ids are mapped and packed by whoever ranks, and no shard is asked.
            return (self.merge_s, 0.0, 0.0, 0.0, 0.0, self.lookup_s + self.rank_s, self.answer_s)
        return (
            self.merge_s,
            times.map_s,
            times.split_s,
            times.shard_wait_s,
            times.add_s,
            self.rank_s,
            self.answer_s,
        )


class Counter(Protocol):
    """Counts the calls of one version."""

    def ended(self, call: Call, outcome: str | None, now: float, *, is_answered: bool) -> None:
        """Count a call."""
        ...


@dataclass(slots=True, eq=False)
class Call:
    """One call of an API, while it is handled and when it has ended. Times are monotonic seconds, 0 until they are.

    Attributes:
        api: `http`, `grpc`, `oip_http`, `oip_grpc` or `embedded`.
        method: `rank`, `lookup` or `model`.
        began: when it came.
        model: name of the served model, once it is known; never what a client made up.
        version: the version that answers it, once that is chosen.
        counter, generation: of that version.
        received: when its request had come in full.
        leased: when the version was chosen.
        parsed: when its request was parsed.
        queue_s: seconds that it waited for a replica.
        batch: that it was in, once that is answered.
        answered: when the call went on with the answer.
        encoded: when that was bytes.
        admitted: whether it is complete and counts towards `max_in_flight`; until then towards `max_receiving`.
    """

    api: str
    method: str
    began: float
    model: str = ""
    version: int = 0
    counter: Counter | None = None
    generation: Generation[Any] | None = None
    received: float = 0.0
    leased: float = 0.0
    parsed: float = 0.0
    queue_s: float = 0.0
    batch: BatchTimes | None = None
    answered: float = 0.0
    encoded: float = 0.0
    admitted: bool = False

    def around_batch(self) -> tuple[float, ...]:
        """Seconds in each stage of `BEFORE_BATCH` and of `AFTER_BATCH`, of a call with a batch that was answered."""
        hand_back_s = self.answered - self.batch.ended if self.batch is not None else 0.0
        return (
            self.received - self.began,
            self.leased - self.received,
            self.parsed - self.leased,
            self.queue_s,
            hand_back_s,
            self.encoded - self.answered,
        )

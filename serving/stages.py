"""The stages that a request goes through, and the times of a batch.

`/metrics` shows them as `shardrank_stage_seconds`; `serving.stage_account` adds them up to the whole. docs/profiling.md
says what each one is.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.embeddings import LookupTimes

BEFORE_BATCH = ("receive", "decode", "parse", "queue")
IN_BATCH = ("merge", "map", "split", "shard_wait", "add", "rank", "answer")
AFTER_BATCH = ("hand_back", "encode")
STAGES = BEFORE_BATCH + IN_BATCH + AFTER_BATCH
"""All stages of a request, in order. They follow each other without overlap."""

NUM_BEFORE_BATCH = len(BEFORE_BATCH)
NUM_UNTIL_BATCH_END = NUM_BEFORE_BATCH + len(IN_BATCH)


@dataclass(slots=True, eq=False)
class BatchTimes:
    """Where the time of one batch went, in seconds. Every request in it has waited for all of it.

    Attributes:
        num_requests: in the batch.
        merge_s: its requests joined.
        lookup: its rows looked up; None where that is part of ranking, on cards.
        rank_s: the dense model and its inputs.
        answer_s: scores checked, counted and sorted, answers made.
        ended: when the answers were there, monotonic seconds.
    """

    num_requests: int = 1
    merge_s: float = 0.0
    lookup: LookupTimes | None = None
    rank_s: float = 0.0
    answer_s: float = 0.0
    ended: float = 0.0

    def seconds(self) -> tuple[float, ...]:
        """By stage, in the order of `IN_BATCH`."""
        looked_up = (0.0, 0.0, 0.0, 0.0)
        if (times := self.lookup) is not None:
            looked_up = (times.map_s, times.split_s, times.shard_wait_s, times.add_s)
        return (self.merge_s, *looked_up, self.rank_s, self.answer_s)

"""Whether what came back is an answer."""

from __future__ import annotations

from loader.errors import ShardrankError
from loadtest.load.outgoing import PayloadPool
from loadtest.load.recorder import OK, Recorder


class AnswerCheck:
    """Reads every answer that came with success: it must have one score for each candidate.

    Args:
        pool: of the requests.
        recorder: gives out codes of failures.
    """

    def __init__(self, pool: PayloadPool, recorder: Recorder) -> None:
        self._check = pool.check
        self._expected = [payload.num_candidates for payload in pool]
        self._recorder = recorder

    def __call__(self, number: int, body: bytes) -> int:
        """The code of an answer to request `number`."""
        try:
            scores = self._check(body)
        except ShardrankError as error:
            return self._recorder.failure("bad_answer", str(error))
        if scores != self._expected[number]:
            return self._recorder.failure(
                "bad_answer", f"{scores} scores for a request of {self._expected[number]} candidates"
            )
        return OK

"""mosec with dynamic batching. Its port and address come in mosec's own environment variables."""

from __future__ import annotations

import os

from mosec import Server, Worker
from torch_model import Scorer

MAX_WAIT_MS = 1
"""The smallest that mosec takes with batching."""


class MosecRanking(Worker):
    """Bytes in, bytes out."""

    resp_mime_type = "application/octet-stream"

    def __init__(self) -> None:
        super().__init__()
        self._scorer = Scorer(os.environ["PEER_WEIGHTS"])

    def deserialize(self, data: bytes) -> bytes:
        """Return the body: a batch reads it."""
        return data

    def serialize(self, data: bytes) -> bytes:
        """Return the scores, which are bytes already."""
        return data

    def forward(self, data: list[bytes]) -> list[bytes]:
        """Return the responses to a batch."""
        return self._scorer.answers(data)


if __name__ == "__main__":
    server, workers, batch = Server(), int(os.environ["PEER_WORKERS"]), int(os.environ["PEER_BATCH"])
    server.append_worker(MosecRanking, num=workers, max_batch_size=batch, max_wait_time=MAX_WAIT_MS)
    server.run()

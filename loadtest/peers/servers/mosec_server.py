"""mosec with dynamic batching. Its port and address come in mosec's own environment variables."""

from __future__ import annotations

from mosec import Server, Worker
from torch_model import Scorer, Settings

# Milliseconds that a batch which is not full waits at most; the smallest that mosec takes with batching.
MAX_WAIT_MS = 1


class MosecRanking(Worker):
    """Bytes in, bytes out."""

    resp_mime_type = "application/octet-stream"

    def __init__(self) -> None:
        super().__init__()
        self._scorer = Scorer(Settings.read().weights)

    def deserialize(self, data: bytes) -> bytes:
        """Left to the batch."""
        return data

    def serialize(self, data: bytes) -> bytes:
        """Return the scores are bytes already."""
        return data

    def forward(self, data: list[bytes] | bytes) -> list[bytes] | bytes:
        """One batch; without batching mosec gives one request."""
        return self._scorer.answers(data) if isinstance(data, list) else self._scorer.answer(data)


if __name__ == "__main__":
    settings = Settings.read()
    server = Server()
    wait_ms = MAX_WAIT_MS if settings.batch > 1 else 0
    server.append_worker(MosecRanking, num=settings.workers, max_batch_size=settings.batch, max_wait_time=wait_ms)
    server.run()

"""mosec with dynamic batching. Its port and address come in mosec's own environment variables."""

import os

from mosec import Server, Worker
from torch_model import Scorer


class MosecRanking(Worker):
    """Bytes in, bytes out."""

    resp_mime_type = "application/octet-stream"

    def __init__(self) -> None:
        super().__init__()
        self._scorer = Scorer(os.environ["PEER_WEIGHTS"])

    def forward(self, data: list[bytes]) -> list[bytes]:
        """Return the responses to a batch."""
        return self._scorer.answers(data)

    def deserialize(self, data: bytes) -> bytes:
        """Return the bytes, whichever buffer mosec has them in."""
        return bytes(data)

    serialize = deserialize


if __name__ == "__main__":
    server = Server()
    # 1 ms is the shortest wait that mosec takes with batching.
    batching = {"max_batch_size": 8, "max_wait_time": 1}
    server.append_worker(MosecRanking, num=int(os.environ["PEER_WORKERS"]), route="/rank", **batching)
    server.run()

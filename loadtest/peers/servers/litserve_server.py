"""LitServe with dynamic batching; as many API servers as workers."""

from typing import Annotated

import litserve
from fastapi import Body, Response
from torch_model import Scorer, Settings

# Seconds that a batch which is not full waits at most.
MAX_WAIT_S = 0.001


class LitServeRanking(litserve.LitAPI):
    """Bytes in, bytes out: FastAPI hands over the body as it is."""

    def setup(self, device: str) -> None:
        """In each worker."""
        self._scorer = Scorer(Settings.read().weights)

    def decode_request(self, request: Annotated[bytes, Body()]) -> bytes:
        """Left to the batch."""
        return request

    def predict(self, bodies: list[bytes] | bytes) -> list[bytes] | bytes:
        """One batch; without batching LitServe gives one request."""
        return self._scorer.answers(bodies) if isinstance(bodies, list) else self._scorer.answer(bodies)

    def encode_response(self, output: bytes) -> Response:
        """Return the scores."""
        return Response(output, media_type="application/octet-stream")


if __name__ == "__main__":
    settings = Settings.read()
    api = LitServeRanking(api_path="/rank", max_batch_size=settings.batch, batch_timeout=MAX_WAIT_S)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=settings.workers)
    server.run(
        host="127.0.0.1",
        port=settings.port,
        num_api_servers=settings.workers,
        log_level="warning",
        access_log=False,
        generate_client_file=False,
    )

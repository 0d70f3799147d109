"""FastAPI with the model in the handler, and uvicorn's own workers; no batching."""

import os

import uvicorn
from fastapi import FastAPI, Request, Response
from torch_model import Scorer

app = FastAPI()
# The process that starts the workers imports this file as well.
scorer = Scorer(os.environ["PEER_WEIGHTS"]) if __name__ != "__main__" else None


@app.post("/rank")
async def rank(request: Request) -> Response:
    """Scored in the event loop: a thread would only add a switch, since there is a process for each core."""
    return Response(scorer.answers([await request.body()])[0], media_type="application/octet-stream")


if __name__ == "__main__":
    port, workers = int(os.environ["PEER_PORT"]), int(os.environ["PEER_WORKERS"])
    uvicorn.run("fastapi_server:app", port=port, workers=workers, access_log=False, log_level="warning")

"""FastAPI with the model in the handler, and uvicorn's own workers; no batching."""

from __future__ import annotations

import uvicorn
from fastapi import FastAPI, Request, Response
from torch_model import Scorer, Settings

app = FastAPI()
settings = Settings.read()
# Only where requests are answered: the process that starts the workers imports this file as well.
scorer = Scorer(settings.weights) if __name__ != "__main__" else None


@app.post("/rank")
async def rank(request: Request) -> Response:
    """Scored in the event loop: a thread would only add a switch, since there is a process for each core."""
    assert scorer is not None
    return Response(scorer.answer(await request.body()), media_type="application/octet-stream")


if __name__ == "__main__":
    uvicorn.run(
        "fastapi_server:app",
        host="127.0.0.1",
        port=settings.port,
        workers=settings.workers,
        access_log=False,
        log_level="warning",
    )

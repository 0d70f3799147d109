"""What a comparison asks the process that keeps servers busy, beside `ServerLoad`."""

from __future__ import annotations

from pydantic import Field, TypeAdapter

from loader.manifest import Frozen
from loadtest.serving_cost.messages import ServerLoad


class ScoresAsked(Frozen):
    """What are a server's scores of one request of the pool? Answered with `Scores`."""

    http_port: int
    grpc_port: int
    request: int = Field(ge=0)


TO_CLIENT: TypeAdapter[ServerLoad | ScoresAsked] = TypeAdapter(ServerLoad | ScoresAsked)

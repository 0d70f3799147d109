"""The peers: what they are started with, and how they are asked."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal, TypeAlias

Body: TypeAlias = Literal["flat", "tensors"]
"""`flat`: `loadtest.peers.requests.flat_body`, answered with float32 scores. `tensors`: the Open Inference Protocol."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A server that is not shardrank.

    Attributes:
        name: also of its environment, its requirements and its server's file.
        title: in tables.
        path: that requests are posted to.
        body: of a request.
    """

    name: str
    title: str
    path: str
    body: Body

    @property
    def script(self) -> Path:
        """Run by the Python of the peer's environment."""
        return Path(str(files(__package__))) / "servers" / f"{self.name}_server.py"

    @property
    def requirements(self) -> Path:
        """For pip."""
        return Path(str(files(__package__))) / "requirements" / f"{self.name}.txt"

    def python(self, environments: Path) -> Path:
        """Of the peer's environment."""
        return environments / self.name / "bin" / "python"


PEERS = {
    peer.name: peer
    for peer in (
        Peer("fastapi", "FastAPI", "/rank", "flat"),
        Peer("mosec", "mosec", "/inference", "flat"),
        Peer("litserve", "LitServe", "/rank", "flat"),
        Peer("triton", "Triton", "/v2/models/rank/infer", "tensors"),
    )
}

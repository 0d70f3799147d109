"""The peers, and their environments, which venv and pip make."""

from __future__ import annotations

import subprocess
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loadtest.errors import PeerEnvironmentError

if TYPE_CHECKING:
    from loadtest.workloads.payloads import Encoding

FOLDER = Path(__file__).parent
PIP_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Peer:
    """A server that is not shardrank.

    Attributes:
        title: in tables.
        path: that requests are posted to.
        encodings: of a request, with all columns for each candidate, and with the context once.
    """

    title: str
    path: str
    encodings: tuple[Encoding, Encoding]

    @property
    def name(self) -> str:
        """The name of its environment, its requirements and its server's file."""
        return self.title.lower()

    @property
    def requirements(self) -> Path:
        """The file that pip reads."""
        return FOLDER / "requirements" / f"{self.name}.txt"

    def python(self, environments: Path) -> Path:
        """Return the Python of its environment. Raises PeerEnvironmentError: it is not installed."""
        python = environments / self.name / "bin" / "python"
        if not python.exists():
            how = "run `shardrank loadtest peers --install` with the same --env-dir, or choose others by --peer"
            raise PeerEnvironmentError(f"{environments} has no environment for {self.name}; {how}")
        return python

    def install(self, environments: Path) -> None:
        """Make its environment, or bring it to the pinned versions. Raises PeerEnvironmentError."""
        folder = environments / self.name
        try:
            if not (folder / "bin" / "python").exists():
                venv.create(folder, with_pip=True)
            pip = [str(self.python(environments)), "-m", "pip", "install", "--quiet", "-r", str(self.requirements)]
            subprocess.run(pip, timeout=PIP_TIMEOUT_S, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            raise PeerEnvironmentError(f"{folder}: {error}") from error


PEERS = {
    peer.name: peer
    for peer in (
        Peer("FastAPI", "/rank", ("flat", "flat-once")),
        Peer("mosec", "/inference", ("flat", "flat-once")),
        Peer("Triton", "/v2/models/rank/infer", ("tensors", "tensors-once")),
    )
}

"""The peers: what they are started with, how they are asked, and their environments, made by Python's venv and pip."""

from __future__ import annotations

import subprocess
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from loadtest.errors import PeerEnvironmentError

if TYPE_CHECKING:
    from loadtest.workloads.payloads import Encoding

Form: TypeAlias = Literal["all columns for each candidate", "context once"]
FORMS: tuple[Form, ...] = get_args(Form)
PIP_TIMEOUT_S = 1800.0
_LOG_TAIL = 2000


@dataclass(frozen=True, slots=True)
class Peer:
    """A server that is not shardrank.

    Attributes:
        name: also of its environment, its requirements and its server's file.
        title: in tables.
        path: that requests are posted to.
        body: how they are encoded, as `loadtest.workloads.payloads` names it.
        package: that pip installs it from.
    """

    name: str
    title: str
    path: str
    body: Literal["flat", "tensors"]
    package: str

    @property
    def forms(self) -> dict[Form, Encoding]:
        """List the ways to ask it: with all columns for each candidate, or with the context sent once."""
        if self.body == "flat":
            return {FORMS[0]: "flat", FORMS[1]: "flat-once"}
        return {FORMS[0]: "tensors", FORMS[1]: "tensors-once"}

    @property
    def script(self) -> Path:
        """Locate what the Python of the peer's environment runs."""
        return Path(str(files(__package__))) / "servers" / f"{self.name}_server.py"

    @property
    def requirements(self) -> Path:
        """Locate what pip reads."""
        return Path(str(files(__package__))) / "requirements" / f"{self.name}.txt"

    @property
    def pinned(self) -> str:
        """Read the version that its requirements ask for."""
        lines = self.requirements.read_text(encoding="utf-8").split()
        return next(line.partition("==")[2] for line in lines if line.partition("==")[0] == self.package)

    def python(self, environments: Path) -> Path:
        """Locate the Python of the peer's environment."""
        return environments / self.name / "bin" / "python"


PEERS = {
    peer.name: peer
    for peer in (
        Peer("fastapi", "FastAPI", "/rank", "flat", "fastapi"),
        Peer("mosec", "mosec", "/inference", "flat", "mosec"),
        Peer("litserve", "LitServe", "/rank", "flat", "litserve"),
        Peer("triton", "Triton", "/v2/models/rank/infer", "tensors", "nvidia-pytriton"),
    )
}


@dataclass(frozen=True, slots=True)
class FormTrial:
    """Both forms of a peer under full load, in turn, before the rounds.

    Attributes:
        requests_per_s: by form, the median of its loads.
    """

    peer: str
    hotness: int
    requests_per_s: Mapping[Form, float]

    @property
    def better(self) -> Form:
        """Name the form in which the peer is measured."""
        return max(self.requests_per_s, key=self.requests_per_s.__getitem__)

    @property
    def told(self) -> str:
        """Say what each form gave, and which is taken."""
        gave = ", ".join(f"{form} {value:.0f}/s" for form, value in self.requests_per_s.items())
        return f"{gave}; taken: {self.better}"


def install_peer(peer: Peer, environments: Path, say: Callable[[str], None]) -> None:
    """Make a peer's environment, or bring one that is there to the pinned versions.

    pip reads its own configuration and `PIP_*` variables, for instance for a torch without CUDA.

    Raises:
        PeerEnvironmentError: the folder can't be made, or pip fails.
    """
    folder = environments / peer.name
    say(f"{peer.title}: installing {peer.requirements.name} into {folder}")
    try:
        if not peer.python(environments).exists():
            venv.create(folder, with_pip=True)
        done = subprocess.run(
            [peer.python(environments), "-m", "pip", "install", "--quiet", "-r", peer.requirements],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PIP_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise PeerEnvironmentError(f"{folder}: {error}") from error
    if done.returncode:
        tail = done.stdout.decode(errors="replace")[-_LOG_TAIL:]
        raise PeerEnvironmentError(f"{peer.title}: pip has ended with exit code {done.returncode}:\n{tail}")


def installed_pythons(peers: Sequence[Peer], environments: Path) -> dict[str, Path]:
    """Find the Python of each peer, by name.

    Raises:
        PeerEnvironmentError: naming those that have none.
    """
    found = {peer.name: peer.python(environments) for peer in peers}
    if missing := [name for name, python in found.items() if not python.exists()]:
        raise PeerEnvironmentError(
            f"{environments} has no environment for {', '.join(missing)}; run `shardrank loadtest peers --install` "
            "with the same --env-dir, or choose others by --peer"
        )
    return found

"""The peers' virtual environments: one folder each, made by Python's venv and filled by pip."""

from __future__ import annotations

import subprocess
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

from loadtest.peers.catalog import Peer
from loadtest.peers.errors import PeerEnvironmentError

PIP_TIMEOUT_S = 1800.0

_LOG_TAIL = 2000


def install_peer(peer: Peer, environments: Path, say: Callable[[str], None]) -> None:
    """Makes a peer's environment, or brings one that is there to the pinned versions.

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
    """The Python of each peer, by name.

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

"""Peers' servers as processes: in their own environments, ready when they answer, ended with all they started."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil

from loadtest.peers.catalog import Peer
from loadtest.peers.errors import PeerServerError
from loadtest.peers.requests import PeerRequests
from loadtest.serving_cost.servers import HOST, Server
from loadtest.workloads import oip_payload
from shard_node.bags import Float32Array

START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 15.0
RETRY_S = 0.1
_LOG_TAIL = 2000


@contextlib.contextmanager
def peer_serving(
    peer: Peer, python: Path, weights: Path, first: PeerRequests, log: Path, *, workers: int, batch: int
) -> Iterator[Server]:
    """Serves the weights while the block runs.

    Args:
        peer: which.
        python: of its environment.
        weights: the file.
        first: requests of which one is asked until it is answered.
        log: gets all output.
        workers: processes that score, one thread each.
        batch: requests that are scored together at most, by a peer that can.

    Raises:
        PeerServerError: it ends, or does not answer in time.
    """
    port = _free_port()
    settings = {"WEIGHTS": weights.resolve(), "PORT": port, "WORKERS": workers, "BATCH": batch}
    environment = os.environ | {f"PEER_{name}": str(value) for name, value in settings.items()}
    # mosec takes its own address from here. The peer's environment alone is searched for modules.
    environment |= {"MOSEC_PORT": str(port), "MOSEC_ADDRESS": HOST, "PYTHONNOUSERSITE": "1"}
    environment.pop("PYTHONPATH", None)
    command = [str(python.absolute()), str(peer.script)]
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        except OSError as error:
            raise PeerServerError(f"{peer.title}: {python} can't be run: {error.strerror or error}") from error
        server = psutil.Process(process.pid)
        started: list[psutil.Process] = []
        try:
            _wait_until_it_answers(peer, process, port, first, log)
            started = server.children(recursive=True)
            yield Server(port, 0, (process.pid, *(one.pid for one in started)))
        finally:
            _stop(process, started)


def peer_scores(port: int, pool: PeerRequests, number: int) -> Float32Array:
    """The scores of one request, float32 [candidates].

    Raises:
        OSError: there is no answer, or one without success.
        http.client.HTTPException: the answer is not HTTP.
        ValueError: the answer is not scores.
    """
    url = f"http://{HOST}:{port}{pool.path}"
    post = urllib.request.Request(url, pool[number].body, dict(pool[number].headers))
    with urllib.request.urlopen(post, timeout=ANSWER_TIMEOUT_S) as response:
        body: bytes = response.read()
        header_bytes = response.headers.get(oip_payload.HEADER_LENGTH)
    # Behind the header, if there is one, lie the scores alone: the one output that was asked for.
    return np.frombuffer(body[int(header_bytes or 0) :], "<f4")


def check_peer(
    peer: Peer, server: Server, pool: PeerRequests, number: int, expected: Float32Array, most: float
) -> None:
    """Raises PeerServerError unless every score is within `most` of the expected one."""
    try:
        scores = peer_scores(server.http_port, pool, number)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise PeerServerError(f"{peer.title}: no scores to request {number}: {error}") from error
    if scores.shape != expected.shape:
        raise PeerServerError(f"{peer.title}: {scores.size} scores to request {number}, {expected.size} expected")
    if not (largest := float(np.abs(scores - expected).max())) <= most:
        raise PeerServerError(
            f"{peer.title}: scores of request {number} differ by up to {largest:.3g}, allowed is {most:g}"
        )


def _free_port() -> int:
    # Another program could take it before the peer does; then the peer ends, and says why.
    with socket.create_server((HOST, 0)) as held:
        port: int = held.getsockname()[1]
    return port


def _wait_until_it_answers(
    peer: Peer, process: subprocess.Popen[bytes], port: int, first: PeerRequests, log: Path
) -> None:
    ends, why = time.monotonic() + START_TIMEOUT_S, "no answer"
    while time.monotonic() < ends:
        if (code := process.poll()) is not None:
            raise PeerServerError(f"{peer.title} has ended with exit code {code} before it served:\n{_tail(log)}")
        try:
            peer_scores(port, first, 0)
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = str(error)
            time.sleep(RETRY_S)
        else:
            return
    raise PeerServerError(f"{peer.title} does not serve after {START_TIMEOUT_S:g} s: {why}\n{_tail(log)}")


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL:]


def _stop(process: subprocess.Popen[bytes], started: list[psutil.Process]) -> None:
    """SIGTERM to the server, then SIGKILL to all that is left of it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        started = list({*started, *psutil.Process(process.pid).children(recursive=True)})
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    # psutil knows a process by its start time too, so a number that is in use again is no process of ours.
    for one in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    if process.poll() is None:
        process.kill()
    process.wait()
    psutil.wait_procs(started, STOP_TIMEOUT_S)

"""The servers of a comparison: those that are quiet when nobody asks stay up, others run in their turn alone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import psutil

from loadtest.peers.catalog import PEERS
from loadtest.peers.config import PeersConfig, shardrank_arguments
from loadtest.peers.processes import peer_serving
from loadtest.peers.requests import PeerRequests
from loadtest.serving_cost.client_process import cpu_seconds
from loadtest.serving_cost.servers import Server, serving

SETTLE_S = 1.0
WATCH_S = 2.0
MAX_IDLE_CORES = 0.05
"""A server that takes more while nothing is asked of it would slow the others down."""

Entered = TypeVar("Entered")


class Started:
    """All servers; `with` ends them.

    Args:
        config: of the comparison.
        pythons: of each peer's environment, by name.
        weights: that peers read.
        snapshot: that shardrank serves.
        folder: for logs.
        say: told what is being done.
    """

    def __init__(
        self,
        config: PeersConfig,
        pythons: Mapping[str, Path],
        weights: Path,
        snapshot: Path,
        folder: Path,
        say: Callable[[str], None],
    ) -> None:
        self._config = config
        self._pythons = pythons
        self._weights = weights
        self._snapshot = snapshot
        self._folder = folder
        self._say = say
        self._stack = contextlib.ExitStack()
        self._up: dict[str, Server] = {}
        self._restless: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def enter(self, resource: AbstractContextManager[Entered]) -> Entered:
        """Has something else end with the servers, before them."""
        return self._stack.enter_context(resource)

    @contextlib.contextmanager
    def serving(self, name: str) -> Iterator[Server]:
        """A server that is up while the block runs, and alone with servers that are quiet.

        Args:
            name: of a peer, `shardrank` or `shardrank-grpc`; these two are one server.

        Raises:
            PeerServerError, HelperProcessError: it does not serve.
        """
        name = "shardrank" if name.startswith("shardrank") else name
        if name in self._up:
            yield self._up[name]
            return
        with contextlib.ExitStack() as stack:
            self._say(f"starting {name}")
            server = stack.enter_context(self._start(name))
            if name not in self._restless:
                idle_cores = _idle_cores(server)
                if idle_cores <= MAX_IDLE_CORES:
                    self._up[name] = server
                    self._stack.push(stack.pop_all())
                else:
                    self._say(f"{name} takes {idle_cores:.2f} of a core while idle: it runs in its turn alone")
                    self._restless.add(name)
            yield server

    def _start(self, name: str) -> AbstractContextManager[Server]:
        config, log = self._config, self._folder / f"{name}.log"
        if name == "shardrank":
            return serving("local", self._snapshot, shardrank_arguments(config), log)
        peer = PEERS[name]
        first = PeerRequests(config.shape, config.hotness[0], peer.path, peer.body)
        sizes = {"workers": config.workers, "batch": config.batch}
        return peer_serving(peer, self._pythons[name], self._weights, first, log, **sizes)


def _idle_cores(server: Server) -> float:
    time.sleep(SETTLE_S)
    processes = [psutil.Process(pid) for pid in server.process_ids]
    before = cpu_seconds(processes)
    time.sleep(WATCH_S)
    return (cpu_seconds(processes) - before) / WATCH_S

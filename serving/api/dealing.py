"""Dealing connections out evenly over worker processes that share a port.

The kernel chooses a worker for each connection by chance, now and then nearly always the same. A worker that accepts a
connection while another has fewer hands it on, by its descriptor, over a Unix socket (unix(7), SCM_RIGHTS). Counts are
in a file that all map; each number in it is written by one worker only, so that nothing has to be locked.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from loader.errors import ConfigError

WORKER_VARIABLE = "SHARDRANK_WORKER"
LAST_HANDED_S = 0.02
"""How long a worker that stops still takes what others hand it, who did not know it yet."""
_TAKES_A_TURN = 16


class Place(NamedTuple):
    """Which of the workers a process is, counted from 0, and a folder that they all can write to."""

    worker: int
    num_workers: int
    folder: Path

    @classmethod
    def here(cls) -> Place | None:
        """Find the place of this process; None if it shares its ports with nobody."""
        told = os.environ.get(WORKER_VARIABLE)
        if told is None:
            return None
        worker, num_workers, folder = told.split("/", 2)
        return cls(int(worker), int(num_workers), Path("/", folder))

    def __str__(self) -> str:
        return f"{self.worker}/{self.num_workers}{self.folder.absolute()}"


class Dealer:
    """Hands connections to the worker with the fewest, and others' to `take`, on one event loop. Raises ConfigError."""

    def __init__(self, place: Place, port: int, take: Callable[[socket.socket], None]) -> None:
        self._place, self._take = place, take
        own, self._worker = place.worker, place.worker
        try:
            # By way of its descriptor the folder may have a longer name than a socket's address has room for.
            self._folder = os.open(place.folder, os.O_RDONLY | os.O_DIRECTORY)
            self._paths = [f"/proc/self/fd/{self._folder}/{port}-{one}.sock" for one in range(place.num_workers)]
            # [worker]: whether it takes connections, how many it has, how many it has given to each, and had of each.
            shape = (place.num_workers, 2 + 2 * place.num_workers)
            with (place.folder / f"{port}-connections").open("ab") as file:
                file.truncate(8 * shape[0] * shape[1])
            counts = np.memmap(file.name, np.int64, "r+", shape=shape)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._paths[own])
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.bind(self._paths[own])
        except OSError as error:
            raise ConfigError(f"workers can't share connections in {place.folder}: {error}") from error
        self._socket.setblocking(False)
        self._is_taking, self._open = counts[:, 0], counts[:, 1]
        self._given, self._had = counts[:, 2 : 2 + place.num_workers], counts[:, 2 + place.num_workers :]
        # What was given to the process that was here before is lost with it.
        self._had[own] = self._given[:, own]
        self._open[own] = 0
        self._is_taking[own] = 1
        asyncio.get_running_loop().add_reader(self._socket, self._receive)

    def count(self, num_open: int) -> None:
        """Tell the others how many connections this worker has."""
        self._open[self._worker] = num_open

    def give(self, connection: socket.socket) -> bool:
        """Hand a connection to a worker that has fewer; False if none has, or it can't be reached."""
        own = self._worker
        # A connection that was given counts for the receiver before it knows of it.
        load = self._open + (self._given.T - self._had).sum(axis=1)
        load[self._is_taking == 0] = np.iinfo(np.int64).max
        fewer = np.flatnonzero(load < load[own])
        # `socket.send_fds` passes no address on.
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", connection.fileno()))]
        for other in fewer[load[fewer].argsort(kind="stable")].tolist():
            # Before it is sent: the receiver may run at once, and others look, while this process is stopped.
            self._given[own, other] += 1
            try:
                self._socket.sendmsg([bytes([own])], passed, 0, self._paths[other])
            except OSError:
                # It has ended, or its queue is full.
                self._given[own, other] -= 1
                continue
            connection.close()
            return True
        return False

    async def close(self) -> None:
        """Take what is on its way, then nothing more."""
        self._is_taking[self._worker] = 0
        await asyncio.sleep(LAST_HANDED_S)
        asyncio.get_running_loop().remove_reader(self._socket)
        while self._receive_one():
            pass
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._paths[self._worker])
        os.close(self._folder)

    def _receive(self) -> None:
        for _ in range(_TAKES_A_TURN):
            if not self._receive_one():
                return

    def _receive_one(self) -> bool:
        """Take one connection; False if there is none."""
        try:
            told, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        except OSError:
            return False
        if told:
            self._had[self._worker, told[0]] += 1
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                self._take(socket.socket(fileno=descriptor))
        return True

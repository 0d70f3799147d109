"""The processes that send, seen from the one that started them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from loadtest.load.config import LoadConfig, RunConfig
from loadtest.load.errors import GeneratorError, LoadConfigError
from loadtest.load.messages import FROM_PROCESS, Begin, Done, Failed, ProcessConfig, Ready, Status
from serving.fleet.process import PARENT_PID_VARIABLE
from serving.fleet.supervisor import describe_exit

READY_TIMEOUT_S = 600.0
# Beyond the end of sending and the timeout of the last request.
DONE_TIMEOUT_S = 60.0
# Between the order and the begin, for the order to reach every process.
LEAD_S = 0.3
MAX_LINE_BYTES = 256 << 20
LOG_TAIL_BYTES = 2000

OnStatus = Callable[[int, Status], None]
Said = TypeVar("Said")


@dataclass(frozen=True, slots=True)
class Measured:
    """What the processes measured in one run.

    Attributes:
        began: wall clock of its begin, seconds since 1970.
        done: of each process.
    """

    began: float
    done: tuple[Done, ...]


class Generators:
    """Processes that have made their requests and do one run after the other.

    Attributes:
        config: what they ask.
        ready: what each said about its requests.
    """

    def __init__(self, config: LoadConfig, processes: list[_Process], ready: tuple[Ready, ...]) -> None:
        self.config = config
        self.ready = ready
        self._processes = processes

    async def run(self, run: RunConfig, on_status: OnStatus = lambda process, status: None) -> Measured:
        """Does a run.

        Args:
            run: how.
            on_status: told what each process says meanwhile.

        Raises:
            GeneratorError: a process ended, or did not end its run.
            LoadConfigError: a process can't do it.
        """
        at = time.monotonic() + LEAD_S
        began = time.time() + LEAD_S
        line = Begin(run=run, at=at).model_dump_json().encode() + b"\n"
        for process in self._processes:
            process.write(line)
        limit_s = LEAD_S + run.until_s + self.config.timeout_ms / 1000 + DONE_TIMEOUT_S
        late = f"a process that sends did not end its run within {limit_s:.0f} s"
        done = await _all([process.until_done(on_status) for process in self._processes], limit_s, late)
        return Measured(began, done)


class _Process:
    def __init__(
        self, number: int, child: asyncio.subprocess.Process, transport: asyncio.SubprocessTransport, log: Path
    ) -> None:
        self.number = number
        self._child = child
        self._transport = transport
        self._log = log

    def write(self, line: bytes) -> None:
        assert self._child.stdin is not None
        # If it has ended, reading from it will tell why.
        with contextlib.suppress(OSError):
            self._child.stdin.write(line)

    async def until_ready(self) -> Ready:
        message = await self._read()
        if not isinstance(message, Ready):
            raise GeneratorError(f"process {self.number} that sends said {message.kind!r} before it was ready")
        return message

    async def until_done(self, on_status: OnStatus) -> Done:
        while not isinstance(message := await self._read(), Done):
            if isinstance(message, Status):
                on_status(self.number, message)
        return message

    async def _read(self) -> Ready | Status | Done:
        assert self._child.stdout is not None
        line = await self._child.stdout.readline()
        if not line.endswith(b"\n"):
            code = await self._child.wait()
            log = self._log.read_bytes()[-LOG_TAIL_BYTES:].decode("utf-8", "replace").strip()
            raise GeneratorError(f"process {self.number} that sends ended: {describe_exit(code)}\n{log}")
        message = FROM_PROCESS.validate_json(line)
        if isinstance(message, Failed):
            raise LoadConfigError(message.message)
        return message

    async def kill(self) -> None:
        # Its pipes too: what it has started may hold them open after it has ended, and waiting would wait for that.
        self._transport.close()
        await self._child.wait()


@contextlib.asynccontextmanager
async def running_generators(config: LoadConfig) -> AsyncIterator[Generators]:
    """Starts the processes, waits until all have made their requests, and ends them with the block.

    Raises:
        GeneratorError: a process ended, or did not get ready.
        LoadConfigError: the workload can't be opened.
    """
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shardrank-load-")))
        processes: list[_Process] = []
        for number in range(config.processes):
            process = await _start(ProcessConfig(load=config, process=number), folder)
            stack.push_async_callback(process.kill)
            processes.append(process)
        late = f"the requests were not made within {READY_TIMEOUT_S:.0f} s"
        yield Generators(
            config, processes, await _all([process.until_ready() for process in processes], READY_TIMEOUT_S, late)
        )


async def _all(waits: Sequence[Coroutine[Any, Any, Said]], limit_s: float, late: str) -> tuple[Said, ...]:
    """What every process says; the first that fails, or time that is up, fails all."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        async with asyncio.timeout(limit_s):
            return tuple(await asyncio.gather(*tasks))
    except TimeoutError as error:
        raise GeneratorError(late) from error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _start(config: ProcessConfig, folder: Path) -> _Process:
    settings, log = folder / f"{config.process}.json", folder / f"{config.process}.log"
    settings.write_text(config.model_dump_json(), encoding="utf-8")
    loop = asyncio.get_running_loop()
    with log.open("wb") as stderr:
        transport, protocol = await loop.subprocess_exec(
            lambda: asyncio.subprocess.SubprocessStreamProtocol(limit=MAX_LINE_BYTES, loop=loop),
            *(sys.executable, "-m", "loadtest.load.generator_process", str(settings)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            # One thread for matrix products that it never makes: none may spin beside the one that sends.
            env={**os.environ, PARENT_PID_VARIABLE: str(os.getpid()), "OMP_NUM_THREADS": "1"},
            # A terminal's Ctrl-C is for the process that started it.
            start_new_session=True,
        )
    return _Process(config.process, asyncio.subprocess.Process(transport, protocol, loop), transport, log)

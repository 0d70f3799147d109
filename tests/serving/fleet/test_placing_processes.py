"""How a fleet's processes run and end: parents, signals, and shared ports."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from loader.errors import ConfigError
from serving.fleet.process import PARENT_PID_VARIABLE
from serving.fleet.workers import connectable_host, shared_port
from shard_node.wire.address import MAX_UNIX_PATH_BYTES, Address

CHILD = """
import os, signal
from serving.fleet.process import die_with_parent
die_with_parent(os.environ)
print(os.getpid(), flush=True)
signal.pause()
"""
# Starts the child above, then waits to be killed.
PARENT = f"""
import os, signal, subprocess, sys
environment = dict(os.environ, {PARENT_PID_VARIABLE}=str(os.getpid()))
subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=environment)
signal.pause()
"""


def test_a_child_dies_with_a_parent_that_was_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout as output:
        child = int(output.readline())
        os.kill(child, 0)
        parent.kill()
        parent.wait()
        # The pipe closes when the last process that holds it is gone: that is the child.
        assert output.read() == ""


def test_a_child_whose_supervisor_is_gone_does_not_start() -> None:
    environment = {**os.environ, PARENT_PID_VARIABLE: "1234567890"}
    result = subprocess.run([sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stdout == ""


def test_a_shared_port_can_be_bound_again_with_reuseport_but_not_without() -> None:
    with shared_port("127.0.0.1", 0) as port:
        with socket.socket() as worker:
            worker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            worker.bind(("127.0.0.1", port))
            worker.listen()
            # The holder never listens, so every connection reaches the worker.
            for _ in range(20):
                with socket.create_connection(("127.0.0.1", port), timeout=5):
                    worker.accept()[0].close()
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))


def test_a_socket_path_that_the_kernel_would_cut_is_refused(tmp_path: Path) -> None:
    room = MAX_UNIX_PATH_BYTES - len(str(tmp_path)) - 1
    assert Address.parse(f"unix:{tmp_path}/{'x' * room}").path == str(tmp_path / ("x" * room))
    with pytest.raises(ConfigError, match="has 108 bytes, a Unix socket takes at most 107"):
        Address.parse(f"unix:{tmp_path}/{'x' * (room + 1)}")


@pytest.mark.parametrize(("host", "expected"), [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("10.0.0.7", "10.0.0.7")])
def test_a_wildcard_address_is_asked_over_loopback(host: str, expected: str) -> None:
    assert connectable_host(host) == expected


SIGNALLED = """
import asyncio, logging, sys
from serving.fleet.process import run_until_signalled

async def program():
    try:
        print("running", flush=True)
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        print("put away", flush=True)

logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s")
print(run_until_signalled(program), flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_program_clean_up_before_it_ends(number: signal.Signals) -> None:
    process = subprocess.Popen([sys.executable, "-c", SIGNALLED], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as output:
        assert output.readline() == "running\n"
        process.send_signal(number)
        assert output.read() == f"put away\nstopped by {number.name}\nNone\n"
    assert process.wait() == 0
